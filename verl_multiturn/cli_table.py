"""The command table: a paper's table with our recorded runs beside it. Registered in `cli`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


class Launching(TyperCommand):
    """Reads --launch alone as --launch=print."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Before click reads them."""
        return super().parse_args(ctx, ["--launch=print" if one == "--launch" else one for one in args])


def table(
    name: Annotated[str | None, typer.Argument(help="Which table; default: list them.")] = None,
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Run folders, or folders of some.")
    ] = None,
    root: Annotated[
        Path | None, typer.Option(help="Read every run below; --launch records there (default: runs/NAME).")
    ] = None,
    panel: Annotated[str, typer.Option(help="Validation panel of multiturn.also; default: the run's.")] = "",
    stat: Annotated[
        str | None, typer.Option(help="Beside the paper's: best, last, mean or test; default: its own.")
    ] = None,
    last: Annotated[int, typer.Option(min=1, help="How many validations mean is over.")] = 3,
    against: Annotated[str | None, typer.Option(help="Paired bootstrap of each method against it.")] = None,
    equal: Annotated[
        bool, typer.Option("--equal", help="Also at equal environment steps, and at equal tokens.")
    ] = False,
    show_runs: Annotated[bool, typer.Option("--runs", help="Name the runs of each cell.")] = False,
    form: Annotated[str, typer.Option("--format", help="terminal, markdown, csv or latex.")] = "terminal",
    out: Annotated[Path | None, typer.Option(help="Write it to a file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the curves, at equal steps and tokens.")] = None,
    launch: Annotated[
        str | None, typer.Option(metavar="[=run]", help="Print the commands of missing runs; =run: run them.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Of the runs to launch.")] = "1,2,3",
    hardware: Annotated[
        str | None, typer.Option(help="Preset of the runs to launch; cpu: with the small model.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Hydra override of the runs to launch.")
    ] = None,
    hours: Annotated[float | None, typer.Option(min=0, help="Start nothing that would end later.")] = None,
) -> None:
    """Print a paper's table with our cells beside it, or launch the runs that it lacks."""
    from verl_multiturn.tables.cells import cells, differences, grouped
    from verl_multiturn.tables.published import list_tables, load_table
    from verl_multiturn.tables.recorded import read_runs
    from verl_multiturn.tables.render import render

    if name is None:
        for one, title in list_tables().items():
            typer.echo(f"{one:16} {title}")
        return
    chosen = load_table(name)
    below = [root] if root and (root.is_dir() or launch is None) else []
    recorded = read_runs([*(runs or []), *below], panel)
    if launch is not None:
        _launch(launch, chosen, recorded, root, seeds, hardware, settings or [], hours)
        return
    groups = grouped(chosen, recorded)
    pairs = differences(groups, against) if against else None
    at_equal, outside = _equal(equal, groups)
    text = render(chosen, cells(chosen, groups, last), pairs, form, stat, last, show_runs, at_equal, outside)
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
    if png is not None:
        from verl_multiturn.tables.budget import draw

        draw(groups, png)
    for path in filter(None, (out, png)):
        typer.echo(f"wrote {path}")


def _equal(wanted: bool, groups: Any) -> tuple[Any, list[str]]:
    from verl_multiturn.tables.budget import equal, outside

    return (equal(groups), outside(groups)) if wanted else (None, [])


def _launch(
    how: str,
    chosen: Any,
    recorded: Any,
    root: Path | None,
    seeds: str,
    hardware: str | None,
    settings: list[str],
    hours: float | None,
) -> None:
    from verl_multiturn.errors import unknown
    from verl_multiturn.tables import launch as of
    from verl_multiturn.tables.lacking import lacking
    from verl_multiturn.tables.wanted import Wanted, jobs

    if how not in ("print", "run"):
        raise unknown("value of --launch", how, ("print", "run"))
    if not seeds.replace(",", "").isdigit():
        raise ValueError(f"--seeds {seeds!r} is not a list of numbers, such as 1,2,3")
    numbers = [int(seed) for seed in seeds.split(",") if seed]
    wanted = Wanted(root or Path("runs", chosen.name), numbers, hardware, settings)
    found = jobs(chosen, recorded, wanted)
    for line in of.plan(found, lacking(chosen, recorded, wanted)):
        typer.echo(line)
    if how == "run" and (lost := of.launch(found, typer.echo, hours)):
        typer.echo(f"not recorded: {'; '.join(job.name for job in lost)}; the same command goes on", err=True)
        raise typer.Exit(1)
