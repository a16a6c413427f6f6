"""Every algorithm's advantages on the same recorded trajectories, and how they agree.

A recorded step is scored as training scored it, all its trajectories together. The run's own
algorithm with its own configuration must give back the recorded advantages: they were stored as
float32, so the two differ by rounding, about 1e-7 of their size.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import OmegaConf
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_multiturn.algorithms import Algorithm, Config, find, list_algorithms
from verl_multiturn.columns import Floats
from verl_multiturn.errors import unknown
from verl_multiturn.run_files import Record
from verl_multiturn.runs import Run, to_turns
from verl_multiturn.search.recorded import steps_of
from verl_multiturn.search.step_value import StepValue, turn_advantages
from verl_multiturn.steps import numbered
from verl_multiturn.turns import TurnBatch

RECORDED = "recorded"
JUDGED = "q_advantage"  # of a Q model
OWN = "own configuration"  # a passing column: the run's algorithm as the run had it
_KEYS = ["step", "group", "trajectory", "index"]
Keywords = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Reproduction:
    """How well the run's algorithm gives back what the run recorded."""

    algorithm: str
    difference: float  # the largest absolute one
    relative: float  # the largest one, as a share of 1 or of the recorded number's size
    turns: int


@dataclass(frozen=True)
class Rescored:
    """One row per turn, or per step of the turns that were cut into steps.

    Attributes:
        turns: columns step, group, trajectory, index, recorded and one per algorithm.
        impossible: algorithms left out, with the reason.
        reproduction: None where the run's algorithm is not ours to compute.
        trajectories: how many were scored.
    """

    turns: pd.DataFrame
    impossible: dict[str, str] = field(default_factory=dict)
    reproduction: Reproduction | None = None
    trajectories: int = 0

    @cached_property
    def names(self) -> list[str]:
        """The advantage columns that hold numbers, the recorded one first."""
        columns = [name for name in self.turns if name not in _KEYS]
        return [name for name in columns if self.turns[name].notna().any()]

    def summary(self) -> pd.DataFrame:
        """Columns mean, variance (sample), zero (share); one row per algorithm."""
        found = self.turns[self.names]
        zero = (found == 0).sum() / found.notna().sum()
        return pd.DataFrame({"mean": found.mean(), "variance": found.var(), "zero": zero})

    def correlation(self) -> pd.DataFrame:
        """Pearson's, over all turns; nan for an algorithm that gives one number to all."""
        return self.turns[self.names].corr()

    def sign_agreement(self) -> pd.DataFrame:
        """Share of turns with the same sign, 0 being one of three."""
        signs = {name: np.sign(self.turns[name].to_numpy()) for name in self.names}
        return pd.DataFrame({a: {b: _share(signs[a], signs[b]) for b in self.names} for a in self.names})


def rescore(
    run: Run,
    algorithms: Sequence[str] | None = None,
    steps: Iterable[int] | None = None,
    keywords: Keywords | None = None,
    split: str = "train",
    value: StepValue | None = None,
) -> Rescored:
    """Score the recorded trajectories of `split` again.

    Args:
        run: with recorded trajectories.
        algorithms: names; default: all that are registered.
        steps: default: all recorded ones.
        keywords: of an algorithm by its name, on top of the run's own configuration for it.
        split: whose trajectories.
        value: adds the column q_advantage, Q − V of each turn; nan where either is unknown.

    Raises:
        ValueError: an unknown algorithm, keyword, split or step; or no algorithm is possible.
    """
    names = list(dict.fromkeys(algorithms or list_algorithms()))
    if strange := [name for name in keywords or () if name not in names]:
        raise unknown("algorithm to set a keyword of", strange[0], names)
    chosen = {name: configured(run, name, (keywords or {}).get(name, {})) for name in names}
    own = _own(run)
    frames, impossible, count = [], dict[str, str](), 0
    for step in run.steps(split) if steps is None else dict.fromkeys(steps):
        # What the filter left out was not scored in training either.
        played = [
            one
            for one in run.trajectories(split, step)
            if one["turns"] and (split != "train" or one.get("trained", True))
        ]
        # Where utterances were cut into steps, those had the credit: a row of the table is a step.
        trajectories = [one | {"turns": numbered(one["turns"])} for one in played]
        turns, count = to_turns(trajectories), count + len(trajectories)
        columns = {RECORDED: _recorded(trajectories)}
        columns |= score(turns, chosen, impossible)
        if value is not None:
            columns[JUDGED] = np.full(len(turns), np.nan)
            if len(steps_ := steps_of(played, run.config["multiturn"])) == len(turns):
                columns[JUDGED] = turn_advantages(value.values(steps_), unknown_is=np.nan)
        if own is not None:
            columns[OWN] = score(turns, {OWN: own}, {}).get(OWN, np.full(len(turns), np.nan))
        keys = {"group": turns.group, "trajectory": turns.trajectory, "index": turns.index}
        frames.append(pd.DataFrame({"step": step} | keys | columns))
    if all(name in impossible for name in names):
        raise ValueError("; ".join(f"{name} is not possible: {why}" for name, why in impossible.items()))
    table = pd.concat(frames, ignore_index=True)
    reproduction = None if own is None else _compare(own[0].name, table)
    if value is not None and table[JUDGED].isna().all():
        impossible[JUDGED] = "no turn is recorded whole, with another answer to the same prompt beside it"
    table = table.drop(columns=[OWN, *impossible], errors="ignore")
    return Rescored(table, impossible, reproduction, count)


