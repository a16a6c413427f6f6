"""Intervals for what is reported: a rate, a mean, a difference of two policies on the same tasks."""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

# 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom (standard tables); above, the
# expansion is exact to 1e-4.
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


class Interval(NamedTuple):
    """An estimate and its 95 % bounds."""

    mean: float
    low: float
    high: float


class Difference(NamedTuple):
    """mean(a - b), its 95 % bounds, and the two-sided bootstrap p-value of no difference."""

    mean: float
    low: float
    high: float
    p: float


def wilson(k: float, n: int, z: float = 1.96) -> Interval:
    """Score interval of a success rate: k of n.

    (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), p = k/n; never outside [0, 1], sound at k
    = 0. Source: Wilson 1927, JASA 22(158).

    Raises:
        ValueError: n is 0, or k lies outside [0, n].
    """
    if n < 1 or not 0 <= k <= n:
        raise ValueError(f"a rate needs 0 <= k <= n and n >= 1, not k={k}, n={n}")
    p = k / n
    scale = 1 + z**2 / n
    centre = (p + z**2 / (2 * n)) / scale
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / scale
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half))


def mean_interval(x: ArrayLike) -> Interval:
    """95 % interval of a mean, mean ± t s/√n (s with ddof 1); one value alone is unbounded.

    Source: Student 1908, Biometrika 6(1).

    Args:
        x: (n,) independent values.

    Raises:
        ValueError: no values.
    """
    x = _values(x)
    mean = float(x.mean())
    if len(x) == 1:
        return Interval(mean, -math.inf, math.inf)
    half = _t_quantile(len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return Interval(mean, mean - half, mean + half)


def paired_bootstrap(a: ArrayLike, b: ArrayLike, n: int = 10_000, seed: int = 0) -> Difference:
    """Difference of two policies on the same tasks, by resampling tasks.

    Percentile interval; p = twice the smaller share of resampled means on either side of 0, (count
    + 1) / (n + 1). Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, ch. 13 and
    16.

    Args:
        a: (tasks,) a score per task.
        b: (tasks,) the other policy's, in the same order.
        n: resamples.
        seed: of the resampling.

    Raises:
        ValueError: no tasks, different lengths, or n < 1.
    """
    a, b = _values(a), _values(b)
    if len(a) != len(b) or n < 1:
        raise ValueError(f"a pair needs equal lengths and n >= 1, not {len(a)}, {len(b)}, n={n}")
    d = a - b
    rng = np.random.default_rng(seed)
    # One row at a time keeps memory at one resample, whatever the panel's size.
    means = np.array([d[rng.integers(len(d), size=len(d))].mean() for _ in range(n)])
    low, high = np.quantile(means, [0.025, 0.975])
    tail = min(int((means <= 0).sum()), int((means >= 0).sum()))
    return Difference(float(d.mean()), float(low), float(high), min(1.0, 2 * (tail + 1) / (n + 1)))


def _values(x: ArrayLike) -> np.ndarray:
    values = np.asarray(x, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"needs a list of at least one value, not an array of shape {values.shape}")
    return values


def _t_quantile(v: int) -> float:
    """97.5 % quantile of Student's t with v degrees of freedom. Source: Abramowitz and Stegun 26.7.5."""
    if v <= len(_T):
        return _T[v - 1]
    z = NormalDist().inv_cdf(0.975)
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + g1 / v + g2 / v**2 + g3 / v**3
