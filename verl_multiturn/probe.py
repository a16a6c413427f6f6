"""The environment under test, and what the laws do with it: reset, step and play, types checked."""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from verl_multiturn.env import Env

Trace = list[tuple[Any, ...]]


class Broken(Exception):
    """A law does not hold; the message says how."""


def need(holds: object, sentence: str) -> None:
    """Raise `Broken` with the sentence unless it holds."""
    if not holds:
        raise Broken(sentence)


@dataclass
class Clock:
    """What the environment is doing, and since when; another thread reads it.

    Attributes:
        law: that is being tried.
        now: the call, and when it began (seconds of `time.monotonic`).
    """

    law: str = ""
    now: tuple[str, float] = ("", 0.0)

    def at(self, call: str) -> None:
        """A call begins."""
        self.now = (call, time.monotonic())


@dataclass
class Subject:
    """The environment under test.

    Attributes:
        env: the instance.
        new: gives another one; the same one unless `fresh`.
        fresh: whether `new` builds.
        seeds: the tasks to play.
        clock: told of every reset and step.
        resets, steps: seconds spent, one each.
        first: of every seed, actions and success flags when it was played first.
    """

    env: Env
    new: Callable[[], Env]
    fresh: bool
    seeds: list[int]
    clock: Clock = field(default_factory=Clock)
    resets: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    first: dict[int, tuple[list[str], list[bool]]] = field(default_factory=dict)

    @cached_property
    def other(self) -> Env:
        """A second instance (the same one unless `fresh`)."""
        return self.new()

    def reset(self, env: Env, seed: int, dynamics_seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """`Env.reset`, timed, with its types checked."""
        self.clock.at(f"reset({seed})")
        start = time.perf_counter()
        result = env.reset(seed, dynamics_seed)
        self.resets.append(time.perf_counter() - start)
        self.clock.at(f"what follows reset({seed})")
        need(isinstance(result, tuple) and len(result) == 2, "reset must return (observation, info).")
        need(isinstance(result[0], str), f"reset's observation is {kind(result[0])}, not str.")
        need(isinstance(result[1], dict), f"reset's info is {kind(result[1])}, not dict.")
        return result

    def step(self, env: Env, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """`Env.step`, timed, with its types checked."""
        self.clock.at(f"step({action[:40]!r})")
        start = time.perf_counter()
        result = env.step(action)
        self.steps.append(time.perf_counter() - start)
        self.clock.at(f"what follows step({action[:40]!r})")
        five = isinstance(result, tuple) and len(result) == 5
        need(five, "step must return (observation, reward, terminated, truncated, info).")
        observation, reward, terminated, truncated, info = result
        need(isinstance(observation, str), f"step's observation is {kind(observation)}, not str.")
        number = isinstance(reward, int | float | np.floating) and not isinstance(reward, bool)
        need(number, f"step's reward is {kind(reward)}, not float.")
        need(math.isfinite(reward), f"step's reward is {reward}, not finite.")
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            need(isinstance(flag, bool), f"step's {name} is {kind(flag)}, not bool.")
        need(isinstance(info, dict), f"step's info is {kind(info)}, not dict.")
        for name in ("valid", "success"):
            need(isinstance(info.get(name), bool), f"info[{name!r}] is {kind(info.get(name))}, not bool.")
        return result

    def timed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call that may be as long as a reset, with a time-out of its own."""
        self.clock.at(f"{call.__name__}()")
        result = call(*args, **kwargs)
        self.clock.at(f"what follows {call.__name__}()")
        return result

    def act(self, env: Env, rng: random.Random) -> str:
        """A random action where there is one, else the expert's, else a word."""
        actors: list[Callable[[], str]] = [lambda: env.random_action(rng), env.expert]
        for choose in actors:
            try:
                return choose()
            except NotImplementedError:
                continue
        return "look"

    def play(self, env: Env, act: Callable[[], str], most: int | None = None) -> tuple[list[str], Trace]:
        """Act until the end, or for `most` steps; return actions and what followed each."""
        actions, trace = [], []
        for _ in range(env.max_turns + 1 if most is None else most):
            actions.append(act())
            trace.append(self.step(env, actions[-1]))
            if trace[-1][2] or trace[-1][3]:
                return actions, trace
        need(most is not None, f"an episode was still running after max_turns = {env.max_turns} steps.")
        return actions, trace

    def follow(self, env: Env, actions: list[str]) -> Trace:
        """Observation, reward and ends of each action in turn, and the state key after it."""
        return [(*self.step(env, action)[:4], env.state_key()) for action in actions]

    def middle(self, env: Env, seed: int) -> list[str]:
        """Bring `env` to the middle of an episode; return the actions that follow in it (at least one)."""
        rng = random.Random(seed)
        self.reset(env, seed, seed)
        actions, _ = self.play(env, lambda: self.act(env, rng))
        half = len(actions) // 2
        self.reset(env, seed, seed)
        self.follow(env, actions[:half])
        return actions[half:]


def kind(value: object) -> str:
    """How a message names a value's type."""
    cls = type(value)
    if value is None or cls.__module__ == "builtins":
        return "missing" if value is None else cls.__name__
    return f"{cls.__module__}.{cls.__name__}"  # numpy.bool is not bool
