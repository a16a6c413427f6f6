"""What a table is made of: a job for each run, with its command, its length and whether it is recorded.

A job is done when a recorded run of its model, method and column, with every setting that its command
gives, reached its last step (or, of an evaluation, was recorded). The same command resumes a run that
was stopped. Columns that one run fills share it; what a column asks of its runs (`where`) is given as
an override where it is a plain value and no list, null or "*".

Settings of a command, later ones win: the suite's `common` and `set` of the environment, the method's
`set`, the column's, the user's.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from verl_multiturn.recipes_index import list_recipes, recipe_folder
from verl_multiturn.tables.published import Column, Method, Published
from verl_multiturn.tables.recorded import NO_MODEL, Recorded

STEP_SECONDS = "timing_s/step"
PRESETS = ("hardware=", "credit=")
SMALL, OWN = "small", "the recipe's own model"


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

    def small(self, table: Published) -> bool:
        """Whether the runs are of the small model."""
        return self.hardware == "cpu" or "hardware=cpu" in table.suite.get("common", ())


@dataclass
class Slot:
    """A run that fills columns: the first one gives it its name, all of them are of one environment."""

    method: Method
    recipe: str
    overrides: tuple[str, ...]
    columns: list[Column] = field(default_factory=list)

    def serves(self, column: Column, recipe: str, overrides: tuple[str, ...]) -> bool:
        """Whether its run fills a column, too, which alone would be given these overrides."""
        if recipe != self.recipe or column.env != self.columns[0].env:
            return False
        given = as_settings(self.overrides)
        fit = all(_one_of(given[key], column.where[key]) for key in given if key in column.where)
        return fit and overrides in ((), self.overrides)


def jobs(table: Published, runs: Iterable[Recorded], wanted: Wanted) -> list[Job]:
    """Everything that the table is made of, training before the test that it is for."""
    runs, known = list(runs), list_recipes()
    found: list[Job] = []
    for model in models(table, wanted):
        made = slots(table, model, wanted)
        for seed in wanted.seeds:
            for slot in made:
                if slot.method.scripted == "expert" and seed != wanted.seeds[0]:
                    continue  # nothing of it is drawn
                one = _One(table, wanted, model, seed, slot, _place(slot, made))
                found += one.jobs(runs, slot.recipe in known)
    return found


def models(table: Published, wanted: Wanted) -> list[str]:
    """Whose runs there are to be: the paper's models, or the small one; policies without one at last."""
    named = [SMALL] if wanted.small(table) else [*table.models]
    if not wanted.small(table) and (not named or any(column.ours for column in table.columns)):
        named.append(OWN)
    return [*named, NO_MODEL] if any(method.scripted for method in table.methods) else named


def slots(table: Published, model: str, wanted: Wanted) -> list[Slot]:
    """The runs of a model, in the order of columns, then of methods."""
    found: list[Slot] = []
    for method in table.methods:
        mine: list[Slot] = []
        able = [column for column in table.columns if not obstacle(table, model, method, column, wanted)]
        given = {column.name: _of_column(table, method, column) for column in able}
        # Stable: what needs no override of its own may share the run of what does.
        for column in sorted(able, key=lambda one: not given[one.name]):
            recipe, overrides = str(method.recipe(column)), given[column.name]
            shared = next((slot for slot in mine if slot.serves(column, recipe, overrides)), None)
            if shared is None:
                mine.append(shared := Slot(method, recipe, overrides))
            shared.columns.append(column)
        found += mine
    return sorted(found, key=lambda slot: min(map(table.columns.index, slot.columns)))


def _place(slot: Slot, made: Iterable[Slot]) -> str:
    """How a run is called: its environment, or its column where the environment has several runs."""
    env = slot.columns[0].env
    alone = sum(one.method == slot.method and one.columns[0].env == env for one in made) == 1
    return str(env) if alone else slot.columns[0].name


def obstacle(table: Published, model: str, method: Method, column: Column, wanted: Wanted) -> str:
    """Why no run of this model fills a cell; "": one does."""
    for name in (method.name, model, column.name):
        given = table.why.get(name, "")
        if why := given.get(column.name, "") if isinstance(given, Mapping) else given:
            return why
    if column.env is None:
        return "no environment here measures it"
    if bool(method.scripted) != (model == NO_MODEL):
        return "of another model"
    for cpu in (column.cpu, method.cpu):
        if cpu not in (None, wanted.small(table)):
            return f"only runs with{'' if cpu else 'out'} hardware=cpu are of it"
    if model in table.models:
        path = table.models[model]
        if column.ours or (isinstance(path, Mapping) and column.name not in path):
            return f"{model} is not for it"
        if method.models and model not in method.models:
            return "the paper has it of other models"
    if model == OWN and table.models and not column.ours:
        return "of the paper's models alone"
    return "" if method.recipe(column) else "no recipe makes it"


def as_settings(overrides: Iterable[str]) -> dict[str, Any]:
    """What hydra's overrides key=value set; without presets, which are no keys of a run."""
    pairs = (one.partition("=")[::2] for one in overrides if not one.startswith(PRESETS))
    return {key.lstrip("+"): yaml.safe_load(value) for key, value in pairs}


def _one_of(given: Any, wanted: Any) -> bool:
    return wanted == "*" or given in (wanted if isinstance(wanted, list) else [wanted])


