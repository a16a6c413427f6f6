"""From a recipe's name and overrides to a checked configuration; every refusal is one sentence.

Nothing here imports torch, ray or verl's trainer: a wrong configuration is refused in a second.
"""

import math
import os
import re
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_multiturn.algorithms import find, list_algorithms
from verl_multiturn.errors import unknown
from verl_multiturn.recipes_index import list_recipes, recipes_dir
from verl_multiturn.rollout.parsing import ActionFormat
from verl_multiturn.rollout.prompts import Templates

CONFIG = Path(__file__).parent / "config"
VERL_ALGORITHMS = {"grpo": "grpo", "ppo": "gae", "verl": None}  # name -> verl's adv_estimator
LAYOUTS = ("turn", "trajectory")
MODES = ("sync", "colocate_async", "separate_async")


def compose(recipe: str, overrides: list[str]) -> DictConfig:
    """Compose a recipe with hydra and check every key.

    Raises:
        ValueError: unknown recipe, key, preset or value; the sentence names the valid ones.
    """
    if recipe not in ("multiturn", *list_recipes()):
        raise unknown("recipe", recipe, list_recipes(), "Recipes are the YAML files in recipes/.")
    config = _hydra(recipe, overrides)
    if missing := sorted(OmegaConf.missing_keys(config) & {"multiturn.env", "actor_rollout_ref.model.path"}):
        raise ValueError(f"{' and '.join(missing)} must be set, e.g. {missing[0]}=...")
    if recipe != "multiturn":
        check_keys(config, _hydra("multiturn", []))
    return config


