"""Intervals against tables, identities and simulated coverage."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_multiturn.stats import mean_interval, paired_bootstrap, wilson


def test_wilson_against_published_numbers():
    """Newcombe 1998, table I: 81/263, 15/148, 0/20 and 1/29, method 3."""
    for k, n, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert wilson(k, n, 1.959964)[1:] == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_stays_inside_and_mirrors(kn):
    k, n = kn
    p, low, high = wilson(k, n)
    mirror = wilson(n - k, n)
    assert 0 <= low <= p + 1e-12 and p - 1e-12 <= high <= 1
    assert (1 - high, 1 - low) == pytest.approx(mirror[1:], abs=1e-12)


def test_mean_interval_against_the_t_table():
    """Half widths are t / sqrt(n) for unit s: t = 2.7764 (4 df), 2.0930 (19), 2.0003 (60)."""
    for n, t in [(5, 2.7764), (20, 2.0930), (61, 2.0003)]:
        x = np.arange(n, dtype=float)
        x = (x - x.mean()) / x.std(ddof=1) + 3
        mean, low, high = mean_interval(x)
        assert mean == pytest.approx(3)
        assert (high - low) / 2 * math.sqrt(n) == pytest.approx(t, abs=2e-4)
    assert mean_interval([2.0]) == (2.0, -math.inf, math.inf)


def test_paired_bootstrap():
    rng = np.random.default_rng(0)
    task = rng.normal(size=200) * 10  # tasks differ much more than policies do
    a, b = task + 0.3 + rng.normal(size=200) * 0.5, task + rng.normal(size=200) * 0.5
    found = paired_bootstrap(a, b, n=2000)
    assert found.low < found.mean < found.high and found.low > 0 and found.p < 0.01
    assert found.mean == pytest.approx((a - b).mean())
    assert found == paired_bootstrap(a, b, n=2000)
    theory = mean_interval(a - b)
    assert (found.low, found.high) == pytest.approx(theory[1:], abs=0.02)
    assert paired_bootstrap(a, a, n=100) == (0.0, 0.0, 0.0, 1.0)
    swapped = paired_bootstrap(b, a, n=2000)
    assert swapped.mean == pytest.approx(-found.mean)


@pytest.mark.parametrize(
    "call",
    [
        lambda: wilson(0, 0),
        lambda: wilson(3, 2),
        lambda: mean_interval([]),
        lambda: paired_bootstrap([], []),
        lambda: paired_bootstrap([1.0], [1.0, 2.0]),
        lambda: paired_bootstrap([1.0], [1.0], n=0),
    ],
)
def test_nothing_to_measure_is_an_error(call):
    with pytest.raises(ValueError, match="needs"):
        call()
