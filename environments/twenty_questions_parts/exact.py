"""Exact returns of a guessing game with few words, by dynamic programming over what is still possible.

A state is the set of words that the answers leave, all equally likely; the oracle is by rules, so that this
is all a player can know. The best player is computed on these states; the random one, who draws from the
listed questions and guesses and learns nothing, has a closed form in the number K of them:

    R = −Σ_{n=1}^{T} (1 − 1/K)^n.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from environments.twenty_questions_parts.game import GuessingGame, listed
from verl_multiturn.exact import exact_values

MOST_WORDS = 12  # 2^12 sets of words, each with every listed question


@dataclass
class BeliefModel:
    """The game as `exact_values` reads it; a state is a bit for each word that is still possible.

    Attributes:
        game: the class of the game.
        words: what may be hidden.
        max_turns: questions.
    """

    game: type[GuessingGame]
    words: tuple[str, ...]
    max_turns: int

    @property
    def actions(self) -> Sequence[str]:
        """The listed questions and guesses."""
        return listed(self.game.table, self.words)

    def start_state(self) -> int:
        """Anything may be hidden."""
        return (1 << len(self.words)) - 1

    def state_of(self, words: Iterable[str]) -> int:
        """The state in which just these words are possible."""
        return sum(1 << self.words.index(word) for word in words)

    def transitions(self, state: int, action: str) -> list[tuple[float, int, float, bool]]:
        """(probability, state after it, reward, guessed), one for each answer."""
        outcomes, n = [], state.bit_count()
        for part, reward, guessed in self._parts[action]:
            if left := state & part:
                outcomes.append((left.bit_count() / n, left, reward, guessed))
        return outcomes

    @cached_property
    def _parts(self) -> dict[str, list[tuple[int, float, bool]]]:
        """Of each action, the words of every answer, its reward, and whether it ends the game."""
        found = {}
        for action in self.actions:
            answers = self.game.table.questions.get(action)
            if answers is None:
                right = self.state_of(filter(None, self.game.table.spoken.guessed(action)))
                found[action] = [(right, 0.0, True), (self.start_state() ^ right, -1.0, False)]
            else:
                told = [answers[word] for word in self.words]
                parts = [[w for w, one in zip(self.words, told, strict=True) if one == a] for a in set(told)]
                found[action] = [(self.state_of(part), -1.0, False) for part in parts]
        return found


def reference_returns(env: GuessingGame, gamma: float = 1.0) -> dict[str, float]:
    """Exact mean returns over the words, discounted from the first turn: "best" and "random".

    Args:
        env: a game; only its words, questions and turns are read.
        gamma: discount of a turn, in [0, 1].

    Raises:
        ValueError: more than 12 words.
    """
    if len(env.words) > MOST_WORDS:
        raise ValueError(
            f"exact returns need at most {MOST_WORDS} words, not {len(env.words)}: play the expert instead"
        )
    best = exact_values(BeliefModel(type(env), env.words, env.max_turns), "optimal", gamma).start
    return {"best": best, "random": random_return(len(listed(env.table, env.words)), env.max_turns, gamma)}


def random_return(actions: int, max_turns: int, gamma: float = 1.0) -> float:
    """The mean return of drawing from so many questions and guesses, one of them right."""
    missed = 1 - 1 / actions
    return -sum(gamma ** (n - 1) * missed**n for n in range(1, max_turns + 1))
