"""The panels of a run: built or loaded, verified, disjoint by content, written into the run folder."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.compose import plain
from verl_multiturn.panel import Panel, check_disjoint, load_panel

VERIFIED = 64  # tasks of a given panel that are compared with the environment at start-up


def panels(config: DictConfig) -> dict[str, Panel]:
    """Train, val and (if given) test panels of a run.

    Tasks given as {first_seed, size} are up to `size` distinct ones; for training they leave out
    those of the other panels by content. Given as a panel, an overlap is refused.

    Raises:
        ValueError: a panel for another environment, one whose hashes do not match, an overlap, fewer
            training tasks than a step needs.
    """
    settings = config.multiturn
    found = {}
    for split in ("val", "test"):
        if settings[split] is not None:
            found[split] = _panel(settings, split, frozenset())
    if settings.val_size is not None:
        val = found["val"]
        found["val"] = replace(val, tasks=val.tasks[: settings.val_size])
    taken = frozenset().union(*(panel.hashes for panel in found.values()))
    found["train"] = _panel(settings, "train", taken)
    if len(found["train"].tasks) < config.data.train_batch_size:
        raise ValueError(
            f"{settings.env} has {len(found['train'].tasks)} training tasks that no other panel holds, a "
            f"step needs data.train_batch_size={config.data.train_batch_size}: lower it"
        )
    if settings.val != settings.test:
        check_disjoint(*found.values())
    else:  # one panel in both roles, as in the quickstart, which tunes nothing on it
        check_disjoint(found["train"], found["val"])
    return found


IDENTITY = ("multiturn.env", "multiturn.env_kwargs", "multiturn.algorithm", "multiturn.row")


def prepare_folder(config: DictConfig) -> None:
    """Make the run folder; refuse one whose checkpoints belong to another run.

    Raises:
        ValueError: it cannot be made, or resuming there would mix two runs.
    """
    folder = Path(config.multiturn.run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"multiturn.run={folder} cannot be made: {error.strerror}") from None
    tracker = Path(config.trainer.default_local_dir) / "latest_checkpointed_iteration.txt"
    if config.trainer.resume_mode != "auto" or not (tracker.exists() and (folder / "config.yaml").exists()):
        return
    before = OmegaConf.load(folder / "config.yaml")
    for key in IDENTITY:
        then, now = OmegaConf.select(before, key), OmegaConf.select(config, key)
        if then != now:
            raise ValueError(
                f"{folder} holds the checkpoints of a run with {key}={then}, this one has {now}: name "
                "another folder in multiturn.run"
            )


def write(found: dict[str, Panel], run: str) -> None:
    """Save the panels where `data.train_files` and `data.val_files` look for them."""
    folder = Path(run) / "panels"
    folder.mkdir(parents=True, exist_ok=True)
    for split, panel in found.items():
        panel.save(folder / f"{split}.json")


def _panel(settings: DictConfig, split: str, exclude: frozenset[str]) -> Panel:
    given: Any = settings[split]
    kwargs = plain(settings.env_kwargs)
    if not isinstance(given, str):
        seeds = count(given.first_seed)
        return Panel.build(settings.env, kwargs, seeds, split, exclude, given.size, fewer=True)
    panel = load_panel(given)
    if (panel.env, dict(panel.kwargs)) != (settings.env, kwargs):
        raise ValueError(
            f"panel {given} is for {panel.env} with {dict(panel.kwargs)}, the run plays {settings.env} with "
            f"{kwargs}: give multiturn.{split} a panel of this environment or {{first_seed, size}}"
        )
    panel.verify(VERIFIED)
    return replace(panel, split=split)  # its role in this run decides how its tasks are seeded
