"""What contradicts itself in a composed configuration; every refusal is one sentence.

Nothing here imports torch, ray or verl: a wrong configuration is refused in a second.
"""

import math

from omegaconf import DictConfig

from verl_multiturn.algorithms import find
from verl_multiturn.algorithms.information import RULES
from verl_multiturn.collapse import detectors
from verl_multiturn.compose import plain
from verl_multiturn.critic.config import archer_config, critic_config
from verl_multiturn.env import Env
from verl_multiturn.errors import unknown
from verl_multiturn.filtering import group_filter
from verl_multiturn.load import load_class
from verl_multiturn.methods import (
    ACTOR_ALGORITHMS,
    SEARCH,
    TOKEN_ALGORITHMS,
    VERL_ALGORITHMS,
    keywords,
    list_trainable,
    turn_rewards,
)
from verl_multiturn.rewards import Normalize
from verl_multiturn.rollout.audit_config import Audit
from verl_multiturn.rollout.episode import check_anchor
from verl_multiturn.rollout.parsing import ActionFormat
from verl_multiturn.rollout.prompts import prompt_policy
from verl_multiturn.rollout.vine_config import Vine
from verl_multiturn.search.config import configured
from verl_multiturn.search.credit import QAdvantageConfig
from verl_multiturn.search.fit_data import FitConfig
from verl_multiturn.search.pair_files import PairConfig
from verl_multiturn.search.prior import prior_rule
from verl_multiturn.search.rules import Rules

LAYOUTS = ("turn", "trajectory")
KL = ("verl", "sequence_sum")  # multiturn.kl_aggregation
MODES = ("sync", "colocate_async", "separate_async")


def check_choices(config: DictConfig) -> None:
    """Values, and blocks that do not suit the algorithm; before anything follows from it."""
    settings = config.multiturn
    for key, value, valid in (
        ("multiturn.algorithm", settings.algorithm, list_trainable()),
        ("multiturn.row", settings.row, LAYOUTS),
        ("multiturn.small_model.imitate", settings.small_model.imitate, ("played", "expert")),
        ("multiturn.information.rule", settings.information.rule, RULES),
        ("multiturn.kl_aggregation", settings.kl_aggregation, KL),
        ("trainer.v1.trainer_mode", config.trainer.v1.trainer_mode, MODES),
    ):
        if value not in valid and not (key == "multiturn.algorithm" and ":" in value):
            raise unknown(f"value of {key}", value, valid)
    if settings.small_model.imitate == "expert" and settings.row != "turn":
        raise ValueError(
            "multiturn.small_model.imitate=expert needs multiturn.row=turn: in one chat the model would read "
            "answers that were not played"
        )
    prompt_policy(plain(settings))
    check_anchor(settings.anchor)
    ActionFormat(**plain(settings.action))
    if settings.algorithm in TOKEN_ALGORITHMS:
        _check_bilevel(settings)
    elif settings.algorithm in ACTOR_ALGORITHMS:
        {"archer": _check_archer, "q_advantage": _check_q_advantage}[settings.algorithm](config)
    elif settings.algorithm == SEARCH:
        _check_search(settings)
    elif settings.algorithm not in VERL_ALGORITHMS:
        find(settings.algorithm).configure(keywords(settings))
    detectors(plain(settings.collapse))
    configured(plain(settings.search))
    PairConfig.of(plain(settings.pairs))
    _check_rewards(settings)
    if settings.algorithm == "vineppo":
        _check_vine(config)
    if not 0 < settings.failures.min_share <= 1:
        raise ValueError(f"multiturn.failures.min_share={settings.failures.min_share} must be in (0, 1]")
    if config.trainer.v1.trainer_mode == "separate_async":
        where = "needs a second device and a weight transfer between devices (nccl and the like)"
        if config.trainer.device == "cpu":
            raise ValueError(f"trainer.v1.trainer_mode=separate_async {where}; a CPU has neither: use sync")
        raise ValueError(f"trainer.v1.trainer_mode=separate_async {where}; it is not supported yet: use sync")


