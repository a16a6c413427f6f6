"""Questions with the pages they are answered from: the user's HotPotQA files, or a generated world.

A record of HotPotQA (arXiv 1809.09600), as its authors' JSON and as Hugging Face's parquet have it:

    {question, answer, type, supporting_facts, context}
    context: [[title, [sentence, ...]], ...]     or {title: [...], sentences: [[...], ...]}
    supporting_facts: [[title, number], ...]     or {title: [...], sent_id: [...]}
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import orjson

from environments.hotpotqa_parts.docstore import Docstore, Page
from environments.retrieval_parts.questions import NAMES, Question, Questions
from environments.retrieval_parts.world import generate
from verl_multiturn.errors import intact, unknown

SUFFIXES = (".json", ".parquet")
_open: dict["Source", "Library"] = {}
_lock = Lock()


@dataclass(frozen=True)
class Source:
    """Where questions and pages come from.

    Attributes:
        files: (split or None, path) of HotPotQA's files; empty: generated.
        passages: pages of the generated world.
        world_seed: of the generated world.
    """

    files: tuple[tuple[str | None, str], ...]
    passages: int
    world_seed: int


class Library:
    """Questions and a docstore of all their pages. A pickle of it holds the source only.

    Args:
        source: see `Source`; use `library`, which opens each one once.

    Raises:
        ValueError: a file is missing or malformed.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        if source.files:
            read = [one for split, path in source.files for one in _read(path, split)]
            pages, names = [page for _, some in read for page in some], ", ".join(p for _, p in source.files)
            if not pages:
                lacks = "pages" if read else "questions"
                raise ValueError(f"there are no {lacks} in {names}: download it again")
            self.questions = Questions(question for question, _ in read)
            self.pages = Docstore(pages)
            return
        world = generate(source.passages, source.world_seed)
        self.questions = Questions(world.questions)
        self.pages = Docstore(Page(p.title, tuple(sentences(p.text))) for p in world.passages)

    def __reduce__(self) -> tuple[Any, ...]:
        return library, (self.source,)


def library(source: Source) -> Library:
    """The library of a source, opened now if this process has not done so yet."""
    with _lock:
        if source not in _open:
            _open[source] = Library(source)
        return _open[source]


def files(data: Any) -> tuple[tuple[str | None, str], ...]:
    """The argument `data` of `HotpotQA` as (split, path): a path, a list of them, or {split: path}.

    Raises:
        ValueError: an unknown split, or something else than paths.
    """
    if data is None:
        return ()
    if isinstance(data, str):
        return ((None, data),)
    pairs = list(data.items()) if isinstance(data, Mapping) else [(None, path) for path in data]
    for split, path in pairs:
        if split is not None and split not in NAMES:
            raise unknown("split of data", split, NAMES)
        if not isinstance(path, str):
            raise ValueError(f"data names files, {path!r} is none")
    return tuple((split and NAMES[split], path) for split, path in pairs)


def sentences(text: str) -> list[str]:
    """A text at the spaces behind full stops, question and exclamation marks."""
    return re.split(r"(?<=[.?!])\s+", text.strip())


def _read(path: str, split: str | None) -> Iterator[tuple[Question, list[Page]]]:
    """Questions and the pages of each.

    Raises:
        ValueError: no such file, another kind of file, or a record that lacks something.
    """
    for number, record in enumerate(_records(path), 1):
        try:
            yield _question(record, split), _pages(record["context"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"{path}, record {number}: {why}; a record of HotPotQA has question, answer, "
                "supporting_facts and context"
            ) from None


def _records(path: str) -> list[Any]:
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise unknown("kind of HotPotQA file", path, [f"*{known}" for known in SUFFIXES])
    if not Path(path).is_file():
        raise ValueError(f"no file {path!r} (the working directory is {Path.cwd()})")
    if suffix == ".parquet":
        import pandas as pd

        with intact(path, "download it again"):
            return list(pd.read_parquet(path).to_dict("records"))
    try:
        records = orjson.loads(Path(path).read_bytes())
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(records, list):
        raise ValueError(f"{path}: not a list of records, as in HotPotQA's own files")
    return records


def _question(record: Any, split: str | None) -> Question:
    text, answer = record["question"], record["answer"]
    if not all(isinstance(value, str) and value.strip() for value in (text, answer)):
        raise ValueError("question and answer must be texts")
    facts = record.get("supporting_facts") or ()
    titles = facts["title"] if isinstance(facts, Mapping) else [fact[0] for fact in facts]
    kind = str(record.get("type") or "default")
    return Question(" ".join(text.split()), (answer.strip(),), kind, split, tuple(dict.fromkeys(titles)))


def _pages(context: Any) -> list[Page]:
    pairs = context
    if isinstance(context, Mapping):
        pairs = zip(context["title"], context["sentences"], strict=True)
    return [
        Page(" ".join(str(title).split()), tuple(text for s in some if (text := " ".join(str(s).split()))))
        for title, some in pairs
    ]
