"""A running sum, one number a turn: values have a closed form.

Description:
    `length` numbers from 1 to 9 are shown; each turn asks for the next running total. With a policy
    that is right at position k with probability p_k, the value of the state before position k is
    V(k) = p_k p_{k+1} ... p_n, so every value estimate can be compared with the truth.
Actions:
    A whole number.
Observation:
    The numbers, and the total so far.
Start:
    Total 0.
Rewards:
    1 for the last correct total, else 0.
Episode end:
    Terminated by a wrong total or by the last correct one. Truncated after `length` turns if some
    were no number.
Information:
    `success`: all totals were right. `task_type`: "chain-<length>".
State key:
    The numbers and how many are summed; it leaves out the turn count.

Arguments:
    length: how many numbers.
"""

import re
from collections.abc import Hashable

from verl_multiturn.env import Env, Info, Seed

__all__ = ["ChainSum"]


class ChainSum(Env):
    """See the module's docstring."""

    instruction = (
        "Add the numbers one by one, from left to right. Each turn, say the total after adding the next "
        "number. A wrong total ends the task. Actions: a whole number."
    )

    def __init__(self, length: int = 4) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, not {length}")
        self.length = self.max_turns = length

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        self.numbers = [self.rng.randint(1, 9) for _ in range(self.length)]
        self.position = 0
        return self._text(), {"task_type": f"chain-{self.length}"}

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        number = action.strip()
        if not re.fullmatch(r"-?[0-9]{1,9}", number):
            return self._observation, 0.0, False, {"valid": False}
        _, after, reward, terminated = self.transitions(self.position, str(int(number)))[0]
        self.position = after
        return self._text(), reward, terminated, {"success": reward > 0}

    def _text(self) -> str:
        total = sum(self.numbers[: self.position])
        return f"Numbers: {' '.join(map(str, self.numbers))}\nTotal of the first {self.position}: {total}"

    def state_key(self) -> Hashable:
        """The numbers and how many are summed."""
        return (*self.numbers, self.position)

    def admissible(self) -> list[str]:
        """Every total that `length` numbers can reach."""
        return self.actions

    def expert(self) -> str:
        """The right total."""
        return str(sum(self.numbers[: self.position + 1]))

    @property
    def actions(self) -> list[str]:
        """For `exact_values`."""
        return [str(total) for total in range(1, 9 * self.length + 1)]

    def start_state(self) -> int:
        """For `exact_values`: nothing summed."""
        return 0

    def transitions(self, state: int, action: str) -> list[tuple[float, int, float, bool]]:
        """For `exact_values`: (probability, next state, reward, terminated); state: numbers summed."""
        if action != str(sum(self.numbers[: state + 1])):
            return [(1.0, state, 0.0, True)]
        last = state + 1 == self.length
        return [(1.0, state + 1, float(last), last)]
