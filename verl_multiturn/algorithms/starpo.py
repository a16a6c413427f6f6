"""StarPO-S (RAGEN, Wang et al. 2025, arXiv:2504.20073): which groups to train on, and bi-level GAE.

A start state is worth training on where its trajectories disagree (uncertainty of a group):

    U(s_0) = Std_{τ ~ π(·|s_0)} R(τ)

Whole groups are kept or dropped, by rank (v1), by a nucleus of the scores or by a share of the best
score (RAGEN-2, arXiv:2604.06268, "SNR-aware filtering"). Bi-level GAE, of VAGEN, has one discount from
turn to turn and one from token to token.

Where the authors' code (RAGEN) differs:
* groups are lists, of any sizes; the code reshapes rows and is wrong after any reordering;
* a group of one has uncertainty 0 (the code: nan, dropped), and nan is refused;
* linear top-p where it can only be empty (a negative score, the smallest with zeros) is refused;
* turns end where `turn_ends` says; the code looks for rewards that are not 0, so that a turn
  without reward is merged into the next one and a last turn without reward crashes.
The paper of RAGEN-2 has no eps and sums variances: score="variance", eps=0.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import floor, inf
from numbers import Real
from typing import Any

import numpy as np

from verl_multiturn.columns import Bools, Column, Floats, Ints, flags, floats, ints
from verl_multiturn.errors import unknown

ZERO = 1e-10  # a score this close to 0 is 0; RAGEN's
ROUNDING = 1e-9  # slack of comparisons: 0.29 · 100 is 29 groups, 0.3 is within a tenth of 3


def variance(R: Floats) -> float:
    """Sample variance (ddof 1); 0 for one return, exactly 0 for equal ones."""
    return float(np.var(R, ddof=1)) if len(R) > 1 and R.min() < R.max() else 0.0


SCORES: dict[str, Callable[[Floats], float]] = {
    "std": lambda R: variance(R) ** 0.5,
    "variance": variance,
    "mean": lambda R: float(R.mean()),
    "sum": lambda R: float(R.sum()),
}

_LIMITS = {  # strategy -> (highest value, what the value is)
    "top_k": (1.0, "a share of the groups in (0, 1]; a number of groups is top_k_abs"),
    "top_k_abs": (inf, "a whole number of groups, at least 1"),
    "top_p": (inf, "a share of the mass, above 0; from 1 on, everything is kept"),
    "min_p": (1.0, "a share of the best score in (0, 1]"),
}


def keep_groups(
    returns: Sequence[Column],
    score: str = "std",
    strategy: str = "top_p",
    value: float = 0.9,
    mass: str = "linear",
    largest: bool = True,
    include_zero: bool = False,
    eps: float = 0.01,
    scores: Column | None = None,
) -> Ints:
    """Indices of the groups to train on, best first, equal ones by index. -> (K,), 0 ≤ K ≤ G.

    The default is RAGEN-2's recommendation; strategy="top_k", value=0.25, include_zero=True is v1.

    Args:
        returns: the episode returns of each of the G groups; the groups' sizes may differ.
        score: of a group: std or variance (ddof 1; 0 for a group of one), mean or sum.
        strategy: top_k: ⌊value · G⌋ groups, at least one; top_k_abs: value groups; top_p: the
            smallest number of best groups that hold the share value of the mass; min_p: score ≥
            value · max, or, for the smallest, score ≤ min / value.
        value: see strategy. A share of 1 (top_k, top_p) keeps all candidates, in original order.
        mass: of top_p: "linear", the scores, down to value · Σ − eps; or "softmax" of the scores.
        largest: the best score is the largest; False: the smallest.
        include_zero: False drops groups whose score is 0 before anything else.
        eps: slack of linear top_p; a batch whose Σ is below eps / value is dropped whole.
        scores: (G,), in place of `score`: mean entropy, length, whatever was computed elsewhere.
    """
    _check_keywords(score, strategy, value, mass, eps)
    U = _scores(returns, score, scores)  # (G,)
    candidates = np.flatnonzero(include_zero | (np.abs(U) > ZERO))
    if strategy in ("top_k", "top_p") and value >= 1:
        return candidates
    best = candidates[np.argsort(-U[candidates] if largest else U[candidates], kind="stable")]
    if strategy == "top_k":
        return best[: max(1, floor(value * len(U) + ROUNDING))]
    if strategy == "top_k_abs":
        return best[: int(value)]
    if strategy == "top_p" and mass == "linear" and not largest and include_zero:
        raise ValueError("largest=False with include_zero=True: zeros come first and have no linear mass.")
    if not len(best):
        return best
    if strategy == "min_p":
        return best[_near_the_best(U[best], value, largest)]
    return best[: _nucleus(U[best], value, mass, eps)]


def bilevel_gae(
    rewards: Column,
    values: Column,
    turn_ends: Column,
    mask: Column,
    gamma: float,
    lam: float,
    gamma_turn: float,
) -> tuple[Floats, Floats]:
    """GAE over turns, and inside each turn GAE over its tokens. -> (L,) advantages, (L,) returns.

    With e_k the last token of turn k, V(e_{T+1}) = A_{T+1} = 0, and i+1 the turn's next masked token:

        A(e_k) = r_k + γ_turn V(e_{k+1}) − V(e_k) + γ_turn λ A(e_{k+1})
        A(i)   = γ V(i+1) − V(i) + γ λ A(i+1),          returns: A(i) + V(i)

    One turn, or γ = λ = γ_turn = 1, is plain GAE. Nothing is whitened.

    Args:
        rewards: (T,), r_k of each turn, 0 as good as any other.
        values: (L,), V at each token of one trajectory; what stands where the mask is 0 is not read.
        turn_ends: (T,), the index of each turn's last trained token.
        mask: (L,), 1 where the policy wrote the token; elsewhere both results are 0.
        gamma: γ, from token to token.
        lam: λ, of both levels.
        gamma_turn: γ_turn, from turn to turn; VAGEN and RAGEN use 0.95.
    """
    r = floats("rewards", rewards, len(rewards))
    trained = flags("mask", mask, len(mask))
    V = floats("values", values, len(values))
    ends = ints("turn_ends", turn_ends, len(turn_ends))
    _check_turns(r, V, ends, trained, gamma=gamma, lam=lam, gamma_turn=gamma_turn)
    A = np.zeros(len(V))
    next_V = next_A = 0.0  # of the next turn's last token
    for k in reversed(range(len(ends))):
        start = int(ends[k - 1]) + 1 if k else 0
        tokens = start + np.flatnonzero(trained[start : ends[k] + 1])
        v = V[tokens].tolist()  # Python floats: three times as fast in a loop
        a = [0.0] * len(v)
        a[-1] = next_A = float(r[k]) + gamma_turn * next_V - v[-1] + gamma_turn * lam * next_A
        next_V = v[-1]
        for i in reversed(range(len(v) - 1)):
            a[i] = gamma * v[i + 1] - v[i] + gamma * lam * a[i + 1]
        A[tokens] = a
    return A, np.where(trained, A + V, 0.0)


def _check_keywords(score: str, strategy: str, value: float, mass: str, eps: float) -> None:
    for kind, name, valid in (
        ("score", score, list(SCORES)),
        ("strategy", strategy, list(_LIMITS)),
        ("mass", mass, ["linear", "softmax"]),
    ):
        if name not in valid:
            raise unknown(kind, name, valid)
    highest, words = _LIMITS[strategy]
    fits = _is_number(value) and 0 < value <= highest and value < inf
    if not fits or (strategy == "top_k_abs" and value != floor(value)):
        raise ValueError(f"value of {strategy} must be {words}, not {value!r}.")
    if not _is_number(eps) or not 0 <= eps < inf:
        raise ValueError(f"eps must be a number of at least 0, not {eps!r}.")


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool | np.bool_)


def _scores(returns: Sequence[Column], score: str, given: Column | None) -> Floats:
    """One finite score per group. -> (G,)."""
    if given is not None:
        U = floats("scores", given, len(given))
        if len(U) != len(returns):
            raise ValueError(f"scores has {len(U)} entries, but returns has {len(returns)} groups.")
        for g in np.flatnonzero(~np.isfinite(U))[:1]:
            raise ValueError(f"scores must be finite: that of group {g} is {U[g]}.")
        return U
    groups = [floats(f"returns[{g}]", R, len(R)) for g, R in enumerate(returns)]
    for g, R in enumerate(groups):
        if not len(R) or not np.isfinite(R).all():
            raise ValueError(f"returns must be finite, at least one a group: group {g} has {R.tolist()}.")
    # sorted: the order of the members leaves no trace, so equal groups tie
    return np.array([SCORES[score](np.sort(R)) for R in groups], np.float64)


def _near_the_best(U: Floats, value: float, largest: bool) -> Ints:
    """Ranks of the scores, best first, within a share of the best one. -> (K,)."""
    if U[0] < 0:
        raise ValueError(f"min_p needs a best score of at least 0, not {U[0]}.")
    bound = value * (1 - ROUNDING)
    return np.flatnonzero(U >= bound * U[0] if largest else U <= U[0] / bound)


def _nucleus(U: Floats, value: float, mass: str, eps: float) -> int:
    """How many of the scores, best first, it takes to reach the share of their mass."""
    if mass == "linear" and U.min() < 0:
        raise ValueError(f"mass='linear' needs scores of at least 0, not {U.min()}; use mass='softmax'.")
    weight = U if mass == "linear" else np.exp(-np.abs(U - U[0]))  # the best is 1, for either direction
    reached = np.cumsum(weight)
    target = value * reached[-1] - (eps if mass == "linear" else 0.0)
    if target <= 0:
        return 0
    return int(np.searchsorted(reached, target * (1 - ROUNDING))) + 1


def _check_turns(r: Floats, V: Floats, ends: Ints, trained: Bools, **shares: float) -> None:
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{name} must be in [0, 1], not {share!r}.")
    if len(V) != len(trained):
        raise ValueError(f"values has {len(V)} entries, but mask has {len(trained)}.")
    if len(r) != len(ends):
        raise ValueError(f"rewards has {len(r)} entries, but turn_ends has {len(ends)}.")
    if not np.isfinite(r).all() or not np.isfinite(V[trained]).all():
        raise ValueError("rewards, and values where the mask is 1, must be finite.")
    if any(b <= a for a, b in pairwise([-1, *ends.tolist()])) or (len(ends) and ends[-1] >= len(V)):
        raise ValueError(f"turn_ends must be increasing token indices below {len(V)}, not {ends.tolist()}.")
    for end in ends[~trained[ends]][:1]:
        raise ValueError(f"turn_ends: the mask is 0 at token {end}; a turn ends with a trained token.")
    stop = int(ends[-1]) + 1 if len(ends) else 0
    if trained[stop:].any():
        raise ValueError(f"mask: token {stop + int(trained[stop:].argmax())} is trained but in no turn.")
