"""The command `verl-multiturn`: what there is, whether an environment is sound, what a run achieved.

Each command imports what it needs when it is called, so that `--help` answers at once.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from verl_multiturn.cli_envs import envs, measure_envs, panels
from verl_multiturn.cli_estimators import estimators
from verl_multiturn.cli_eval import evaluate
from verl_multiturn.cli_fit import fit_q
from verl_multiturn.cli_games import make_alfworld_games
from verl_multiturn.cli_offline import offline
from verl_multiturn.cli_plan import plan
from verl_multiturn.cli_run import curves, key_values, play, replay, rescore
from verl_multiturn.cli_search import pairs, search
from verl_multiturn.cli_setup import doctor
from verl_multiturn.cli_table import Launching, table


class _Sentences(TyperGroup):
    """Shows a mistake of the user as one sentence instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, FileNotFoundError, ImportError) as error:
            if ctx.params["debug"]:
                raise
            Console(stderr=True).print(Text(str(error), style="red"), soft_wrap=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=_Sentences, no_args_is_help=True, add_completion=False)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Multi-turn agent training on stock verl."""


@app.command()
def algorithms() -> None:
    """List the algorithms."""
    from verl_multiturn.algorithms import list_algorithms

    _show(("algorithm", "what it does"), list_algorithms().items())


@app.command()
def recipes() -> None:
    """List the recipes: what each rebuilds, and whether it runs on this machine."""
    from verl_multiturn.recipes_index import list_recipes

    keys = ("algorithm", "environment", "paper", "table", "needs")
    rows = []
    for name, recipe in list_recipes().items():
        here = f"{'yes' if recipe['runnable_here'] else 'no'}: {recipe['why']}"
        rows.append((name, *(recipe[key] for key in keys), here))
    _show(("recipe", *keys, "runs here"), rows)


@app.command()
def check_env(
    env: Annotated[str, typer.Argument(help="Name, pkg.module:Class or path/to/file.py:Class.")],
    keywords: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For the environment.")
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes for each check.")] = 8,
) -> None:
    """Check that an environment keeps its contract; exit code 1 if it does not."""
    from verl_multiturn.check import check_env as check

    report = check(env, episodes=episodes, **key_values(keywords or []))
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a recorded run.")],
    panel: Annotated[
        str | None, typer.Option(help="Panel of its validation: adds rows random and expert.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Where to draw the learning curve.")] = None,
    audit: Annotated[
        Path | None, typer.Option(help="Where to draw the values that multiturn.audit judged.")
    ] = None,
    task_types: Annotated[bool, typer.Option("--task-types", help="A column for each.")] = False,
) -> None:
    """Print what a recorded run achieved, and draw its learning curve."""
    from verl_multiturn.panel import load_panel
    from verl_multiturn.report import compare, learning_curve, print_table, success_table
    from verl_multiturn.runs import Run

    recorded = Run(run)
    table = success_table(recorded, load_panel(panel) if panel else None, task_types=task_types)
    print_table(table)
    if {"trained", "warm start"} <= set(table.index):
        points, disjoint = compare(table, "trained", "warm start")
        apart = "are disjoint" if disjoint else "overlap"
        typer.echo(f"trained - warm start: {points:+.1f} points; the 95 % intervals {apart}")
    if png is not None:
        learning_curve(recorded, png)
        typer.echo(f"wrote {png}")
    if audit is not None:
        from verl_multiturn.audit_plot import draw_audit

        draw_audit(recorded, audit)
        typer.echo(f"wrote {audit}")


@app.command()
def view(
    run: Annotated[Path, typer.Argument(help="Folder of a recorded run, or search trees (trees.jsonl).")],
    out: Annotated[Path | None, typer.Option(help="The page; default: view.html in the folder.")] = None,
    steps: Annotated[str | None, typer.Option(help="Only these steps, such as 1,5,30.")] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Only the last steps of each split.")] = None,
    split: Annotated[str | None, typer.Option(help="Only this split, such as train or val.")] = None,
    tokens: Annotated[
        bool | None, typer.Option(help="Token ids and log-probs; default: if the page stays below 50 MB.")
    ] = None,
    algorithms: Annotated[
        str | None,
        typer.Option("--with", help="Advantages beside the recorded ones, such as gigpo,rloo; default: all."),
    ] = None,
) -> None:
    """Write a recorded run, or search trees, as one HTML page: curves, credit turn by turn, groups."""
    from verl_multiturn.view import build_view, parse_steps
    from verl_multiturn.view_trees import build_trees, holds_trees

    if holds_trees(run):
        if steps or last or split or tokens is not None or algorithms is not None:
            raise ValueError(f"{run} holds search trees: of the options only --out is for them")
        trees = build_trees(run, out)
        typer.echo(f"wrote {trees.path}: {trees.trees} trees, {trees.nodes} nodes, {trees.size / 1e6:.1f} MB")
        return
    names = None if algorithms is None else [name.strip() for name in algorithms.split(",") if name.strip()]
    page = build_view(run, out, parse_steps(steps) if steps else None, last, split, tokens, names)
    without = "" if page.tokens else ", without tokens"
    typer.echo(f"wrote {page.path}: {page.trajectories} trajectories, {page.size / 1e6:.1f} MB{without}")


for command in (
    envs, panels, measure_envs, rescore, curves, estimators, replay, play, search, pairs, plan, doctor,
    make_alfworld_games,
):  # fmt: skip
    app.command()(command)
app.command()(offline)
app.command("eval")(evaluate)
app.command("table", cls=Launching)(table)
app.command("fit-q")(fit_q)


def _show(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    table = Table(box=SIMPLE, pad_edge=False)
    for column in columns:  # names are there to be typed: the first column is never broken
        table.add_column(column, no_wrap=column == columns[0], overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    Console().print(table)


if __name__ == "__main__":
    app()
