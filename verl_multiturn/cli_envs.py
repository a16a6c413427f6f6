"""The commands on environments: envs, panels, measure-envs. Registered in `cli`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_multiturn.cli_run import key_values

if TYPE_CHECKING:
    from verl_multiturn.panel_index import Listed


def envs(
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for machines.")] = False,
) -> None:
    """List the environments: what each is and needs, its data, how it runs, how fast, under what licence."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from verl_multiturn.envs_index import describe, index

    entries = index()
    if as_json:
        typer.echo(json.dumps([entry.as_dict() for entry in entries], indent=2))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)  # names are there to be typed
    table.add_column()
    for entry in entries:
        first, *more = describe(entry)
        style = "" if entry.ready else "yellow"
        text = Text.assemble((f"{first}\n", "bold"), ("\n".join(more), style), "\n")
        table.add_row(Text(entry.name, style="cyan" if entry.ready else "yellow"), text)
    Console().print(table)
    for machine in dict.fromkeys(row["machine"] for entry in entries for row in entry.speed):
        typer.echo(f"steps/s: one process, random actions, measured on {machine}")


def panels(
    env: Annotated[str | None, typer.Argument(help="As for check-env; default: all shipped panels.")] = None,
    keywords: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For the environment.")
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option(help="A list of the environment's; may be repeated.")
    ] = None,
    first_seed: Annotated[int, typer.Option(min=0, help="Where training tasks start.")] = 1_000_000,
    size: Annotated[
        int | None, typer.Option(min=1, help="Most tasks of a panel; default: whole lists, 64 from seeds.")
    ] = None,
) -> None:
    """Show panels: tasks, types, fingerprint, and what they share; exit code 1 if they share a task."""
    from verl_multiturn.panel_index import of_env, shipped

    if env is None:
        groups = [shipped()]
    else:
        kwargs = key_values(keywords or [])
        found = of_env(env, kwargs, split, first_seed, size)
        rest = [one for one in shipped() if one not in found]
        groups = [found, [one for one in rest if (one.panel.env, one.panel.kwargs) == (env, kwargs)]]
    shared = [_show_panels(group) for group in groups if group]
    if any(shared):
        raise typer.Exit(1)


def _show_panels(listed: "list[Listed]") -> int:
    """Print panels of which no two should share a task; returns how many tasks are shared."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from verl_multiturn.panel_index import overlaps

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in listed:
        panel = one.panel
        types = ", ".join(f"{n} {kind}" for kind, n in one.types.items())
        text = f"{len(panel.tasks)} tasks, {one.source}, the first is {panel.tasks[0].id}: {types}"
        table.add_row(Text(panel.name, style="cyan"), Text(f"{text}\nfingerprint {panel.fingerprint}"))
    Console().print(table)
    pairs = overlaps(listed)
    for a, b, n in pairs:
        typer.echo(f"{a} and {b}: {n} task{'s' if n != 1 else ''} in common, by content")
    return sum(n for _, _, n in pairs)


def measure_envs(
    names: Annotated[list[str] | None, typer.Argument(metavar="[ENV]...", help="Default: all.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes of each policy.")] = 256,
    seconds: Annotated[float, typer.Option(min=0.1, help="Most seconds for each of them.")] = 20,
    limit: Annotated[float, typer.Option(min=1, help="Most seconds for an environment as a whole.")] = 300,
    table: Annotated[Path, typer.Option(help="The table.")] = Path("results/environments.md"),
    speeds: Annotated[Path, typer.Option(help="The numbers.")] = Path("environments/speeds.json"),
) -> None:
    """Measure environments, each in a process of its own: skill of random and expert, speed, memory."""
    from verl_multiturn.measure import Plan, chosen, measure, save

    rows = measure(chosen(names or []), Plan(episodes, seconds, limit), typer.echo)
    save(rows, table, speeds, whole=not names)
    typer.echo(f"wrote {table} and {speeds}")
