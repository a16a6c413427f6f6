"""The shop's search: BM25 over title, description, first feature and options, built once, memory-mapped.

The numbers are those of the original's Lucene index (k1 0.9, b 0.4, Porter stemming, Lucene's English
stop words, WebShop, arXiv 2207.01206). Ranks agree with Lucene's up to its rounding of document
lengths and details of its tokenizer.
"""

import re
import threading
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from environments.retrieval_parts.ranking import best
from environments.webshop_parts.records import Product

RESULTS = 50  # products a search returns
WORD = re.compile(r"\w+")
POSSESSIVE = re.compile(r"['’]s\b")


def document(product: Product) -> str:
    """The text that a product is found by."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    first = product.features[0] if product.features else ""
    return " ".join((product.title, product.description, first, options))


class Stems:
    """Text -> stems; one per index, because a stemmer is not thread-safe."""

    def __init__(self) -> None:
        import Stemmer
        from bm25s.stopwords import STOPWORDS_EN

        self.stop = frozenset(STOPWORDS_EN)
        self.stemmer = Stemmer.Stemmer("porter")

    def __call__(self, text: str) -> list[str]:
        """Lower-case stems in the order of the text, stop words left out."""
        words = WORD.findall(POSSESSIVE.sub("", text.lower()))
        return list(self.stemmer.stemWords([word for word in words if word not in self.stop]))


def build(documents: Iterable[str], folder: Path) -> None:
    """Index the documents, in order, into `folder`.

    Raises:
        ValueError: no document, or none with a word in it.
    """
    import bm25s

    stems = Stems()
    corpus = [stems(text) for text in documents]
    if not any(corpus):
        raise ValueError(f"a search index needs products with words in them, not {len(corpus)} without.")
    index = bm25s.BM25(method="lucene", k1=0.9, b=0.4)
    index.index(corpus, show_progress=False)
    index.save(folder, show_progress=False)


class Search:
    """A built index, shared by all processes of a machine through the page cache.

    Args:
        folder: what `build` wrote.
        size: how many documents it must hold.

    Raises:
        ValueError: it holds another number: it is not the index of these products.
    """

    def __init__(self, folder: Path, size: int) -> None:
        import bm25s

        self.index: Any = bm25s.BM25.load(folder, mmap=True)
        found = self.index.scores["num_docs"]
        if found != size:
            raise ValueError(
                f"the search index {folder} holds {found} documents, the catalogue {size} products: "
                "delete the folder, it is built again."
            )
        self.stems, self.lock = Stems(), threading.Lock()
        self.find = lru_cache(maxsize=4096)(self._find)

    def _find(self, words: str) -> tuple[int, ...]:
        """The best 50 documents that hold any of the words, best first; ties in catalogue order."""
        with self.lock:
            stems = self.stems(words)
        return tuple(best(self.index, stems, RESULTS))
