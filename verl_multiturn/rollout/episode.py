"""The multi-turn trajectory manager: one coroutine plays one episode, whatever generates the text.

It knows nothing of verl, so a scripted server tests it whole. Token-in, token-out: what was sampled is
what is trained, never text tokenized again.
"""

import asyncio
import hashlib
import importlib.util
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl_multiturn.env import derive_seed
from verl_multiturn.errors import unknown
from verl_multiturn.rollout.garbage import playing
from verl_multiturn.rollout.layouts import Limits, NextPrompt, TrajectoryRows, TurnRows
from verl_multiturn.rollout.parsing import ActionFormat, parse
from verl_multiturn.rollout.pool import EnvironmentFailure, EnvPool, Observed, reset, step
from verl_multiturn.rollout.prompts import View
from verl_multiturn.turns import Trajectory, Turn

ANCHORS = ("state", "observation", "observation+actions")


@dataclass(frozen=True)
class Sample:
    """One completion: the sampled ids, the stop token included, and their log-probabilities."""

    ids: list[int]
    log_probs: list[float] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Generate(Protocol):
    """Completes a prompt; `seed` None means the engine's own."""

    def __call__(self, prompt_ids: list[int], max_tokens: int, seed: int | None) -> Awaitable[Sample]:
        """Sample one utterance of at most `max_tokens` tokens."""
        ...


@dataclass(frozen=True)
class Task:
    """Which episode to play."""

    id: int | str
    group: str  # verl's uid
    sample: int  # which member of the group
    dynamics_seed: int
    sampling_seed: int | None = None  # None: not seeded
    content: str | None = None  # content hash the panel promises
    type: str = "default"
    panel: str | None = None  # its name in the run


MOST_ERROR, MOST_TRACEBACK, MOST_PROMPT = 1000, 4000, 2000  # characters in a line of failures.jsonl
SERVER, ENVIRONMENT = "LLM server", "environment"  # what an episode may wait for


def check_anchor(rule: str) -> None:
    """Refuse a rule that `anchor_of` could not follow.

    Raises:
        ValueError: neither one of `ANCHORS` nor an importable "pkg.module:function".
    """
    if rule not in ANCHORS and not callable(_anchor_function(rule)):
        raise unknown("multiturn.anchor", rule, ANCHORS, "One of your own: pkg.module:function.")


def _anchor_function(rule: str) -> Any:
    module, _, name = rule.partition(":")
    if not name or importlib.util.find_spec(module.partition(".")[0]) is None:
        return None
    return getattr(importlib.import_module(module), name, None)


def anchor_of(rule: str, seen: Observed) -> str:
    """The anchor of a turn: 128 bits of its state key, observation, or observation and actions.

    `rule` may also be "pkg.module:function", called with the `Observed`; equal keys, equal anchors.
    """
    if rule == "state":
        key: object = seen.key
    elif rule == "observation":
        key = seen.observation
    elif rule == "observation+actions":
        key = (seen.observation, tuple(seen.admissible or ()))
    else:
        key = _anchor_function(rule)(seen)
    return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()


