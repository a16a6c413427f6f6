"""Where things that are built once are kept: ~/.cache/verl_multiturn, or $VERL_MULTITURN_CACHE."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def cache_root() -> Path:
    """The cache; it need not be there yet."""
    return Path(os.environ.get("VERL_MULTITURN_CACHE") or "~/.cache/verl_multiturn").expanduser()


def cache_folder(*parts: str) -> Path:
    """A folder of the cache, made if need be."""
    folder = cache_root().joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def built(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, a file or a folder, made now if it is not there: whole or not at all, and once.

    Args:
        path: where it belongs; the folder above it exists.
        make: makes it at the path it is given, where nothing is. One process at a time does; the others
            wait, then find it. A killed one frees the lock, and its draft goes when the next one begins.
    """
    if path.exists():
        return path
    with open(path.with_name(f"{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            draft = path.with_name(f"{path.name}.part")
            _remove(draft)
            try:
                make(draft)
                draft.replace(path)
            finally:
                _remove(draft)
    return path


def _remove(draft: Path) -> None:
    if draft.is_dir():
        shutil.rmtree(draft)
    else:
        draft.unlink(missing_ok=True)