def check_step(config: DictConfig) -> None:
    """What verl would do beside the algorithm, and the size of a step; after what follows from it."""
    settings = config.multiturn
    if config.algorithm.use_kl_in_reward and settings.algorithm not in VERL_ALGORITHMS:
        raise ValueError(
            f"algorithm.use_kl_in_reward changes token rewards, which {settings.algorithm} does not read: "
            "use actor_rollout_ref.actor.use_kl_loss=true instead"
        )
    correction = config.algorithm.rollout_correction
    if settings.algorithm not in VERL_ALGORITHMS and (correction.rollout_is or correction.rollout_rs):
        raise ValueError(
            "algorithm.rollout_correction weighs tokens inside verl's estimators, which "
            f"{settings.algorithm} replaces: leave rollout_is and rollout_rs out, or use grpo"
        )
    refills, given = group_filter(plain(settings.filter)).refills, config.algorithm.filter_groups
    if not refills and given and given.get("enable"):
        raise ValueError(
            "algorithm.filter_groups compares rows as verl scores them: set multiturn.filter.strategy=top_p, "
            "multiturn.filter.value=1 and multiturn.filter.place=refill instead"
        )
    if settings.max_action_tokens > config.data.max_response_length:
        raise ValueError(
            f"multiturn.max_action_tokens={settings.max_action_tokens} exceeds "
            f"data.max_response_length={config.data.max_response_length}"
        )
    _check_rows(config)
    _check_audit(config)
    _check_kl(config)


def _check_bilevel(settings: DictConfig) -> None:
    for name, value in keywords(settings).items():
        kind = bool if name == "whiten" else float
        if name not in ("gamma", "lam", "gamma_turn", "whiten"):
            raise unknown("keyword of bilevel_gae", name, ("gamma", "lam", "gamma_turn", "whiten"))
        if kind is bool and not isinstance(value, bool):
            raise ValueError(f"multiturn.bilevel_gae.whiten={value!r} must be true or false")
        if kind is float and not (isinstance(value, int | float) and 0 <= value <= 1):
            raise ValueError(f"multiturn.bilevel_gae.{name}={value!r} must be a number in [0, 1]")


def _check_search(settings: DictConfig) -> None:
    """The stages of a Q model."""
    FitConfig.of(plain(settings.fit))
    option = "multiturn.qvalue.prior=FOLDER"
    settings.search.prior = prior_rule(plain(settings.search), settings.qvalue.prior, option)
    block = settings.qvalue
    Rules(list(block.select), block.n, "to be fitted", block.tau, block.scorer)
    if block.scorer == "vllm" and (settings.fit.loss != "dpo" or settings.fit.lora_rank):
        raise ValueError(
            "multiturn.qvalue.scorer=vllm cannot read a head or an adapter: use scorer=engine, or "
            "fit.loss=dpo with fit.lora_rank=0"
        )
    if _snapshots(settings.env) == "none":
        raise ValueError(
            f'{settings.env} declares snapshots = "none", and a tree search goes back to snapshots: qvalue '
            "needs another environment"
        )


def _check_q_advantage(config: DictConfig) -> None:
    """The Q model, and what a step must be for it."""
    settings = config.multiturn
    QAdvantageConfig.of(plain(settings.q_advantage))
    if config.trainer.v1.trainer_mode == "colocate_async":
        raise ValueError(
            "trainer.v1.trainer_mode=colocate_async changes the weights while answers are sampled, and "
            "q_advantage asks the policy that it trains: use sync"
        )
    if settings.in_process and config.trainer.device != "cpu":
        raise ValueError(
            "multiturn.in_process=true would put the Q model of q_advantage on the GPU beside the servers: "
            "leave it out"
        )


