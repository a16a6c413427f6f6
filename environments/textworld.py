"""TextWorld: text adventures made to order, played by the real engine (Côté et al., arXiv 1806.11532).

Description:
    Walk through rooms, open, unlock, take, put, cook. `kind` is the sort of game: "coin" (walk to a coin),
    "treasure" (find an object in a maze), "cooking" (follow a recipe), "simple" (a fixed house, food to
    be put on a stove), "custom" (a quest of any length). A game is made by textworld's own generator when
    its task is first played, which takes 2 to 5 s, and kept in the cache for good (0.5 MB). Hence each
    split has a bounded number of tasks, `games`.
Actions:
    Commands such as "go east" or "take apple from table"; `admissible` lists those that do something.
    Other words for the same ("n", "get apple") are understood by the game's parser. What does nothing is
    invalid and leaves the game as it was, turn count included. Commands to the interpreter (save, undo,
    restart ...) and several commands at once are not passed on.
Observation:
    The game's answer; first, the room. With `full`, always room and inventory, too.
Start:
    A seed picks a game of its split, modulo `games`: below 500,000 test, below 1,000,000 val, from there on
    train, where panels start by default. A string names one: "<split>/<number>". There is no chance in it.
Rewards:
    By `reward`. "score": the points won in this turn / the game's highest score. "success": 1 for winning.
    "intermediate": 1, 0 or -1 as the way to win gets shorter or longer (textworld's quest tracking); 1 for
    winning, -1 for losing.
Episode end:
    Terminated when the game is won or lost. Truncated after `max_turns` turns.
Information:
    `success`: won. `score`: points so far. `task_type`: the kind.
State key:
    A hash of the world's facts and the score; it leaves out turns and words.

Arguments:
    kind: see Description.
    games: how many a split has.
    reward: see Rewards.
    full: see Observation.
    max_turns: turns in an episode.
    **settings: of the kind, as `tw-make` names them: environments/textworld_parts/games.py lists them.
"""

import pickle
import zlib
from collections.abc import Hashable
from typing import Any, ClassVar, Literal

from environments.textworld_parts.engine import Engine
from environments.textworld_parts.frotz import command_of
from environments.textworld_parts.games import Game, place_of, settings_of
from verl_multiturn.env import Env, Info, Seed
from verl_multiturn.errors import unknown
from verl_multiturn.needs import Needs
from verl_multiturn.panel import FIRST_ID

__all__ = ["TextWorld"]

REWARDS = ("score", "success", "intermediate")


