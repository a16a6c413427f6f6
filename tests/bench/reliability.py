"""Everything about reliability that is counted, and results/reliability.md out of it.

    PYTHONPATH=. python tests/bench/reliability.py [--only PART] [--crashes FOLDER ...] [--gigabytes N ...]

Parts: outputs (fuzzed model outputs), growth (time of parsers against length), loop (trajectories
through the agent loop), memory and ways (steps of it), advantages, controller (all between verl's batch
and its updates), folder (a large run). The kills are `crashes.py`'s, which takes hours beside other work;
--crashes names its folder. Figures are kept in results/bench/reliability.json, so that parts may be run
one at a time.
"""

import argparse
import asyncio
import gc
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import bench_advantages
import fuzz
from bench_rollout import LIMITS, Coroutines
from reliability_page import TURNS, WAYS, page
from simulated import FORM, UTTERANCE, Chat, Server

from verl_multiturn.env import Env
from verl_multiturn.rollout import garbage
from verl_multiturn.rollout.episode import Episode, Sample, Task
from verl_multiturn.rollout.layouts import LAYOUTS

ROOT = Path(__file__).parents[2]
FIGURES, PAGE = ROOT / "results" / "bench" / "reliability.json", ROOT / "results" / "reliability.md"
HERE = f"{Path(__file__).resolve()}:Thirty"


class Thirty(Env):
    """Ends after 30 turns."""

    instruction = "Go on. Action: go."
    max_turns = TURNS

    def _reset(self, seed):
        self.left = TURNS
        return "at 0", {"task_type": "thirty"}

    def _step(self, action):
        self.left -= 1
        done = self.left == 0
        return f"{self.left} to go", float(done), done, {"valid": True, "success": done}

    def admissible(self):
        return ["go"]


class Rollout(Coroutines):
    """Episodes of exactly 30 turns, with a server that answers at once."""

    async def play(self, seed):
        async def generate(prompt_ids, max_tokens, sampling_seed):
            return Sample(await self.server.generate(8))

        episode = Episode(
            env_name=HERE, env_kwargs={}, task=Task(seed, str(seed), 0, seed),
            layout=LAYOUTS["turn"](self.policy, Chat(), LIMITS, 7), form=FORM, limits=LIMITS,
            pool=self.pool, generate=generate, decode=lambda ids: UTTERANCE,
        )  # fmt: skip
        return len((await episode.play()).turns)


