"""Jericho: classic text adventures, from story files of yours (Hausknecht et al., arXiv 1909.05398).

Description:
    Plays a Z-machine story file (.z1 to .z8) in jericho's interpreter. No game comes with it: give one, or
    a folder of them. Jericho knows 57 games by their hash ("zork1", "detective" ...): for these it has
    score, victory and a walkthrough. For any other game, score and end are read from what it says, which
    works where it answers "score" in Inform's or Infocom's words.
Actions:
    Any command of the game. One that its parser does not understand is invalid and leaves the game as it
    was. Commands to the interpreter (save, undo ...) and several at once are not passed on.
Observation:
    The game's answer; first, its opening. With `full`, always room and inventory, too.
Start:
    A seed picks a story file, modulo their number, in the order of names; a string names one ("zork1").
    `dice` decides where the game's own chance comes from. "walkthrough": always the seed that jericho's
    walkthrough was made with, so that a file is one task. "task": the task's seed, so that each seed is a
    task, with the same opening (most games) and other luck. "member": the dynamics seed.
Rewards:
    The score's change / the highest score, where that is known, else the score's change.
Episode end:
    Terminated when the game is won or lost. Truncated after `max_turns` turns.
Information:
    `success`: won; in a game that jericho does not know, the highest score or an ending with "won",
    "victory" or "The End". `score`. `task_type`: the file's name.
State key:
    Of games that jericho knows, its hash of the world's objects; else, a hash of room, inventory and
    score. Both leave out turns.

Arguments:
    rom: a story file or a folder of them; default: folder $JERICHO_ROMS.
    dice: see Start.
    actions: what `admissible` lists. "try": guesses from the words on the screen that changed something
        when tried, 0.05 to 1 s a turn. "jericho": jericho's own valid actions (games it knows; needs spaCy's
        English model). "none": nothing. Both kinds are remembered in a process for states met before.
    full: see Observation.
    max_turns: turns in an episode.
"""

import os
import pickle
import random
import re
import zlib
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar, Literal

from environments.textworld_parts.frotz import command_of, digest_of, tidy
from environments.textworld_parts.guess import check_model, valid
from environments.textworld_parts.story import Story
from verl_multiturn.env import Env, Info, Seed, derive_seed
from verl_multiturn.errors import unknown
from verl_multiturn.needs import Needs

__all__ = ["Jericho"]

DICE = ("walkthrough", "task", "member")
ACTIONS = ("try", "jericho", "none")
DATA = "story files (.z1 to .z8): rom=FILE or FOLDER, or folder JERICHO_ROMS; none ship with jericho"


