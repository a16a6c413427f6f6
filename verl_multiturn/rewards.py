"""The rewards that are trained on, from those of the environment: penalties, normalisation, placement.

All are named components: the environment's rewards, the format penalty and the normalised return stand
beside each other in a recorded run, in both row layouts (RAGEN drops penalties where rewards are per turn).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_multiturn.columns import Column, Floats
from verl_multiturn.errors import unknown

BY = ("group", "type", "batch")
METHODS = ("mean", "mean_std", "asym_clip")
CLIP = (-1.0, 3.0)  # of asym_clip, RAGEN's


@dataclass(frozen=True)
class Normalize:
    """The block `multiturn.normalize`: episode returns relative to those beside them (RAGEN's).

    Attributes:
        by: which returns are beside each other: of the "group" (same start), the task's "type", or
            all of the "batch"; None: returns are left as they are.
        method: "mean": R − mean; "mean_std": (R − mean) / (std + 1e-6), std with ddof 1, 0 where all are
            equal; "asym_clip": the same within [−1, 3].
    """

    by: str | None = None
    method: str = "mean_std"

    def __post_init__(self) -> None:
        if self.by is not None and self.by not in BY:
            raise unknown("value of multiturn.normalize.by", self.by, BY)
        if self.method not in METHODS:
            raise unknown("value of multiturn.normalize.method", self.method, METHODS)

    def __call__(self, returns: Column, keys: Sequence[Any]) -> Floats:
        """Normalise returns among those of equal key. -> (N,)."""
        R, members = np.asarray(returns, np.float64), defaultdict(list)
        for n, key in enumerate(keys):
            members[key].append(n)
        out = np.empty_like(R)
        for places in members.values():
            out[places] = self._one(R[places])
        return out

    def _one(self, R: Floats) -> Floats:
        centred = R - R.mean() if R.min() < R.max() else np.zeros_like(R)
        if self.method == "mean":
            return centred
        std = float(np.std(R, ddof=1)) if len(R) > 1 else 0.0
        scaled = centred / (std + 1e-6) if std > 1e-6 else np.zeros_like(R)
        return np.clip(scaled, *CLIP) if self.method == "asym_clip" else scaled


def trained_reward(record: dict[str, Any]) -> float:
    """The reward of a recorded turn less its penalty."""
    return float(record["reward"]) - float(record.get("penalty", 0.0))


def per_turn(
    sessions: Sequence[str],
    indices: Sequence[int],
    rewards: Sequence[float],
    keys: dict[str, Any],
    normalize: Normalize,
    at_turns: bool,
) -> Floats:
    """The rewards that token-level estimators see, one per turn. -> (N,).

    Args:
        sessions: (N,) the trajectory of each turn.
        indices: (N,) t of each turn.
        rewards: (N,) r_t, penalties taken off.
        keys: of each trajectory, which returns its own is normalised among.
        normalize: how.
        at_turns: each turn keeps its reward; else the last turn has the episode's, as in StarPO.
    """
    r = np.asarray(rewards, np.float64)
    if at_turns:
        return r
    places: dict[str, list[int]] = defaultdict(list)
    for n, session in enumerate(sessions):
        places[session].append(n)
    totals = np.array([r[turns].sum() for turns in places.values()])
    if normalize.by is not None:
        totals = normalize(totals, [keys[session] for session in places])
    out = np.zeros_like(r)
    for turns, total in zip(places.values(), totals, strict=True):
        out[max(turns, key=lambda n: indices[n])] = total
    return out
