"""The best documents of a BM25 index (bm25s), the same in every process."""

from typing import Any

import numpy as np


def best(index: Any, stems: list[str], k: int) -> list[int]:
    """Numbers of up to `k` documents that hold any of the stems, best first; ties in the index's order."""
    # bm25s gives "", which is what Porter leaves of "s", a number that its index may not have.
    known = index.get_tokens_ids([stem for stem in stems if stem])
    if not known:
        return []
    scores = index.get_scores_from_ids(known)  # (N,)
    hits = np.flatnonzero(scores > 0)
    if len(hits) > k:  # a partial sort leaves ties in any order: keep them all, then sort
        floor = np.partition(scores[hits], -k)[-k]
        hits = hits[scores[hits] >= floor]
    order = np.argsort(-scores[hits], kind="stable")[:k]
    return [int(number) for number in hits[order]]
