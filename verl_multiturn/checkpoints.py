"""Finds the Hugging Face model in what a user names: a model folder, a checkpoint of verl, a run.

It also sees that a checkpoint has room, keeps the best one, and the last one from before a collapse.

FSDP shards are merged with verl's own merger, once, into `merged/` beside them.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from verl_multiturn.errors import RunStopped, intact
from verl_multiturn.run_files import missing_parts, write_atomically

SHARDS = "model_world_size_*_rank_*.pt"
LATEST = "latest_checkpointed_iteration.txt"  # verl's
BEST, GOOD = "best", "good"  # ours, beside verl's folders
MARGIN = 1.1
EARLIER = "go on from an earlier one (trainer.resume_mode=resume_path, trainer.resume_from_path=FOLDER)"


@dataclass(frozen=True)
class Found:
    """What a name leads to."""

    path: str  # of a Hugging Face model, or the name itself
    shards: Path | None = None  # verl's checkpoint, to be merged first
    step: int = 0  # of training
    run: Path | None = None  # the recorded run it was trained in


def find(name: str) -> Found:
    """Look at a folder; what is none is left to transformers, which knows names of a hub.

    Raises:
        ValueError: a folder without a model, a run without a checkpoint, a path that leads nowhere.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith((".", "~")) or folder.exists():
            raise ValueError(f"no model folder {folder}")
        return Found(name)
    if (folder / "config.json").exists():
        return Found(str(folder), step=_step(folder), run=_run(folder))
    if not missing_parts(folder):
        folder = _latest(folder)
    for place in (folder, folder / "actor"):
        if any(place.glob(SHARDS)):
            beside = place.parent if place.name == "actor" else place
            return Found(str(beside / "merged"), place, _step(place), _run(place))
    raise ValueError(
        f"{folder} has no model: neither config.json (Hugging Face) nor {SHARDS} (a checkpoint of verl)"
    )


