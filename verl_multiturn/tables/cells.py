"""Our cells of a table: statistics over seeds, what they rest on, and paired differences.

A training run gives three numbers: `best` and `last` of its validations, and `mean`, of the last k of
them. `best` is chosen on the panel that it is measured on, so it flatters. `test` is what evaluations
give, each played once after training. The row of the start model has the validations at step 0 of the
table's runs. Runs of one seed count as one, by their mean; intervals are Student's over seeds.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from verl_multiturn.errors import unknown
from verl_multiturn.stats import Interval, mean_interval
from verl_multiturn.tables.pairs import Outcomes, paired
from verl_multiturn.tables.published import REACHED, STATISTICS, Column, Method, Published
from verl_multiturn.tables.recorded import NO_MODEL, Recorded

EMPTY = Interval(math.nan, math.nan, math.nan)
KEYS = ("model", "method", "column")


class Group(NamedTuple):
    """The runs of one number: same model, method and column, played on one panel."""

    model: str
    method: str
    column: Column
    panel: str
    evaluated: bool
    runs: tuple[Recorded, ...]


def grouped(table: Published, runs: Iterable[Recorded]) -> list[Group]:
    """The groups that can be filled, in the order of the table; runs without outcomes are left out."""
    runs = [run for run in runs if run.outcomes]
    found: dict[tuple[Any, ...], list[Recorded]] = defaultdict(list)
    columns = {column.name: column for column in table.columns}
    for method in table.methods:
        for column in table.columns:
            for run in _of(table, method, column, runs):
                if _fills(run, column):
                    key = (_model(table, run, column), method.name, column.name)
                    found[*key, run.panel_hash, run.evaluated].append(run)
    return [
        Group(model, method, columns[column], panel, evaluated, tuple(some))
        for (model, method, column, panel, evaluated), some in found.items()
    ]


def _of(table: Published, method: Method, column: Column, runs: Iterable[Recorded]) -> Iterator[Recorded]:
    """The runs of a row in a column; of the start model, what training started from."""
    others = [one for one in table.methods if one.trained]
    for run in runs:
        if run.of(method, column):
            yield run
        elif method.start and column.metric not in REACHED and 0 in run.curve:
            if any(run.of(one, column) for one in others):
                yield run.at_start


def cells(table: Published, groups: Iterable[Group], last: int = 3) -> pd.DataFrame:
    """One row a cell, published ones first in the paper's order.

    Columns: model, method, column, paper (text), paper_value, mark; of each of best, last, mean, test
    the mean over seeds and its bounds <name>_low, <name>_high; n and n_test (seeds), steps (of the last
    validation), panel, test_panel, commit, hardware, runs. What there is none of is nan or "".

    Args:
        table: the paper's.
        groups: of `grouped`.
        last: how many validations `mean` is over.
    """
    lines: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for (model, method, column), value in table.published.items():
        published = {"paper": value.text, "paper_value": value.mean, "mark": value.mark}
        lines[model, method, column].append(published)
    by_cell: dict[tuple[str, str, str], list[Group]] = defaultdict(list)
    for group in groups:
        by_cell[group.model, group.method, group.column.name].append(group)
    for cell, some in by_cell.items():
        published = lines[cell].pop() if lines[cell] else {}
        lines[cell] += [published | line for line in _lines(some, last)]
    rows = [dict(zip(KEYS, cell, strict=True)) | line for cell, some in lines.items() for line in some]
    numbers = [f"{name}{end}" for name in STATISTICS for end in ("", "_low", "_high")]
    texts = ["steps", "panel", "test_panel", "commit", "hardware", "runs"]
    order = [*KEYS, "paper", "paper_value", "mark", *numbers, "n", "n_test", *texts]
    frame = pd.DataFrame(rows, columns=order)
    frame[["paper", "mark", *texts]] = frame[["paper", "mark", *texts]].fillna("")
    frame[["n", "n_test"]] = frame[["n", "n_test"]].fillna(0).astype(int)
    frame["order"] = [_order(table, row) for row in frame[list(KEYS)].itertuples(index=False)]
    return frame.sort_values("order", kind="stable").drop(columns="order").reset_index(drop=True)


def differences(groups: Iterable[Group], against: str, resamples: int = 10_000) -> pd.DataFrame:
    """Each method minus the method `against`, on the same tasks of the same panel, in the column's unit.

    A task's outcome is its mean over seeds and samples, at the last validation, or of the evaluations.
    Columns: model, column, kind (validation or test), panel, method, against, difference, low, high, p,
    tasks. Source: paired bootstrap over tasks, `stats.paired_bootstrap`; the seeds are taken as given.

    Raises:
        ValueError: no run is of the method `against`.
    """
    groups = [group for group in groups if group.column.metric not in REACHED]
    if against not in {group.method for group in groups}:
        raise unknown("method with recorded runs", against, dict.fromkeys(group.method for group in groups))
    same: dict[tuple[Any, ...], list[Group]] = defaultdict(list)
    for group in groups:
        same[group.model, group.column.name, group.evaluated, group.panel].append(group)
    rows = []
    for (model, column, evaluated, panel), some in same.items():
        if model != NO_MODEL:  # policies without a model stand beside every model
            some = some + same.get((NO_MODEL, column, evaluated, panel), [])
        other = next((group for group in some if group.method == against), None)
        for group in some:
            if other is None or group is other:
                continue
            found = paired(by_task(group), by_task(other), resamples)
            kind = "test" if evaluated else "validation"
            rows.append((model, column, kind, panel, group.method, against, *found))
    names = ["model", "column", "kind", "panel", "method", "against"]
    return pd.DataFrame(rows, columns=[*names, "difference", "low", "high", "p", "tasks"])


def by_task(group: Group) -> Outcomes:
    """Outcomes of every task, over the group's runs and samples, at their last step."""
    column, found = group.column, defaultdict[str, list[float]](list)
    kinds = column.macro or ((column.task_type,) if column.task_type else ())
    for run in group.runs:
        for record in run.outcomes[max(run.outcomes)]:
            if kinds and str(record["task_type"]) not in kinds:
                continue
            value = record["success"] if column.metric == "success" else record["return"]
            scale = 1 if column.metric == "return" else 100
            found[str(record["task"])].append(scale * float(value or 0))
    return found


