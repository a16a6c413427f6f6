"""ALFWorld: household tasks in text, played by the real engine (Shridhar et al., arXiv 2010.03768).

Description:
    Find an object in a room and do something with it: put it somewhere, clean, heat or cool it first, look
    at it under a lamp, or put two of them away. The engine is alfworld 0.4.2 on textworld, with caches
    that change its speed, not its text (environments/alfworld_parts/engine.py).
Games:
    `data` names them. "small" and "full" are generated on this machine by `verl-multiturn
    make-alfworld-games` from the scenes that alfworld ships, once; they are not the benchmark's games, and
    scores on them do not compare with published ones. "benchmark" is the folder $ALFWORLD_DATA that
    `alfworld-download` fills. Anything else is a folder in the same layout.
Actions:
    The engine's commands, such as "go to cabinet 1" or "heat mug 1 with microwave 1"; `admissible` lists
    those that do something now. Anything else: "Nothing happens."
Observation:
    The engine's answer. The first one describes the room.
Start:
    A number picks a game of `split` (in the order of the games' hashes), a string names one by its id,
    "<split>/<task>/<trial>". The engine has no chance in it.
Rewards:
    `reward` when the task is done, else 0.
Episode end:
    Terminated when the task is done. Truncated after `max_turns` turns.
Information:
    `success`: done. `task_type`: one of ALFWorld's six. `game`: its id.
State key:
    By `key`. "state": a hash of the engine's facts, without the marks of what was looked at. "obs": the
    last answer that was not "Nothing happens." (which is no place); it leaves out what is carried and
    what is inside closed things. "obs+actions": that answer with the admissible commands.

Arguments:
    data: see Games.
    split: "train", "valid_seen" or "valid_unseen", for tasks given by number.
    types: task types to play, all six by default.
    key: see State key.
    hidden: first words of commands that `admissible` leaves out; they still work.
    reward: for success.
    max_turns: turns in an episode.
"""

import json
import os
import pickle
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from environments.alfworld_parts.expert import Goal, World, next_command
from environments.alfworld_parts.library import AGAIN, TASK_TYPES, Game, find, game_file, hash_of, select
from environments.alfworld_parts.presets import data_folder
from verl_multiturn.env import Env, Info, Seed
from verl_multiturn.errors import intact, unknown
from verl_multiturn.needs import Needs

if TYPE_CHECKING:
    from environments.alfworld_parts.engine import Snapshot

__all__ = ["AlfWorld"]

KEYS = ("state", "obs", "obs+actions")
NOTHING = "Nothing happens."
_idle: list[Any] = []  # engines of closed environments: each one made anew would leak 1.6 MB


