"""A table as text: in the terminal, Markdown, CSV, LaTeX.

First the paper's own layout, a block for each model: "86.7±1.7 | ours 61.2 ± 4.0". Then a row for each
of our cells with everything that it rests on. CSV is the cells alone, one a line, unrounded.
"""

import math
import re
from collections.abc import Sequence
from io import StringIO
from typing import Any

import pandas as pd
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_multiturn.errors import unknown
from verl_multiturn.tables.published import STATISTICS, Published
from verl_multiturn.tables.recorded import NO_MODEL

FORMATS = ("terminal", "markdown", "csv", "latex")
NAMES = {"mean": "mean of last {last}"}


def render(
    table: Published,
    cells: pd.DataFrame,
    pairs: pd.DataFrame | None = None,
    form: str = "terminal",
    statistic: str | None = None,
    last: int = 3,
    runs: bool = False,
    equal: pd.DataFrame | None = None,
    outside: Sequence[str] = (),
) -> str:
    """The table as text.

    Args:
        table: the paper's.
        cells: of `cells.cells`.
        pairs: of `cells.differences`; None: left out.
        form: terminal, markdown, csv or latex.
        statistic: which of ours stands beside the paper's; None: the one that the paper reports, in each row.
        last: how many validations `mean` is over.
        runs: name the runs of each cell (CSV always does).
        equal: of `budget.equal`; None: left out.
        outside: of `budget.outside`, said below it.

    Raises:
        ValueError: an unknown form or statistic.
    """
    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    if statistic is not None and statistic not in STATISTICS:
        raise unknown("statistic", statistic, STATISTICS)
    if form == "csv":
        return str((cells if pairs is None else pairs).to_csv(index=False))
    put = {"terminal": _terminal, "markdown": _markdown, "latex": _latex}[form]
    parts = [put(name, grid) for name, grid in grids(table, cells, statistic).items()]
    if (cells["runs"] != "").any():
        parts.append(put("Our cells", details(cells, last, runs)))
    if equal is not None and len(equal):
        parts.append(put("At equal cost", _equal(equal)))
    if outside:
        parts.append(_as_comment("\n".join(outside), form))
    if pairs is not None and len(pairs):
        parts.append(put("Paired differences", _pairs(pairs)))
    head, foot = (_as_comment(text, form) for text in (_head(table, statistic, last), _foot(table)))
    return "\n\n".join(filter(None, [head, *parts, foot])) + "\n"


def _as_comment(text: str, form: str) -> str:
    return re.sub("^", "% ", text, flags=re.MULTILINE) if form == "latex" and text else text


def grids(table: Published, cells: pd.DataFrame, statistic: str | None) -> dict[str, pd.DataFrame]:
    """Model -> the paper's layout, our `statistic` beside each number; None: what the row reports.

    Policies without a model stand in the block of every model that played their panel.
    """
    found = {}
    names = [column.name for column in table.columns]
    paper = [column.name for column in table.columns if not column.ours]
    of_row = {one.name: one.shown(statistic or one.statistic or table.statistic) for one in table.methods}
    at = {model: list(cells.index[cells["model"] == model]) for model in dict.fromkeys(cells["model"])}
    alone = at.get(NO_MODEL, [])
    beside = {model: _beside(cells, alone, mine) for model, mine in at.items() if model != NO_MODEL}
    rest = [one for one in alone if not any(one in some for some in beside.values())]
    for model, mine in at.items():
        block = cells.loc[rest if model == NO_MODEL else [*mine, *beside[model]]]
        if not len(block):
            continue
        shown = {*block["column"], *(paper if model in table.models else ())}
        known = [name for name in names if name in shown]
        texts = {
            method: {name: _cell(block, method, name, of_row[method]) for name in known}
            for method in sorted(set(block["method"]), key=list(of_row).index)
        }
        found[model] = pd.DataFrame.from_dict(texts, orient="index", columns=known).rename_axis("method")
    return found


def _beside(cells: pd.DataFrame, alone: list[int], mine: list[int]) -> list[int]:
    """Of the cells of policies without a model, those on a panel that the cells `mine` were played on."""
    rows = cells.loc[mine].to_dict("records")
    played = {(row["column"], row[panel]) for row in rows for panel in ("panel", "test_panel")}
    return [one for one in alone if (cells.at[one, "column"], cells.at[one, "test_panel"]) in played]


