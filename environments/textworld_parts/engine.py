"""A TextWorld game being played: its text from the interpreter, its facts from textworld's logic.

Does what textworld's own wrappers do (Côté et al., arXiv 1806.11532), but keeps only what a snapshot can
hold: the interpreter's state and the logical actions so far. The quests, which cost most of a step, are
followed only when the plan is asked for.
"""

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from environments.textworld_parts.frotz import Frotz, tidy

SCORE = re.compile(r"<score>\n(-?\d+)\n</score>")
TAGS = re.compile(r"<(score|moves)>\n.*?</\1>\n?", re.DOTALL)
EVENT = re.compile(r"\[([^]]+)\]\n?")
ASKS = re.compile(r"Would you like to RESTART.*", re.DOTALL)  # after the end; nobody answers
ROOM = re.compile(r"^-= .+ =-", re.MULTILINE)
DONE = " - succeeded"
WON, LOST = "*** The End ***", "*** You lost! ***"


@dataclass(frozen=True)
class Answer:
    """What came of a command: the game's words, whether it did something the logic knows, the end."""

    text: str
    known: bool
    won: bool
    lost: bool


class Engine:
    """Plays one game at a time.

    Attributes:
        score: so far.
        history: the logical actions so far.
    """

    def __init__(self) -> None:
        self.frotz = Frotz()
        self.score = 0
        self.history: list[Any] = []
        self._rom: Path | None = None

    def start(self, rom: Path) -> str:
        """Begin a game; return the first room's text."""
        text = self.frotz.start(rom)
        self.frotz.say("tw-extra-infos score")
        self.frotz.say("tw-trace-actions")
        self._open(rom, 0, [])
        found = ROOM.search(text)
        return tidy(text[found.start() :] if found else text)

    def _open(self, rom: Path, score: int, history: list[Any]) -> None:
        self._rom, self.score, self.history = rom, score, history
        self._game, self._names = _read(rom.with_suffix(".json"))
        self._facts = self._game.world.state.copy()
        for action in history:
            self._facts.apply(action)
        self._quests: Any = None
        self._changed()

    def _changed(self) -> None:
        self._valid: list[Any] | None = None
        self._key: str | None = None

    @property
    def _actions(self) -> list[Any]:
        """The logical actions that are possible now."""
        if self._valid is None:
            kb = self._game.kb
            found = self._facts.all_applicable_actions(kb.rules.values(), kb.types.constants_mapping)
            self._valid = list(found)
        return self._valid

    def commands(self) -> list[str]:
        """The commands that are possible now, sorted."""
        return sorted(set(self._names.gen_commands_from_actions(self._actions)))

    def do(self, command: str) -> Answer:
        """Send a command. One that does nothing the logic knows leaves everything as it was."""
        before = self.frotz.save()
        raw = self.frotz.say(command)
        text, events = _read_events(raw)
        known = False
        for event in events:
            action = self._names.detect_action(event, self._actions)
            if action is not None:
                self._facts.apply(action)
                self.history.append(action)
                self._changed()
                known = True
        won, lost = WON in text, LOST in text
        if not known and not won and not lost:
            self.frotz.load(before)
        elif score := SCORE.search(raw):
            self.score = int(score.group(1))
        return Answer(tidy(ASKS.sub("", TAGS.sub("", text))), known, won, lost)

    def look(self) -> tuple[str, str]:
        """The room and what is carried, in the game's words; costs no turn."""
        room, carried = (
            tidy(TAGS.sub("", _read_events(raw)[0])) for raw in self.frotz.ask("look", "inventory")
        )
        return room, carried

    def key(self) -> str:
        """A hash of the facts and the score."""
        if self._key is None:
            facts = "\n".join(sorted(map(str, self._facts.facts)))
            self._key = hashlib.blake2b(f"{facts}\n{self.score}".encode(), digest_size=16).hexdigest()
        return self._key

    def plan(self) -> list[str] | None:
        """Commands that win from here, by textworld's quest tracking; None: it knows none."""
        if self._quests is None:
            from textworld.generator.game import GameProgression

            self._quests, self._followed = GameProgression(self._game), 0
        for action in self.history[self._followed :]:
            self._quests.update(action)
        self._followed = len(self.history)
        policy = self._quests.winning_policy
        return None if policy is None else self._names.gen_commands_from_actions(policy)

    def save(self) -> Any:
        """The state, detached; textworld's objects as plain data, since they keep their process's hashes."""
        if self._rom is None:
            return None
        return self.frotz.save(), self.score, [action.serialize() for action in self.history], self.key()

    def load(self, rom: Path, state: Any) -> None:
        """Go to a state of a game.

        Raises:
            RuntimeError: the facts are not what they were, so it is not the same game.
        """
        from textworld.logic import Action

        machine, score, history, key = state
        self.frotz.resume(rom, machine)
        self._open(rom, score, [Action.deserialize(action) for action in history])
        if self.key() != key:
            raise RuntimeError(f"{rom} is not the game that this snapshot was taken in")

    def close(self) -> None:
        """Free the interpreter."""
        self.frotz.close()


def _read_events(raw: str) -> tuple[str, list[str]]:
    """The text without Inform's trace of actions, and the actions that succeeded, sub-actions left out."""
    events = [event.strip() for event in EVENT.findall(raw)]
    done = [event.partition(DONE)[0] for event in events if DONE in event]
    return EVENT.sub("", raw), [event for event in done if not {"(", ")"} & set(event)]


@lru_cache(maxsize=32)
def _read(path: Path) -> tuple[Any, Any]:
    from textworld.generator.game import Game
    from textworld.generator.inform7 import Inform7Game

    game = Game.load(str(path))
    return game, Inform7Game(game)
