"""A Hugging Face model as a player: the prompts, parsing and budgets of a run, sampled by transformers.

The episode is `rollout.episode.Episode`, the one that training plays; only what generates the text
differs, so a model is seen here as a run would see it (vLLM draws other random numbers).
"""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from omegaconf import DictConfig

from verl_multiturn import policies
from verl_multiturn.compose import plain
from verl_multiturn.env import Seed, derive_seed
from verl_multiturn.play import Screen
from verl_multiturn.rollout.episode import Episode, Task
from verl_multiturn.rollout.layouts import LAYOUTS, Limits
from verl_multiturn.rollout.parsing import ActionFormat
from verl_multiturn.rollout.pool import EnvPool, Observed, ProcessEnv, ThreadEnv, reset
from verl_multiturn.rollout.prompts import Messages, prompt_policy
from verl_multiturn.samplers import Sampler

T = TypeVar("T")


class Chat:
    """Renders chats as the layouts need it, from a tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def build_initial_tokens(self, messages: Messages) -> list[int]:
        """A fresh chat with the generation prompt."""
        return self._encode(self._render(messages, True))

    def merge_context_tokens(self, previous: Messages, updated: Messages, ids: list[int]) -> Any:
        """Append the new messages' tokens to `ids`, which end with the end of an utterance.

        What the template puts behind that end (a line break, mostly) comes first. A template that
        renders earlier messages anew is rendered whole.
        """
        before, after = self._render(previous, False), self._render(updated, True)
        _, eos, gap = before.rpartition(self.tokenizer.eos_token)
        if not (eos and after.startswith(before)):
            return SimpleNamespace(token_ids=self._encode(after))
        return SimpleNamespace(token_ids=[*ids, *self._encode(gap + after[len(before) :])])

    def _render(self, messages: Messages, prompt: bool) -> str:
        render = self.tokenizer.apply_chat_template
        return str(render(messages, tokenize=False, add_generation_prompt=prompt))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


class WatchedPool(EnvPool):
    """An environment pool that tells what its calls return."""

    def __init__(self, timeout: float, tell: Callable[[Callable[..., Any], Any, Any], None]) -> None:
        super().__init__(threads=1, timeout=timeout)
        self.tell = tell

    async def call(self, env: ThreadEnv | ProcessEnv, what: str, function: Callable[..., T], *args: Any) -> T:
        """See `EnvPool.call`."""
        seen = await super().call(env, what, function, *args)
        self.tell(function, args[0], seen)
        return seen


class ModelPlayer:
    """Plays tasks with a model; call it with a task and its type (see `play.Player`)."""

    def __init__(self, config: DictConfig, sampler: Sampler, screen: Screen) -> None:
        self.settings = plain(config.multiturn)
        self.prompts = prompt_policy(self.settings)
        self.form = ActionFormat(**self.settings["action"])
        self.limits = Limits(
            max_prompt_tokens=config.data.max_prompt_length,
            max_response_tokens=config.data.max_response_length,
            max_action_tokens=self.settings["max_action_tokens"],
            max_turns=self.settings["max_turns"],
            max_actions=self.settings["max_actions"],
        )
        self.sampler, self.screen = sampler, screen
        self.chat = Chat(sampler.tokenizer)
        self.pool = WatchedPool(self.settings["step_timeout"], self._show)

    def __call__(self, task: Seed, kind: str) -> policies.Episode:
        """Play one episode; its chances are those of a validation of the run."""
        self._task, self._kind = task, kind
        layout = LAYOUTS[self.settings["row"]]
        seed = derive_seed(self.settings["seed"], task, 0)
        episode = Episode(
            env_name=self.settings["env"],
            env_kwargs=self.settings["env_kwargs"],
            task=Task(task, "", 0, derive_seed(task, 0), seed, type=kind),
            layout=layout(self.prompts, self.chat, self.limits, self.sampler.tokenizer.eos_token_id),
            form=self.form,
            limits=self.limits,
            pool=self.pool,
            generate=self.sampler,
            decode=self._decode,
        )
        played = asyncio.run(episode.play())
        invalid = sum(not turn.valid for turn in played.turns)
        return policies.Episode(
            task=task,
            task_type=self._kind,
            episode_return=played.episode_return,
            success=bool(played.success),
            turns=len(played.turns),
            invalid=invalid,
            truncated=played.truncated,
        )

    def close(self) -> None:
        """Close the environment."""
        self.pool.close()

    def _decode(self, ids: list[int]) -> str:
        text = self.sampler.decode(ids)
        self.screen.utterance(text)
        return text

    def _show(self, function: Callable[..., Observed], argument: Any, seen: Observed) -> None:
        if function is reset:
            self._kind = str(seen.info.get("task_type", self._kind))
            self.screen.start(self._task, self._kind, seen)
        else:
            self.screen.acted(argument, seen)