def merged(found: Found) -> str:
    """The folder of the model, merged now if it has not been, or if the shards are newer.

    Raises:
        ValueError: verl's merger cannot merge it; says why.
    """
    if found.shards is None:
        return found.path
    target, newest = Path(found.path), max(file.stat().st_mtime for file in found.shards.glob(SHARDS))
    if (target / "config.json").exists() and target.stat().st_mtime >= newest:
        return found.path
    draft = target.with_name(f"merged.{os.getpid()}.part")
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    command += ["--local_dir", str(found.shards), "--target_dir", str(draft)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ValueError(f"verl cannot merge the checkpoint {found.shards}: {why}")
        shutil.rmtree(target, ignore_errors=True)
        draft.replace(target)
        os.utime(target)  # it counts as merged now, whenever its files were written
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return found.path


def check_mark(folder: Path) -> None:
    """Refuse to resume where verl's mark of the last checkpoint leads nowhere: verl would begin anew.

    verl writes that file in place, so a kill or a full disk may leave it empty.

    Args:
        folder: of the checkpoints.

    Raises:
        ValueError: what is wrong, which whole checkpoints are there, how to go on.
    """
    mark = folder / LATEST
    if not mark.exists():
        return
    text = mark.read_text(encoding="utf-8", errors="replace").strip()
    if not (text.isascii() and text.isdigit()):
        wrong = f"{mark} has {text[:40]!r} in it, not the step of a checkpoint"
    elif not (folder / f"global_step_{int(text)}").is_dir():
        wrong = f"{mark} names step {text}, but there is no {folder / f'global_step_{int(text)}'}"
    else:
        return
    there = sorted(filter(_is_whole, folder.rglob("global_step_*")), key=_step)
    names = ", ".join(str(path.relative_to(folder)) for path in there) or "none"
    cure = f"trainer.resume_mode=resume_path trainer.resume_from_path={there[-1]}" if there else ""
    anew = f"remove {mark} to begin anew"
    raise ValueError(
        f"{wrong}; whole checkpoints there: {names}; {f'go on with {cure}, or ' if cure else ''}{anew}"
    )


def check_room(folder: Path, model: str, models: int = 1) -> None:
    """Refuse to save a checkpoint that would fill the disk: verl leaves half of one there.

    Args:
        folder: of the checkpoints.
        model: folder of the model or its name in a hub, whose size tells that of a first checkpoint.
        models: that are saved with one, each of that size.

    Raises:
        RunStopped: how much is free, how much is needed.
    """
    # A kill may have left half of one, and the rotation leaves a part of every one.
    earlier = max(map(size, filter(_is_whole, folder.glob("global_step_*"))), default=0)
    # Weights in float32 and two moments are at most six times weights of two bytes.
    needed = MARGIN * (earlier or 6 * models * weights(model))
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise RunStopped(
            f"no room for a checkpoint in {folder}: {free / 1e9:.2f} GB are free, it needs "
            f"{needed / 1e9:.2f} GB; free some, or lower trainer.max_actor_ckpt_to_keep, and rerun the same "
            "command to resume from the one before"
        )


def clear(folder: Path, step: int) -> None:
    """Remove the checkpoint of a step that is about to be saved again, after a run went back behind it.

    verl writes into the files that are there: those kept in `best/` and `good/` are links to the same ones.
    """
    shutil.rmtree(folder / f"global_step_{step}", ignore_errors=True)


def weights(model: str) -> int:
    """Bytes of a model's weight files, in its folder or the hub's local cache; 0 where it is in neither."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(model, "config.json")
        except ValueError:  # no name that a hub may have
            return 0
        if not isinstance(found, str):
            return 0
        folder = Path(found).parent
    # The same weights may lie there in both forms.
    return max(sum(path.stat().st_size for path in folder.glob(kind)) for kind in ("*.safetensors", "*.bin"))


def size(folder: Path) -> int:
    """Bytes of all files in a folder; 0 where there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def keep_best(folder: Path, step: int, success: float) -> bool:
    """Keep the checkpoint of a step in `best/`, if none there was better; verl's rotation leaves it alone.

    Its files are links: they take no room while verl's own are there. A later equal one does not replace it.

    Returns:
        Whether it is the best now.
    """
    source, best = folder / f"global_step_{step}", folder / BEST
    note = best / "success.json"
    with intact(note, "delete it, and the next validation counts as the best"):
        least = float(json.loads(note.read_text())["success"]) if note.exists() else -math.inf
    if not source.exists() or least >= success:
        return False
    target = _set_aside(source, best)
    write_atomically(note, [json.dumps({"step": step, "success": success}).encode()])
    _leave_only(target)
    return True


def keep_good(folder: Path, rule: str, since: int | None) -> Path | None:
    """Keep the newest checkpoint from before a collapse in `good/`, as `keep_best` does.

    Called at every step: by the time that a rule ends the run, verl's rotation may have deleted it.

    Args:
        folder: of the checkpoints.
        rule: a rule of `multiturn.collapse`; each keeps its own.
        since: the step since which it holds; None: it does not, and what was kept for it is let go.

    Returns:
        Where it is, if it was not kept before.
    """
    good = folder / GOOD / rule
    if since is None:
        shutil.rmtree(good, ignore_errors=True)
        return None
    newest, kept = _newest(folder, since), _newest(good, since)
    if newest is None or (kept is not None and _step(kept) >= _step(newest)):
        return None
    target = _set_aside(newest, good)
    _leave_only(target)
    return target


def last_good(folder: Path, rule: str, since: int | None) -> str:
    """The checkpoint from before a collapse, in words; see `keep_good` for the arguments."""
    places = (folder, folder / GOOD / rule, folder / BEST)
    found = [one for place in places if (one := _newest(place, since)) is not None]
    if not found:
        return "No checkpoint is from before it"
    last = max(found, key=_step)
    return f"The last checkpoint before it is of step {_step(last)}: {last}"


def _newest(folder: Path, before: int | None) -> Path | None:
    """The whole checkpoint in a folder with the highest step, below `before` if that is given."""
    whole = filter(_is_whole, folder.glob("global_step_*"))
    return max((one for one in whole if before is None or _step(one) < before), key=_step, default=None)


def _is_whole(folder: Path) -> bool:
    # verl writes data.pt last, and its rotation leaves it where it takes the weights away.
    return folder.suffix != ".part" and (folder / "data.pt").exists() and (folder / "actor").is_dir()


def _set_aside(source: Path, folder: Path) -> Path:
    """Links to a checkpoint's files in another folder, whole or not at all."""
    draft, target = folder / f"{source.name}.part", folder / source.name
    shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
    shutil.copytree(source, draft, copy_function=_link)
    if target.exists():
        shutil.rmtree(target)
    draft.replace(target)
    return target


def _leave_only(target: Path) -> None:
    for other in target.parent.glob("global_step_*"):
        if other != target:
            shutil.rmtree(other)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # not on every file system
        shutil.copy2(source, target)


def _latest(run: Path) -> Path:
    """Folder of the latest checkpoint of a recorded run, which may keep them elsewhere."""
    places = [run / "checkpoints"]
    if (run / "config.yaml").exists():
        with intact(run / "config.yaml", "name the checkpoint's own folder"):
            given = OmegaConf.select(OmegaConf.load(run / "config.yaml"), "trainer.default_local_dir")
        places += [Path(given)] if given else []
    for place in places:
        if (place / LATEST).exists():
            return place / f"global_step_{(place / LATEST).read_text().strip()}"
    raise ValueError(f"the run {run} has no checkpoint: train with trainer.save_freq=10 or so")


def _step(folder: Path) -> int:
    found = re.search(r"global_step_(\d+)", str(folder.absolute()))
    return int(found.group(1)) if found else 0


def _run(folder: Path) -> Path | None:
    return next((one for one in folder.absolute().parents if not missing_parts(one)), None)
