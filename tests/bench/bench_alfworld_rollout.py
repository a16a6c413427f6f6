"""ALFWorld rollouts: our pool against one Ray actor per environment in lock-step, same policy, same games.

    PYTHONPATH=. python tests/bench/bench_alfworld_rollout.py [--games 16] [--group 8] [--json FILE]

The policy draws from the listed commands by (game, member, turn), so that all sides play the same
episodes; the language model is the simulated server of bench_rollout. Lock-step is what verl-agent does:
an actor with an engine per environment, a turn is one batch for all and one barrier. It is measured with
the stock engine, as there, and with ours, which tells the two gains apart. Memory is PSS of the
environments' processes (a shared page counts once).
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_pool import cost
from simulated import FORM, MAX_TOKENS, Server, draw_tokens

from verl_multiturn.env import derive_seed, make
from verl_multiturn.rollout.episode import Episode, Sample, Task
from verl_multiturn.rollout.layouts import LAYOUTS, Limits
from verl_multiturn.rollout.pool import EnvPool
from verl_multiturn.rollout.prompts import PromptPolicy, Templates

KINDS = ("actors, stock engine", "actors, our engine", "ours")
LIMITS = Limits(max_prompt_tokens=1000, max_response_tokens=10_000, max_action_tokens=MAX_TOKENS)


def choose(commands, game, member, turn):
    return commands[derive_seed("choice", game, member, turn) % len(commands)]


class Chat:
    """Prompts as numbers: the tokenizer is not what is measured."""

    def __init__(self):
        self.texts = []

    def build_initial_tokens(self, messages):
        self.texts.append(messages[-1]["content"])
        return [len(self.texts) - 1]


async def ours(games, kwargs, group):
    server, pool = Server(), EnvPool(64, 120.0)
    policy = PromptPolicy(
        Templates(first="{admissible}", turn="{admissible}", history=0, admissible="{actions}")
    )

    async def play(game, member):
        chat, turn = Chat(), 0

        async def generate(prompt_ids, max_tokens, seed):
            nonlocal turn
            turn += 1
            await server.generate(draw_tokens(game, turn))
            return Sample([prompt_ids[0], member, turn])

        def decode(ids):
            return f"<answer>{choose(chat.texts[ids[0]].split(', '), game, ids[1], ids[2])}</answer>"

        episode = Episode(
            env_name="alfworld", env_kwargs=kwargs, task=Task(game, game, member, 0),
            layout=LAYOUTS["turn"](policy, chat, LIMITS, 7), form=FORM, limits=LIMITS, pool=pool,
            generate=generate, decode=decode,
        )  # fmt: skip
        return len((await episode.play()).turns)

    async def rollout():
        return sum(await asyncio.gather(*(play(game, m) for game in games for m in range(group))))

    await rollout()  # the processes exist now, as in the second step of a run
    started = time.perf_counter()
    turns = await rollout()
    seconds = time.perf_counter() - started
    memory = cost(children())
    server.task.cancel()
    pool.close()
    return turns, seconds, memory


async def lock_step(games, kwargs, group, stock):
    import ray

    temp = tempfile.mkdtemp(prefix="vm-b-", dir="/tmp")
    members = [(game, member) for game in games for member in range(group)]
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, _temp_dir=temp, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": ":".join(sys.path)}},
    )  # fmt: skip

    @ray.remote(num_cpus=0.01)
    class Actor:
        def __init__(self):
            if stock:
                import environments.alfworld_parts.engine as engine

                engine.new_engine = engine.stock_engine
            self.env = make("alfworld", **kwargs)

        def pid(self):
            return os.getpid()

        def reset(self, game):
            self.env.reset(game, 0)
            return self.env.admissible()

        def step(self, command):
            _, _, terminated, truncated, _ = self.env.step(command)
            return self.env.admissible(), terminated or truncated

    async def rollout():
        listed = ray.get([a.reset.remote(game) for a, (game, _) in zip(actors, members, strict=True)])
        active, turns, turn = [True] * len(members), 0, 0
        while any(active):
            turn += 1
            # A trajectory that has ended goes on generating until the last one has.
            await asyncio.gather(*(server.generate(draw_tokens(game, turn)) for game, _ in members))
            acting = [k for k, on in enumerate(active) if on]
            calls = [actors[k].step.remote(choose(listed[k], *members[k], turn)) for k in acting]
            for k, (commands, over) in zip(acting, ray.get(calls), strict=True):
                listed[k], active[k], turns = commands, not over, turns + 1
        return turns

    server = Server()
    try:
        actors = [Actor.remote() for _ in members]
        pids = ray.get([actor.pid.remote() for actor in actors])
        if not stock:
            await rollout()  # fills the caches; stock has none
        started = time.perf_counter()
        turns = await rollout()
        seconds = time.perf_counter() - started
        memory = cost(pids)
    finally:
        server.task.cancel()
        ray.shutdown()
        shutil.rmtree(temp, ignore_errors=True)
    return turns, seconds, memory


def children():
    """The processes below this one."""
    table = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    parents = dict(map(int, line.split()) for line in table.splitlines()[1:])
    found, todo = [], [os.getpid()]
    while todo:
        todo = [pid for pid, parent in parents.items() if parent in todo]
        found += todo
    return [pid for pid in found if Path(f"/proc/{pid}/smaps_rollup").exists()]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--games", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--data", default="small")
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    kwargs = {"data": given.data, "max_turns": given.turns}
    games = make("alfworld", **kwargs).tasks("train")[: given.games]
    trajectories, rows = given.games * given.group, {}
    for kind in given.kinds:
        if kind == "ours":
            turns, seconds, memory = asyncio.run(ours(games, kwargs, given.group))
        else:
            turns, seconds, memory = asyncio.run(lock_step(games, kwargs, given.group, "stock" in kind))
        rows[kind] = {"turns": turns, "seconds": seconds, "per_minute": 60 * trajectories / seconds, **memory}
        print(kind, json.dumps(rows[kind]))
    assert len({row["turns"] for row in rows.values()}) == 1, "the sides played different episodes"
    for kind in rows:
        if kind != "ours" and "ours" in rows:
            ratio = rows["ours"]["per_minute"] / rows[kind]["per_minute"]
            print(f"ours / {kind}: {ratio:.1f} x trajectories a minute")
    if given.json:
        given.json.write_text(json.dumps({"trajectories": trajectories, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
