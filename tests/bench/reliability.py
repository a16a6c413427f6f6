"""Everything about reliability that is counted, and results/reliability.md out of it.

    PYTHONPATH=. python tests/bench/reliability.py [--only PART ...] [--crashes FOLDER] [--gigabytes 10]

Parts: outputs (fuzzed model outputs), growth (time of parsers against length), loop (trajectories
through the agent loop), advantages, folder (a large run). The kills are `crashes.py`'s, which takes
hours beside other work; --crashes names its folder. Figures are kept in results/bench/reliability.json,
so that parts may be run one at a time.
"""

import argparse
import asyncio
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import bench_advantages
import fuzz
from bench_rollout import LIMITS, Coroutines
from simulated import FORM, UTTERANCE, Chat, Server

from verl_multiturn.env import Env
from verl_multiturn.rollout.episode import Episode, Sample, Task
from verl_multiturn.rollout.layouts import LAYOUTS

ROOT = Path(__file__).parents[2]
FIGURES, PAGE = ROOT / "results" / "bench" / "reliability.json", ROOT / "results" / "reliability.md"
HERE = f"{Path(__file__).resolve()}:Thirty"
TURNS = 30


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
    """CPU seconds of four sizes, and the memory after each of ten steps of the largest."""

    async def go():
        side = Rollout(Server(scale=0))
        await side.rollout(range(64))
        sizes = [
            given.trajectories // 8,
            given.trajectories // 4,
            given.trajectories // 2,
            given.trajectories,
        ]
        cpu, memory, turns = [], [], 0
        for size in sizes:
            began = time.process_time()
            turns += await side.rollout(range(size))
            cpu.append(time.process_time() - began)
        for _ in range(10):
            turns += await side.rollout(range(given.trajectories))
            assert turns % TURNS == 0, "an episode was cut"
            gc.collect()
            memory.append(rss())
        side.server.task.cancel()
        return {
            "sizes": sizes,
            "cpu_seconds": cpu,
            "exponent": slope(sizes, cpu),
            "rss_mb": memory,
            "turns": turns,
        }

    return asyncio.run(go())


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


READ = """
import resource, sys, time
from verl_multiturn.runs import Run
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run, turns = Run(sys.argv[1]), 0
for step in run.steps("train"):
    for one in run.trajectories("train", step):
        turns += len(one["turns"])
print(turns, base // 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, time.process_time())
"""


def folder(given):
    """A run of so many gigabytes (its text repeats, so that it takes less on the disk), read whole."""
    from verl_multiturn.runs import RunWriter

    text = "You are in a room. " * 200
    turn = {"observation": text, "prompt": text, "text": "go", "action_ids": [7] * 30, "reward": 0.0}
    record = {"turns": [turn | {"index": t} for t in range(TURNS)]}
    size = len(json.dumps(record))
    per_step, steps = 256, max(1, round(given.gigabytes * 1e9 / size / 256))
    with tempfile.TemporaryDirectory() as place:
        with RunWriter(place) as writer:
            for step in range(steps):
                writer.trajectories("train", step, [record | {"trajectory": n} for n in range(per_step)])
        packed = sum(path.stat().st_size for path in Path(place).rglob("*.zst"))
        done = subprocess.run(
            [sys.executable, "-c", READ, place], capture_output=True, text=True, check=True, cwd=ROOT
        )
    turns, base, most, seconds = map(float, done.stdout.split())
    assert turns == steps * per_step * TURNS
    return {
        "unpacked_gb": size * per_step * steps / 1e9, "packed_gb": packed / 1e9, "steps": steps,
        "step_mb": size * per_step / 1e6, "base_mb": base, "most_mb": most, "cpu_seconds": seconds,
    }  # fmt: skip


PARTS = {"outputs": outputs, "growth": growth, "loop": loop, "advantages": advantages, "folder": folder}


def kills(place):
    """Tries and losses of crashes.py, one line per target."""
    lines = [json.loads(line) for line in (place / "crashes.jsonl").open()]
    audit = place / "audit.json"
    return {"tries": [line for line in lines if line["hit"]],
            "audit": json.loads(audit.read_text()) if audit.exists() else None}  # fmt: skip


