"""Types and least values of the settings that verl or we would otherwise trip over in the middle of a run."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

# key -> (type, least value); a trailing ? allows null
VALUES: dict[str, tuple[type, float]] = {
    "multiturn.algorithm": (str, 0),
    "multiturn.env": (str, 0),
    "multiturn.run": (str, 0),
    "multiturn.anchor": (str, 0),
    "multiturn.row": (str, 0),
    "multiturn.action.tag?": (str, 0),
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
    "multiturn.env_threads": (int, 1),
    "multiturn.failures.min_share": (float, 0),
    "multiturn.failures.refills": (int, 0),
    "multiturn.seeded": (bool, 0),
    "multiturn.seed": (int, 0),
    "multiturn.poll_interval": (float, 0.001),
    "multiturn.val_size?": (int, 1),
    "multiturn.small_model.width": (int, 32),
    "multiturn.small_model.layers": (int, 1),
    "multiturn.small_model.steps": (int, 1),
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
    "trainer.device": (str, 0),
}
NAMES = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
TEMPLATES = ("first", "turn", "next", "history_item", "admissible", "format")
BLOCKS = ("action", "prompt", "failures", "small_model", "gigpo", "reinforce", "turn_gae", "rloo")


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
    for split, optional in (("train", False), ("val", False), ("test", True)):
        _check_tasks(f"multiturn.{split}", config.multiturn[split], optional)


def _fits(value: Any, kind: type, least: float) -> bool:
    if kind in (str, bool):
        return isinstance(value, kind)
    if isinstance(value, bool) or not isinstance(value, int | (float if kind is float else int)):
        return False
    return bool(value >= least)


def _check_tasks(key: str, value: Any, optional: bool) -> None:
    if isinstance(value, str) or (value is None and optional):
        return
    if isinstance(value, DictConfig) and set(value) == {"first_seed", "size"}:
        if _fits(value.first_seed, int, 0) and _fits(value.size, int, 1):
            return
    raise ValueError(
        f"{key}={value!r} must be the name or file of a panel, or {{first_seed: N, size: at least 1}}"
        + (" or null" if optional else "")
    )
