"""The empty cells of a table that no command fills, each with the reason."""

from collections import defaultdict
from collections.abc import Iterable

from verl_multiturn.tables.published import Column, Method, Published
from verl_multiturn.tables.recorded import NO_MODEL, Recorded
from verl_multiturn.tables.wanted import OWN, Slot, Wanted, models, obstacle, of_model, slots


def lacking(table: Published, runs: Iterable[Recorded], wanted: Wanted) -> list[str]:
    """A line for each row and reason: method, columns, models, and why none of our commands fills them."""
    runs = [run for run in runs if run.outcomes]
    found: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for model in models(table, wanted):
        made = slots(table, model, wanted)
        for method in table.methods:
            if not _has_row(table, model, method):
                continue
            served = {column.name for slot in made if _brings(slot, method) for column in slot.columns}
            for column in table.columns:
                mine = [run for run in runs if of_model(table, run, model) and run.of(method, column)]
                if _has_column(table, model, column) and not mine and column.name not in served:
                    why = _reason(table, model, method, column, wanted)
                    found[method.name, why][column.name].append(model)
    lines = []
    for (method_, why), columns in found.items():
        same: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for column_, of in columns.items():
            same[tuple(of)].append(column_)
        lines += [f"{method_}: {', '.join(some)} ({', '.join(of)}): {why}" for of, some in same.items()]
    return lines


def _has_row(table: Published, model: str, method: Method) -> bool:
    """Whether a model's block has a row of the method that our runs, or none, could fill."""
    if bool(method.scripted) != (model == NO_MODEL):
        return False
    if model in table.models and method.models and model not in method.models:
        return False
    return model != OWN or method.where is not None or method.start


def _has_column(table: Published, model: str, column: Column) -> bool:
    if model in table.models:
        return not column.ours
    return model != OWN or column.ours or not table.models


def _brings(slot: Slot, method: Method) -> bool:
    return slot.method.name in (method.name, method.by) or (method.start and slot.method.trained)


def _reason(table: Published, model: str, method: Method, column: Column, wanted: Wanted) -> str:
    by = next((one for one in table.methods if one.name == method.by), method)
    why = obstacle(table, model, method if method.recipe(column) else by, column, wanted)
    return "no run of this table starts there" if method.start and why == "no recipe makes it" else why