def page(found):
    """The figures as text."""
    out = [
        "# Reliability",
        "",
        "Written by `python tests/bench/reliability.py`; figures: bench/reliability.json.",
        "",
    ]
    if one := found.get("outputs"):
        readers = one["readers"]
        tries, bad = sum(r["texts"] for r in readers.values()), sum(r["exceptions"] for r in readers.values())
        each = next(iter(readers.values()))["texts"]
        out += [
            "## Model outputs",
            "",
            f"{each:,} fuzzed texts through each of {len(readers)} readers ({', '.join(readers)}): {tries:,} "
            f"tries, {bad} exceptions.",
            "",
        ]
    if one := found.get("growth"):
        name, worst = max(one["parsers"].items(), key=lambda pair: pair[1]["times"])
        out += [
            f"CPU time of four times the length ({one['length']:,} to {4 * one['length']:,} characters of "
            f"one opening after another): at most {worst['times']:.1f} times ({name}, "
            f"{worst['text']!r}); 4 is "
            "linear, 16 quadratic; below 0.2 ms it is not told.",
            "",
        ]
    if one := found.get("loop"):
        cpu = [round(seconds, 1) for seconds in one["cpu_seconds"]]
        out += [
            "## Load",
            "",
            f"Agent loop, {TURNS} turns a trajectory, a server that answers at once: {one['turns']:,} turns; "
            f"CPU seconds for {one['sizes']} trajectories: {cpu}, exponent {one['exponent']:.2f}. "
            f"Memory after each of ten steps of {one['sizes'][-1]:,} trajectories, MB: "
            f"{', '.join(f'{mb:.0f}' for mb in one['rss_mb'])}.",
            "",
        ]
    if one := found.get("advantages"):
        out += [
            f"GiGPO's advantages, lists to numbers: CPU seconds for {one['rows']} turns: "
            f"{[round(s, 4) for s in one['cpu_seconds']]}, exponent {one['exponent']:.2f}.",
            "",
        ]
    if one := found.get("folder"):
        out += [
            f"A run folder of {one['unpacked_gb']:.2f} GB unpacked ({one['packed_gb']:.3f} GB on "
            "the disk, "
            f"{one['steps']} steps of {one['step_mb']:.0f} MB), read whole: at most "
            f"{one['most_mb']:.0f} MB of "
            f"memory ({one['base_mb']:.0f} before), {one['cpu_seconds']:.0f} s.",
            "",
        ]
    if one := found.get("kills"):
        out += [*_kills(one)]
    return "\n".join(out).rstrip() + "\n"


def _kills(one):
    tries = one["tries"]
    out = [
        "## Processes killed (SIGKILL) at a random moment",
        "",
        "| target | tries | went on | stopped | hung | slowest, s | without a sentence | left behind |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for target in dict.fromkeys(line["target"] for line in tries):
        mine = [line for line in tries if line["target"] == target]
        ends = Counter(line["outcome"] for line in mine)
        mute = sum(line["outcome"] == "stops" and not line["sentence"] for line in mine)
        left = sum(bool(line["left"]) for line in mine)
        slowest = max(line["seconds"] for line in mine)
        out.append(
            f"| {target} | {len(mine)} | {ends['continues']} | {ends['stops']} | {ends['hangs']} | "
            f"{slowest:g} | {mute} | {left} |"
        )
    out += [
        "",
        f"{len(tries)} tries in all. A killed driver cannot say anything: the next start and "
        "`verl-multiturn doctor RUN` do.",
        "",
    ]
    out += [f"* {line['target']}: {line['note']}" for line in tries if "note" in line]
    if audit := one["audit"]:
        out += ["After the last of them:", "", *(f"* {name}: {value}" for name, value in audit.items()), ""]
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, help="default: all parts")
    parser.add_argument("--crashes", type=Path, help="folder of crashes.py")
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--trajectories", type=int, default=4096)
    parser.add_argument("--gigabytes", type=float, default=10.0)
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
