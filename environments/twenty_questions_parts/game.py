"""A guessing game: something is hidden, an oracle answers questions, one guess a question.

What `twenty_questions` and `guess_my_city` share. A game brings a `Table`: the names, questions whose
answers it knows for every name, and how to read a question in other words.
"""

import random
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, Protocol

from environments.twenty_questions_parts.oracle import oracle_of
from environments.twenty_questions_parts.words import Names, normal
from verl_multiturn.env import Env, Info, Seed, derive_seed
from verl_multiturn.errors import unknown

LONGEST = 200  # characters of a question
QUESTIONS = ("free", "listed")
HELD_OUT_FROM = 40  # names from which on the splits hide different ones
SHARES = {"test": (0.0, 0.2), "val": (0.2, 0.3), "train": (0.3, 1.0)}  # of the names, ranked by a hash


class Table(Protocol):
    """What is known of the names."""

    names: tuple[str, ...]
    spoken: Names
    questions: Mapping[str, Mapping[str, str]]  # question -> name -> answer
    refusal: str  # the answer to what is no question of the game
    wrong: str  # the answer to a wrong guess
    prompt: str  # what a model as oracle is told, with {name} and {question}

    def __hash__(self) -> int: ...  # what is derived from a table is computed once

    def guess(self, name: str) -> str:
        """A guess in words."""
        ...

    def answers(self, question: str) -> Mapping[str, str] | None:
        """By the rules, name -> answer; None: they do not know what is asked."""
        ...

    def read(self, name: str, said: str) -> str | None:
        """The answer in what a model said; None: there is none that may be given."""
        ...


