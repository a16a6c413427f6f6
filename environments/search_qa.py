"""Search QA: answer a question by searching a collection of passages, turn by turn.

Description:
    The task of Search-R1 (arXiv 2503.09516) as GiGPO trains it (arXiv 2505.10978). Without data, a
    generated corpus: people, companies, novels, cities and what relates them, with single-hop and
    two-hop questions; retrieval is BM25. Or your own questions and corpus, or a retriever over HTTP.
Actions:
    <search>query</search> or <answer>text</answer>: exactly one of them, once. Text around it and
    closed <think> blocks are ignored. Anything else is an invalid action: nothing happens, and the
    observation says so. The tags are part of the action, so set `multiturn.action.tag` to null.
Observation:
    "Question: ...", then, after a search, the passages between <information> and </information>,
    "Doc 1 (Title: ...) text" a line. After a turn that brought nothing (an invalid action, a search
    without a result) a line says so, and the latest passages stand there still: an empty
    observation would be the same in every state.
Start:
    The question. A task is the id of a question (a hash of its words), or a number, which draws a
    question of test (from 0), val (from 500,000) or train (from 1,000,000).
Rewards:
    At the answer: exact match (0 or 1), or F1 in [0, 1], after SQuAD's normalisation; else 0.
Episode end:
    Terminated by an answer. Truncated after `max_turns` turns.
Information:
    `success`: exact match. `em`, `f1`: of the answer so far given, 0 before. `searches`: made so far.
    After the answer, `answers`: the golden ones. `task_type`: the question's data source ("nq",
    "hotpotqa", ...), or "single-hop" and "multi-hop".
State key:
    The question and the set of passages found so far: what can be known. It leaves out the turn
    count, the order of the searches and which passages stand in the observation. The authors' code
    keys by the latest passages alone (`multiturn.anchor=observation`), by similar text
    (`multiturn.gigpo.similarity=0.9`, which compares observations): both take states for one that
    differ in what was found before.

Arguments:
    questions: JSONL or parquet files with question, golden_answers (or answer), data_source and, if
        known, split; Search-R1's and verl-agent's layouts too. None: generated.
    corpus: JSONL of {"title", "text"} or Search-R1's {"id", "contents"}; indexed once, then cached.
    retriever: addresses in Search-R1's format, asked in turn, or "pkg.module:name", a class with
        `search(queries, k)` (see `retrieval_parts/passages.py`).
    topk: passages per search.
    metric: "em" or "f1".
    max_turns: turns in an episode.
    passages, world_seed: size and seed of the generated corpus.
    passage_chars: each passage is cut there.
    offer: whether `admissible` lists some plausible actions (see `candidates`), so that prompts and
        tree search have a choice; else it is None, since any query and any answer is allowed.
    timeout, tries: of a request to the retriever, in seconds, and how often it is tried.
"""

import re
from collections.abc import Hashable, Sequence
from random import Random

from environments.retrieval_parts.library import Source, library
from environments.retrieval_parts.names import names
from environments.retrieval_parts.passages import Passage, information
from environments.retrieval_parts.questions import Question
from environments.retrieval_parts.scoring import exact_match, f1
from verl_multiturn.env import Env, Info, Seed
from verl_multiturn.errors import unknown
from verl_multiturn.needs import Needs

__all__ = ["SearchQA"]

METRICS = {"em": exact_match, "f1": f1}
TAG = re.compile(r"<(/?)(search|answer)>")
INVALID = "That was no action: write <search>query</search> or <answer>text</answer>, one of them, once."
NOTHING = "The search found nothing."


