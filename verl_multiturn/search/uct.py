"""UCT: which child of a search node to try next (Kocsis and Szepesvári 2006; Q-value paper, Eq. 4).

    W / N + c sqrt(ln N_parent / N)

W is the sum of the returns and N their number, kept apart. The authors' code of the Q-value paper
(arXiv:2409.09345) keeps the mean and divides it by N once more, which is near breadth-first.
"""

import numpy as np
import numpy.typing as npt

from verl_multiturn.algorithms.vectors import finite, inside, numbers
from verl_multiturn.columns import Floats


def uct(W: npt.ArrayLike, N: npt.ArrayLike, N_parent: npt.ArrayLike, c: float = 2**0.5) -> Floats:
    """W / N + c sqrt(ln N_parent / N); inf where N = 0. -> the inputs' common shape.

    Args:
        W: sum of the returns booked on a child, a number or an array.
        N: its visits, at least 0.
        N_parent: the parent's visits, at least 1 where N is.
        c: weight of exploration, at least 0.

    Raises:
        ValueError: nan, visits that are negative (parent: below 1), shapes that do not go
            together, or a negative c.
    """
    inside("c", c, 0, float(np.finfo(np.float64).max))
    arrays = {"W": numbers("W", W), "N": numbers("N", N), "N_parent": numbers("N_parent", N_parent)}
    for name, x in arrays.items():
        finite(name, x)
    for name in ("N", "N_parent"):
        if np.any(arrays[name] < 0):
            raise ValueError(f"{name} must be at least 0, not {arrays[name].min():g}.")
    try:
        w, n, parent = np.broadcast_arrays(*arrays.values())
    except ValueError as error:
        shapes = ", ".join(f"{name} {x.shape}" for name, x in arrays.items())
        raise ValueError(f"shapes do not go together: {shapes}.") from error
    if np.any((parent < 1) & (n > 0)):
        raise ValueError("N_parent must be at least 1 where the child was visited.")
    visits = np.where(n > 0, n, 1)
    scores = w / visits + c * np.sqrt(np.log(np.maximum(parent, 1)) / visits)
    return np.asarray(np.where(n > 0, scores, np.inf), np.float64)
