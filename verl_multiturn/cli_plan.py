"""The command plan: memory, seconds and hours of a recipe on GPUs. Registered in `cli`."""

from pathlib import Path
from typing import Annotated

import typer


def plan(
    recipe: Annotated[str, typer.Argument(help="See verl-multiturn recipes.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Hydra overrides, as for the recipe.")
    ] = None,
    gpus: Annotated[str, typer.Option(help="Number and kind, such as 4xA100-80G.")] = "1xH100-80G",
    rates: Annotated[
        Path | None,
        typer.Option(help="Recorded run whose turns and lengths are taken; else half the limits."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Numbers, for machines.")] = False,
) -> None:
    """Estimate memory per GPU, seconds per step and hours of a recipe; exit code 1 if it does not fit.

    Of multiturn.algorithm=qvalue: calls, pairs, memory and hours of its stages.
    """
    import json

    from verl_multiturn.compose import compose
    from verl_multiturn.configure import prepare
    from verl_multiturn.methods import SEARCH
    from verl_multiturn.planning import qvalue
    from verl_multiturn.planning import recipe as of
    from verl_multiturn.planning.plan import gpus as read
    from verl_multiturn.runs import Run

    count, gpu = read(gpus)
    config = prepare(compose(recipe, overrides or []))
    if config.multiturn.algorithm == SEARCH:
        if rates:
            raise ValueError(
                "--rates is of a training run, and multiturn.algorithm=qvalue trains none: leave it out"
            )
        stages = qvalue.Stages.of(config, gpu)
        numbers = qvalue.as_json(stages)
        fits = numbers["fits"] if as_json else qvalue.print_plan(stages)
    else:
        found = of.setup(config, count, gpu, Run(rates) if rates else None)
        numbers = of.as_json(found)
        fits = numbers["fits"] if as_json else of.print_plan(found, assumed=rates is None)
    if as_json:
        typer.echo(json.dumps(numbers, indent=2))
    if not fits:
        raise typer.Exit(1)
