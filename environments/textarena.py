"""Any single-player game of TextArena (arXiv 2504.11442).

Description:
    Wraps `textarena.make(id, **keywords)` in its raw form: the rules become the instruction, each
    observation is what the game says since the last action, and history is left to the prompt.
Actions:
    TextArena's, mostly in brackets: [up], [3 4]. An action without a bracket is put into one.
Observation:
    The game's new messages, the player's own left out.
Start:
    The game's first messages; where it says nothing but its rules, "Begin.".
Rewards:
    TextArena's, at the end: 1 for a won game, in many games a share of it otherwise, -1 or a share
    for a second invalid move in a row.
Episode end:
    Terminated when TextArena says so (won, lost, its own limit of turns, a second invalid move in a
    row). Truncated after `max_turns` turns.
Information:
    `valid`: TextArena accepted the move. `success`: the game paid 1 or more. `task_type`: the id.
    `reason`: TextArena's words at the end.
State key:
    A hash of the game's state and attributes; it leaves out turns, errors and the log.

TextArena draws from the global `random`: tasks are drawn from the seed, what happens later from the
dynamics seed, and the global generators are put back after each call. Hence a process of its own.

Arguments:
    id: "FrozenLake-v0", "Sokoban-v0", or a class of yours (a textarena.Env) as "pkg.module:Class" or
        "path/to/file.py:Class".
    keywords: of `textarena.make`, or of the class.
    actions: what `admissible` lists; by default known for the games in `ACTIONS`, else nothing.
    max_turns: turns in an episode; by default 30.
"""

from collections.abc import Hashable
from contextlib import redirect_stdout
from io import StringIO
from itertools import permutations, product
from typing import Any, Literal

from environments.adapter_parts.chance import drawing_from
from environments.adapter_parts.objects import find
from environments.adapter_parts.state import digest
from verl_multiturn.env import Env, Info, Seed
from verl_multiturn.errors import unknown
from verl_multiturn.needs import Needs

__all__ = ["TextArena"]

MOVES = ["[up]", "[down]", "[left]", "[right]"]
ACTIONS = {
    "2048": MOVES,
    "FrozenLake": MOVES,
    "Sokoban": MOVES,
    "FifteenPuzzle": MOVES,
    "Blackjack": ["[Hit]", "[Stand]"],
    "GuessTheNumber-v0-hardcore": [f"[{number}]" for number in range(1, 51)],
    "GuessTheNumber": [f"[{number}]" for number in range(1, 21)],
    "LightsOut": [f"[{row} {column}]" for row, column in product(range(5), repeat=2)],
    "TowerOfHanoi": [f"[{a} {b}]" for a, b in permutations("ABC", 2)],
}
BOOKKEEPING = frozenset(
    {
        "turn",
        "error_count",
        "made_invalid_move",
        "logs",
        "observations",
        "step_info",
        "game_info",
        "done",
        "rewards",
    }
)


class TextArena(Env):
    """See the module's docstring."""

    needs = Needs(extra="textarena", packages=("textarena",), licence="MIT")
    runs_in: Literal["thread", "process"] = "process"

    def __init__(
        self,
        id: str = "FrozenLake-v0",
        keywords: dict[str, Any] | None = None,
        actions: list[str] | None = None,
        max_turns: int = 30,
    ) -> None:
        self.id, self.max_turns = id, max_turns
        self.game = _make(id, keywords or {})
        known = next((found for start, found in ACTIONS.items() if id.startswith(start)), None)
        self.actions = actions or known

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        from textarena import ObservationType

        with drawing_from(self.rng), redirect_stdout(StringIO()):  # some games print
            try:
                self.game.reset(num_players=1, seed=self.rng.getrandbits(31))
            except AssertionError as error:
                raise ValueError(f"{self.id} is no game for one player: {error}") from None
        messages = self.game.get_observation()[1]
        rules = [text for _, text, kind in messages if kind is ObservationType.PROMPT]
        self.instruction = "\n".join(rules)
        return self._said(messages) or "Begin.", {"task_type": self.id}

    def _said(self, messages: list[tuple[int, str, Any]]) -> str:
        from textarena import ObservationType

        own = (ObservationType.PROMPT, ObservationType.PLAYER_ACTION)
        # Some games log the player's action with its arguments in the wrong order: then text is a number.
        said = [text for _, text, kind in messages if kind not in own and isinstance(text, str)]
        return "\n".join(said)

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        state, before = self.game.state, self.game.state.error_count
        with drawing_from(self.noise), redirect_stdout(StringIO()):
            done, _ = self.game.step(action if "[" in action else f"[{action.strip()}]")
        info: Info = {"valid": not (state.game_info[0]["invalid_move"] or state.error_count > before)}
        said, reward = self._said(self.game.get_observation()[1]), 0.0
        if done:
            reward, reason = self._outcome()
            info |= {"success": reward >= 1, "reason": reason}
            said = said or reason
        return said, reward, bool(done), info

    def _outcome(self) -> tuple[float, str]:
        reward, reason = self.game.state.rewards[0], str(self.game.state.game_info[0].get("reason") or "")
        if isinstance(reward, str):  # some games hand over the two of an invalid move in the wrong order
            reward, reason = reason.removeprefix("Invalid Move: "), reward
        return float(reward), reason

    def admissible(self) -> list[str] | None:
        """The actions that were given or are known for this game, whatever its state."""
        return self.actions

    def state_key(self) -> Hashable:
        """See the module's docstring."""
        return digest(vars(self.game), BOOKKEEPING)


def _make(id: str, keywords: dict[str, Any]) -> Any:
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    if ":" in id:
        return find(id, "TextArena game")(**keywords)
    raw = id if id.endswith("-raw") else f"{id}-raw"
    if raw not in ENV_REGISTRY:
        games = [known.removesuffix("-raw") for known in ENV_REGISTRY if known.endswith("-raw")]
        raise unknown("TextArena game", id, games)
    try:
        return textarena.make(raw, **keywords)
    except LookupError as error:  # NLTK's, of many lines
        missing = next(line.strip() for line in str(error).splitlines() if line.strip(" *"))
        raise FileNotFoundError(f"{id} needs data of NLTK: {missing}") from None
