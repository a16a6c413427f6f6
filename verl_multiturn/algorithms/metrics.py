"""Whether GiGPO has anything to compare: numbers to watch beside the learning curve."""

import numpy as np

from verl_multiturn.algorithms.gigpo import GiGPOConfig, scores, step_groups
from verl_multiturn.columns import Bools, Ints, joint
from verl_multiturn.returns import episode_return, relative
from verl_multiturn.turns import TurnBatch


def diagnostics(turns: TurnBatch, config: GiGPOConfig | None = None) -> dict[str, float]:
    """How much signal the anchors of a batch carry. All 0 for an empty batch.

    * anchor_group_size: mean number of turns in an anchor group;
    * anchor_singleton_share: share of turns that are alone in theirs, hence A^S = 0;
    * step_advantage_zero_share: share of turns with A^S = 0 for whatever reason;
    * anchor_within_trajectory_share: share of the anchor groups of two or more turns that come
      from one trajectory alone, so that they compare it with itself;
    * constant_group_share: share of groups whose episode returns are all equal, hence A^E = 0.
    """
    config = config or GiGPOConfig()
    code = step_groups(turns, config.similarity)
    size = np.bincount(code)
    visits = joint(code, turns.trajectory_code)  # one code per (anchor group, trajectory)
    trajectories = np.bincount(code[np.unique(visits, return_index=True)[1]])
    A_step = relative(scores(turns, config)[1], code, by_std=config.by_std)
    A_episode = relative(episode_return(turns), turns.group_code, votes=turns.index == 0)
    differs = np.bincount(turns.group_code, weights=A_episode != 0) > 0
    return {
        "anchor_group_size": _mean(size),
        "anchor_singleton_share": _mean(size[code] == 1),
        "step_advantage_zero_share": _mean(A_step == 0),
        "anchor_within_trajectory_share": _mean(trajectories[size > 1] == 1),
        "constant_group_share": _mean(~differs),
    }


def _mean(x: Ints | Bools) -> float:
    return float(np.mean(x)) if x.size else 0.0
