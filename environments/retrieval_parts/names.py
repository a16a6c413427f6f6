"""Names in a text, as far as capital letters tell: what a searcher without a model would search for."""

import re
from collections.abc import Iterable

from environments.retrieval_parts.scoring import normalise

# Capitalised words in a row, "of" between them allowed: what a name looks like.
NAME = re.compile(r"[A-Z][\w'-]*(?: (?:of )?[A-Z][\w'-]*)*")
NO_NAME = frozenset("In The Which Who What When Where How Is Was Are A An It He She They".split())


def names(texts: Iterable[str]) -> list[str]:
    """The names in the texts, each once, in the order of their first occurrence."""
    found = (_without_first(name) for text in texts for name in NAME.findall(text))
    return list(dict.fromkeys(name for name in found if normalise(name)))


def _without_first(name: str) -> str:
    """A name without a word that is capital only because it begins a sentence."""
    first, _, rest = name.partition(" ")
    return rest if first in NO_NAME else name
