"""A story file of unknown origin: its score, end and walkthrough, from jericho or from what it says."""

import hashlib
import re

from environments.textworld_parts.frotz import Frotz, command_of, tidy

SCORE = re.compile(r"(-?\d+)\D{0,30}\bof\b\D{0,30}(\d+)")  # "scored 0 out of a possible 4", "0 (total of 350"
END = re.compile(r"\*\*\*\s*(\S.*?)\s*\*\*\*")
GOOD_END = re.compile(r"\bwon\b|victor|the end", re.IGNORECASE)


class Story(Frotz):
    """An interpreter that tells how the game stands."""

    @property
    def known(self) -> bool:
        """Whether jericho knows this game, by the hash of its file."""
        return bool(self.game.is_fully_supported)

    def points(self, text: str = "") -> tuple[int, int]:
        """Score and highest score; (0, 0) where the game does not say.

        Args:
            text: its last answer, which holds the final score if that was the end.
        """
        if self.known:
            return int(self.game.get_score()), int(self.game.get_max_score())
        found = SCORE.search(text if END.search(text) else self.ask("score")[0])
        return (int(found.group(1)), int(found.group(2))) if found else (0, 0)

    def ending(self, text: str, points: tuple[int, int]) -> tuple[bool, bool]:
        """Whether the game is over, and whether it is won."""
        if self.known:
            won = bool(self.game.victory())
            return won or bool(self.game.game_over()), won
        end = END.search(text)
        full = 0 < points[1] <= points[0]
        return bool(end), bool(end and (full or GOOD_END.search(end.group(1))))

    def look(self) -> tuple[str, str]:
        """The room and what is carried, in the game's words; costs no turn."""
        room, carried = map(tidy, self.ask("look", "inventory"))
        return room, carried

    def key(self, score: int) -> str:
        """A hash of the state: of the world's objects where jericho knows them, else of what is shown."""
        if self.known:
            return f"{self.game.get_world_state_hash()} {score}"
        seen = "\0".join((*self.look(), str(score)))
        return hashlib.blake2b(seen.encode(), digest_size=16).hexdigest()

    def next_of_walkthrough(self, sent: list[str]) -> str | None:
        """What follows the commands of jericho's walkthrough that are in `sent`; None: it has none."""
        way = self.game.get_walkthrough() if self.known else []
        done = 0
        for command in sent:
            done += done < len(way) and command == command_of(way[done], wide=True)
        return str([*way, "look"][done]) if way else None
