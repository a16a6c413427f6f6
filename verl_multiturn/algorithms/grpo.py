"""GRPO: group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300).

A trajectory is compared with the other trajectories from the same start, and all of its turns
share the result (outcome supervision, §4.1.2):

    A_t = (R(τ) − mean_j R(τ_j)) / (std_j R(τ_j) + ε)
"""

from dataclasses import dataclass

from verl_multiturn.algorithms.registry import Config, register
from verl_multiturn.columns import Floats
from verl_multiturn.returns import episode_return, relative
from verl_multiturn.turns import TurnBatch


@dataclass(frozen=True)
class GRPOConfig(Config):
    """Keywords of grpo."""

    by_std: bool = True  # divide by the group's sample deviation; False: Dr. GRPO, 2503.20783


@register("grpo", GRPOConfig)
def grpo(turns: TurnBatch, config: GRPOConfig) -> Floats:
    """The episode return against the group's mean, by its standard deviation.

    A trajectory votes once, however many turns it has; one alone in its group gets 0.
    """
    R = episode_return(turns)  # (N,)
    once = turns.index == 0
    return relative(R, turns.group_code, votes=once, by_std=config.by_std)
