"""How much a reasoning says about its prompt: mutual information (RAGEN-2, 2026, arXiv:2604.06268).

X is all that stands before a reasoning, Z the reasoning's tokens. A policy that answers every prompt
with the same text has entropy left and no information: template collapse. With L_ij = log p(z_i | x_j),
by teacher forcing, |z_i| its tokens and x_o(i) its own prompt:

    I(X; Z) = H(Z) − H(Z | X) = mean_i [ L_i,o(i) − log mean_j exp L_ij ]  ≤  log P

There are two definitions per token, and they differ a lot; each has a name of its own here:
* mi_per_token, the paper's: the bracket divided by |z_i|;
* mi_mean_of_tokens, RAGEN's code: L_ij / |z_i| in the place of L_ij.
The mean over j runs over the columns as they are: a prompt that stands there twice counts twice. Only
retrieval takes identical prompts for one.
"""

from collections.abc import Sequence
from math import comb, inf, log

import numpy as np
import numpy.typing as npt

from verl_multiturn.columns import Bools, Column, Floats, Ints, factorise, ints, keys
from verl_multiturn.errors import unknown

RULES = ("trajectory", "first_turn")  # of sample_pairs
RANKS = (1, 2, 4, 8)  # k of retrieval
STD_EPS = 1e-3  # added to the deviation in the z-score; RAGEN's
SLACK = 1e-3  # a log-probability may round to this much above 0


def mutual_information(
    log_probs: npt.ArrayLike,
    lengths: Column,
    own: Column,
    prompts: Column | None = None,
    marginal_std: float | None = None,
) -> dict[str, float]:
    """The estimates of one sample of reasonings, in nats.

    * mi_sequence, mi_per_token, mi_mean_of_tokens: I(X; Z), see above; none exceeds mi_bound, log P;
    * reasoning_entropy, reasoning_entropy_given_prompt: H(Z), H(Z | X) per token, whose difference is
      mi_per_token; with _sequence, of whole reasonings, whose difference is mi_sequence;
    * retrieval_at_k, for k in RANKS: share of reasonings whose own prompt is among the k columns that
      make them likeliest, ties broken at random; retrieval_chance_at_k: its value for random columns;
    * mi_z_score: mean of (matched − marginal) / (std(marginal) + 1e-3), per token as in RAGEN's code,
      population std; mi_marginal_std: that std.

    Args:
        log_probs: (n, P), L_ij summed over the tokens of reasoning i.
        lengths: (n,), |z_i|, at least 1.
        own: (n,), o(i), the column of the reasoning's own prompt.
        prompts: (P,), the prompts, or keys that are equal where they are; None: all are distinct.
        marginal_std: in place of the sample's in the z-score, e.g. a moving average over steps.

    Raises:
        ValueError: no (n, P) matrix of finite log-probabilities, or columns that do not fit it.
    """
    L = _matrix(log_probs)  # (n, P)
    n, P = L.shape
    tokens, column, code = _columns(n, P, lengths, own, range(P) if prompts is None else prompts)
    matched, marginal = L[np.arange(n), column], _log_mean_exp(L)  # (n,), (n,)
    marginal_token = _log_mean_exp(L / tokens[:, None])
    gain = matched / tokens - marginal_token
    std = float(np.std(marginal_token))
    used = std if marginal_std is None else marginal_std
    if not 0 <= used < inf:
        raise ValueError(f"marginal_std must be a number of at least 0, not {used!r}.")
    found = {
        "mi_sequence": np.mean(matched - marginal),
        "mi_per_token": np.mean((matched - marginal) / tokens),
        "mi_mean_of_tokens": np.mean(gain),
        "mi_bound": log(P),
        "mi_z_score": np.mean(gain / (used + STD_EPS)),
        "mi_marginal_std": std,
        "reasoning_entropy": -np.mean(marginal / tokens),
        "reasoning_entropy_given_prompt": -np.mean(matched / tokens),
        "reasoning_entropy_sequence": -np.mean(marginal),
        "reasoning_entropy_given_prompt_sequence": -np.mean(matched),
    }
    same = code[column][:, None] == code  # (n, P)
    return {name: float(value) for name, value in found.items()} | _retrieval(L, same)


