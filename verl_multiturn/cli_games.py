"""The command `make-alfworld-games`. Registered in `cli`."""

import importlib
import os
from pathlib import Path
from typing import Annotated

import typer

from verl_multiturn.needs import Needs

NEEDS = Needs(extra="alfworld", packages=("alfworld", "textworld", "fast_downward"))


def make_alfworld_games(
    out: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    train: Annotated[int, typer.Option(min=0, help="Games in training scenes.")] = 0,
    valid_seen: Annotated[int, typer.Option(min=0, help="Other games in training scenes.")] = 0,
    valid_unseen: Annotated[int, typer.Option(min=0, help="Games in test scenes.")] = 0,
    seed: Annotated[int, typer.Option(help="Same seed and arguments, same files.")] = 0,
    max_receptacles: Annotated[int | None, typer.Option(help="Of a game; default: all of the scene.")] = None,
    max_objects: Annotated[int | None, typer.Option(help="Of a game; default: 1 or 2 a class.")] = None,
    types: Annotated[str | None, typer.Option(help="Comma-separated; default: all six in turn.")] = None,
    solver: Annotated[str, typer.Option(help="plan, expert (alfworld's) or planner (both slow).")] = "plan",
    time_limit: Annotated[float, typer.Option(help="Seconds to solve a game; else it is redrawn.")] = 60.0,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: one a CPU.")] = None,
) -> None:
    """Write new ALFWorld games in the benchmark's format, each solved; they are not the benchmark's games."""
    from verl_multiturn.load import environment_folders

    NEEDS.require("make-alfworld-games")
    environment_folders()  # puts the working directory on sys.path
    games = importlib.import_module("environments.alfworld_parts.games")
    counts = {"train": train, "valid_seen": valid_seen, "valid_unseen": valid_unseen}
    tasks = tuple(name.strip() for name in types.split(",")) if types is not None else games.TASKS
    request = games.Request(
        counts, seed, max_receptacles, max_objects, tasks, solver, time_limit, workers or os.cpu_count() or 1
    )
    summary = games.write_games(out, request)
    written = ", ".join(f"{sum(kinds.values())} {split}" for split, kinds in summary["games"].items())
    again = sum(summary["drawn_again"].values())
    typer.echo(f"wrote {out}: {written}; {again} drawn again. {summary['what']}")
