"""For libraries that draw from the global generators: let them draw from one of ours instead."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_LOCK = threading.RLock()  # two environments in threads must not draw from each other's source


@contextmanager
def drawing_from(source: random.Random) -> Iterator[None]:
    """Within it the global `random` and `numpy.random` draw from `source`; after it they are as before.

    `source` moves on by what was drawn. One thread at a time may be within it. The global generators
    belong to the process: where other code of it may draw meanwhile, what is drawn is no longer
    reproducible, hence `runs_in = "process"` in environments that rest on this.
    """
    with _LOCK:
        outer = random.getstate(), np.random.get_state()
        np.random.seed(source.getrandbits(32))
        random.setstate(source.getstate())
        try:
            yield
        finally:
            source.setstate(random.getstate())
            random.setstate(outer[0])
            np.random.set_state(outer[1])