def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def slope(sizes, seconds):
    """The exponent p of seconds ~ size^p, by least squares of the logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(s) for s in seconds]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def outputs(given):
    began = time.process_time()
    found, raised = fuzz.run(given.texts)
    return {
        "readers": {name: {"texts": n, "exceptions": bad} for name, (n, bad) in found.items()},
        "raised": raised, "cpu_seconds": time.process_time() - began,
    }  # fmt: skip


def growth(given):
    found = {name: {"times": times, "text": text} for name, (times, text) in fuzz.worst(16_000).items()}
    return {"length": 16_000, "parsers": found}


def loop(given):
    """CPU seconds of four sizes, as garbage is collected now and by Python's own thresholds, in turns."""
    sizes = [given.trajectories // part for part in (8, 4, 2, 1)]
    cpu, turns = {"ours": [], "python": []}, 0

    async def go():
        nonlocal turns
        side = Rollout(Server(scale=0))
        await side.rollout(range(64))
        ours = garbage.THRESHOLDS
        for size in sizes:
            for name, thresholds in (("python", gc.get_threshold()), ("ours", ours)):
                garbage.THRESHOLDS = thresholds
                began = time.process_time()
                turns += await side.rollout(range(size))
                cpu[name].append(time.process_time() - began)
        side.server.task.cancel()

    asyncio.run(go())
    exponents = {name: slope(sizes, seconds) for name, seconds in cpu.items()}
    return {"sizes": sizes, "cpu_seconds": cpu, "exponent": exponents, "turns": turns}


def memory(given):
    """The memory after each of ten steps of the same size, and the highest in between."""
    return _steps("ours", given.trajectories, 10)


def ways(given):
    """The same of four smaller steps, by what is done about garbage, in a process each."""
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return {way: pool.apply(_steps, (way, given.trajectories // 4, 4)) for way in WAYS}


def _steps(way, size, steps):
    garbage.THRESHOLDS = gc.get_threshold() if way == "python" else garbage.THRESHOLDS
    garbage.MANY = garbage.MANY if way == "ours" else math.inf

    async def go():
        side, after, turns = Rollout(Server(scale=0)), [], 0
        for _ in range(steps):
            turns += await side.rollout(range(size))
            assert turns % TURNS == 0, "an episode was cut"
            gc.collect()
            after.append(rss())
        side.server.task.cancel()
        return {"trajectories": size, "rss_mb": after, "turns": turns}

    found = asyncio.run(go())
    return found | {"highest_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def advantages(given):
    sizes = [1_000, 10_000, 100_000]
    cpu = []
    for rows in sizes:
        best = math.inf
        for seed in range(3):
            columns = bench_advantages.fresh(rows, seed)
            began = time.process_time()
            assert len(bench_advantages.ours(columns)) == rows
            best = min(best, time.process_time() - began)
        cpu.append(best)
    return {"rows": sizes, "cpu_seconds": cpu, "exponent": slope(sizes, cpu)}


def controller(given):
    """CPU seconds of each part of the trainer's own work in a step; the best of three batches."""
    from bench_controller import measure  # verl's imports would weigh on what is measured above

    sizes = [1_000, 10_000, 100_000]
    best = [min((measure(rows, seed) for seed in range(3)), key=lambda one: one["all"]) for rows in sizes]
    return {"rows": sizes, "cpu_seconds": best}


READ = """
import resource, sys, time
from verl_multiturn.runs import Run
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run, turns = Run(sys.argv[1]), 0
read = getattr(run, sys.argv[2])
for step in run.steps("train"):
    for one in read("train", step):
        turns += len(one["turns"])
print(turns, base // 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, time.process_time())
"""


def folder(given):
    """Runs of so many gigabytes, read whole: a step at a time, and a trajectory at a time."""
    return [_folder(gigabytes) for gigabytes in given.gigabytes]


def _folder(gigabytes):
    """One of them; its text repeats, so that it takes less on the disk."""
    from verl_multiturn.runs import RunWriter

    text = "You are in a room. " * 200
    turn = {"observation": text, "prompt": text, "text": "go", "action_ids": [7] * 30, "reward": 0.0}
    record = {"turns": [turn | {"index": t} for t in range(TURNS)]}
    size = len(json.dumps(record))
    per_step, steps = 256, max(1, round(gigabytes * 1e9 / size / 256))
    began = time.process_time()
    with tempfile.TemporaryDirectory() as place:
        with RunWriter(place) as writer:
            for step in range(steps):
                writer.trajectories("train", step, [record | {"trajectory": n} for n in range(per_step)])
        written = time.process_time() - began
        packed = sum(path.stat().st_size for path in Path(place).rglob("*.zst"))
        most, cpu = {}, {}
        for how in ("trajectories", "each"):
            command = [sys.executable, "-c", READ, place, how]
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
            turns, base, most[how], cpu[how] = map(float, done.stdout.split())
            assert turns == steps * per_step * TURNS
    return {
        "unpacked_gb": size * per_step * steps / 1e9, "packed_gb": packed / 1e9, "steps": steps,
        "step_mb": size * per_step / 1e6, "base_mb": base, "most_mb": most, "cpu_seconds": cpu,
        "writing_cpu_seconds": written,
    }  # fmt: skip


PARTS = {
    "outputs": outputs, "growth": growth, "loop": loop, "memory": memory, "ways": ways,
    "advantages": advantages, "controller": controller, "folder": folder,
}  # fmt: skip


def kills(places):
    """Tries and losses of crashes.py, one line per target; of several folders the first has the audit."""
    lines = [json.loads(line) for place in places for line in (place / "crashes.jsonl").open()]
    audit = places[0] / "audit.json"
    return {"tries": [line for line in lines if line["hit"]],
            "audit": json.loads(audit.read_text()) if audit.exists() else None}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, help="default: all parts")
    parser.add_argument("--crashes", type=Path, nargs="+", help="folders of crashes.py")
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--trajectories", type=int, default=4096)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1.0, 3.0, 10.0])
    given = parser.parse_args()
    found = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    for name in given.only or PARTS:
        found[name] = PARTS[name](given)
        FIGURES.write_text(json.dumps(found, indent=1) + "\n")
        print(name, "done", flush=True)
    if given.crashes:
        found["kills"] = kills(given.crashes)
        FIGURES.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page(found))
    sys.stdout.write(page(found))


if __name__ == "__main__":
    main()
