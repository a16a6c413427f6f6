"""Preference pairs from a search tree, and the loss that fits a Q model to them (arXiv:2409.09345).

Walk the best trajectory found; at every turn of it one action is preferred to its siblings:

    L = −log σ(β Δ),  Δ = [log π(a_w|h) − log π(a_l|h)] − [log π_ref(a_w|h) − log π_ref(a_l|h)]    (Eq. 8)

A tree is nested dicts {action, N, W, reward, terminal, children}: `action` led to the node, `reward`
is what it paid at once, W / N the mean return of the visits through it.

The paper prefers the best trajectory's own action (Fig. 3, win="best_path"); the authors' code the
child with the highest mean (win="argmax"). The code gives an unvisited child the value 0, and so
does min_visits=0 here, with one exception: a terminal node that was never visited is worth its
reward, because otherwise a tree saved at its first success prefers a wrong answer to the right one.
"""

from collections.abc import Iterator, Mapping
from math import isfinite
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from verl_multiturn.algorithms.vectors import inside, vectors
from verl_multiturn.errors import unknown

Win = Literal["best_path", "argmax"]
Lose = Literal["worst", "all_below_gap"]
WIN, LOSE = get_args(Win), get_args(Lose)

TreeNode = Mapping[str, Any]  # {action, N, W, reward, terminal, children}


def preference_pairs(
    tree: TreeNode,
    win: str = "best_path",
    lose: str = "worst",
    min_gap: float = 0.0,
    min_visits: int = 0,
) -> list[dict[str, Any]]:
    """Pairs along the best trajectory, root first: [{path, win, lose, gap}, ...].

    The best trajectory ends at the node with the highest immediate reward, the first in pre-order;
    if none beats the root's own reward (0), there is no pair. `path` holds the actions before the
    pair, `gap` is Q(win) − Q(lose) > 0. Ties go to the first child.

    Args:
        tree: the root; reward (0), terminal (False) and children (none) may be left out.
        win: "best_path": the best trajectory's action; "argmax": the child with the highest Q.
        lose: "worst": the child with the lowest Q; "all_below_gap": every child that is worse.
        min_gap: smallest gap that makes a pair.
        min_visits: visits that both sides need.

    Raises:
        ValueError: an unknown rule, a negative threshold, or a malformed tree (its node is named).
    """
    for kind, rule, valid in (("win", win, WIN), ("lose", lose, LOSE)):
        if rule not in valid:
            raise unknown(f"{kind} rule", rule, valid)
    inside("min_gap", min_gap, 0, float("inf"))
    inside("min_visits", min_visits, 0, float("inf"))
    found = walk(tree, win, lose, min_gap, min_visits)
    return [
        {"path": pair.path, "win": pair.win["action"], "lose": pair.lose["action"], "gap": pair.gap}
        for pair in found
    ]


class Pair(NamedTuple):
    """A pair with its nodes: `node` is where the choice is made, `path` the actions before it."""

    path: list[Any]
    node: TreeNode
    win: TreeNode
    lose: TreeNode
    gap: float
    q_win: float


def walk(tree: TreeNode, win: str, lose: str, min_gap: float, min_visits: int) -> Iterator[Pair]:
    """The pairs of `preference_pairs` with their nodes, root first; the arguments are its."""
    path: list[Any] = []
    node = tree
    for which in _best_trajectory(tree):
        children = [child for child in node["children"] if child["N"] >= min_visits]
        onward = node["children"][which]
        best = onward if win == "best_path" else max(children, key=_value, default=onward)
        if best["N"] >= min_visits:
            for loser in _losers(best, children, lose, min_gap):
                Q = _value(best)
                yield Pair(list(path), node, best, loser, Q - _value(loser), Q)
        path.append(onward["action"])
        node = onward


def _losers(best: TreeNode, children: list[TreeNode], lose: str, min_gap: float) -> list[TreeNode]:
    """The children that lose against `best`, in the children's order; one at most for "worst"."""
    others = [child for child in children if child["action"] != best["action"]]
    if lose == "worst" and others:
        others = [min(others, key=_value)]
    Q = _value(best)
    return [child for child in others if Q > _value(child) and Q - _value(child) >= min_gap]


def _value(node: TreeNode) -> float:
    """Q = W / N; unvisited: the reward of a terminal node, else 0."""
    if node["N"]:
        return float(node["W"] / node["N"])
    return float(node.get("reward", 0.0)) if node.get("terminal") else 0.0


def _best_trajectory(tree: TreeNode) -> list[int]:
    """Which child to follow at each depth, down to the first node with the highest reward."""
    _check(tree, root=True)
    links: list[tuple[int, int]] = []  # of each node met: (its parent's place in this list, which child)
    best, goal = float(tree.get("reward", 0.0)), -1
    stack = [(tree, -1, 0)]
    while stack:
        node, parent, which = stack.pop()
        here = len(links)
        links.append((parent, which))
        if node.get("reward", 0.0) > best:
            best, goal = float(node["reward"]), here
        children = node.get("children", ())
        for child in children:
            _check(child)
        stack.extend((children[i], here, i) for i in reversed(range(len(children))))
    steps = []
    while goal > 0:
        goal, which = links[goal]
        steps.append(which)
    return steps[::-1]


def _check(node: Any, root: bool = False) -> None:
    """Refuse a node that is not {action, N, W, reward, terminal, children}."""
    if not isinstance(node, Mapping):
        raise ValueError(f"tree: a node must be a dict, not {node!r:.60}.")
    where = "the root" if root else f"node {node.get('action')!r:.60}"
    for key in ("N", "W") if root else ("action", "N", "W"):
        if key not in node:
            raise ValueError(f"tree: {where} has no {key!r}.")
    for key in ("N", "W", "reward"):
        x = node.get(key, 0)
        if not isinstance(x, Real) or not isfinite(x):
            raise ValueError(f"tree: {key} of {where} must be a finite number, not {x!r}.")
    if node["N"] < 0 or not (isinstance(node["N"], Integral) or float(node["N"]).is_integer()):
        raise ValueError(f"tree: N of {where} must be a whole number of visits, not {node['N']!r}.")
    if not isinstance(node.get("children", []), list | tuple):
        raise ValueError(f"tree: children of {where} must be a list.")


def dpo_loss(
    logp_w: npt.ArrayLike,
    logp_l: npt.ArrayLike,
    ref_w: npt.ArrayLike,
    ref_l: npt.ArrayLike,
    beta: float,
) -> float:
    """Mean of −log σ(β Δ) = log(1 + e^(−β Δ)), Eq. 8; stable for every Δ: a number.

    Each log-probability is the sum over the tokens of one turn, the same span as in scoring.

    Args:
        logp_w: (N,) log π(a_w | h) of the winners; logp_l of the losers.
        logp_l: (N,)
        ref_w: (N,) the same under the frozen reference; ref_l of the losers.
        ref_l: (N,)
        beta: β > 0; the paper's WebShop runs use 0.1, HotPotQA 0.05.

    Raises:
        ValueError: different lengths, nan or infinity, or a beta that is not positive.
    """
    inside("beta", beta, 0, float("inf"), open_ends=True)
    win, lose, ref_win, ref_lose = vectors(logp_w=logp_w, logp_l=logp_l, ref_w=ref_w, ref_l=ref_l)
    delta = (win - lose) - (ref_win - ref_lose)
    return float(np.mean(np.logaddexp(0.0, -beta * delta)))
