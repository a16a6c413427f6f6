"""Keys that are set and change nothing in this run.

A key counts as set where its value is neither the default nor what a hardware preset gives: presets
prepare for every algorithm, so that one may be switched by an override.
"""

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.compose import CONFIG, plain
from verl_multiturn.doctor_report import Line
from verl_multiturn.methods import TOKEN_ALGORITHMS, VERL_ALGORITHMS

PART = "keys without effect"
BLOCKS = (
    *("gigpo", "rloo", "reinforce", "turn_gae", "bilevel_gae", "vineppo", "archer", "q_advantage"),
    "keywords",
)


def lines(config: DictConfig, base: DictConfig) -> list[Line]:
    """One warning per key or group of keys that has no effect."""
    changed = _set_keys(config, base)
    found = []
    for pattern, why in _rules(config):
        matched = [name for name in changed if re.fullmatch(pattern, name)]
        changed = [name for name in changed if name not in matched]
        if matched:
            found.append(Line(PART, "warn", "dead", f"{', '.join(matched)}: {why}"))
    return found or [Line(PART, "ok", "dead", "none found among the keys that this run sets")]


def _set_keys(config: DictConfig, base: DictConfig) -> list[str]:
    default = dict(_leaves(OmegaConf.to_container(base)))
    presets: dict[str, list[Any]] = {}
    for file in sorted((CONFIG / "hardware").glob("*.yaml")):
        for name, value in _leaves(OmegaConf.to_container(OmegaConf.load(file))):
            presets.setdefault(name, []).append(value)
    unset = object()
    return [
        name
        for name, value in _leaves(OmegaConf.to_container(config))
        if value != default.get(name, unset) and value not in presets.get(name, [])
    ]


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _rules(config: DictConfig) -> Iterator[tuple[str, str]]:
    """(Regular expression over dotted names, why they have no effect), for this configuration."""
    settings = config.multiturn
    block = "keywords" if ":" in settings.algorithm else settings.algorithm
    for other in BLOCKS:
        if other != block:
            yield rf"multiturn\.{other}\..+", f"multiturn.algorithm is {settings.algorithm}"
    if settings.algorithm != "vineppo":
        yield r"multiturn\.vine\..+", f"multiturn.algorithm is {settings.algorithm}"
    elif settings.vine.horizon is None:
        yield r"multiturn\.vine\.horizon_value", "multiturn.vine.horizon is null: nothing is cut"
    if settings.audit.every is None:
        yield r"multiturn\.audit\..+", "multiturn.audit.every is null: no values are audited"
    if settings.algorithm != "qvalue":
        yield r"multiturn\.(search|pairs|fit|qvalue)\..+", "read by the stages of a Q model, not by a run"
    if settings.algorithm != "archer":
        yield r"multiturn\.critic\..+", f"multiturn.algorithm is {settings.algorithm}"
    elif settings.archer.mode == "on_policy":
        yield r"multiturn\.archer\.states", "multiturn.archer.mode is on_policy"
    if settings.algorithm not in VERL_ALGORITHMS:
        where = f"multiturn.{block}" if ":" not in block else "multiturn.keywords"
        names = "gamma|lam|norm_adv_by_std_in_grpo|use_pf_ppo|pf_ppo.*"
        yield rf"algorithm\.({names})", f"{settings.algorithm} is ours: see {where}"
    elif config.algorithm.adv_estimator == "grpo":
        yield r"algorithm\.(gamma|lam)", "GRPO has no discount"
    yield from _roles(config)
    yield from _modes(config)
    yield from _prompt(plain(settings.prompt), settings)
    yield from _gigpo(settings)
    if settings.filter.strategy is None:
        used = "score|returns|reweight" if settings.filter.reweight else "reweight"
        yield rf"multiturn\.filter\.(?!({used})$).+", "multiturn.filter.strategy is null: all groups are kept"