class Jericho(Env):
    """See the module's docstring."""

    needs: ClassVar[Needs] = Needs(
        extra="textworld",
        packages=("jericho",),
        data=DATA,
        licence="the interpreter (jericho, frotz) GPL-2.0; each game has its own",
    )
    runs_in: Literal["thread", "process"] = "process"
    snapshots: Literal["copy", "replay", "none"] = "copy"

    def __init__(
        self,
        rom: str | None = None,
        dice: str = "walkthrough",
        actions: str = "try",
        full: bool = False,
        max_turns: int = 100,
    ) -> None:
        if dice not in DICE:
            raise unknown("dice of jericho", dice, DICE)
        if actions not in ACTIONS:
            raise unknown("actions of jericho", actions, ACTIONS)
        if max_turns < 1:
            raise ValueError(f"needs max_turns of at least 1, not {max_turns}")
        if actions == "jericho":
            check_model()
        self.roms = _roms(rom or os.environ.get("JERICHO_ROMS"))
        self.dice, self.actions, self.full, self.max_turns = dice, actions, full, max_turns
        self.score, self.max_score = 0, 0
        self._task: tuple[str, Seed] = "", 0  # name and task id
        self._die: int | None = None  # the seed of the game's own chance; None: the walkthrough's
        self._sent: list[str] = []
        self._story = Story()

    @classmethod
    def find_data(cls) -> str | None:
        """$JERICHO_ROMS, if it holds story files."""
        folder = os.environ.get("JERICHO_ROMS")
        return folder if folder and any(_stories(Path(folder))) else None

    @classmethod
    def preload(cls) -> None:
        """What a worker imports once, before it forks."""
        import jericho.util  # noqa: F401

    def tasks(self, split: str) -> list[Seed]:
        """For "all", the names of the story files."""
        if split != "all":
            raise unknown(
                "split of jericho", split, ["all"], "Its games have no splits; seeds are tasks, too."
            )
        return list(self.roms)

    def peek(self, seed: Seed) -> tuple[str, str]:
        """Content and name of a game; it is not started."""
        name = self._name(seed)
        return self._content(self.roms[name], seed), name

    def content(self, observation: str) -> str:
        """The story file's hash and, with `dice` "task", the seed."""
        return self._content(self.roms[self._task[0]], self._task[1])

    def _content(self, rom: Path, seed: Seed) -> str:
        return f"{digest_of(rom)} {seed if self.dice == 'task' else self.dice}"

    def _name(self, seed: Seed) -> str:
        if isinstance(seed, int):
            return list(self.roms)[seed % len(self.roms)]
        if seed not in self.roms:
            raise unknown("jericho game", seed, self.roms)
        return seed

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        name = self._name(seed)
        self._task, self._die, self._sent = (name, seed), self._roll(seed), []
        opening = self._story.start(self.roms[name], self._die)
        if self.actions == "jericho" and not self._story.known:
            raise ValueError(
                f'jericho does not know {self.roms[name]}, so it lists no actions: actions="try"'
            )
        self.score, self.max_score = self._story.points(opening)
        self.instruction = (
            f'You play the text adventure "{name}". Explore it and raise your score. Answer with one '
            'command, as in "north", "take lamp", "open door", "inventory".'
        )
        text = tidy(opening)
        shown = "\n\n".join([text, *self._story.look()]) if self.full else text
        return shown, {"task_type": name, "max_score": self.max_score}

    def _roll(self, seed: Seed) -> int | None:
        """The seed of the game's own chance, at least 1; None: the walkthrough's."""
        if self.dice == "member":
            return self.noise.randrange(1, 2**31)
        if self.dice == "task":
            return derive_seed("dice", seed) % (2**31 - 1) + 1
        return None

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        from jericho.util import clean, recognized

        command = command_of(action, wide=True)
        if command is None:
            info = {"valid": False, "score": self.score}
            return "That is no command of this game.", 0.0, False, info
        state, before = self._story.save(), self.score
        raw = self._story.say(command)
        if not recognized(clean(raw)):
            self._story.load(state)
            return tidy(raw), 0.0, False, {"valid": False, "score": self.score}
        self._sent.append(command)
        points = self._story.points(raw)
        over, won = self._story.ending(raw, points)
        if points != (0, 0):  # else it does not say, which is no loss
            self.score, self.max_score = points
        text = tidy(raw)
        if self.full and not over:
            text = "\n\n".join(dict.fromkeys([text, *self._story.look()]))
        reward = (self.score - before) / (self.max_score if self.max_score > 0 else 1)
        return text, reward, over, {"success": won, "score": self.score}

    def admissible(self) -> list[str] | None:
        """By `actions`."""
        if self.actions == "none":
            return None
        return valid(self._story, self.actions, self.score)

    def random_action(self, rng: random.Random) -> str:
        """Any listed action; with `actions` "none", any guess that changes something."""
        return rng.choice(self.admissible() or valid(self._story, "try", self.score))

    def state_key(self) -> Hashable:
        """See the module's docstring."""
        return self._story.key(self.score)

    def expert(self) -> str:
        """The next command of jericho's walkthrough, which begins at the start and knows no detours.

        Raises:
            NotImplementedError: jericho has none for this game.
        """
        command = self._story.next_of_walkthrough(self._sent)
        if command is None:
            raise NotImplementedError(f"jericho has no walkthrough for {self._task[0]}")
        return command

    def snapshot(self) -> bytes:
        """The interpreter's state, compressed: some 20 kB."""
        kept = {name: value for name, value in vars(self).items() if name != "_story"}
        state = self._story.save() if self._phase != "new" else None
        return zlib.compress(pickle.dumps((kept, state), pickle.HIGHEST_PROTOCOL), 1)

    def restore(self, s: Any, seed: int | None = None) -> None:
        """Go back, in this interpreter; `seed` renews the game's dice where they are the member's."""
        kept, state = pickle.loads(zlib.decompress(s))
        story = vars(self).get("_story") or Story()
        self.__dict__ = {**kept, "_story": story}
        if state is not None:
            story.resume(self.roms[self._task[0]], state, self._die)
        if seed is not None:
            self._reseed(seed)

    def _reseed(self, seed: int) -> None:
        super()._reseed(seed)
        if self.dice == "member":
            self._story.roll(self.noise.getrandbits(31))

    def __getstate__(self) -> bytes:
        return self.snapshot()

    def __setstate__(self, s: bytes) -> None:
        self.restore(s)

    def close(self) -> None:
        """Free the interpreter."""
        self._story.close()


def _stories(path: Path) -> dict[str, Path]:
    """Name -> story file, in the order of names."""
    files = [path] if path.is_file() else path.glob("*") if path.is_dir() else ()
    return {file.stem: file.resolve() for file in sorted(files) if re.fullmatch(r"\.z[1-8]", file.suffix)}


def _roms(given: str | None) -> dict[str, Path]:
    """The story files of a file or folder.

    Raises:
        FileNotFoundError: there are none.
    """
    found = _stories(Path(given).expanduser()) if given else {}
    if not found:
        where = f"no story file at {given}" if given else "no game was given"
        raise FileNotFoundError(f"jericho: {where}; it plays {DATA}")
    return found
