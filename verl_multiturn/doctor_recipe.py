"""A recipe as `main` would take it: every refusal, which code will run, its panels and its model."""

import copy
import difflib
import os
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_multiturn import compose, configure, tasks
from verl_multiturn.demonstrations import small_folder
from verl_multiturn.doctor_report import Line
from verl_multiturn.doctor_setup import ray_socket
from verl_multiturn.errors import unknown
from verl_multiturn.main import kept
from verl_multiturn.methods import VERL_ALGORITHMS
from verl_multiturn.panel import Panel
from verl_multiturn.recipes_index import has_cuda, list_recipes

PART = "recipe"
MOST = 30  # refusals looked for
# Values that pass where verl's defaults would be refused again.
HARMLESS = {"actor_rollout_ref.actor.ppo_mini_batch_size": 1, "multiturn.max_action_tokens": 1}


@dataclass
class Composed:
    """A recipe, as far as it could be composed, and what was found on the way."""

    config: DictConfig | None = None  # prepared; where main refuses it, with the refusals mended
    lines: list[Line] = field(default_factory=list)
    accepted: bool = False  # main would not refuse it


@cache
def base() -> DictConfig:
    """verl's and our defaults: what a key is without a recipe."""
    return compose._hydra("multiturn", [])


def composed(recipe: str, overrides: list[str]) -> Composed:
    """Compose, collect every refusal, prepare.

    Raises:
        ValueError: no recipe of that name.
    """
    if recipe not in ("multiturn", *list_recipes()):
        raise unknown("recipe", recipe, list_recipes(), compose.NO_RECIPE)
    config, refused = _known_keys(recipe, overrides)
    if config is not None:
        config, more = _prepared(config)
        refused += more
    found = Composed(config, accepted=not refused)
    found.lines = [Line(PART, "FAIL", "refused", " ".join(sentence.split())) for sentence in refused]
    if config is not None and not refused:
        found.lines.append(Line(PART, "ok", "keys and values", "all known, no contradiction"))
        found.lines += [*_hardware(config), path(config)]
        if note := kept(config):
            found.lines.append(Line(PART, "warn", "best", note))
    return found


def _known_keys(recipe: str, overrides: list[str]) -> tuple[DictConfig | None, list[str]]:
    """The configuration without its unknown keys, and a sentence for each of these."""
    given, refused = list(overrides), list[str]()
    while True:
        try:
            config = compose._hydra(recipe, given)
            break
        except ValueError as error:
            refused.append(_with_guess(str(error)))
            wrong = [one for one in given if _key(one) in _named(str(error)) or one in str(error)]
            if not wrong:
                return None, refused
            given.remove(wrong[0])
    for _ in range(MOST):
        try:
            compose.check_keys(config, base())
            break
        except ValueError as error:
            refused.append(str(error))
            if not any(_drop(config, name) for name in _named(str(error))):
                break
    missing = [name for name in compose.REQUIRED if OmegaConf.select(config, name) is None]
    refused += [f"{name} must be set, e.g. {name}=..." for name in missing]
    return (None if missing else config), refused


def _with_guess(sentence: str) -> str:
    """Where no key of the same group is near, one of another group may be."""
    name = next(iter(_named(sentence)), "").rpartition(".")[2]
    if not name or "Did you mean" in sentence:
        return sentence
    # The last key of a name is kept: ours before verl's.
    leaves = sorted(compose._leaves(base()), key=lambda one: one.startswith("multiturn."))
    known = {one.rpartition(".")[2]: one for one in leaves}
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"{sentence} Did you mean {known[near[0]]!r}?" if near else sentence


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _named(sentence: str) -> list[str]:
    """The unknown key that a sentence of `compose` is about."""
    found = re.search(r"unknown config key(?: in ([^:]+):)? '([^']+)'", sentence)
    if found:
        parent = found.group(1)
        return [found.group(2) if parent in (None, "the top level") else f"{parent}.{found.group(2)}"]
    preset = re.search(r"unknown (\w+) preset '", sentence)
    return [preset.group(1)] if preset else []


def _drop(config: DictConfig, name: str) -> bool:
    parent, _, last = name.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    if not isinstance(node, DictConfig) or last not in node:
        return False
    with open_dict(node):
        del node[last]
    return True


def _prepared(config: DictConfig) -> tuple[DictConfig | None, list[str]]:
    """The prepared configuration and every refusal of `configure.prepare`.

    Each refusal is mended in a copy, so that the next one shows; None: one could not be mended.
    """
    trial, found, mended = config, list[str](), set[str]()
    while len(found) < MOST:
        try:
            return configure.prepare(copy.deepcopy(trial)), found
        except (ValueError, ImportError, AttributeError) as error:
            found.append(str(error))
            if not _mend(trial, str(error), mended):
                break
    return None, found


