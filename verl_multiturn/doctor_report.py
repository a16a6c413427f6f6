"""What the doctor says: lines of ok, warn and FAIL, each with what to do; and a sample with its mask."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

Status = Literal["ok", "warn", "FAIL"]
COLOURS: dict[Status, str] = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}
SHOWN_ROWS, SHOWN_TEXT = 3, 1200  # rows of a sample that are printed; characters of a prompt
PROMPT, TRAINED, GLUE = "dim", "bold green", "yellow"


@dataclass(frozen=True)
class Line:
    """One finding."""

    part: str  # heading it stands under
    status: Status
    name: str
    text: str  # what was found; for warn and FAIL also what to do


@dataclass
class Played:
    """Rows of the episode, ready to be shown."""

    rows: list[Any]  # verl's AgentLoopOutput
    tokens: Any
    stand_in: bool  # the tokenizer is not the model's

    def segments(self, row: Any) -> list[tuple[str, str]]:
        """(style, text) of a row, in order: prompt, then trained and untrained stretches."""
        pieces = [(PROMPT, row.prompt_ids)]
        marked = zip(row.response_mask, row.response_ids, strict=True)
        for mask, group in groupby(marked, key=lambda pair: pair[0]):
            pieces.append((TRAINED if mask else GLUE, [token for _, token in group]))
        return [(style, str(self.tokens.decode(ids, skip_special_tokens=False))) for style, ids in pieces]

    def as_dict(self) -> dict[str, Any]:
        """Rows as plain data."""
        return {
            "stand_in_tokenizer": self.stand_in,
            "rows": [
                {
                    "prompt_ids": list(row.prompt_ids),
                    "response_ids": list(row.response_ids),
                    "response_mask": list(row.response_mask),
                    "turns": [
                        {name: turn[name] for name in ("index", "span", "glue", "reward", "valid", "text")}
                        for turn in row.extra_fields["turns"]
                    ],
                }
                for row in self.rows
            ],
        }

    def show(self, console: Console) -> None:
        """Print the rows in colour, and where each turn stands in them."""
        legend = Text.assemble("\n  rows: ", ("prompt", PROMPT), " ", ("trained", TRAINED), " ")
        console.print(Text.assemble(legend, ("untrained part of the response", GLUE)))
        for number, row in enumerate(self.rows[:SHOWN_ROWS]):
            text = Text().append(f"  row {number}\n", "bold")
            for style, piece in self.segments(row):
                cut = style == PROMPT and len(piece) > SHOWN_TEXT
                half = SHOWN_TEXT // 2
                text.append(f"{piece[:half]}\n[…]\n{piece[-half:]}" if cut else piece, style)
            console.print(text, soft_wrap=True)
        if len(self.rows) > SHOWN_ROWS:
            console.print(f"  … {len(self.rows) - SHOWN_ROWS} more rows")
        console.print(self._table())

    def _table(self) -> Table:
        table = Table(box=SIMPLE, pad_edge=False)
        for name in ("turn", "row", "prompt tokens", "glue", "trained span", "reward", "valid", "utterance"):
            table.add_column(name, justify="left" if name == "utterance" else "right")
        for number, row in enumerate(self.rows):
            for turn in row.extra_fields["turns"]:
                span = "{}..{}".format(*turn["span"])
                cells = [
                    turn["index"],
                    number,
                    len(row.prompt_ids),
                    turn["glue"],
                    span,
                    f"{turn['reward']:g}",
                ]
                table.add_row(*map(str, cells), "yes" if turn["valid"] else "no", Text(turn["text"]))
        return table


@dataclass
class Report:
    """All findings, and the sample that was played, if one was."""

    lines: list[Line] = field(default_factory=list)
    sample: Played | None = None

    @property
    def ok(self) -> bool:
        """Nothing failed."""
        return not any(line.status == "FAIL" for line in self.lines)

    def extend(self, lines: Iterable[Line]) -> None:
        """Take more findings."""
        self.lines += lines

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for --json."""
        sample = None if self.sample is None else self.sample.as_dict()
        return {"ok": self.ok, "lines": [asdict(line) for line in self.lines], "sample": sample}

    def show(self, console: Console) -> None:
        """Print it under headings, the sample after its findings, the verdict last."""
        part = ""
        for line in self.lines:
            if line.part != part:
                part = line.part
                console.print(Text(f"\n{part}", style="bold"))
            console.print(_row(line), soft_wrap=True)
        if self.sample is not None:
            self.sample.show(console)
        failed = sum(line.status == "FAIL" for line in self.lines)
        warned = sum(line.status == "warn" for line in self.lines)
        console.print(Text(f"\n{failed} FAIL, {warned} warn", style=COLOURS["ok" if self.ok else "FAIL"]))


def _row(line: Line) -> Text:
    return Text.assemble(
        (f"  {line.status:<5}", COLOURS[line.status]), (f"{line.name:<17} ", "bold"), line.text
    )
