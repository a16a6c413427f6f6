"""File handling of recorded runs: atomic writes, lines of JSON, taking back undone steps."""

import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import zstandard

from verl_multiturn.provenance import ABOUT

Record = dict[str, Any]
SUFFIX = ".jsonl.zst"
OWN_SPLITS = ("train", "val")  # written by training itself, so taken back when it resumes earlier
SECRET = re.compile(
    r"(api|private)_?key|passw|secret|(auth|access|bearer)_?token|credential|(^|[_-])token$|^authorization$",
    re.IGNORECASE,
)
LOGIN = re.compile(r"(\w+://)[^\s/@]*:[^\s/@]+@")
HIDDEN = "(not recorded)"
CHUNK = 1 << 14  # bytes read at once: unpacked they may be a thousand times as many
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE


def by_panel(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by the name of their panel; "" is the split's own, which always stands first."""
    found: dict[str, list[Record]] = {"": []}
    for record in records:
        name = record.get("panel")
        found.setdefault("" if name in (None, record.get("split")) else name, []).append(record)
    return found


def json_line(record: Record) -> bytes:
    """One line of JSON; numpy types become plain ones, numbers that are not finite become null."""
    return orjson.dumps(record, default=_plain, option=_OPTIONS)


def _plain(value: object) -> object:
    # orjson takes contiguous arrays of common types itself; what it refuses comes here.
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def lines(path: Path) -> Iterator[Record]:
    """The objects of a .jsonl file; a last line cut off by a killed process is skipped."""
    data = path.read_bytes().splitlines()
    for number, line in enumerate(data, start=1):
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            if number < len(data):
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            warnings.warn(f"{path}: skipped the last line, it is cut off", stacklevel=2)


def records(path: Path) -> Iterator[Record]:
    """The objects of a .jsonl.zst file, one after another: memory does not grow with the file.

    Raises:
        ValueError: it is damaged, or ends too early.
    """
    unpack, rest = zstandard.ZstdDecompressor().decompressobj(), b""
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                *whole, rest = (rest + unpack.decompress(chunk)).split(b"\n")
                yield from map(orjson.loads, whole)
    except (zstandard.ZstdError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not unpack.eof or rest:
        raise ValueError(f"{path} is damaged: it ends too early")


def write_atomically(path: Path, chunks: Iterable[bytes], compress: bool = False) -> None:
    """Write a file that appears under its name only when it is complete and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            if compress:
                with zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(
                    file, closefd=False
                ) as stream:
                    for chunk in chunks:
                        stream.write(chunk)
            else:
                file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # a failed write gives its space back


def trajectory_files(folder: Path, split: str = "*") -> list[Path]:
    """The recorded trajectory files of a run."""
    return list((folder / "trajectories").glob(f"{split}/*{SUFFIX}"))


def step_of(path: Path) -> int:
    """The step in a trajectory file's name."""
    return int(path.name.removesuffix(SUFFIX))


def missing_parts(folder: Path) -> list[str]:
    """What `folder` lacks to be a recorded run."""
    return [name for name in ("metrics.jsonl", "trajectories") if not (folder / name).exists()]


def runs_near(folder: Path) -> list[Path]:
    """Recorded runs up to two levels inside `folder`; where there are none, those beside it."""
    for places in ([*folder.glob("*"), *folder.glob("*/*")], folder.absolute().parent.glob("*")):
        if runs := [path for path in places if path.is_dir() and not missing_parts(path)]:
            return sorted(runs)
    return []


def without_secrets(config: Any) -> Any:
    """A nested configuration without what is not to be read later: keys, passwords, environment variables."""
    if isinstance(config, dict):
        return {
            name: HIDDEN
            if value and (SECRET.search(str(name)) or (isinstance(value, dict) and name == "env_vars"))
            else without_secrets(value)
            for name, value in config.items()
        }
    if isinstance(config, list):
        return [without_secrets(one) for one in config]
    # user:password@ in an address
    return LOGIN.sub(rf"\1{HIDDEN}@", config) if isinstance(config, str) else config


def write_config(folder: Path, text: str) -> None:
    """Write config.yaml, or config.<n>.yaml where a resumed run changed the configuration."""
    path, last = folder / "config.yaml", b""
    for n in count(1):
        if not path.exists():
            break
        path, last = folder / f"config.{n}.yaml", path.read_bytes()
    if last != text.encode():
        write_atomically(path, [text.encode()])


def take_back(folder: Path, step: int | None) -> None:
    """Move what was recorded after `step` to discarded/<time>/ (None: all that training wrote)."""
    last = -1 if step is None else step
    discarded = folder / "discarded" / datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
    for leftover in (folder / "trajectories").glob("*/*.tmp"):
        leftover.unlink()
    moves = [path for split in OWN_SPLITS for path in trajectory_files(folder, split) if step_of(path) > last]
    moves += folder.glob("config*.yaml") if step is None else []
    for path in moves:
        target = discarded / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)
    for name in ("metrics.jsonl", "failures.jsonl", ABOUT):
        if (folder / name).exists():
            _take_back_lines(folder / name, last, discarded / name)


def _step_in(line: bytes) -> float:
    """The step of a line; a damaged one counts as later than all, so that it moves away."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _take_back_lines(path: Path, last: int, discarded: Path) -> None:
    kept: list[bytes] = []
    late: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        # Without its newline a line was cut off by a kill: the next line would be joined to it.
        (kept if line.endswith(b"\n") and _step_in(line) <= last else late).append(line)
    if late:  # first the copy, then the shortened file: a kill in between loses nothing
        write_atomically(discarded, late)
        write_atomically(path, kept)