def _mend(config: DictConfig, sentence: str, mended: set[str]) -> bool:
    """Give the first key that a sentence names the value it suggests, else the default."""
    sentence = re.sub(r"^(\w+)Config\.", lambda found: f"multiturn.{found.group(1).lower()}.", sentence)
    sentence = re.sub(r"(?<![.\w])ppo_mini", "actor_rollout_ref.actor.ppo_mini", sentence)
    for name in re.findall(r"[a-z_]\w*(?:\.\w+)+", sentence):
        if name in mended or not _there(config, name):
            continue
        mended.add(name)
        near = re.search(r"Did you mean '([^']+)'", sentence)
        value = near.group(1) if near else HARMLESS.get(name, OmegaConf.select(base(), name))
        with open_dict(config):
            OmegaConf.update(config, name, value, merge=False)
        return True
    return False


def _there(config: DictConfig, name: str) -> bool:
    parent, _, last = name.rpartition(".")
    node = OmegaConf.select(config, parent, throw_on_missing=False)
    return isinstance(node, DictConfig) and last in node


def _hardware(config: DictConfig) -> list[Line]:
    """Refusals that depend on the machine."""
    found = []
    try:
        configure.check_hardware(config, has_cuda())
        found.append(Line(PART, "ok", "hardware", f"{config.trainer.device}"))
    except ValueError as error:
        found.append(Line(PART, "FAIL", "hardware", str(error)))
    if folder := config.ray_kwargs.ray_init._temp_dir:
        line = ray_socket(str(folder))
        found.append(Line(PART, line.status, line.name, line.text))
    return found


def path(config: DictConfig) -> Line:
    """Which code a run with these settings passes through."""
    settings, rollout = config.multiturn, config.actor_rollout_ref.rollout
    ours = settings.algorithm not in VERL_ALGORITHMS
    by = "ours, over turns" if ours else f"verl's {config.algorithm.adv_estimator}"
    reference = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    critic = "yes" if config.critic.enable else "no"
    if settings.algorithm == "archer":
        critic = "of utterances" + (", verl's as a baseline per token" if config.critic.enable else "")
    elif settings.algorithm == "q_advantage":
        critic = f"no, the Q model {settings.q_advantage.q_model}"
    parts = (
        f"agent loop {rollout.agent.default_agent_loop}, {settings.row} rows",
        f"advantages {settings.algorithm} ({by})",
        f"critic {critic}",
        f"reference model {'yes' if reference else 'no'}",
        f"trainer multiturn_{config.trainer.v1.trainer_mode}",
    )
    return Line(PART, "ok", "what runs", ", ".join(parts))


def panels(config: DictConfig, into: dict[str, Panel]) -> list[Line]:
    """Build or load the panels, as main does; `into` receives them."""
    into.update(tasks.panels(config))
    found = [
        Line("panels", "ok", split, f"{len(panel.tasks)} tasks, {tasks.source(config.multiturn, split)}")
        for split, panel in into.items()
    ]
    shared = config.multiturn.val == config.multiturn.test
    pair = "train, val (which is also test)" if shared else ", ".join(into)
    text = f"{pair}: no task in common, by content"
    found.append(Line("panels", "ok", "disjoint", text))
    return found


def tokenizer_folder(config: DictConfig) -> Path | None:
    """Where the model's tokenizer lies on this disk; None: nowhere yet."""
    name = str(config.actor_rollout_ref.model.path)
    if name == "small":
        folder = small_folder(config)
        return folder if (folder / "model.safetensors").exists() else None
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    hub = Path(os.environ.get("HF_HUB_CACHE") or f"{os.environ.get('HF_HOME', '~/.cache/huggingface')}/hub")
    snapshots = hub.expanduser() / f"models--{name.replace('/', '--')}" / "snapshots"
    return next((one.parent for one in sorted(snapshots.glob("*/tokenizer_config.json"))), None)


def model(config: DictConfig) -> list[Line]:
    """Whether the model is on this disk."""
    name, folder = str(config.actor_rollout_ref.model.path), tokenizer_folder(config)
    if folder is not None:
        return [Line("model", "ok", "model", f"{name}: {folder}")]
    if name == "small":
        text = "small: to be built and warm-started when the run starts (minutes), then cached"
        return [Line("model", "ok", "model", text)]
    if name.startswith(("/", ".", "~")):
        return [Line("model", "FAIL", "model", f"no folder {name}: correct actor_rollout_ref.model.path")]
    text = f"{name} is not in the Hugging Face cache: the run downloads it (or give a local folder)"
    return [Line("model", "warn", "model", text)]
