"""What a recorded run achieved: a table with intervals, and its learning curve.

Success is a share with its Wilson interval (95 %), a return a mean with Student's; both take episodes
as independent, so several samples of one task make them a little too narrow. A trajectory whose
success is null counts as not solved, unless the environment never says.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pandas as pd
from omegaconf import OmegaConf
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from verl_multiturn.errors import unknown
from verl_multiturn.panel import Panel
from verl_multiturn.policies import Policy, evaluate, expert_policy, random_policy
from verl_multiturn.run_files import Record, by_panel
from verl_multiturn.runs import Run
from verl_multiturn.stats import Interval, mean_interval, wilson

TRAIN_SUCCESS = "multiturn/success/mean"
UNKNOWN = Interval(math.nan, math.nan, math.nan)


class Comparison(NamedTuple):
    """How far one row's success lies above another's."""

    points: float  # percentage points
    disjoint: bool  # whether the two 95 % intervals have nothing in common


class _Played(NamedTuple):
    task_type: str
    success: bool | None
    episode_return: float
    turns: int


def success_table(
    run: Run, panel: Panel | None = None, panel_policies: bool = True, task_types: bool = False
) -> pd.DataFrame:
    """Rows random, expert, warm start (validation at step 0), trained (last validation).

    Columns: success, success_low, success_high, return, return_low, return_high, turns, n. A row
    that cannot be had is left out: no validation at step 0, an environment without an expert. A run
    of `verl-multiturn eval` has one row, evaluated, in place of the last two. Each panel of
    `multiturn.also` has the last two rows as well, such as "trained, unseen".

    Args:
        run: with a recorded split "val".
        panel: the tasks of its validation; random and expert play those that were recorded.
        panel_policies: play random and expert at all.
        task_types: add columns <type>/success, <type>/success_low, <type>/success_high, <type>/n.

    Raises:
        ValueError: the run has no validation, or it is not of this panel.
    """
    split = "eval" if run.splits() == ["eval"] else "val"
    steps = run.steps(split)
    recorded = {"warm start": 0} if steps[0] == 0 else {}
    recorded |= {"trained": steps[-1]} if steps[-1] > 0 else {}
    recorded = {"evaluated": steps[-1]} if split == "eval" else recorded
    played = {name: by_panel(run.trajectories(split, step)) for name, step in recorded.items()}
    records = {name: panels[""] for name, panels in played.items()}
    rows: dict[str, list[_Played]] = {}
    if panel is not None:
        panel = _recorded_part(panel, [record for some in records.values() for record in some])
        if panel_policies:
            rows |= {"random": _play(panel, random_policy(Random(0)))}
            rows |= {"expert": _play(panel, expert_policy)}
    rows |= {name: list(map(_played, some)) for name, some in records.items()}
    for also in dict.fromkeys(also for panels in played.values() for also in panels if also):
        rows |= {f"{name}, {also}": list(map(_played, some.get(also, []))) for name, some in played.items()}
    summaries = {name: _summary(some, task_types) for name, some in rows.items() if some}
    return pd.DataFrame.from_dict(summaries, orient="index")


def success(trajectories: Iterable[Record]) -> dict[str, Interval]:
    """Success rate with its interval: "all", and each task type."""
    played = list(map(_played, trajectories))
    return {"all": _rate(played)} | {kind: _rate(some) for kind, some in _by_type(played).items()}


def compare(table: pd.DataFrame, row: str, other: str) -> Comparison:
    """Success of `row` minus success of `other`, two rows of a `success_table`."""
    for name in (row, other):
        if name not in table.index:
            raise unknown("row of the table", name, table.index)
    a, b = table.loc[row], table.loc[other]
    disjoint = a.success_low > b.success_high or b.success_low > a.success_high
    return Comparison(100 * float(a.success - b.success), bool(disjoint))


def print_table(table: pd.DataFrame, console: Console | None = None) -> None:
    """Print a `success_table`; task types, if it has them, as a second table below."""
    console = console or Console()
    columns = ("success %", "95 %", "return", "95 %", "turns", "n")
    cells = {
        str(name): (
            f"{100 * row['success']:.1f}",
            f"{100 * row['success_low']:.1f} to {100 * row['success_high']:.1f}",
            f"{row['return']:.3f}",
            f"{row['return_low']:.3f} to {row['return_high']:.3f}",
            f"{row['turns']:.1f}",
            f"{row['n']:.0f}",
        )
        for name, row in table.iterrows()
    }
    console.print(_printable(columns, cells))
    if kinds := [name.removesuffix("/success") for name in table if name.endswith("/success")]:
        shares = {
            str(name): tuple(f"{100 * row[f'{k}/success']:.1f} ({row[f'{k}/n']:.0f})" for k in kinds)
            for name, row in table.iterrows()
        }
        console.print(_printable([f"{kind} % (n)" for kind in kinds], shares))


def learning_curve(run: Run, path: str | Path) -> None:
    """Draw success over steps as PNG: training per step and smoothed, validation with intervals.

    Raises:
        ValueError: nothing to draw.
    """
    from matplotlib.figure import Figure  # here, because the table does without it

    train = run.metrics.get(TRAIN_SUCCESS, pd.Series(dtype=float)).dropna()
    validated = _validations(run)
    if train.empty and not validated:
        raise ValueError(f"{run.folder} has neither {TRAIN_SUCCESS} nor trajectories of split val")
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    if not train.empty:
        window = max(2, len(train) // 10)
        smooth = train.rolling(window, min_periods=1).mean()
        axes.plot(train.index, train, color="C0", alpha=0.3, linewidth=1, label="train, per step")
        axes.plot(train.index, smooth, color="C0", label=f"train, mean of {window} steps")
    for n, (name, rates) in enumerate(validated.items(), start=1):
        mean, low, high = (list(column) for column in zip(*rates.values(), strict=True))
        below = [max(0.0, m - x) for m, x in zip(mean, low, strict=True)]
        above = [max(0.0, x - m) for m, x in zip(mean, high, strict=True)]
        axes.errorbar(
            list(rates), mean, [below, above], color=f"C{n}", marker="o", capsize=3,
            label=f"validation{name and f' on {name}'}, 95 % interval",
        )  # fmt: skip
    axes.set(xlabel="training step", ylabel="success rate", ylim=(-0.02, 1.02), title=title_of(run))
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.savefig(path, format="png")


def _printable(columns: Sequence[str], cells: Mapping[str, Sequence[str]]) -> Table:
    shown = Table(box=SIMPLE, pad_edge=False)
    shown.add_column("policy", no_wrap=True)
    for column in columns:
        shown.add_column(column, justify="right", overflow="fold")  # a cut number would mislead
    for name, row in cells.items():
        shown.add_row(name, *row)
    return shown


def _validations(run: Run) -> dict[str, dict[int, Interval]]:
    """By panel, success at each validated step; "" is the run's own panel."""
    found: dict[str, dict[int, Interval]] = {}
    for step in run.steps("val") if "val" in run.splits() else ():
        for name, records in by_panel(run.trajectories("val", step)).items():
            if records:
                found.setdefault(name, {})[step] = _rate(map(_played, records))
    return found


