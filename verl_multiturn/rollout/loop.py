"""The `multiturn` agent loop: verl calls it once per trajectory in its rollout workers.

Registered by import; `actor_rollout_ref.model.external_lib` names this module, so every worker has it.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from omegaconf import DictConfig
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from verl_multiturn.compose import plain
from verl_multiturn.env import derive_seed
from verl_multiturn.panel import Panel
from verl_multiturn.rollout.audit import AuditedEpisode, AuditedVineEpisode, Audits
from verl_multiturn.rollout.audit_config import Audit
from verl_multiturn.rollout.continuations import Vines
from verl_multiturn.rollout.episode import Episode, Sample, Task
from verl_multiturn.rollout.layouts import LAYOUTS, Limits
from verl_multiturn.rollout.parsing import ActionFormat
from verl_multiturn.rollout.pool import EnvironmentFailure, EnvPool
from verl_multiturn.rollout.prompts import Messages, Prompt, PromptPolicy, View, prompt_policy
from verl_multiturn.rollout.rows import to_outputs
from verl_multiturn.rollout.vine import VineEpisode
from verl_multiturn.rollout.vine_config import Vine


@dataclass(frozen=True)
class Rollout:
    """What all episodes of a rollout worker share; built once, not once per trajectory."""

    settings: dict[str, Any]
    policy: PromptPolicy
    form: ActionFormat
    limits: Limits
    pool: EnvPool
    vines: Vines | None  # of VinePPO
    audits: Audits | None  # of multiturn.audit

    @classmethod
    def of(cls, config: DictConfig) -> "Rollout":
        """From a run's configuration."""
        settings = plain(config.multiturn)
        limits = Limits(
            max_prompt_tokens=config.data.max_prompt_length,
            max_response_tokens=config.data.max_response_length,
            max_action_tokens=settings["max_action_tokens"],
            max_turns=settings["max_turns"],
            max_actions=settings["max_actions"],
            episode_timeout=settings["episode_timeout"],
            generate_timeout=settings["generate_timeout"],
        )
        form, pool = ActionFormat(**settings["action"]), EnvPool.of(settings)
        vines = None
        if settings["algorithm"] == "vineppo":
            vines = Vines(Vine.of(settings, config.actor_rollout_ref.rollout.n))
        audit = Audit.of(config)
        audits = None if audit is None else Audits(audit)
        return cls(settings, prompt_policy(settings), form, limits, pool, vines, audits)


