"""What every environment is, what it needs, where it runs and how fast it was measured.

Files are imported, which needs none of their packages; one that cannot be is listed with the reason.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.env import Env
from verl_multiturn.load import classes, environment_folders, list_envs
from verl_multiturn.needs import Needs

SPEEDS = "speeds.json"  # in an environments folder; written by `verl-multiturn measure-envs`
OURS = Path(__file__).parents[1] / "environments"


@dataclass(frozen=True)
class Entry:
    """One environment.

    Attributes:
        name: for `make`.
        what: first line of its file.
        ours: shipped with this package, else the user's.
        problem: why its class cannot be had; then the rest is empty.
        missing: packages and programs that are not installed.
        install: what to type to get the packages; None where none is missing.
        data: what data of the user it can play, and how to get it; None: it needs none.
        data_found: where that was found; None: nowhere.
        snapshots: "copy", "replay" or "none".
        runs_in: "thread" or "process".
        licence: of what is played; None: a user's environment that does not say.
        speed: measured rows (see `verl_multiturn.measure`), one per variant; empty: never measured.
    """

    name: str
    what: str
    ours: bool
    problem: str | None = None
    missing: tuple[str, ...] = ()
    install: str | None = None
    data: str | None = None
    data_found: str | None = None
    snapshots: str = ""
    runs_in: str = ""
    licence: str | None = None
    speed: tuple[dict[str, Any], ...] = ()

    @property
    def ready(self) -> bool:
        """Whether it can be made here."""
        return self.problem is None and not self.missing

    def as_dict(self) -> dict[str, Any]:
        """All of it, for machines."""
        return asdict(self) | {"ready": self.ready}


def index() -> list[Entry]:
    """Every environment that is found, ours and the user's, by name."""
    measured, ours = speeds(), {path.stem for path in OURS.glob("*.py")}
    return [
        entry for file, what in list_envs().items() for entry in _entries(file, what, file in ours, measured)
    ]


def speeds() -> list[dict[str, Any]]:
    """Measured rows of every environments folder; where two know a name and variant, the first counts.

    Raises:
        ValueError: a file holds something else.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for path in (folder / SPEEDS for folder in environment_folders()):
        if path.is_file():
            try:
                for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
                    rows.setdefault((row["name"], row["variant"]), row)
            except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path} does not hold measured speeds ({type(error).__name__}: {error}): delete it, or "
                    "write it again with verl-multiturn measure-envs"
                ) from None
    return list(rows.values())


def _entries(file: str, what: str, ours: bool, measured: list[dict[str, Any]]) -> Iterator[Entry]:
    try:
        found = classes(file, Env)
        for name, cls in found.items():
            speed = tuple(row for row in measured if row["name"] == name and row.get("steps_per_second"))
            yield _entry(name, what, ours, cls, speed)
    # A file of the user's may raise anything, even leave; it must not hide the others.
    except (Exception, SystemExit) as error:
        yield Entry(file, what, ours, problem=" ".join(f"{type(error).__name__}: {error}".split()))


def _entry(name: str, what: str, ours: bool, cls: Any, speed: tuple[dict[str, Any], ...]) -> Entry:
    needs = getattr(cls, "needs", Env.needs)
    if not isinstance(needs, Needs):
        raise TypeError(f"{cls.__name__}.needs is of type {type(needs).__name__}, must be Needs(...)")
    missing = tuple(needs.missing)
    packages = set(missing) & set(needs.packages)
    return Entry(
        name=name,
        what=what,
        ours=ours,
        missing=missing,
        install=needs.install if packages else None,
        data=needs.data,
        data_found=getattr(cls, "find_data", Env.find_data)() if needs.data else None,
        snapshots=getattr(cls, "snapshots", Env.snapshots),
        runs_in=getattr(cls, "runs_in", Env.runs_in),
        licence=needs.licence if ours or needs is not Env.needs else None,
        speed=speed,
    )


def describe(entry: Entry) -> list[str]:
    """Lines for a reader: what it is, what is missing, how it runs, and its data."""
    lines = [entry.what]
    if entry.problem is not None:
        return [*lines, f"cannot be used: {entry.problem}"]
    state = "ready"
    if entry.missing:
        programs = entry.install is None
        state = f"not installed: {', '.join(entry.missing)}" + ("" if programs else f"; {entry.install}")
    facts = [f"snapshots {entry.snapshots}", f"in a {entry.runs_in}"]
    facts += [speed] if (speed := _speed(entry.speed)) else []
    facts += [entry.licence] if entry.licence else []
    lines += [state, ", ".join(facts)]
    if entry.data is not None:
        found = f"found in {entry.data_found}" if entry.data_found else f"not found; {entry.data}"
        lines.append(f"data: {found}")
    return lines


def _speed(rows: tuple[dict[str, Any], ...]) -> str:
    several = len(rows) > 1
    parts = [
        f"{row['steps_per_second']:,.0f}" + (f" ({row['variant'] or 'default'})" if several else "")
        for row in rows
    ]
    return f"{', '.join(parts)} steps/s" if parts else ""