def _lines(groups: list[Group], last: int) -> list[dict[str, Any]]:
    """A line for each panel; where training and evaluations have one each, one line holds both."""
    trained = [group for group in groups if not group.evaluated]
    tested = [group for group in groups if group.evaluated]
    if len(trained) == len(tested) == 1:
        both = (*trained[0].runs, *tested[0].runs)
        return [_training(trained[0], last) | _testing(tested[0]) | _about(both)]
    lines = [_training(group, last) | _about(group.runs) for group in trained]
    return lines + [_testing(group) | _about(group.runs) for group in tested]


def _training(group: Group, last: int) -> dict[str, Any]:
    column = group.column
    by_seed: dict[str, dict[Any, list[float]]] = {name: defaultdict(list) for name in STATISTICS[:3]}
    for run in group.runs:
        for name, value in _of_run(run, column, last).items():
            by_seed[name][run.seed].append(value)
    line: dict[str, Any] = {}
    for name, seeds in by_seed.items():
        line |= _named(name, _over_seeds(seeds))
    ends = sorted({max(run.outcomes) for run in group.runs})
    return line | {"n": len(by_seed["last"]), "steps": ", ".join(map(str, ends)), "panel": group.panel}


def _testing(group: Group) -> dict[str, Any]:
    seeds: dict[Any, list[float]] = defaultdict(list)
    for run in group.runs:
        seeds[run.seed] += run.values(group.column).values()
    return _named("test", _over_seeds(seeds)) | {"n_test": len(seeds), "test_panel": group.panel}


def _of_run(run: Recorded, column: Column, last: int) -> dict[str, float]:
    if column.metric in REACHED:
        return {"last": run.spent_until(column)}
    values = [value for _, value in sorted(run.values(column).items()) if not math.isnan(value)]
    return {"best": max(values), "last": values[-1], "mean": float(np.mean(values[-last:]))}


def _over_seeds(seeds: Mapping[Any, list[float]]) -> Interval:
    means = [float(np.mean(some)) for some in seeds.values()]
    if not means:
        return EMPTY
    if math.inf in means:  # a threshold that some run never reached
        return Interval(math.inf, math.nan, math.nan)
    return mean_interval(means)


def _about(runs: Iterable[Recorded]) -> dict[str, str]:
    columns = {name: [getattr(run, name) for run in runs] for name in ("commit", "hardware", "id")}
    joined = {name: "; ".join(filter(None, dict.fromkeys(some))) for name, some in columns.items()}
    return {"commit": joined["commit"], "hardware": joined["hardware"], "runs": joined["id"]}


def _named(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _model(table: Published, run: Recorded, column: Column) -> str:
    model = table.aliases.get(run.model, run.model)
    foreign = model in table.models and not run.as_in_paper(column)
    return f"{model}, not the paper's tasks" if foreign else model


def _order(table: Published, row: Any) -> tuple[Any, ...]:
    models = list(table.models)
    methods, columns = ([one.name for one in many] for many in (table.methods, table.columns))
    model = (models.index(row.model), "") if row.model in models else (len(models), row.model)
    return (*model, methods.index(row.method), columns.index(row.column))


def _fills(run: Recorded, column: Column) -> bool:
    return column.metric in REACHED or not all(map(math.isnan, run.values(column).values()))