class GuessingGame(Env):
    """Base of the guessing games; see the module's docstring."""

    table: ClassVar[Table]
    game: ClassVar[str]

    def __init__(
        self,
        words: int | Sequence[str] | None,
        questions: str,
        oracle: str,
        hold_out: bool | None,
        full: bool,
        max_turns: int,
    ) -> None:
        if questions not in QUESTIONS:
            raise unknown(f"questions of {self.game}", questions, QUESTIONS)
        if max_turns < 1:
            raise ValueError(f"needs max_turns of at least 1, not {max_turns}")
        self.words = self._chosen(words)
        self.listed, self.full, self.max_turns = questions == "listed", full, max_turns
        self.hold_out = len(self.words) >= HELD_OUT_FROM if hold_out is None else hold_out
        for split in SHARES if self.hold_out else ():
            if not split_words(self.words, split):
                raise ValueError(
                    f"{self.game}: no one of {len(self.words)} words falls to split {split}; needs more "
                    "words, or hold_out=False"
                )
        oracle_of(oracle)  # one that cannot be had is refused now
        self.oracle = oracle

    def _chosen(self, words: int | Sequence[str] | None) -> tuple[str, ...]:
        names = self.table.names
        if words is None or isinstance(words, int):
            number = len(names) if words is None else words
            if not 2 <= number <= len(names) or isinstance(words, bool):
                raise ValueError(f"needs 2 to {len(names)} words, not {words}")
            return names[:number]
        if isinstance(words, str):
            raise ValueError(f"words must be a number or a list of names, not the text {words!r}")
        for word in words:
            if word not in names:
                raise unknown(f"word of {self.game}", word, names)
        if len(set(words)) < len(words) or len(words) < 2:
            raise ValueError(f"needs at least 2 words, each once, not {list(words)}")
        return tuple(words)

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        self.hidden, self.seed = self._hide(seed), seed
        self.asked: list[tuple[str, str]] = []
        self.known: frozenset[tuple[str, str]] = frozenset()
        return self._shown(), {"task_type": self._type()}

    def _hide(self, seed: Seed) -> str:
        """The word of a task: the next of its split's, so that any stretch of seeds has all equally often."""
        if seed in self.words:
            return str(seed)
        number = seed if isinstance(seed, int) else derive_seed(seed) % 1_000_000 + 1_000_000
        split = "test" if number < 500_000 else "val" if number < 1_000_000 else "train"
        pool = split_words(self.words, split) if self.hold_out else self.words
        return pool[number % len(pool)]

    def _type(self) -> str:
        return f"words-{len(self.words)}"

    def peek(self, seed: Seed) -> tuple[str, str]:
        """Content and type of a task."""
        word = self._hide(seed)
        return (word if self.hold_out else f"{word} {seed}"), self._type()

    def content(self, observation: str) -> str:
        """The hidden word; without `hold_out`, the seed too."""
        return self.peek(self.seed)[0]

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        question = " ".join(action.split())
        if self.listed:
            question = self._match(question) or ""
        answer, won = self._answer(question)
        self.asked.append(((question or " ".join(action.split()))[:LONGEST], answer or self.table.refusal))
        if answer is not None:
            self.known |= {(normal(question), answer)}
        info = {"valid": answer is not None, "success": won}
        return self._shown(), 0.0 if won else -1.0, won or self.turn == self.max_turns, info

    def _answer(self, question: str) -> tuple[str | None, bool]:
        """What the oracle says, None: that this is no question; and whether the guess is right."""
        if not normal(question) or len(question) > LONGEST:
            return None, False
        guessed = self.table.spoken.guessed(question)
        if any(guessed):
            if len(guessed) > 1:
                return None, False
            return ("Yes.", True) if guessed == [self.hidden] else (self.table.wrong, False)
        ask = oracle_of(self.oracle)
        if ask is None:
            answers = self.table.answers(question)
            return (None if answers is None else answers[self.hidden]), False
        return self.table.read(self.hidden, ask(self.table.prompt, self.hidden, question)), False

    def _shown(self) -> str:
        if not self.asked:
            return "Questions: none yet."
        if not self.full:
            return self.asked[-1][1]
        return "\n".join(["Questions:", *(f"{question} {answer}" for question, answer in self.asked)])

    def admissible(self) -> list[str] | None:
        """With `questions` "listed": those that tell words apart, then a guess of each word."""
        return list(listed(self.table, self.words)) if self.listed else None

    def random_action(self, rng: random.Random) -> str:
        """A listed question or guess, whatever `questions` is."""
        return rng.choice(listed(self.table, self.words))

    def state_key(self) -> Hashable:
        """The answers so far as a set; it leaves out their order, repeats, invalid questions and turns."""
        return self.known

    def candidates(self) -> tuple[str, ...]:
        """The words of which, by the rules, every answer so far is true; if there are none, all."""
        left = self.words
        for question, answer in self.known:
            guessed, answers = self.table.spoken.guessed(question), self.table.answers(question)
            if any(guessed):
                left = tuple(word for word in left if [word] != guessed)
            elif answers is not None:
                left = tuple(word for word in left if answers[word] == answer)
        return left or self.words

    def expert(self) -> str:
        """The listed question whose answers split the candidates best; from three on, a guess.

        Best: the fewest candidates left on average. With three left a guess costs no more than a
        question that singles one out.
        """
        left = self.candidates()
        if len(left) <= 3:
            return self.table.guess(left[0])
        sizes = {
            question: sum(n * n for n in Counter(answers[word] for word in left).values())
            for question, answers in self.table.questions.items()
        }
        best = min(sizes, key=lambda question: sizes[question])
        return best if sizes[best] < len(left) ** 2 else self.table.guess(left[0])


@lru_cache
def split_words(words: tuple[str, ...], split: str) -> tuple[str, ...]:
    """The words that a split hides, a share of them."""
    ranked = sorted(words, key=lambda word: derive_seed("split", word))
    start, stop = (round(share * len(words)) for share in SHARES[split])
    return tuple(ranked[start:stop])


@lru_cache
def listed(table: Table, words: tuple[str, ...]) -> tuple[str, ...]:
    """Questions that tell words apart, of those that do it alike the first; then a guess of each word."""
    splits: dict[frozenset[frozenset[str]], str] = {}
    for question, answers in table.questions.items():
        by_answer: dict[str, set[str]] = {}
        for word in words:
            by_answer.setdefault(answers[word], set()).add(word)
        if len(by_answer) > 1:
            splits.setdefault(frozenset(map(frozenset, by_answer.values())), question)
    return (*splits.values(), *map(table.guess, words))
