"""Recorded runs as a table needs them: what each is, and its outcomes at each validated step.

A training run brings its validations after step 0, an evaluation (`verl-multiturn eval`) the split
"eval". What an old run did not record stays unknown: an empty cell, never a guess.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from verl_multiturn.panel import Panel
from verl_multiturn.provenance import UNKNOWN, model_name
from verl_multiturn.run_files import Record, by_panel, missing_parts
from verl_multiturn.runs import Run
from verl_multiturn.tables.published import REACHED, SCRIPTED, Column, Method

EVAL = "eval"
NO_MODEL = "no model"  # of policies without one


@dataclass(frozen=True)
class Recorded:
    """One recorded run.

    Attributes:
        id: its folder, as a reader finds it.
        run: the run.
        panel: which of its validation panels is read; "": its own.
        start: whether it stands for the model it was started with: its validation at step 0.
    """

    id: str
    run: Run
    panel: str = ""
    start: bool = False

    @property
    def at_start(self) -> "Recorded":
        """The model it was started with."""
        found = replace(self, start=True)
        vars(found)["curve"] = self.curve  # trajectories are read once
        return found

    @cached_property
    def config(self) -> Any:
        """Its configuration, for `OmegaConf.select`."""
        return OmegaConf.create(self.run.config)

    def setting(self, key: str) -> Any:
        """A setting of its configuration; None: unset, or older than the setting."""
        found = OmegaConf.select(self.config, key)
        return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found

    @cached_property
    def evaluated(self) -> bool:
        """Whether it is an evaluation, not training."""
        return self.run.splits() == [EVAL]

    @cached_property
    def curve(self) -> dict[int, list[Record]]:
        """Step -> trajectories of its panel, without their turns; step 0 is the start of training."""
        split = EVAL if self.evaluated else "val"
        found = {}
        for step in self.run.steps(split) if split in self.run.splits() else ():
            if records := by_panel(self.run.trajectories(split, step)).get(self.panel):
                found[step] = [{key: one[key] for key in one if key != "turns"} for one in records]
        return found

    @property
    def outcomes(self) -> dict[int, list[Record]]:
        """Its curve; of training from step 1 on, or the start alone."""
        if self.start:
            return {step: some for step, some in self.curve.items() if step == 0}
        return {step: some for step, some in self.curve.items() if step > 0 or self.evaluated}

    @property
    def env(self) -> str:
        """The environment, without where its file lies."""
        return str(self.setting("multiturn.env")).rpartition("/")[2].partition(":")[0].removesuffix(".py")

    @property
    def seed(self) -> Any:
        """Of its configuration."""
        return self.setting("multiturn.seed")

    @property
    def model(self) -> str:
        """The model it was started with, not where it lies."""
        if self.scripted:
            return NO_MODEL
        name = model_name(self.config)
        given = str(self.setting("eval.model") or "")
        return name if name != UNKNOWN or not given else re.split(r"[/#]", given.rstrip("/"))[-1]

    @property
    def scripted(self) -> bool:
        """Whether a policy without a model played: `verl-multiturn eval random`, or expert."""
        return str(self.setting("eval.model")).partition(":")[0] in SCRIPTED

    @property
    def commit(self) -> str:
        """Of each start, in order; "" in runs of older versions."""
        return ", ".join(dict.fromkeys(line["commit"] for line in self.run.about))

    @property
    def hardware(self) -> str:
        """Of each start, in order; "" in runs of older versions."""
        return "; ".join(dict.fromkeys(line["hardware"] for line in self.run.about))

    @cached_property
    def panel_hash(self) -> str:
        """First 12 digits of its panel's fingerprint in the role "val", whatever role it had here."""
        split = EVAL if self.evaluated else f"val/{self.panel}" if self.panel else "val"
        path = self.run.folder / "panels" / f"{split}.json"
        if not path.exists():
            return ""
        panel = Panel.load(path)
        return Panel(panel.env, panel.kwargs, "val", panel.tasks).fingerprint[:12]

    @property
    def trained(self) -> bool:
        """Whether training made it, or the model that it evaluates."""
        return not self.evaluated or any(self.outcomes)

    def of(self, method: Method, column: Column) -> bool:
        """Whether it is of this method, and plays what the column measures."""
        if (method.where is None and method.trained) or self.scripted != bool(method.scripted):
            return False
        if self.env != column.env or self.trained != method.trained:
            return False
        return fits(self, method.where or {}) and fits(self, column.where)

    def as_in_paper(self, column: Column) -> bool:
        """Whether its tasks are the paper's, as far as its settings and task types say."""
        kinds = {str(record["task_type"]) for records in self.outcomes.values() for record in records}
        return fits(self, column.paper) and not any("generated" in kind for kind in kinds)

    def values(self, column: Column) -> dict[int, float]:
        """Step -> the column's number; nan where these tasks were not played."""
        return {step: measured(records, column) for step, records in self.outcomes.items()}

    def spent_until(self, column: Column) -> float:
        """What training took until a validation's mean return is the threshold; inf: it never was."""
        names, metrics = REACHED[column.metric], self.run.metrics
        spent = None
        if all(name in metrics for name in names):
            spent = metrics[names].loc[1:].prod(axis=1, skipna=False).cumsum(skipna=False)
        for step, records in self.outcomes.items():
            if np.mean([record["return"] for record in records]) >= (column.threshold or 0.0):
                return math.nan if spent is None else float(spent.loc[:step].iloc[-1])
        return math.inf if self.outcomes else math.nan


def measured(records: Iterable[Record], column: Column) -> float:
    """The column's number over these trajectories; nan: none of its tasks is among them."""
    records = list(records)
    if column.macro:
        parts = [Column(column.name, column.env, column.metric, kind) for kind in column.macro]
        return float(np.mean([measured(records, part) for part in parts]))
    chosen = [one for one in records if column.task_type in (None, str(one["task_type"]))]
    if not chosen:
        return math.nan
    if column.metric == "success":
        known = [one["success"] for one in chosen]
        unsaid = all(won is None for won in known)
        return math.nan if unsaid else 100 * float(np.mean([bool(won) for won in known]))
    mean = float(np.mean([one["return"] for one in chosen]))
    return 100 * mean if column.metric == "score" else mean


def fits(run: Recorded, where: Mapping[str, Any]) -> bool:
    """Whether a run's settings are what `where` asks for; a list names several that will do, "*" any."""
    for key, wanted in where.items():
        valid, given = wanted if isinstance(wanted, list) else [wanted], run.setting(key)
        if given is None if wanted == "*" else given not in valid:
            return False
    return True


def read_runs(places: Iterable[str | Path], panel: str = "") -> list[Recorded]:
    """Every recorded run in these folders, however deep.

    Args:
        places: run folders, or folders that hold some.
        panel: which validation panel of `multiturn.also`; "": the run's own.

    Raises:
        ValueError: a folder that is not there.
    """
    found: dict[Path, Recorded] = {}
    for place in map(Path, places):
        if not place.is_dir():
            raise ValueError(f"no folder {place}: give run folders, or a folder that holds some")
        inner = (path.parent for path in sorted(place.rglob("metrics.jsonl")))
        for folder in inner:
            if "discarded" not in folder.parts and not missing_parts(folder):
                found.setdefault(folder.resolve(), Recorded(str(folder), Run(folder), panel))
    return list(found.values())
