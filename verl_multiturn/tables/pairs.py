"""Two methods on the same tasks: a paired bootstrap, matched by task id."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from verl_multiturn.stats import paired_bootstrap

Outcomes = Mapping[str, Sequence[float]]  # task id -> its outcomes, over seeds and samples


class Paired(NamedTuple):
    """mean(a - b) over the tasks of both, its 95 % bounds, p of no difference, number of tasks."""

    difference: float
    low: float
    high: float
    p: float
    tasks: int


def paired(a: Outcomes, b: Outcomes, resamples: int = 10_000, seed: int = 0) -> Paired:
    """Difference of two methods, by resampling the tasks that both have played.

    A task counts once, by the mean of its outcomes, however often each method played it. Source: Efron
    and Tibshirani 1993, ch. 16, through `stats.paired_bootstrap`.

    Args:
        a: outcomes of one method.
        b: of the other.
        resamples: of the tasks.
        seed: of the resampling.

    Raises:
        ValueError: no task is in both.
    """
    common = sorted(a.keys() & b.keys())
    if not common:
        first = ", ".join(str(next(iter(some), "none")) for some in (a, b))
        raise ValueError(f"no task was played by both: {len(a)} and {len(b)} tasks, the first are {first}")
    ours, others = ([float(np.mean(some[task])) for task in common] for some in (a, b))
    return Paired(*paired_bootstrap(ours, others, n=resamples, seed=seed), tasks=len(common))
