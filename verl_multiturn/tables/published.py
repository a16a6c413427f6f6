"""A paper's table as a data file: its columns, its methods, the numbers it prints and where they come from.

A file published/<name>.yaml:

    title, source, evidence    what it is, which table of which paper, how its numbers were read
    statistic                  what the paper reports, if known: last (default), best, mean or test
    seeds                      of the paper; marks: sign -> meaning; notes: what a reader must know
    columns     [{name, env, metric, task_type | macro, threshold, where, set: [overrides], paper, ours, cpu}]
    methods     [{name, where, trained, start, by, cpu, statistic, models,
                  recipes: {column or environment: recipe}, set: [overrides]}]
    models      {name: what actor_rollout_ref.model.path is set to, or {column: that}, or null, the
                recipe's own}; aliases: other names of them
    why         {method, model or column: why none of our runs can fill it, or {column: why}}
    published   {model: {method: [a value for each column, or null]}}
    suite       of what we run ourselves: common, set, test, limit, and in seconds start, after, step
                (see `tables.wanted`)

A value is a number, as text with a spread and a mark where it has them: "64.8±3.5", "96.0±1.4 ?".
`where` names keys of a run's configuration and what they must be (a list: one of these; "*": set). Methods
of `where: {eval.model: random}`, or expert, are policies without a model, played by `verl-multiturn eval`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import yaml

from verl_multiturn.errors import unknown

FOLDER = Path(__file__).parent / "published"
REACHED = {  # what training took to come to a threshold: the sum over steps of a product of metrics
    "trajectories_to": ["multiturn/trajectories/mean"],
    "turns_to": ["multiturn/trajectories/mean", "multiturn/turns/mean"],
}
SCRIPTED = ("random", "expert")  # policies without a model
METRICS = ("success", "score", "return", *REACHED)
STATISTICS = ("best", "last", "mean", "test")
VALUE = re.compile(
    r"(?P<before>[^\d±-]*)(?P<mean>-?\d+(\.\d+)?)(±(?P<spread>\d+(\.\d+)?))?( (?P<after>\S+))?"
)


@dataclass(frozen=True)
class Value:
    """One published number.

    Attributes:
        text: as printed, mark included.
        mean: the number.
        mark: the sign before or behind it; "" where there is none.
    """

    text: str
    mean: float
    mark: str

    @classmethod
    def of(cls, given: object) -> Self:
        """Read a number or its text.

        Raises:
            ValueError: it is neither.
        """
        found = VALUE.fullmatch(str(given))
        if found is None:
            raise ValueError(f"{given!r} is not a published value, such as 64.8±3.5 or 96.0±1.4 ?")
        mark = (found["before"] or "").strip() or found["after"] or ""
        return cls(str(given), float(found["mean"]), mark)


@dataclass(frozen=True)
class Column:
    """What a column measures.

    Attributes:
        name: its heading.
        env: whose runs can fill it; None: none of ours can.
        metric: success (%), score (mean return x 100), return, or trajectories_to or turns_to `threshold`.
        task_type: only tasks of this type.
        macro: the mean over these types, each with the same weight.
        threshold: the mean return to reach.
        where: settings of the runs that fill it.
        set: overrides of the runs launched for it, beside those of `where`.
        paper: settings without which a run does not stand beside the published numbers.
        ours: the paper has no such column.
        cpu: whether only runs with hardware=cpu can fill it, or only others; None: both.
    """

    name: str
    env: str | None = None
    metric: str = "success"
    task_type: str | None = None
    macro: tuple[str, ...] = ()
    threshold: float | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    set: tuple[str, ...] = ()
    paper: Mapping[str, Any] = field(default_factory=dict)
    ours: bool = False
    cpu: bool | None = None


@dataclass(frozen=True)
class Method:
    """A row: which runs are of this method, and which recipe trains it in which environment.

    Attributes:
        name: its heading.
        where: settings of its runs; None: none of ours is.
        trained: False: evaluations of a model that was not trained here.
        start: validations at step 0 of the table's runs; evaluations of such a model as well.
        by: the method whose recipe brings its runs, too.
        cpu: as of a column.
        statistic: what the paper reports in this row; None: the table's.
        models: of the paper, those that it has the row for; none: all.
        recipes: column or environment -> recipe.
        set: overrides of the recipe.
    """

    name: str
    where: Mapping[str, Any] | None = None
    trained: bool = True
    start: bool = False
    by: str | None = None
    cpu: bool | None = None
    statistic: str | None = None
    models: tuple[str, ...] = ()
    recipes: Mapping[str, str] = field(default_factory=dict)
    set: tuple[str, ...] = ()

    @property
    def scripted(self) -> str:
        """The policy without a model that it is; "": none."""
        name = str((self.where or {}).get("eval.model", ""))
        return name if name in SCRIPTED else ""

    def recipe(self, column: Column) -> str | None:
        """What trains it for a column."""
        return self.recipes.get(column.name) or self.recipes.get(str(column.env))

    def shown(self, statistic: str) -> str:
        """Which of our numbers stands in its row, where the table shows `statistic`."""
        return statistic if self.trained or self.start else "test"


@dataclass(frozen=True)
class Published:
    """A table; attributes as in the file, `published` as (model, method, column) -> Value."""

    name: str
    title: str
    source: str
    evidence: str
    columns: tuple[Column, ...]
    methods: tuple[Method, ...]
    models: Mapping[str, str | Mapping[str, str] | None] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[tuple[str, str, str], Value] = field(default_factory=dict)
    statistic: str = "last"
    seeds: int = 3
    marks: Mapping[str, str] = field(default_factory=dict)
    why: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    suite: Mapping[str, Any] = field(default_factory=dict)


def list_tables() -> dict[str, str]:
    """Name -> title of every table."""
    return {path.stem: load_table(path.stem).title for path in sorted(FOLDER.glob("*.yaml"))}


def load_table(name: str) -> Published:
    """A table by its name, or from a file of the same form.

    Raises:
        ValueError: no such table; a key, value, column or method in it is wrong.
    """
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise unknown("table", name, sorted(file.stem for file in FOLDER.glob("*.yaml")))
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    where = f"{path.name}:"
    columns = tuple(_made(Column, one, f"{where} columns") for one in data.pop("columns", ()))
    methods = tuple(_made(Method, one, f"{where} methods") for one in data.pop("methods", ()))
    for column in columns:
        if column.metric not in METRICS:
            raise unknown(f"metric of column {column.name!r} in {path.name}", column.metric, METRICS)
    numbers = {
        (model, method, column): value
        for model, rows in data.pop("published", {}).items()
        for method, row in rows.items()
        for column, value in _row(f"{where} {model}, {method}", row, columns).items()
    }
    table: Published = _made(
        Published,
        data | {"name": path.stem, "columns": columns, "methods": methods, "published": numbers},
        where,
    )
    for one in (table.statistic, *filter(None, (method.statistic for method in methods))):
        if one not in STATISTICS:
            raise unknown(f"statistic in {path.name}", one, STATISTICS)
    _check_names(table, path.name)
    for model, method, column in numbers:
        for kind, given, valid in (
            ("model", model, table.models),
            ("method", method, [one.name for one in methods]),
        ):
            if given not in valid:
                raise unknown(f"{kind} in {path.name}", given, valid)
        if (mark := numbers[model, method, column].mark) and mark not in table.marks:
            raise unknown(f"mark of {model}, {method}, {column} in {path.name}", mark, table.marks)
    return table


def _check_names(table: Published, file: str) -> None:
    """Refuse names that no column, method or model has: they would be passed over in silence."""
    methods, columns = ([one.name for one in many] for many in (table.methods, table.columns))
    places = [*columns, *(column.env for column in table.columns if column.env)]
    for key, given in table.why.items():
        for name in given if isinstance(given, Mapping) else ():
            if name not in columns:
                raise unknown(f"column of why {key!r} in {file}", name, columns)
        if key not in (valid := [*methods, *columns, *table.models]):
            raise unknown(f"name of why in {file}", key, valid)
    for method in table.methods:
        for kind, names, valid in (
            ("recipes", method.recipes, places),
            ("models", method.models, [*table.models]),
            ("by", filter(None, [method.by]), methods),
        ):
            for name in names:
                if name not in valid:
                    raise unknown(f"name of {kind} of method {method.name!r} in {file}", name, valid)


def _made(kind: type, given: Mapping[str, Any], where: str) -> Any:
    names = [one.name for one in fields(kind)]
    for key in given:
        if key not in names:
            raise unknown(f"key in {where}", key, names)
    lists = {key: tuple(value) for key, value in given.items() if isinstance(value, list)}
    try:
        return kind(**{**given, **lists})
    except TypeError as error:
        raise ValueError(f"{where} {error}") from None


def _row(where: str, row: Sequence[Any], columns: Sequence[Column]) -> dict[str, Value]:
    if len(row) != len(columns):
        raise ValueError(f"{where} has {len(row)} values, the table {len(columns)} columns")
    pairs = zip(columns, row, strict=True)
    return {column.name: Value.of(value) for column, value in pairs if value is not None}