def title_of(run: Run) -> str:
    """Environment, algorithm and seed, as far as the run says."""
    config = OmegaConf.create(run.config)
    splits = run.splits()
    first = run.trajectories(splits[0], run.steps(splits[0])[0])[:1] if splits else []
    seeds = [OmegaConf.select(config, key) for key in ("multiturn.seed", "data.seed")]
    parts = [record["env"] for record in first]
    parts += [OmegaConf.select(config, "multiturn.algorithm")]
    parts += [f"seed {seed}" for seed in seeds if seed is not None][:1]
    return ", ".join(str(part) for part in parts if part is not None)


def _recorded_part(panel: Panel, records: Sequence[Record]) -> Panel:
    """The panel's tasks that were recorded; refuses records that are not of this panel."""
    if others := {record["env"] for record in records} - {panel.env}:
        raise ValueError(f"the run played {', '.join(sorted(others))}, panel {panel.name} does not")
    recorded = {str(record["task"]) for record in records}
    if strange := recorded - {str(task.id) for task in panel.tasks}:
        raise ValueError(
            f"{len(strange)} of {len(recorded)} validated tasks are not in panel {panel.name}; "
            f"one of them: {min(strange)}"
        )
    return replace(panel, tasks=tuple(task for task in panel.tasks if str(task.id) in recorded))


def _play(panel: Panel, policy: Policy) -> list[_Played]:
    try:
        episodes = evaluate(panel, policy)
    except NotImplementedError:  # the environment has no expert, or no list of actions
        return []
    return [_Played(e.task_type, e.success, e.episode_return, e.turns) for e in episodes]


def _played(record: Record) -> _Played:
    kind, turns = str(record["task_type"]), len(record["turns"])
    return _Played(kind, record["success"], record["return"], turns)


def _rate(played: Iterable[_Played]) -> Interval:
    successes = [one.success for one in played]
    if all(success is None for success in successes):
        return UNKNOWN
    return wilson(sum(map(bool, successes)), len(successes))


def _by_type(played: Sequence[_Played]) -> dict[str, list[_Played]]:
    kinds = sorted({one.task_type for one in played})
    return {kind: [one for one in played if one.task_type == kind] for kind in kinds}


def _summary(played: Sequence[_Played], task_types: bool) -> dict[str, Any]:
    row = _named("success", _rate(played))
    row |= _named("return", mean_interval([one.episode_return for one in played]))
    row |= {"turns": sum(one.turns for one in played) / len(played), "n": len(played)}
    for kind, some in _by_type(played).items() if task_types else ():
        row |= _named(f"{kind}/success", _rate(some)) | {f"{kind}/n": len(some)}
    return row


def _named(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
