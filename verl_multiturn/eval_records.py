"""What an evaluation starts from and leaves: its panel, recorded trajectories, a row of a table."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
from omegaconf import DictConfig

from verl_multiturn.errors import unknown
from verl_multiturn.panel import Panel, load_panel
from verl_multiturn.report import success
from verl_multiturn.run_files import Record
from verl_multiturn.stats import Interval, mean_interval
from verl_multiturn.tasks import panel_of

SPLIT = "eval"
ROLES = ("test", "val")


def choose_panel(
    config: DictConfig, name: str | None = None, run: Path | None = None, only: str | None = None
) -> Panel:
    """The panel named, else the run's, recipe's or environment's for testing, else that for validation.

    Args:
        config: of the run or recipe.
        name: of a panel.
        run: a recorded run, which has its panels.
        only: "test" or "val", of the run or recipe; None: as said above.

    Raises:
        ValueError: an unknown panel; a run or recipe without a panel of the role.
    """
    if name is not None:
        return load_panel(name)
    if only not in (None, *ROLES):
        raise unknown("--split", only, ROLES)
    for split in [only] if only else ROLES:
        if run is not None and (run / "panels" / f"{split}.json").exists():
            panel = Panel.load(run / "panels" / f"{split}.json")
            if panel.env == config.multiturn.env:
                return panel
    settings = config.multiturn
    split = only or ("val" if settings.test is None else "test")
    if split == only == "test" and settings.test is None:
        raise ValueError(
            "no test panel: the run or recipe has multiturn.test=null; set it, or give --split val"
        )
    if only == "val":
        panel = panel_of(settings, split)
        return replace(panel, tasks=panel.tasks[: settings.val_size])
    if isinstance(settings[split], str):
        return load_panel(settings[split])
    if settings.test is None and not settings.env_kwargs:
        with suppress(ValueError):  # few environments bring a panel of their own
            return load_panel(f"{settings.env}-test")
    return panel_of(settings, split)


def free_folder(panel: Panel, parent: str | Path = "runs") -> Path:
    """A folder that does not exist yet, named after the panel."""
    stem = f"eval_{Path(panel.env.partition(':')[0]).stem}-{panel.split}"
    names = (Path(parent) / (stem if n == 1 else f"{stem}_{n}") for n in count(1))
    return next(path for path in names if not path.exists())


def to_record(trajectory: Any, row: str, step: int, token_ids: bool) -> Record:
    """The record of an episode, made as training makes it: through its rows."""
    from verl_multiturn.rollout.rows import Rows, to_outputs, to_records

    outputs = to_outputs(trajectory, row)
    keys = [f"{trajectory.group}_{trajectory.trajectory}_{n}" for n in range(len(outputs))]
    rows = Rows(keys, list(range(len(keys))), [output.extra_fields for output in outputs])
    prompts, responses = ([getattr(o, f"{what}_ids") for o in outputs] for what in ("prompt", "response"))
    scores = [output.response_logprobs for output in outputs]
    log_probs = None if None in scores else cast(list[list[float]], scores)
    (record,) = to_records(rows, prompts, responses, log_probs, None, SPLIT, step)
    if not token_ids:
        for turn in record["turns"]:
            turn |= {"prompt_ids": [], "action_ids": [], "span": [0, 0]}
    return record


def table(name: str, records: Iterable[Record]) -> pd.DataFrame:
    """One row as in `report.success_table`, with a column for each task type if there are several."""
    records = list(records)
    rates = success(records)
    kinds = {kind: rate for kind, rate in rates.items() if kind != "all"}
    row = _named("success", rates["all"]) | _named("return", mean_interval([r["return"] for r in records]))
    row |= {"turns": float(np.mean([len(r["turns"]) for r in records])), "n": len(records)}
    for kind, rate in kinds.items() if len(kinds) > 1 else ():
        n = sum(str(record["task_type"]) == kind for record in records)
        row |= _named(f"{kind}/success", rate) | {f"{kind}/n": n}
    return pd.DataFrame([row], index=[name])


def _named(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
