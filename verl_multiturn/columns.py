"""From what a caller hands over (lists, arrays, ids of any kind) to typed one-dimensional arrays.

Every function refuses what it cannot read with one sentence that names the field.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Objects = npt.NDArray[np.object_]
Column = Sequence[Any] | npt.NDArray[Any]


def keys(name: str, values: Column, n: int | None = None) -> Objects:
    """Ids or texts of any hashable kind, tuples included. -> (N,) of objects."""
    if not isinstance(values, list | tuple | range):
        values = np.asarray(values)
        if values.ndim != 1:
            raise ValueError(f"{name} must be a list or a one-dimensional array, one entry a turn.")
        values = values.tolist()  # Python scalars: 0-d arrays and tensors hash by identity
    _check_length(name, len(values), n)
    # not np.asarray: it would unpack tuples into a second dimension
    return np.fromiter(values, dtype=object, count=len(values))


def floats(name: str, values: Column | None, n: int) -> Floats:
    """Numbers; None, whole or for one turn, counts as nan. -> (N,) float64, a copy."""
    if values is None:
        return np.full(n, np.nan)
    numbers = _numbers(name, values, n, "biufO")
    try:
        return numbers.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must hold numbers: {error}.") from error


def ints(name: str, values: Column, n: int) -> Ints:
    """Whole numbers. -> (N,) int64, a copy."""
    numbers = _numbers(name, values, n, "biuf")
    if not np.all(np.isfinite(numbers)) or np.any(numbers != np.floor(numbers)):
        raise ValueError(f"{name} must hold whole numbers.")
    return numbers.astype(np.int64)


def flags(name: str, values: Column, n: int) -> Bools:
    """Booleans, or 0 and 1; the string "False" is not one. -> (N,) bool, a copy."""
    numbers = _numbers(name, values, n, "biuf")
    if np.any((numbers != 0) & (numbers != 1)):
        raise ValueError(f"{name} must hold booleans.")
    return numbers.astype(np.bool_)


def factorise(name: str, values: Objects) -> Ints:
    """Integer codes by first appearance: equal ids, equal code. -> (N,)."""
    table: dict[Any, int] = {}
    try:
        codes: Iterable[int] = [table.setdefault(value, len(table)) for value in values]
    except TypeError as error:
        raise ValueError(f"{name} must be hashable (a tuple, not a list): {error}.") from error
    return np.fromiter(codes, np.int64, len(values))


def joint(outer: Ints, inner: Ints) -> Ints:
    """Codes 0 … K-1 of the pairs (outer, inner). -> (N,)."""
    if not len(outer):
        return outer
    pairs = outer * (inner.max() + 1) + inner
    return np.unique(pairs, return_inverse=True)[1].astype(np.int64)


def ends(
    index: Ints, trajectory_code: Ints, terminated: Column | None, truncated: Column | None
) -> tuple[Bools, Bools]:
    """Both flags; a missing one follows from the other on last turns, else all are terminal."""
    n = len(index)
    last = index == np.bincount(trajectory_code)[trajectory_code] - 1
    ended = None if terminated is None else flags("terminated", terminated, n)
    cut = None if truncated is None else flags("truncated", truncated, n)
    if ended is None:
        ended = last if cut is None else last & ~cut
    return ended, last & ~ended if cut is None else cut


def texts(anchors: Objects | None, anchor_text: Column | None, n: int) -> Objects | None:
    """The texts given, else the anchors if all of them are strings."""
    if anchor_text is not None:
        return keys("anchor_text", anchor_text, n)
    strings = anchors is not None and all(isinstance(anchor, str) for anchor in anchors)
    return anchors if strings else None


def anchor_codes(group_code: Ints, anchors: Objects | None) -> Ints:
    """Codes of the pairs (group, anchor); an anchor that is None equals no other. -> (N,)."""
    if anchors is None:
        return np.arange(len(group_code))
    codes = factorise("anchor", anchors)
    missing = np.fromiter((anchor is None for anchor in anchors), bool, len(anchors))
    return joint(group_code, np.where(missing, len(anchors) + np.arange(len(anchors)), codes))


def _numbers(name: str, values: Column, n: int, kinds: str) -> npt.NDArray[Any]:
    """The column as an array whose dtype is one of `kinds` (NumPy's letters), of length n."""
    try:
        numbers = np.asarray(values)
    except ValueError as error:  # ragged lists
        raise ValueError(f"{name} must be a list or a one-dimensional array.") from error
    if numbers.ndim != 1:
        raise ValueError(f"{name} must be a list or a one-dimensional array, one entry a turn.")
    _check_length(name, len(numbers), n)
    if n and numbers.dtype.kind not in kinds:
        raise ValueError(f"{name} must hold numbers or booleans, not {numbers.dtype}.")
    return numbers


def _check_length(name: str, length: int, n: int | None) -> None:
    if n is not None and length != n:
        raise ValueError(f"{name} has {length} entries, but group has {n}.")
