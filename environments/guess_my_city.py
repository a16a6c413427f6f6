"""Guess My City: find out which city is meant, by questions about it.

Description:
    The game of ArCHer and LMRL-Gym (arXiv 2402.19446, section 5; 2311.18232): a city is hidden, and a
    native answers questions, yes-or-no ones and others ("What is it known for?"). 96 cities; list and facts
    are this package's own, rough and from general knowledge. With them the game is short: the expert, who
    knows the table, needs 2.6 turns on average. Seeds run through the cities in turn; the splits hide
    different cities, by the ranges of task seeds that the panels use (test from 0, validation from 500,000,
    training from 1,000,000), unless `hold_out=False` or fewer than 40 cities are played: then all splits
    hide the same, as in the paper, and only their seeds tell tasks apart. A seed that is a city hides it.
Actions:
    A question, up to 200 characters, or a guess: "Is it Paris?", "Paris, France". One guess a question:
    what names several cities is refused. (In the authors' game a city counts as guessed wherever its name
    stands in a question, so that lists of cities win.) The oracle "rules" knows part of the world, country,
    language, weather, people, sights, and some more, by phrases; the country is confirmed ("Is it in
    France?"), never named; anything else is refused.
Observation:
    All questions so far with their answers; with `full=False` the last answer. No answer holds the name of
    the city: one of a model that does is replaced by the refusal.
Start:
    No question asked.
Rewards:
    -1 a turn, 0 for the right guess: guessed at question n, the return is -(n - 1), else -20.
Episode end:
    Terminated by the right guess, or after the last question: the limit is part of the game.
Information:
    `valid`: the question was answered. `success`: guessed. `task_type`: "words-96".
State key:
    The set of questions answered so far, with answers. It leaves out order, repeats, invalid questions and
    turns.

Arguments:
    words: how many cities, in alphabetical order, or a list of them; default: all.
    questions: "free", or "listed": only what `admissible` lists, 12 questions and a guess of each city.
    oracle: who answers: "rules"; "http://host:8000/v1#model", OpenAI-compatible; or the folder of a local
        Hugging Face model. Guesses are always judged by the rules.
    hold_out: see Description; default: from 40 cities on.
    full: see Observation.
    max_turns: questions.
"""

from collections.abc import Sequence
from typing import ClassVar

from environments.twenty_questions_parts.cities import Cities
from environments.twenty_questions_parts.game import GuessingGame, Table

__all__ = ["GuessMyCity"]


class GuessMyCity(GuessingGame):
    """See the module's docstring."""

    table: ClassVar[Table] = Cities()
    game: ClassVar[str] = "guess_my_city"

    def __init__(
        self,
        words: int | Sequence[str] | None = None,
        questions: str = "free",
        oracle: str = "rules",
        hold_out: bool | None = None,
        full: bool = True,
        max_turns: int = 20,
    ) -> None:
        super().__init__(words, questions, oracle, hold_out, full, max_turns)
        self.instruction = (
            f"A city somewhere in the world is meant. Find out which with at most {max_turns} questions to "
            "somebody who lives there; guess it as early as you can, one city a question. Actions: one "
            "question, such as What is it known for? or, as a guess, Is it Oslo?"
        )
