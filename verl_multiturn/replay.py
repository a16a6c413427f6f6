"""Play a recorded trajectory again and compare: the same actions must show the same episode.

The environment is built from the run's configuration and reset with the recorded task and noise;
the recorded actions are applied as `rollout.episode` applied them. A difference means that the
environment, its data or one of its dependencies has changed, or that it is not deterministic.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_multiturn.env import Env, make
from verl_multiturn.errors import unknown
from verl_multiturn.rollout.pool import Observed, reset, step
from verl_multiturn.run_files import Record
from verl_multiturn.runs import Run

SHOWN = 10  # differing trajectories that a table names


@dataclass(frozen=True)
class Difference:
    """The first thing that is not as recorded; turn None: before the first turn."""

    trajectory: str
    turn: int | None
    what: str
    recorded: Any
    now: Any

    def __str__(self) -> str:
        where = "at reset" if self.turn is None else f"at turn {self.turn}"
        return f"{self.trajectory} differs {where}: {self.what} recorded {self.recorded!r}, now {self.now!r}"


@dataclass(frozen=True)
class Replay:
    """A trajectory played again, up to its first difference."""

    record: Record
    turns: int  # found equal
    steps: int  # of the environment
    difference: Difference | None

    @property
    def ok(self) -> bool:
        """Whether everything was as recorded."""
        return self.difference is None


def name_of(record: Record) -> str:
    """How a trajectory is called: group/trajectory."""
    return f"{record['group']}/{record['trajectory']}"


def environment(run: Run, env: str | None = None) -> Env:
    """The environment of a run, from its configuration.

    Args:
        run: recorded with its configuration.
        env: where the environment is now, for a run that named a file which has moved.

    Raises:
        ValueError: the run names none, or a file that is not there.
    """
    settings = run.config.get("multiturn") or {}
    name = env or settings.get("env")
    if name is None:
        raise ValueError(
            f"{run.folder}/config.yaml names no environment (multiturn.env): give one with --env"
        )
    path = Path(str(name).partition(":")[0])
    if path.is_absolute() and not path.exists():
        raise ValueError(
            f"the run played the environment file {path}, which is not there (any more): put it back, "
            "or say with --env where it is now"
        )
    return make(str(name), **(settings.get("env_kwargs") or {}))


def find_trajectories(
    run: Run, name: str | None, split: str = "train", step: int | None = None
) -> list[Record]:
    """The trajectory called `name` (group/trajectory, or how it begins); None: a whole step.

    Args:
        run: where to look.
        name: see above.
        split: in which split.
        step: at which step; None: the last one for a whole step, else all of them.

    Raises:
        ValueError: none, or more than one, is called so.
    """
    if name is None:
        return run.trajectories(split, run.steps(split)[-1] if step is None else step)
    places = run.steps(split) if step is None else [step]
    records = [record for place in places for record in run.trajectories(split, place)]
    # A whole name first: g/1 is also how g/10 begins.
    found = [record for record in records if name_of(record) == name]
    found = found or [record for record in records if name_of(record).startswith(name)]
    if not found:
        near = get_close_matches(name, map(name_of, records), n=3, cutoff=0)
        raise unknown(f"trajectory of split {split!r}", name, near, f"(the nearest of {len(records)})")
    if len(found) > 1:
        some = ", ".join(f"{name_of(record)} of step {record['step']}" for record in found[:4])
        more = ", ..." if len(found) > 4 else ""
        raise ValueError(f"{name!r} begins the names of {len(found)} trajectories: {some}{more}")
    return found


def replay(env: Env, record: Record) -> Replay:
    """Play one recorded trajectory again in `env`, to its end or its first difference."""
    name, turns = name_of(record), record["turns"]

    def ended(played: int, steps: int, *difference: Any) -> Replay:
        return Replay(record, played, steps, Difference(name, *difference) if difference else None)

    try:
        seen = reset(env, record["seed"], record["dynamics_seed"])
    # Whatever a user's environment raises is what is different now.
    except Exception as error:
        return ended(0, 0, None, "an episode", record["seed"], error)
    if seen.instruction != record["instruction"]:
        return ended(0, 0, None, "instruction", record["instruction"], seen.instruction)
    steps = 0
    for turn in turns:
        t = turn["index"]
        if seen.observation != turn["observation"]:
            return ended(t, steps, t, "observation before it", turn["observation"], seen.observation)
        if seen.terminated or seen.truncated:
            return ended(t, steps, t, "the episode", "goes on", "has ended")
        try:
            played = _turn(env, turn)
        except Exception as error:
            return ended(t, steps, t, "a turn", turn["actions"], error)
        seen, steps = played.seen, steps + played.steps
        pairs = ("reward", turn["reward"], played.reward), ("valid", turn["valid"], played.valid)
        for what, then, now in pairs:
            if not _equal(then, now):
                return ended(t, steps, t, what, then, now)
    for what, then, now in _ends(record, seen):
        if then != now:
            return ended(len(turns), steps, len(turns) - 1, what, then, now)
    return ended(len(turns), steps)


def replay_all(env: Env, records: Iterable[Record]) -> list[Replay]:
    """Play recorded trajectories again, one after another in one environment, as a rollout does."""
    return [replay(env, record) for record in records]


def print_replays(replays: list[Replay], console: Console | None = None) -> None:
    """Print the turns of one trajectory, a row each of a few, of many only those that differ."""
    console = console or Console()
    differing = [one for one in replays if not one.ok]
    shown = replays if len(replays) <= SHOWN else differing[:SHOWN]
    if len(replays) == 1:
        console.print(_turn_table(replays[0]))
    elif shown:
        console.print(_table(shown))
    steps, turns = sum(one.steps for one in replays), sum(one.turns for one in replays)
    equal = len(replays) - len(differing)
    console.print(
        f"{equal} of {len(replays)} trajectories are as recorded: {turns} turns, {steps} steps of the "
        "environment",
        soft_wrap=True,
        highlight=False,
    )
    if differing:
        console.print(str(differing[0].difference), markup=False, highlight=False, soft_wrap=True)


class _Turn(NamedTuple):
    seen: Observed  # after it
    reward: float
    valid: bool
    steps: int


def _turn(env: Env, turn: Record) -> _Turn:
    """Apply the actions of a recorded turn."""
    # As in the rollout: no valid action is "", and what stands behind the episode's end is not played.
    actions, reward, done = turn["actions"] or [""], 0.0, 0
    valid = bool(turn["actions"])
    for action in actions:
        seen = step(env, action)
        done, reward = done + 1, reward + seen.reward
        valid = valid and bool(seen.info.get("valid", True))
        if seen.terminated or seen.truncated:
            break
    return _Turn(seen, reward, valid, done)


def _ends(record: Record, seen: Observed) -> list[tuple[str, Any, Any]]:
    """What the last turn must agree in; limits of the run itself leave the environment unfinished."""
    ends = [
        ("terminated", record["terminated"], seen.terminated),
        ("truncated by the environment", record["truncation"] == "environment", seen.truncated),
    ]
    if record["success"] is not None:
        ends.append(("success", record["success"], bool(seen.info.get("success", False))))
    return ends


def _equal(then: Any, now: Any) -> bool:
    # Sums of rewards may round differently on another machine.
    return math.isclose(then, now, rel_tol=1e-9, abs_tol=1e-12)


def _table(replays: list[Replay]) -> Table:
    table = Table("trajectory", "step", "task", box=SIMPLE, pad_edge=False)
    for column in ("turns", "return"):
        table.add_column(column, justify="right")
    for column in ("end", "now"):
        table.add_column(column)
    table.columns[0].overflow = "fold"
    for one in replays:
        record = one.record
        end = "solved" if record["success"] else record["truncation"] or "failed"
        now = "equal" if one.difference is None else f"turn {one.turns}: {one.difference.what}"
        cells = (name_of(record), record["step"], record["task"], len(record["turns"]))
        table.add_row(*(escape(str(x)) for x in (*cells, f"{record['return']:g}", end, now)))
    return table


def _turn_table(one: Replay) -> Table:
    table = Table("turn", "actions", "valid", "reward", "now", box=SIMPLE, pad_edge=False)
    broken = None if one.difference is None else one.difference.turn or 0
    for turn in one.record["turns"]:
        t = turn["index"]
        now = "equal" if broken is None or t < broken else "not compared"
        if one.difference is not None and t == broken:
            now = f"differs: {one.difference.what}"
        actions = " || ".join(turn["actions"]) or "(none)"
        cells = (str(t), actions, "yes" if turn["valid"] else "no", f"{turn['reward']:g}", now)
        table.add_row(*map(escape, cells))
    return table
