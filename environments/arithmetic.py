r"""Word problems of arithmetic in GSM8K's format, generated; or the user's own GSM8K or MATH.

Description:
    The policy writes a whole solution, a step a line, and ends it with the answer, as in GSM8K (Cobbe et
    al. 2021, arXiv 2110.14168). Generated problems are short stories that add, take away, double and
    treble; a problem is its numbers and what happens to them, whatever it is told of. A hash of that gives
    every problem to one of three ranges of seeds, those that panels use: test from 0, validation from
    500,000, training from 1,000,000 (and any seed that is not a number). With `file` the problems are
    those of JSONL files, by the names of their splits (train, val, test).
Actions:
    The solution. Its answer is what follows the last "####", commas removed, or for `grade="math"` the
    content of the last \boxed{}.
Observation:
    The question; then whether the answer was right.
Start:
    The question.
Rewards:
    1 for the right answer, else 0. gsm8k: equal as texts. math: equal as texts once spaces, \left, \text
    and the like are normalised, or as expressions (package sympy, in a child process, at most 5 s).
Episode end:
    Terminated by an answer. Truncated by a text without one.
Information:
    `valid`: there is an answer. `success`: it is right. `task_type`: "steps-2", "steps-3", ...; of a file,
    its records' `type`.
State key:
    The question.

Arguments:
    steps: how many steps generated problems have, at least and at most.
    most: the largest number of generated problems, 8 to 99.
    file: None, a JSONL file with question and answer (or problem and solution), or a folder with
        train.jsonl, test.jsonl and perhaps val.jsonl.
    grade: "gsm8k" or "math"; generated problems are gsm8k.
"""

import random
from collections.abc import Hashable, Sequence

from environments.arithmetic_parts.answers import boxed, equal, marked
from environments.arithmetic_parts.problems import Problem, generate, read, worked
from verl_multiturn.env import Env, Info, Seed, derive_seed
from verl_multiturn.errors import unknown

__all__ = ["Arithmetic"]

SHARES = {"test": {0}, "val": {1}, "train": {2, 3, 4, 5, 6, 7, 8, 9}}  # remainders of a problem's hash
FIRST = {"test": 0, "val": 500_000, "train": 1_000_000}  # seeds
HOW = {
    "gsm8k": "Solve the problem step by step, a step a line. Actions: the solution; its last line is #### "
    "and the answer, a number.",
    "math": r"Solve the problem step by step. Actions: the solution, with the final answer in \boxed{}.",
}


class Arithmetic(Env):
    """See the module's docstring."""

    max_turns = 1

    def __init__(
        self, steps: Sequence[int] = (2, 4), file: str | None = None, grade: str = "gsm8k", most: int = 99
    ) -> None:
        if grade not in HOW:
            raise unknown("grade", grade, HOW)
        if grade == "math" and file is None:
            raise ValueError('grade="math" needs a file: generated problems are gsm8k')
        if len(steps) != 2 or not 1 <= steps[0] <= steps[1] <= 8:
            raise ValueError(f"needs steps (least, most) with 1 <= least <= most <= 8, not {list(steps)}")
        if not 8 <= most <= 99:
            raise ValueError(f"needs 8 <= most <= 99, the largest number of a problem, not {most}")
        self.steps, self.file, self.grade, self.most = (steps[0], steps[1]), file, grade, most
        self.instruction = HOW[grade]

    def tasks(self, split: str) -> list[Seed]:
        """The problems of a split, of a file "train/0", "train/1", ..., else the first 5,000 of its seeds."""
        if self.file is None:
            if split not in FIRST:
                raise unknown("split", split, FIRST)
            return list(range(FIRST[split], FIRST[split] + 5_000))
        return [f"{split}/{n}" for n in range(len(read(self.file, split, self.grade)))]

    def peek(self, seed: Seed) -> tuple[str, str] | None:
        """See `Env.peek`; of a problem from a file."""
        if self.file is None:
            return None
        problem = self._read(self.file, seed)
        return problem.key, problem.kind

    def _read(self, file: str, seed: Seed) -> Problem:
        """Problem "split/n"; a bare number counts through the training problems again and again."""
        split, _, number = (f"train/{seed}" if isinstance(seed, int) else seed).partition("/")
        problems = read(file, split, self.grade)
        if not problems or not number.isdecimal() or (isinstance(seed, str) and int(number) >= len(problems)):
            raise ValueError(f"{seed!r} is none of the {len(problems)} problems of split {split!r} in {file}")
        return problems[int(number) % len(problems)]

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        if self.file is not None:
            self.problem = self._read(self.file, seed)
        else:
            number = seed if isinstance(seed, int) else 1_000_000
            share = SHARES["test" if number < 500_000 else "val" if number < 1_000_000 else "train"]
            while True:
                self.problem, self.first, self.done = generate(self.rng, self.steps, self.most)
                if derive_seed(self.problem.key) % 10 in share:
                    break
        return self.problem.question, {"task_type": self.problem.kind}

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        of, same = (marked, str.__eq__) if self.grade == "gsm8k" else (boxed, equal)
        answer, truth = of(action), of(self.problem.solution)
        if answer is None or truth is None:
            return "There is no answer.", 0.0, False, {"valid": False}
        right = same(answer, truth)
        return "Right." if right else "Wrong.", float(right), True, {"success": right}

    def content(self, observation: str) -> str:
        """The problem, whatever it is told of."""
        return self.problem.key

    def state_key(self) -> Hashable:
        """The question."""
        return self.problem.question

    def random_action(self, rng: random.Random) -> str:
        """A solution with slips; of a file's problem, half of the time a wrong answer alone."""
        if self.file is None:
            slips = [rng.choice((0, 0, 1, -1, 2)) for _ in self.done]
            return worked(self.first, self.done, slips)
        if rng.random() < 0.5:
            return self.problem.solution
        number = rng.randint(0, 99)
        return f"#### {number}" if self.grade == "gsm8k" else rf"\boxed{{{number}}}"

    def expert(self) -> str:
        """The solution."""
        return self.problem.solution
