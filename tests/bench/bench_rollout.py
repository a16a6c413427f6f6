"""Rollout: lock-step against one coroutine per trajectory, on a simulated LLM server and slow environments.

    PYTHONPATH=. python tests/bench/bench_rollout.py [--json FILE] [--trajectories 128] [--repeats 3]

Both sides play the same tasks: same episode lengths, same latencies of the environment, same lengths of
the utterances, same server. Lock-step is what verl-agent, RAGEN and others do: a turn is one batch for
all, the environments wait for the longest completion, the server waits for the slowest environment, and
trajectories that have ended go on generating until the last one has. A third row leaves these requests
out, to tell the two costs apart.

The server batches continuously: a step gives every running request one token and takes
`STEP + PER_REQUEST x running` seconds; at most `CAPACITY` requests run, the others wait.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from simulated import FORM, HERE, MAX_TOKENS, MAX_TURNS, UTTERANCE, Chat, Server, draw_tokens

from verl_multiturn.env import make
from verl_multiturn.rollout.episode import Episode, Sample, Task
from verl_multiturn.rollout.layouts import LAYOUTS, Limits
from verl_multiturn.rollout.parsing import parse
from verl_multiturn.rollout.pool import EnvPool
from verl_multiturn.rollout.prompts import PromptPolicy, Templates, View

KINDS = ("lock-step", "lock-step, skip", "ours")


def policy():
    templates = Templates(first="{observation}", turn="{observation}", next="{observation}", history=0)
    return PromptPolicy(templates)


LIMITS = Limits(max_prompt_tokens=1000, max_response_tokens=10_000, max_action_tokens=MAX_TOKENS)


class Coroutines:
    """Ours: `Episode` and `EnvPool`, as the agent loop uses them."""

    def __init__(self, server, scale=1.0):
        self.server, self.pool, self.policy = server, EnvPool(64, 60.0), policy()
        self.kwargs = {"scale": scale}

    async def play(self, seed):
        turn = 0

        async def generate(prompt_ids, max_tokens, sampling_seed):
            nonlocal turn
            turn += 1
            return Sample(await self.server.generate(draw_tokens(seed, turn)))

        episode = Episode(
            env_name=HERE, env_kwargs=self.kwargs, task=Task(seed, str(seed), 0, seed),
            layout=LAYOUTS["turn"](self.policy, Chat(), LIMITS, 7), form=FORM, limits=LIMITS,
            pool=self.pool, generate=generate, decode=lambda ids: UTTERANCE,
        )  # fmt: skip
        return len((await episode.play()).turns)

    async def rollout(self, seeds):
        return sum(await asyncio.gather(*map(self.play, seeds)))


class LockStep:
    """The baseline; every environment has a thread of its own, so that only the waiting is measured."""

    def __init__(self, server, threads, skip, scale=1.0):
        self.server, self.policy, self.scale, self.skip = server, policy(), scale, skip
        self.executor = ThreadPoolExecutor(threads)

    async def rollout(self, seeds):
        loop, envs = asyncio.get_running_loop(), [make(HERE, scale=self.scale) for _ in seeds]
        first = await asyncio.gather(
            *(
                loop.run_in_executor(self.executor, env.reset, seed, seed)
                for env, seed in zip(envs, seeds, strict=True)
            )
        )
        views = [View(env.instruction, seen[0]) for env, seen in zip(envs, first, strict=True)]
        active, turns, turn = [True] * len(seeds), 0, 0
        while any(active):
            turn += 1
            asked = [k for k, on in enumerate(active) if on or not self.skip]
            for k in asked:
                self.policy.fit(views[k], Chat().build_initial_tokens, LIMITS.max_prompt_tokens)
            await asyncio.gather(*(self.server.generate(draw_tokens(seeds[k], turn)) for k in asked))
            acting = [k for k, on in enumerate(active) if on]
            action = parse(UTTERANCE, FORM).actions[0]
            steps = [loop.run_in_executor(self.executor, envs[k].step, action) for k in acting]
            for k, seen in zip(acting, await asyncio.gather(*steps), strict=True):
                views[k].past.append((views[k].observation, action))
                views[k].observation, turns = seen[0], turns + 1
                active[k] = not (seen[2] or seen[3])
        return turns


async def measure(kind, trajectories, first):
    server = Server()
    side = Coroutines(server) if kind == "ours" else LockStep(server, trajectories, "skip" in kind)
    started = time.perf_counter()
    turns = await side.rollout(range(first, first + trajectories))
    seconds = time.perf_counter() - started
    server.task.cancel()
    return {
        "turns": turns, "requests": server.requests, "wasted_requests": server.requests - turns,
        "seconds": seconds, "turns_per_second": turns / seconds, "server_busy": server.busy / seconds,
        "running": server.load / server.steps,
    }  # fmt: skip


async def overhead(trajectories):
    """Neither server nor environment takes time: what is left is ours, per turn."""
    server = Server(scale=0)
    side = Coroutines(server, scale=0)
    await side.rollout(range(trajectories))  # environments and threads exist now
    started, cpu = time.perf_counter(), time.process_time()
    turns = await side.rollout(range(trajectories))
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    server.task.cancel()
    return {"turns": turns, "us_wall": 1e6 * wall / turns, "us_cpu": 1e6 * cpu / turns}


def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def memory(sizes, wave):
    """RSS after so many trajectories in waves, and the highest with so many in flight at once."""
    server, found = Server(scale=0), {"waves": {}, "in_flight": {}}
    side, played = Coroutines(server, scale=0), 0
    for size in sizes:
        while played < size:
            await side.rollout(range(played, played + wave))
            played += wave
        gc.collect()
        found["waves"][size] = rss()
    for size in sizes:
        peak, playing = 0.0, asyncio.ensure_future(side.rollout(range(size)))
        while not playing.done():
            peak = max(peak, rss())
            await asyncio.wait([playing], timeout=0.05)
        found["in_flight"][size] = peak
    server.task.cancel()
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trajectories", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    # First: what the other parts leave behind would count.
    stored = asyncio.run(memory((512, 1024, 2048, 4096), 512))
    runs = []
    for repeat in range(given.repeats):
        first = 10_000 * repeat
        pair = {kind: asyncio.run(measure(kind, given.trajectories, first)) for kind in KINDS}
        assert len({side["turns"] for side in pair.values()}) == 1, "the sides played different episodes"
        assert pair["ours"]["wasted_requests"] == 0, "generated for a trajectory that had ended"
        runs.append(pair)
    print(f"{given.trajectories} trajectories, up to {MAX_TURNS} turns, {given.repeats} repeats (medians)")
    head = ("turns/s", "seconds", "requests", "wasted", "server busy", "batch")
    print(" " * 16 + "".join(f"{word:>13}" for word in head))
    names = ("turns_per_second", "seconds", "requests", "wasted_requests", "server_busy", "running")
    for kind in KINDS:
        cells = [statistics.median(run[kind][name] for run in runs) for name in names]
        print(f"{kind:16}" + "".join(f"{cell:13.{2 if cell < 1 else 1}f}" for cell in cells))
    ratios = {}
    for kind in KINDS[:-1]:
        ratios[kind] = [run["ours"]["turns_per_second"] / run[kind]["turns_per_second"] for run in runs]
        lowest = min(ratios[kind])
        print(f"ours / {kind}: {statistics.median(ratios[kind]):.2f} (lowest {lowest:.2f}, target 1.8)")
    own = asyncio.run(overhead(512))
    print(f"own cost of a turn: {own['us_cpu']:.0f} us of CPU, {own['us_wall']:.0f} us of wall time")
    for kind, sizes in stored.items():
        print(f"RSS, {kind}: " + ", ".join(f"{size}: {mb:.0f} MB" for size, mb in sizes.items()))
    if given.json:
        result = {"runs": runs, "ratios": ratios, "overhead": own, "memory_mb": stored}
        given.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
