"""VinePPO's rollouts: tokens generated against K continuations of every state, with the exact savers only.

    PYTHONPATH=. python tests/bench/bench_vine_tokens.py [--json FILE] [--prompts 16]

The savers are the defaults: V(s_0) from the other members of the group, equal states of a group share
their continuations, nothing for the end of an episode. The policy is a table on a simulated server: the
expert's action with probability 1 - eps, else one of the four at random, so that eps sets its entropy; each
in one of `words` wordings, as a model that reasons aloud has many. A byte is a token. `naive` is what the
metric `vine_tokens_share` divides by: K times the tokens that the trajectories themselves wrote from each
state on; `--check` plays that, too.
"""

import argparse
import asyncio
import json
import math
import platform
import random
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from environments.frozen_lake import FrozenLake
from environments.sokoban import Sokoban
from verl_multiturn.env import derive_seed
from verl_multiturn.rollout.continuations import Vines
from verl_multiturn.rollout.episode import Sample, Task
from verl_multiturn.rollout.layouts import LAYOUTS, Limits
from verl_multiturn.rollout.parsing import ActionFormat
from verl_multiturn.rollout.pool import EnvPool
from verl_multiturn.rollout.prompts import PromptPolicy, Templates
from verl_multiturn.rollout.vine import VineEpisode
from verl_multiturn.rollout.vine_config import Vine

HERE, EOS, ACTIONS = Path(__file__).resolve(), 0, ("up", "down", "left", "right")
FORM = ActionFormat(tag="answer", think=False)
TEMPLATES = Templates(first="{observation}", turn="{observation}", next="{observation}", history=0)
NAIVE = {"root": "rollouts", "dedupe": "none"}


class Hinted:
    """Shows what the expert would do: the table of the policy."""

    def reset(self, seed, dynamics_seed=None):
        observation, info = super().reset(seed, dynamics_seed)
        return f"{observation}\n{self.expert()}", info

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        hint = "" if terminated or truncated else f"\n{self.expert()}"
        return observation + hint, reward, terminated, truncated, info


class Lake(Hinted, FrozenLake):
    """Eight by eight."""

    def __init__(self, max_turns: int = 10) -> None:
        super().__init__(
            size=8, hole_prob=0.1, max_turns=max_turns, min_distance=max_turns - 3, max_distance=max_turns
        )


class Boxes(Hinted, Sokoban):
    """Six by six, one box."""

    def __init__(self, max_turns: int = 10) -> None:
        super().__init__(max_turns=max_turns, min_solution=max_turns - 3, max_solution=max_turns)


class Chat:
    """A byte is a token."""

    def build_initial_tokens(self, messages):
        return list(messages[-1]["content"].encode())

    def merge_context_tokens(self, previous, updated, ids):
        return SimpleNamespace(token_ids=[*ids, 10, *updated[-1]["content"].encode()])


def decode(ids):
    return bytes(one for one in ids if one != EOS).decode()


def say(prompt_ids, eps, words, seed):
    """What the policy says: the last line of the prompt is the expert's action."""
    rng, expert = random.Random(seed), decode(prompt_ids[-12:]).split("\n")[-1]
    assert expert in ACTIONS, expert
    action = rng.choice(ACTIONS) if rng.random() < eps else expert
    return [*f"{rng.randrange(words):03} <answer>{action}</answer>".encode(), EOS]


def entropy(eps, words):
    """Of the policy at a state, in nats."""
    p = [1 - eps + eps / 4, *[eps / 4] * 3]
    return math.log(words) + math.fsum(x * math.log(1 / x) for x in p if x)


