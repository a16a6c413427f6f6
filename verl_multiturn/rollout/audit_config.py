"""The block `multiturn.audit`: of which steps the values are audited, and what a value is there."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from verl_multiturn.compose import plain
from verl_multiturn.critic.config import critic_config
from verl_multiturn.env import derive_seed


@dataclass(frozen=True)
class Audit:
    """The block `multiturn.audit`, and what continuations need of the rest of a run.

    Attributes:
        every: step 1 and every so many are audited; None: none is.
        states: how many states of such a step, as near as its prompts share them out.
        rollouts: continuations of each; their mean return is what the value is compared with.
        max_inflight: continuations that a rollout worker plays at the same time.
        gamma: γ, from turn to turn, of the values that are audited.
        whole: a value is of the whole return, paid with the last turn, and not of what is still to come:
            that is what a critic learns where multiturn.turn_rewards is false.
        scale: a value is so many times what it stands for (multiturn.critic.reward_scale).
        penalty: what a turn without a valid action costs in training.
        prompts: of a step.
        group: n, trajectories of a prompt.
    """

    every: int | None = None
    states: int = 64
    rollouts: int = 64
    max_inflight: int = 256
    gamma: float = 1.0
    whole: bool = False
    scale: float = 1.0
    penalty: float = 0.0
    prompts: int = 1
    group: int = 8

    @classmethod
    def of(cls, config: Any) -> Self | None:
        """Of a run whose configuration is composed and derived; None: nothing is audited.

        Raises:
            ValueError: the run has no values, or none that mean returns could be compared with.
        """
        settings = config.multiturn
        if settings.audit.every is None:
            return None
        gamma, whole, scale = _meaning(config)
        return cls(
            **plain(settings.audit),
            gamma=gamma,
            whole=whole,
            scale=scale,
            penalty=settings.format_penalty,
            prompts=config.data.train_batch_size,
            group=config.actor_rollout_ref.rollout.n,
        )

    def due(self, step: int) -> bool:
        """Whether this step of training is audited."""
        return self.every is not None and (step == 1 or step % self.every == 0)

    def share(self, seed: int, sample: int) -> int:
        """States of one member of a prompt's group: together the members have `states` / `prompts`."""
        whole, rest = divmod(self.states, self.prompts)
        random = np.random.default_rng(derive_seed("share", seed))
        mine = whole + (random.random() < rest / self.prompts)
        place = int(random.permutation(self.group)[sample])
        return mine * (place + 1) // self.group - mine * place // self.group


def _meaning(config: Any) -> tuple[float, bool, float]:
    """γ from turn to turn, whether values are of whole returns, and in what units."""
    settings, name = config.multiturn, config.multiturn.algorithm
    audit = f"multiturn.audit.every={settings.audit.every}"
    if config.trainer.v1.trainer_mode == "colocate_async":
        raise ValueError(
            "trainer.v1.trainer_mode=colocate_async changes the weights under running episodes, and "
            f"{audit} plays on with the policy of a state's value: use sync"
        )
    if name == "vineppo":
        return float(settings.vineppo.gamma), False, 1.0
    if name == "archer":
        critic = critic_config(plain(settings.critic))
        return critic.gamma, False, critic.reward_scale
    if not config.critic.enable:
        raise ValueError(
            f"{audit} compares values with returns, and multiturn.algorithm={name} has no values: leave it "
            "out, or use vineppo, turn_gae, bilevel_gae, ppo or archer"
        )
    if settings.normalize.by is not None:
        raise ValueError(
            f"multiturn.normalize.by={settings.normalize.by} has the critic learn relative returns, which "
            f"{audit} cannot play: leave one of them out"
        )
    if config.algorithm.use_kl_in_reward:
        raise ValueError(
            f"algorithm.use_kl_in_reward has the critic learn returns less a KL term, which {audit} cannot "
            "play: leave one of them out"
        )
    if name in ("ppo", "verl", "bilevel_gae"):
        block = settings.bilevel_gae if name == "bilevel_gae" else config.algorithm
        if block.gamma != 1:
            raise ValueError(
                f"gamma={block.gamma:g} discounts from token to token, and {audit} compares values with "
                "returns over turns: use gamma=1"
            )
        at_turns = name == "bilevel_gae" if settings.turn_rewards is None else bool(settings.turn_rewards)
        gamma = float(settings.bilevel_gae.gamma_turn) if name == "bilevel_gae" else 1.0
        return gamma, not at_turns, 1.0
    block = settings.keywords if ":" in name else settings[name]
    return float(block.get("gamma", 1.0)), False, 1.0
