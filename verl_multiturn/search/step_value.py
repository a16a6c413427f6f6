"""Values of turns, wherever they come from, and what they are good for: pure functions.

    Q(s_t, a_t), V(s_t)  ─▶  advantage A_t = Q − V
                         ─▶  shaped reward r_t + γ V(s_{t+1}) − V(s_t)       (Ng, Harada and Russell 1999)
                         ─▶  prior of the next search (SearchConfig.prior)

A `StepValue` says both for a list of turns. A search tree (`TreeValue`), state values of vine rollouts or
a critic (`StateValue`), groups of equal states as in GiGPO (`GroupValue`) and a Q model (`ModelValue`) can
so be compared on the same recorded turns (`search.recorded.steps_of`). In training a Q model gives them by
multiturn.algorithm=q_advantage, in a search by `verl-multiturn search --q-model FOLDER`.

As a prior of a search: visits makes Q of a candidate count as `prior_visits` visits that are never booked,
so that what was found outweighs it in time; puct selects by W/N + c · prior · sqrt(N_parent) / (1 + N) with
the softmax of Q / `prior_temperature` over the candidates as prior.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from verl_multiturn.algorithms.vectors import inside
from verl_multiturn.columns import Floats
from verl_multiturn.errors import unknown
from verl_multiturn.returns import returns_to_go
from verl_multiturn.turns import TurnBatch

Messages = list[dict[str, str]]
BASELINES = ("mean", "logmeanexp", "leave_one_out")  # of a ModelValue
Score = Callable[[Messages, list[str]], Sequence[float]]  # prompt, answers -> Q of each


@dataclass(frozen=True)
class Step:
    """A turn, with what a value may be looked up by.

    Attributes:
        index: t.
        action: for the environment.
        path: the actions before it, from the start.
        state: what the environment showed.
        prompt: what the policy read.
        text: its whole answer; None: the action is the answer.
        others: answers that were sampled beside it, each as often as it was.
        group: of the start state; trajectory: which sample of it.
    """

    index: int
    action: str
    path: tuple[str, ...] = ()
    state: str = ""
    prompt: Messages | None = None
    text: str | None = None
    others: tuple[str, ...] = ()
    group: Hashable = ""
    trajectory: Hashable = 0

    @property
    def key(self) -> tuple[Hashable, Hashable, int]:
        """Group, trajectory, index."""
        return self.group, self.trajectory, self.index


class Values(NamedTuple):
    """Q of the actions and V of the states, (N,) each; nan: unknown."""

    Q: Floats
    V: Floats


class StepValue(Protocol):
    """Where values come from."""

    def values(self, steps: Sequence[Step]) -> Values:
        """Of each turn, in their order."""
        ...


class TreeValue:
    """Q = W / N of the edge, V = the mean of what followed the node above it, from search trees.

    Args:
        trees: group -> root, nested dicts as `Tree.to_dict` makes them.
        min_visits: an edge with fewer has no Q.
        gamma: γ of the search.
    """

    def __init__(
        self, trees: Mapping[Hashable, Mapping[str, Any]], min_visits: int = 1, gamma: float = 1.0
    ) -> None:
        inside("gamma", gamma, 1e-9, 1)
        self.trees, self.min_visits, self.gamma = trees, max(1, min_visits), gamma

    def values(self, steps: Sequence[Step]) -> Values:
        """See `StepValue`; a turn that no tree holds has none."""
        Q, V = np.full(len(steps), np.nan), np.full(len(steps), np.nan)
        for i, step in enumerate(steps):
            node = self.trees.get(step.group)
            for action in step.path:
                node = node and _child(node, action)
            if node and node["N"]:
                V[i] = node["W"] / node["N"]
                if step.path:  # W holds the node's own reward as well; a root has none
                    V[i] = (V[i] - node.get("reward", 0.0)) / self.gamma
            child = node and _child(node, step.action)
            if child and child["N"] >= self.min_visits:
                Q[i] = child["W"] / child["N"]
        return Values(Q, V)


def _child(node: Mapping[str, Any], action: str) -> Mapping[str, Any] | None:
    return next((child for child in node.get("children", ()) if child["action"] == action), None)


class StateValue:
    """V from the batch's column `value` (vine means, a critic), Q = r_t + γ V(s_{t+1}).

    V after the last turn is 0 where it terminated, `next_value` where it was truncated.

    Args:
        turns: of whom.
        gamma: γ, from turn to turn.
    """

    def __init__(self, turns: TurnBatch, gamma: float = 1.0) -> None:
        inside("gamma", gamma, 0, 1)
        Q = turns.reward + gamma * following(turns, turns.value)
        self._known = _by_key(turns, Values(Q, turns.value))

    def values(self, steps: Sequence[Step]) -> Values:
        """See `StepValue`; a turn that the batch does not hold has none."""
        return _look_up(self._known, steps)


class GroupValue:
    """Q = return to go, V = its mean over the group's turns that start from the same anchor (GiGPO, Eq. 6).

    Args:
        turns: of whom; without anchors every turn stands alone, with A = 0.
        gamma: γ, from turn to turn.
    """

    def __init__(self, turns: TurnBatch, gamma: float = 1.0) -> None:
        inside("gamma", gamma, 0, 1)
        Q, codes = returns_to_go(turns, gamma), turns.anchor_code
        V = np.bincount(codes, weights=Q)[codes] / np.bincount(codes)[codes]
        self._known = _by_key(turns, Values(Q, V))

    def values(self, steps: Sequence[Step]) -> Values:
        """See `StepValue`; a turn that the batch does not hold has none."""
        return _look_up(self._known, steps)


class ModelValue:
    """Q from a function that scores answers, V from those known in the state.

    Those are the answers of the steps with the same prompt, and what stands beside them (`Step.others`).

    Args:
        score: (prompt, answers) -> a number for each, such as β Σ (log π − log π_ref).
        baseline: V as "mean" or "logmeanexp" of the scores of the different answers in the state; or as
            their mean without the own one, each as often as it was sampled ("leave_one_out"), unknown where
            there is no other: it does not depend on the answer, so that a policy gradient stays unbiased.
    """

    def __init__(self, score: Score, baseline: str = "mean") -> None:
        if baseline not in BASELINES:
            raise unknown("baseline of ModelValue", baseline, BASELINES)
        self.score, self.baseline = score, baseline

    def values(self, steps: Sequence[Step]) -> Values:
        """See `StepValue`.

        Raises:
            ValueError: a step without a prompt, or a score that is missing or not finite.
        """
        prompts: dict[str, Messages] = {}
        said: dict[str, list[str]] = {}  # in each state, as often as it was said
        for step in steps:
            if step.prompt is None:
                raise ValueError(f"ModelValue needs the prompt of every step: turn {step.index} has none.")
            prompts.setdefault(repr(step.prompt), step.prompt)
            said.setdefault(repr(step.prompt), []).extend((_answer(step), *step.others))
        scores = {key: self._scored(prompts[key], [*dict.fromkeys(some)]) for key, some in said.items()}
        Q = np.array([scores[repr(step.prompt)][_answer(step)] for step in steps], np.float64)
        if self.baseline == "leave_one_out":
            totals = {key: sum(scores[key][one] for one in some) for key, some in said.items()}
            counts = np.array([len(said[repr(step.prompt)]) for step in steps], np.float64)
            rest = np.array([totals[repr(step.prompt)] for step in steps], np.float64) - Q
            return Values(Q, np.where(counts > 1, rest / np.maximum(counts - 1, 1), np.nan))
        V = [self._level(np.array([*scores[repr(step.prompt)].values()])) for step in steps]
        return Values(Q, np.array(V, np.float64))

    def _scored(self, prompt: Messages, answers: list[str]) -> dict[str, float]:
        scores = np.asarray(self.score(prompt, answers), np.float64)
        if scores.shape != (len(answers),) or not np.isfinite(scores).all():
            raise ValueError(f"a score must be one finite number for each of {len(answers)} answers.")
        return dict(zip(answers, scores.tolist(), strict=True))

    def _level(self, scores: Floats) -> float:
        if self.baseline == "mean":
            return float(scores.mean())
        return float(np.logaddexp.reduce(scores) - np.log(len(scores)))


def _answer(step: Step) -> str:
    return step.action if step.text is None else step.text


def turn_advantages(values: Values, unknown_is: float | None = None) -> Floats:
    """A_t = Q(s_t, a_t) − V(s_t). -> (N,).

    Args:
        values: of the turns.
        unknown_is: the advantage where Q or V is unknown; None: refused.

    Raises:
        ValueError: an unknown value; its place is named.
    """
    A = values.Q - values.V
    holes = np.isnan(A)
    if holes.any() and unknown_is is None:
        raise ValueError(
            f"{holes.sum()} of {len(A)} turns have no Q or no V, the first is number "
            f"{np.flatnonzero(holes)[0]}: give unknown_is=0.0, or values for all."
        )
    return A if unknown_is is None else np.where(holes, unknown_is, A)


def shaped_rewards(turns: TurnBatch, values: Values, gamma: float = 1.0) -> Floats:
    """r_t + γ V(s_{t+1}) − V(s_t), V after the last turn 0; which policy is best does not change. -> (N,).

    With γ the run's own, a trajectory's discounted return becomes less by V(s_0), whatever V is.

    Args:
        turns: in whose order `values` are.
        values: of which V is used.
        gamma: γ, from turn to turn.

    Raises:
        ValueError: another number of values, or an unknown V.
    """
    inside("gamma", gamma, 0, 1)
    if values.V.shape != (len(turns),):
        raise ValueError(f"values.V has shape {values.V.shape}, the batch {len(turns)} turns.")
    for row in np.flatnonzero(np.isnan(values.V))[:1]:
        raise ValueError(f"values.V is unknown (nan) at {turns.whose(row)}; shaping needs every V.")
    after = np.where(turns.last, 0.0, following(turns, values.V))
    return np.asarray(turns.reward + gamma * after - values.V, np.float64)


def following(turns: TurnBatch, V: Floats) -> Floats:
    """V(s_{t+1}); after the last turn 0 where it terminated, `next_value` where it was truncated. -> (N,)."""
    after = np.where(turns.truncated & ~turns.terminated, turns.next_value, 0.0)
    inner = np.flatnonzero(~turns.last[turns.order])
    after[turns.order[inner]] = V[turns.order[inner + 1]]
    return np.asarray(after, np.float64)


def _by_key(turns: TurnBatch, values: Values) -> dict[tuple[Hashable, Hashable, int], tuple[float, float]]:
    keys = zip(turns.group.tolist(), turns.trajectory.tolist(), turns.index.tolist(), strict=True)
    return dict(zip(keys, zip(values.Q.tolist(), values.V.tolist(), strict=True), strict=True))


def _look_up(known: Mapping[Any, tuple[float, float]], steps: Sequence[Step]) -> Values:
    found = [known.get(step.key, (np.nan, np.nan)) for step in steps]
    Q, V = np.array(found, np.float64).reshape(-1, 2).T
    return Values(Q, V)
