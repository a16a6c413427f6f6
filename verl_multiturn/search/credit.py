"""Training with a Q model: what a fitted Q model says of a step's turns, as their credit.

    advantage    A_t = Q(s_t, a_t) − V(s_t): the Q model alone decides
    shaping      A_t = Σ_{k≥t} γ^{k−t} r'_k,  r'_t = r_t + γ V(s_{t+1}) − V(s_t): the task's own return,
                 with V as potential (Ng, Harada and Russell 1999); it telescopes to G_t − V(s_t)

Q is a frozen model's (arXiv:2409.09345, fitted by `verl-multiturn fit-q`), V the mean over fresh answers of
the current policy to the same prompt. With baseline=leave_one_out V does not depend on the answer it is
compared with: the gradient of shaping is then that of the return, whatever the Q model knows, and that of
advantage that of E_π Q. The Q of dpo and bradley_terry is known up to a number for each state: comparing
answers to one prompt removes it; taken off returns it would only be noise, so shaping needs a Q model
of loss=regression.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl_multiturn.algorithms.registry import Config
from verl_multiturn.columns import Floats
from verl_multiturn.errors import unknown
from verl_multiturn.returns import returns_to_go
from verl_multiturn.search.q_model import read_spec
from verl_multiturn.search.step_value import Values, shaped_rewards, turn_advantages
from verl_multiturn.turns import TurnBatch


@dataclass(frozen=True)
class QAdvantageConfig(Config):
    """Keys of `multiturn.q_advantage`; all of it is ours, the paper trains no agent with its Q model."""

    q_model: str | None = None  # folder that `verl-multiturn fit-q` wrote
    credit: Literal["advantage", "shaping"] = "advantage"
    baseline: Literal["leave_one_out", "mean", "logmeanexp"] = "leave_one_out"  # V, see `ModelValue`
    candidates: int = 4  # fresh answers to the prompt of each turn
    gamma: float = 1.0  # γ of shaping, from turn to turn
    normalize: Literal["none", "std", "whiten"] = "std"  # of the step's credit: the unit of Q is β's
    clip: float | None = None  # largest |A|; None: none
    max_inflight: int = 256  # fresh answers at the same time

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("candidates", 1)
        self.check_range("max_inflight", 1)
        self.check_range("gamma", 0, 1)
        if self.clip is not None:
            self.check_range("clip", 0)

    @classmethod
    def of(cls, block: Mapping[str, Any]) -> "QAdvantageConfig":
        """From `multiturn.q_advantage`, with its Q model looked up.

        Raises:
            ValueError: an unknown key, a value that does not fit, no Q model, or one that cannot do it.
        """
        for key in block:
            if key not in cls.__dataclass_fields__:
                raise unknown("key of multiturn.q_advantage", key, cls.__dataclass_fields__)
        config = cls(**block)
        if config.q_model is None:
            raise ValueError(
                "multiturn.algorithm=q_advantage needs multiturn.q_advantage.q_model=FOLDER, a Q model that "
                "verl-multiturn fit-q wrote"
            )
        loss = read_spec(config.q_model).loss
        if config.credit == "shaping" and loss != "regression":
            raise ValueError(
                f"multiturn.q_advantage.credit=shaping compares V with returns, and the Q model in "
                f"{config.q_model} has loss={loss}: fit one with loss=regression, or use credit=advantage"
            )
        return config


def credit(turns: TurnBatch, values: Values, config: QAdvantageConfig) -> Floats:
    """What each turn is given, before it is scaled. -> (N,).

    Args:
        turns: in whose order `values` are.
        values: of the Q model; all known.
        config: how.
    """
    if config.credit == "advantage":
        return turn_advantages(values)
    return returns_to_go(turns, config.gamma, shaped_rewards(turns, values, config.gamma))