async def group(setting, prompt, pool, more):
    """Counts of the n trajectories of a prompt, and their turns."""
    env, row, turns, n, K, eps, words = setting
    vines = Vines(Vine(**({"rollouts": K, "group": n} | more)))
    limits = Limits(max_prompt_tokens=5000, max_response_tokens=50_000, max_action_tokens=64)

    async def generate(prompt_ids, max_tokens, seed):
        await asyncio.sleep(0)
        return Sample(say(prompt_ids, eps, words, seed))

    async def one(sample):
        seed = derive_seed("task", prompt, sample)
        layout = LAYOUTS[row](PromptPolicy(TEMPLATES), Chat(), limits, EOS)
        episode = VineEpisode(
            env_name=f"{HERE}:{env}", env_kwargs={"max_turns": turns}, layout=layout, form=FORM,
            limits=limits, task=Task(prompt, "g", sample, seed, seed), pool=pool, generate=generate,
            decode=decode, vines=vines, seed=derive_seed("vine", prompt),
        )  # fmt: skip
        trajectory = await episode.play()
        return trajectory.info["vine"] | {"length": len(trajectory.turns), "won": bool(trajectory.success)}

    return await asyncio.gather(*map(one, range(n)))


def measure(setting, prompts, check=False):
    """Over all prompts: tokens, naive tokens, their ratio with its standard error over prompts."""
    started = time.process_time()

    async def go(more):
        pool = EnvPool(2, 60.0)
        try:
            return [await group(setting, prompt, pool, more) for prompt in range(prompts)]
        finally:
            pool.close()

    played = asyncio.run(go({}))
    tokens, naive = (
        np.array([sum(one[name] for one in members) for members in played], float)
        for name in ("tokens", "naive_tokens")
    )
    everyone = [one for members in played for one in members]
    share = tokens.sum() / naive.sum()
    spread = np.sqrt(np.sum((tokens - share * naive) ** 2) / (prompts * (prompts - 1))) / naive.mean()
    found = dict(zip(("env", "row", "max_turns", "n", "K", "eps", "words"), setting, strict=True)) | {
        "entropy": entropy(*setting[-2:]),
        "prompts": prompts,
        "turns": float(np.mean([one["length"] for one in everyone])),
        "success": float(np.mean([one["won"] for one in everyone])),
        "states": sum(one["states"] for one in everyone),
        "unique_states": sum(one["unique_states"] for one in everyone),
        "tokens": int(tokens.sum()),
        "naive_tokens": int(naive.sum()),
        "share": float(share),
        "standard_error": float(spread),
    }
    if check:
        found["naive_played"] = sum(one["tokens"] for members in asyncio.run(go(NAIVE)) for one in members)
    return found | {"cpu_seconds": time.process_time() - started}


def settings():
    """(environment, row, turn limit, n, K, eps, words)."""
    for row, eps in product(("trajectory", "turn"), (0.0, 0.05, 0.1, 0.2, 0.4, 1.0)):
        yield ("Lake", row, 10, 8, 1, eps, 1)
    for row, words in product(("trajectory", "turn"), (2, 1000)):
        yield ("Lake", row, 10, 8, 1, 0.2, words)
    for n in (4, 16):
        yield ("Lake", "trajectory", 10, n, 1, 0.2, 1)
    for turns in (5, 15):
        yield ("Lake", "trajectory", turns, 8, 1, 0.2, 1)
    for K in (3, 9):
        yield ("Lake", "trajectory", 10, 8, K, 0.2, 1)
    for eps in (0.1, 0.2, 0.4):
        yield ("Boxes", "trajectory", 10, 8, 1, eps, 1)


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--check", action="store_true", help="also play K continuations of every state")
    given, rows = parser.parse_args(), []
    print("env   row        limit  n K  eps words  entropy  turns  unique/states  share ± s.e.")
    for setting in settings():
        one = measure(setting, given.prompts if setting[4] < 9 else max(2, given.prompts // 4), given.check)
        rows.append(one)
        print(
            f"{one['env']:5} {one['row']:10} {one['max_turns']:5} {one['n']:2} {one['K']} {one['eps']:4.2f} "
            f"{one['words']:5} {one['entropy']:8.2f} {one['turns']:6.1f} "
            f"{one['unique_states']:6}/{one['states']:<6} {one['share']:.3f} ± {one['standard_error']:.3f}",
            f"played {one['tokens'] / one['naive_played']:.3f}" if given.check else "",
            flush=True,
        )
    if given.json:
        found = {"python": platform.python_version(), "rows": rows}
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
