"""What `verl-multiturn replay` says: trajectories counted one by one, in bounded memory, and a table."""

import csv
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from verl_multiturn.env import Env
from verl_multiturn.replay import KINDS, Replay, Unreadable, name_of, replay
from verl_multiturn.run_files import Record

SHOWN = 10  # trajectories that a table names, differences and unreadable records that are told


@dataclass
class Tally:
    """Counts of replays; of these only the first few and the first few that differ are kept."""

    trajectories: int = 0
    equal: int = 0
    turns: int = 0  # compared
    steps: int = 0  # of the environment
    differing: int = 0  # turns
    lost: int = 0  # turns that were not compared
    kinds: Counter[str] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)
    first: list[Replay] = field(default_factory=list)
    first_differing: list[Replay] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all there was could be played and was as recorded."""
        return self.equal == self.trajectories and not self.unreadable

    def add(self, one: Replay) -> None:
        """Count a replay."""
        self.trajectories += 1
        self.equal += one.ok
        self.turns, self.steps = self.turns + one.turns, self.steps + one.steps
        self.differing, self.lost = self.differing + len(one.differing), self.lost + one.lost
        self.kinds.update(difference.kind for difference in one.differences)
        for kept, wanted in (self.first, True), (self.first_differing, not one.ok):
            if wanted and len(kept) < SHOWN:
                kept.append(one)

    def __str__(self) -> str:
        """Two lines: how many are as recorded, and what differs."""
        kinds = ", ".join(f"{kind} {self.kinds[kind]}" for kind in KINDS)
        return (
            f"{self.equal} of {self.trajectories} trajectories are as recorded: {self.turns} turns, "
            f"{self.steps} steps of the environment\n"
            f"differing: trajectories {self.trajectories - self.equal}, turns {self.differing}; {kinds}; "
            f"turns not compared {self.lost}; unreadable {len(self.unreadable)}"
        )


def tally(
    env: Env, records: Iterable[Record | Unreadable], out: Path | None = None, quiet: bool = False
) -> Tally:
    """Play what is read again, one after another in one environment, and count.

    Args:
        env: where.
        records: as `replay.read` gives them.
        out: CSV file for every difference, a row each; None: none.
        quiet: no progress line.
    """
    found, rows = Tally(), None
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with ExitStack() as opened:
        bar = opened.enter_context(Progress(*columns, console=Console(stderr=True), disable=quiet))
        line = bar.add_task("")
        if out is not None:
            rows = csv.writer(opened.enter_context(out.open("w", newline="", encoding="utf-8")))
            rows.writerow(("split", "step", "trajectory", "turn", "kind", "what", "recorded", "now"))
        for record in records:
            if isinstance(record, Unreadable):
                found.unreadable.append(record.why)
                continue
            one = replay(env, record)
            found.add(one)
            place = record["split"], record["step"]
            told = f"{found.trajectories} trajectories, {found.trajectories - found.equal} differ"
            bar.update(line, description=f"{place[0]} step {place[1]}: {told}")
            if rows is not None:
                rows.writerows(
                    (*place, d.trajectory, d.turn, d.kind, d.what, d.recorded, d.now) for d in one.differences
                )
    return found


def print_tally(found: Tally, console: Console | None = None) -> None:
    """Print the turns of one trajectory, a row each of a few, of many only those that differ."""
    console = console or Console()
    if found.trajectories == 1:
        console.print(_turn_table(found.first[0]))
    elif shown := found.first if found.trajectories <= SHOWN else found.first_differing:
        console.print(_table(shown))
    told = [str(difference) for one in found.first_differing for difference in one.differences]
    for lines, count in (told, found.kinds.total()), (found.unreadable, len(found.unreadable)):
        more = [f"... and {count - SHOWN} more"] if count > SHOWN else []
        for line in [*lines[:SHOWN], *more]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(str(found), soft_wrap=True, highlight=False)


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers in short: 1, 3-5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _table(replays: list[Replay]) -> Table:
    table = Table("trajectory", "split", "step", "task", box=SIMPLE, pad_edge=False)
    for column in ("turns", "return"):
        table.add_column(column, justify="right")
    for column in ("end", "differing turns", "what"):
        table.add_column(column)
    table.columns[0].overflow = "fold"
    for one in replays:
        record = one.record
        end = "solved" if record["success"] else record["truncation"] or "failed"
        at_reset = ["reset"] if any(d.turn is None for d in one.differences) else []
        where = ", ".join([*at_reset, *filter(None, [ranges(one.differing)])]) or "none"
        what = ", ".join(dict.fromkeys(d.what for d in one.differences)) or "equal"
        cells = (name_of(record), record["split"], record["step"], record["task"], len(record["turns"]))
        table.add_row(*(escape(str(x)) for x in (*cells, f"{record['return']:g}", end, where, what)))
    return table


def _turn_table(one: Replay) -> Table:
    table = Table("turn", "actions", "valid", "reward", "now", box=SIMPLE, pad_edge=False)
    for t, turn in enumerate(one.record["turns"]):
        what = [difference.what for difference in one.differences if (difference.turn or 0) == t]
        now = f"differs: {', '.join(what)}" if what else "equal" if t < one.turns else "not compared"
        actions = " || ".join(turn["actions"]) or "(none)"
        cells = (str(t), actions, "yes" if turn["valid"] else "no", f"{turn['reward']:g}", now)
        table.add_row(*map(escape, cells))
    return table