@dataclass
class Episode:
    """Plays one episode and keeps what happened; `details` has one record per turn."""

    env_name: str
    env_kwargs: dict[str, Any]
    task: Task
    layout: TurnRows | TrajectoryRows
    form: ActionFormat
    limits: Limits
    pool: EnvPool
    generate: Generate
    decode: Callable[[list[int]], str]
    anchor: str = "state"
    turns: list[Turn] = field(default_factory=list)
    details: list[dict[str, Any]] = field(default_factory=list)
    acted: int = 0  # steps of the environment so far
    doing: str | None = None  # the action that the environment is taking
    shown: str = ""  # the prompt of the turn
    begun: float = field(default_factory=time.monotonic)
    waiting: tuple[str, float] = ("", 0.0)  # for what, and since when

    async def play(self) -> Trajectory:
        """Play to the end.

        Raises:
            EnvironmentFailure: the environment raised, hung, the LLM server did not answer in time, or the
                episode took too long.
        """
        self.begun = time.monotonic()
        try:
            env = await self.pool.acquire(self.env_name, self.env_kwargs)
        except EnvironmentFailure as error:
            raise EnvironmentFailure(f"{self.where}: {error}") from error.__cause__
        clock = asyncio.timeout(self.limits.episode_timeout)
        try:
            async with clock:
                with playing():
                    trajectory = await self._play(env)
        except BaseException as error:
            await self.pool.abandon(env)
            if isinstance(error, TimeoutError) and clock.expired():
                doing = f", in step({self.doing!r})" if self.doing is not None else ""
                doing = doing or (", waiting for the LLM server" if self.waiting[0] == SERVER else "")
                raise EnvironmentFailure(
                    f"{self.where}: the episode took longer than {self.limits.episode_timeout:g} s, "
                    f"{len(self.turns)} turns done{doing}"
                ) from None
            raise
        self.pool.release(env, self.env_name, self.env_kwargs)
        return trajectory

    @property
    def where(self) -> str:
        """How an error names this episode."""
        return f"{self.env_name}, task {self.task.id}"

    def failure(self, error: Exception) -> dict[str, Any]:
        """A line of failures.jsonl: what was played, how far, what was being done, what went wrong."""
        now = time.monotonic()
        return {
            "time": time.time(),
            "env": self.env_name,
            "task": self.task.id,
            "trajectory": self.task.sample,
            "turn": len(self.turns),
            "action": self.doing,
            "prompt": self.shown[-MOST_PROMPT:],
            "seconds": now - self.begun,
            "waiting": self.waiting[0] or None,
            "waiting_seconds": now - self.waiting[1] if self.waiting[0] else None,
            # A dead server repeats its own story in every message: 300 kB a trajectory have been seen.
            "error": str(error)[:MOST_ERROR],
            "traceback": "".join(traceback.format_exception(error))[-MOST_TRACEBACK:],
        }

    async def _play(self, env: Any) -> Trajectory:
        begun, where = time.perf_counter(), self.where
        self.waiting = ENVIRONMENT, time.monotonic()
        call = self.pool.call(env, f"{where}: reset", reset, self.task.id, self.task.dynamics_seed)
        seen = await call
        self.waiting = "", 0.0
        if self.task.content is not None and seen.content != self.task.content:
            raise EnvironmentFailure(
                f"{where} is not the task of the panel: its content hash is {seen.content}, "
                f"the panel says {self.task.content}"
            )
        view = View(seen.instruction, seen.observation)
        seen, cut = await self._go_on(env, view, seen)
        return self._trajectory(seen, cut, view.instruction, time.perf_counter() - begun)

    async def _go_on(
        self, env: Any, view: View, seen: Observed, prompt: NextPrompt | None = None
    ) -> tuple[Observed, str | None]:
        """Play from here to the end; `prompt` is the next one if it was built already. -> (last, cut by)."""
        max_turns = self.limits.max_turns or seen.max_turns
        while not (seen.terminated or seen.truncated):
            view.observation, view.admissible = seen.observation, seen.admissible
            prompt = prompt or await asyncio.to_thread(self.layout.prompt, view)
            if prompt is None:
                return seen, "tokens"
            self.shown = prompt.text
            await self.before_turn(env, view, seen, prompt)
            seen, prompt = await self._turn(env, view, seen, prompt), None
            if len(self.turns) >= max_turns or self._actions_left() == 0:
                return seen, "turns"
        return seen, None

    async def before_turn(self, env: Any, view: View, seen: Observed, prompt: NextPrompt) -> None:
        """For subclasses: called before each turn, with what the policy is about to read."""

    async def after_speaking(
        self, env: Any, view: View, seen: Observed, prompt: NextPrompt, ids: list[int], text: str
    ) -> None:
        """For subclasses: called with each utterance, before the environment acts on it."""

    async def _turn(self, env: Any, view: View, before: Observed, prompt: NextPrompt) -> Observed:
        text, sample, generate_seconds = await self._speak(prompt.ids)
        await self.after_speaking(env, view, before, prompt, sample.ids, text)
        parsed = parse(text, self.form)
        # Without a valid action the environment is told so: it decides what an idle turn costs.
        actions = (parsed.actions or ("",))[: self._actions_left()]
        started, reward, valid, seen = time.perf_counter(), 0.0, parsed.valid, before
        for action in actions:
            self.doing, self.waiting = action, (ENVIRONMENT, time.monotonic())
            call = f"{self.where}: step({action!r}) at turn {len(self.turns)}"
            seen = await self.pool.call(env, call, step, action)
            self.doing, self.waiting = None, ("", 0.0)
            self.acted += 1
            reward, valid = reward + seen.reward, valid and bool(seen.info.get("valid", True))
            if seen.terminated or seen.truncated:
                break
        anchor = anchor_of(self.anchor, before)
        self.turns.append(
            Turn(
                prompt.new,
                sample.ids,
                sample.log_probs,
                anchor,
                reward,
                action_text=text,
                valid=valid,
            )
        )
        self.details.append(
            {
                "observation": before.observation,
                "prompt": prompt.text,
                "actions": list(actions) if parsed.valid else [],
                "thinks": parsed.thinks,
                "dropped_turns": prompt.dropped_turns,
                "dropped_actions": prompt.dropped_actions,
                "generate_seconds": generate_seconds,
                "env_seconds": time.perf_counter() - started,
                "extra": sample.extra,
            }
        )
        self.layout.heard(sample.ids, text)
        view.past.append((before.observation, f" {self.form.separator} ".join(actions)))
        return seen

    def _actions_left(self) -> int | None:
        return None if self.limits.max_actions is None else self.limits.max_actions - self.acted

    async def _speak(self, prompt_ids: list[int], spent: int = 0) -> tuple[str, Sample, float]:
        """Sample an utterance of which `spent` tokens are said already."""
        seed = self.task.sampling_seed
        seed = None if seed is None else derive_seed(seed, len(self.turns)) % 2**31
        started, longest = time.perf_counter(), self.limits.generate_timeout
        self.waiting = SERVER, time.monotonic()
        clock = asyncio.timeout(longest)
        try:
            async with clock:
                sample = await self.generate(prompt_ids, self.limits.max_action_tokens - spent, seed)
        except TimeoutError:
            if not clock.expired():
                raise
            raise EnvironmentFailure(
                f"{self.where}: the LLM server took longer than {longest:g} s for turn {len(self.turns)} "
                "(multiturn.generate_timeout)"
            ) from None
        self.waiting = "", 0.0
        return self.decode(sample.ids), sample, time.perf_counter() - started

    def _trajectory(self, seen: Observed, cut: str | None, instruction: str, seconds: float) -> Trajectory:
        truncation = None if seen.terminated else "environment" if seen.truncated else cut
        return Trajectory(
            group=self.task.group,
            trajectory=self.task.sample,
            turns=self.turns,
            terminated=seen.terminated,
            truncated=not seen.terminated,
            success=bool(seen.info.get("success", False)),
            info={
                "env": self.env_name,
                "task": str(self.task.id),
                "seed": self.task.id,
                "task_type": self.task.type,
                "panel": self.task.panel,
                "dynamics_seed": self.task.dynamics_seed,
                "sampling_seed": self.task.sampling_seed,
                "instruction": instruction,
                "truncation": truncation,
                "final_observation": None if seen.terminated else seen.observation,
                "seconds": seconds,
                "details": self.details,
            },
        )