def _of_column(table: Published, method: Method, column: Column) -> tuple[str, ...]:
    """What a column asks of its runs beyond the settings that they are given anyway."""
    suite = table.suite
    settings = (*suite.get("common", ()), *suite.get("set", {}).get(column.env, ()), *method.set)
    given = {one.partition("=")[0].lstrip("+") for one in settings}
    asked = {key: value for key, value in column.where.items() if key not in given}
    plain = {key: value for key, value in asked.items() if isinstance(value, bool | int | float | str)}
    texts = (f"{key}={_text(value)}" for key, value in plain.items() if value != "*")
    return (*texts, *column.set)


def _text(value: bool | float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class _One:
    """One training run and its test, or one evaluation of a policy without a model."""

    table: Published
    wanted: Wanted
    model: str
    seed: int
    slot: Slot
    place: str

    @property
    def column(self) -> Column:
        return self.slot.columns[0]

    @property
    def folder(self) -> Path:
        parts = (self.place, self.slot.method.name, f"seed{self.seed}")
        return self.wanted.root / _slug(self.model) / "_".join(map(_slug, parts))

    def jobs(self, runs: Sequence[Recorded], recipe: bool) -> list[Job]:
        method, suite, env = self.slot.method, self.table.suite, str(self.column.env)
        name = f"{method.name}, {self.place}, seed {self.seed}, {self.model}"
        if not recipe:
            why = f"no recipe {self.slot.recipe} in this checkout"
            return [Job(name, (), self.folder, False, None, why)]
        mine = [run for run in runs if self._is(run)]
        tested = any(run.evaluated and run.outcomes for run in mine)
        panel, after = suite.get("test", {}).get(env), suite.get("after")
        if method.scripted:
            return [Job(name, self._play(panel), self.folder, tested, after, "file")]
        seconds, why = self._seconds(runs)
        if not method.trained:  # its recipe ends with the evaluation
            return [Job(name, self._train(), self.folder, tested, seconds, why)]
        trained = any(not run.evaluated and finished(run) for run in mine)
        found = [Job(name, self._train(), self.folder, trained, seconds, why)]
        if panel:
            folder = self.folder.with_name(f"{self.folder.name}_test")
            play = ("verl-multiturn", "eval", str(self.folder), *self._of_panel(panel))
            play = (*play, "--out", str(folder))
            found.append(Job(f"{name}, test", play, folder, tested, after, "file"))
        return found

    def _is(self, run: Recorded) -> bool:
        """Whether a run is this one: its method, model, and every setting that the command gives."""
        if not of_model(self.table, run, self.model) or not run.of(self.slot.method, self.column):
            return False
        return all(run.setting(key) == value for key, value in as_settings(self._settings).items())

    @property
    def _settings(self) -> tuple[str, ...]:
        suite = self.table.suite
        return (
            *suite.get("common", ()), *suite.get("set", {}).get(self.column.env, ()), *self.slot.method.set,
            *self.slot.overrides, *self.wanted.overrides, f"multiturn.seed={self.seed}",
        )  # fmt: skip

    @property
    def _hardware(self) -> tuple[str, ...]:
        return (f"hardware={self.wanted.hardware}",) if self.wanted.hardware else ()

    def _train(self) -> tuple[str, ...]:
        path = self.table.models.get(self.model)
        path = path.get(self.column.name) if isinstance(path, Mapping) else path
        model = [f"actor_rollout_ref.model.path={path}"] if path else []
        script = str(recipe_folder(self.slot.recipe) / f"{self.slot.recipe}.sh")
        return ("bash", script, *self._hardware, *self._settings, *model, f"multiturn.run={self.folder}")

    def _play(self, panel: str | None) -> tuple[str, ...]:
        """Of a policy without a model, on the panel that the trained ones stand on."""
        what = self._of_panel(panel) if panel else ("--split", "val")
        command = ("verl-multiturn", "eval", self.slot.method.scripted, *self._hardware, *self._settings)
        return (*command, "--recipe", self.slot.recipe, *what, "--out", str(self.folder))

    def _of_panel(self, panel: str) -> tuple[str, ...]:
        limit = self.table.suite.get("limit")
        return ("--panel", panel, *(("--limit", str(limit)) if limit else ()))

    def _seconds(self, runs: Iterable[Recorded]) -> tuple[float | None, str]:
        """From recorded steps of this method in this environment, else from the table's file."""
        suite, method = self.table.suite, self.slot.method
        for run in runs:
            if not run.evaluated and run.of(method, self.column) and STEP_SECONDS in run.run.metrics:
                step, why = float(run.run.metrics[STEP_SECONDS].median()), f"steps of {run.id}"
                break
        else:
            step, why = suite.get("step", {}).get(str(self.column.env), {}).get(method.name), "file"
        if step is None or (steps := self._steps()) is None:
            return None, "no rate recorded"
        return suite.get("start", 0) + steps * step, why

    def _steps(self) -> int | None:
        steps = as_settings(self._settings).get("trainer.total_training_steps")
        return None if steps is None else int(steps)


def of_model(table: Published, run: Recorded, model: str) -> bool:
    """Whether a run is of a model of `models`."""
    if model == OWN:
        return run.model not in (SMALL, NO_MODEL)
    return table.aliases.get(run.model, run.model) == model


def finished(run: Recorded) -> bool:
    """Whether training came to its last step."""
    steps = run.run.metrics.index
    wanted = run.setting("trainer.total_training_steps")
    return wanted is not None and len(steps) > 0 and steps[-1] >= wanted


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
