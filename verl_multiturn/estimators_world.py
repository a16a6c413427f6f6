"""A task small enough to know, with a policy, as arrays: exact advantages, exact gradient, fast sampling.

A place x is a state with a number of turns left; the policy is a table over the states alone, as a
policy that does not see the turn count. With d(x) the expected visits of an episode,

    ∂J / ∂θ[s, a] = Σ_{x of s} d(x) π(a | s) A(x, a),     π = softmax(θ),  J = E Σ_t r_t

(Sutton et al. 1999, "Policy gradient methods", Theorem 1, for a table and without discount).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from verl_multiturn.columns import Floats, Ints
from verl_multiturn.exact import Model, exact_values

END = -1  # where no place follows: the episode ended, or no turns are left


@dataclass(frozen=True, eq=False)
class Episodes:
    """Turns of sampled episodes, episode after episode, t ascending; every array is (N,)."""

    episode: Ints
    index: Ints  # t
    place: Ints  # x
    action: Ints
    reward: Floats
    after: Ints  # the place after the turn, or END


@dataclass(frozen=True, eq=False)
class World:
    """X places, S states, A actions, at most K outcomes of each.

    Attributes:
        start: the place of the first turn.
        state: (X,) row of the policy's table; also the anchor.
        policy: (S, A) π(a | s); 0 for actions that a state lacks.
        V: (X,) value; Q: (X, A), nan where the policy never acts so.
        chance, after, reward: (X, A, K) of the outcomes.
    """

    start: int
    state: Ints
    policy: Floats
    V: Floats
    Q: Floats
    chance: Floats
    after: Ints
    reward: Floats

    @classmethod
    def of(cls, model: Model, policy: Callable[[Any], Mapping[str, float]]) -> "World":
        """The task as `model` has it now, under `policy`; see `exact_values` for both."""
        values = exact_values(model, policy)
        places = {key: x for x, key in enumerate(values.V)}
        states = {s: n for n, s in enumerate(dict.fromkeys(s for s, _ in places))}
        tables = {s: {a: p for a, p in policy(s).items() if p > 0} for s in states}
        A = max(map(len, tables.values()))
        outcomes = {(s, a): model.transitions(s, a) for s, table in tables.items() for a in table}
        shape = (len(places), A, max(map(len, outcomes.values())))
        chance, reward, after = np.zeros(shape), np.zeros(shape), np.full(shape, END)
        pi, Q = np.zeros((len(states), A)), np.full(shape[:2], np.nan)
        for (s, left), x in places.items():
            for n, (a, p) in enumerate(tables[s].items()):
                pi[states[s], n], Q[x, n] = p, values.Q[s, left][a]
                for k, (chances, following, r, end) in enumerate(outcomes[s, a]):
                    chance[x, n, k], reward[x, n, k] = chances, r
                    after[x, n, k] = END if end else places.get((following, left - 1), END)
        state = np.array([states[s] for s, _ in places])
        V = np.array(list(values.V.values()))
        return cls(places[model.start_state(), model.max_turns], state, pi, V, Q, chance, after, reward)

    @cached_property
    def advantage(self) -> Floats:
        """A(x, a) = Q − V, 0 for actions that a state lacks. (X, A)."""
        return np.where(np.isnan(self.Q), 0.0, self.Q - self.V[:, None])

    @cached_property
    def visits(self) -> Floats:
        """d(x), the expected visits of an episode. (X,)."""
        d: Floats = np.zeros(len(self.V))
        flow: Floats = np.zeros(len(self.V))
        flow[self.start] = 1.0
        while flow.any():  # a place follows only places with one turn more: it ends
            d += flow
            mass = flow[:, None, None] * self.policy[self.state][..., None] * self.chance
            on = self.after != END
            flow = np.asarray(np.bincount(self.after[on], weights=mass[on], minlength=len(d)), np.float64)
        return d

    @cached_property
    def gradient(self) -> Floats:
        """∂J / ∂θ. (S, A)."""
        return self.gradient_of(self.visits[:, None] * self.policy[self.state] * self.advantage)

    def gradient_of(self, credit: Floats) -> Floats:
        """Σ_x Σ_b credit(x, b) ∂ log π(b | s) / ∂θ[s, a]. (X, A) -> (S, A).

        Args:
            credit: sum of the advantages that turns at x with action b were given.
        """
        by_state = np.zeros_like(self.policy)
        np.add.at(by_state, self.state, credit)
        return np.asarray(by_state - self.policy * by_state.sum(axis=1, keepdims=True), np.float64)

    def sample(self, n: int, rng: np.random.Generator) -> Episodes:
        """`n` episodes from the start."""
        alive, x = np.arange(n), np.full(n, self.start)
        parts = []
        for t in range(int(np.iinfo(np.int64).max)):
            a, k = self._act(x, rng)
            after = self.after[x, a, k]
            parts.append((alive, np.full(len(x), t), x, a, self.reward[x, a, k], after))
            alive, x = alive[after != END], after[after != END]
            if not len(x):
                break
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        order = np.lexsort((columns[1], columns[0]))
        return Episodes(*(column[order] for column in columns))

    def returns_from(self, places: Ints, K: int, rng: np.random.Generator) -> Floats:
        """Returns of `K` fresh continuations from each place. -> (N, K)."""
        G = np.zeros(len(places) * K)
        who, x = np.arange(len(G)), np.repeat(places, K)
        while len(x):
            a, k = self._act(x, rng)
            G[who] += self.reward[x, a, k]
            after = self.after[x, a, k]
            who, x = who[after != END], after[after != END]
        return G.reshape(len(places), K)

    def actions(self, x: Ints, rng: np.random.Generator) -> Ints:
        """An action of the policy at each place. -> (N,)."""
        return _draw(self._acts[self.state[x]], rng)

    def _act(self, x: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """An action of the policy at each place, and the outcome that it had."""
        a = self.actions(x, rng)
        return a, _draw(self._happens[x, a], rng)

    @cached_property
    def _acts(self) -> Floats:
        return _cumulative(self.policy)

    @cached_property
    def _happens(self) -> Floats:
        return _cumulative(self.chance)


def _cumulative(p: Floats) -> Floats:
    """Cumulative chances; from the last possible outcome on exactly 1, whatever rounding does."""
    total = np.cumsum(p, axis=-1)
    return np.where(total >= total[..., -1:], 1.0, total)


def _draw(cumulative: Floats, rng: np.random.Generator) -> Ints:
    return np.asarray((rng.random(len(cumulative))[:, None] >= cumulative).sum(axis=1))
