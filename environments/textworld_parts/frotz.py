"""Z-machine games in jericho's interpreter: start, say something, go back."""

import hashlib
import re
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

LONGEST = 150  # characters of a command; jericho cuts at 198
FIXED = 1  # the seed of games that roll no dice; jericho takes 0 for "none given" and asks the clock
COMMAND = re.compile(r"[a-z0-9][a-z0-9 '-]*")
WIDE = re.compile(r"""[a-z0-9"][a-z0-9 ,'"$_()-]*""")  # what jericho's walkthroughs are written in
# Commands to the interpreter, not to the game: they write files, end the game or leave it asking. Old
# parsers read six letters of a word.
META = re.compile(
    r"(q|die|quit|undo|save|restar\w*|restor\w*|(no|un)?script|transc\w*|recording|replay|verify|version|notify)\b"
)
STATUS = re.compile(r"\n>[ \t]*(?:\S[^\n]*)?\Z")  # the prompt, and the status line after it
SPACE = re.compile(r"\n{3,}")
MARGIN = re.compile(r"^[ \t]+|[ \t]+$", re.MULTILINE)


class Frotz:
    """One interpreter: a private copy of jericho's library, which several threads may each have.

    Attributes:
        game: jericho's environment; None before the first `start`.
    """

    def __init__(self) -> None:
        self.game: Any = None
        self._rom: tuple[Path, int | None] | None = None

    @property
    def rom(self) -> tuple[Path, int | None] | None:
        """The story file and the seed of its dice; None before the first `start`."""
        return self._rom

    def start(self, rom: Path, seed: int | None = None) -> str:
        """Begin a game; return what it says.

        Args:
            rom: the story file, .z1 to .z8.
            seed: of the game's dice, at least 1; None: that of jericho's walkthrough, else always the same.
        """
        self._load(rom, seed)
        text: str = self.game.reset()[0]
        return text

    def _load(self, rom: Path, seed: int | None) -> None:
        if self._rom == (rom, seed):
            return
        import jericho

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", jericho.UnsupportedGameWarning)
            self.game = jericho.FrotzEnv(str(rom), seed)
        if seed is None and not self.game.bindings:
            self.game.seed(FIXED)
        self._rom = (rom, seed)

    def say(self, command: str) -> str:
        """Send a command; return the raw answer."""
        text: str = self.game.step(command)[0]
        return text

    def ask(self, *commands: str) -> list[str]:
        """What the game would say to each command now; nothing is changed."""
        state, answers = self.save(), []
        for command in commands:
            answers.append(self.say(command))
            self.load(state)
        return answers

    def save(self) -> Any:
        """The whole state, detached: arrays, numbers and bytes."""
        return self.game.get_state()

    def load(self, state: Any) -> None:
        """Go back to a state of the same game."""
        self.game.set_state(state)

    def resume(self, rom: Path, state: Any, seed: int | None = None) -> None:
        """Load a game, if another one is loaded, and go to a state of it."""
        self._load(rom, seed)
        self.load(state)

    def roll(self, seed: int) -> None:
        """Give the game's dice another seed, in mid-game."""
        state = list(self.save())
        state[7] = (seed % (2**31 - 1) + 1, 0, 0)
        self.load(tuple(state))

    def close(self) -> None:
        """Free the interpreter."""
        self.game = self._rom = None


def command_of(action: str, wide: bool = False) -> str | None:
    """A text as one command to the game, in lower case; None: nothing that may be sent.

    Letters, digits, spaces, hyphens and apostrophes; `wide`, commas, quotes and "then", too. Never a full
    stop, which would begin another command.
    """
    text = " ".join(action.lower().split())
    if len(text) > LONGEST or META.match(text) or not (WIDE if wide else COMMAND).fullmatch(text):
        return None
    return text if wide or not (text.startswith("tw-") or " then " in text) else None


def tidy(text: str) -> str:
    """Without the prompt, the status line, margins and rows of empty lines."""
    return SPACE.sub("\n\n", MARGIN.sub("", STATUS.sub("", text))).strip()


@lru_cache(maxsize=256)
def digest_of(rom: Path) -> str:
    """A hash of a story file."""
    return hashlib.blake2b(rom.read_bytes(), digest_size=16).hexdigest()
