"""Python's collector of cyclic garbage, and malloc, in a process that plays thousands of episodes at once.

A full collection walks through all that is alive, every token of every prompt included, and by Python's own
thresholds their number grows with the turns played: time grows with the square of the episodes in flight.
What an episode makes is freed by its reference count, without any collection, so few will do.
"""

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (100_000, 20, 10)  # of `gc`, while episodes are played
MANY = 256  # episodes after which memory is given back when the last one has ended
_lock = threading.Lock()
_playing = _played = 0
_before = gc.get_threshold()


@contextmanager
def playing() -> Iterator[None]:
    """Held by every episode as long as it is played; the last one to end restores what was before."""
    global _playing, _played, _before
    with _lock:
        if not _playing:
            _before = gc.get_threshold()
            gc.set_threshold(*THRESHOLDS)
        _playing += 1
    try:
        yield
    finally:
        with _lock:
            _playing, _played = _playing - 1, _played + 1
            many = not _playing and _played >= MANY
            if not _playing:
                gc.set_threshold(*_before)
            if many:
                _played = 0
        if many:
            give_back()


def give_back() -> None:
    """Collect, and return to the system what malloc holds for nobody (where it is glibc's).

    By itself malloc keeps most of what the prompts took, and more of it where garbage is collected seldom.
    """
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
