"""Any procedural task of reasoning-gym (arXiv 2505.24760): a question and a verified answer.

Description:
    Wraps `reasoning_gym.create_dataset(id, seed=..., size=1, **keywords)`: each task is the one item of
    a data set seeded with the task. With more than one attempt it is a task of several turns.
Actions:
    The answer, alone or inside <answer> tags.
Observation:
    The question; after a wrong attempt its score and the attempts left, too.
Start:
    The question.
Rewards:
    reasoning-gym's score of the last attempt, in [0, 1]; 0 for those before.
Episode end:
    Terminated by a score of 1 or the last attempt. Truncated where the last turn holds no answer.
Information:
    `valid`: there is an answer, and the scorer could read it. `success`: a score of 1. `score`: of
    this attempt. `task_type`: the id.
State key:
    The question; it leaves out the attempts made.

One generator (pool_matrix) draws from the global `numpy.random`, so the global generators are put back
after each call. Nine scorers (countdown, n_queens, ...) evaluate an answer as Python: they get it only
if it is a plain formula or list (`adapter_parts.model_text`), else one that they cannot read.

Arguments:
    id: a data set's name, such as "countdown"; or "pkg.module:name" or "path/to/file.py:name" of a
        class registered with reasoning-gym, or of a function of seed, size and keywords that returns
        a data set.
    keywords: of the data set's config.
    attempts: answers that may be given.
"""

from collections.abc import Hashable
from random import Random
from typing import Any

from environments.adapter_parts.chance import drawing_from
from environments.adapter_parts.model_text import scored
from environments.adapter_parts.objects import find
from verl_multiturn.env import Env, Info, Seed
from verl_multiturn.errors import unknown
from verl_multiturn.needs import Needs

__all__ = ["ReasoningGym"]


class ReasoningGym(Env):
    """See the module's docstring."""

    needs = Needs(extra="reasoning", packages=("reasoning_gym",))

    def __init__(
        self, id: str = "countdown", keywords: dict[str, Any] | None = None, attempts: int = 1
    ) -> None:
        if attempts < 1:
            raise ValueError(f"needs at least 1 attempt, not {attempts}")
        self.id, self.keywords, self.max_turns = id, keywords or {}, attempts
        self.instruction = "Answer the question exactly as it asks."
        _dataset(id, 0, self.keywords)  # wrong keywords are refused now

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        self.number = self.rng.getrandbits(31)
        with drawing_from(self.rng):
            self.entry = _dataset(self.id, self.number, self.keywords)[0]
        return str(self.entry["question"]), {"task_type": self.id}

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(action) or action.strip()
        score, fault = self._score(answer) if answer else (0.0, "no answer")
        if fault:
            return self._observation, 0.0, False, {"valid": False, "score": 0.0, "fault": fault}
        left = self.max_turns - self.turn
        info = {"success": score >= 1, "score": score}
        if score >= 1 or left == 0:
            return f"Score {score:g}.", score, True, info
        return (
            f"{self.entry['question']}\n\n{answer!r:.200} scores {score:g}. Attempts left: {left}.",
            0.0,
            False,
            info,
        )

    def _score(self, answer: str) -> tuple[float, str]:
        """The score, and why there is none."""
        with drawing_from(Random(self.number)):
            dataset = _dataset(self.id, self.number, self.keywords)
            try:
                return scored(dataset, answer, self.entry), ""
            except Exception as error:  # some scorers raise on an answer that they cannot read
                return 0.0, f"{type(error).__name__}: {error}"

    def state_key(self) -> Hashable:
        """See the module's docstring."""
        return str(self.entry["question"])

    def expert(self) -> str:
        """The library's own answer."""
        if not isinstance(self.entry.get("answer"), str):
            raise NotImplementedError(f"{self.id} has no single answer.")
        return str(self.entry["answer"])


def _dataset(id: str, seed: int, keywords: dict[str, Any]) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if ":" in id:
        made = find(id, "reasoning-gym data set")
        id = next((name for name, (cls, _) in DATASETS.items() if cls is made), "")
        if not id:
            return made(seed=seed, size=1, **keywords)
    if id not in DATASETS:
        raise unknown("reasoning-gym data set", id, DATASETS)
    try:
        return reasoning_gym.create_dataset(id, seed=seed, size=1, **keywords)
    except AssertionError as error:
        raise ValueError(f"{id} with {keywords}: {error}") from None
