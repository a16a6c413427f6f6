"""RLOO: REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740, Eq. 8).

The baseline of a trajectory is the mean return of the others from the same start, which keeps
the gradient unbiased at any group size n ≥ 2:

    A_t = R(τ_i) − 1/(n−1) Σ_{j≠i} R(τ_j)
"""

from dataclasses import dataclass

from verl_multiturn.algorithms.registry import Config, register
from verl_multiturn.columns import Floats
from verl_multiturn.returns import episode_return, leave_one_out
from verl_multiturn.turns import TurnBatch


@dataclass(frozen=True)
class RLOOConfig(Config):
    """RLOO has no keywords."""


@register("rloo", RLOOConfig)
def rloo(turns: TurnBatch, config: RLOOConfig) -> Floats:
    """The episode return against the mean of the group's other trajectories.

    A trajectory votes once, however many turns it has; one alone in its group gets 0.
    """
    R = episode_return(turns)  # (N,)
    return leave_one_out(R, turns.group_code, votes=turns.index == 0)
