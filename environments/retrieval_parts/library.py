"""Questions and the retriever that goes with them: opened once in a process, shared by all environments."""

import importlib
from dataclasses import dataclass
from threading import Lock
from typing import Any

from environments.retrieval_parts.bm25 import Index, digest_of
from environments.retrieval_parts.passages import Retriever, read_corpus
from environments.retrieval_parts.questions import Questions, read_questions
from environments.retrieval_parts.remote import HTTPRetriever
from environments.retrieval_parts.world import generate

_open: dict["Source", "Library"] = {}
_lock = Lock()


@dataclass(frozen=True)
class Source:
    """What a library is made of: the arguments of `SearchQA` that decide it.

    Raises:
        ValueError: a combination that makes no sense.
    """

    questions: tuple[str, ...]  # files; empty: generated
    corpus: str | None
    retriever: tuple[str, ...]  # addresses, or one "pkg.module:name"
    passages: int
    world_seed: int
    timeout: float
    tries: int

    def __post_init__(self) -> None:
        if self.corpus is not None and self.retriever:
            raise ValueError("give a corpus or a retriever, not both: a retriever brings its own passages")
        if bool(self.questions) != bool(self.corpus or self.retriever):
            missing = "questions=PATH" if not self.questions else "corpus=PATH or retriever=URL"
            raise ValueError(
                f"questions and passages belong together: also give {missing}, or neither for generated ones"
            )


class Library:
    """A retriever and its questions. A pickle of it holds the source only.

    Args:
        source: see `Source`; use `library`, which opens each one once.

    Raises:
        ValueError: a file is missing or malformed.
    """

    retriever: Retriever

    def __init__(self, source: Source) -> None:
        self.source = source
        if not source.questions:
            world = generate(source.passages, source.world_seed)
            digest = digest_of(f"{p.title}\0{p.text}\0".encode() for p in world.passages)
            self.questions = Questions(world.questions)
            self.retriever = Index.cached(digest, lambda: world.passages, len(world.passages))
            return
        read = list(read_questions(source.questions))
        if not read:
            raise ValueError(f"{', '.join(source.questions)}: no question in it; download or write it again")
        self.questions = Questions(read)
        self.retriever = _retriever(source)

    def __reduce__(self) -> tuple[Any, ...]:
        return library, (self.source,)


def library(source: Source) -> Library:
    """The library of a source, opened now if this process has not done so yet."""
    with _lock:
        if source not in _open:
            _open[source] = Library(source)
        return _open[source]


def _retriever(source: Source) -> Retriever:
    if source.corpus is not None:
        corpus = source.corpus
        return Index.cached(_digest(corpus), lambda: read_corpus(corpus))
    name = source.retriever[0]
    if "://" not in name:
        return _imported(name)
    return HTTPRetriever(source.retriever, source.timeout, source.tries)


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return digest_of(iter(lambda: file.read(1 << 20), b""))
    except OSError as error:
        raise ValueError(f"no corpus {path!r}: {error.strerror}") from None


def _imported(name: str) -> Retriever:
    """A retriever of the user's: "pkg.module:name", called without arguments."""
    module, _, attribute = name.partition(":")
    try:
        made: Retriever = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"retriever {name!r} is no address (http://host/retrieve) and no pkg.module:name ({error})"
        ) from None
    return made
