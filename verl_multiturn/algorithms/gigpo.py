"""GiGPO: group-in-group policy optimisation (Feng et al. 2025, arXiv:2505.10978).

Two baselines from samples, no critic. A trajectory is compared with its group by its return, and
a turn with the group's turns that started from the same state (its anchor) by what followed:

    A_t = A^E(τ) + ω A^S(s_t, a_t)                                                  (Eq. 8)
    A^E = (R(τ) − mean R) / F(R)        over the trajectories of the group          (Eq. 3)
    A^S = (G_t − mean G) / F(G)         over the turns from this anchor, at any t   (Eq. 7)

F is the sample deviation plus ε, or 1. With no state seen twice, A^S = 0 and this is GRPO.

Where the authors' code (verl-agent) differs, the paper is followed, and `compat="verl_agent"`
reproduces the code:
* episode_unit="row": every turn votes in mean R, so long trajectories weigh more;
* singleton="raw": an episode group with a single vote keeps its raw return instead of 0;
* penalty="late": the penalty of an invalid turn reaches that row only, its episode score included.
Not reproduced: float32 noise in constant groups (here exactly 0), similarity by difflib.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_multiturn.algorithms.registry import Config, register
from verl_multiturn.algorithms.similarity import alike
from verl_multiturn.columns import Floats, Ints
from verl_multiturn.returns import episode_return, relative, returns_to_go
from verl_multiturn.turns import TurnBatch

_PAPER = {"episode_unit": "trajectory", "singleton": "zero", "penalty": "late"}
_VERL_AGENT = {"episode_unit": "row", "singleton": "raw", "penalty": "late"}


@dataclass(frozen=True)
class GiGPOConfig(Config):
    """Keywords of gigpo. A field that is None here is filled in by `compat`."""

    gamma: float = 0.95  # γ of G_t; verl-agent's ALFWorld script
    step_weight: float = 1.0  # ω, Eq. 8; the paper uses 1
    by_std: bool = True  # F = std (the ALFWorld and Search scripts), or F = 1 ("mean_norm")
    episode_unit: Literal["trajectory", "row"] | None = None  # who votes in Eq. 3: "trajectory"
    singleton: Literal["zero", "raw"] | None = None  # A^E of a group with one vote: "zero"
    similarity: float | None = None  # anchors this alike share a group; None: equal ones
    invalid_penalty: float = 0.0  # for a turn that is not valid; verl-agent uses 0.1
    penalty: Literal["late", "propagated"] | None = None  # after the returns ("late") or inside r_t
    compat: Literal["verl_agent"] | None = None  # follow the authors' code where it differs

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("gamma", 0, 1)
        self.check_range("step_weight", 0)
        self.check_range("invalid_penalty", 0)
        if self.similarity is not None and not 0 < self.similarity < 1:
            raise ValueError(f"GiGPOConfig.similarity must lie in (0, 1), not {self.similarity}.")
        for key, value in (_VERL_AGENT if self.compat else _PAPER).items():
            given = getattr(self, key)
            if self.compat and given not in (None, value):
                raise ValueError(f"gigpo: compat={self.compat!r} means {key}={value!r}, not {given!r}.")
            if given is None:
                object.__setattr__(self, key, value)


@register("gigpo", GiGPOConfig, needs=("reward", "anchor"))
def gigpo(turns: TurnBatch, config: GiGPOConfig) -> Floats:
    """The trajectory against its group, plus the turn against others from the same state."""
    R, G = scores(turns, config)  # (N,), (N,)
    A_episode = relative(
        R,
        turns.group_code,
        votes=None if config.episode_unit == "row" else turns.index == 0,
        by_std=config.by_std,
        singleton="raw" if config.singleton == "raw" else "zero",
    )  # Eq. 3
    A_step = relative(G, step_groups(turns, config.similarity), by_std=config.by_std)  # Eq. 7
    return A_episode + config.step_weight * A_step  # Eq. 8


def scores(turns: TurnBatch, config: GiGPOConfig) -> tuple[Floats, Floats]:
    """R(τ) and G_t with the penalty for invalid turns where the config wants it. -> (N,), (N,).

    Propagated, it is a reward like any other. Late, it lowers the row's own G_t and nobody
    else's; with episode_unit="row" it lowers the row's own R as well.
    """
    penalty = config.invalid_penalty * ~turns.valid  # (N,)
    if config.penalty == "propagated":
        reward = turns.reward - penalty
        return episode_return(turns, reward), returns_to_go(turns, config.gamma, reward)
    R = episode_return(turns)
    if config.episode_unit == "row":
        R = R - penalty
    return R, returns_to_go(turns, config.gamma) - penalty


def step_groups(turns: TurnBatch, similarity: float | None = None) -> Ints:
    """Codes of the anchor groups: same group, same (or similar) anchor, any t (Eq. 6). -> (N,)."""
    if similarity is None:
        return turns.anchor_code
    if turns.anchor_text is None:
        raise ValueError(
            "anchor_text is missing: gigpo's similarity compares texts, and not all anchors are."
        )
    return np.asarray(alike(turns.anchor_text, turns.group_code, similarity))
