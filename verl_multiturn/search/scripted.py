"""Policies without a model: the scripted expert and the random one, as answers in a run's format.

They draw on the environment itself, in the state in question, and so are asked there.
"""

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from verl_multiturn.endpoint import END, TextChat
from verl_multiturn.env import Env
from verl_multiturn.rollout.episode import Sample
from verl_multiturn.rollout.parsing import ActionFormat

EXPERT, RANDOM = "expert", "random"


@dataclass(frozen=True)
class Scripted:
    """The expert, with a share `noise` of random actions; satisfies what a search asks of a model.

    Tokens are the pieces of `endpoint.TextChat`.
    """

    noise: float
    texts: TextChat = field(default_factory=TextChat, compare=False)

    token_ids = False
    eos = END

    def chat(self, **template_kwargs: Any) -> TextChat:
        """See `evaluate.Model`; there is no template."""
        return self.texts

    def decode(self, ids: list[int]) -> str:
        """See `evaluate.Model`."""
        return self.texts.decode(ids)

    def player(self) -> AbstractContextManager[None]:
        """See `evaluate.Model`."""
        return nullcontext()

    async def close(self) -> None:
        """See `evaluate.Model`; nothing is open."""

    def sample(self, action: str, form: ActionFormat) -> Sample:
        """An answer in the run's format."""
        answer = f"<{form.tag}>{action}</{form.tag}>" if form.tag else action
        return Sample([*self.texts.encode(f"<think></think>{answer}" if form.think else answer), END])

    def __reduce__(self) -> tuple[Any, ...]:
        return Scripted, (self.noise,)  # for environments in processes of their own


def scripted(name: str) -> Scripted | None:
    """The policy of a name: "random", "expert", or "expert:0.3" with so many random actions; else None.

    Raises:
        ValueError: a share outside [0, 1].
    """
    kind, colon, noise = name.partition(":")
    if kind not in (EXPERT, RANDOM) or (colon and kind == RANDOM):
        return None
    try:
        share = 1.0 if kind == RANDOM else float(noise) if colon else 0.5
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"model {name!r}: the share of random actions must be in [0, 1], as in expert:0.3")
    return Scripted(share)


def act(env: Env, policy: Scripted, seed: int, n: int) -> list[str]:
    """N actions in the environment's state, drawn one by one."""
    rng = random.Random(seed)
    return [env.random_action(rng) if rng.random() < policy.noise else env.expert() for _ in range(n)]
