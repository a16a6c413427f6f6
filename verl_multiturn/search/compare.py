"""An agent with each way to choose among several answers, on the same tasks, chances and first samples."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from verl_multiturn.eval_folder import state_of
from verl_multiturn.eval_records import table
from verl_multiturn.search.guided import COSTS, Guide, ScoreAnswers
from verl_multiturn.search.rules import GREEDY, Rules

Prepare = Callable[[float | None, Path | None], Any]  # (temperature, folder) -> evaluate.Evaluation


def compare(
    rules: Rules,
    prepare: Prepare,
    temperature: float | None = None,
    out: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> pd.DataFrame:
    """Evaluate each rule and record it in a folder of its own.

    Args:
        rules: what is compared.
        prepare: makes an evaluation; loads the model.
        temperature: of the answers that are chosen from; None: that of validation.
        out: folder of the records, one for each rule, which may be there; None: the evaluation's own.
        tell: called with a line before each.

    Returns:
        A row for each rule: `eval_records.table`'s columns, and the mean cost of a task.
    """
    rows = []
    for rule in rules.select:
        done = evaluate_rule(rule, rules, prepare, temperature, out and out / rule, tell)
        rows.append(costs(rules.label(rule), done.records, done.progress.failed))
    return pd.concat(rows)


def evaluate_rule(
    rule: str,
    rules: Rules,
    prepare: Prepare,
    temperature: float | None,
    folder: Path | None,
    tell: Callable[[str], None],
) -> Any:
    """Evaluate and record one rule, or read what was recorded of it; the evaluation. See `compare`."""
    greedy = rule == GREEDY
    evaluation = prepare(0.0 if greedy else temperature, folder)
    state = state_of(evaluation.folder)
    if state != "done":
        score = rules.score() if rule in ("argmax", "softmax") else None
        evaluation.guide = Guide("majority" if greedy else rule, 1 if greedy else rules.n, score, rules.tau)
    evaluation.about |= rules.about(rule)
    how = {"done": "reading", "unfinished": "going on with"}.get(state, "recording to")
    tell(f"{rules.label(rule)}: {evaluation.progress.total} episodes, {how} {evaluation.folder}")
    evaluation.run()
    return evaluation


def costs(name: str, records: list[dict[str, Any]], failed: int = 0) -> pd.DataFrame:
    """One row: success, return, turns, the mean cost of a task, and how many episodes failed.

    A failed one, such as a prompt that is too long for the Q model, is in none of the other columns.
    """
    row = table(name, records)
    for key in COSTS:
        row[key] = float(np.mean([record["cost"][key] for record in records]))
    row["failed"] = failed
    return row


def success_of(prepare: Callable[[Path], Any], n: int) -> Callable[[ScoreAnswers], float]:
    """What measures the success of the best of n answers by a score; failed episodes count as lost.

    Args:
        prepare: folder -> an evaluation, of tasks that nothing is reported on.
        n: answers to choose from.
    """

    def measured(score: ScoreAnswers) -> float:
        with TemporaryDirectory() as folder:
            evaluation = prepare(Path(folder) / "eval")
            evaluation.guide = Guide("argmax", n, score)
            evaluation.run()
            return float(evaluation.progress.wins / evaluation.progress.total)

    return measured


def print_costs(rows: pd.DataFrame, console: Console | None = None) -> None:
    """Print what `compare` found: success in %, and what a task cost in calls, tokens and scored answers."""
    shown = Table(box=SIMPLE, pad_edge=False)
    columns = ("success", "95 %", "calls", "read", "written", "scored", "n", "failed")
    shown.add_column("per task", no_wrap=True)
    for column in columns:
        shown.add_column(column, justify="right", overflow="fold")  # a cut number would mislead
    for name, row in rows.iterrows():
        shown.add_row(
            str(name),
            f"{100 * row['success']:.1f}",
            f"{100 * row['success_low']:.1f} to {100 * row['success_high']:.1f}",
            *(f"{row[key]:.0f}" for key in ("calls", "prompt_tokens", "tokens", "scored")),
            f"{row['n']:.0f}",
            f"{row['failed']:.0f}",
        )
    (console or Console()).print(shown)
