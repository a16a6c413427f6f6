"""What a user names in an adapter's keywords: an object by its path, a table of rows."""

import importlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_multiturn.env import Seed
from verl_multiturn.errors import intact, unknown
from verl_multiturn.load import run_file

Row = Mapping[str, Any]


def find(path: str, kind: str) -> Any:
    """The object that "pkg.module:name" or "path/to/file.py:name" means.

    Args:
        path: as above.
        kind: what it stands for, for the sentence of an error.

    Raises:
        ValueError: no such module or file, or nothing of that name in it.
    """
    target, _, name = path.rpartition(":")
    if not target or not name:
        raise ValueError(f"{kind} {path!r} must be given as pkg.module:name or path/to/file.py:name.")
    module = load(target, kind)
    if not hasattr(module, name):
        own = [
            key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        ]
        raise unknown(f"{kind} of {target}", name, own)
    return getattr(module, name)


def load(target: str, kind: str) -> Any:
    """The module that "pkg.module" or "path/to/file.py" means; a file is run once in a process.

    Raises:
        ValueError: there is none.
    """
    if target.endswith(".py"):
        path = Path(target).expanduser().resolve()
        if not path.is_file():
            raise ValueError(f"{kind}: no file {target!r}.")
        return run_file(path, target)
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name and (target == error.name or target.startswith(f"{error.name}.")):
            raise ValueError(f"{kind}: no module {target!r} on sys.path.") from None
        raise


class Rows:
    """A table of tasks. A pickle of it holds the path alone, where it came from a file.

    Args:
        source: a .jsonl, .json (a list) or .parquet file, or the rows themselves.

    Raises:
        ValueError: no such file, not such a file, or no rows.
    """

    def __init__(self, source: str | Sequence[Row]) -> None:
        self.source = source
        self.all = _read(source) if isinstance(source, str) else list(source)
        if not self.all:
            raise ValueError("there are no rows: each task is one.")

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self.source,)

    def __len__(self) -> int:
        return len(self.all)

    def of(self, seed: Seed) -> Row:
        """The row of a task: number `seed` modulo their count, or the one whose "id" is that text.

        Raises:
            ValueError: no row has this id.
        """
        if isinstance(seed, int):
            return self.all[seed % len(self.all)]
        for row in self.all:
            if row.get("id") == seed:
                return row
        raise unknown("id of a row", seed, [row["id"] for row in self.all[:20] if "id" in row])


@lru_cache(maxsize=8)
def _read(path: str) -> list[Row]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"no file of rows {path!r}.")
    if file.suffix == ".parquet":
        import pandas as pd

        with intact(path, "download or write it again"):
            text = pd.read_parquet(file).to_json(orient="records")
        found: list[Row] = json.loads(text)
        return found
    if file.suffix not in (".jsonl", ".json"):
        raise unknown("kind of file for rows", file.suffix, [".jsonl", ".json", ".parquet"])
    try:
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines() if file.suffix == ".jsonl" else None
        found = json.loads(text) if lines is None else [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not {file.suffix[1:].upper()}: {error}.") from None
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ValueError(f"{path} holds something else than a list of rows (names with values).")
    return found


def split_prompt(prompt: str | Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """System text and the rest of a prompt, given as a text or as chat messages."""
    if isinstance(prompt, str):
        return "", prompt
    parts = [(message["role"] == "system", str(message["content"])) for message in prompt]
    return tuple("\n\n".join(t for is_system, t in parts if is_system is part) for part in (True, False))  # type: ignore[return-value]
