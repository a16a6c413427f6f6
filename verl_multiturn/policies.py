"""Policies that need no model, and how they are played: the floor and the ceiling of a panel."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from verl_multiturn.env import Env, Seed, derive_seed
from verl_multiturn.panel import Panel

Policy = Callable[[Env, str], str]


@dataclass(frozen=True)
class Episode:
    """What one played episode came to.

    Attributes:
        task: the task's id.
        task_type: as the environment names it.
        episode_return: undiscounted sum of rewards.
        success: the last `info["success"]`.
        turns: steps taken.
        invalid: those with an action the environment does not know.
        truncated: stopped by a limit.
    """

    task: Seed
    task_type: str
    episode_return: float
    success: bool
    turns: int
    invalid: int
    truncated: bool


def random_policy(rng: random.Random) -> Policy:
    """Draws with `rng` from the environment's actions."""
    return lambda env, observation: env.random_action(rng)


def expert_policy(env: Env, observation: str) -> str:
    """Asks the environment's scripted expert."""
    return env.expert()


def play(env: Env, policy: Policy, seed: Seed, dynamics_seed: int | None = None) -> Episode:
    """One episode of `policy` on task `seed`."""
    observation, info = env.reset(seed, dynamics_seed)
    task_type, total, turns, invalid = info["task_type"], 0.0, 0, 0
    terminated = truncated = False
    while not (terminated or truncated):
        observation, reward, terminated, truncated, info = env.step(policy(env, observation))
        total, turns, invalid = total + reward, turns + 1, invalid + (not info["valid"])
    return Episode(seed, task_type, total, info["success"], turns, invalid, truncated)


def evaluate(panel: Panel, policy: Policy, samples: int = 1) -> list[Episode]:
    """Play every task of a panel `samples` times, task by task.

    The noise of an episode follows from task and sample, so that two policies meet the same
    chances.
    """
    env = panel.make()
    try:
        return [
            play(env, policy, task.id, derive_seed(task.id, sample))
            for task in panel.tasks
            for sample in range(samples)
        ]
    finally:
        env.close()