class AlfWorld(Env):
    """See the module's docstring."""

    needs: ClassVar[Needs] = Needs(
        extra="alfworld",
        packages=("alfworld", "textworld"),
        data="the benchmark: alfworld-download, ALFWORLD_DATA, data=benchmark; other games are generated",
        licence="MIT; Fast Downward and jericho, which it loads, GPL",
    )
    runs_in = "process"
    snapshots = "copy"

    def __init__(
        self,
        data: str = "small",
        split: str = "train",
        types: Sequence[str] = TASK_TYPES,
        key: str = "state",
        hidden: Sequence[str] = ("help",),
        reward: float = 1.0,
        max_turns: int = 50,
    ) -> None:
        if key not in KEYS:
            raise unknown("key of alfworld", key, KEYS)
        self.folder, self.split, self.types, self.key = data_folder(data), split, tuple(types), key
        self.hidden, self.reward, self.max_turns = tuple(hidden), reward, max_turns
        select(self.folder, split, self.types)
        self._game: Game | None = None
        self._loaded: Game | None = None
        self._engine: Any = None
        self._text = ""  # the last answer that was not NOTHING

    @classmethod
    def find_data(cls) -> str | None:
        """$ALFWORLD_DATA, if it holds games."""
        folder = os.environ.get("ALFWORLD_DATA")
        return folder if folder and (Path(folder) / "json_2.1.1").is_dir() else None

    @classmethod
    def preload(cls) -> None:
        """What a worker imports once, before it forks."""
        import environments.alfworld_parts.engine  # noqa: F401

    def tasks(self, split: str) -> list[Seed]:
        """The ids of a split's games, of the chosen types."""
        return [game.id for game in select(self.folder, split, self.types)]

    def peek(self, seed: Seed) -> tuple[str, str]:
        """Digest and type of a game."""
        game = self._find(seed)
        return game.digest, game.type

    def content(self, observation: str) -> str:
        """The game's digest."""
        return self._now.digest

    def _find(self, seed: Seed) -> Game:
        if isinstance(seed, str):
            return find(self.folder, seed)
        chosen = select(self.folder, self.split, self.types)
        return chosen[seed % len(chosen)]

    @property
    def _now(self) -> Game:
        if self._game is None:
            raise RuntimeError("AlfWorld: the episode has not begun; call reset first.")
        return self._game

    def _load(self, game: Game) -> Any:
        """The engine with this game in it."""
        if self._engine is None:
            from environments.alfworld_parts.engine import new_engine

            self._engine = _idle.pop() if _idle else new_engine()
            self._loaded = None
        if self._loaded != game:
            path = game_file(self.folder, game)
            self._loaded = None
            with intact(path, AGAIN):
                self._engine.load(str(path))
            with intact(about := self._about(game), AGAIN):
                self._goal = Goal.of(json.loads(about.read_text()))
            self._loaded = game
        return self._engine

    def _about(self, game: Game) -> Path:
        return game_file(self.folder, game).with_name("traj_data.json")

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        self._game = self._find(seed)
        engine = self._load(self._game)
        with intact(game_file(self.folder, self._game), AGAIN):
            self._show(engine.reset())
        room, _, task = self._text.partition("\n\nYour task is to: ")
        self._text = room.partition("=-\n\n")[2] or room
        self.instruction = f"Your task is to: {task.strip()}"
        return self._text, {"task_type": self._game.type, "game": self._game.id}

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        command = " ".join(action.split()).lower()
        known = command in self._commands
        state, _, done = self._engine.step(command)
        self._show(state)
        won = bool(done and state["won"])
        return state.feedback, self.reward * won, bool(done), {"valid": known, "success": won}

    def _show(self, state: Any) -> None:
        self._state = state
        if state.feedback != NOTHING:
            self._text = state.feedback
        self._commands = state["admissible_commands"]

    def admissible(self) -> list[str]:
        """The commands that do something now, without the hidden ones."""
        return [command for command in self._commands if command.partition(" ")[0] not in self.hidden]

    def state_key(self) -> Hashable:
        """See the module's docstring."""
        if self.key == "obs":
            return self._text
        if self.key == "obs+actions":
            return "\n".join([self._text, *self._commands])
        from environments.alfworld_parts.engine import TRACES

        return hash_of(str(fact) for fact in self._state["_facts"] if fact.name not in TRACES)

    def expert(self) -> str:
        """The scripted player's command, from any state."""
        world = World.of(self._state["_facts"], self._state["_entity_infos"])
        with intact(self._about(self._now), AGAIN):  # a damaged one may ask for what the game has not got
            return next_command(self._goal, world, self._commands)

    def snapshot(self) -> bytes:
        """One or two kB: which game, which operators were applied, what is to be seen."""
        kept = {name: value for name, value in vars(self).items() if name not in _LIVE}
        way = self._engine.snapshot() if self._game is not None else None
        return pickle.dumps((kept, way), pickle.HIGHEST_PROTOCOL)

    def restore(self, s: Any, seed: int | None = None) -> None:
        """Go back: load the game if another one is loaded, apply the operators, check the commands."""
        kept, way = pickle.loads(s)
        vars(self).update(kept)
        if way is not None:
            self._resume(way)
        if seed is not None:
            self._reseed(seed)

    def _resume(self, way: "Snapshot") -> None:
        text = self._text
        self._show(self._load(self._now).restore(way))
        self._text = text  # the first one was shortened

    def __getstate__(self) -> bytes:
        return self.snapshot()

    def __setstate__(self, s: bytes) -> None:
        self._engine, self._loaded = None, None
        self.restore(s)

    def fork(self, seed: int | None = None) -> "AlfWorld":
        """An independent environment in the same state, with an engine of its own."""
        child = type(self).__new__(type(self))
        child.__setstate__(self.snapshot())
        if seed is not None:
            child._reseed(seed)
        return child

    def close(self) -> None:
        """Leave the engine to the next environment of this process."""
        if self._engine is not None:
            _idle.append(self._engine)
            self._engine, self._loaded, self._game = None, None, None


# Rebuilt by `restore`; and the two generators, 5 kB that this engine without chance does not use.
_LIVE = {"_engine", "_loaded", "_state", "_commands", "_goal", "rng", "noise"}
