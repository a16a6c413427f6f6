"""The games of a data folder: which there are, of what type, and a hash of each, remembered between runs."""

import functools
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from verl_multiturn.cache import built, cache_folder
from verl_multiturn.errors import intact, unknown

SPLITS = ("train", "valid_seen", "valid_unseen")
TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
AGAIN = "delete it; alfworld-download -f or verl-multiturn make-alfworld-games writes games again"
# Upstream's own filter: games with sliced objects or movable receptacles are not part of ALFWorld.
LEFT_OUT = ("movable", "Sliced")


@dataclass(frozen=True)
class Game:
    """One game.

    Attributes:
        id: "<split>/<task folder>/<trial>".
        type: one of `TASK_TYPES`.
        digest: of its task sentence and its world.
    """

    id: str
    type: str
    digest: str


@functools.lru_cache(8)
def games(folder: Path) -> dict[str, tuple[Game, ...]]:
    """The solvable games of each split of an ALFWorld data folder, ordered by digest.

    The order follows from the games alone, neither from the file system nor from a seed. The list is
    kept in the cache and holds as long as no game file changes.

    Raises:
        ValueError: no games there, a damaged one, or games of another version of the engine.
    """
    root, made = folder / "json_2.1.1", folder / "generated.json"
    # Of a finished folder of generated games one date will do; a look at thousands of files takes 0.1 s.
    looked_at = [made] if made.exists() else _files(root)
    if not looked_at:
        raise ValueError(
            f"no ALFWorld games under {root}: run alfworld-download for the benchmark's, or "
            f"verl-multiturn make-alfworld-games {folder} --train 1000 for generated ones"
        )
    stamp = [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in looked_at]
    key = hashlib.blake2b("\n".join([str(root.resolve()), *stamp]).encode(), digest_size=16).hexdigest()

    def write(path: Path) -> None:
        found = [game for file in _files(root) if (game := _read(file, root))]
        path.write_text(json.dumps([asdict(game) for game in found]))

    manifest = built(cache_folder("alfworld", "manifests") / f"{key}.json", write)
    with intact(manifest, "delete it, it is written again"):
        found = [Game(**entry) for entry in json.loads(manifest.read_text())]
    by_digest = sorted(found, key=lambda game: (game.digest, game.id))
    return {split: tuple(g for g in by_digest if g.id.startswith(f"{split}/")) for split in SPLITS}


def select(folder: Path, split: str, types: tuple[str, ...]) -> tuple[Game, ...]:
    """The games of a split and of some task types.

    Raises:
        ValueError: an unknown split or type, or none left.
    """
    if split not in SPLITS:
        raise unknown("split of alfworld", split, SPLITS)
    for name in types:
        if name not in TASK_TYPES:
            raise unknown("task type of alfworld", name, TASK_TYPES)
    chosen = tuple(game for game in games(folder)[split] if game.type in types)
    if not chosen:
        raise ValueError(f"{folder} has no games of split {split} and types {', '.join(types)}")
    return chosen


def find(folder: Path, identity: str) -> Game:
    """The game of this id.

    Raises:
        ValueError: there is none.
    """
    if identity in (by_id := _by_id(folder)):
        return by_id[identity]
    split = games(folder).get(identity.partition("/")[0], ())
    raise unknown(f"game of {folder}", identity, [game.id for game in split[:3]] or SPLITS)


@functools.lru_cache(8)
def _by_id(folder: Path) -> dict[str, Game]:
    return {game.id: game for split in games(folder).values() for game in split}


def game_file(folder: Path, game: Game) -> Path:
    """Its game.tw-pddl."""
    return folder / "json_2.1.1" / game.id / "game.tw-pddl"


def _files(root: Path) -> list[Path]:
    files = sorted(path for split in SPLITS for path in (root / split).glob("*/*/game.tw-pddl"))
    return [path for path in files if not any(part in str(path.relative_to(root)) for part in LEFT_OUT)]


def _read(path: Path, root: Path) -> Game | None:
    with intact(path, AGAIN):
        data = json.loads(path.read_text())
        if not data.get("solvable"):
            return None
        # The first line holds the trial's name, which says nothing about the world.
        grammar, world = str(data["grammar"]), str(data["pddl_problem"]).partition("(:domain")[2]
        if not world:
            raise ValueError("its pddl_problem is none")
    if "move {o} to {r}" not in grammar:
        raise ValueError(
            f"{path} is damaged or was made for an alfworld before 0.4, whose command is put, not move: run "
            "alfworld-download -f for the games of the installed version"
        )
    kind = next((name for name in TASK_TYPES if path.parent.parent.name.startswith(name)), "")
    task = re.search(r"Your task is to: [^\"\\]*", grammar)
    text = f"{task.group() if task else ''}\0{world}"
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return Game(str(path.parent.relative_to(root)), kind, digest)


def hash_of(parts: Iterable[str]) -> str:
    """16 hexadecimal digits for a set of texts, whatever their order."""
    return hashlib.blake2b("\n".join(sorted(parts)).encode(), digest_size=8).hexdigest()