class TextWorld(Env):
    """See the module's docstring."""

    needs: ClassVar[Needs] = Needs(
        extra="textworld",
        packages=("textworld", "jericho"),
        licence="MIT; the interpreter it loads (jericho, frotz), GPL-2.0",
    )
    runs_in: Literal["thread", "process"] = "process"
    snapshots: Literal["copy", "replay", "none"] = "copy"

    def __init__(
        self,
        kind: str = "coin",
        games: int = 64,
        reward: str = "score",
        full: bool = False,
        max_turns: int = 30,
        **settings: Any,
    ) -> None:
        if reward not in REWARDS:
            raise unknown("reward of textworld", reward, REWARDS)
        if games < 1 or max_turns < 1:
            raise ValueError(f"needs games and max_turns of at least 1, not {games}, {max_turns}")
        self.kind, self.settings = kind, settings_of(kind, settings)
        self.games, self.reward, self.full, self.max_turns = games, reward, full, max_turns
        self._game: Game | None = None
        self._engine: Engine = Engine()

    @classmethod
    def preload(cls) -> None:
        """What a worker imports once, before it forks."""
        import jericho  # noqa: F401
        import textworld.generator  # noqa: F401

    def tasks(self, split: str) -> list[Seed]:
        """The ids "<split>/0" to "<split>/<games - 1>" of train, val or test."""
        if split not in FIRST_ID:
            raise unknown("split of textworld", split, FIRST_ID)
        return [f"{split}/{number}" for number in range(self.games)]

    def peek(self, seed: Seed) -> tuple[str, str]:
        """Digest of the game's source, and its kind; makes the game if need be."""
        return self._find(seed).built().digest, self.kind

    def content(self, observation: str) -> str:
        """The digest of the game's source."""
        return self._now.built().digest

    def _find(self, seed: Seed) -> Game:
        return Game(self.kind, self.settings, *place_of(seed, self.games))

    @property
    def _now(self) -> Game:
        if self._game is None:
            raise RuntimeError("TextWorld: the episode has not begun; call reset first.")
        return self._game

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        self._game = self._find(seed)
        known = self._game.built()
        text = self._engine.start(self._game.rom)
        self.max_score, self._left = known.max_score, self._plan_length()
        self.instruction = (
            f"You play a text adventure. {known.objective} Answer with one command, as in "
            '"go east", "take apple from table", "examine cookbook", "inventory".'
        ).replace("  ", " ")
        info = {"task_type": self.kind, "game": self._game.id, "max_score": known.max_score}
        return self._with_room(text, first=True), info

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        command = self._match(action) or command_of(action)
        if command is None:
            return "That is no command of this game.", 0.0, False, {"valid": False, "score": self.score}
        before = self.score
        answer = self._engine.do(command)
        over = answer.won or answer.lost
        text = answer.text if over else self._with_room(answer.text)
        info = {"valid": answer.known or over, "success": answer.won, "score": self.score}
        return text, self._pay(before, answer.won, answer.lost), over, info

    @property
    def score(self) -> int:
        """Points so far."""
        return self._engine.score

    def _pay(self, before: int, won: bool, lost: bool) -> float:
        if self.reward == "score":
            return (self.score - before) / self.max_score if self.max_score else 0.0
        if self.reward == "success" or won or lost:
            return float(won) if self.reward == "success" else float(won - lost)
        previous, self._left = self._left, self._plan_length()
        return float((self._left < previous) - (self._left > previous))

    def _plan_length(self) -> float:
        """Commands to the win; infinite where the quests have become impossible."""
        if self.reward != "intermediate":
            return 0.0
        plan = self._engine.plan()
        return float("inf") if plan is None else len(plan)

    def _with_room(self, text: str, first: bool = False) -> str:
        if not self.full:
            return text
        room, carried = self._engine.look()
        return "\n\n".join([room, carried] if first or text in (room, carried) else [text, room, carried])

    def admissible(self) -> list[str]:
        """The commands that do something now, by textworld's logic."""
        return self._engine.commands()

    def state_key(self) -> Hashable:
        """See the module's docstring."""
        return self._engine.key()

    def expert(self) -> str:
        """The next command of textworld's own plan; "look" where it has none, after a mistake for good."""
        return next(iter(self._engine.plan() or ()), "look")

    def snapshot(self) -> bytes:
        """The interpreter's state and the actions so far, compressed: some 20 kB."""
        kept = {name: value for name, value in vars(self).items() if name != "_engine"}
        return zlib.compress(pickle.dumps((kept, self._engine.save()), pickle.HIGHEST_PROTOCOL), 1)

    def restore(self, s: Any, seed: int | None = None) -> None:
        """Go back, in this interpreter; what the world's facts come to is compared with the snapshot's."""
        kept, state = pickle.loads(zlib.decompress(s))
        engine = vars(self).get("_engine") or Engine()
        self.__dict__ = {**kept, "_engine": engine}
        if state is not None:
            self._now.built()
            engine.load(self._now.rom, state)
        if seed is not None:
            self._reseed(seed)

    def __getstate__(self) -> bytes:
        return self.snapshot()

    def __setstate__(self, s: bytes) -> None:
        self.restore(s)

    def close(self) -> None:
        """Free the interpreter."""
        self._engine.close()