def _check_vine(config: DictConfig) -> None:
    """Where the values of vineppo are to come from."""
    settings, mode = config.multiturn, config.trainer.v1.trainer_mode
    vine = Vine.of(plain(settings), config.actor_rollout_ref.rollout.n)
    if settings.vineppo.scope == "minibatch" and config.actor_rollout_ref.actor.shuffle:
        raise ValueError(
            "multiturn.vineppo.scope=minibatch whitens the rows that an update takes, and actor_rollout_ref."
            "actor.shuffle=true draws them later: use shuffle=false, or scope=batch"
        )
    if mode == "colocate_async":
        raise ValueError(
            "trainer.v1.trainer_mode=colocate_async changes the weights under running episodes, and vineppo "
            "needs values of the policy that it trains: use sync"
        )
    if vine.rollouts and _snapshots(settings.env) == "none":
        raise ValueError(
            f'{settings.env} declares snapshots = "none", and vineppo plays on from snapshots: use another '
            "algorithm, or multiturn.vine.rollouts=0"
        )


def _check_archer(config: DictConfig) -> None:
    """The critic's settings, and what a step must be for them."""
    settings, mode = config.multiturn, config.trainer.v1.trainer_mode
    archer, critic = archer_config(plain(settings.archer)), critic_config(plain(settings.critic))
    asks = critic.v_target == "policy" or archer.mode == "in_silico"
    if asks and mode == "colocate_async":
        raise ValueError(
            "trainer.v1.trainer_mode=colocate_async changes the weights while utterances are sampled, and "
            "archer asks the policy that it trains: use sync, or multiturn.critic.v_target=sarsa"
        )
    if critic.v_target == "policy" and critic.uncovered != "refuse":
        raise ValueError(
            f"multiturn.critic.uncovered={critic.uncovered} has no effect in a run: the policy is asked at "
            "every drawn state; leave it out"
        )
    if archer.state == "prompt" and critic.bootstrap_on_truncation:
        raise ValueError(
            "multiturn.critic.bootstrap_on_truncation needs a text of the state after the end, which has no "
            "prompt: use multiturn.archer.state=history or observation"
        )
    if settings.critic.gpus > 0.6:
        raise ValueError(
            f"multiturn.critic.gpus={settings.critic.gpus:g} exceeds 0.6: verl's own workers need the rest "
            "of the GPU"
        )
    if settings.critic.gpus and config.trainer.device == "cpu":
        raise ValueError(f"multiturn.critic.gpus={settings.critic.gpus:g} on trainer.device=cpu: use 0")
    if archer.mode == "in_silico":
        if settings.filter.strategy is not None or settings.information.every is not None:
            raise ValueError(
                "multiturn.archer.mode=in_silico trains on single utterances: leave "
                "multiturn.filter.strategy and multiturn.information.every out, or use on_policy"
            )
        mini = config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
        if mini > archer.states:
            raise ValueError(
                f"a mini-batch of {mini} rows (ppo_mini_batch_size x rollout.n) exceeds "
                f"multiturn.archer.states={archer.states}: lower "
                "actor_rollout_ref.actor.ppo_mini_batch_size"
            )


def _check_rewards(settings: DictConfig) -> None:
    """Settings of the rewards that the run's algorithm would not see, or that would count twice."""
    if settings.information.ema is not None and settings.information.ema >= 1:
        raise ValueError(
            f"multiturn.information.ema={settings.information.ema:g} would never take in a new std: use less "
            "than 1, the paper's code 0.9"
        )
    rule, name = group_filter(plain(settings.filter)), settings.algorithm
    normalize = Normalize(**plain(settings.normalize))
    if settings.turn_rewards is not None and name not in ("ppo", *TOKEN_ALGORITHMS):
        raise ValueError(
            f"multiturn.turn_rewards={str(settings.turn_rewards).lower()} has no effect on {name}: it is for "
            "ppo and bilevel_gae"
        )
    if normalize.by is not None and (
        name not in ("ppo", "grpo", *TOKEN_ALGORITHMS) or turn_rewards(settings)
    ):
        raise ValueError(
            "multiturn.normalize.by is for whole returns of ppo, grpo or bilevel_gae with "
            "multiturn.turn_rewards=false: leave it out"
        )
    if settings.format_penalty and name == "gigpo" and settings.gigpo.invalid_penalty:
        raise ValueError(
            "multiturn.format_penalty and multiturn.gigpo.invalid_penalty would punish a turn twice: set one"
        )
    if rule.strategy is not None and rule.reweight:
        raise ValueError("multiturn.filter.reweight is instead of dropping groups: leave strategy out")
    if rule.strategy is None and rule.scale != "none":
        raise ValueError(f"multiturn.filter.scale={rule.scale} needs multiturn.filter.strategy")


