"""Passages, where they come from and how they are shown; what a retriever is."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

FORMS = 'a line is {"title": ..., "text": ...} or {"contents": "title\\ntext"}'


@dataclass(frozen=True, slots=True)
class Passage:
    """What a search brings back."""

    title: str
    text: str

    @property
    def key(self) -> str:
        """The same for the same title and text, in every process."""
        return hashlib.blake2b(f"{self.title}\0{self.text}".encode(), digest_size=8).hexdigest()


class Retriever(Protocol):
    """Finds passages. Shared by the threads of a process; the same queries must give the same passages."""

    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Up to `k` passages per query, best first."""
        ...


def to_passage(record: Any) -> Passage:
    """A passage from a record of a corpus or of a retriever's reply.

    Search-R1's `contents` holds the title, in quotes, as its first line (arXiv 2503.09516).

    Raises:
        ValueError: neither `contents` nor `text`.
    """
    if isinstance(record, Mapping):
        if isinstance(contents := record.get("contents"), str):
            title, _, rest = contents.partition("\n")
            return Passage(title.strip().strip('"'), rest.strip())
        if isinstance(text := record.get("text"), str):
            return Passage(str(record.get("title") or ""), text)
    raise ValueError(f"not a passage: {record!r:.80}; {FORMS}")


def read_corpus(path: str) -> Iterator[Passage]:
    """The passages of a JSONL file.

    Raises:
        ValueError: no such file, no passage in it, or a line that is not one; says which.
    """
    number = 0
    for number, record in read_jsonl(path):
        try:
            yield to_passage(record)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not number:
        raise ValueError(f"{path} has no passage: {FORMS}")


def read_jsonl(path: str) -> Iterator[tuple[int, Any]]:
    """Number (from 1) and content of each line that is not blank.

    Raises:
        ValueError: no such file, or a line that is not JSON.
    """
    if not Path(path).is_file():
        raise ValueError(f"no file {path!r} (the working directory is {Path.cwd()})")
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield number, orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from None


def information(passages: Iterable[Passage], most: int) -> str:
    """The block that a search shows; each text is cut after `most` characters."""
    lines = [
        f"Doc {number} (Title: {passage.title}) {' '.join(_cut(passage.text, most).split())}"
        for number, passage in enumerate(passages, 1)
    ]
    return "\n".join(["<information>", *lines, "</information>"])


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most].rstrip()} …"