def _hydra(recipe: str, overrides: list[str]) -> DictConfig:
    # Hydra accepts a search path only in a primary YAML or as an override.
    paths = f"hydra.searchpath=[file://{CONFIG},pkg://verl.trainer.config]"
    folder = CONFIG if recipe == "multiturn" else recipes_dir()
    try:
        with hydra.initialize_config_dir(str(folder), version_base=None):
            return hydra.compose(recipe, [paths, *overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_explain(str(error), recipe)) from None


def _explain(message: str, recipe: str) -> str:
    """Hydra's refusal in one sentence, with the nearest match where a name is wrong."""
    found = re.search(r"Could not override '([^']+)'", message)
    if found:
        keys = sorted(_leaves(_hydra(recipe, [])))
        hint = "To add a key that verl reads but does not list, write +key=value."
        return str(_nearest(found.group(1), keys, hint))
    found = re.search(r"In '[^']*': Could not find '(\w+)/(\w+)'", message)
    if found:
        presets = [path.stem for path in sorted((CONFIG / found.group(1)).glob("*.yaml"))]
        return str(unknown(f"{found.group(1)} preset", found.group(2), presets))
    return " ".join(message.split())


def _nearest(key: str, keys: list[str], hint: str = "") -> ValueError:
    """An unknown key, with the keys that stand beside it."""
    parent, _, name = key.rpartition(".")
    beside = [k.rpartition(".")[2] for k in keys if k.rpartition(".")[0] == parent]
    if beside:
        return unknown(f"config key in {parent or 'the top level'}:", name, beside, hint)
    return unknown("config key", key, [k for k in keys if k.rpartition(".")[2] == name], hint)


def _leaves(config: Any, prefix: str = "") -> set[str]:
    """Dotted names of every key, groups included."""
    names = set()
    for key in config:
        name = f"{prefix}{key}"
        names.add(name)
        node = None if OmegaConf.is_missing(config, key) else config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation():
            names |= _leaves(node, name + ".")
    return names


def check_keys(config: DictConfig, schema: DictConfig) -> None:
    """Refuse keys that neither verl nor we know: verl's `algorithm` block would ignore them silently.

    Groups that are empty in the schema (engine_kwargs.vllm, env_kwargs, ...) are free.
    """
    known = _leaves(schema)
    for name in sorted(_leaves(config) - known):
        parent = name.rpartition(".")[0]
        while parent and parent not in known:
            parent = parent.rpartition(".")[0]
        above = OmegaConf.select(schema, parent) if parent else schema
        if isinstance(above, DictConfig) and len(above) and name.rpartition(".")[0] == parent:
            raise _nearest(name, sorted(known))


def prepare(config: DictConfig) -> DictConfig:
    """Derive what follows from `multiturn.algorithm`, check what can be checked before a process starts.

    Raises:
        ValueError: a contradiction; the sentence says what to change.
    """
    settings = config.multiturn
    _check_choices(config)
    _derive_algorithm(config)
    with open_dict(config):
        if ".py" in settings.env:
            path, _, name = settings.env.partition(":")
            settings.env = f"{Path(path).resolve()}:{name}" if name else str(Path(path).resolve())
        settings.run = str(Path(settings.run).resolve())
    if config.algorithm.use_kl_in_reward and settings.algorithm not in VERL_ALGORITHMS:
        raise ValueError(
            f"algorithm.use_kl_in_reward changes token rewards, which {settings.algorithm} does not read: "
            "use actor_rollout_ref.actor.use_kl_loss=true instead"
        )
    _check_rows(config)
    if settings.max_action_tokens > config.data.max_response_length:
        raise ValueError(
            f"multiturn.max_action_tokens={settings.max_action_tokens} exceeds "
            f"data.max_response_length={config.data.max_response_length}"
        )
    return config


def _check_choices(config: DictConfig) -> None:
    settings = config.multiturn
    for key, value, valid in (
        ("multiturn.algorithm", settings.algorithm, list_trainable()),
        ("multiturn.row", settings.row, LAYOUTS),
        ("trainer.v1.trainer_mode", config.trainer.v1.trainer_mode, MODES),
    ):
        if value not in valid and not (key == "multiturn.algorithm" and ":" in value):
            raise unknown(f"value of {key}", value, valid)
    prompt = OmegaConf.to_container(settings.prompt, resolve=True)
    Templates(**{name: value for name, value in prompt.items() if name != "policy"})
    ActionFormat(**OmegaConf.to_container(settings.action, resolve=True))
    if settings.algorithm not in VERL_ALGORITHMS:
        find(settings.algorithm).configure(keywords(settings))
    if not 0 < settings.failures.min_share <= 1:
        raise ValueError(f"multiturn.failures.min_share={settings.failures.min_share} must be in (0, 1]")
    if config.trainer.v1.trainer_mode == "separate_async":
        where = "needs a second device and a weight transfer between devices (nccl and the like)"
        if config.trainer.device == "cpu":
            raise ValueError(f"trainer.v1.trainer_mode=separate_async {where}; a CPU has neither: use sync")
        raise ValueError(f"trainer.v1.trainer_mode=separate_async {where}; it is not supported yet: use sync")


def keywords(settings: DictConfig) -> dict[str, Any]:
    """The keywords of the run's algorithm: its own block, or `multiturn.keywords` for a user's own."""
    block = settings.keywords if ":" in settings.algorithm else settings.get(settings.algorithm, {})
    return dict(OmegaConf.to_container(OmegaConf.create(block), resolve=True))  # type: ignore[arg-type]


def list_trainable() -> tuple[str, ...]:
    """Values of `multiturn.algorithm`."""
    return (*sorted(set(list_algorithms()) | {"grpo"}), "ppo", "verl")


def _derive_algorithm(config: DictConfig) -> None:
    """`multiturn.algorithm` decides verl's estimator and critic; a contradiction is refused."""
    settings, name = config.multiturn, config.multiturn.algorithm
    estimator = VERL_ALGORITHMS.get(name, name)
    given = config.algorithm.adv_estimator
    if estimator is None:
        if given is None:
            raise ValueError("multiturn.algorithm=verl needs algorithm.adv_estimator, e.g. reinforce_plus_plus")
    elif given not in (None, estimator):
        raise ValueError(
            f"algorithm.adv_estimator={given} contradicts multiturn.algorithm={name}: set the latter only"
        )
    else:
        config.algorithm.adv_estimator = estimator
    if name in ("ppo", "verl") and settings.row != "trajectory":
        raise ValueError(
            f"multiturn.algorithm={name} with multiturn.row=turn would score every turn as an episode of its "
            "own: use multiturn.row=trajectory, or one of grpo, rloo, reinforce, turn_gae, gigpo"
        )
    critic = name in ("turn_gae", "ppo") or (name == "verl" and config.algorithm.adv_estimator == "gae")
    if config.critic.enable not in (None, critic):
        raise ValueError(
            f"critic.enable={config.critic.enable} contradicts multiturn.algorithm={name}, "
            f"which {'needs a critic' if critic else 'has none'}: leave it out"
        )
    config.critic.enable = critic
    if critic and config.critic.model.path != config.actor_rollout_ref.model.path:
        if str(config.critic.model.path).startswith("~/models/"):  # verl's placeholder
            config.critic.model.path = config.actor_rollout_ref.model.path


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
    most = rows * (config.multiturn.max_turns or math.inf)
    if mini > most:
        raise ValueError(
            f"a mini-batch of {mini} rows (ppo_mini_batch_size x rollout.n) exceeds the {most} rows that a "
            "step can have: lower actor_rollout_ref.actor.ppo_mini_batch_size"
        )


def check_hardware(config: DictConfig, cuda: bool) -> None:
    """Refuse a run on GPUs where there is none, and name the switch."""
    if config.trainer.device != "cpu" and not cuda:
        raise ValueError(
            "this recipe is for GPUs and none was found: add hardware=cpu for a real run on this machine "
            "with the small default model"
        )


def without_flash_attention(config: DictConfig, installed: bool) -> None:
    """Fall back to PyTorch's attention where flash-attn is not installed."""
    model = config.actor_rollout_ref.model
    if installed or "attn_implementation" in model.override_config:
        return
    for part in (config.actor_rollout_ref.model, config.critic.model):
        with open_dict(part):
            part.override_config.attn_implementation = "sdpa"
            part.use_remove_padding = False
    if config.critic.enable and config.trainer.device != "cpu":
        raise ValueError(
            "verl's critic needs flash-attn on a GPU: install it as README says (extra `flash`), or use an "
            "algorithm without a critic"
        )


def has_cuda() -> bool:
    """Whether a GPU of NVIDIA's is there, without importing torch."""
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidia0")
