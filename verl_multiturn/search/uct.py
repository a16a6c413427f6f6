"""UCT: which child of a search node to try next (Kocsis and Szepesvári 2006; Q-value paper, Eq. 4).

    W / N + c sqrt(ln N_parent / N),   or with a prior   W / N + c · prior · sqrt(N_parent) / (1 + N)

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
    w, n, parent = _arrays(c, W=W, N=N, N_parent=N_parent)
    if np.any((parent < 1) & (n > 0)):
        raise ValueError("N_parent must be at least 1 where the child was visited.")
    visits = np.where(n > 0, n, 1)
    scores = w / visits + c * np.sqrt(np.log(np.maximum(parent, 1)) / visits)
    return np.asarray(np.where(n > 0, scores, np.inf), np.float64)


def puct(
    W: npt.ArrayLike, N: npt.ArrayLike, N_parent: npt.ArrayLike, prior: npt.ArrayLike, c: float = 1.25
) -> Floats:
    """W / N + c · prior · sqrt(N_parent) / (1 + N); a mean of 0 where N = 0. -> the common shape.

    As AlphaZero's rule (Silver et al. 2018), and the authors' code with the Q model as prior.

    Args:
        W: sum of the returns booked on a child, a number or an array.
        N: its visits, at least 0.
        N_parent: the parent's visits, at least 0.
        prior: its share among its siblings, at least 0.
        c: weight of the prior, at least 0.

    Raises:
        ValueError: nan, something negative, or shapes that do not go together.
    """
    w, n, parent, share = _arrays(c, W=W, N=N, N_parent=N_parent, prior=prior)
    mean = w / np.where(n > 0, n, 1) * (n > 0)
    return np.asarray(mean + c * share * np.sqrt(parent) / (1 + n), np.float64)


def _arrays(c: float, **named: npt.ArrayLike) -> tuple[Floats, ...]:
    """The inputs in their common shape; refuses what no rule can take."""
    inside("c", c, 0, float(np.finfo(np.float64).max))
    arrays = {name: numbers(name, x) for name, x in named.items()}
    for name, x in arrays.items():
        finite(name, x)
        if name != "W" and np.any(x < 0):
            raise ValueError(f"{name} must be at least 0, not {x.min():g}.")
    try:
        return tuple(np.broadcast_arrays(*arrays.values()))
    except ValueError as error:
        shapes = ", ".join(f"{name} {x.shape}" for name, x in arrays.items())
        raise ValueError(f"shapes do not go together: {shapes}.") from error
