"""Six environments with a bug each: what `check-env` says of them, and what it costs a run.

    verl-multiturn check-env examples/broken_environments.py:Raises

All play the same task, find the right one of three doors, and would be right without the lines that
their docstrings name. tests/test_broken_environments.py shows what is said of each.
"""

import random
import time
from collections.abc import Hashable

from verl_multiturn.env import Env, Info, Seed, StepResult

__all__ = ["GlobalChance", "Hangs", "LeakingSuccess", "Raises", "UnhashableKey", "WrongType"]


class Doors(Env):
    """The environment without a bug."""

    instruction = "Open the right door. Actions: 1, 2, 3."
    max_turns = 4

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        self.right, self.opened = self.rng.randint(1, 3), tuple[str, ...]()
        self.hint = f"The right door is not door {self.right % 3 + 1}."
        return self.hint, {}

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        door = self._match(action)
        if door is None:
            return self._observation, 0.0, False, {"valid": False}
        self.opened += (door,)
        won = int(door) == self.right
        return f"{self.hint} Opened: {', '.join(self.opened)}.", float(won), won, {"success": won}

    def admissible(self) -> list[str]:
        """The doors."""
        return ["1", "2", "3"]

    def state_key(self) -> Hashable:
        """The right door and those opened."""
        return self.right, self.opened

    def expert(self) -> str:
        """The right door."""
        return str(self.right)


class Raises(Doors):
    """Takes it for granted that an action is a number: a model says anything.

    Remedy: `self._match(action)`, and `info["valid"] = False` for what is no action.
    """

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        int(action)
        return super()._step(action)


class Hangs(Doors):
    """Waits for a server that never answers.

    Remedy: a time-out of its own; or runs_in = "process", then what hangs is killed.
    """

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        time.sleep(3600)
        return super()._step(action)


class WrongType(Doors):
    """Returns the reward as text, as it came from a web page.

    Remedy: `float(...)`.
    """

    def step(self, action: str) -> StepResult:
        """See `Env.step`."""
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, str(reward), terminated, truncated, info  # type: ignore[return-value]


class GlobalChance(Doors):
    """Seeds and draws from the global generator, which every thread of the process shares.

    Remedy: `self.rng` for the task, `self.noise` for what happens in it.
    """

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        found = super()._reset(seed)
        random.seed(seed)
        self.right = random.randint(1, 3)
        return found


class UnhashableKey(Doors):
    """Its state key is a list: turns cannot be grouped by it.

    Remedy: a tuple, a frozenset, or a text.
    """

    def state_key(self) -> Hashable:
        """The right door and those opened."""
        return [self.right, *self.opened]  # type: ignore[return-value]


class LeakingSuccess(Doors):
    """Keeps its success with the class: once one instance has won, all of them say so for ever.

    Remedy: `self.won = False` in `_reset`.
    """

    won = False

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        observation, reward, terminated, info = super()._step(action)
        LeakingSuccess.won = LeakingSuccess.won or terminated
        return observation, reward, terminated, info | {"success": LeakingSuccess.won}
