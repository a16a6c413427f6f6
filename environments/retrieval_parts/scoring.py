"""How an answer is scored: exact match and token F1 after SQuAD's normalisation (arXiv 1606.05250)."""

import re
import string
from collections import Counter
from collections.abc import Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, words one space apart."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, golden: Iterable[str]) -> float:
    """1.0 if the answer is one of the golden ones, else 0.0."""
    return float(normalise(answer) in map(normalise, golden))


def f1(answer: str, golden: Iterable[str]) -> float:
    """F1 of the words shared with the golden answer that fits best, in [0, 1]."""
    return max((_f1(normalise(answer).split(), normalise(one).split()) for one in golden), default=0.0)


def _f1(said: list[str], right: list[str]) -> float:
    if not said or not right:
        return float(said == right)
    shared = (Counter(said) & Counter(right)).total()
    return 2 * shared / (len(said) + len(right))  # = 2PR / (P + R)
