"""Types and least values of the settings that verl or we would otherwise trip over in the middle of a run."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.errors import unknown

# key -> (type, least value); a trailing ? allows null
VALUES: dict[str, tuple[type, float]] = {
    "multiturn.algorithm": (str, 0),
    "multiturn.env": (str, 0),
    "multiturn.run": (str, 0),
    "multiturn.anchor": (str, 0),
    "multiturn.row": (str, 0),
    "multiturn.format_penalty": (float, 0),
    "multiturn.turn_rewards?": (bool, 0),
    "multiturn.normalize.by?": (str, 0),
    "multiturn.normalize.method": (str, 0),
    "multiturn.kl_aggregation": (str, 0),
    "multiturn.filter.strategy?": (str, 0),
    "multiturn.filter.score": (str, 0),
    "multiturn.filter.value": (float, 0),
    "multiturn.filter.mass": (str, 0),
    "multiturn.filter.largest": (bool, 0),
    "multiturn.filter.include_zero": (bool, 0),
    "multiturn.filter.eps": (float, 0),
    "multiturn.filter.returns": (str, 0),
    "multiturn.filter.place": (str, 0),
    "multiturn.filter.reweight": (bool, 0),
    "multiturn.filter.scale": (str, 0),
    "multiturn.filter.stop_after?": (int, 1),
    "multiturn.information.every?": (int, 1),
    "multiturn.information.samples": (int, 1),
    "multiturn.information.rule": (str, 0),
    "multiturn.information.ema?": (float, 0),
    "multiturn.vine.rollouts": (int, 0),
    "multiturn.vine.splitter": (str, 0),
    "multiturn.vine.fixed_tokens": (int, 1),
    "multiturn.vine.root": (str, 0),
    "multiturn.vine.max_states?": (int, 0),
    "multiturn.vine.every": (int, 1),
    "multiturn.vine.dedupe": (str, 0),
    "multiturn.vine.horizon?": (int, 1),
    "multiturn.vine.horizon_value": (str, 0),
    "multiturn.vine.select": (str, 0),
    "multiturn.vine.agreeing_groups": (str, 0),
    "multiturn.vine.adaptive?": (int, 1),
    "multiturn.vine.adaptive_width": (float, 0),
    "multiturn.vine.split_samples": (bool, 0),
    "multiturn.vine.max_inflight": (int, 1),
    "multiturn.audit.every?": (int, 1),
    "multiturn.audit.states": (int, 1),
    "multiturn.audit.rollouts": (int, 2),
    "multiturn.audit.max_inflight": (int, 1),
    "multiturn.archer.mode": (str, 0),
    "multiturn.archer.state": (str, 0),
    "multiturn.archer.updates": (int, 1),
    "multiturn.archer.utterances": (int, 1),
    "multiturn.archer.states": (int, 1),
    "multiturn.archer.normalize": (str, 0),
    "multiturn.archer.clip?": (float, 0),
    "multiturn.archer.token_baseline": (bool, 0),
    "multiturn.archer.max_inflight": (int, 1),
    "multiturn.q_advantage.q_model?": (str, 0),
    "multiturn.q_advantage.credit": (str, 0),
    "multiturn.q_advantage.baseline": (str, 0),
    "multiturn.q_advantage.candidates": (int, 1),
    "multiturn.q_advantage.gamma": (float, 0),
    "multiturn.q_advantage.normalize": (str, 0),
    "multiturn.q_advantage.clip?": (float, 0),
    "multiturn.q_advantage.max_inflight": (int, 1),
    "multiturn.critic.preset": (str, 0),
    "multiturn.critic.gpus": (float, 0),
    "multiturn.critic.cpus": (float, 0),
    "multiturn.action.tag?": (str, 0),
    "multiturn.action.think": (bool, 0),
    "multiturn.action.separator": (str, 0),
    "multiturn.action.max_actions": (int, 1),
    "multiturn.prompt.policy?": (str, 0),
    "multiturn.prompt.system?": (str, 0),
    "multiturn.prompt.history": (int, 0),
    "multiturn.max_action_tokens": (int, 1),
    "multiturn.max_turns?": (int, 1),
    "multiturn.max_actions?": (int, 1),
    "multiturn.step_timeout": (float, 0.001),
    "multiturn.episode_timeout": (float, 0.001),
    "multiturn.phase_timeout?": (float, 0.001),
    "multiturn.generate_timeout": (float, 0.001),
    "multiturn.env_threads": (int, 1),
    "multiturn.env_max_memory_mb?": (float, 1),
    "multiturn.env_max_episodes?": (int, 1),
    "multiturn.failures.group": (str, 0),
    "multiturn.failures.min_share": (float, 0),
    "multiturn.failures.refills": (int, 0),
    "multiturn.seeded": (bool, 0),
    "multiturn.seed": (int, 0),
    "multiturn.poll_interval": (float, 0.001),
    "multiturn.in_process": (bool, 0),
    "multiturn.val_size?": (int, 1),
    "multiturn.qvalue.tasks": (int, 1),
    "multiturn.qvalue.model?": (str, 0),
    "multiturn.qvalue.prior?": (str, 0),
    "multiturn.qvalue.stop_tasks?": (int, 1),
    "multiturn.qvalue.scorer": (str, 0),
    "multiturn.qvalue.n": (int, 1),
    "multiturn.qvalue.tau": (float, 1e-6),
    "multiturn.qvalue.samples": (int, 1),
    "multiturn.qvalue.limit?": (int, 1),
    "multiturn.qvalue.temperature?": (float, 0),
    "multiturn.small_model.vocabulary": (int, 300),
    "multiturn.small_model.width": (int, 32),
    "multiturn.small_model.layers": (int, 1),
    "multiturn.small_model.steps": (int, 1),
    "multiturn.small_model.seed?": (int, 0),
    "multiturn.small_model.prompt_weight": (float, 0),
    "multiturn.small_model.mistakes": (float, 0),
    "multiturn.small_model.imitate": (str, 0),
    "multiturn.small_model.mixed": (int, 1),
    "multiturn.small_model.noise": (float, 0),
    "multiturn.small_model.lr": (float, 0),
    "multiturn.small_model.cache?": (str, 0),
    "multiturn.small_model.episodes?": (int, 1),
    "multiturn.small_model.batch": (int, 1),
    "data.train_batch_size": (int, 1),
    "data.max_prompt_length": (int, 1),
    "data.max_response_length": (int, 1),
    "actor_rollout_ref.rollout.n": (int, 1),
    "actor_rollout_ref.actor.ppo_mini_batch_size": (int, 1),
    "actor_rollout_ref.model.path": (str, 0),
    "trainer.total_training_steps?": (int, 1),
    "trainer.test_freq": (int, -1),
    "trainer.save_freq": (int, -1),
    "trainer.critic_warmup": (int, 0),
    "trainer.device": (str, 0),
}
GROUPS = ("keep", "drop", "refill")  # multiturn.failures.group
NAMES = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
TEMPLATES = ("first", "turn", "next", "history_item", "admissible", "format", "several")
TASK_KEYS = ("first_seed", "size", "split")
# What stands beside val/<name> of a panel in the metrics.
OWN_METRICS = ("val", "success", "success_low", "success_high", "return", "turns", "episodes", "failed")
BLOCKS = (
    *("action", "prompt", "failures", "small_model", "filter", "normalize", "collapse", "information"),
    *("archer", "critic", "audit"),
    *("gigpo", "reinforce", "turn_gae", "rloo", "bilevel_gae", "vineppo", "vine"),
    *("search", "pairs", "fit", "qvalue", "q_advantage"),
)


def check_values(config: DictConfig) -> None:
    """Refuse a value of the wrong type, or one that is too small.

    Raises:
        ValueError: the key, its value, and what it must be.
    """
    for block in BLOCKS:
        if not isinstance(config.multiturn[block], DictConfig):
            raise ValueError(f"multiturn.{block}={config.multiturn[block]!r} must be a group of keys")
    texts = {f"multiturn.prompt.{name}": (str, 0) for name in TEMPLATES}
    for name, (kind, least) in (VALUES | texts).items():
        key, optional = name.removesuffix("?"), name.endswith("?")
        value = OmegaConf.select(config, key)
        if (value is None and optional) or _fits(value, kind, least):
            continue
        bound = f" of at least {least:g}" if kind in (int, float) and least > -1 else ""
        raise ValueError(f"{key}={value!r} must be {NAMES[kind]}{bound}{' or null' if optional else ''}")
    if (group := config.multiturn.failures.group) not in GROUPS:
        raise unknown("value of multiturn.failures.group", group, GROUPS)
    for split in ("train", "val", "test"):
        if config.multiturn[split] is not None:
            _check_tasks(f"multiturn.{split}", config.multiturn[split])
    _check_also(config.multiturn.also)


def _fits(value: Any, kind: type, least: float) -> bool:
    if kind in (str, bool):
        return isinstance(value, kind)
    if isinstance(value, bool) or not isinstance(value, int | (float if kind is float else int)):
        return False
    return bool(value >= least)


def _check_also(also: Any) -> None:
    if not isinstance(also, DictConfig):
        raise ValueError(f"multiturn.also={also!r} must be a group of panels, such as {{unseen: PANEL}}")
    for name, value in ((str(name), value) for name, value in also.items()):
        # It becomes a file of the run and a part of metric names.
        if name in OWN_METRICS or not name.replace("-", "_").isidentifier():
            raise ValueError(
                f"multiturn.also.{name}: a panel's name is a word of letters, digits, _ and -, and none of "
                f"{', '.join(OWN_METRICS)}"
            )
        _check_tasks(f"multiturn.also.{name}", value, alone=False)


def _check_tasks(key: str, value: Any, alone: bool = True) -> None:
    """A panel or a group of keys; `alone`: its size will do, as the role of the tasks gives the seeds."""
    if isinstance(value, str):
        return
    keys = set(value) if isinstance(value, DictConfig) else set()
    for name in sorted(keys - {*TASK_KEYS}, key=str):
        raise unknown(f"key of {key}", name, TASK_KEYS)
    if keys in ({"first_seed", "size"}, {"split"}, {"split", "size"}, {"size"} if alone else None):
        right = _fits(value.get("first_seed", 0), int, 0) and _fits(value.get("size", 1), int, 1)
        if right and isinstance(value.get("split", ""), str):
            return
    raise ValueError(
        f"{key}={value!r} must be the name or file of a panel, {{first_seed: N, size: at least 1}}, "
        f"{{split: NAME}} or {{split: NAME, size: at least 1}}{' or null' if alone else ''}"
    )
