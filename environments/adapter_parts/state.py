"""A key for the state that a library's object holds in its attributes."""

import hashlib
import random
from collections import deque
from collections.abc import Mapping, Set
from enum import Enum
from typing import Any

import numpy as np

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


def digest(thing: Any, leave_out: Set[str] = frozenset()) -> str:
    """128 bits in hexadecimal, equal for things of equal content, in every process.

    Containers, arrays and the attributes of objects are followed; functions and classes count by
    name, random generators not at all.

    Args:
        thing: anything.
        leave_out: attributes and dictionary keys that are not part of the state, at whatever depth.
    """
    return hashlib.blake2b(repr(_plain(thing, leave_out, ())).encode(), digest_size=16).hexdigest()


def _plain(thing: Any, leave_out: Set[str], above: tuple[int, ...]) -> Any:
    """`thing` in nested tuples of plain values, in an order that hashing does not change."""
    if thing is None or isinstance(thing, bool | int | float | str | bytes):
        return thing
    if id(thing) in above:
        return "cycle"
    above = (*above, id(thing))
    name = f"{type(thing).__module__}.{type(thing).__qualname__}"
    if isinstance(thing, Mapping):
        kept = [(key, value) for key, value in thing.items() if not (_named(key) and key in leave_out)]
        pairs = ((_plain(key, leave_out, above), _plain(value, leave_out, above)) for key, value in kept)
        return "mapping", tuple(sorted(pairs, key=repr))
    if isinstance(thing, Set):
        return "set", tuple(sorted((_plain(item, leave_out, above) for item in thing), key=repr))
    if isinstance(thing, list | tuple | deque):
        return tuple(_plain(item, leave_out, above) for item in thing)
    if isinstance(thing, np.ndarray | np.generic):
        return _plain(thing.tolist(), leave_out, above)
    if isinstance(thing, Enum):
        return name, thing.name
    if isinstance(thing, GENERATORS) or not hasattr(thing, "__dict__") or hasattr(thing, "__qualname__"):
        return name, getattr(thing, "__qualname__", None)
    return name, _plain(vars(thing), leave_out, above)


def _named(key: Any) -> bool:
    return isinstance(key, str)
