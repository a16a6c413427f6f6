"""The panels of a run: built or loaded, verified, disjoint by content, written into the run folder."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_multiturn import checkpoints
from verl_multiturn.compose import plain
from verl_multiturn.panel import ALSO, FIRST_ID, Panel, check_disjoint, load_panel

DEFAULTS = {
    split: {"first_seed": FIRST_ID[split], "size": size} for split, size in (("train", 2000), ("val", 64))
}
VERIFIED = 64  # tasks of a given panel that are compared with the environment at start-up


def panels(config: DictConfig) -> dict[str, Panel]:
    """Train, val and (if given) test panels of a run, and those of `multiturn.also` as "val/<name>".

    Tasks given as {first_seed, size} or {split, size} are up to `size` distinct ones; for training they
    leave out those of the other panels by content. Given as a panel, an overlap with training or with
    test is refused. In `multiturn.also`, {split: train} means the first tasks that this run trains on,
    whatever they are, and a file whose split is "train" may share tasks with training: success on
    training tasks is worth watching.

    Raises:
        ValueError: a panel for another environment, one whose hashes do not match, an overlap, fewer
            training tasks than a step needs.
    """
    settings = config.multiturn
    found = {split: panel_of(settings, split) for split in ("val", "test") if _given(settings, split)}
    if settings.val_size is not None:
        found["val"] = replace(found["val"], tasks=found["val"].tasks[: settings.val_size])
    also = {f"{ALSO}{name}": given for name, given in settings.also.items()}
    trained_on = {split: given for split, given in also.items() if _of_training(given)}
    ours = {split: given for split, given in trained_on.items() if not isinstance(given, str)}
    found |= {split: panel_of(settings, split) for split in also if split not in ours}
    unseen = [panel for split, panel in found.items() if split not in trained_on]
    found["train"] = panel_of(settings, "train", frozenset[str]().union(*(one.hashes for one in unseen)))
    for split, given in ours.items():
        found[split] = replace(found["train"], split=split, tasks=found["train"].tasks[: given.get("size")])
    if len(found["train"].tasks) < config.data.train_batch_size:
        raise ValueError(
            f"{settings.env} has {len(found['train'].tasks)} training tasks that no other panel holds, a "
            f"step needs data.train_batch_size={config.data.train_batch_size}: lower it"
        )
    for panel in unseen:
        check_disjoint(panel, found["train"])
    for split, panel in found.items():
        # One panel in both roles is the user's word, as in the quickstart, which tunes nothing on it.
        if "test" in found and _given(settings, split) != settings.test:
            check_disjoint(panel, found["test"])
    return found


def panel_of(settings: DictConfig, split: str, exclude: frozenset[str] = frozenset()) -> Panel:
    """The panel of one role of a run: "train", "val", "test", or "val/<name>" of `multiturn.also`.

    Args:
        settings: the group `multiturn`.
        split: the role.
        exclude: content hashes to leave out where the tasks are not given as a panel.

    Raises:
        ValueError: a panel for another environment or with other hashes, a split or seeds without tasks.
    """
    given, kwargs = _given(settings, split), plain(settings.env_kwargs)
    if not isinstance(given, str):
        ids = given.get("split") or count(given.get("first_seed", FIRST_ID.get(split, 0)))
        return Panel.build(settings.env, kwargs, ids, split, exclude, given.get("size"), fewer=True)
    panel = load_panel(given)
    if (panel.env, dict(panel.kwargs)) != (settings.env, kwargs):
        raise ValueError(
            f"panel {given} is for {panel.env} with {dict(panel.kwargs)}, the run plays {settings.env} with "
            f"{kwargs}: give {_key(split)} a panel of this environment, {{first_seed, size}} or {{split}}"
        )
    panel.verify(VERIFIED)
    return replace(panel, split=split)  # its role in this run decides how its tasks are seeded


def training_tasks(settings: DictConfig, size: int | None = None) -> Panel:
    """The first `size` training tasks of a run, without those of its other panels, by content.

    Raises:
        ValueError: see `panel_of`.
    """
    others = [panel_of(settings, split).hashes for split in ("val", "test") if settings[split] is not None]
    if size is not None and not isinstance(given := _given(settings, "train"), str):
        settings.train = {**given, "size": min(size, given.get("size", size))}
    return panel_of(settings, "train", frozenset[str]().union(*others))


def source(settings: DictConfig, split: str) -> str:
    """Where the tasks of a role come from, in words."""
    given = _given(settings, split)
    if isinstance(given, str):
        return f"panel {given}"
    if "split" not in given:
        return f"built from seed {given.get('first_seed', FIRST_ID.get(split))} on"
    ours = split.startswith(ALSO) and _of_training(given)
    return "the first it trains on" if ours else f"split {given['split']} of the environment"


def _key(split: str) -> str:
    return f"multiturn.also.{split.removeprefix(ALSO)}" if split.startswith(ALSO) else f"multiturn.{split}"


def _given(settings: DictConfig, split: str) -> Any:
    """How the tasks of a role are given; None: there are none, as for test."""
    if split.startswith(ALSO):
        return settings.also[split.removeprefix(ALSO)]
    return DEFAULTS.get(split) if settings[split] is None else settings[split]


def _of_training(given: Any) -> bool:
    return load_panel(given).split == "train" if isinstance(given, str) else given.get("split") == "train"


IDENTITY = ("multiturn.env", "multiturn.env_kwargs", "multiturn.algorithm", "multiturn.row")


def prepare_folder(config: DictConfig) -> None:
    """Make the run folder; refuse one whose checkpoints belong to another run, or cannot be found.

    Raises:
        ValueError: it cannot be made, the last checkpoint is not there, or resuming would mix two runs.
    """
    folder = Path(config.multiturn.run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"multiturn.run={folder} cannot be made: {error.strerror}") from None
    if config.trainer.resume_mode != "auto":
        return
    checkpoints.check_mark(Path(config.trainer.default_local_dir))
    mark = Path(config.trainer.default_local_dir) / checkpoints.LATEST
    if not (mark.exists() and (folder / "config.yaml").exists()):
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
    for split, panel in found.items():
        path = Path(run) / "panels" / f"{split}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        panel.save(path)
