"""The runs that a table lacks: the plan with its hours, and running them one after another.

A command of which no rate is known counts as long as the longest that is known, never as nothing.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from verl_multiturn.tables.wanted import Job


def plan(found: Sequence[Job], lacking: Iterable[str] = ()) -> list[str]:
    """What there is, what is missing with its command, and the hours it takes.

    Args:
        found: of `wanted.jobs`.
        lacking: of `lacking.lacking`, cells that no command fills.
    """
    missing = [job for job in found if not job.done and job.command]
    absent = [f"{job.name}: {job.why}" for job in found if not job.command]
    longest, untimed = _longest(found), sum(job.seconds is None for job in missing)
    lines = [f"# {sum(job.done for job in found)} of {len(found)} are recorded"]
    lines += [f"# not possible: {one}" for one in (*absent, *lacking)]
    for job in missing:
        known = "of unknown length" if job.seconds is None else f"about {job.seconds:.0f} s ({job.why})"
        lines += [f"# {job.name}, {known}", shlex.join(job.command)]
    hours = sum((longest or 0) if job.seconds is None else job.seconds for job in missing) / 3600
    text = f"about {hours:.1f} hours"
    if untimed:
        text += f", {untimed} of unknown length counted as the longest, {longest:.0f} s" if longest else ""
        text = text if longest else "hours unknown: none of them was timed"
    return [*lines, f"# missing: {len(missing)} commands, {text}"]


def _longest(found: Iterable[Job]) -> float | None:
    return max((job.seconds for job in found if job.seconds is not None), default=None)


def launch(
    found: Iterable[Job],
    tell: Callable[[str], None],
    hours: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Job]:
    """Run what is missing, one after another; returns what failed or found no time.

    Args:
        found: of `jobs`.
        tell: takes a line of progress.
        hours: nothing is started that would end later than this, or of which nothing says how long it takes.
        clock: seconds.
    """
    found = list(found)
    start, lost, longest = clock(), list[Job](), _longest(found)
    for job in found:
        if job.done or not job.command:
            continue
        needed = longest if job.seconds is None else job.seconds
        left = None if hours is None else 3600 * hours - (clock() - start)
        if left is not None and (needed is None or needed > left):
            takes = "how long it takes is not known" if needed is None else f"it takes about {needed:.0f} s"
            tell(f"no time for {job.name}: {left:.0f} s left, {takes}")
            lost.append(job)
            continue
        tell(f"{job.name}: {shlex.join(job.command)}")
        if job.command[0] == "verl-multiturn":
            _put_aside(job.folder)
        code = subprocess.run(_here(job.command), env=_environment()).returncode
        if code:
            tell(f"{job.name} failed with exit code {code}")
            lost.append(job)
    return lost


def _here(command: Sequence[str]) -> list[str]:
    """With this interpreter, whether or not its commands are on the path."""
    if command[0] != "verl-multiturn":
        return list(command)
    return [sys.executable, "-m", "verl_multiturn.cli", *command[1:]]


def _environment() -> dict[str, str]:
    """Recipes take the `python` on the path: this one first."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return os.environ | {"PATH": os.pathsep.join(places)}


def _put_aside(folder: Path) -> None:
    """An evaluation that was killed leaves a folder, which the next one would refuse."""
    if folder.exists():
        number = 1
        while (aside := folder.with_name(f"{folder.name}.stopped{number}")).exists():
            number += 1
        folder.rename(aside)
