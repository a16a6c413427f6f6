"""Countdown: reach a target with an expression over a few given numbers.

Description:
    The arithmetic game that TinyZero and RAGEN-2 (arXiv 2604.06268) train on, generated: the numbers
    are drawn and joined at random into one expression, whose value is the target, so every task can
    be solved. RAGEN plays the tasks that + and - alone can solve, hence the default `operators`.
    A task is its numbers, in any order, and its target. A hash of both gives every task to one of
    three ranges of seeds, those that the panels use: test from 0, validation from 500,000, training
    from 1,000,000 (and any seed that is not a number). So no task of one range occurs in another.
Actions:
    An expression. It is parsed, never evaluated as code: whole numbers, the `operators` between two
    operands, and parentheses. Signs, powers, comments, other names or symbols, and more than
    100 characters are invalid.
Observation:
    The numbers and the target; after an attempt what it came to and the attempts left, too.
Start:
    No attempt made.
Rewards:
    For the target: 1. For the last attempt, if it uses each given number once and no other: 0.1. Else
    0; so a wrong attempt before the last pays nothing.
Episode end:
    Terminated by the target or the last attempt. Truncated where the last turn holds no expression.
Information:
    `valid`: the action is an expression. `success`: the target is met within the rules. `task_type`:
    "numbers-3", "numbers-4".
State key:
    Numbers and target; it leaves out the attempts made.

Arguments:
    operators: those that the tasks need and the answers may use, of "+-*/"; division is exact.
    min_numbers, max_numbers: how many numbers are given.
    max_number: the largest of them, up to 9999; the smallest is 1.
    max_target: the largest target; the smallest is 1, and none is one of the given numbers.
    use_all: whether an answer must use every number; if not, each at most once.
    max_turns: attempts.
"""

import ast
import random
import re
from collections import Counter
from collections.abc import Hashable
from fractions import Fraction

from verl_multiturn.env import Env, Info, Seed, derive_seed

__all__ = ["Countdown"]

OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
LONGEST = 100  # characters; it bounds the depth of an expression, too
SHARES = {"test": {0}, "val": {1}, "train": {2, 3, 4, 5, 6, 7, 8, 9}}  # remainders of a task's hash
TRIES = 10_000


