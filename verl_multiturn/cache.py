"""Where things that are built once are kept: ~/.cache/verl_multiturn, or $VERL_MULTITURN_CACHE."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder(*parts: str) -> Path:
    """A folder of the cache, made if need be."""
    root = Path(os.environ.get("VERL_MULTITURN_CACHE") or "~/.cache/verl_multiturn").expanduser()
    folder = root.joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time builds `path`; the others wait, then find it. A killed builder frees the lock."""
    with open(path.with_name(f"{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
