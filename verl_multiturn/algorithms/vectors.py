"""What the functions without a TurnBatch read: named lists or arrays of one length, checked."""

from typing import Any

import numpy as np
import numpy.typing as npt

from verl_multiturn.columns import Floats


def vectors(**named: npt.ArrayLike) -> tuple[Floats, ...]:
    """Each input as one dimension of finite float64, all of one length N >= 1. -> (N,), (N,), ...

    Raises:
        ValueError: one sentence that names the input: not numbers, not one-dimensional, another
            length than the first, empty, or nan or infinite somewhere.
    """
    arrays = {name: column(name, values) for name, values in named.items()}
    first, n = next((name, len(x)) for name, x in arrays.items())
    for name, x in arrays.items():
        if len(x) != n:
            raise ValueError(f"{name} has {len(x)} entries, but {first} has {n}.")
        finite(name, x)
    return tuple(arrays.values())


def column(name: str, values: npt.ArrayLike) -> Floats:
    """One dimension of at least one float64, nan allowed; a number alone is one entry. -> (N,)."""
    x = numbers(name, values)
    if x.ndim == 0:
        return x.reshape(1)
    if x.ndim != 1:
        raise ValueError(f"{name} must be a list or a one-dimensional array, not of shape {x.shape}.")
    if not len(x):
        raise ValueError(f"{name} is empty.")
    return x


def numbers(name: str, values: npt.ArrayLike) -> Floats:
    """Float64 of any shape, nan allowed; strings, None and ragged lists are refused."""
    try:
        x: npt.NDArray[Any] = np.asarray(values)
    except ValueError as error:  # ragged lists
        raise ValueError(f"{name} must hold numbers in a rectangle: {error}.") from error
    if x.size and x.dtype.kind not in "biuf":
        raise ValueError(f"{name} must hold numbers, not {x.dtype}.")
    return x.astype(np.float64)


def finite(name: str, x: Floats) -> None:
    """Refuse nan and infinity, naming the first place."""
    for i in np.flatnonzero(~np.isfinite(x))[:1]:
        raise ValueError(f"{name} must be finite: entry {i} is {x.flat[i]}.")


def inside(name: str, value: float, low: float, high: float, open_ends: bool = False) -> None:
    """Refuse a number outside [low, high], or outside (low, high)."""
    if isinstance(value, str) or not (low < value < high if open_ends else low <= value <= high):
        bound = f"({low}, {high})" if open_ends else f"[{low}, {high}]"
        raise ValueError(f"{name} must lie in {bound}, not {value!r}.")
