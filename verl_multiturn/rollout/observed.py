"""One visit to an environment: act, look at all that a turn needs, and refuse what breaks the contract."""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from verl_multiturn.env import Env
from verl_multiturn.panel import content_hash


class EnvironmentFailure(RuntimeError):
    """An environment raised, hung, or broke its contract; the message names it and the call."""


@dataclass(frozen=True)
class Observed:
    """What an environment shows after `reset` or `step`, read in one visit to its thread."""

    observation: str
    key: Hashable  # state_key()
    admissible: list[str] | None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    instruction: str = ""
    max_turns: int = 0
    content: str = ""  # content hash of the task, after reset only


def reset(env: Env, task: int | str, dynamics_seed: int) -> Observed:
    """Start a task and look at it."""
    observation, info = env.reset(task, dynamics_seed)
    return _look(env, observation, info, content=content_hash(env, observation))


def step(env: Env, action: str) -> Observed:
    """Act and look."""
    observation, reward, terminated, truncated, info = env.step(action)
    for name, value, kind in (
        ("reward", reward, int | float),
        ("terminated", terminated, bool),
        ("truncated", truncated, bool),
    ):
        # NumPy's scalars are what Gymnasium environments return.
        plain = value.item() if hasattr(value, "item") else value
        if not isinstance(plain, kind):
            raise TypeError(f"step returned {name} of type {type(value).__name__}")
    if not math.isfinite(reward):
        raise TypeError(f"step returned the reward {reward}")
    return _look(
        env,
        observation,
        info,
        reward=float(reward),
        terminated=bool(terminated),
        truncated=bool(truncated) and not terminated,
    )


def snapshot(env: Env) -> object:
    """The whole state, to be restored in any environment that was made alike."""
    return env.snapshot()


def restore(env: Env, taken: Any, seed: int) -> str | None:
    """Go back to a snapshot, with new chances from there on; None, or how a replay of it went astray."""
    try:
        env.restore(taken, seed)
    except RuntimeError as error:
        return str(error)
    return None


def _look(env: Env, observation: Any, info: Any, **more: Any) -> Observed:
    if not isinstance(observation, str):
        raise TypeError(f"the observation has type {type(observation).__name__}, must be str")
    if not isinstance(info, dict):
        raise TypeError(f"the info has type {type(info).__name__}, must be dict")
    key = env.state_key()
    try:
        hash(key)
    except TypeError:
        raise TypeError(f"state_key() has type {type(key).__name__}, which has no hash") from None
    actions, instruction = env.admissible(), env.instruction
    return Observed(
        observation,
        key,
        actions,
        info=info,
        instruction=instruction,
        max_turns=env.max_turns,
        **more,
    )
