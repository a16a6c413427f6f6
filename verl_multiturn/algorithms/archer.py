"""ArCHer: targets, losses and the advantage of utterance-level critics (Zhou et al. 2024, arXiv:2402.19446).

A state is the text so far, an action one whole utterance, γ discounts per turn. Two critics, each
a pair (Q_i, V_i) with a slowly moving copy (tgt), section 3.2 and the authors' code:

    Q_i(s, a) ← r + γ (1 − d) V_i^tgt(s')            a: replayed
    V_i(s)    ← Q_i^tgt(s, a_π)                      a_π: a fresh utterance of the current policy
    A(s, a)   = min(Q_1, Q_2) − min(V_1, V_2)        from the online critics

Head i learns from head i's target: the minimum enters the advantage only. V may learn otherwise:
from Q at the replayed action (sarsa: the policy rule with that action), from the same by expectile
regression (offline), or, as the ablation, from the discounted return (returns.returns_to_go).
The networks, the replay and the optimizers are the critic's; here are the equations, NumPy only.
"""

import numpy as np
import numpy.typing as npt

from verl_multiturn.algorithms.vectors import column, finite, inside, numbers, vectors
from verl_multiturn.algorithms.vineppo import whiten
from verl_multiturn.columns import Floats
from verl_multiturn.errors import unknown


def q_targets(
    rewards: npt.ArrayLike,
    dones: npt.ArrayLike,
    v1_next: npt.ArrayLike,
    v2_next: npt.ArrayLike,
    gamma: float,
) -> tuple[Floats, Floats]:
    """y_i = r + γ (1 − d) V_i^tgt(s'), i = 1, 2. -> (N,), (N,).

    Args:
        rewards: (N,) r_t.
        dones: (N,) booleans or 0 and 1; 1: nothing follows, y_i = r exactly. The paper counts the
            turn limit as an end; pass 0 there to bootstrap instead.
        v1_next: (N,) V_1^tgt(s'); not read, and free to be nan, where done.
        v2_next: (N,) V_2^tgt(s'), likewise.
        gamma: discount of a turn, in [0, 1].

    Raises:
        ValueError: different lengths, nan, a done that is no boolean, gamma outside [0, 1].
    """
    inside("gamma", gamma, 0, 1)
    r, d = vectors(rewards=rewards, dones=dones)
    if np.any((d != 0) & (d != 1)):
        raise ValueError("dones must hold booleans, or 0 and 1.")
    targets = []
    for name, values in (("v1_next", v1_next), ("v2_next", v2_next)):
        V = column(name, values)
        if len(V) != len(r):
            raise ValueError(f"{name} has {len(V)} entries, but rewards has {len(r)}.")
        V = np.where(d == 1, 0.0, V)
        finite(name, V)
        targets.append(r + gamma * V)
    return targets[0], targets[1]


def policy_targets(q_policy: npt.ArrayLike) -> Floats:
    """V_i(s) ← mean over m of Q_i^tgt(s, a_m), a_m ~ π(· | s) fresh; one head. -> (N,).

    The paper draws one action, M = 1. With the replayed action in place of a fresh one this is the
    sarsa rule, whose fixed point is the value of the policy that filled the replay.

    Args:
        q_policy: (N,) or (N, M) of Q_i^tgt at M utterances for each of N states.

    Raises:
        ValueError: another number of dimensions, empty, or nan.
    """
    Q = numbers("q_policy", q_policy)
    if Q.ndim not in (1, 2) or not Q.size:
        raise ValueError(f"q_policy must be (N,) or (N, M) and not empty, not of shape {Q.shape}.")
    finite("q_policy", Q)
    return np.asarray(Q.reshape(len(Q), -1).mean(axis=1), np.float64)


def critic_advantage(q1: npt.ArrayLike, q2: npt.ArrayLike, v1: npt.ArrayLike, v2: npt.ArrayLike) -> Floats:
    """A = min(Q_1, Q_2) − min(V_1, V_2): each minimum on its own, not of the differences. -> (N,).

    Args:
        q1: (N,) Q_1(s, a) of the online critic at the actor's own utterance; q2 likewise.
        q2: (N,)
        v1: (N,) V_1(s) of the online critic; v2 likewise.
        v2: (N,)

    Raises:
        ValueError: different lengths, or nan.
    """
    Q1, Q2, V1, V2 = vectors(q1=q1, q2=q2, v1=v1, v2=v2)
    return np.asarray(np.minimum(Q1, Q2) - np.minimum(V1, V2), np.float64)


