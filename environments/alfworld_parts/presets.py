"""The folders of games that `data` can name: the benchmark's, generated ones, or the user's own."""

import hashlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from verl_multiturn.cache import built, cache_folder
from verl_multiturn.load import import_path

# Sizes of the benchmark's splits but for training; "tiny" has games that a small model can learn in minutes.
# The arguments of `verl-multiturn make-alfworld-games`.
GENERATED = {
    "tiny": "--train 2000 --valid-seen 140 --valid-unseen 134 --max-receptacles 5 --max-objects 5 --seed 1 "
    "--types pick_and_place_simple,look_at_obj_in_light",
    "small": "--train 2000 --valid-seen 140 --valid-unseen 134 --max-receptacles 8 --max-objects 10 --seed 1",
    "full": "--train 1000 --valid-seen 140 --valid-unseen 134 --seed 1",
}
DRAWN_BY = ("scenes", "layouts", "plans", "problems")  # what decides how a game looks


def data_folder(data: str) -> Path:
    """The folder that `data` means: "benchmark", a name in GENERATED (made at the first use), or a path.

    Raises:
        ValueError: benchmark without $ALFWORLD_DATA.
    """
    if data == "benchmark":
        if not (folder := os.environ.get("ALFWORLD_DATA")):
            raise ValueError(
                "data=benchmark needs ALFWorld's games: run alfworld-download and set ALFWORLD_DATA to their "
                "folder, or play generated games with data=tiny, small or full"
            )
        return Path(folder)
    return _generated(data) if data in GENERATED else Path(data).expanduser()


def _generated(name: str) -> Path:
    arguments = GENERATED[name]
    drawn_by = [Path(__file__).with_name(f"{part}.py").read_text() for part in DRAWN_BY]
    digest = hashlib.blake2b("\0".join([arguments, *drawn_by]).encode(), digest_size=6).hexdigest()
    folder = cache_folder("alfworld", "games") / f"{name}-{digest}"
    return built(folder, partial(_generate, arguments.split()))


def _generate(arguments: list[str], folder: Path) -> None:
    """By the command, in a process of its own: the solvers' processes must not import the caller's main."""
    command = [sys.executable, "-m", "verl_multiturn.cli", "make-alfworld-games", str(folder), *arguments]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": import_path()}, check=False)
    if done.returncode:
        raise ValueError(f"the games of {folder.stem} could not be generated: {' '.join(command)} failed")
