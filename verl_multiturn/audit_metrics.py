"""The `multiturn/audit/*` metrics: how far values lie from what states are worth, and how they rank them.

The paper's (Kazemnejad et al. 2024, arXiv:2410.01679): mean absolute error, and whether of two states the
better one has the higher value. The authors' code counts pairs of equal worth as wrong whatever the values
say; here they are skipped.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from verl_multiturn.columns import Column, floats

EQUAL = 1e-9  # means that differ by less are equal


class Audited(NamedTuple):
    """A state whose value was audited."""

    group: str  # uid of its start
    value: float
    returns: list[float]  # of the continuations from it


def ranking(values: Column, worth: Column, groups: Sequence[Any] | None = None) -> float:
    """Share of the pairs that the values rank as the worth does; nan without a pair.

    Pairs of equal worth are skipped; one that the values leave undecided counts one half.

    Args:
        values: (N,) what is judged.
        worth: (N,) what is true.
        groups: (N,) only pairs of one group count; None: all do.
    """
    V, W = floats("values", values, len(values)), floats("worth", worth, len(values))
    first, second = np.triu_indices(len(V), 1)
    if groups is not None:
        same = np.array([groups[i] == groups[j] for i, j in zip(first, second, strict=True)], bool)
        first, second = first[same], second[same]
    better = W[first] - W[second]
    decided = np.abs(better) > EQUAL
    if not decided.any():
        return math.nan
    said = V[first] - V[second]
    said = np.where(np.abs(said) > EQUAL, np.sign(said), 0.0)
    return float(np.mean((1 + said * np.sign(better))[decided] / 2))


def audited(rows: Any) -> list[Audited]:
    """The audited states of a step that have a value, and a continuation that was played to its end.

    Args:
        rows: of verl_multiturn.rollout.rows, with the values that the step was trained on.
    """
    found = []
    for row, record, trajectory in rows.places:
        returns = trajectory.get("audit", {}).get("returns", {}).get(str(record["index"]))
        value = record["steps"][0]["value"] if record.get("steps") else record["value"]
        if returns and not math.isnan(value):
            found.append(Audited(rows.keys[row].rsplit("_", 2)[0], value, list(returns)))
    return found


def of_audit(states: Sequence[Audited], sessions: Sequence[dict[str, Any]]) -> dict[str, float]:
    """From what `audited` found, and the trajectory records of the step.

    `error` is the mean of |V − mean return|, `bias` that of V − mean return. A perfect value would still
    have an error of about 0.8 `standard_error`, which is the mean one of the mean returns; the best
    constant has `constant_error`. `group_ranking` compares states of one start only.
    """
    played = [session["audit"] for session in sessions if "audit" in session]

    def total(name: str) -> float:
        return float(sum(one[name] for one in played))

    found = {"states": float(len(states)), "rollouts": total("rollouts"), "tokens": total("tokens")}
    found["failed_share"] = total("failed") / max(1.0, total("rollouts"))
    found["seconds"] = max((one["seconds"] for one in played), default=0.0)
    if states:
        groups, V, returns = zip(*states, strict=True)
        value, worth = np.array(V), np.array([np.mean(one) for one in returns])
        spread = [np.std(one, ddof=1) / len(one) ** 0.5 for one in returns if len(one) > 1]
        found |= {
            "error": float(np.mean(np.abs(value - worth))),
            "bias": float(np.mean(value - worth)),
            "constant_error": float(np.mean(np.abs(worth - np.median(worth)))),
            "standard_error": float(np.mean(spread)) if spread else math.nan,
            "ranking": ranking(value, worth),
            "group_ranking": ranking(value, worth, groups),
        }
    return {f"multiturn/audit/{name}/mean": one for name, one in found.items()}