def first_prompt(config: DictConfig, tokenizer: Any) -> Prompt:
    """The prompt of the first training task, built before any engine starts.

    Raises:
        ValueError: the tokenizer has no chat template, or the prompt exceeds its budget.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {config.actor_rollout_ref.model.path} has no chat template: use an instruct "
            "model, or give one in actor_rollout_ref.model.custom_chat_template"
        )
    rollout, panel = Rollout.of(config), Panel.load(config.data.train_files)
    env = panel.make()
    observation, _ = env.reset(panel.tasks[0].id)
    view = View(env.instruction, observation, env.admissible())
    env.close()

    def encode(messages: Messages) -> list[int]:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return list(ids)

    return rollout.policy.fit(view, encode, rollout.limits.max_prompt_tokens)


def to_sample(out: Any, vocabulary: int) -> Sample:
    """What verl's LLM server sampled, as long as it can be trained on.

    Args:
        out: verl's TokenOutput.
        vocabulary: tokens of the tokenizer; verl's servers sample no others.

    Raises:
        EnvironmentFailure: a token that does not exist, or log-probabilities that do not fit the tokens.
    """
    ids, log_probs = list(out.token_ids), None if out.log_probs is None else list(out.log_probs)
    for token in ids:
        if not 0 <= token < vocabulary:
            raise EnvironmentFailure(
                f"the LLM server sampled token {token}, the tokenizer has those from 0 to {vocabulary - 1}: "
                "the server runs another model, or one whose output layer is larger than its tokenizer"
            )
    if log_probs is not None and (len(log_probs) != len(ids) or any(map(math.isnan, log_probs))):
        raise EnvironmentFailure(
            f"the LLM server gave {len(log_probs)} log-probabilities for {len(ids)} tokens, "
            f"{sum(map(math.isnan, log_probs))} of them no number: its weights may have become NaN"
        )
    return Sample(ids, log_probs, dict(out.extra_fields))


_rollouts: dict[int, Rollout] = {}  # by the id of the worker's configuration, which lives as long as it


@register("multiturn")
class MultiTurnLoop(AgentLoopBase):  # type: ignore[misc]
    """Plays one episode with verl's LLM server and returns its training rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if id(self.config) not in _rollouts:
            _rollouts[id(self.config)] = Rollout.of(self.config)
        self.rollout = _rollouts[id(self.config)]
        self.settings = self.rollout.settings

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Play the episode of a dataset row.

        Args:
            sampling_params: verl's, for training or validation.
            **kwargs: the columns of `EnvDataset`, and verl's uid, session_id and global_steps.
        """
        request_id = uuid4().hex  # one for all turns: they share a server and its prefix cache
        vocabulary = len(self.tokenizer)

        async def generate(prompt_ids: list[int], max_tokens: int, seed: int | None) -> Sample:
            params = {**sampling_params, "max_tokens": max_tokens}
            if seed is not None:
                params["seed"] = seed
            out = await self.server_manager.generate(
                request_id=request_id, prompt_ids=prompt_ids, sampling_params=params
            )
            return to_sample(out, vocabulary)

        shared, chat = self.rollout, self.continuous_token_builder
        layout = LAYOUTS[self.settings["row"]]
        episode = self._kind(kwargs)(
            env_name=self.settings["env"],
            env_kwargs=self.settings["env_kwargs"],
            task=self._task(kwargs),
            layout=layout(shared.policy, chat, shared.limits, self.tokenizer.eos_token_id),
            form=shared.form,
            limits=shared.limits,
            pool=shared.pool,
            generate=generate,
            decode=lambda ids: self.tokenizer.decode(ids, skip_special_tokens=True),
            anchor=self.settings["anchor"],
        )
        try:
            trajectory = await episode.play()
        except Exception as error:
            self._record_failure(kwargs, episode, error)
            raise
        keep_text = self.settings["gigpo"]["similarity"] is not None
        # Validation measures the task: no penalty there.
        penalty = self.settings["format_penalty"] if kwargs["split"] == "train" else 0.0
        return to_outputs(trajectory, self.settings["row"], self.tokenizer.eos_token_id, keep_text, penalty)

    def _kind(self, kwargs: dict[str, Any]) -> Callable[..., Episode]:
        vines, audits = self.rollout.vines, self.rollout.audits
        kind: Callable[..., Episode] = Episode
        if kwargs["split"] != "train":
            return kind
        step = int(kwargs["global_steps"])
        prompt = self.settings["seed"], kwargs["global_steps"], kwargs["uid"]
        states, seed = 0, derive_seed("audit", *prompt)
        if audits is not None and audits.audit.due(step):
            states = audits.audit.share(seed, int(kwargs["session_id"]))
        if states:
            kind = AuditedEpisode if vines is None else AuditedVineEpisode
            kind = partial(kind, audits=audits, audited=states, audit_seed=seed)
        elif vines is not None:
            kind = VineEpisode
        if vines is not None:
            kind = partial(kind, vines=vines, seed=derive_seed("vine", *prompt))
        return kind

    def _task(self, kwargs: dict[str, Any]) -> Task:
        task, sample, step = kwargs["task"], int(kwargs["session_id"]), int(kwargs["global_steps"])
        # Validation meets the same chances at every step; training meets new ones each time.
        parts = (task, sample) if kwargs["split"] == "val" else (task, sample, step)
        seeded = kwargs["split"] == "val" or self.settings["seeded"]
        return Task(
            id=task,
            group=kwargs["uid"],
            sample=sample,
            dynamics_seed=derive_seed(*parts),
            sampling_seed=derive_seed(self.settings["seed"], *parts) if seeded else None,
            content=kwargs["task_hash"],
            type=kwargs["task_type"],
            panel=kwargs.get("panel"),
        )

    def _record_failure(self, kwargs: dict[str, Any], episode: Episode, error: Exception) -> None:
        """One line in the run's failures.jsonl; verl itself only logs the traceback."""
        more = {"split": kwargs["split"], "uid": kwargs["uid"], "step": int(kwargs["global_steps"])}
        line = episode.failure(error) | more
        os.makedirs(self.settings["run"], exist_ok=True)
        path = os.path.join(self.settings["run"], "failures.jsonl")
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, (json.dumps(line) + "\n").encode())  # whole: other workers append too
        finally:
            os.close(file)