def _check_kl(config: DictConfig) -> None:
    """What `multiturn.kl_aggregation` changes, if it is not verl's."""
    actor = config.actor_rollout_ref.actor
    if config.multiturn.kl_aggregation == "verl":
        return
    if not actor.use_kl_loss:
        raise ValueError(
            "multiturn.kl_aggregation=sequence_sum is of a KL that actor_rollout_ref.actor.use_kl_loss=false "
            "leaves out: leave it out, too, or set use_kl_loss=true"
        )
    if actor.loss_agg_mode != "token-mean":
        raise ValueError(
            "multiturn.kl_aggregation=sequence_sum converts verl's mean over tokens, and "
            f"actor_rollout_ref.actor.loss_agg_mode is {actor.loss_agg_mode}: use token-mean (with "
            "seq-mean-token-sum verl's KL is that sum already)"
        )


def _check_audit(config: DictConfig) -> None:
    """What `multiturn.audit` plays on from, if it is on."""
    env = config.multiturn.env
    if Audit.of(config) is None:
        return
    if _snapshots(env) == "none":
        raise ValueError(
            f'{env} declares snapshots = "none", and multiturn.audit plays on from snapshots: leave '
            "multiturn.audit.every out, or use another environment"
        )


def _check_rows(config: DictConfig) -> None:
    """verl counts a mini-batch in rows; too large a one would be filled up with padding."""
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    rows, mini = config.data.train_batch_size * n, actor.ppo_mini_batch_size * n
    if config.multiturn.row == "trajectory" and mini > rows:
        raise ValueError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} x rollout.n={n} is "
            f"{mini} rows, a step has {rows} (data.train_batch_size={config.data.train_batch_size} x {n}): "
            f"use at most {config.data.train_batch_size}"
        )
    if config.multiturn.row == "trajectory" and rows % mini:
        raise ValueError(
            f"a step has {rows} rows, not a multiple of the mini-batch of {mini} rows "
            f"(ppo_mini_batch_size={actor.ppo_mini_batch_size} x rollout.n={n})"
        )
    if config.actor_rollout_ref.rollout.n == 1 and config.multiturn.algorithm in ("grpo", "gigpo", "rloo"):
        raise ValueError(
            f"{config.multiturn.algorithm} compares the members of a group: actor_rollout_ref.rollout.n=1 "
            "leaves nothing to compare, use 2 or more"
        )
    if config.multiturn.normalize.by == "group" and n == 1:
        raise ValueError(
            "multiturn.normalize.by=group compares a return with the others of its group, and "
            "actor_rollout_ref.rollout.n=1 leaves none, so that every return would be 0: use n=2 or more, or "
            "by=batch"
        )
    most = rows * (config.multiturn.max_turns or math.inf)
    if mini > most:
        raise ValueError(
            f"a mini-batch of {mini} rows (ppo_mini_batch_size x rollout.n) exceeds the {most} rows that a "
            "step can have: lower actor_rollout_ref.actor.ppo_mini_batch_size"
        )


def _snapshots(env: str) -> str:
    return getattr(load_class(env, Env), "snapshots", Env.snapshots)
