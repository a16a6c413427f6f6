"""Files of arrays: whole or not there at all, and read without executing anything."""

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_multiturn.checkpoints import EARLIER
from verl_multiturn.errors import intact

Arrays = dict[str, npt.NDArray[Any]]


def write_arrays(path: str | Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write one .npz file, which appears when it is complete."""
    part = Path(f"{path}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_arrays(path: str | Path, cure: str = EARLIER) -> Arrays:
    """Read what `write_arrays` wrote; `cure`: what to do where it cannot be.

    Raises:
        ValueError: the file is none of it.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no file that a critic saved: {cure}.")
    with intact(path, cure), np.load(path, allow_pickle=False) as file:
        return dict(file)


def under(part: str, arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """The arrays whose names begin with the part's and a dot, without it."""
    return {name.removeprefix(f"{part}."): x for name, x in arrays.items() if name.startswith(f"{part}.")}
