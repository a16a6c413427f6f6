"""The runs that a table lacks: their commands, how long they take, and running them one after another.

A job is done when a recorded run of its model, method and environment, with every setting that its
command gives, reached its last step (or, of a test, was recorded). The same command resumes a run that
was stopped.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from verl_multiturn.recipes_index import list_recipes, recipes_dir
from verl_multiturn.tables.published import Column, Method, Published
from verl_multiturn.tables.recorded import Recorded

STEP_SECONDS = "timing_s/step"


@dataclass(frozen=True)
class Job:
    """One command.

    Attributes:
        name: model, method, environment, seed in words.
        command: as the shell takes it; empty where the recipe is not there.
        folder: the run's.
        done: whether it is recorded.
        seconds: how long it takes; None: not known.
        why: why there is no command, or where `seconds` come from.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    done: bool
    seconds: float | None
    why: str


@dataclass(frozen=True)
class Wanted:
    """Which runs a table is to have.

    Attributes:
        root: where new runs are recorded.
        seeds: of training.
        hardware: a preset, such as cpu (then with the small model); None: the recipes' own.
        overrides: more of hydra's, for every run.
    """

    root: Path = Path("runs")
    seeds: Sequence[int] = (1, 2, 3)
    hardware: str | None = None
    overrides: Sequence[str] = ()


def jobs(table: Published, runs: Iterable[Recorded], wanted: Wanted) -> list[Job]:
    """Everything that the table is made of, training before the test that it is for."""
    runs, known = list(runs), list_recipes()
    small = wanted.hardware == "cpu" or "hardware=cpu" in table.suite.get("common", ())
    named: dict[str, str | None] = {name: path for name, path in table.models.items() if path is not None}
    models = {"small": None} if small else named
    columns = {column.env: column for column in reversed(table.columns) if column.env}
    found = []
    for model, path in models.items():
        for seed in wanted.seeds:
            for env, column in reversed(columns.items()):
                for method in table.methods:
                    if recipe := method.recipes.get(str(env)):
                        one = _One(table, wanted, model, path, seed, column, method, recipe)
                        found += one.jobs(runs, recipe in known)
    return found


@dataclass(frozen=True)
class _One:
    """One training run and its test."""

    table: Published
    wanted: Wanted
    model: str
    path: str | None
    seed: int
    column: Column
    method: Method
    recipe: str

    @property
    def folder(self) -> Path:
        parts = (self.column.env, self.method.name, f"seed{self.seed}")
        return self.wanted.root / _slug(self.model) / "_".join(map(_slug, map(str, parts)))

    def jobs(self, runs: Sequence[Recorded], recipe: bool) -> list[Job]:
        name = f"{self.method.name}, {self.column.env}, seed {self.seed}, {self.model}"
        suite, env = self.table.suite, str(self.column.env)
        mine = [run for run in runs if self._is(run)]
        if not recipe:
            return [Job(name, (), self.folder, False, None, f"no recipe {self.recipe} in this checkout")]
        seconds, why = self._seconds(runs)
        tested = any(run.evaluated and run.outcomes for run in mine)
        if not self.method.trained:  # its recipe ends with the evaluation
            return [Job(name, self._train(), self.folder, tested, seconds, why)]
        trained = any(not run.evaluated and finished(run) for run in mine)
        found = [Job(name, self._train(), self.folder, trained, seconds, why)]
        if panel := suite.get("test", {}).get(env):
            folder = self.folder.with_name(f"{self.folder.name}_test")
            found.append(
                Job(f"{name}, test", self._test(panel, folder), folder, tested, suite.get("after"), "file")
            )
        return found

    def _is(self, run: Recorded) -> bool:
        """Whether a run is this one: its method, model, and every setting that the command gives."""
        if run.model != self.model or not run.of(self.method, self.column):
            return False
        given = dict(one.partition("=")[::2] for one in self._settings if not one.startswith("hardware="))
        return all(run.setting(key) == yaml.safe_load(value) for key, value in given.items())

    @property
    def _settings(self) -> tuple[str, ...]:
        suite = self.table.suite
        return (
            *suite.get("common", ()), *suite.get("set", {}).get(self.column.env, ()), *self.method.set,
            *self.wanted.overrides, f"multiturn.seed={self.seed}",
        )  # fmt: skip

    def _train(self) -> tuple[str, ...]:
        hardware = [f"hardware={self.wanted.hardware}"] if self.wanted.hardware else []
        model = [f"actor_rollout_ref.model.path={self.path}"] if self.path else []
        script = str(recipes_dir() / f"{self.recipe}.sh")
        return ("bash", script, *hardware, *self._settings, *model, f"multiturn.run={self.folder}")

    def _test(self, panel: str, folder: Path) -> tuple[str, ...]:
        limit = self.table.suite.get("limit")
        more = ("--limit", str(limit)) if limit else ()
        return ("verl-multiturn", "eval", str(self.folder), "--panel", panel, *more, "--out", str(folder))

    def _seconds(self, runs: Iterable[Recorded]) -> tuple[float | None, str]:
        """From recorded steps of this method in this environment, else from the table's file."""
        suite, env = self.table.suite, str(self.column.env)
        for run in runs:
            if not run.evaluated and run.of(self.method, self.column) and STEP_SECONDS in run.run.metrics:
                step, why = float(run.run.metrics[STEP_SECONDS].median()), f"steps of {run.id}"
                break
        else:
            step, why = suite.get("step", {}).get(env, {}).get(self.method.name), "file"
        if step is None or (steps := self._steps()) is None:
            return None, "no rate recorded"
        return suite.get("start", 0) + steps * step, why

    def _steps(self) -> int | None:
        given = [one for one in self._train() if one.startswith("trainer.total_training_steps=")]
        return int(given[-1].partition("=")[2]) if given else None


def finished(run: Recorded) -> bool:
    """Whether training came to its last step."""
    steps = run.run.metrics.index
    wanted = run.setting("trainer.total_training_steps")
    return wanted is not None and len(steps) > 0 and steps[-1] >= wanted


def plan(found: Sequence[Job]) -> list[str]:
    """What there is, what is missing with its command, and the hours it takes."""
    missing = [job for job in found if not job.done and job.command]
    absent = [job for job in found if not job.command]
    lines = [f"# {sum(job.done for job in found)} of {len(found)} are recorded"]
    lines += [f"# not possible: {job.name}: {job.why}" for job in absent]
    for job in missing:
        time_ = "" if job.seconds is None else f", about {job.seconds:.0f} s ({job.why})"
        lines += [f"# {job.name}{time_}", shlex.join(job.command)]
    unknown = sum(job.seconds is None for job in missing)
    hours = sum(job.seconds or 0 for job in missing) / 3600
    more = f", and {unknown} of which no rate is known" if unknown else ""
    return [*lines, f"# missing: {len(missing)} commands, about {hours:.1f} hours{more}"]


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
        hours: nothing is started that would end later than this.
        clock: seconds.
    """
    start, lost = clock(), []
    for job in found:
        if job.done or not job.command:
            continue
        left = None if hours is None else 3600 * hours - (clock() - start)
        if left is not None and (job.seconds or 0) > left:
            tell(f"no time for {job.name}: {left:.0f} s left, it takes about {job.seconds or 0:.0f} s")
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


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
