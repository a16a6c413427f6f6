"""BM25 over passages: built once into a cache folder, then memory-mapped by every process.

Parameters are those of Pyserini's defaults: k1 = 0.9, b = 0.4, English stop words and stems. Scores
are bm25s's "lucene" variant; they are not bit-equal to Lucene's, which rounds document lengths.
"""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from environments.retrieval_parts.passages import Passage
from environments.retrieval_parts.ranking import best
from verl_multiturn.cache import built, cache_folder
from verl_multiturn.errors import intact

K1, B = 0.9, 0.4
LAYOUT = 1  # of the folder; part of the digest
AGAIN = "delete that folder, it is built again"
PASSAGES, OFFSETS, ABOUT = "passages.jsonl", "offsets.npy", "about.json"


class Index:
    """An index on disk, open. Threads may share it: nothing in it changes.

    Args:
        folder: written by `Index.cached`.
        documents: how many it must hold; None: as many as it says.

    Raises:
        ValueError: it is damaged, or holds another number of documents than it should.
    """

    def __init__(self, folder: Path, documents: int | None = None) -> None:
        import bm25s

        self.folder = folder
        with intact(folder, AGAIN):
            self._bm25: Any = bm25s.BM25.load(folder, mmap=True)
            self._offsets = np.load(folder / OFFSETS, mmap_mode="r")  # (N + 1,) bytes
            self._bytes = np.memmap(folder / PASSAGES, np.uint8, "r")
            self.documents = int(orjson.loads((folder / ABOUT).read_bytes())["documents"])
            counts = {self.documents, int(self._bm25.scores["num_docs"]), len(self._offsets) - 1}
        if documents is not None:
            counts.add(documents)
        if len(counts) > 1 or int(self._offsets[-1]) != len(self._bytes):
            raise ValueError(
                f"the index in {folder} does not fit its corpus (documents: "
                f"{', '.join(map(str, sorted(counts)))}): {AGAIN}"
            )

    @classmethod
    def cached(
        cls,
        digest: str,
        passages: Callable[[], Iterable[Passage]],
        documents: int | None = None,
        root: Path | None = None,
    ) -> "Index":
        """The index of a corpus, built now if the cache has none; other processes wait for it.

        Args:
            digest: of the corpus.
            passages: gives them; called only if the index must be built.
            documents: how many there are, where that is known.
            root: folder of the indices; None: `retrieval` in the package's cache.

        Raises:
            ValueError: the corpus is empty, or the index does not fit it.
        """
        folder = (root or cache_folder("retrieval")) / _name(digest)
        return cls(built(folder, lambda draft: _build(draft, list(passages()))), documents)

    def __len__(self) -> int:
        return self.documents

    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Up to `k` passages that share a stem with the query, best first; ties in corpus order."""
        return [[self._passage(number) for number in self.numbers(query, k)] for query in queries]

    def numbers(self, query: str, k: int) -> list[int]:
        """Which documents `search` returns, counted from 0."""
        with intact(self.folder, AGAIN):
            return best(self._bm25, _stems([query])[0], k)

    def _passage(self, number: int) -> Passage:
        with intact(self.folder, AGAIN):
            start, end = int(self._offsets[number]), int(self._offsets[number + 1])
            return Passage(*orjson.loads(self._bytes[start:end].tobytes()))


def digest_of(parts: Iterable[bytes]) -> str:
    """128 bits of everything in `parts`."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def _name(digest: str) -> str:
    import bm25s

    return digest_of([f"{LAYOUT} {K1} {B} {bm25s.__version__} {digest}".encode()])


def _stems(texts: list[str]) -> list[list[str]]:
    import bm25s
    import Stemmer

    # A stemmer of its own for each call: one may not be shared by threads.
    stemmer = Stemmer.Stemmer("english")
    stems: list[list[str]] = bm25s.tokenize(
        texts, stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False
    )
    return stems


def _build(folder: Path, passages: list[Passage]) -> None:
    import bm25s

    if not passages:
        raise ValueError("the corpus is empty: an index needs at least one passage")
    stems = _stems([f"{passage.title} {passage.text}" for passage in passages])
    if not any(stems):
        raise ValueError("the corpus has no words that could be searched for")
    bm25 = bm25s.BM25(k1=K1, b=B, method="lucene")
    bm25.index(stems, show_progress=False)
    bm25.save(folder, show_progress=False)
    lines = [orjson.dumps([passage.title, passage.text]) + b"\n" for passage in passages]
    (folder / PASSAGES).write_bytes(b"".join(lines))
    np.save(folder / OFFSETS, np.cumsum([0, *map(len, lines)], dtype=np.int64))
    (folder / ABOUT).write_bytes(orjson.dumps({"documents": len(passages)}))
