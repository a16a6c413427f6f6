"""What the algorithms are made of: returns, group baselines and GAE. One function, one equation.

All of it is float64, linear in the number of turns, and independent of the order of the rows down
to the last bit: sums run over time within a trajectory and over sorted values within a group.
"""

from typing import Literal

import numpy as np

from verl_multiturn.columns import Bools, Floats, Ints
from verl_multiturn.turns import TurnBatch

EPS = 1e-6  # added to a standard deviation; verl's and verl-agent's


def discounted_sum(turns: TurnBatch, x: Floats, factor: float) -> Floats:
    """y_t = x_t + factor · y_{t+1} within each trajectory, y_T = 0. -> (N,)."""
    y = np.zeros(len(turns))
    running = np.zeros(len(turns.starts))  # y_{t+1} of the trajectories, longest first
    for rows in reversed(turns.by_time):
        running[: len(rows)] = x[rows] + factor * running[: len(rows)]
        y[rows] = running[: len(rows)]
    return y


def returns_to_go(turns: TurnBatch, gamma: float, reward: Floats | None = None) -> Floats:
    """G_t = r_t + γ G_{t+1}: what followed a turn (GiGPO, Eq. 5). -> (N,).

    `reward` replaces the batch's own rewards, e.g. to put a penalty inside r_t.
    """
    return discounted_sum(turns, turns.reward if reward is None else reward, gamma)


def episode_return(turns: TurnBatch, reward: Floats | None = None) -> Floats:
    """R = Σ_t r_t, undiscounted, the same number on every turn of a trajectory. -> (N,)."""
    r = turns.reward if reward is None else reward
    in_time = turns.order
    R = np.bincount(turns.trajectory_code[in_time], weights=r[in_time])  # (M,)
    return np.asarray(R[turns.trajectory_code], np.float64)


def relative(
    x: Floats,
    codes: Ints,
    votes: Bools | None = None,
    by_std: bool = False,
    ddof: int = 1,
    eps: float = EPS,
    singleton: Literal["zero", "raw"] = "zero",
) -> Floats:
    """A_i = (x_i − mean) / (std + ε), over the members of i's group (GRPO; GiGPO, Eq. 3 and 7).

    A group whose members are all equal gives exactly 0: its mean is the common value itself, not
    a rounded quotient that ε would then blow up.

    Args:
        x: one number per row.
        codes: the group of each row, 0 … K-1.
        votes: rows that count in mean and std; default: all. The others are only compared.
        by_std: divide by the standard deviation; False: by 1.
        ddof: 1, the sample deviation.
        eps: added to the deviation.
        singleton: a group with one vote gives 0, or ("raw") x itself.
    """
    deviation, n = _deviation(x, codes, votes)
    A = deviation
    if by_std:
        voter = np.ones(len(x), np.bool_) if votes is None else votes
        order = np.lexsort((np.abs(deviation), codes))
        order = order[voter[order]]
        square = np.bincount(codes[order], weights=deviation[order] ** 2, minlength=len(n))
        std = np.sqrt(square / np.maximum(n - ddof, 1))
        A = deviation / (std + eps)[codes]
    alone = (n == 1)[codes]
    return np.where(alone, x if singleton == "raw" else 0.0, A)


def leave_one_out(x: Floats, codes: Ints, votes: Bools | None = None) -> Floats:
    """A_i = x_i − Σ_{j≠i} x_j / (n−1) = n / (n−1) · (x_i − mean); alone: 0 (RLOO). -> (N,).

    Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740, Eq. 8.
    """
    deviation, n = _deviation(x, codes, votes)
    scale = np.where(n > 1, n / np.maximum(n - 1, 1), 0.0)
    return np.asarray(deviation * scale[codes], np.float64)


def gae(turns: TurnBatch, gamma: float, lam: float) -> Floats:
    """A_t = δ_t + γλ A_{t+1}, δ_t = r_t + γ V(s_{t+1}) − V(s_t), over turns. -> (N,).

    Schulman et al. 2015, arXiv:1506.02438, Eq. 16, with a turn as the time step. V after the last
    turn is 0 where the episode terminated and `next_value` where it was truncated.
    """
    cut = turns.truncated & ~turns.terminated
    V = turns.value
    _need(turns, "value", np.isnan(V), "V(s_t) of every turn")
    _need(turns, "next_value", cut & np.isnan(turns.next_value), "V after a truncated last turn")
    following = np.where(cut, turns.next_value, 0.0)  # V(s_{t+1})
    inner = np.flatnonzero(~turns.last[turns.order])
    following[turns.order[inner]] = V[turns.order[inner + 1]]
    delta = turns.reward + gamma * following - V
    return discounted_sum(turns, delta, gamma * lam)


def _deviation(x: Floats, codes: Ints, votes: Bools | None) -> tuple[Floats, Ints]:
    """X − mean of the group's votes, (N,), and the number of votes of each group, (K,)."""
    order = np.lexsort((x, codes))  # sums over sorted values: the order of rows leaves no trace
    if votes is not None:
        order = order[votes[order]]
    K = int(codes.max()) + 1 if len(codes) else 0
    group, value = codes[order], x[order]
    n = np.bincount(group, minlength=K)
    stop = np.cumsum(n)
    mean = np.bincount(group, weights=value, minlength=K) / np.maximum(n, 1)
    some = np.flatnonzero(n)
    low, high = value[(stop - n)[some]], value[stop[some] - 1]
    mean[some] = np.where(low == high, low, mean[some])
    return x - mean[codes], n


def _need(turns: TurnBatch, name: str, missing: Bools, what: str) -> None:
    for row in np.flatnonzero(missing)[:1]:
        raise ValueError(f"{name} is missing (nan) at {turns.whose(row)}; GAE needs {what}.")
