"""Anchor groups by similar text, for environments whose observations hardly ever repeat exactly.

    ratio(a, b) = 2 · LCS(a, b) / (|a| + |b|)          LCS: longest common subsequence

Leader clustering inside one group: a text joins the first cluster whose leader is at least
`threshold` alike, or else leads a new one. Two deviations from the authors' code (verl-agent):
* texts are taken in sorted order, not in row order, so the order of the rows changes nothing;
* LCS instead of difflib: symmetric, and no character is ignored in texts of 200 and more.
Grids of characters differ in few places and mean different states: leave similarity off there.
"""

from collections.abc import Callable

import numpy as np

from verl_multiturn.columns import Ints, Objects

Ratio = Callable[..., float]


def alike(texts: Objects, group_code: Ints, threshold: float) -> Ints:
    """Codes: equal for rows of one group whose texts are alike; None is like no other. -> (N,)."""
    ratio = _ratio()
    members: dict[int, set[str]] = {}
    for code, text in zip(group_code.tolist(), texts, strict=True):
        if text is not None:
            if not isinstance(text, str):
                raise ValueError(f"anchor_text must hold strings, not {text!r}.")
            members.setdefault(code, set()).add(text)  # equal texts are compared once
    clusters: dict[tuple[int, str], int] = {}
    for code, group in members.items():
        for text, leader in leaders(sorted(group), threshold, ratio).items():
            clusters[code, text] = clusters.setdefault((code, leader), len(clusters))
    codes = [
        len(texts) + row if text is None else clusters[code, text]
        for row, (code, text) in enumerate(zip(group_code.tolist(), texts, strict=True))
    ]
    return np.unique(np.fromiter(codes, np.int64, len(codes)), return_inverse=True)[1]


def leaders(texts: list[str], threshold: float, ratio: Ratio | None = None) -> dict[str, str]:
    """The leader of each text, the texts taken in the order given."""
    ratio = ratio or _ratio()
    found: list[str] = []
    leader_of: dict[str, str] = {}
    for text in texts:
        for leader in found:
            # the cutoff lets the matcher stop as soon as the threshold is out of reach
            if ratio(text, leader, score_cutoff=threshold) >= threshold:
                leader_of[text] = leader
                break
        else:
            found.append(text)
            leader_of[text] = text
    return leader_of


def _ratio() -> Ratio:
    try:
        from rapidfuzz.distance import Indel
    except ImportError as error:
        raise ImportError(
            "similarity grouping needs rapidfuzz: pip install verl-multiturn[similarity]"
        ) from error
    ratio: Ratio = Indel.normalized_similarity
    return ratio
