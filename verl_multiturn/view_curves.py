"""The curves above a run's page: from its trajectories where they are in the page, else its metrics."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from verl_multiturn.stats import mean_interval, wilson
from verl_multiturn.view_data import Step

Point = list[float | None]  # step, value, low, high
Metrics = Mapping[int, Mapping[str, float]]  # step -> name -> a finite number
_SUCCESS = {"train": ("multiturn/success/mean", "multiturn/trajectories/mean"),
            "val": ("val/success", "val/episodes")}  # fmt: skip
_MEANS = {
    "return": {"train": "multiturn/return/mean", "val": "val/return"},
    "valid": {"train": "multiturn/valid/mean", "val": "val-aux/{env}/valid/mean"},
}


def curves(steps: Iterable[Step], metrics: Metrics, env: str | None) -> dict[str, dict[str, list[Point]]]:
    """Success with its Wilson interval, return with Student's, share of valid turns; each by split."""
    found: dict[str, dict[str, dict[int, Point]]] = {"success": {}, "return": {}, "valid": {}}
    for split in _SUCCESS:
        for step, values in metrics.items():
            for curve, point in _of_metrics(split, step, values, env or ""):
                found[curve].setdefault(split, {})[step] = point
    for one in steps:
        for curve, point in _of_trajectories(one):
            found[curve].setdefault(one.split, {})[one.step] = point
    return {
        curve: {split: [points[step] for step in sorted(points)] for split, points in splits.items()}
        for curve, splits in found.items()
    }


def metric_table(metrics: Metrics) -> dict[str, Any]:
    """Every metric over the steps: {"steps": [...], "values": {name: [number or null]}}."""
    names = sorted({name for values in metrics.values() for name in values})
    rows = [metrics[step] for step in sorted(metrics)]
    return {
        "steps": sorted(metrics),
        "values": {name: [_short(row.get(name)) for row in rows] for name in names},
    }


def _of_metrics(split: str, step: int, values: Mapping[str, float], env: str) -> Iterable[tuple[str, Point]]:
    rate, count = (values.get(name) for name in _SUCCESS[split])
    if rate is not None and count is not None and 0 <= rate <= 1 and count >= 1:
        yield "success", [step, *map(_short, wilson(round(rate * count), round(count)))]
    elif rate is not None:
        yield "success", [step, _short(rate), None, None]
    for curve, names in _MEANS.items():
        if (value := values.get(names[split].format(env=env))) is not None:
            yield curve, [step, _short(value), None, None]


def _of_trajectories(one: Step) -> Iterable[tuple[str, Point]]:
    said = [success for success in one.successes if success is not None]
    if said:  # a trajectory that does not say counts as not solved, as in the report
        yield "success", [one.step, *map(_short, wilson(sum(said), len(one.successes)))]
    if one.returns:
        yield "return", [one.step, *map(_short, mean_interval(one.returns))]
    if one.valid:
        yield "valid", [one.step, _short(sum(one.valid) / len(one.valid)), None, None]


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
