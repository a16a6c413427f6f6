"""Detective, a text adventure for an interpreter: which doors to try, what to take, whom to find.

Description:
    ArCHer's second game (arXiv 2402.19446, section 5), in jericho's interpreter: `environments.jericho` with
    that paper's defaults. The story file does not ship, with jericho or here: put detective.z5 (108 kB) into
    a folder, and name the file in `rom` or the folder in $JERICHO_ROMS. Any other Z-machine game:
    `environments.jericho`, same arguments.
Actions:
    Any command of the game. `admissible` lists those that change something, remembered for states met
    before. One that the parser does not understand is invalid and leaves the game as it was.
Observation:
    The game's answer, then room and inventory. The valid actions stand in the prompt, not here.
Start:
    The game's start.
Rewards:
    The score's change / the highest score, 360: the paper's points are 360 x the return, plus the 10 that
    the game begins with.
Episode end:
    Terminated when the game is won or lost. Truncated after `max_turns` turns.
Information:
    `success`: won. `score`. `task_type`: "detective".
State key:
    Jericho's hash of the world's objects, with the score. It leaves out turns.

Arguments:
    rom: the story file, or a folder that holds it; default: folder $JERICHO_ROMS.
    dice, actions, full: as in `environments.jericho`.
    max_turns: 50, as in the authors' code; their paper knows a solution in 51 steps.
"""

import os
from pathlib import Path

from environments.jericho import Jericho

__all__ = ["Detective"]

NAME = "detective"


class Detective(Jericho):
    """See the module's docstring."""

    def __init__(
        self,
        rom: str | None = None,
        dice: str = "walkthrough",
        actions: str = "try",
        full: bool = True,
        max_turns: int = 50,
    ) -> None:
        super().__init__(str(_story(rom)), dice, actions, full, max_turns)

    @classmethod
    def find_data(cls) -> str | None:
        """The game in $JERICHO_ROMS, if it is there."""
        try:
            return str(_story(None))
        except FileNotFoundError:
            return None


def _story(rom: str | None) -> Path:
    """The story file.

    Raises:
        FileNotFoundError: it is not where it was looked for.
    """
    given = rom or os.environ.get("JERICHO_ROMS")
    path = Path(given).expanduser() if given else None
    if path is not None and path.is_file():
        return path
    found = sorted(path.glob(f"{NAME}.z[1-8]")) if path is not None else []
    if not found:
        where = f"there is none in {given}" if given else "no place was named"
        raise FileNotFoundError(
            f"{NAME}: {where}; put {NAME}.z5 into a folder of yours and give rom=FOLDER/{NAME}.z5, or "
            "JERICHO_ROMS=FOLDER; the story file ships neither with jericho nor here"
        )
    return found[0]