class Countdown(Env):
    """See the module's docstring."""

    def __init__(
        self,
        operators: str = "+-",
        min_numbers: int = 3,
        max_numbers: int = 4,
        max_number: int = 99,
        max_target: int = 99,
        use_all: bool = True,
        max_turns: int = 1,
    ) -> None:
        if not operators or set(operators) - set("+-*/") or len(set(operators)) < len(operators):
            raise ValueError(f"needs operators out of '+-*/', each once, not {operators!r}")
        if not 2 <= min_numbers <= max_numbers <= 6:
            raise ValueError(f"needs 2 <= min_numbers <= max_numbers <= 6, not {min_numbers}, {max_numbers}")
        if not 1 <= max_number <= 9999 or max_target < 1 or max_turns < 1:
            raise ValueError(
                f"needs 1 <= max_number <= 9999, max_target >= 1 and max_turns >= 1, not {max_number}, "
                f"{max_target}, {max_turns}"
            )
        self.operators, self.use_all, self.max_turns = operators, use_all, max_turns
        self.counts, self.max_number, self.max_target = (min_numbers, max_numbers), max_number, max_target
        how = "every given number exactly once" if use_all else "each given number at most once"
        attempts = "one attempt" if max_turns == 1 else f"{max_turns} attempts"
        self.instruction = (
            f"Write an arithmetic expression whose value is the target. Use {how}, and no other numbers. "
            f"Allowed: {' '.join(operators)} and parentheses. You have {attempts}. Actions: an expression, "
            f"such as 5 {operators[0]} (3 {operators[-1]} 2)."
        )

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        number = seed if isinstance(seed, int) else 1_000_000
        share = SHARES["test" if number < 500_000 else "val" if number < 1_000_000 else "train"]
        for _ in range(TRIES):
            count = self.rng.randint(*self.counts)
            self.numbers = [self.rng.randint(1, self.max_number) for _ in range(count)]
            self.solution, value = self._join(self.rng)
            if value is None or value.denominator != 1 or not 1 <= value <= self.max_target:
                continue
            self.target = int(value)
            if self.target not in self.numbers and derive_seed(self.content("")) % 10 in share:
                return self._text(), {"task_type": f"numbers-{count}"}
        raise RuntimeError(
            f"no task with operators {self.operators}, numbers up to {self.max_number} and a target up to "
            f"{self.max_target} in {TRIES} tries."
        )

    def _join(self, rng: random.Random) -> tuple[str, Fraction | None]:
        """All numbers in a random expression, and its value (None: a division by 0)."""
        parts: list[tuple[str, Fraction | None]] = [(str(n), Fraction(n)) for n in self.numbers]
        while len(parts) > 1:
            (left, a), (right, b) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
            sign = rng.choice(self.operators)
            parts.append((f"({left} {sign} {right})", _apply(sign, a, b)))
        text, value = parts[0]
        return text[1:-1], value

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        tree = parse(action, self.operators)
        if tree is None:
            return self._text(), 0.0, False, {"valid": False}
        used, given = Counter(_leaves(tree)), Counter(self.numbers)
        allowed = used == given or (not self.use_all and used <= given)
        value = _value(tree) if allowed else None
        success, left = value == self.target, self.max_turns - self.turn
        reward = 1.0 if success else 0.1 if used == given and not left else 0.0
        if not allowed:
            verdict = "does not use the given numbers as asked"
        else:
            verdict = "divides by 0" if value is None else f"makes {value}"
        text = f"{self._text()}\n{ast.unparse(tree)} {verdict}. Attempts left: {left}."
        return text, reward, success or not left, {"success": success}

    def _text(self) -> str:
        return f"Numbers: {' '.join(map(str, self.numbers))}\nTarget: {self.target}"

    def content(self, observation: str) -> str:
        """The numbers, sorted, and the target."""
        return f"{sorted(self.numbers)} {self.target}"

    def state_key(self) -> Hashable:
        """Numbers and target."""
        return (*self.numbers, self.target)

    def random_action(self, rng: random.Random) -> str:
        """All numbers in a random expression."""
        return self._join(rng)[0]

    def expert(self) -> str:
        """The expression that the task was made from."""
        return self.solution


def parse(text: str, operators: str) -> ast.expr | None:
    """The tree of an arithmetic expression; None: it is none, or not with these operators.

    The text is data: only its syntax is read. First its characters are checked (a `#` would hide the
    rest from the parser), then the type of each node (`**` and `//` are written with allowed ones).
    """
    text = " ".join(text.split())
    if len(text) > LONGEST or not re.fullmatch(r"[0-9+\-*/() ]+", text):
        return None
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return tree if _is_arithmetic(tree, operators) else None


def _is_arithmetic(node: ast.expr, operators: str) -> bool:
    if isinstance(node, ast.BinOp):
        known = OPERATORS.get(type(node.op), "?") in operators
        return known and _is_arithmetic(node.left, operators) and _is_arithmetic(node.right, operators)
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def _leaves(node: ast.expr) -> list[int]:
    """The numbers in an arithmetic tree."""
    leaves = [leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)]
    return [number for number in leaves if isinstance(number, int)]


def _value(node: ast.expr) -> Fraction | None:
    """The value of an arithmetic tree; None: a division by 0."""
    if isinstance(node, ast.BinOp):
        return _apply(OPERATORS[type(node.op)], _value(node.left), _value(node.right))
    return Fraction(_leaves(node)[0])


def _apply(sign: str, a: Fraction | None, b: Fraction | None) -> Fraction | None:
    if a is None or b is None or (sign == "/" and b == 0):
        return None
    if sign == "/":
        return a / b
    return a + b if sign == "+" else a - b if sign == "-" else a * b
