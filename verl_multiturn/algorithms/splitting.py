"""Where to cut a response into the steps of VinePPO (arXiv:2410.01679), as character boundaries.

A rule maps a text y to 0 = b_0 < … < b_T = len(y); the steps put together are y, and white space
between two steps belongs to the second. "line" is the authors' rule for GSM8K, "math" the one for MATH.

Rules are total: whatever they cannot cut is one step. The authors' code fails on a text with two
answer marks ("line": the last one counts here), on short texts ("math": one step) and on a formula
inside another; it drops those trajectories, which favours long answers. For training, round each
boundary up to the next token's start; never tokenise a step again.
"""

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise

from verl_multiturn.errors import unknown

ANSWER = "\n#### "  # GSM8K's mark before the final answer
LONG = 100  # "math": a longer step is cut further
SHORT = 20  # … a shorter one is merged with the next
HALF = 40  # … neither part of a sentence that is cut may be shorter
HIDDEN = 60  # … a formula counts as this many characters where its inside does not matter
BLOT = "\0"

Span = tuple[int, int]

# Before white space and a capital, behind a period that does not end a word of one or two letters.
_ABBREVIATION = r"(?<!\b[A-Za-z]\.)(?<!\s[A-Za-z]{2}\.)"
_PERIOD = re.compile(rf"(?<=\.){_ABBREVIATION}(?=\s+[A-Z])")
_SENTENCE = re.compile(rf"(?<=[.!?]){_ABBREVIATION}(?=\s+[A-Z])")
# How a formula begins and how it ends; what is found first hides what is inside it.
_FORMULA = [
    (re.compile(rf"{begins}.*?{ends}", re.DOTALL), re.compile(ends))
    for begins, ends in (
        (r"\[asy\]", r"\[/asy\]"),
        (r"\$\\begin\{tabular\}", r"\\end\{tabular\}\$"),
        (r"\\begin\{tabular\}", r"\\end\{tabular\}"),
        (r"\\\(", r"\\\)"),
        (r"\\\[", r"\\\]"),
        (r"\$\$", r"\$\$"),
        (r"(?<!\\)\$", r"[^\\]\$(?!\$)"),
    )
]
_BEGIN, _END = (re.compile(rf"\\{word}\{{([^{{}}]*)\}}") for word in ("begin", "end"))
_CLOSED = (".$", ".$$", r".\)", r".\]")  # a formula that ends a sentence
_OPENING = re.compile(r"\$\$?|\\\(|\\\[|\\begin\{[^}]*\}|\[asy\]")
_IN_SENTENCE = [re.compile(pattern) for pattern in (r",", r"\sand(?=\s)", r":", r"\sto(?=\s)")]
_IN_FORMULA = [re.compile(p) for p in (r",\$", r",\\\)", r",\\\]", "=", r"\\equiv", r"\+", r"\\cancelto")]


def split_steps(text: str, rule: str = "line") -> list[int]:
    """Boundaries of the steps: [0, …, len(text)], strictly increasing; [0] for an empty text.

    Args:
        text: a response.
        rule: "line": a step per line; blank lines before the first are part of it, a GSM8K answer
            ("#### 42") is part of the last, and blank lines in between are steps, as the authors
            have it. "math": by sentences, lines and formulas, to about 20 to 100 characters.
            "sentence": by sentences (. ! ?) and lines, blank ones being part of the next. "none":
            one step.
    """
    if rule not in _RULES:
        raise unknown("rule", rule, _RULES)
    return sorted({0, len(text), *_RULES[rule](text)})


def _lines(text: str) -> list[int]:
    mark = text.rfind(ANSWER)
    head = text if mark < 0 else text[:mark]
    starts = _newlines(head)
    steps = pairwise([0, *starts, len(head)])
    written = [start for start, stop in steps if head[start:stop].strip()]
    if not written:
        return []
    return [start for start in starts if written[0] < start <= written[-1]]


def _sentences(text: str) -> list[int]:
    cuts = {0, len(text), *_newlines(text), *(m.start() for m in _SENTENCE.finditer(text))}
    written = list(accumulate((not character.isspace() for character in text), initial=0))
    return _merge(cuts, lambda start, stop: written[start] == written[stop])


