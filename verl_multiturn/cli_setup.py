"""The command `doctor`. Registered in `cli`."""

import json
from typing import Annotated

import typer
from rich.console import Console


def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE|RUN]", help="Also look at what a recipe would do; or explain the state of a run."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Hydra overrides, as for a run.")
    ] = None,
    imports: Annotated[bool, typer.Option(help="Really import transformers, vllm and verl.")] = True,
    sample: Annotated[bool, typer.Option(help="Play one episode and show its mask.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Check set-up and recipe, or a run: ok, warn or FAIL, each with what to do; exit code 1 after a FAIL."""
    from verl_multiturn import doctor_run
    from verl_multiturn.doctor import examine
    from verl_multiturn.doctor_report import Report

    folder = doctor_run.folder_of(recipe)
    if folder is None:
        report = examine(recipe, overrides, imports, sample)
    else:
        report = Report(doctor_run.lines(folder))
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    else:
        report.show(Console())
    if not report.ok:
        raise typer.Exit(1)
