"""Turn-level advantage estimators: pure functions of a TurnBatch, one file each, NumPy only."""

from typing import Any

from verl_multiturn.algorithms import gigpo, grpo, reinforce, rloo, turn_gae, vineppo
from verl_multiturn.algorithms.registry import Algorithm, Config, find, register, registered
from verl_multiturn.columns import Floats
from verl_multiturn.turns import TurnBatch

__all__ = ["Algorithm", "Config", "advantages", "find", "list_algorithms", "register", "registered"]

_BUILT_IN = (gigpo, grpo, reinforce, rloo, turn_gae, vineppo)  # importing them registered them


def advantages(name: str, turns: TurnBatch, **keywords: Any) -> Floats:
    """One advantage per turn, float64, in the rows' own order. -> (N,).

    Args:
        name: an algorithm of `list_algorithms()`, or "package.module:name".
        turns: the batch.
        **keywords: fields of the algorithm's config; its defaults are the paper's.

    Raises:
        ValueError: an unknown algorithm or keyword, a keyword of the wrong type, or a column that
            the algorithm needs and the batch lacks.
    """
    algorithm = find(name)
    config = algorithm.configure(keywords)
    if not isinstance(turns, TurnBatch):
        raise ValueError(f"advantages needs a TurnBatch (TurnBatch.from_lists), not {type(turns)}.")
    return algorithm(turns, config)


def list_algorithms() -> dict[str, str]:
    """Every algorithm with one line on what it does."""
    return {name: algorithm.summary for name, algorithm in registered().items()}
