"""GAE over turns (Schulman et al. 2015, arXiv:1506.02438): PPO whose time step is a turn.

    A_t = Σ_k (γλ)^k δ_{t+k},   δ_t = r_t + γ V(s_{t+1}) − V(s_t)                  (Eq. 16)

V(s_t) is the critic's value before the first token of turn t. λ = 1 gives G_t − V(s_t).
"""

from dataclasses import dataclass

from verl_multiturn.algorithms.registry import Config, register
from verl_multiturn.columns import Floats
from verl_multiturn.returns import gae
from verl_multiturn.turns import TurnBatch


@dataclass(frozen=True)
class TurnGAEConfig(Config):
    """Keywords of turn_gae."""

    gamma: float = 1.0  # discount from turn to turn
    lam: float = 1.0  # λ: 1 trusts the returns, 0 the critic

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("gamma", 0, 1)
        self.check_range("lam", 0, 1)


@register("turn_gae", TurnGAEConfig, needs=("reward", "value"))
def turn_gae(turns: TurnBatch, config: TurnGAEConfig) -> Floats:
    """Generalised advantage estimation over turns, from a critic's values."""
    return gae(turns, config.gamma, config.lam)
