"""The TextWorld games of a task list: which there are, and where the built ones are kept."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from verl_multiturn.cache import built, cache_folder
from verl_multiturn.env import Seed, derive_seed
from verl_multiturn.errors import intact, unknown
from verl_multiturn.panel import FIRST_ID

# Settings of each kind with their defaults: names and meanings of `tw-make`. `only_last_action`: the goal
# names the last action only, not the way to it. `held_out`: val and test have foods that train lacks.
KINDS: dict[str, dict[str, Any]] = {
    "coin": {"level": 5, "only_last_action": False},
    "treasure": {"level": 5, "only_last_action": False},
    "cooking": {
        **{"recipe": 1, "take": 1, "go": 1, "open": False, "cook": True, "cut": False, "drop": False},
        "held_out": True,
    },
    "simple": {"rewards": "dense", "goal": "detailed", "held_out": True},
    "custom": {
        **{"world_size": 3, "nb_objects": 5, "quest_length": 4, "quest_breadth": 1},
        **{"nb_parallel_quests": 1, "theme": "house", "only_last_action": False},
    },
}


def _at_least_one(name: str, settings: dict[str, Any]) -> bool:
    return bool(settings[name] >= 1)


LIMITS: dict[str, list[tuple[str, Callable[[dict[str, Any]], bool]]]] = {
    "coin": [
        ("level from 1 to 300", lambda s: 1 <= s["level"] <= 300),
        ("at most 100 rooms", lambda s: ((s["level"] - 1) // 100 + 1) * ((s["level"] - 1) % 100 + 1) <= 100),
    ],
    "treasure": [("level from 1 to 30", lambda s: 1 <= s["level"] <= 30)],
    "cooking": [
        ("recipe from 1 to 5", lambda s: 1 <= s["recipe"] <= 5),
        ("take from 0 to recipe", lambda s: 0 <= s["take"] <= s["recipe"]),
        ("go of 1, 6, 9 or 12", lambda s: s["go"] in (1, 6, 9, 12)),
    ],
    "simple": [
        ("rewards of dense, balanced or sparse", lambda s: s["rewards"] in ("dense", "balanced", "sparse")),
        ("goal of detailed, brief or none", lambda s: s["goal"] in ("detailed", "brief", "none")),
    ],
    "custom": [
        (f"{name} of at least 1", partial(_at_least_one, name))
        for name in ("world_size", "nb_objects", "quest_length", "quest_breadth", "nb_parallel_quests")
    ],
}


@dataclass(frozen=True)
class Meta:
    """What is known of a built game: a digest of its source, goal, highest score, and a way to win."""

    digest: str
    objective: str
    max_score: int
    walkthrough: tuple[str, ...]


@dataclass(frozen=True)
class Game:
    """One game: a kind, its settings as JSON, a split, a number in it."""

    kind: str
    settings: str
    split: str
    number: int

    @property
    def id(self) -> str:
        """As a task: "train/3"."""
        return f"{self.split}/{self.number}"

    @cached_property
    def folder(self) -> Path:
        """Where it is or will be: by kind, everything that decides what it is, and number."""
        all_of_it = derive_seed(self.kind, self.settings, self.split, self.number, version("textworld"))
        return cache_folder("textworld") / f"{self.kind}-{all_of_it:016x}"

    @property
    def rom(self) -> Path:
        """The story file."""
        return self.folder / "game.z8"

    def built(self) -> Meta:
        """Make it, unless that was done before: 2 to 5 s in a process of its own.

        Raises:
            ValueError: TextWorld cannot make such a game.
        """
        return _meta(built(self.folder, self._make))

    def _make(self, folder: Path) -> None:
        folder.mkdir()
        work = {
            "kind": self.kind,
            "settings": json.loads(self.settings),
            "split": self.split,
            "seed": derive_seed("textworld", self.split, self.number) % 2**31,
            "folder": str(folder),
        }
        program = str(Path(__file__).with_name("build.py"))
        done = subprocess.run(
            [sys.executable, "-P", program, json.dumps(work)],
            env={**os.environ, "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ValueError(f"TextWorld cannot make a {self.kind} game with {self.settings}: {last}")


@lru_cache(maxsize=4096)
def _meta(folder: Path) -> Meta:
    with intact(folder, "delete it, the game is made again"):
        known = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        return Meta(
            known["digest"], known["objective"], known["max_score"], tuple(known["walkthrough"] or ())
        )


def settings_of(kind: str, given: Mapping[str, Any]) -> str:
    """The settings of a kind, checked, as JSON.

    Raises:
        ValueError: an unknown kind or name, a value of another type or out of range.
    """
    if kind not in KINDS:
        raise unknown("kind of TextWorld game", kind, KINDS)
    settings = dict(KINDS[kind])
    for name, value in given.items():
        if name not in settings:
            raise unknown(f"setting of a {kind} game", name, settings)
        if type(value) is not type(settings[name]):
            raise ValueError(f"{name} must be of type {type(settings[name]).__name__}, not {value!r}")
        settings[name] = value
    for sentence, holds in LIMITS[kind]:
        if not holds(settings):
            raise ValueError(f"a {kind} game needs {sentence}, not {settings}")
    return json.dumps(settings, sort_keys=True)


def place_of(seed: Seed, games: int) -> tuple[str, int]:
    """The split and number that a task id means.

    Raises:
        ValueError: it is neither a seed nor "<split>/<number>".
    """
    if isinstance(seed, str):
        split, _, number = seed.partition("/")
        if split not in FIRST_ID or not number.isdecimal() or int(number) >= games:
            raise ValueError(
                f'no TextWorld task {seed!r}: ids are "<split>/<number>" with split of '
                f"{', '.join(FIRST_ID)} and number from 0 to {games - 1}, or seeds"
            )
        return split, int(number)
    split = max((name for name in FIRST_ID if FIRST_ID[name] <= max(seed, 0)), key=lambda s: FIRST_ID[s])
    return split, (seed - FIRST_ID[split]) % games