def sample_pairs(
    reasonings: Sequence[Column], n: int, rng: np.random.Generator, rule: str = "trajectory"
) -> Ints:
    """Which reasonings to score, as pairs (trajectory, turn). -> (K, 2), K ≤ n.

    Args:
        reasonings: for each trajectory the reasoning tokens of its turns; a turn of 0 is never drawn.
        n: how many pairs; RAGEN draws 64.
        rng: decides; nothing else does.
        rule: "trajectory": a trajectory, then one of its turns, both uniform and with replacement, so
            that a long trajectory weighs no more than a short one; "first_turn": distinct first
            turns, all of them if there are no more than n. Empty where no turn can be drawn.

    Raises:
        ValueError: an unknown rule, n below 1, or lengths that are no whole numbers of at least 0.
    """
    if rule not in RULES:
        raise unknown("rule", rule, RULES)
    if n < 1:
        raise ValueError(f"n must be a number of pairs of at least 1, not {n!r}.")
    counts = [ints(f"reasonings[{i}]", turns, len(turns)) for i, turns in enumerate(reasonings)]
    for i, count in enumerate(counts):
        if (count < 0).any():
            raise ValueError(f"reasonings must be numbers of tokens: trajectory {i} has {count.tolist()}.")
    if rule == "first_turn":
        first = np.array([i for i, count in enumerate(counts) if (count[:1] > 0).any()], np.int64)
        drawn = first if len(first) <= n else np.sort(rng.choice(first, n, replace=False))
        return np.stack([drawn, np.zeros_like(drawn)], 1)
    turns = [(i, np.flatnonzero(count)) for i, count in enumerate(counts) if count.any()]
    if not turns:
        return np.zeros((0, 2), np.int64)
    picks = rng.integers(len(turns), size=n)
    which = rng.integers([len(turns[pick][1]) for pick in picks])
    return np.array([(turns[p][0], turns[p][1][w]) for p, w in zip(picks, which, strict=True)], np.int64)


def _log_mean_exp(x: Floats) -> Floats:
    """log mean_j exp x_ij; exactly the common value of a constant row. (n, P) -> (n,)."""
    top = x.max(1)
    return np.asarray(top + np.log(np.mean(np.exp(x - top[:, None]), 1)), np.float64)


def _retrieval(L: Floats, same: Bools) -> dict[str, float]:
    """retrieval_at_k and retrieval_chance_at_k. L, same (column is the own prompt): (n, P)."""
    P = L.shape[1]
    best = np.where(same, L, -inf).max(1, keepdims=True)  # identical prompts may round differently
    copies = same.sum(1).tolist()
    better = (~same & (L > best)).sum(1).tolist()
    tied = (~same & (L == best)).sum(1).tolist()
    found = {}
    for k in RANKS:
        hits = [
            _hit(m, m + t, min(k, P) - b) if b < k else 0.0
            for m, t, b in zip(copies, tied, better, strict=True)
        ]
        found[f"retrieval_at_{k}"] = float(np.mean(hits))
        found[f"retrieval_chance_at_{k}"] = float(np.mean([_hit(m, P, min(k, P)) for m in copies]))
    return found


def _hit(copies: int, among: int, draws: int) -> float:
    """Probability that draws without replacement hit one of the copies: 1 − C(a−c, d) / C(a, d)."""
    draws = min(draws, among)
    return 1 - comb(among - copies, draws) / comb(among, draws)


def _matrix(log_probs: npt.ArrayLike) -> Floats:
    try:
        L = np.asarray(log_probs, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"log_probs must be a matrix of numbers: {error}.") from error
    if L.ndim != 2 or not L.size:
        raise ValueError(f"log_probs must be an (n, P) matrix with n, P ≥ 1, not of shape {L.shape}.")
    for i, j in np.argwhere(~np.isfinite(L) | (L > SLACK))[:1]:
        raise ValueError(
            f"log_probs must be finite and at most 0: reasoning {i} has {L[i, j]} under prompt {j}."
        )
    return L


def _columns(n: int, P: int, lengths: Column, own: Column, prompts: Column) -> tuple[Ints, Ints, Ints]:
    """|z_i| (n,), o(i) (n,) and a code per distinct prompt (P,), checked against the matrix."""
    for name, given, size, unit in (
        ("lengths", lengths, n, "reasonings"),
        ("own", own, n, "reasonings"),
        ("prompts", prompts, P, "prompts"),
    ):
        if len(given) != size:
            raise ValueError(f"{name} has {len(given)} entries, but log_probs has {size} {unit}.")
    tokens, column = ints("lengths", lengths, n), ints("own", own, n)
    for i in np.flatnonzero(tokens < 1)[:1]:
        raise ValueError(f"lengths must be numbers of tokens, at least 1: reasoning {i} has {tokens[i]}.")
    for i in np.flatnonzero((column < 0) | (column >= P))[:1]:
        raise ValueError(f"own must be columns from 0 to {P - 1}: reasoning {i} has {column[i]}.")
    return tokens, column, factorise("prompts", keys("prompts", prompts))
