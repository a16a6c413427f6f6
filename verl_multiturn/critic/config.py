"""Settings of ArCHer's critic and of a run that trains with it (Zhou et al. 2024, arXiv:2402.19446).

Nothing here imports torch: a wrong setting is refused before anything starts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from verl_multiturn.algorithms.registry import Config
from verl_multiturn.errors import unknown

# Encoders without an owner that the Hugging Face hub still knows; all others are "owner/name".
ENCODERS = (
    *("ngrams", "lines", "small", "roberta-base", "roberta-large", "distilroberta-base"),
    *("bert-base-uncased", "bert-base-cased", "distilbert-base-uncased"),
)
PLACE = ("preset", "gpus", "cpus")  # keys of multiturn.critic that are not the critic's own


class FixedPointWarning(UserWarning):
    """What the critic converges to is not the value of the current policy."""


@dataclass(frozen=True)
class CriticConfig(Config):
    """Every choice of the critic; `preset` has the settings of the authors' runs.

    Sources in the comments: paper (arXiv:2402.19446), code and offline code (the authors'), IQL
    (arXiv:2110.06169), ours. With no note the paper and the code agree.
    """

    encoder: str = "roberta-base"  # 3.2; see verl_multiturn.critic.encoders
    max_tokens: int = 512  # of a text, its end; code
    hidden: int = 768  # width of the heads' layers; code
    layers: int = 2  # hidden layers of a head; code
    heads: int = 2  # of Q and of V, 1 or 2; 3.2 (double Q)
    gamma: float = 0.95  # discount of a turn; paper: 0.98 Detective, 0.9 WebShop, else 0.95
    tau: float = 0.1  # Polyak step; offline code 0.05
    target_every: int = 1  # optimizer steps between two Polyak steps; code
    v_target: Literal["policy", "sarsa", "expectile", "mc"] = "policy"
    # policy: Q^tgt at fresh utterances, 3.2; sarsa: at the replayed one, offline code;
    # expectile: of the same, IQL Eq. 5; mc: Q and V on the discounted return, the paper's ablation
    expectile: float = 0.9  # with v_target=expectile; offline code
    uncovered: Literal["refuse", "skip", "sarsa"] = "refuse"
    # a drawn state without fresh utterances: an error, no loss of V there, or the replayed one; ours
    loss: Literal["mse", "huber"] = "mse"  # huber: ours
    pessimism: Literal["adv", "target", "none"] = "adv"
    # minimum of the heads: in the advantage only, 3.2; in the targets too; nowhere (mean); the last two ours
    lr: float = 2e-5  # Adam, no weight decay, constant; code; offline code 1e-5
    head_lr: float | None = None  # of the heads; None: lr; ours
    batch: int = 256  # transitions of an optimizer step; code: 8 x 32
    micro_batch: int = 32  # transitions of a forward pass
    accumulate: Literal["mean", "sum"] = "mean"
    # sum: the micro-batches' mean gradients are added undivided, code; Adam is blind to the factor,
    # but the clip then acts batch / micro_batch times as strongly
    grad_clip: float | None = 1.0  # norm of the critic's gradients alone; code: with stale actor gradients
    head_grad_clip: float | None = None  # clips the heads apart from the encoder; None: together; ours
    reward_scale: float = 1.0  # times r and the return: Q, V and A are in these units; ours
    bootstrap_on_truncation: bool = False  # a turn limit is no end; for whoever makes transitions; ours
    capacity: int = 10_000  # of the replay; paper; code 100,000
    min_size: int = 2048  # transitions before the first optimizer step; ours
    max_age: int | None = None  # policy versions after which a transition is not drawn any more; ours
    seed: int = 0  # of heads, random encoders and the replay's draws

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = ("hidden", "layers", "target_every", "batch", "micro_batch", "capacity", "min_size")
        for key in whole:
            self.check_range(key, 1)
        self.check_range("max_tokens", 2)
        self.check_range("heads", 1, 2)
        for key in ("gamma", "tau", "expectile"):
            self.check_range(key, 0, 1)
        for key in ("lr", "head_lr", "grad_clip", "head_grad_clip", "max_age", "seed"):
            if getattr(self, key) is not None:
                self.check_range(key, 0)
        if self.expectile in (0, 1):
            raise ValueError(f"CriticConfig.expectile must lie in (0, 1), not {self.expectile!r}.")
        for key in ("batch", "min_size"):
            if self.capacity < getattr(self, key):
                raise ValueError(
                    f"CriticConfig.capacity={self.capacity} must be at least {key}={getattr(self, key)}."
                )

    def caveats(self) -> list[str]:
        """One sentence for each choice that makes Q and V those of something else than the policy."""
        found = {
            "sarsa": "V learns the value of the policies that filled the replay, not of the current one",
            "expectile": f"V learns the {self.expectile}-expectile over replayed utterances: near 0.5 the "
            "value of the policies that spoke them, near 1 that of the best utterance",
            "mc": "Q and V learn the returns of the policies that filled the replay, not of the current one",
        }
        sentences = [f"v_target={self.v_target}: {found[self.v_target]}."] if self.v_target in found else []
        if self.v_target == "policy" and self.uncovered == "sarsa":
            sentences.append(f"uncovered=sarsa: where there are no fresh utterances, {found['sarsa']}.")
        if self.pessimism == "target" and self.heads == 2 and self.v_target != "mc":
            sentences.append(
                "pessimism=target: the minimum inside the targets makes Q and V too low on average."
            )
        return sentences


PRESETS = {
    "paper": CriticConfig(),
    "repo_compat": CriticConfig(micro_batch=8, accumulate="sum", capacity=100_000, min_size=1),
    "offline": CriticConfig(v_target="expectile", gamma=0.99, tau=0.05, lr=1e-5, batch=128, min_size=1),
    "cpu": CriticConfig(encoder="small", hidden=64, lr=1e-3, batch=64, micro_batch=64, min_size=64),
}


def preset(name: str) -> CriticConfig:
    """A config of `PRESETS`; change it with `dataclasses.replace`."""
    if name not in PRESETS:
        raise unknown("critic preset", name, PRESETS)
    return PRESETS[name]


@dataclass(frozen=True)
class ArcherConfig(Config):
    """The block `multiturn.archer`: what a training step does with the critic; sources as in CriticConfig."""

    mode: Literal["on_policy", "in_silico"] = "on_policy"
    # the actor learns from this step's utterances; in_silico: from fresh ones at replayed states, paper
    state: Literal["history", "observation", "prompt"] = "history"
    # what the critic reads: instruction, observations and utterances so far; instruction and observation,
    # where that says all; what the policy read last; ours (code: each environment's own text)
    updates: int = 50  # optimizer steps of the critic in a training step; paper
    utterances: int = 1  # M, fresh ones at a state, whose mean Q is V's target; paper
    states: int = 768  # replayed ones that the actor learns from, with in_silico; paper: 3 x 256
    normalize: Literal["none", "std", "whiten"] = "none"  # of a step's advantages; the last two ours
    clip: float | None = None  # largest |A|; ours
    token_baseline: bool = False
    # verl's critic learns b(s, a_<j) = E[A | s, a_<j], and a token gets A − b; paper, as an option
    max_inflight: int = 256  # fresh utterances at the same time; ours

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("updates", "utterances", "states", "max_inflight"):
            self.check_range(key, 1)
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"ArcherConfig.clip must be above 0, not {self.clip!r}.")


def archer_config(block: Mapping[str, Any]) -> ArcherConfig:
    """Of the block `multiturn.archer`.

    Raises:
        ValueError: an unknown key, or a value that does not fit.
    """
    return ArcherConfig(**_known("multiturn.archer", ArcherConfig, block))


def critic_config(block: Mapping[str, Any]) -> CriticConfig:
    """Of the block `multiturn.critic`: its preset, changed by every key that is not null.

    Raises:
        ValueError: an unknown preset, key or encoder, or a value that does not fit.
    """
    own = {name: value for name, value in block.items() if name not in PLACE and value is not None}
    config = replace(preset(block["preset"]), **_known("multiturn.critic", CriticConfig, own))
    check_encoder(config.encoder)
    return config


def check_encoder(name: str) -> None:
    """Refuse a name that no encoder can have.

    Raises:
        ValueError: it is none of `ENCODERS`, no folder, and no owner/name.
    """
    if name not in ENCODERS and "/" not in name and not (name and Path(name).is_dir()):
        raise unknown("encoder", name, ENCODERS, "Or a folder, or owner/name of a Hugging Face encoder.")


def _known(kind: str, config: type[Config], block: Mapping[str, Any]) -> dict[str, Any]:
    valid = [one.name for one in fields(config)]
    for name in block:
        if name not in valid:
            raise unknown(f"key of {kind}", name, valid)
    return dict(block)
