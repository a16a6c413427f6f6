"""REINFORCE (Williams 1992), with the batch mean as its baseline or without one.

A_t = R(τ) − b,   b = mean of R over the trajectories of the whole batch, or 0
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_multiturn.algorithms.registry import Config, register
from verl_multiturn.columns import Floats
from verl_multiturn.returns import episode_return, relative
from verl_multiturn.turns import TurnBatch


@dataclass(frozen=True)
class ReinforceConfig(Config):
    """Keywords of reinforce."""

    baseline: Literal["mean", "none"] = "mean"  # over the batch's trajectories, across groups


@register("reinforce", ReinforceConfig)
def reinforce(turns: TurnBatch, config: ReinforceConfig) -> Floats:
    """The episode return against the mean of the batch, or as it is.

    A trajectory votes once, however many turns it has.
    """
    R = episode_return(turns)  # (N,)
    if config.baseline == "none":
        return R
    whole_batch = np.zeros(len(turns), np.int64)
    return relative(R, whole_batch, votes=turns.index == 0)
