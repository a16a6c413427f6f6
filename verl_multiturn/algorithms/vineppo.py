"""VinePPO (Kazemnejad et al. 2024, arXiv:2410.01679): PPO whose values are means of fresh rollouts.

The value of a state is the mean return of K continuations from it; nothing is learnt:

    V(s_t) = 1/K Σ_k R(η_k),   η_k ~ π(·|s_t)
    A_t = r_t + γ V(s_{t+1}) − V(s_t),   V(s_T) = 0

The gradient is unbiased for any K ≥ 1. A step of the paper is a piece of the response; here it is a
turn, or a piece that `split_steps` cut. λ, of ours, mixes in what really followed: λ = 1 is G_t − V(s_t).

Where the authors' code differs:
* behind a cap of M states the code gives the steps an advantage of 0, which drops their gradient;
  here they share that of step M (tail="merge"); tail="zero" is the code's;
* a horizon of the continuations, of ours, may be bridged by what followed in the group (`with_horizon`);
* a state without a value is a hole: the steps from one known state to the next share an advantage;
* whitening has the scope that it is given; the code's is the micro-batch of each device, in the authors'
  settings a mini-batch (scope="minibatch").
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from verl_multiturn.algorithms.registry import Config, register
from verl_multiturn.columns import Column, Floats, floats, ints
from verl_multiturn.errors import unknown
from verl_multiturn.returns import returns_to_go
from verl_multiturn.turns import TurnBatch

TAILS = ("merge", "zero")


@dataclass(frozen=True)
class VinePPOConfig(Config):
    """Keywords of vineppo."""

    gamma: float = 1.0  # discount from turn to turn
    lam: float = 0.0  # λ: 0 is the paper
    whiten: bool = False  # over the trained tokens of the scope
    cap: int | None = None  # M: only s_0 … s_M count as known
    tail: Literal["merge", "zero"] = "merge"  # steps behind them: with step M, or no advantage (biased)
    scope: Literal["batch", "minibatch"] = "batch"  # a mini-batch is known in a run only

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("gamma", 0, 1)
        self.check_range("lam", 0, 1)
        if self.cap is not None:
            self.check_range("cap", 0)


@register("vineppo", VinePPOConfig, needs=("reward", "value"))
def vineppo(turns: TurnBatch, config: VinePPOConfig) -> Floats:
    """What a turn changed in the value, where values are means of fresh rollouts.

    A turn whose value is nan shares the advantage of the last turn before it that has one; a first
    turn must have one (`sibling_root` needs no rollouts). V after the last turn is 0, truncated or
    not: the limits are part of the state, and its continuations ran under the same ones.
    """
    if config.whiten and config.scope != "batch":
        raise ValueError(
            "scope=minibatch: which turns share an update is known in a run only; use scope=batch."
        )
    A = _segments(_capped(turns, config), config.gamma, config.lam)
    return whiten(A, weights=turns.tokens) if config.whiten else A


def vine_advantages(
    rewards: Column,
    values: Column,
    gamma: float = 1.0,
    lam: float = 0.0,
    cap: int | None = None,
    tail: str = "merge",
) -> Floats:
    """The advantage of each step of one trajectory. -> (T,).

    From a known state s_i to the next known one, d steps later, one advantage is shared:

        A_i = Σ_{j<d} γ^j r_{i+j} + γ^d (V(s_{i+d}) + λ A_{i+d}) − V(s_i)

    With γ = 1, λ = 0 and no holes, Σ_t A_t = R − V(s_0).

    Args:
        rewards: (T,), r_t.
        values: (T,), V(s_0) … V(s_{T-1}); nan is a hole, which s_0 must not be. V(s_T) is 0.
        gamma: γ, from step to step.
        lam: λ, from known state to known state; 0 is the paper.
        cap: M: only s_0 … s_M count as known.
        tail: behind the cap, "merge" all steps with step M, or give them "zero" (biased).
    """
    if tail not in TAILS:
        raise unknown("tail", tail, TAILS)
    if cap is not None and (not isinstance(cap, int | np.integer) or isinstance(cap, bool) or cap < 0):
        raise ValueError(f"cap must be a whole number of at least 0, or None, not {cap!r}.")
    r = floats("rewards", rewards, len(rewards))
    V = floats("values", values, len(values))
    if len(r) != len(V):
        raise ValueError(f"values has {len(V)} entries, but rewards has {len(r)}.")
    M = None if cap is None else int(cap)
    config = VinePPOConfig(gamma, lam, cap=M, tail="zero" if tail == "zero" else "merge")
    one = [0] * len(r)
    turns = TurnBatch.from_lists(group=one, trajectory=one, index=range(len(r)), reward=r, value=V)
    return vineppo(turns, config)


def with_horizon(turns: TurnBatch, cut: Column, horizon: int, gamma: float = 1.0) -> TurnBatch:
    """The batch with values that look past a horizon of H turns, by what followed in the group.

        V(s_t) += γ^H p_t · mean_{j ≠ i} G_j(t + H),   G_j = 0 behind the end of trajectory j

    Without the trajectory's own return V stays independent of its actions. Biased all the same: the others
    are in other states by then. Nothing is added where there are no others.

    Args:
        turns: V(s_t) of continuations of at most H turns; nan stays nan.
        cut: (N,), p_t, the share of the continuations from s_t that the horizon ended.
        horizon: H.
        gamma: γ, from turn to turn.
    """
    p, G = floats("cut", cut, len(turns)), returns_to_go(turns, gamma)
    last = int(turns.index.max(initial=0)) + horizon + 1
    own = np.zeros((len(turns.starts), last))
    own[turns.trajectory_code, turns.index] = G
    groups = turns.group_code[turns.order[turns.starts]]  # of each trajectory
    sums = np.zeros((int(groups.max(initial=-1)) + 1, last))
    np.add.at(sums, groups, own)
    others = np.bincount(groups)[turns.group_code] - 1
    later = turns.index + horizon
    rest = sums[turns.group_code, later] - own[turns.trajectory_code, later]
    return replace(turns, value=turns.value + gamma**horizon * p * rest / np.maximum(others, 1))


def sibling_root(returns: Column, extra: Column = ()) -> Floats:
    """V(s_0) for each of n trajectories from one state, from the others' returns. -> (n,).

        V_i = (Σ_{j≠i} R_j + Σ extra) / (n − 1 + len(extra))

    Leaving the own return out keeps V independent of the actions it is compared with; keeping it
    in would shrink the advantage by 1 − 1 / (n + len(extra)). nan where there is nothing else.

    Args:
        returns: (n,), of the trajectories themselves.
        extra: returns of continuations that were sampled from the state on top.
    """
    R = floats("returns", returns, len(returns))
    more = floats("extra", extra, len(extra))
    if not np.isfinite(R).all() or not np.isfinite(more).all():
        raise ValueError("returns and extra must be finite.")
    others = len(R) - 1 + len(more)
    if others <= 0:
        return np.full(len(R), np.nan)
    pool = np.concatenate([R, more])
    return np.array([np.delete(pool, i).sum() / others for i in range(len(R))], np.float64)


def with_sibling_roots(
    turns: TurnBatch, gamma: float = 1.0, lam: float = 0.0, rollouts: int | None = None
) -> TurnBatch:
    """The batch with V(s_0) filled in from the discounted returns of the others of the group.

    A trajectory without others, and without rollouts, is compared with nothing: V(s_0) becomes what
    followed, so that the turns up to the next known value get an advantage of 0 (before whitening).

    Args:
        turns: V(s_0) may be nan.
        gamma: γ, as the algorithm has it.
        lam: λ, likewise.
        rollouts: how many continuations a recorded V(s_0) is the mean of: they are pooled with the
            siblings. None: a recorded V(s_0) is left as it is.
    """
    first = turns.order[turns.starts]
    G, V, codes = returns_to_go(turns, gamma)[first], turns.value[first], turns.group_code[first]
    ends = np.cumsum(np.bincount(codes))
    for members in np.split(np.argsort(codes, kind="stable"), ends[:-1]):
        for place, m in enumerate(members):
            if np.isnan(V[m]) or rollouts is not None:
                extra = [] if np.isnan(V[m]) else [V[m]] * (rollouts or 0)
                V[m] = sibling_root(G[members], extra)[place]
    value = turns.value.copy()
    value[first] = np.where(np.isnan(V), _followed(turns, gamma, lam)[first], V)
    return replace(turns, value=value)


def whiten(
    x: Column, weights: Column | None = None, scope: Column | None = None, eps: float = 1e-8
) -> Floats:
    """(x − mean) / √(var + ε), both over the entries of one scope, var with ddof 1. -> (N,).

    Equal entries, or a single one, give exactly 0.

    Args:
        x: (N,), an advantage per token, or per turn.
        weights: (N,), how often an entry counts, a whole number: a mask over tokens, or the
            trained tokens of a turn. Entries of weight 0 give 0. Default: 1.
        scope: (N,), codes 0 … S-1 of the sets to whiten apart; default: all entries are one set.
        eps: ε, the authors'.
    """
    x = floats("x", x, len(x))
    w = np.ones(len(x), np.int64) if weights is None else ints("weights", weights, len(weights))
    codes = np.zeros(len(x), np.int64) if scope is None else ints("scope", scope, len(scope))
    if not len(x) == len(w) == len(codes):
        raise ValueError(f"x, weights and scope have {len(x)}, {len(w)} and {len(codes)} entries.")
    if (w < 0).any() or (codes < 0).any():
        raise ValueError("weights and scope must not be negative.")
    out = np.zeros(len(x))
    rows = np.flatnonzero(w)
    if not len(rows):
        return out
    order = rows[np.lexsort((w[rows], x[rows], codes[rows]))]  # no trace of the order of the rows
    code, value, weight = codes[order], x[order], w[order]
    n = np.bincount(code, weights=weight)  # (S,)
    mean = np.bincount(code, weights=weight * value) / np.maximum(n, 1)
    first = np.unique(code, return_index=True)[1]
    last = np.append(first[1:], len(code)) - 1
    equal = value[first] == value[last]
    mean[code[first]] = np.where(equal, value[first], mean[code[first]])
    deviation = value - mean[code]
    var = np.bincount(code, weights=weight * deviation**2) / np.maximum(n - 1, 1)
    out[order] = deviation / np.sqrt(var + eps)[code]
    return out


def kl_coefficient(coefficient: float, lengths: Column) -> float:
    """What `coefficient` on a KL summed over each response is on a KL that is a mean over all tokens.

        c · 1/N Σ_i Σ_t k_{it}  =  (c · 1/N Σ_i T_i) · Σ_i Σ_t k_{it} / Σ_i T_i

    The paper has c = 1e-4 on sums; verl aggregates the KL as it does the loss (token-mean).

    Args:
        coefficient: c.
        lengths: (N,), T_i, trained tokens of each response.
    """
    T = ints("lengths", lengths, len(lengths))
    if not len(T) or (T < 0).any():
        raise ValueError("lengths must be of one response at least, and none negative.")
    return float(coefficient * T.mean())


def _capped(turns: TurnBatch, config: VinePPOConfig) -> TurnBatch:
    """The batch without values behind the cap; with tail="zero" they are what makes A = 0."""
    if config.cap is None:
        return turns
    tail = returns_to_go(turns, config.gamma) if config.tail == "zero" else np.nan
    return replace(turns, value=np.where(turns.index > config.cap, tail, turns.value))


def _followed(turns: TurnBatch, gamma: float, lam: float) -> Floats:
    """What V(s_t) is compared with: the rewards up to the next known value, and that value. -> (N,)."""
    x = np.zeros(len(turns))
    y = np.zeros(len(turns.starts))  # V + λA of what follows, longest trajectory first
    for rows in reversed(turns.by_time):
        x[rows] = turns.reward[rows] + gamma * y[: len(rows)]
        V = turns.value[rows]
        y[: len(rows)] = np.where(np.isnan(V), x[rows], V + lam * (x[rows] - V))
    return x


def _segments(turns: TurnBatch, gamma: float, lam: float) -> Floats:
    """A of every turn, from known value to known value. -> (N,)."""
    for row in np.flatnonzero((turns.index == 0) & np.isnan(turns.value))[:1]:
        raise ValueError(
            f"value is missing (nan) at {turns.whose(row)}; vineppo needs V(s_0), and has no baseline "
            "for what comes before the first known value."
        )
    A = _followed(turns, gamma, lam) - turns.value  # nan in a hole
    for before, rows in pairwise(turns.by_time):
        A[rows] = np.where(np.isnan(A[rows]), A[before[: len(rows)]], A[rows])
    return A
