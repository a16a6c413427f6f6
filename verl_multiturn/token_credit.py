"""Bi-level GAE in a run: `algorithms/starpo.py` over verl's critic, for a row per turn or per trajectory."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_multiturn.algorithms.starpo import bilevel_gae
from verl_multiturn.columns import Floats
from verl_multiturn.rollout.rows import Rows


@dataclass(frozen=True)
class BilevelConfig:
    """Keywords of `multiturn.algorithm=bilevel_gae`.

    Attributes:
        gamma: γ, from token to token.
        lam: λ, of both levels.
        gamma_turn: γ_turn, from turn to turn; 0.95 in VAGEN and RAGEN.
        whiten: advantages less their mean, over their std, both over all trained tokens (verl's GAE).
    """

    gamma: float = 1.0
    lam: float = 1.0
    gamma_turn: float = 0.95
    whiten: bool = True

    def __post_init__(self) -> None:
        for name in ("gamma", "lam", "gamma_turn"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"multiturn.bilevel_gae.{name}={getattr(self, name)!r} must be in [0, 1]")


def bilevel(
    rows: Rows,
    values: Sequence[Sequence[float]],
    rewards: Floats,
    mask: Any,
    config: BilevelConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of every token, each nested (B, response), 0 outside the utterances.

    A trajectory's utterances are put one after another, whatever rows they are in. A turn whose utterance
    is empty has no token to hold its reward: the turn before receives it, or, where there is none, the next.

    Args:
        rows: of the batch.
        values: V before each response token, per row of the batch.
        rewards: (N,) one per turn, in the order of `rows.places`.
        mask: nested (B, response) response mask of the batch.
        config: the discounts.
    """
    sessions: dict[str, list[int]] = defaultdict(list)
    for n, (row, _, _) in enumerate(rows.places):
        sessions[rows.keys[row].rsplit("_", 1)[0]].append(n)
    lengths = mask.offsets().diff().tolist()
    advantages, returns = ([np.zeros(length) for length in lengths] for _ in range(2))
    spoken = [np.zeros(length, bool) for length in lengths]
    for turns in sessions.values():
        spans, r, silent = list[tuple[int, int, int]](), list[float](), 0.0
        for n in sorted(turns, key=lambda n: rows.places[n][1]["index"]):
            row, record, _ = rows.places[n]
            start, stop = record["span"]
            if start < stop:
                spans.append((row, start, stop))
                r.append(float(rewards[n]) + silent)
                silent = 0.0
            elif r:
                r[-1] += float(rewards[n])
            else:
                silent += float(rewards[n])
        V = [v for row, start, stop in spans for v in values[row][start:stop]]
        ends = np.cumsum([stop - start for _, start, stop in spans], dtype=np.int64) - 1
        A, G = bilevel_gae(r, V, ends, np.ones(len(V)), config.gamma, config.lam, config.gamma_turn)
        at = 0
        for row, start, stop in spans:
            advantages[row][start:stop] = A[at : at + stop - start]
            returns[row][start:stop] = G[at : at + stop - start]
            spoken[row][start:stop] = True
            at += stop - start
    if config.whiten:
        _whiten(advantages, spoken)
    return _nested(advantages), _nested(returns)


def _whiten(columns: list[Floats], spoken: list[np.ndarray]) -> None:
    """In place: mean 0 and unbiased variance 1 over the trained tokens, as verl's `masked_whiten`."""
    flat = np.concatenate([column[mask] for column, mask in zip(columns, spoken, strict=True)])
    if len(flat) < 2:
        return
    mean, scale = flat.mean(), (flat.var(ddof=1) + 1e-8) ** -0.5
    for column, mask in zip(columns, spoken, strict=True):
        column[mask] = (column[mask] - mean) * scale


def _nested(columns: list[Floats]) -> torch.Tensor:
    rows = [torch.from_numpy(column).float() for column in columns]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
