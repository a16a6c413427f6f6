"""Questions in plain words: which name one guesses, and which phrases stand in it."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

LEAD = re.compile(
    r"^(?:(?:so|ok|okay|well|then|now|finally|maybe|perhaps|i think|i guess|i believe|i say|guess) )*"
    r"(?:(?:my|the) (?:guess|answer|final answer) is |are you thinking of |"
    r"(?:is|are|was|could|can|might|would|must|does) (?:it|this|that|they|these|"
    r"the (?:hidden |secret )?(?:thing|object|item|word|city|answer))(?: be| happen to be)? |"
    r"(?:it|this|that) (?:is|s|must be|might be|could be) |its |they are )?"
    r"(?:(?:maybe|perhaps|just|called|named|you) )*"
)
TAIL = re.compile(r"(?: ,)?(?: is it| isn t it| right| correct| please)+$")
ARTICLE = re.compile(
    r"^(?:(?:a|an|the|some|any|your|my|one|(?:pair|piece|set|sheet|bottle|tube|pack|city|kind)s? of) )+"
)


def tokens(text: str) -> list[str]:
    """Lower-case words without accents; a comma is a token."""
    plain = unicodedata.normalize("NFKD", text.lower())
    plain = "".join(letter for letter in plain if not unicodedata.combining(letter))
    return re.findall(r"[a-z0-9]+|,", plain)


def normal(text: str) -> str:
    """Equal for texts that differ in case, accents and punctuation only."""
    return " ".join(token for token in tokens(text) if token != ",")


def stems(word: str) -> set[str]:
    """What an English word may be the plural of, itself included."""
    found = {word}
    if word.endswith("s") and not word.endswith("ss"):
        found.add(word[:-1])
        if word.endswith("es"):
            found.add(word[:-2])
        if word.endswith("ies"):
            found.add(f"{word[:-3]}y")
        if word.endswith("ves"):
            found |= {f"{word[:-3]}f", f"{word[:-3]}fe"}
    return found


class Names:
    """Names and their aliases, found in guesses whatever their article, number and case.

    Args:
        names: name -> how it may be called; empty texts are left out.
        beside: parts of a list that do not count, as the country in "Paris, France".

    Raises:
        ValueError: two names may be called the same.
    """

    def __init__(self, names: Mapping[str, Iterable[str]], beside: Iterable[str] = ()) -> None:
        self._index: dict[str, str] = {}
        self._beside = {normal(part) for part in beside}
        for name, aliases in names.items():
            for phrase in (phrase for alias in filter(None, aliases) for phrase in _phrases(alias)):
                if self._index.setdefault(phrase, name) != name:
                    raise ValueError(f"{name} and {self._index[phrase]} may both be called {phrase!r}.")

    def find(self, phrase: str) -> str | None:
        """The name that a phrase is, such as "a dog", "Dogs" or "pair of pants"; else None."""
        bare = ARTICLE.sub("", normal(phrase))
        return next((self._index[one] for one in _phrases(bare) if one in self._index), None)

    def guessed(self, question: str) -> list[str | None]:
        """What a question guesses: one entry for each part of a list, repeats left out; None: no name.

        "Is it a dog?" -> ["dog"]; "Is it a dog or an animal?" -> ["dog", None]; "Is it alive?" -> [None].
        """
        parts = re.split(r" ?(?:,|\bor\b) ?", TAIL.sub("", " ".join(tokens(question))))
        kept = [part for part in parts if part and part not in self._beside]
        found = [self.find(LEAD.sub("", part)) for part in kept]
        return list(dict.fromkeys(found)) or [None]


class Cues:
    """Phrases that ask for something, found in a question as whole words, in singular or plural.

    Args:
        cues: what is asked for -> phrases.

    Raises:
        ValueError: one phrase asks for two things.
    """

    def __init__(self, cues: Mapping[str, Iterable[str]]) -> None:
        self._asked: dict[str, str] = {}
        for asked, phrases in cues.items():
            for phrase in map(normal, phrases):
                if self._asked.setdefault(phrase, asked) != asked:
                    raise ValueError(f"{phrase!r} asks for {asked!r} and for {self._asked[phrase]!r}.")
        longest_first = sorted(self._asked, key=len, reverse=True)
        self._pattern = re.compile(rf"\b({'|'.join(map(re.escape, longest_first))})(?:s|es)?\b")

    def find(self, question: str) -> list[str]:
        """What a question asks for, each thing once, in order."""
        found = self._pattern.finditer(normal(question))
        return list(dict.fromkeys(self._asked[match.group(1)] for match in found))


def yes_no(text: str, true: Sequence[Set[str]], names: Iterable[str]) -> dict[str, str] | None:
    """The answer for each name to a question that asks for all of some things, with "or" for any of them.

    "not", "never" and "without" turn the answer round.

    Args:
        text: the question, `normal`.
        true: of each thing asked for, the names it is true of; none: nothing is known of the question.
        names: all names.
    """
    if not true:
        return None
    words = set(text.split())
    some, turned = (any if "or" in words else all), bool(words & {"not", "never", "without"})
    return {name: "Yes." if some(name in one for one in true) != turned else "No." for name in names}


def _phrases(text: str) -> Iterator[str]:
    """A name with each stem of its last word; the name as it is first."""
    *before, last = normal(text).split() or [""]
    for stem in sorted(stems(last), key=len, reverse=True):
        yield " ".join([*before, stem])
