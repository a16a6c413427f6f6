r"""An environment of your own, complete: guess a number from hints.

Check it, play it, train on it:

    verl-multiturn check-env examples/new_environment.py:GuessNumber
    python examples/play.py examples/new_environment.py:GuessNumber
    bash recipes/gigpo_frozenlake.sh hardware=cpu multiturn.env=examples/new_environment.py:GuessNumber \
        multiturn.val='{first_seed: 0, size: 4}' multiturn.test=null data.train_batch_size=8

Description:
    The environment thinks of a number; each guess is answered with "higher" or "lower".
Actions:
    A whole number.
Observation:
    The answer to the last guess, and what is still possible.
Rewards:
    1 for the number, else 0.
Episode end:
    Terminated when the number is found. Truncated after `max_turns` turns.
Information:
    `success`: found. `task_type`: the half the number lies in.
State key:
    The number and the interval still possible; it leaves out the turn count. Without the number all
    tasks would look the same, and panels know tasks by what they look like.
"""

from collections.abc import Hashable

from verl_multiturn.env import Env, Info, Seed

__all__ = ["GuessNumber"]


class GuessNumber(Env):
    """See the module's docstring; `high` is the largest number."""

    def __init__(self, high: int = 16, max_turns: int = 6) -> None:
        self.high, self.max_turns = high, max_turns
        self.instruction = f"Find a number from 1 to {high} by guessing. Actions: a whole number."

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        self.number = self.rng.randint(1, self.high)  # self.rng: same seed, same number
        self.low, self.top = 1, self.high
        half = "low" if self.number <= self.high // 2 else "high"
        return f"It is between {self.low} and {self.top}.", {"task_type": half}

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        guess = self._match(action)
        if guess is None:  # an unknown action changes nothing
            return self._observation, 0.0, False, {"valid": False}
        if int(guess) == self.number:
            return f"Yes, it is {guess}.", 1.0, True, {"success": True}
        if int(guess) < self.number:
            self.low, hint = max(self.low, int(guess) + 1), "Higher"
        else:
            self.top, hint = min(self.top, int(guess) - 1), "Lower"
        return f"{hint}. It is between {self.low} and {self.top}.", 0.0, False, {}

    def admissible(self) -> list[str]:
        """Every number of the game."""
        return [str(number) for number in range(1, self.high + 1)]

    def state_key(self) -> Hashable:
        """The number and what is still possible."""
        return self.number, self.low, self.top

    def expert(self) -> str:
        """Halve the interval."""
        return str((self.low + self.top) // 2)
