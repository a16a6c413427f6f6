"""Metrics of several training runs side by side: seeds of one method together, mean and 95 % interval.

A method is what `trainer.experiment_name` says, with its algorithm where one name has several.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from verl_multiturn.errors import unknown
from verl_multiturn.stats import mean_interval
from verl_multiturn.tables.budget import COSTS, spent
from verl_multiturn.tables.recorded import Recorded

AXES = {"step": "training step"} | COSTS
DEFAULT = ("success", "group_std", "val/success")


def curves(runs: Iterable[Recorded], metrics: Sequence[str] = DEFAULT) -> pd.DataFrame:
    """One row for each value of a metric: method, seed, step, env_steps, tokens, metric, value.

    Args:
        runs: evaluations among them are left out.
        metrics: names of the log; NAME also stands for multiturn/NAME/mean.

    Raises:
        ValueError: no training run, two of a method and seed, or a metric that no run has.
    """
    training = [run for run in runs if not run.evaluated]
    if not training:
        raise ValueError("no training run among these folders")
    known = {str(name) for run in training for name in run.run.metrics}
    wanted = [_metric(name, known) for name in metrics]
    frames, names = [], _methods(training)
    for run, method in zip(training, names, strict=True):
        long = run.run.metrics.reindex(columns=wanted).rename_axis("step").reset_index()
        long = long.melt("step", var_name="metric", value_name="value").dropna(ignore_index=True)
        costs = spent(run.run)
        costs = costs.reindex(costs.index.union(long["step"].unique())).ffill()
        paid = costs.loc[long["step"]].reset_index(drop=True)
        frames.append(pd.concat([long, paid], axis=1).assign(method=method, seed=run.seed))
    found = pd.concat(frames, ignore_index=True)
    if (twice := found[found.duplicated(["method", "seed", "step", "metric"])]).size:
        method, seed = twice[["method", "seed"]].iloc[0]
        raise ValueError(f"{method} has several runs of seed {seed}: name the folders of one of them")
    return found[["method", "seed", "step", *COSTS, "metric", "value"]]


def summary(found: pd.DataFrame, k: int = 5) -> pd.DataFrame:
    """Each method's first and last k values of a metric: per seed their mean, then mean and 95 % interval.

    Columns: metric, method, when (first or last), mean, low, high, n (seeds).
    """
    rows = []
    for (metric, method), one in found.groupby(["metric", "method"], sort=False):
        for when in ("first", "last"):
            part = one.sort_values("step").groupby("seed")
            seeds = (part.head(k) if when == "first" else part.tail(k)).groupby("seed")["value"].mean()
            rows.append((metric, method, when, *mean_interval(seeds), len(seeds)))
    return pd.DataFrame(rows, columns=["metric", "method", "when", "mean", "low", "high", "n"])


def draw(found: pd.DataFrame, path: str | Path, x: str = "step") -> None:
    """Draw each metric as PNG: seeds thin, their mean thick with its 95 % interval.

    Args:
        found: of `curves`.
        path: the file.
        x: a key of AXES. At equal cost the mean is over equal steps, drawn at their mean cost.

    Raises:
        ValueError: an unknown axis.
    """
    from matplotlib.figure import Figure  # here, because the table does without it

    if x not in AXES:
        raise unknown("axis", x, AXES)
    metrics = list(dict.fromkeys(found["metric"]))
    figure = Figure(figsize=(9, 3.2 * len(metrics)), dpi=120, layout="constrained")
    colours = {method: f"C{n}" for n, method in enumerate(dict.fromkeys(found["method"]))}
    for ax, metric in zip(figure.subplots(len(metrics), 1, squeeze=False)[:, 0], metrics, strict=True):
        for method, one in found[found["metric"] == metric].groupby("method", sort=False):
            _draw_method(ax, one, colours[method], str(method), x)
        ax.set(xlabel=AXES[x], ylabel=metric)
        ax.grid(alpha=0.3)
        ax.legend(loc="best", fontsize="small")
    figure.savefig(path, format="png")


def _draw_method(ax: Any, one: pd.DataFrame, colour: str, method: str, x: str) -> None:
    for _, run in one.groupby("seed"):
        ax.plot(run[x], run["value"], color=colour, alpha=0.3, linewidth=0.8)
    seeds = one["seed"].nunique()
    steps = one.groupby("step").filter(lambda some: len(some) == seeds).groupby("step")
    if not len(steps):
        return
    mean, low, high = np.array([mean_interval(some) for _, some in steps["value"]]).T
    at = steps[x].mean() if x != "step" else list(steps.groups)
    ax.plot(at, mean, color=colour, label=f"{method}, n = {seeds}")
    if all(map(math.isfinite, [*low, *high])):
        ax.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)


def _metric(name: str, known: set[str]) -> str:
    for full in (name, f"multiturn/{name}/mean"):
        if full in known:
            return full
    raise unknown("metric", name, sorted(known))


def _methods(runs: Sequence[Recorded]) -> list[str]:
    names = [str(run.setting("trainer.experiment_name")) for run in runs]
    algorithms = [str(run.setting("multiturn.algorithm")) for run in runs]
    several: dict[str, set[str]] = defaultdict(set)
    for name, algorithm in zip(names, algorithms, strict=True):
        several[name].add(algorithm)
    return [
        f"{name} ({algorithm})" if len(several[name]) > 1 else name
        for name, algorithm in zip(names, algorithms, strict=True)
    ]