def details(cells: pd.DataFrame, last: int, runs: bool) -> pd.DataFrame:
    """Our cells, a row each, as text."""
    ours = cells[cells["runs"] != ""]
    found = ours[["model", "method", "column"]].copy()
    for name in STATISTICS:
        count = "n_test" if name == "test" else "n"
        title = NAMES.get(name, name).format(last=last)
        found[title] = [interval_text(row, name) for row in ours.to_dict("records")]
        if name in ("mean", "test"):
            found[count.replace("_", " ")] = [str(n or "") for n in ours[count]]
    more = ["steps", "panel", "test_panel", "commit", "hardware", *(["runs"] if runs else [])]
    found = found.join(ours[more]).rename(columns={"test_panel": "test panel"})
    filled = [name for name in found if (found[name] != "").any() or name in ("commit", "hardware", "panel")]
    return found[filled].reset_index(drop=True)


def interval_text(row: Any, name: str) -> str:
    """Mean and half width of the 95 % interval over seeds; a single seed has none."""
    mean, high = row[name], row[f"{name}_high"]
    if math.isnan(mean):
        return ""
    if math.isinf(mean):
        return "not reached"
    return f"{mean:.1f} ± {high - mean:.1f}" if math.isfinite(high) else f"{mean:.1f}"


def _cell(block: pd.DataFrame, method: str, column: str, statistic: str) -> str:
    rows = block[(block["method"] == method) & (block["column"] == column)].to_dict("records")
    ours = [text for row in rows if (text := interval_text(row, statistic))]
    ours = ours or [f"{text} (test)" for row in rows if (text := interval_text(row, "test"))]
    parts = [rows[0]["paper"]] if rows and rows[0]["paper"] else []
    return " | ".join([*parts, *(f"ours {text}" for text in ours)])


def _pairs(pairs: pd.DataFrame) -> pd.DataFrame:
    shown = pairs[["model", "column", "kind", "method", "against"]].copy()
    shown["difference"] = [f"{value:+.1f}" for value in pairs["difference"]]
    shown["95 %"] = [
        f"{low:+.1f} to {high:+.1f}" for low, high in zip(pairs["low"], pairs["high"], strict=True)
    ]
    shown["p"] = [f"{p:.4f}" for p in pairs["p"]]
    return shown.join(pairs[["tasks", "panel"]].astype(str))


def _equal(equal: pd.DataFrame) -> pd.DataFrame:
    shown = equal[["model", "column", "by"]].copy()
    shown["budget"] = [f"{budget:,.0f}" for budget in equal["budget"]]
    shown["method"] = equal["method"]
    named = equal.rename(columns={"low": "value_low", "high": "value_high"}).to_dict("records")
    shown["value"] = [interval_text(row, "value") for row in named]
    return shown.join(equal[["n", "panel"]].astype(str))


def _head(table: Published, statistic: str | None, last: int) -> str:
    shown = _name(statistic or table.statistic, last)
    others = [one for one in table.methods if one.statistic and statistic is None]
    rows = "".join(f" ({one.name}: {_name(one.statistic or '', last)})" for one in others)
    return (
        f"{table.title}\nPublished: {table.source}. Read from: {table.evidence}.\n"
        f"Ours: {shown}{rows}, mean over seeds ± half of the 95 % interval; nothing where no run is recorded."
    )


def _name(statistic: str, last: int) -> str:
    return NAMES.get(statistic, statistic).format(last=last)


def _foot(table: Published) -> str:
    marks = [f"{sign} {meaning}" for sign, meaning in table.marks.items()]
    return "\n".join([*marks, *table.notes])


def _terminal(title: str, frame: pd.DataFrame) -> str:
    flat = frame.reset_index() if frame.index.name else frame
    shown = Table(title=escape(title), title_justify="left", box=SIMPLE, pad_edge=False)
    for name in flat:
        shown.add_column(escape(str(name)), overflow="fold")  # a cut number would mislead
    for row in flat.itertuples(index=False):
        shown.add_row(*(escape(str(cell)) for cell in row))
    output = StringIO()
    Console(file=output, width=max(Console().width, 60 + 14 * len(flat.columns))).print(shown)
    return "\n".join(line.rstrip() for line in output.getvalue().rstrip().splitlines())


def _markdown(title: str, frame: pd.DataFrame) -> str:
    flat = frame.reset_index() if frame.index.name else frame
    shown = flat.map(lambda cell: str(cell).replace("|", "/"))
    return f"**{title}**\n\n{shown.to_markdown(index=False, disable_numparse=True)}"


def _latex(title: str, frame: pd.DataFrame) -> str:
    flat = (frame.reset_index() if frame.index.name else frame).rename(columns=_escaped)
    return str(flat.map(_escaped).to_latex(index=False, escape=False, caption=_escaped(title)))


def _escaped(cell: object) -> str:
    text = str(cell)
    for sign in "&%$#_{}":
        text = text.replace(sign, f"\\{sign}")
    for sign, command in {"±": r"$\pm$", "≈": r"$\approx$", "°": r"$^\circ$", "<": "$<$", ">": "$>$"}.items():
        text = text.replace(sign, command)
    return text.replace("|", "/")
