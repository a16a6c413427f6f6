"""The estimators of the report: each a function of sampled turns, whatever it is called in training.

What reads values gets exact ones, wrong ones (a critic's error: one number for each place, drawn once
and normal with deviation `WRONG`), or means of fresh continuations. bilevel_gae sees utterances of
two tokens, of which the first is the action: its values are V(s) and Q(s, a), its advantage the first's.
`turn_index` is no algorithm of this package: it is the baseline that verl's RFC 7244 warns of.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from verl_multiturn.algorithms import advantages
from verl_multiturn.algorithms.archer import critic_advantage
from verl_multiturn.algorithms.starpo import bilevel_gae
from verl_multiturn.columns import Floats, Ints
from verl_multiturn.estimators_world import Episodes, World
from verl_multiturn.returns import discounted_sum, relative
from verl_multiturn.turns import TurnBatch

WRONG = 0.1
GAMMA_TURN = 0.95  # of bilevel_gae: VAGEN's and RAGEN's


@dataclass(frozen=True, eq=False)
class Errors:
    """What wrong critics are off by, fixed for a setting: (2, X) of two V heads, (2, X, A) of two Q heads."""

    V: Floats
    Q: Floats

    @classmethod
    def draw(cls, world: World, rng: np.random.Generator) -> "Errors":
        """New errors."""
        return cls(rng.normal(0, WRONG, (2, *world.V.shape)), rng.normal(0, WRONG, (2, *world.Q.shape)))


@dataclass(frozen=True, eq=False)
class Sample:
    """A batch of episodes as an estimator gets it: the turns, and where they were, for values."""

    world: World
    episodes: Episodes
    turns: TurnBatch
    errors: Errors
    rng: np.random.Generator  # of continuations

    @classmethod
    def draw(cls, world: World, n: int, group: int, errors: Errors, rng: np.random.Generator) -> "Sample":
        """`n` episodes in groups of `group`."""
        episodes = world.sample(n, rng)
        turns = TurnBatch.from_lists(
            group=episodes.episode // group,
            trajectory=episodes.episode % group,
            index=episodes.index,
            reward=episodes.reward,
            anchor=world.state[episodes.place],
        )
        return cls(world, episodes, turns, errors, rng)

    def with_values(self, V: Floats) -> TurnBatch:
        """The turns with V(s_t). (N,)."""
        return replace(self.turns, value=V)


Method = Callable[[Sample], Floats]


def _named(name: str, **keywords: object) -> Method:
    return lambda sample: advantages(name, sample.turns, **keywords)


def _gae(lam: float, wrong: bool) -> Method:
    def method(sample: Sample) -> Floats:
        x = sample.episodes.place
        V = sample.world.V[x] + (sample.errors.V[0, x] if wrong else 0.0)
        return advantages("turn_gae", sample.with_values(V), lam=lam)

    return method


def _vine(K: int) -> Method:
    def method(sample: Sample) -> Floats:
        V = sample.world.returns_from(sample.episodes.place, K, sample.rng).mean(axis=1)
        return advantages("vineppo", sample.with_values(V))

    return method


def _archer(wrong: bool) -> Method:
    def method(sample: Sample) -> Floats:
        world, x, a = sample.world, sample.episodes.place, sample.episodes.action
        off_Q, off_V = sample.errors.Q[:, x, a] * wrong, sample.errors.V[:, x] * wrong
        return critic_advantage(*(world.Q[x, a] + off_Q), *(world.V[x] + off_V))

    return method


def _q_model(K: int, wrong: bool) -> Method:
    """Q(x, a) less the mean Q of K fresh actions at x: multiturn.algorithm=q_advantage."""

    def method(sample: Sample) -> Floats:
        world, x = sample.world, sample.episodes.place
        Q = world.Q + sample.errors.Q[0] * wrong
        # A stream of its own: the draws of the other methods stay what they were without it.
        fresh = world.actions(np.repeat(x, K), sample.rng.spawn(1)[0]).reshape(-1, K)
        return np.asarray(Q[x, sample.episodes.action] - Q[x[:, None], fresh].mean(axis=1), np.float64)

    return method


def _bilevel(sample: Sample) -> Floats:
    world, x, a = sample.world, sample.episodes.place, sample.episodes.action
    tokens = np.stack([world.V[x], world.Q[x, a]], axis=1)  # (N, 2)
    parts = []
    for V, r in zip(_split(tokens, sample), _split(sample.episodes.reward, sample), strict=True):
        ends = np.arange(1, 2 * len(r), 2)
        A, _ = bilevel_gae(r, V.ravel(), ends, np.ones(2 * len(r)), 1.0, 1.0, GAMMA_TURN)
        parts.append(A[::2])
    return np.concatenate(parts)


def _split(x: Floats, sample: Sample) -> list[Floats]:
    """Episode by episode."""
    starts: Ints = np.flatnonzero(sample.episodes.index == 0)
    return np.split(x, starts[1:])


def turn_index(sample: Sample) -> Floats:
    """A_t = Σ_{k≥t} (r_k − mean of r_k over the group's trajectories that reach turn k). -> (N,).

    How many means are taken off depends on when the trajectory itself stops: going on gains nothing.
    """
    turns = sample.turns
    codes = turns.group_code * (int(turns.index.max()) + 1) + turns.index
    _, codes = np.unique(codes, return_inverse=True)
    return discounted_sum(turns, relative(turns.reward, codes), 1.0)


METHODS: dict[str, Method] = {
    "grpo": _named("grpo"),
    "grpo, no std": _named("grpo", by_std=False),
    "rloo": _named("rloo"),
    "reinforce": _named("reinforce"),
    "reinforce, no baseline": _named("reinforce", baseline="none"),
    "gigpo": _named("gigpo"),
    "gigpo, no std, γ 1": _named("gigpo", by_std=False, gamma=1.0),
    "gigpo, verl-agent": _named("gigpo", compat="verl_agent"),
    "turn_index": turn_index,
    "turn_gae λ 1": _gae(1.0, wrong=False),
    "turn_gae λ 0": _gae(0.0, wrong=False),
    "turn_gae λ 1, wrong V": _gae(1.0, wrong=True),
    "turn_gae λ 0, wrong V": _gae(0.0, wrong=True),
    "vineppo K 1": _vine(1),
    "vineppo K 3": _vine(3),
    "vineppo K 9": _vine(9),
    "archer": _archer(wrong=False),
    "archer, wrong Q, V": _archer(wrong=True),
    "bilevel_gae": _bilevel,
    "q_advantage": _q_model(4, wrong=False),
    "q_advantage, wrong Q": _q_model(4, wrong=True),
}
