"""Policies without a model: the scripted expert and the random one, as answers in a run's format.

They draw on the environment itself, in the state in question, and so are asked there. In an evaluation they
are the floor and the ceiling of a table: one action a turn, until the actions of an episode are spent.
"""

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig

from verl_multiturn.endpoint import END, TextChat
from verl_multiturn.env import Env, derive_seed
from verl_multiturn.rollout.episode import Episode, Sample
from verl_multiturn.rollout.layouts import NextPrompt
from verl_multiturn.rollout.observed import Observed
from verl_multiturn.rollout.parsing import ActionFormat
from verl_multiturn.rollout.prompts import View

EXPERT, RANDOM = "expert", "random"
ENDLESS = 10**7  # tokens


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


@dataclass
class ScriptedEpisode(Episode):
    """An episode that a policy without a model plays."""

    policy: Scripted = field(kw_only=True)

    async def before_turn(self, env: Any, view: View, seen: Observed, prompt: NextPrompt) -> None:
        """Keep what the policy is asked in."""
        self._env = env

    async def _speak(self, prompt_ids: list[int], spent: int = 0) -> tuple[str, Sample, float]:
        seed = derive_seed(self.task.sampling_seed, len(self.turns))
        (action,) = await self.pool.call(self._env, f"{self.where}: act", act, self.policy, seed, 1)
        sample = self.policy.sample(action, self.form)
        return self.decode(sample.ids), sample, 0.0


def one_action_a_turn(config: DictConfig) -> None:
    """The limits of a policy without a model: as many actions an episode as a model has, a turn each.

    It reads no prompt, so no length of prompts or answers ends an episode.
    """
    block = config.multiturn
    turns, each, total = block.max_turns, block.action.max_actions, block.max_actions
    most = [turns * each] if turns is not None and each is not None else []
    most += [] if total is None else [total]
    block.max_turns = min(most) if most else turns
    block.action.max_actions = 1
    config.data.max_prompt_length = config.data.max_response_length = ENDLESS
