"""Bias and variance of every estimator against the true advantage, where values are known.

Over turns as a policy meets them, with e = Â − A the error and b(x, a) = E[e | x, a]:

    bias²         = E b²                       variance = E e² − bias²
    action bias²  = E (b − Σ_a π(a | x) b)²    the part that moves the policy: what depends on x alone
                                               is a baseline, and leaves the gradient as it is

and of the gradient g = Σ_t Â_t ∂ log π(a_t | s_t) / ∂θ of one trajectory, against ∂J / ∂θ: relative
bias, length, cosine, and how many trajectories a batch needs for its noise to be as long as E g.
Squares of means are taken over pairs of different batches, which makes them unbiased (an estimate can
be a little below 0, and is then shown as 0); standard errors are a jackknife over batches.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import nan, sqrt

import numpy as np

from verl_multiturn.columns import Floats
from verl_multiturn.errors import unknown
from verl_multiturn.estimators_methods import METHODS, Errors, Method, Sample
from verl_multiturn.estimators_settings import SWEEPS, Setting, setting
from verl_multiturn.estimators_world import World

Row = dict[str, str | float]
METRICS = (
    *("mean_error", "bias", "action_bias", "variance", "mse", "correlation"),
    *("gradient_bias", "gradient_length", "gradient_cosine", "trajectories_needed"),
)
_SQUARES = ("bias", "action_bias", "gradient_bias")  # estimated as squares, shown as roots


@dataclass(frozen=True)
class Plan:
    """How much is sampled, for each setting.

    Attributes:
        batches: independent batches, the unit of the standard errors; at least 3.
        trajectories: of a batch, in whole groups of every size of the sweeps: a multiple of 16.
        seed: of everything random.
        values: how many values of each sweep, from the first one.
    """

    batches: int = 60
    trajectories: int = 512
    seed: int = 1
    values: int = 4

    def __post_init__(self) -> None:
        if self.batches < 3 or self.trajectories < 16 or self.trajectories % 16:
            raise ValueError(
                "a plan needs batches >= 3 and a multiple of 16 as trajectories, not "
                f"batches={self.batches}, trajectories={self.trajectories}"
            )


QUICK = Plan(batches=6, trajectories=64, values=2)


def report(plan: Plan, say: Callable[[str], object], sweeps: Sequence[str] | None = None) -> list[Row]:
    """One row for each setting and estimator: sweep, value, estimator, the metrics and their errors.

    Args:
        plan: how much.
        say: gets a line for each setting.
        sweeps: names; default: all.

    Raises:
        ValueError: an unknown sweep.
    """
    for name in sweeps or ():
        if name not in SWEEPS:
            raise unknown("sweep", name, SWEEPS)
    chosen = [(name, value) for name in sweeps or SWEEPS for value in SWEEPS[name][: plan.values]]
    rows: list[Row] = []
    start = time.perf_counter()
    for done, (name, value) in enumerate(chosen, start=1):
        one = setting(name, value)
        for method, metrics in measure(one, plan).items():
            rows.append({"sweep": name, "value": value, "estimator": method, **metrics})
        pace = (time.perf_counter() - start) / done
        left = timedelta(seconds=round(pace * (len(chosen) - done)))
        say(f"{done}/{len(chosen)}  {name} {value:g}  {pace:.1f} s a setting  ETA {left}")
    return rows


def measure(one: Setting, plan: Plan, methods: Mapping[str, Method] = METHODS) -> dict[str, dict[str, float]]:
    """The metrics of every method and, under `<metric>_se`, their standard errors."""
    rng = np.random.default_rng([plan.seed, *one.sweep.encode(), round(1000 * one.value)])
    errors = Errors.draw(one.world, rng)
    tallies = {name: Tally(one.world, plan) for name in methods}
    for batch in range(plan.batches):
        sample = Sample.draw(one.world, plan.trajectories, one.group, errors, rng)
        for name, method in methods.items():
            tallies[name].add(batch, sample, method(sample))
    return {name: tally.metrics() for name, tally in tallies.items()}


class Tally:
    """Sums of the errors of one estimator, batch by batch."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world, self.plan = world, plan
        F, shape = plan.batches, world.Q.shape
        self.count, self.error = np.zeros((F, *shape)), np.zeros((F, *shape))  # (F, X, A)
        self.sums = np.zeros((F, 8))  # over turns of 1, e, e², Â, Â², A, A², ÂA
        self.gradient = np.zeros((F, world.policy.size))

    def add(self, batch: int, sample: Sample, found: Floats) -> None:
        """One batch: `found` is Â of every turn. (N,)."""
        world, x, a = self.world, sample.episodes.place, sample.episodes.action
        true = world.advantage[x, a]
        e, cell = found - true, x * world.Q.shape[1] + a

        def by_cell(weights: Floats) -> Floats:
            sums = np.bincount(cell, weights=weights, minlength=world.Q.size)
            return np.asarray(sums.reshape(world.Q.shape), np.float64)

        self.count[batch], self.error[batch] = by_cell(np.ones(len(x))), by_cell(e)
        terms = (np.ones(len(x)), e, e**2, found, found**2, true, true**2, found * true)
        self.sums[batch] = [term.sum() for term in terms]
        self.gradient[batch] = world.gradient_of(by_cell(found)).ravel() / self.plan.trajectories

    def metrics(self) -> dict[str, float]:
        """The metrics and their standard errors."""
        everything = np.ones(self.plan.batches, np.bool_)
        without = [everything & (np.arange(len(everything)) != f) for f in range(len(everything))]
        value = self._estimate(everything)
        each = [self._estimate(kept) for kept in without]
        found: dict[str, float] = {}
        for name in METRICS:
            spread = np.array([one[name] for one in each])
            se = sqrt((len(each) - 1) * float(spread.var()))
            found[name], found[f"{name}_se"] = (
                _root(value[name], se) if name in _SQUARES else (value[name], se)
            )
        return found

    def _estimate(self, kept: np.ndarray) -> dict[str, float]:
        """The metrics from some batches; those of `_SQUARES` as squares."""
        n, e, e2, found, found2, true, true2, both = self.sums[kept].sum(axis=0)
        bias, action = self._biases(kept)
        spread = (n * found2 - found**2) * (n * true2 - true**2)
        return {
            "mean_error": e / n,
            "bias": bias,
            "action_bias": action,
            "variance": e2 / n - bias,
            "mse": e2 / n,
            "correlation": (n * both - found * true) / sqrt(spread) if spread > 1e-12 * n**4 else nan,
            **self._gradients(self.gradient[kept]),
        }

    def _biases(self, kept: np.ndarray) -> tuple[float, float]:
        """Squares of bias and action bias."""
        N, S = self.count[kept], self.error[kept]
        P = _pairs(S) / np.where(_pairs(N) > 0, _pairs(N), np.inf)  # (X, A, A) b(x, a) b(x, a')
        seen = N.sum(axis=0)
        visits = seen / seen.sum()
        squares = np.diagonal(P, axis1=1, axis2=2)
        pi = self.world.policy[self.world.state]
        spread = (pi * squares).sum(axis=1) - np.einsum("xa,xab,xb->x", pi, P, pi)
        return float((visits * squares).sum()), float((visits.sum(axis=1) * spread).sum())

    def _gradients(self, g: Floats) -> dict[str, float]:
        J = self.world.gradient.ravel()
        size, along = float(J @ J), float(g.mean(axis=0) @ J)
        length = _norm(g)
        noise = float(g.var(axis=0, ddof=1).sum()) * self.plan.trajectories
        return {
            "gradient_bias": _norm(g - J) / size,
            "gradient_length": along / size,
            "gradient_cosine": along / sqrt(length * size) if length > 0 else nan,
            "trajectories_needed": noise / length if length > 0 else nan,
        }


def _pairs(x: Floats) -> Floats:
    """Σ over pairs of different batches of x(a) x(a'). (F, X, A) -> (X, A, A)."""
    total = x.sum(axis=0)
    same = np.einsum("fxa,fxb->xab", x, x, optimize=True)
    return np.asarray(total[:, :, None] * total[:, None, :] - same, np.float64)


def _norm(g: Floats) -> float:
    """|E g|² from (F, ...) independent g, without bias."""
    total = g.sum(axis=0)
    return float(total @ total - (g * g).sum()) / (len(g) * (len(g) - 1))


def _root(square: float, se: float) -> tuple[float, float]:
    """The root of a square that is known up to `se`; near 0 its error is of the order of √se."""
    root = sqrt(max(0.0, square))
    return root, se / (2 * sqrt(max(square, se))) if se > 0 else 0.0
