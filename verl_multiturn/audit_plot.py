"""The values of a recorded run against what their states are worth, where `multiturn.audit` was due."""

import math
from pathlib import Path

import numpy as np

from verl_multiturn.report import title_of
from verl_multiturn.runs import Run

Points = dict[int, list[tuple[float, float]]]  # step -> (mean return of the continuations, value)


def audited_points(run: Run) -> Points:
    """The audited states of each step that have a value.

    Raises:
        ValueError: there are none.
    """
    found: Points = {}
    for step in run.steps("train") if "train" in run.splits() else ():
        for record in run.trajectories("train", step):
            returns = (record.get("audit") or {}).get("returns", {})
            for turn in record["turns"]:
                if (some := returns.get(str(turn["index"]))) and turn["value"] is not None:
                    found.setdefault(step, []).append((float(np.mean(some)), float(turn["value"])))
    if not found:
        raise ValueError(
            f"{run.folder} has no audited values: record some with multiturn.audit.every=N and an algorithm "
            "with values"
        )
    return found


def draw_audit(run: Run, path: str | Path) -> None:
    """Draw value against mean return as PNG, a dot for each audited state, later steps darker.

    Raises:
        ValueError: see `audited_points`.
    """
    from matplotlib.figure import Figure  # here, because the table does without it

    points = audited_points(run)
    figure = Figure(figsize=(6, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    step = [step for step, some in points.items() for _ in some]
    worth, value = np.array([point for some in points.values() for point in some]).T
    shown = axes.scatter(worth, value, c=step, cmap="viridis_r", s=16, alpha=0.7)
    ends = [min(worth.min(), value.min()), max(worth.max(), value.max())]
    axes.plot(ends, ends, color="0.5", linewidth=1)
    if len(points) > 1:
        figure.colorbar(shown, label="training step")
    last = max(points)
    error = math.fsum(abs(v - w) for w, v in points[last]) / len(points[last])
    axes.set(
        xlabel="mean return of the continuations",
        ylabel="value",
        title=f"{title_of(run)}\nmean error {error:.3f} at step {last}, {len(points[last])} states",
    )
    axes.grid(alpha=0.3)
    figure.savefig(path, format="png")
