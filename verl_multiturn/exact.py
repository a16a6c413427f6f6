"""Exact values of a small environment, by dynamic programming backwards from the turn limit.

    Q_n(s, a) = Σ p(s', r | s, a) (r + γ V_{n-1}(s')),   V_n(s) = Σ π(a | s) Q_n(s, a)  or  max_a Q_n(s, a),

with n turns left, V_0 = 0 and V = 0 after a terminated turn. The truth that estimators are measured
against.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl_multiturn.errors import unknown

State = Hashable
Policy = str | Callable[[Any], Mapping[str, float]]


class Model(Protocol):
    """What an environment must expose; a state holds no turn count."""

    @property
    def max_turns(self) -> int:
        """The limit of an episode."""

    @property
    def actions(self) -> Sequence[str]:
        """Every action, the same in all states of the task."""

    def start_state(self) -> Any:
        """Where the current task starts."""

    def transitions(self, state: Any, action: str) -> list[tuple[float, Any, float, bool]]:
        """(probability, next state, reward, terminated), one for each outcome."""


@dataclass(frozen=True)
class Values:
    """Values by (state, turns left).

    Attributes:
        V: value under the policy.
        Q: action -> value of that action and the policy afterwards.
        start: the value of the start with all turns left.
    """

    V: dict[tuple[State, int], float]
    Q: dict[tuple[State, int], dict[str, float]]
    start: float


def exact_values(env: Model, policy: Policy = "uniform", gamma: float = 1.0) -> Values:
    """V and Q of every state that the current task can reach in `env.max_turns` turns.

    Args:
        env: after `reset`.
        policy: "uniform", "optimal", or state -> {action: probability} (actions left out have 0).
        gamma: discount of a turn, in [0, 1].

    Raises:
        ValueError: an unknown policy, or probabilities that do not sum to 1.
    """
    if isinstance(policy, str) and policy not in ("uniform", "optimal"):
        raise unknown("policy", policy, ["uniform", "optimal", "a function state -> {action: p}"])
    V: dict[tuple[State, int], float] = {}
    Q: dict[tuple[State, int], dict[str, float]] = {}
    start = env.start_state()
    for left, states in enumerate(_reachable(env, start), start=1):
        for s in states:
            Q[s, left] = {
                a: _sum_to_one(
                    [
                        (p, r + gamma * (0.0 if end else V.get((after, left - 1), 0.0)))
                        for p, after, r, end in outcomes
                    ],
                    f"transitions({s!r}, {a!r})",
                )
                for a, outcomes in ((a, env.transitions(s, a)) for a in env.actions)
            }
            V[s, left] = _value(Q[s, left], s, policy)
    return Values(V, Q, V[start, env.max_turns])


def _reachable(env: Model, start: State) -> list[list[State]]:
    """States that can occur with 1, 2, ..., max_turns turns left."""
    layers: list[list[State]] = [[start]]
    for _ in range(env.max_turns - 1):
        after = {
            following: None
            for s in layers[-1]
            for a in env.actions
            for _, following, _, end in env.transitions(s, a)
            if not end
        }
        layers.append(list(after))
    return layers[::-1]


def _value(q: dict[str, float], s: State, policy: Policy) -> float:
    if policy == "optimal":
        return max(q.values())
    if isinstance(policy, str):
        return sum(q.values()) / len(q)
    return _sum_to_one([(p, q[a]) for a, p in policy(s).items()], f"policy({s!r})")


def _sum_to_one(weighted: list[tuple[float, float]], where: str) -> float:
    total = sum(p for p, _ in weighted)
    if abs(total - 1) > 1e-9:
        raise ValueError(f"{where}: probabilities sum to {total}, not 1")
    return sum(p * x for p, x in weighted)
