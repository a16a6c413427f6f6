"""From a recipe's name and overrides to a configuration whose every key is known.

verl's `algorithm` block ignores unknown keys silently, and a YAML may add any: each key is compared
with those of verl's and our base configuration. A refusal is one sentence.
"""

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_multiturn.errors import unknown
from verl_multiturn.recipes_index import list_recipes, recipe_folder, recipe_folders

CONFIG = Path(__file__).parent / "config"
NO_RECIPE = "Recipes are the YAML files in recipes/ and $VERL_MULTITURN_RECIPES that have a recipe block."
REQUIRED = ("multiturn.env", "actor_rollout_ref.model.path")
TASKS = ("multiturn.train", "multiturn.val", "multiturn.test")
ENVIRONMENT = "multiturn.env_kwargs."
# Their keys are the environment's, the algorithm's, the user's; those of tasks depend on one another.
FREE = ("multiturn.env_kwargs", "multiturn.keywords", "multiturn.also", *TASKS)


def plain(config: DictConfig) -> dict[str, Any]:
    """A group of the configuration as a plain, resolved dict."""
    return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]


def compose(recipe: str, overrides: list[str]) -> DictConfig:
    """Compose a recipe with hydra and check every key.

    Raises:
        ValueError: unknown recipe, key, preset or value; the sentence names the valid ones.
    """
    if recipe not in ("multiturn", *list_recipes()):
        raise unknown("recipe", recipe, list_recipes(), NO_RECIPE)
    config = _hydra(recipe, [part for one in overrides for part in _freed(one)])
    if config.multiturn.env_kwargs is None:
        config.multiturn.env_kwargs = {}
    if missing := [name for name in REQUIRED if OmegaConf.select(config, name) is None]:
        raise ValueError(f"{' and '.join(missing)} must be set, e.g. {missing[0]}=...")
    if recipe != "multiturn":
        check_keys(config, _schema())
    return config


@cache
def _schema() -> DictConfig:
    """Every key there is; never changed, as it is composed once."""
    return _hydra("multiturn", [])


def _freed(override: str) -> list[str]:
    """An override as hydra takes it: a free key may be new, and new tasks replace the recipe's whole.

    Hydra sets only keys that exist, unless it reads ++, and would merge {split} into {first_seed, size}.
    """
    if override.startswith(tuple(f"{name}={{" for name in TASKS)):
        return [f"~{override.partition('=')[0]}", f"++{override}"]
    free = tuple(f"{name}{end}" for name in FREE for end in ("=", "."))
    return [f"++{override}" if override.startswith(free) else override]


def _hydra(recipe: str, overrides: list[str]) -> DictConfig:
    # Hydra accepts a search path only in a primary YAML or as an override. By folder, not as pkg://,
    # which would import verl before the settings of hardware=cpu are known.
    verl = importlib.util.find_spec("verl")
    if verl is None or verl.origin is None:
        raise ValueError("verl is not installed: bash recipes/setup.sh cpu (or gpu)")
    folder = CONFIG if recipe == "multiturn" else recipe_folder(recipe)
    parts = [CONFIG, Path(verl.origin).parent / "trainer" / "config"]
    parts += [] if recipe == "multiturn" else recipe_folders()  # last: they must not hide verl's
    paths = f"hydra.searchpath=[{','.join(f'file://{part}' for part in parts if part != folder)}]"
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
        return str(_nearest(found.group(1), keys))
    found = re.search(r"In '[^']*': Could not find '(\w+)/(\w+)'", message)
    if found:
        presets = [path.stem for path in sorted((CONFIG / found.group(1)).glob("*.yaml"))]
        return str(unknown(f"{found.group(1)} preset", found.group(2), presets))
    return " ".join(message.split())


def _nearest(key: str, keys: list[str]) -> ValueError:
    """An unknown key, with the keys that stand beside it."""
    parent, _, name = key.rpartition(".")
    beside = [k.rpartition(".")[2] for k in keys if k.rpartition(".")[0] == parent]
    if beside:
        return unknown(f"config key in {parent or 'the top level'}:", name, beside)
    return unknown("config key", key, [k for k in keys if k.rpartition(".")[2] == name])


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

    Groups that are empty in the schema (engine_kwargs.vllm, ...) are free, and so are an environment's
    keywords, of which a recorded run as schema may have had some.
    """
    known = _leaves(schema)
    for name in sorted(_leaves(config) - known):
        if name.startswith(ENVIRONMENT):
            continue
        parent = name.rpartition(".")[0]
        while parent and parent not in known:
            parent = parent.rpartition(".")[0]
        above = OmegaConf.select(schema, parent) if parent else schema
        if isinstance(above, DictConfig) and len(above) and name.rpartition(".")[0] == parent:
            raise _nearest(name, sorted(known))
