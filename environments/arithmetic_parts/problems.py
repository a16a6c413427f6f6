"""Where the problems come from: generated in GSM8K's format, or read from the user's files."""

import json
import random
from functools import cache
from pathlib import Path
from typing import NamedTuple

from environments.arithmetic_parts.answers import MARK, boxed, marked
from verl_multiturn.env import derive_seed
from verl_multiturn.errors import unknown

SPLITS = ("train", "val", "test")
NAMES = ("Ann", "Bo", "Cem", "Dana", "Eli", "Fay")
THINGS = ("coins", "cards", "books", "shells")
FIELDS = {"question": ("question", "problem"), "answer": ("answer", "solution")}


class Problem(NamedTuple):
    """A question and its solution, whose end holds the answer."""

    question: str
    solution: str
    key: str  # equal for what is the same problem in other words
    kind: str = "default"


class Step(NamedTuple):
    """What happens to a number."""

    sign: str  # + - *
    by: int

    def __call__(self, n: int) -> int:
        """What it makes of a number."""
        return n + self.by if self.sign == "+" else n - self.by if self.sign == "-" else n * self.by


def generate(rng: random.Random, steps: tuple[int, int], most: int) -> tuple[Problem, int, list[Step]]:
    """A story of so many steps without a number above `most`; also its first number and its steps."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    top = min(20, most // 2)
    first = now = rng.randint(2, top)
    told, done = [f"{name} has {first} {thing}."], list[Step]()
    for _ in range(rng.randint(*steps)):
        possible = [
            Step("+", rng.randint(2, top)),
            Step("-", rng.randint(2, top)),
            Step("*", rng.randint(2, 3)),
        ]
        step = rng.choice([one for one in possible if 0 < one(now) <= most])
        now = step(now)
        done.append(step)
        told.append(_told(step))
    question = " ".join([*told, f"How many {thing} are there now?"])
    key = " ".join([str(first), *(f"{one.sign}{one.by}" for one in done)])
    return Problem(question, worked(first, done), key, f"steps-{len(done)}"), first, done


def _told(step: Step) -> str:
    if step.sign == "*":
        return {2: "Then there are twice as many.", 3: "Then there are three times as many."}[step.by]
    return f"Then {step.by} more come." if step.sign == "+" else f"Then {step.by} are lost."


def worked(first: int, steps: list[Step], slips: list[int] | None = None) -> str:
    """A solution, a step a line; `slips` are added to the results, and carried on."""
    lines, now = [], first
    for step, slip in zip(steps, slips or [0] * len(steps), strict=True):
        after = max(0, step(now) + slip)
        lines.append(f"{now} {step.sign} {step.by} = {after}")
        now = after
    return "\n".join([*lines, f"{MARK} {now}"])


@cache
def read(file: str, split: str, grade: str) -> tuple[Problem, ...]:
    """The problems of a split.

    Args:
        file: a JSONL file, whose problems a hash gives to the splits (80, 10, 10 %), or a folder with
            train.jsonl, test.jsonl and perhaps val.jsonl; without the last a hash takes 5 % of train for it.
        split: one of `SPLITS`.
        grade: "gsm8k" or "math".

    Raises:
        ValueError: no such file or split; a line that is no problem.
    """
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    path = Path(file).expanduser()
    if not path.is_dir():
        shares = {"train": range(2, 10), "val": range(1, 2), "test": range(1)}
        return tuple(one for one in _lines(path, grade) if derive_seed(one.key) % 10 in shares[split])
    if split == "test" or (path / "val.jsonl").exists():
        return _lines(path / f"{split}.jsonl", grade)
    train = _lines(path / "train.jsonl", grade)
    return tuple(one for one in train if (derive_seed(one.key) % 20 == 0) == (split == "val"))


@cache
def _lines(path: Path, grade: str) -> tuple[Problem, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(
            f"no problems at {path}: {error.strerror}; give a JSONL file with question and answer, or a "
            "folder with train.jsonl and test.jsonl, as env_kwargs.file"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}; download or write it again") from None
    filled = ((n, line) for n, line in enumerate(lines, 1) if line.strip())
    return tuple(_problem(f"{path}, line {n}", line, grade) for n, line in filled)


def _problem(where: str, line: str, grade: str) -> Problem:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    found = []
    for name, spellings in FIELDS.items():
        values = [record[one] for one in spellings if isinstance(record, dict) and one in record]
        if not values or not isinstance(values[0], str):
            raise ValueError(f"{where} has no text {name!r} (or {spellings[1]!r})")
        found.append(values[0])
    question, solution = found
    if (marked if grade == "gsm8k" else boxed)(solution) is None:
        mark = f"{MARK!r}" if grade == "gsm8k" else r"\boxed{}"
        raise ValueError(f"{where}: its answer has no {mark} at the end; grade is {grade!r}")
    return Problem(question, solution, " ".join(question.split()), str(record.get("type", "default")))
