"""The folder of a fit: who may write to it, and what becomes of what a stopped fit left there.

unfinished       there as long as the fit has not ended: the same command starts it over
reference.npz    log-probabilities of the reference, kept when it starts over
"""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED, REFERENCE = "unfinished", "reference.npz"


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds something else than an unfinished fit.

    Raises:
        ValueError: it does.
    """
    if not folder.exists() or (folder / UNFINISHED).exists():
        return
    if not folder.is_dir() or any(path.name != REFERENCE for path in folder.iterdir()):
        raise ValueError(f"{folder} holds something: nothing is overwritten, choose another --out")


def begin(folder: Path) -> None:
    """Mark a folder as that of a fit that has not ended."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / UNFINISHED).touch()


@contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """Hold a folder while its fit runs: from the beginning, and with the mark until the end.

    Raises:
        ValueError: another process is fitting there.
    """
    begin(folder)
    with (folder / UNFINISHED).open("w") as mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is fitting in {folder}: choose another --out") from None
        for path in folder.iterdir():
            if path.name not in (UNFINISHED, REFERENCE):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield
        (folder / UNFINISHED).unlink()
