"""The `multiturn/*` and `val/*` metrics of a run; README explains each.

verl picks a reduction by the substrings max, min, sum, total and mean of a name: ours end in /mean.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_multiturn.algorithms.gigpo import GiGPOConfig
from verl_multiturn.algorithms.metrics import diagnostics
from verl_multiturn.algorithms.starpo import ZERO, variance
from verl_multiturn.columns import Column, Floats, floats, ints
from verl_multiturn.run_files import by_panel
from verl_multiturn.stats import wilson
from verl_multiturn.turns import TurnBatch


def of_sessions(sessions: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the trajectories of a training step."""
    columns = {name: [s["scores"][name] for s in sessions] for name in sessions[0]["scores"]}
    columns["return"] = [s["return"] for s in sessions]
    columns["episode_seconds"] = [s["seconds"] for s in sessions]
    means = {f"multiturn/{name}/mean": float(np.mean(column)) for name, column in columns.items()}
    return means | {"multiturn/trajectories/mean": float(len(sessions))}


def of_groups(returns: Sequence[Sequence[float]], kept: Sequence[int] | None = None) -> dict[str, float]:
    """How much the members of a group differ, in all groups and in those that are trained on.

    Args:
        returns: of the trajectories of each group of the step.
        kept: indices of the groups that are trained on; None: all are.
    """
    return {f"multiturn/{name}/mean": value for name, value in group_metrics(returns, kept).items()}


def group_metrics(returns: Sequence[Column], kept: Column | None = None) -> dict[str, float]:
    """How much the trajectories of a group differ, before and after the filter.

    * group_std, group_max, group_mean: of the returns in a group (ddof 1; 0 for a group of one), means
      over the groups; with _kept, over the kept ones;
    * zero_variance: share of the groups with std 0;
    * std_over_mean: std (ddof 1) over the groups' variances, divided by their mean; 0 where all are 0.
      RAGEN-2's predictor: filtering helped from 1.2 on and hurt at 0.33.

    Args:
        returns: the episode returns of each of the G groups, of any sizes.
        kept: indices of the groups that are trained on; None: no filter, no _kept. A mean over no groups is
            left out.

    Raises:
        ValueError: a group without returns, one that is not finite, or a kept index that is no group's.
    """
    groups = [floats(f"returns[{g}]", R, len(R)) for g, R in enumerate(returns)]
    for g, R in enumerate(groups):
        if not len(R) or not np.isfinite(R).all():
            raise ValueError(f"returns must be finite, at least one a group: group {g} has {R.tolist()}.")
    indices = ints("kept", [], 0) if kept is None else ints("kept", kept, len(kept))
    for g in indices[(indices < 0) | (indices >= len(groups))][:1]:
        raise ValueError(f"kept must be indices of the {len(groups)} groups, not {g}.")
    if not groups:
        return {}
    spread = np.array([variance(R) for R in groups])  # (G,)
    found = {
        "zero_variance": float(np.mean(np.sqrt(spread) <= ZERO)),
        "std_over_mean": variance(spread) ** 0.5 / float(spread.mean()) if spread.any() else 0.0,
    }
    return found | _means(groups, "") | _means([groups[g] for g in indices], "_kept")


def _means(groups: list[Floats], suffix: str) -> dict[str, float]:
    if not groups:
        return {}
    return {
        f"group_std{suffix}": float(np.mean([variance(R) ** 0.5 for R in groups])),
        f"group_max{suffix}": float(np.mean([R.max() for R in groups])),
        f"group_mean{suffix}": float(np.mean([R.mean() for R in groups])),
    }


def of_integrity(sizes: Sequence[int], n: int, starts: Sequence[int]) -> dict[str, float]:
    """Whether groups are what algorithms take them for: so many samples of one start.

    Args:
        sizes: trajectories of each group.
        n: trajectories of a complete one.
        starts: different first observations of each group.
    """
    return {
        "multiturn/complete_groups/mean": float(np.mean([size == n for size in sizes])),
        "multiturn/equal_starts/mean": float(np.mean([count == 1 for count in starts])),
    }


def of_turns(
    turns: TurnBatch, advantages: np.ndarray, gigpo: dict[str, Any] | None = None
) -> dict[str, float]:
    """Shape of the credit: how often it is zero, and how well the anchor groups are filled.

    Args:
        turns: of the step.
        advantages: (N,) one per turn.
        gigpo: the run's settings of GiGPO, where it is the algorithm.
    """
    found = diagnostics(turns, GiGPOConfig(**(gigpo or {})))
    found = {f"multiturn/{name}/mean": value for name, value in found.items()}
    return found | {
        "multiturn/advantage_std/mean": float(np.std(advantages)),
        "multiturn/zero_advantage/mean": float(np.mean(advantages == 0)),
    }


def of_panels(trajectories: list[dict[str, Any]], expected: int, also: Mapping[str, int]) -> dict[str, float]:
    """`of_validation` of the run's panel, and of each more under val/<name>/.

    Args:
        trajectories: of one validation, all panels together.
        expected: how many there should be.
        also: how many of them there should be of each panel of `multiturn.also`.
    """
    played = by_panel(trajectories)
    found = of_validation(played[""], expected - sum(also.values()))
    for name, size in also.items():
        more = of_validation(played.get(name, []), size)
        found |= {key.replace("val/", f"val/{name}/", 1): value for key, value in more.items()}
    return found


def of_validation(trajectories: list[dict[str, Any]], expected: int) -> dict[str, float]:
    """Success on the panel with its Wilson 95 % interval, by task type too; failures are counted."""
    found = {"val/episodes": float(len(trajectories)), "val/failed": float(expected - len(trajectories))}
    if not trajectories:
        return found
    by_type: dict[str, list[bool]] = defaultdict(list)
    for trajectory in trajectories:
        by_type[trajectory["task_type"]].append(bool(trajectory["success"]))
    wins = [won for group in by_type.values() for won in group]
    success = wilson(sum(wins), len(wins))
    found |= {"val/success": success.mean, "val/success_low": success.low, "val/success_high": success.high}
    found["val/return"] = float(np.mean([t["return"] for t in trajectories]))
    found["val/turns"] = float(np.mean([len(t["turns"]) for t in trajectories]))
    if set(by_type) != {"default"}:
        found |= {f"val/success/{name}": float(np.mean(group)) for name, group in sorted(by_type.items())}
    return found
