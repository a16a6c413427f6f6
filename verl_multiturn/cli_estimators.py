"""The command `estimators`: every estimator against the truth. Registered in `cli`."""

from pathlib import Path
from typing import Annotated

import typer


def estimators(
    out: Annotated[Path, typer.Option(help="Folder for CSV, Markdown and plots.")] = Path("estimators"),
    sweeps: Annotated[
        str | None, typer.Option(help="Comma-separated: group size, horizon, pay interval, stopping.")
    ] = None,
    batches: Annotated[int | None, typer.Option(help="Batches of 512 trajectories; default: 60.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="A look in seconds, with large errors.")] = False,
) -> None:
    """Measure bias and variance of every estimator against exact advantages and gradients."""
    from dataclasses import replace

    from verl_multiturn.estimators import QUICK, Plan, report
    from verl_multiturn.estimators_page import save
    from verl_multiturn.measure import command
    from verl_multiturn.provenance import commit

    plan = replace(QUICK if quick else Plan(), seed=seed)
    if batches is not None:
        plan = replace(plan, batches=batches)
    names = None if sweeps is None else [name.strip() for name in sweeps.split(",") if name.strip()]
    measured = commit()  # of what is run: files may change meanwhile
    rows = report(plan, typer.echo, names)
    for path in save(rows, plan, out, command(), measured):
        typer.echo(f"wrote {path}")
