"""Questions with their golden answers: read from files, split by what they ask, drawn by seed."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from environments.retrieval_parts.passages import read_jsonl
from environments.retrieval_parts.scoring import normalise
from verl_multiturn.env import Seed, derive_seed
from verl_multiturn.errors import intact, unknown
from verl_multiturn.panel import FIRST_ID

SPLITS = ("test", "val", "train")
SHARES = {0: "test", 1: "val"}  # of ten equal shares of the hashes; the others train
NAMES = {"dev": "val", "valid": "val", "validation": "val"} | {split: split for split in SPLITS}
SUFFIXES = (".jsonl", ".parquet")
FORM = "a row has question, golden_answers (or answer) and, if known, data_source and split"


@dataclass(frozen=True)
class Question:
    """A question.

    Attributes:
        text: as the policy reads it.
        answers: the golden ones; any of them is right.
        source: its data set or kind; the task type.
        split: "train", "val" or "test" if the file says so.
        chain: titles of the passages that lead to the answer, in order; empty: unknown.
    """

    text: str
    answers: tuple[str, ...]
    source: str = "default"
    split: str | None = None
    chain: tuple[str, ...] = ()

    @property
    def content(self) -> str:
        """The question normalised: two that ask the same in the same words are one task."""
        return normalise(self.text)

    @cached_property
    def key(self) -> str:
        """The task id: 64 bits of `content`, whatever file and order the question comes from."""
        return hashlib.blake2b(self.content.encode(), digest_size=8).hexdigest()


class Questions:
    """Questions by task id, in three disjoint splits.

    A question is in the split its file names. Where no file names one for val (or test), that split
    takes a tenth of the others by the hash of the question, so that a question stays where it is
    whatever is added. One that occurs twice counts once, held out rather than trained on.

    Args:
        questions: in any order.

    Raises:
        ValueError: there is none.
    """

    def __init__(self, questions: Iterable[Question]) -> None:
        given = sorted(questions, key=lambda q: SPLITS.index(q.split or "train"))
        if not given:
            raise ValueError("there are no questions")
        named = {question.split for question in given}
        shares = {share: split for share, split in SHARES.items() if split not in named}
        self._by_key: dict[str, Question] = {}
        self._splits: dict[str, list[str]] = {split: [] for split in SPLITS}
        for question in given:
            key = question.key
            if key in self._by_key:
                continue
            self._by_key[key] = question
            held_out = question.split if question.split != "train" else None
            self._splits[held_out or shares.get(int(key, 16) % 10, "train")].append(key)
        for keys in self._splits.values():
            keys.sort()  # hashes: a fixed order, which says nothing

    def __len__(self) -> int:
        return len(self._by_key)

    def tasks(self, split: str) -> list[Seed]:
        """The task ids of a split.

        Raises:
            ValueError: no such split.
        """
        if split not in self._splits:
            raise unknown("split", split, SPLITS)
        return list(self._splits[split])

    def find(self, seed: Seed) -> Question:
        """The question of a task id, or the one that a number draws from its range's split.

        The ranges are those of `panel.FIRST_ID`: numbers from 0 draw from test, from 500,000 val, from
        1,000,000 train. So panels and demonstrations given by numbers stay apart by question.

        Raises:
            ValueError: no such id, or the split is empty.
        """
        if isinstance(seed, int):
            split = max((name for name in SPLITS if FIRST_ID[name] <= max(seed, 0)), key=FIRST_ID.__getitem__)
            keys = self._splits[split]
            if not keys:
                raise ValueError(
                    f"seed {seed} draws from split {split!r}, which is empty: all {len(self)} questions "
                    f"are in {', '.join(name for name in SPLITS if self._splits[name])}"
                )
            seed = keys[derive_seed("question", seed) % len(keys)]
        if seed not in self._by_key:
            raise ValueError(f"no question has the id {seed!r}; tasks(split) lists the {len(self)} ids")
        return self._by_key[seed]


def read_questions(paths: Sequence[str]) -> Iterator[Question]:
    """The questions of JSONL and parquet files, in the layouts of Search-R1 and verl-agent too.

    Raises:
        ValueError: no such file, another kind of file, or a row without question or answers.
    """
    for path in paths:
        for number, row in _rows(path):
            try:
                yield _question(row)
            except ValueError as error:
                raise ValueError(f"{path}, row {number}: {error}; {FORM}") from None


def _rows(path: str) -> Iterator[tuple[int, Any]]:
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise unknown("kind of question file", path, [f"*{known}" for known in SUFFIXES])
    if suffix == ".jsonl":
        yield from read_jsonl(path)
        return
    import pandas as pd

    if not Path(path).is_file():
        raise ValueError(f"no file {path!r} (the working directory is {Path.cwd()})")
    with intact(path, "download or write it again"):
        rows = pd.read_parquet(path).to_dict("records")
    yield from enumerate(rows, 1)


def _question(row: Any) -> Question:
    if not isinstance(row, Mapping):
        raise ValueError(f"{row!r:.60} is not a row of names and values")
    # verl-agent keeps the question below env_kwargs, verl below extra_info, Search-R1 a second copy of the
    # answers below reward_model: what stands further out counts first.
    inner = (row.get(name) for name in ("env_kwargs", "extra_info", "reward_model"))
    parts = [row, *(part for part in inner if isinstance(part, Mapping))]

    def texts(*names: str) -> tuple[str, ...]:
        return next((found for name in names for part in parts if (found := _texts(part.get(name)))), ())

    question, answers = texts("question"), texts("golden_answers", "answers", "answer", "ground_truth")
    if not (question and normalise(question[0])):
        raise ValueError(f"no question in {sorted(row)}")
    if not answers:
        raise ValueError(f"no answer in {sorted(row)}")
    source, split = [*texts("data_source"), "default"][0], [*texts("split"), None][0]
    if split is not None and split not in NAMES:
        raise unknown("split", split, NAMES)
    # verl's own preparation of Search-R1's data puts a prefix before the source
    text = " ".join(question[0].split())
    return Question(text, answers, source.removeprefix("searchR1_"), split and NAMES[split])


def _texts(value: Any) -> tuple[str, ...]:
    """A text, or a list or array of texts, perhaps below `target`; without the empty ones."""
    if isinstance(value, Mapping):
        value = value.get("target")
    if hasattr(value, "tolist"):
        value = value.tolist()
    values = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    return tuple(text.strip() for text in values if isinstance(text, str) and text.strip())
