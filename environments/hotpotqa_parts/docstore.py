"""Pages by title: what `search` opens, and what it offers where no page has that title."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from heapq import nsmallest
from typing import NamedTuple

from environments.retrieval_parts.scoring import normalise


class Page(NamedTuple):
    """A paragraph of an encyclopedia, sentence by sentence."""

    title: str
    sentences: tuple[str, ...]


class Docstore:
    """Pages in memory. Threads may share it: nothing in it changes.

    Args:
        pages: of two with the same title the first is kept.

    Raises:
        ValueError: there is none.
    """

    def __init__(self, pages: Iterable[Page]) -> None:
        self._pages: dict[str, Page] = {}
        for page in pages:
            self._pages.setdefault(page.title, page)
        if not self._pages:
            raise ValueError("there are no pages")
        self._titles: dict[str, str] = {}  # normalised -> the first that reads so
        self._by_word: dict[str, list[str]] = defaultdict(list)
        for title in self._pages:
            key = normalise(title)
            self._titles.setdefault(key, title)
            for word in dict.fromkeys(key.split()):
                self._by_word[word].append(title)

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, title: str) -> Page:
        return self._pages[title]

    def find(self, title: str) -> Page | None:
        """The page of that title; where none is spelt so, of the first that differs in form only."""
        title = " ".join(title.split())
        found = title if title in self._pages else self._titles.get(normalise(title))
        return None if found is None else self._pages[found]

    def similar(self, title: str, k: int = 5) -> list[str]:
        """Up to `k` titles that share words with it, by F1 of the words, ties in the store's order."""
        words = dict.fromkeys(normalise(title).split())
        shared = Counter(other for word in words for other in self._by_word.get(word, ()))
        order = {other: place for place, other in enumerate(shared)}

        def rank(other: str) -> tuple[float, int]:
            return -2 * shared[other] / (len(words) + len(set(normalise(other).split()))), order[other]

        return nsmallest(k, shared, key=rank)
