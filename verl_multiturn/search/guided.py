"""An episode in which several answers are sampled at each turn and one of them is carried out.

All else is `rollout.episode.Episode`'s: prompts, parsing, limits, what is recorded. The record of a
trajectory gets `cost` (answers asked for, tokens read and written for them, answers scored), that of a
turn its `candidates` with votes and scores.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from verl_multiturn.env import derive_seed
from verl_multiturn.rollout.episode import Episode, Sample
from verl_multiturn.rollout.layouts import NextPrompt
from verl_multiturn.rollout.observed import Observed
from verl_multiturn.rollout.parsing import parse
from verl_multiturn.rollout.prompts import Messages, PromptTooLong, View
from verl_multiturn.search.best_of import SCORED, check_select, choose, merge, oracle, scored

ScoreAnswers = Callable[[Messages, list[str]], Sequence[float]]  # prompt, answers -> Q of each


@dataclass
class Guide:
    """How a turn's answer is chosen.

    Attributes:
        select: a rule of `best_of.SELECT`; with n = 1 all are what the policy says.
        n: answers to choose from.
        score: of a Q model, for argmax and softmax.
        tau: τ of softmax.
        seed: of chance in the choice.

    Raises:
        ValueError: an unknown rule, n < 1, or a rule that needs a score and has none.
    """

    select: str = "argmax"
    n: int = 5
    score: ScoreAnswers | None = None
    tau: float = 1.0
    seed: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # a model scores one prompt at a time

    def __post_init__(self) -> None:
        check_select(self.select)
        if self.n < 1:
            raise ValueError(f"best of n needs n >= 1, not {self.n}")
        if self.select in SCORED and self.select != "oracle" and self.score is None:
            raise ValueError(f"select={self.select} needs a Q model: give --q-model FOLDER")


@dataclass
class Guided(Episode):
    """An episode whose answers are the best of n."""

    guide: Guide = field(kw_only=True)

    async def before_turn(self, env: Any, view: View, seen: Observed, prompt: NextPrompt) -> None:
        """Keep what a choice depends on."""
        self._env, self._view, self._prompt, self._most = env, view, prompt, seen.max_turns

    async def _speak(self, prompt_ids: list[int], spent: int = 0) -> tuple[str, Sample, float]:
        guide, turn = self.guide, len(self.turns)
        # The first answer is the one that is said without a choice: rules compare on the same samples.
        seeds = [None if self.task.sampling_seed is None else self._seed(k, turn) for k in range(guide.n)]
        started = time.perf_counter()
        samples = await asyncio.gather(
            *(self.generate(prompt_ids, self.limits.max_action_tokens - spent, seed) for seed in seeds)
        )
        texts = [self.decode(sample.ids) for sample in samples]
        actions = [self.form.separator.join(parse(text, self.form).actions) for text in texts]
        candidates = merge(texts, actions)
        to_score = guide.select in SCORED and len(candidates) > 1
        if to_score:
            candidates = scored(candidates, await self._scores([one.text for one in candidates]))
        rng = random.Random(derive_seed(guide.seed, self.task.id, self.task.sample, turn))
        alone = len(candidates) == 1
        chosen = candidates[0] if alone else choose(candidates, guide.select, rng, guide.tau)
        said = samples[chosen.place]
        cost = {
            "calls": guide.n,
            "prompt_tokens": guide.n * len(prompt_ids),
            "tokens": sum(len(sample.ids) for sample in samples),
            "scored": len(candidates) if to_score else 0,
            "candidates": [asdict(one) for one in candidates],
        }
        said = replace(said, extra=said.extra | cost)
        return texts[chosen.place], said, time.perf_counter() - started

    def _seed(self, k: int, turn: int) -> int:
        seed = derive_seed(self.task.sampling_seed, turn)
        return (seed if not k else derive_seed(seed, k)) % 2**31

    async def _scores(self, texts: list[str]) -> Sequence[float]:
        if self.guide.select == "oracle":
            return await self._oracle(texts)
        async with self.guide.lock:
            return await asyncio.to_thread(self._score, texts)

    def _score(self, texts: list[str]) -> Sequence[float]:
        """By what the policy read, or less of it where the Q model reads less.

        Raises:
            PromptTooLong: nothing more can be left out.
        """
        score = self.guide.score
        assert score is not None
        try:
            return score(self._prompt.messages, texts)
        except PromptTooLong:
            for messages in self.layout.policy.shorter(self._view, self._prompt.messages):
                with suppress(PromptTooLong):
                    return score(messages, texts)
            raise

    async def _oracle(self, texts: list[str]) -> Sequence[float]:
        # The first action of each: the ones behind it belong to the same answer, but an expert goes on.
        first = [(parse(text, self.form).actions or ("",))[0] for text in texts]
        left = (self.limits.max_turns or self._most) - len(self.turns)
        seed = derive_seed(self.task.dynamics_seed, len(self.turns))
        call = f"{self.where}: oracle at turn {len(self.turns)}"
        return await self.pool.call(self._env, call, oracle, first, left, seed)


COSTS = ("calls", "prompt_tokens", "tokens", "scored")


def annotated(record: dict[str, Any], details: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A recorded trajectory with what its choices cost and chose from.

    Args:
        record: of an evaluation.
        details: of its turns, from the `Guided` that played it.
    """
    extras = [detail["extra"] for detail in details]
    cost = {key: sum(extra[key] for extra in extras) for key in COSTS}
    turns = [
        turn | {"candidates": extra["candidates"]}
        for turn, extra in zip(record["turns"], extras, strict=True)
    ]
    return record | {"cost": cost, "turns": turns}