def _roles(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Models that this run does not have."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if config.critic.enable is False:
        # `critic.enable` itself is derived from the algorithm.
        yield r"critic\.(?!enable$).+", "the run has no critic"
    if not actor.use_kl_loss:
        yield r"actor_rollout_ref\.actor\.kl_loss_\w+", "actor_rollout_ref.actor.use_kl_loss is false"
        if not algorithm.use_kl_in_reward:
            yield r"actor_rollout_ref\.ref\..+", "the run has no reference model: no KL term is on"
    if not algorithm.use_kl_in_reward:
        yield r"algorithm\.kl_(ctrl\..+|penalty)", "algorithm.use_kl_in_reward is false"
    yield (
        r"(reward\.(?!num_workers$)|reward_model\.|custom_reward_function\.|sandbox_fusion\.).+",
        ("episodes are scored by their environment, verl's reward functions are not called"),
    )
    if config.actor_rollout_ref.model.path != "small":
        yield r"multiturn\.small_model\..+", "actor_rollout_ref.model.path is not small"


def _modes(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Parts of verl that this run does not enter."""
    mode = config.trainer.v1.trainer_mode
    for other in ("sync", "colocate_async", "separate_async"):
        if other != mode:
            yield rf"trainer\.v1\.{other}\..+", f"trainer.v1.trainer_mode is {mode}"
    if config.actor_rollout_ref.rollout.agent.default_agent_loop == "multiturn":
        yield (
            r"actor_rollout_ref\.rollout\.multi_turn\..+",
            ("for verl's tool_agent loop only; turns are set under multiturn (max_turns, prompt, action)"),
        )
    if config.data.custom_cls.name == "EnvDataset":
        names = r"prompt_key|reward_fn_key|filter_overlong_prompts\w*|truncation|return_\w+|\w+_key"
        yield rf"data\.({names})", "tasks come from panels, not from parquet files"
    if config.algorithm.filter_groups.enable is False:
        yield r"algorithm\.filter_groups\.(?!enable$).+", "algorithm.filter_groups.enable is false"
    if config.actor_rollout_ref.actor.use_dynamic_bsz:
        yield r"actor_rollout_ref\.actor\.ppo_micro_batch_size\w*", "use_dynamic_bsz decides micro-batches"


def _prompt(prompt: dict[str, Any], settings: DictConfig) -> Iterator[tuple[str, str]]:
    """Templates that no prompt of this run is made of."""
    key = r"multiturn\.prompt\."
    if prompt["policy"] is not None:
        return  # a policy of the user's own may read any of them
    if settings.row == "trajectory":
        yield key + r"(turn|history|history_item)", "trajectory rows append to one chat: first, then next"
        used = prompt["first"] + prompt["next"]
    else:
        yield key + "next", "turn rows start a fresh chat each turn: first, then turn"
        used = prompt["first"] + prompt["turn"]
        if prompt["history"] == 0:
            yield key + "(turn|history_item)", "multiturn.prompt.history is 0"
            used = prompt["first"]
        elif "{history}" not in prompt["turn"]:
            yield key + "history_item", "multiturn.prompt.turn does not show {history}"
    for name in ("format", "admissible", "several"):
        if f"{{{name}}}" not in used:
            yield key + name, f"no template of this run shows {{{name}}}"
    if settings.action.max_actions == 1:
        yield r"multiturn\.(action\.separator|prompt\.several)", "multiturn.action.max_actions is 1"


def _gigpo(settings: DictConfig) -> Iterator[tuple[str, str]]:
    """Keywords of GiGPO that another one switches off."""
    if settings.algorithm == "gigpo":
        if not settings.gigpo.invalid_penalty:
            yield r"multiturn\.gigpo\.penalty", "multiturn.gigpo.invalid_penalty is 0"
        if settings.gigpo.step_weight == 0:
            yield r"multiturn\.gigpo\.(gamma|similarity|singleton)", "multiturn.gigpo.step_weight is 0"
    elif settings.algorithm in (
        *VERL_ALGORITHMS,
        *TOKEN_ALGORITHMS,
        "rloo",
        "reinforce",
        "turn_gae",
        "vineppo",
        "archer",
        "q_advantage",
    ):
        yield r"multiturn\.anchor", f"{settings.algorithm} compares no states (anchors are only recorded)"