def scaled(
    advantages: npt.ArrayLike,
    how: str = "none",
    tokens: npt.ArrayLike | None = None,
    clip: float | None = None,
) -> Floats:
    """The advantages of a step as the actor sees them. -> (N,).

    The paper's actor takes them as they are, so that the size of the rewards sets the size of the gradient.

    Args:
        advantages: (N,)
        how: "none"; "std": over their standard deviation, the sign is kept; "whiten": less their mean, too.
        tokens: (N,) trained tokens of each utterance, which weigh it in mean and deviation; default: 1.
        clip: largest absolute value; None: none.

    Raises:
        ValueError: another `how`, different lengths, or nan.
    """
    if how not in ("none", "std", "whiten"):
        raise unknown("value of how", how, ("none", "std", "whiten"))
    A, w = vectors(
        advantages=advantages,
        tokens=np.ones(len(column("advantages", advantages))) if tokens is None else tokens,
    )
    if how == "whiten":
        A = whiten(A, weights=w.astype(np.int64))
    elif how == "std" and w.any():
        std = np.sqrt(np.average((A - np.average(A, weights=w)) ** 2, weights=w))
        A = A / std if std > 0 else A
    return A if clip is None else np.clip(A, -clip, clip)


def expectile_loss(u: npt.ArrayLike, tau: float) -> float:
    """Mean of |τ − 1(u < 0)| u², u = Q^tgt(s, a) − V(s) at the replayed a: a number.

    IQL's loss of V (Kostrikov et al. 2021, arXiv:2110.06169, Eq. 5), without a factor 1/2: τ = 0.5
    is half the mean squared error. Offline ArCHer uses τ = 0.9.

    Args:
        u: (N,)
        tau: τ in (0, 1).

    Raises:
        ValueError: nan, empty, or tau outside (0, 1).
    """
    inside("tau", tau, 0, 1, open_ends=True)
    (U,) = vectors(u=u)
    return float(np.mean(np.where(U < 0, 1 - tau, tau) * U**2))


def expectile(x: npt.ArrayLike, tau: float, weights: npt.ArrayLike | None = None) -> float:
    """The v that minimises E |τ − 1(x < v)| (x − v)²: what `expectile_loss` drives V towards.

    Exact: with x sorted, v is a weighted mean for the one way to cut x in two where the part with
    weight 1 − τ lies below v and the part with weight τ above.

    Args:
        x: (N,) values.
        tau: τ in (0, 1); 0.5 gives the mean.
        weights: (N,) at least 0, not all 0: how often each value occurs; default equally often.

    Raises:
        ValueError: different lengths, nan, a negative weight, or tau outside (0, 1).
    """
    inside("tau", tau, 0, 1, open_ends=True)
    X, w = vectors(x=x, weights=np.ones_like(column("x", x)) if weights is None else weights)
    if np.any(w < 0) or not w.any():
        raise ValueError("weights must be at least 0, and not all 0.")
    order = np.argsort(X, kind="stable")
    X, w = X[order], w[order]
    low, high = np.r_[-np.inf, X], np.r_[X, np.inf]  # (N + 1,) what v must lie between, cut after k
    below, below_x = np.r_[0.0, np.cumsum(w)], np.r_[0.0, np.cumsum(w * X)]
    mass = (1 - tau) * below + tau * (below[-1] - below)
    v = ((1 - tau) * below_x + tau * (below_x[-1] - below_x)) / mass
    return float(v[np.argmin(np.maximum(np.maximum(low - v, v - high), 0.0))])


def awr_weights(advantages: npt.ArrayLike, beta: float = 1.0, clip: float | None = None) -> Floats:
    """w = min(exp(β A), clip): how much offline ArCHer's actor trusts a recorded utterance. -> (N,).

    Advantage-weighted regression (Peng et al. 2019, arXiv:1910.00177); the loss is −mean(w log π).

    Args:
        advantages: (N,) A(s, a) of recorded utterances.
        beta: β > 0; the authors' code uses 1.
        clip: largest weight; None: none, as in the authors' code (A = 8 weighs 2981).

    Raises:
        ValueError: nan, a beta or clip that is not positive, or a weight beyond float64.
    """
    for name, value in (("beta", beta), ("clip", clip)):
        if value is not None:
            inside(name, value, 0, float("inf"), open_ends=True)
    (A,) = vectors(advantages=advantages)
    with np.errstate(over="ignore"):
        w = np.minimum(np.exp(beta * A), np.inf if clip is None else clip)
    if not np.all(np.isfinite(w)):
        raise ValueError(f"beta * advantages reaches {(beta * A).max():g}, too large for exp: give a clip.")
    return np.asarray(w, np.float64)
