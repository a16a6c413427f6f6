"""The command `doctor`. Registered in `cli`."""

import json
from typing import Annotated

import typer
from rich.console import Console


def doctor(
    recipe: Annotated[str | None, typer.Argument(help="Also look at what this recipe would do.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Hydra overrides, as for a run.")
    ] = None,
    imports: Annotated[bool, typer.Option(help="Really import transformers, vllm and verl.")] = True,
    sample: Annotated[bool, typer.Option(help="Play one episode and show its mask.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Check set-up and recipe: ok, warn or FAIL, each with what to do; exit code 1 if something failed."""
    from verl_multiturn.doctor import examine

    report = examine(recipe, overrides, imports, sample)
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    else:
        report.show(Console())
    if not report.ok:
        raise typer.Exit(1)