class SearchQA(Env):
    """See the module's docstring."""

    needs = Needs(
        extra="search",
        packages=("bm25s", "Stemmer"),
        data="questions=FILE (JSONL, parquet) with corpus=FILE (JSONL) or retriever=URL; else generated ones",
        licence="Apache-2.0; your data's",
    )

    def __init__(
        self,
        questions: str | Sequence[str] | None = None,
        corpus: str | None = None,
        retriever: str | Sequence[str] | None = None,
        topk: int = 3,
        metric: str = "em",
        max_turns: int = 4,
        passages: int = 1000,
        world_seed: int = 0,
        passage_chars: int = 1200,
        offer: bool = False,
        timeout: float = 10.0,
        tries: int = 4,
    ) -> None:
        if min(topk, max_turns, passage_chars) < 1:
            raise ValueError(
                "topk, max_turns and passage_chars must be at least 1, "
                f"not {topk}, {max_turns}, {passage_chars}"
            )
        if metric not in METRICS:
            raise unknown("metric of search_qa", metric, METRICS)
        self.topk, self.metric, self.max_turns = topk, metric, max_turns
        self.passage_chars, self.offer = passage_chars, offer
        source = Source(_paths(questions), corpus, _paths(retriever), passages, world_seed, timeout, tries)
        self.library = library(source)
        self.instruction = (
            "Answer the question; you may search a collection of passages first. To search, write "
            "<search>query</search>; the passages found stand between <information> and </information>. "
            "To answer, write <answer>text</answer> with a few words and no explanation; this ends the task. "
            f"Do one of the two per turn, once; there are {max_turns} turns."
        )

    def tasks(self, split: str) -> list[Seed]:
        """Ids of the questions of "train", "val" or "test"."""
        return self.library.questions.tasks(split)

    def peek(self, seed: Seed) -> tuple[str, str]:
        """The question's words and its source."""
        question = self.library.questions.find(seed)
        return question.content, question.source

    def content(self, observation: str) -> str:
        """The question's words alone: asked of another corpus, it is still the same task to keep apart."""
        return self.question.content

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        self.question: Question = self.library.questions.find(seed)
        self.latest: list[Passage] = []
        self.found: frozenset[str] = frozenset()  # keys of passages
        self.titles: frozenset[str] = frozenset()
        self.queries: tuple[str, ...] = ()
        return self._text(), {"task_type": self.question.source}

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        kind, text = _parse(action)
        if kind == "answer":
            return self._answer(text)
        note = self._search(text) if kind else INVALID
        info = {"valid": bool(kind), "em": 0.0, "f1": 0.0, "searches": len(self.queries)}
        return self._text(note), 0.0, False, info

    def _search(self, query: str) -> str:
        """Add what `query` brings; return what the observation says of it."""
        found = self.library.retriever.search([query], self.topk)[0]
        self.queries += (query,)
        self.found |= {passage.key for passage in found}
        self.titles |= {passage.title for passage in found}
        self.latest = found or self.latest
        return "" if found else NOTHING

    def _answer(self, text: str) -> tuple[str, float, bool, Info]:
        golden = self.question.answers
        scores = {name: score(text, golden) for name, score in METRICS.items()}
        info = {"success": scores["em"] == 1, "searches": len(self.queries), "answers": list(golden)}
        return f"You answered: {text}", scores[self.metric], True, scores | info

    def _text(self, note: str = "") -> str:
        shown = information(self.latest, self.passage_chars) if self.latest else ""
        return "\n".join(part for part in (f"Question: {self.question.text}", note, shown) if part)

    def state_key(self) -> Hashable:
        """See the module's docstring."""
        return self.question.key, tuple(sorted(self.found))

    def admissible(self) -> list[str] | None:
        """`candidates` with `offer`, else None: any query and any answer is allowed."""
        return self.candidates() if self.offer else None

    def candidates(self) -> list[str]:
        """Some plausible actions: search for the question or for a name seen, or answer with a name.

        Names are runs of capitalised words in the question and the latest passages.
        """
        texts = [self.question.text, *(f"{passage.title}. {passage.text}" for passage in self.latest)]
        found = names(texts)
        searches = [f"<search>{text}</search>" for text in (self.question.text, *found)]
        return searches + [f"<answer>{name}</answer>" for name in found]

    def random_action(self, rng: Random) -> str:
        """One of `candidates`."""
        return rng.choice(self.candidates())

    def expert(self) -> str:
        """Search for what leads to the answer, then give it.

        Of a generated question the passages are known: the entity's, then the one in between. Of any
        other only the answer is: the expert searches for the question, then knows. That shows the form
        of an episode (for tests and a warm start), not how an answer is found.
        """
        chain = self.question.chain or (self.question.text,)
        if self.turn < self.max_turns - 1:
            for query in chain:
                if query not in self.titles and query not in self.queries:
                    return f"<search>{query}</search>"
        return f"<answer>{self.question.answers[0]}</answer>"


def _parse(action: str) -> tuple[str, str]:
    """Kind and text of the one block in `action`; two empty texts where there is not exactly one."""
    action = _without_thoughts(action)
    tags = list(TAG.finditer(action))
    if [tag[1] for tag in tags] != ["", "/"] or tags[0][2] != tags[1][2]:
        return "", ""
    text = " ".join(action[tags[0].end() : tags[1].start()].split())
    return (tags[0][2], text) if text else ("", "")


def _without_thoughts(text: str) -> str:
    """What stands outside <think>…</think>, in time linear in the text's length."""
    kept, at = [], 0
    while (start := text.find("<think>", at)) >= 0 and (stop := text.find("</think>", start)) >= 0:
        kept.append(text[at:start])
        at = stop + len("</think>")
    return "".join([*kept, text[at:]])


def _paths(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)
