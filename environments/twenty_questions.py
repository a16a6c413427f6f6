"""Twenty Questions: find out what everyday thing is hidden, by questions that yes or no answers.

Description:
    The game of ArCHer (arXiv 2402.19446, section 5): 157 everyday things in 17 classes, or the ten of its
    smaller game. The list and all facts about the things are this package's own. Seeds run through the
    things in turn. From 40 words on, the splits hide different things, by the ranges of task seeds that the
    panels use: test from 0, validation from 500,000, training from 1,000,000 (and any seed that is not a
    number); the questions are about all of them. Below that, and with `hold_out=False`, all splits hide the
    same things, as in the paper, and only their seeds tell tasks apart: a test then shows how well the game
    is played, not what carries over to new things. A seed that is a word hides it.
Actions:
    A question, up to 200 characters, or a guess: "Is it a dog?", "dogs", "I guess it is the dog", whatever
    article, number and case. The hidden thing is guessed by its name or an alias ("sofa"), alone: a question
    that names several things, or a name and more, is invalid. The oracle "rules" knows about 100 questions
    and phrases that ask for the same ("Can it be eaten?" is not among them, "Is it edible?" is); several
    phrases ask for all ("or": any) of them, "not" turns the answer round; anything else is invalid.
Observation:
    All questions so far with their answers: "Yes.", "No." or "Invalid question."; with `full=False` the last
    answer.
Start:
    No question asked.
Rewards:
    -1 a turn, 0 for the right guess: guessed at question n, the return is -(n - 1), else -20.
Episode end:
    Terminated by the right guess, or after the last question: the limit is part of the game.
Information:
    `valid`: the question was answered. `success`: guessed. `task_type`: "words-157", "words-10".
State key:
    The set of questions answered so far, with answers. It leaves out order, repeats, invalid questions and
    turns.

Arguments:
    words: how many things, of a fixed order whose first ten are the paper's smaller game, or a list of them;
        default: all 157. Up to 40 are named in the instruction.
    questions: "free", or "listed": only what `admissible` lists, which are the questions that tell the words
        apart, and a guess of each word. Listed, ten words leave 32 actions, which a small model learns.
    oracle: who answers: "rules"; "http://host:8000/v1#model", OpenAI-compatible; or the folder of a local
        Hugging Face model (flan-t5 or a chat model). Guesses are always judged by the rules.
    hold_out: see Description; default: from 40 words on.
    full: see Observation.
    max_turns: questions.
"""

from collections.abc import Sequence
from typing import ClassVar

from environments.twenty_questions_parts.game import GuessingGame, Table
from environments.twenty_questions_parts.things import Things

__all__ = ["TwentyQuestions"]

NAMED = 40  # words, at most, that the instruction names


class TwentyQuestions(GuessingGame):
    """See the module's docstring."""

    table: ClassVar[Table] = Things()
    game: ClassVar[str] = "twenty_questions"

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
        few = f" It is one of these: {', '.join(self.words)}." if len(self.words) <= NAMED else ""
        self.instruction = (
            f"An everyday thing is hidden. Find out which with at most {max_turns} questions that can be "
            f"answered with yes or no; guess it as early as you can.{few} Actions: one question, such as "
            "Is it alive? or, as a guess, Is it a dog?"
        )
