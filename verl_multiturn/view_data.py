"""What the page of a run is made of: recorded trajectories, packed small, one step at a time.

A step becomes two JSON texts, with strings held once and referred to by number: what is read, and
the tokens (ids and log-probs), which a large page leaves out. A record may lack whatever is not
needed to place a turn (older runs, other writers); such a field is null.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import zstandard

from verl_multiturn import run_files
from verl_multiturn.run_files import Record

# (name, kind): text and texts are numbers of strings; the page reads rows by these same lists
TRAJECTORY_FIELDS = (
    ("group", "text"), ("trajectory", "plain"), ("return", "number"), ("env", "text"), ("task", "text"),
    ("task_type", "text"), ("panel", "text"), ("instruction", "text"), ("success", "flag"),
    ("terminated", "flag"), ("truncated", "flag"), ("truncation", "text"), ("seconds", "number"),
    ("seed", "text"), ("dynamics_seed", "text"), ("trained", "flag"), ("vine", "plain"),
)  # fmt: skip
TURN_FIELDS = (
    ("index", "plain"), ("reward", "number"), ("observation", "text"), ("prompt", "text"), ("text", "text"),
    ("actions", "texts"), ("valid", "flag"), ("anchor", "code"), ("value", "number"), ("advantage", "number"),
    ("row", "plain"), ("span", "plain"), ("generate_seconds", "number"), ("env_seconds", "number"),
    ("steps", "plain"), ("extra", "plain"), ("scores", "plain"),
)  # fmt: skip
TurnScores = Sequence[Sequence[float | None]]  # of a trajectory: turns x algorithms
# (split, records) -> for each trajectory its advantages, or None; and why an algorithm has none here
Score = Callable[[str, list[Record]], tuple[Sequence[TurnScores | None], dict[str, str]]]
NEEDED = ("group", "trajectory", "return", "turns")
NEEDED_OF_TURN = ("index", "reward")
_TOKENS = ("prompt_ids", "action_ids", "log_probs")
_KNOWN = {name for name, _ in TURN_FIELDS} | {*_TOKENS}
# The closing tag of the script that holds the data, or a line end of old JavaScript, must not occur in it.
_ESCAPES = ((b"<", b"\\u003c"), (b">", b"\\u003e"), (b"&", b"\\u0026"),
            ("\u2028".encode(), b"\\u2028"), ("\u2029".encode(), b"\\u2029"))  # fmt: skip


class Step(NamedTuple):
    """One step of one split, packed."""

    split: str
    step: int
    size: int  # trajectories
    data: bytes  # JSON
    tokens: bytes  # JSON; empty where no trajectory has any
    token_ids: frozenset[int]
    successes: list[bool | None]
    returns: list[float]
    valid: list[float]  # share of valid turns, of the trajectories that say


def embeddable(thing: Any) -> bytes:
    """JSON that may stand inside an HTML script element, whatever its strings contain."""
    data = orjson.dumps(thing, default=str, option=orjson.OPT_NON_STR_KEYS)
    for raw, escaped in _ESCAPES:  # none of them can occur outside a string
        data = data.replace(raw, escaped)
    return data


def pack_step(folder: Path, split: str, step: int, tokens: bool = True, score: Score | None = None) -> Step:
    """Read and pack one step, with or without its tokens, with the advantages that `score` finds.

    Raises:
        ValueError: the file is cut off or no JSON, or a trajectory lacks what places its turns.
    """
    path = folder / "trajectories" / split / f"{step}{run_files.SUFFIX}"
    records = _read(path)
    for line, record in enumerate(records, start=1):
        if problem := _problem(record):
            raise ValueError(f"{path}, line {line}: {problem}; it is not a trajectory that can be shown")
    main = run_files.by_panel(records)[""]  # the curves are of the run's own panel
    packer = _Packer()
    nothing: list[TurnScores | None] = [None] * len(records)
    scores, impossible = score(split, records) if score else (nothing, {})
    rows = [packer.trajectory(record, found) for record, found in zip(records, scores, strict=True)]
    packed = [[packer.tokens(turn) for turn in record["turns"]] for record in records if tokens]
    some = any(part is not None for turns in packed for turn in turns for part in turn)
    return Step(
        split=split,
        step=step,
        size=len(records),
        data=embeddable({"strings": list(packer.strings), "trajectories": rows, "impossible": impossible}),
        tokens=embeddable({"strings": list(packer.ids), "turns": packed}) if some else b"",
        token_ids=frozenset(packer.used),
        successes=[_flag(record.get("success")) for record in main],
        returns=[float(record["return"]) for record in main],
        valid=list(_valid_shares(main)),
    )


class _Packer:
    """Numbers the strings, the anchors and the lists of token ids of one step."""

    def __init__(self) -> None:
        self.strings: dict[str, int] = {}
        self.ids: dict[str, int] = {}
        self.used: set[int] = set()  # token ids
        self._anchors: dict[tuple[Any, Any], int] = {}
        self._pack: dict[str, Callable[[Any], Any]] = {
            "text": self._text, "texts": self._texts, "number": _short, "flag": _flag,
            "plain": lambda value: value, "code": lambda value: value,
        }  # fmt: skip

    def trajectory(self, record: Record, scores: TurnScores | None) -> list[Any]:
        """Its fields in order, and its turns."""
        each: Sequence[Sequence[float | None] | None] = scores or [None] * len(record["turns"])
        row = [self._pack[kind](record.get(name)) for name, kind in TRAJECTORY_FIELDS]
        turns = zip(record["turns"], each, strict=True)
        return [*row, [self._turn(record["group"], turn, found) for turn, found in turns]]

    def tokens(self, turn: Record) -> list[Any]:
        """Number of its prompt_ids, number of its action_ids, its log-probs."""
        lists = [turn.get(name) for name in _TOKENS]
        self.used.update(*(ids for ids in lists[:2] if ids is not None))
        log_probs = None if lists[2] is None else [one and round(one, 4) for one in lists[2]]
        # as one text, a list that occurs again costs a number: in turn rows prompts repeat much
        numbers = [ids if ids is None else self._id(self.ids, " ".join(map(str, ids))) for ids in lists[:2]]
        return [*numbers, log_probs]

    def _turn(self, group: str, turn: Record, scores: Sequence[float | None] | None) -> list[Any]:
        anchor = turn.get("anchor")
        code = None if anchor is None else self._anchors.setdefault((group, anchor), len(self._anchors))
        extra = {k: v for k, v in turn.items() if k not in _KNOWN and v and isinstance(v, str | int | float)}
        found = None if scores is None else [_short(one) for one in scores]
        shown = {**turn, "anchor": code, "extra": extra or None, "scores": found}
        return [self._pack[kind](shown.get(name)) for name, kind in TURN_FIELDS]

    def _text(self, value: Any) -> int | None:
        if value is None:
            return None
        # seeds are texts as well: JavaScript rounds integers of more than 53 bits
        return self._id(self.strings, value if isinstance(value, str) else orjson.dumps(value).decode())

    def _texts(self, values: Any) -> list[int | None] | None:
        if values is None:
            return None
        return [self._text(value) for value in (values if isinstance(values, list) else [values])]

    @staticmethod
    def _id(table: dict[str, int], text: str) -> int:
        return table.setdefault(text, len(table))


def _read(path: Path) -> list[Record]:
    unpacker = zstandard.ZstdDecompressor().decompressobj()
    try:
        data = unpacker.decompress(path.read_bytes())
        if not unpacker.eof:  # the reader of `Run` would take what is there for the whole
            raise ValueError("it is cut off")
        return [orjson.loads(line) for line in data.splitlines()]
    except (zstandard.ZstdError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _problem(record: Any) -> str:
    """What is wrong with a trajectory, or nothing."""
    if not isinstance(record, dict):
        return "it is no JSON object"
    if missing := [name for name in NEEDED if record.get(name) is None]:
        return f"the trajectory lacks {' and '.join(missing)}"
    if not _is_number(record["return"]):
        return "its return is not a number"
    if not isinstance(record["group"], str | int) or not isinstance(record["trajectory"], str | int):
        return "its group or trajectory is neither a number nor a text"
    if not isinstance(record["turns"], list):
        return "its turns are no list"
    for t, turn in enumerate(record["turns"]):
        if not isinstance(turn, dict) or any(not _is_number(turn.get(name)) for name in NEEDED_OF_TURN):
            return f"turn {t} lacks {' or '.join(NEEDED_OF_TURN)}, or they are no numbers"
        if problem := next((p for name in _CHECKS if (p := _wrong(turn, name))), ""):
            return f"turn {t}: {problem}"
    return ""


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int, float, type(None)}


def _steps(value: Any) -> bool:
    """Whether these are the steps of an utterance."""
    return isinstance(value, list) and all(
        isinstance(step, dict)
        and _integers(step.get("span"))
        and all(step.get(name) is None or _is_number(step[name]) for name in ("value", "advantage"))
        for step in value
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _integers(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "value": _is_number, "advantage": _is_number, "generate_seconds": _is_number, "env_seconds": _is_number,
    "anchor": lambda value: isinstance(value, str | int), "prompt_ids": _integers, "action_ids": _integers,
    "log_probs": _numbers, "steps": _steps,
}  # fmt: skip


def _wrong(turn: Record, name: str) -> str:
    value = turn.get(name)
    return "" if value is None or _CHECKS[name](value) else f"its {name} is not what it should be"


def _short(value: Any) -> float | None:
    """Six digits: what is read in a page, not what is computed with."""
    return float(f"{value:.6g}") if _is_number(value) else None


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)


def _valid_shares(records: Iterable[Record]) -> Iterable[float]:
    for record in records:
        said = [bool(turn["valid"]) for turn in record["turns"] if turn.get("valid") is not None]
        if said:
            yield sum(said) / len(said)
