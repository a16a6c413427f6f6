"""HotPotQA: answer a question by opening pages of an encyclopedia and looking words up in them.

Description:
    The task and the actions of ReAct (arXiv 2210.03629) on HotPotQA (arXiv 1809.09600), as the Q-value
    paper plays it (arXiv 2409.09345). The pages are a docstore, not the live encyclopedia: the
    paragraphs that come with the user's HotPotQA file, those of all its questions together. Without
    a file, a generated world: single-hop and two-hop questions on people, companies, novels, cities.
Actions:
    search[title] opens the page of that title. lookup[words] shows the next sentence of the open page
    that holds the words. finish[answer] ends the task. Case and outer spaces do not matter; the
    argument reaches to the last bracket. Anything else, and a lookup without an open page, is an
    invalid action: nothing happens, and the observation says so.
Observation:
    "Question: ...", then what the action brought: the first sentences of a page; "(Result 2 / 3)
    sentence"; "No more results."; or similar titles where no page has the title.
Start:
    The question. A task is the id of a question (a hash of its words), or a number, which draws a
    question of test (from 0), val (from 500,000) or train (from 1,000,000).
Rewards:
    At finish: exact match (0 or 1), or F1 in [0, 1], after SQuAD's normalisation; else 0.
Episode end:
    Terminated by finish. Truncated after `max_turns` turns (the paper's trees are 7 deep).
Information:
    `success`: exact match. `em`, `f1`: of the answer, 0 before. After the answer, `answers`: the golden
    ones. `task_type`: the record's type ("bridge", "comparison"), or "single-hop" and "multi-hop".
State key:
    The question, the open page, the words looked up and the cursor: all that decides what an action
    brings. It leaves out the turn count and the pages that were read before.

The authors' environment is one per process and is not put back when a search jumps: a lookup acts on
the page that any branch opened last, and a correct answer rewards every later step. Here all of that
is state of the instance, and its snapshots hold it, cursor included (tests/test_hotpotqa.py).

Arguments:
    data: HotPotQA's file (JSON of its authors, or Hugging Face's parquet), a list of them, or {split:
        file}; where no file is named for val or test, a tenth of the others each. None: generated.
    metric: "em" or "f1".
    sentences: of a page that search shows.
    max_turns: turns in an episode.
    passages, world_seed: size and seed of the generated world.
    offer: whether `admissible` lists some plausible actions (see `candidates`), so that prompts and
        tree search have a choice; else it is None, since any title and any answer is allowed.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from random import Random

from environments.hotpotqa_parts.docstore import Page
from environments.hotpotqa_parts.library import Source, files, library
from environments.retrieval_parts.names import names
from environments.retrieval_parts.questions import Question
from environments.retrieval_parts.scoring import exact_match, f1, normalise
from verl_multiturn.env import Env, Info, Seed
from verl_multiturn.errors import unknown
from verl_multiturn.needs import Needs

__all__ = ["HotpotQA"]

METRICS = {"em": exact_match, "f1": f1}
ACTION = re.compile(r"\s*(search|lookup|finish)\s*\[(.*)\]\s*", re.DOTALL | re.IGNORECASE)
INVALID = "That was no action: write search[title], lookup[words] or finish[answer]."
NO_PAGE = "There is no open page to look in: search for one first."
MOST_LOOKUPS = 3  # among the candidates of `offer`
LONG_WORD = 5  # letters of a word of the question that is worth looking up


class HotpotQA(Env):
    """See the module's docstring."""

    needs = Needs(
        data="data=FILE (HotPotQA's JSON or parquet, with its contexts); else a generated world",
        licence="Apache-2.0; your data's",
    )

    def __init__(
        self,
        data: str | Sequence[str] | Mapping[str, str] | None = None,
        metric: str = "em",
        sentences: int = 5,
        max_turns: int = 7,
        passages: int = 1000,
        world_seed: int = 0,
        offer: bool = False,
    ) -> None:
        if min(sentences, max_turns) < 1:
            raise ValueError(f"sentences and max_turns must be at least 1, not {sentences}, {max_turns}")
        if metric not in METRICS:
            raise unknown("metric of hotpotqa", metric, METRICS)
        self.metric, self.sentences, self.max_turns, self.offer = metric, sentences, max_turns, offer
        self.library = library(Source(files(data), passages, world_seed))
        self.instruction = (
            "Answer the question with the help of an encyclopedia. search[title] opens the page of that "
            "title and shows its beginning; lookup[words] shows the next sentence of the open page that "
            "holds the words; finish[answer] gives the answer, in a few words, and ends the task. Take one "
            f"action per turn; there are {max_turns} turns."
        )

    def tasks(self, split: str) -> list[Seed]:
        """Ids of the questions of "train", "val" or "test"."""
        return self.library.questions.tasks(split)

    def peek(self, seed: Seed) -> tuple[str, str]:
        """The question's words and its type."""
        question = self.library.questions.find(seed)
        return question.content, question.source

    def content(self, observation: str) -> str:
        """The question's words alone: with other pages it is still the same task to keep apart."""
        return self.question.content

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        self.question: Question = self.library.questions.find(seed)
        self.page: str | None = None  # title of the open page
        self.words, self.cursor = "", 0  # last looked up, and how many of its sentences were shown
        self.offered: tuple[str, ...] = ()  # titles named by a search that found none
        return self._text(""), {"task_type": self.question.source}

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        kind, argument = _parse(action)
        if kind == "finish":
            return self._finish(argument)
        valid = kind == "search" or (kind == "lookup" and self.page is not None)
        if not valid:
            brought = NO_PAGE if kind else INVALID
        else:
            brought = self._search(argument) if kind == "search" else self._look_up(argument)
        return self._text(brought), 0.0, False, {"valid": valid, "em": 0.0, "f1": 0.0}

    def _search(self, title: str) -> str:
        """Open a page; one that is not found leaves the open one open."""
        page = self.library.pages.find(title)
        if page is None:
            self.offered = tuple(self.library.pages.similar(title))
            return f"Could not find [{title}]. Similar: {', '.join(self.offered) or 'nothing'}."
        # The cursor goes with the page: it counts sentences of this one.
        self.page, self.words, self.cursor, self.offered = page.title, "", 0, ()
        return " ".join(page.sentences[: self.sentences])

    def _look_up(self, words: str) -> str:
        """The next sentence of the open page with the words; other words begin at its first."""
        if words.lower() != self.words:
            self.words, self.cursor = words.lower(), 0
        page = self._open()
        found = [text for text in (page.sentences if page else ()) if self.words in text.lower()]
        if self.cursor >= len(found):
            return "No more results." if found else f"The page does not mention [{words}]."
        self.cursor += 1
        return f"(Result {self.cursor} / {len(found)}) {found[self.cursor - 1]}"

    def _finish(self, answer: str) -> tuple[str, float, bool, Info]:
        golden = self.question.answers
        scores = {name: score(answer, golden) for name, score in METRICS.items()}
        info = {"success": scores["em"] == 1, "answers": list(golden)}
        return f"You answered: {answer}", scores[self.metric], True, scores | info

    def _open(self) -> Page | None:
        return None if self.page is None else self.library.pages[self.page]

    def _text(self, brought: str) -> str:
        return f"Question: {self.question.text}" + (f"\n{brought}" if brought else "")

    def state_key(self) -> Hashable:
        """See the module's docstring."""
        return self.question.key, self.page, self.words, self.cursor

    def admissible(self) -> list[str] | None:
        """`candidates` with `offer`, else None: any title and any answer is allowed."""
        return self.candidates() if self.offer else None

    def candidates(self) -> list[str]:
        """Some plausible actions: open a page named so far, look up a word of the question, answer a name.

        Names are runs of capitalised words in the question and in what the open page shows; a
        comparison may also be answered yes or no.
        """
        page = self._open()
        shown = page.sentences[: self.sentences] if page else ()
        found = names([self.question.text, *shown])
        here = normalise(page.title) if page else ""
        searches = [name for name in dict.fromkeys((*found, *self.offered)) if normalise(name) != here]
        words = [word for word in normalise(self.question.text).split() if len(word) >= LONG_WORD]
        hidden = " ".join(page.sentences).lower() if page else ""
        lookups = [word for word in dict.fromkeys(words) if word in hidden][:MOST_LOOKUPS]
        answers = [*found, *(("yes", "no") if self.question.source == "comparison" else ())]
        return [
            *(f"search[{name}]" for name in searches or [self.question.text]),
            *(f"lookup[{word}]" for word in lookups),
            *(f"finish[{answer}]" for answer in answers),
        ]

    def random_action(self, rng: Random) -> str:
        """One of `candidates`."""
        return rng.choice(self.candidates())

    def expert(self) -> str:
        """Open the pages that lead to the answer, then give it.

        They are the entity's and the one in between of a generated question, the supporting pages of
        HotPotQA's. That shows the form of an episode, not how an answer is found.
        """
        found = map(self.library.pages.find, self.question.chain)
        chain = list(dict.fromkeys(page.title for page in found if page))
        after = chain.index(self.page) + 1 if self.page in chain else 0
        if after < len(chain) and self.turn + len(chain) - after < self.max_turns:
            return f"search[{chain[after]}]"
        return f"finish[{self.question.answers[0]}]"


def _parse(action: str) -> tuple[str, str]:
    """Kind and argument; two empty texts where it is no action."""
    found = ACTION.fullmatch(action)
    argument = " ".join(found.group(2).split()) if found else ""
    return (found.group(1).lower(), argument) if found and argument else ("", "")