def print_rescored(found: Rescored, console: Console | None = None) -> None:
    """Print the summary, both matrices, what was not possible, and the reproduction."""
    console = console or Console()
    steps = found.turns["step"].nunique()
    console.print(f"{found.trajectories} trajectories, {len(found.turns)} turns, {steps} steps")
    cells = {name: [f"{x:.4g}" for x in row] for name, row in zip(*_rows(found.summary()), strict=True)}
    console.print(_table("advantages", ["mean", "variance", "share of zeros"], cells))
    for title, matrix in (
        ("Pearson correlation", found.correlation()),
        ("same sign, share of turns", found.sign_agreement()),
    ):
        cells = {name: [f"{x:.3f}" for x in row] for name, row in zip(*_rows(matrix), strict=True)}
        console.print(_table(title, found.names, cells))
    for name, why in found.impossible.items():
        console.print(f"{name} is not possible: {why}", markup=False, highlight=False, soft_wrap=True)
    console.print(_sentence(found), markup=False, highlight=False, soft_wrap=True)


def _sentence(found: Rescored) -> str:
    own = found.reproduction
    if own is not None:
        return (
            f"{own.algorithm} as the run had it, against what it recorded: largest absolute difference "
            f"{own.difference:.2g} (relative {own.relative:.2g}) over {own.turns} turns"
        )
    if RECORDED in found.names:
        return "the run's own algorithm is not one of these: nothing to reproduce"
    return "the run recorded no advantages here: nothing to reproduce"


def configured(run: Run, name: str, extra: Mapping[str, Any] | None = None) -> tuple[Algorithm, Config]:
    """An algorithm with the run's block for it and what is set on top.

    Raises:
        ValueError: an unknown algorithm or keyword.
    """
    algorithm = find(name)
    config = OmegaConf.create(run.config)
    block = OmegaConf.select(config, "multiturn.keywords" if ":" in name else f"multiturn.{name}")
    given: Any = {} if block is None else OmegaConf.to_container(block, resolve=True)
    by_std = OmegaConf.select(config, "algorithm.norm_adv_by_std_in_grpo")
    if name == "grpo" and by_std is not None:  # training leaves grpo to verl, which reads this key
        given["by_std"] = by_std
    return algorithm, algorithm.configure(given | dict(extra or {}))


def _own(run: Run) -> tuple[Algorithm, Config] | None:
    """The run's algorithm as the run had it; None for verl's estimators, those over tokens and of models."""
    name = (run.config.get("multiturn") or {}).get("algorithm")
    elsewhere = (None, "ppo", "verl", "bilevel_gae", "archer", "q_advantage")
    return None if name in elsewhere else configured(run, name)


def score(
    turns: TurnBatch, chosen: Mapping[str, tuple[Algorithm, Config]], impossible: dict[str, str]
) -> dict[str, Floats]:
    """One column (N,) per algorithm; what cannot be computed goes to `impossible`, with the reason."""
    columns = {}
    for name, (algorithm, config) in chosen.items():
        if name in impossible:
            continue
        if "value" in algorithm.needs and np.isnan(turns.value).all():
            impossible[name] = "it needs V(s_t) of every turn, and the run recorded none (no critic)"
            continue
        try:
            columns[name] = algorithm(turns, config)
        except ValueError as error:
            impossible[name] = str(error)
    return columns


def _recorded(trajectories: list[Record]) -> Floats:
    """The advantages of the run; nan for an utterance without tokens, which trained nothing."""
    found = [turn.get("advantage") for one in trajectories for turn in one["turns"]]
    return np.array([np.nan if one is None else one for one in found], np.float64)


def _compare(name: str, table: pd.DataFrame) -> Reproduction | None:
    both = table[[RECORDED, OWN]].dropna()
    if both.empty:
        return None
    difference = (both[OWN] - both[RECORDED]).abs()
    relative = difference / both[RECORDED].abs().clip(lower=1.0)
    return Reproduction(name, float(difference.max()), float(relative.max()), len(both))


def _share(a: Floats, b: Floats) -> float:
    known = ~(np.isnan(a) | np.isnan(b))
    return float((a[known] == b[known]).mean()) if known.any() else float("nan")


def _rows(table: pd.DataFrame) -> tuple[list[str], list[list[float]]]:
    return [str(name) for name in table.index], table.to_numpy(dtype=float).tolist()


def _table(title: str, columns: Sequence[str], cells: Mapping[str, Sequence[str]]) -> Table:
    shown = Table(title, box=SIMPLE, pad_edge=False)
    for column in columns:
        shown.add_column(escape(column), justify="right", overflow="fold")
    for name, row in cells.items():
        shown.add_row(escape(name), *row)
    return shown