def _math(text: str) -> list[int]:
    """The four passes of the authors, on offsets of the text itself."""
    formulas, masked = _formulas(text)

    def incomplete(start: int, stop: int) -> bool:
        piece = masked[start:stop]
        return piece == "\n" or (len(piece) < SHORT and piece[-1] != "." and BLOT not in piece)

    def small(start: int, stop: int) -> bool:
        return stop - start < SHORT and not text[start:stop].endswith(_CLOSED)

    def fragment(start: int, stop: int) -> bool:
        return stop - start < 3 or bool(_OPENING.fullmatch(text[start:stop].strip()))

    ends = {0, len(text)}
    cuts = [*_newlines(masked), *(m.start() for m in _PERIOD.finditer(masked))]
    cuts = _merge(ends.union(cuts), incomplete, backward=False)
    closed = (stop for start, stop in formulas if text[start:stop].endswith(_CLOSED))
    cuts = _merge(ends.union(cuts, closed), small)
    inside = (start + i for start, stop in formulas for i in _newlines(text[start:stop]))
    cuts = _merge(ends.union(cuts, inside), fragment)
    for start, stop in pairwise([0, *cuts, len(text)]):
        cuts += _break(text, formulas, start, stop)
    return cuts


def _newlines(text: str) -> list[int]:
    return [i for i, character in enumerate(text) if character == "\n"]


def _merge(cuts: Iterable[int], unfit: Callable[[int, int], bool], backward: bool = True) -> list[int]:
    """Inner cuts, without those behind an unfit step; an unfit last step joins the one before it."""
    *cuts, end = sorted(set(cuts))
    kept: list[int] = []
    start = 0
    for cut in cuts[1:]:
        if not unfit(start, cut):
            kept.append(cut)
            start = cut
    if kept and backward and unfit(start, end):
        kept.pop()
    return kept


def _formulas(text: str) -> tuple[list[Span], str]:
    """The outermost formulas, in order, and the text with them blotted out, of equal length."""
    spans: list[Span] = []
    for begins_and_ends in (*_FORMULA, None):
        found = _environments(text) if begins_and_ends is None else _found(*begins_and_ends, text)
        starts = [start for start, _ in found]
        spans = [span for span in spans if not _inside(span, found, starts)] + found
        pieces, at = [], 0
        for start, stop in found:
            pieces += [text[at:start], BLOT * (stop - start)]
            at = stop
        text = "".join([*pieces, text[at:]])
    return sorted(spans), text


def _found(whole: re.Pattern[str], ends: re.Pattern[str], text: str) -> list[Span]:
    """Matches of `whole`; a text without its end behind the last one is not searched: time stays linear."""
    last = max((match.end() for match in ends.finditer(text)), default=0)
    return [match.span() for match in whole.finditer(text, 0, last)]


def _environments(text: str) -> list[Span]:
    """From each beginning of an environment to the next end of its name, none inside another."""
    ends: dict[str, list[Span]] = defaultdict(list)
    for match in _END.finditer(text):
        ends[match[1]].append(match.span())
    spans, at = list[Span](), 0
    for match in _BEGIN.finditer(text):
        later = ends[match[1]]
        place = bisect_left(later, (match.end(), 0))
        if match.start() >= at and place < len(later):
            spans.append((match.start(), later[place][1]))
            at = spans[-1][1]
    return spans


def _inside(span: Span, found: list[Span], starts: list[int]) -> bool:
    place = bisect_right(starts, span[0]) - 1
    return place >= 0 and span[1] <= found[place][1]


def _break(text: str, formulas: list[Span], start: int, stop: int, formula: bool = False) -> list[int]:
    """Cuts of one long step: as a sentence, where that fails as a formula, and so on in each part."""
    if stop - start <= LONG:
        return []
    whole = [(a, b) for a, b in formulas if start <= a and b <= stop]
    if not formula:
        cut = _middle(_IN_SENTENCE, text, whole, start, stop, HALF)
        if cut:
            return [*_break(text, whole, start, cut), cut, *_break(text, whole, cut, stop)]
    cut = _middle(_IN_FORMULA, text, [], start, stop, SHORT)
    if not cut:
        return []
    return [*_break(text, whole, start, cut, formula), cut, *_break(text, whole, cut, stop, True)]


def _middle(
    patterns: list[re.Pattern[str]], text: str, hidden: list[Span], start: int, stop: int, least: int
) -> int:
    """The end of the match nearest to the middle, by the first pattern that leaves `least` on both sides.

    Matches inside a hidden formula do not count; 0 where nothing fits.
    """
    visible = list(text[start:stop])
    for a, b in hidden:
        visible[a - start : b - start] = BLOT * (b - a)
    stops = [b for _, b in hidden]
    longer = list(accumulate((HIDDEN - (b - a) for a, b in hidden), initial=0))  # than it is shown
    whole = stop - start + longer[-1]
    for pattern in patterns:
        cuts = [start + match.end() for match in pattern.finditer("".join(visible))]
        if not cuts:
            continue
        cut = min(cuts, key=lambda c: abs(2 * (c - start + longer[bisect_right(stops, c)]) - whole))
        if min(cut - start, stop - cut) >= least:
            return cut
    return 0


def _nothing(text: str) -> list[int]:
    return []


_RULES: dict[str, Callable[[str], list[int]]] = {
    "line": _lines, "math": _math, "sentence": _sentences, "none": _nothing,
}  # fmt: skip
