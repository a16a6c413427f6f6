"""The same runs read at equal cost: environment steps, and tokens that the policy generated.

What a run spent is counted in its recorded training trajectories; what serves values alone and is not
recorded whole (the continuations of VinePPO, the utterances that ArCHer's critic asks for) comes from the
run's metrics. Validation costs nothing. What learns outside of training steps, from search trees, has no
validation to read at a budget: what its trees and its answers cost is said beside the reading.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from verl_multiturn.runs import Run
from verl_multiturn.search.tree_files import TREES, read_trees
from verl_multiturn.stats import mean_interval
from verl_multiturn.tables.cells import Group
from verl_multiturn.tables.published import REACHED
from verl_multiturn.tables.recorded import Recorded, measured

COSTS = {"env_steps": "environment steps", "tokens": "generated tokens"}
GUIDED = ("argmax", "softmax")  # rules of an evaluation that ask a Q model
TRAJECTORIES = "multiturn/trajectories/mean"
ASKED = ("multiturn/archer/asked_tokens/mean", "multiturn/q_advantage/asked_tokens/mean")
EXTRA = {"env_steps": ("multiturn/vine_turns/mean",), "tokens": ("multiturn/vine_tokens/mean", *ASKED)}


def spent(run: Run) -> pd.DataFrame:
    """Step -> env_steps, tokens spent by training up to and with it; step 0 is free.

    A turn without an action costs one environment step; a metric of `EXTRA` is a mean over a step's
    trajectories, one of `ASKED` of the whole step.
    """
    rows = {0: dict.fromkeys(COSTS, 0.0)}
    for step in run.steps("train") if "train" in run.splits() else ():
        turns = [turn for one in run.trajectories("train", step) for turn in one["turns"]]
        rows[step] = {
            "env_steps": float(sum(max(1, len(turn["actions"])) for turn in turns)),
            "tokens": float(sum(len(turn["action_ids"]) for turn in turns)),
        }
    frame = pd.DataFrame.from_dict(rows, orient="index").sort_index()
    for cost, names in EXTRA.items():
        for name in names:
            if name in run.metrics:
                more = run.metrics[name] * (1.0 if name in ASKED else run.metrics[TRAJECTORIES])
                frame[cost] = frame[cost].add(more.reindex(frame.index).fillna(0.0))
    return frame.cumsum()


def points(run: Recorded, group: Group, costs: pd.DataFrame) -> list[tuple[dict[str, float], float]]:
    """(what was spent, the column's number) at each validation, from the start on."""
    found = []
    for step, records in run.curve.items():
        before = costs.loc[:step].iloc[-1]
        found.append(({cost: float(before[cost]) for cost in COSTS}, measured(records, group.column)))
    return found


def equal(groups: Iterable[Group]) -> pd.DataFrame:
    """Each method at the budget that every run of its model, column and panel has spent.

    A run's number is that of its latest validation within the budget (the start counts, at no cost).
    Columns: model, column, panel, method, by, budget, value, low, high, n.
    """
    rows = []
    for (model, column, panel), some in _same(groups).items():
        curves = {group.method: _curves(group) for group in some}
        for cost in COSTS:
            budget = min(run[-1][0][cost] for many in curves.values() for run in many.values())
            for method, many in curves.items():
                last = [
                    [value for spent_, value in run if spent_[cost] <= budget][-1] for run in many.values()
                ]
                value = mean_interval(last)
                rows.append((model, column, panel, method, COSTS[cost], budget, *value, len(last)))
    names = ("model", "column", "panel", "method", "by", "budget", "value", "low", "high", "n")
    return pd.DataFrame(rows, columns=list(names))


def outside(groups: Iterable[Group]) -> list[str]:
    """A sentence for each method that has no place among `equal`, because it is evaluated alone.

    With what its search trees cost (mean over runs), if it grew some, and what it said in an episode.
    """
    lines = []
    for group in groups:
        if not group.evaluated or any(run.trained or run.scripted for run in group.runs):
            continue
        trees = [_trees(run) for run in group.runs]
        said = [one["cost"]["tokens"] for run in group.runs for one in run.outcomes[0] if "cost" in one]
        grown = [one for one in trees if one]
        what = "it is evaluated once, and no validation says what it could do at a smaller budget"
        if grown:
            costs = (f"{np.mean([one[cost] for one in grown]):,.0f} {COSTS[cost]}" for cost in COSTS)
            what += f"; its trees took {' and '.join(costs)} (mean of {len(grown)} runs)"
        if said:
            what += f"; an episode of the evaluation {np.mean(said):,.0f} generated tokens"
        lines.append(f"Not at equal cost: {group.method}, {group.column.name}, {group.model}: {what}.")
    return lines


def _trees(run: Recorded) -> dict[str, int]:
    """What the search trees cost that a Q model learnt from; {}: none chose in this evaluation."""
    model = run.setting("eval.q_model")
    trees = Path(str(model)).parent / "trees"
    if not trees.is_dir():
        trees = run.run.folder.resolve().parents[1] / "trees"  # the run was moved: RUN/eval/RULE
    if model is None or run.setting("eval.select") not in GUIDED or not (trees / TREES).exists():
        return {}
    spent_ = [{cost: int(tree[cost]) for cost in COSTS} for tree in read_trees(trees, empty=True)]
    return {cost: sum(one[cost] for one in spent_) for cost in COSTS}


def draw(groups: Sequence[Group], path: str | Path) -> None:
    """Draw every column's curves as PNG, against environment steps and against generated tokens.

    Raises:
        ValueError: no training run among the groups.
    """
    from matplotlib.figure import Figure  # here, because the table does without it

    same = _same(groups)
    if not same:
        raise ValueError("no curve: no training run of this table was recorded")
    figure = Figure(figsize=(11, 4.2 * len(same)), dpi=130, layout="constrained")
    axes = figure.subplots(len(same), len(COSTS), squeeze=False)
    for row, ((model, column, _), some) in zip(axes, same.items(), strict=True):
        curves = {group.method: _curves(group) for group in some}
        for ax, (cost, name) in zip(row, COSTS.items(), strict=True):
            for n, (method, many) in enumerate(curves.items()):
                _draw_method(ax, f"C{n}", method, cost, many)
            ax.set(xlabel=name, ylabel=column, title=f"{column}, {model}")
            ax.grid(alpha=0.3)
            ax.legend(loc="best")
    figure.savefig(path, format="png")


def _draw_method(ax: Any, colour: str, method: str, cost: str, runs: Mapping[Any, Any]) -> None:
    """Each seed thin, their mean thick where all have as many validations."""
    lines = [([spent_[cost] for spent_, _ in run], [value for _, value in run]) for run in runs.values()]
    for xs, ys in lines:
        ax.plot(xs, ys, color=colour, alpha=0.3, linewidth=1)
    shortest = min(len(xs) for xs, _ in lines)
    xs, ys = (np.mean([line[axis][:shortest] for line in lines], axis=0) for axis in (0, 1))
    ax.plot(xs, ys, color=colour, marker="o", label=f"{method}, n = {len(lines)}")


def _curves(group: Group) -> dict[Any, list[tuple[dict[str, float], float]]]:
    """Seed -> points of its run; of several runs of a seed, the longest."""
    found: dict[Any, list[tuple[dict[str, float], float]]] = {}
    for run in group.runs:
        one = [point for point in points(run, group, spent(run.run)) if not math.isnan(point[1])]
        found[run.seed] = max(found.get(run.seed, []), one, key=len)
    return found


def _same(groups: Iterable[Group]) -> dict[tuple[str, str, str], list[Group]]:
    same: dict[tuple[str, str, str], list[Group]] = defaultdict(list)
    for group in groups:
        trained = not group.evaluated and not any(run.start for run in group.runs)
        if trained and group.column.metric not in REACHED:
            same[group.model, group.column.name, group.panel].append(group)
    return same
