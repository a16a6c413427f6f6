"""Continuations: what is played on from a state to see what it is worth, and who shares it.

A state is the exact tokens that were read (and, inside an utterance, already said), a snapshot of the
environment, and the budgets that are left. Its value is the mean return of what is played from there.
"""

import asyncio
import hashlib
import logging
import math
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from verl_multiturn.env import derive_seed
from verl_multiturn.rollout.episode import MOST_ERROR, Episode, Sample
from verl_multiturn.rollout.layouts import NextPrompt
from verl_multiturn.rollout.observed import restore
from verl_multiturn.rollout.pool import EnvironmentFailure, Observed
from verl_multiturn.rollout.prompts import PromptPolicy, View
from verl_multiturn.rollout.vine_config import Vine
from verl_multiturn.turns import Trajectory

Key = tuple[Any, ...]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How one continuation ended; `error` says what kept it from its end."""

    value: float = math.nan  # Σ_j γ^j r_{t+j}, penalties taken off
    turns: int = 0
    tokens: int = 0  # that the policy wrote
    read: int = 0  # tokens of its prompts, where the server says how many were cached
    cached: int = 0  # of those
    truncated: bool = False
    cut: bool = False  # by the horizon, where the environment's limits would have let it play on
    error: str = ""
    mismatch: bool = False  # the error: a replay showed something else than before


class ReplayMismatch(EnvironmentFailure):
    """A snapshot that is replayed shows something else than before."""


@dataclass
class Continuation(Episode):
    """A trajectory played on from a snapshot; `turns` begins with those that led there."""

    taken: Any = field(kw_only=True)  # the snapshot; freed once it is restored
    seed: int = field(kw_only=True)
    view: View = field(kw_only=True)
    seen: Observed = field(kw_only=True)
    prompt: NextPrompt = field(kw_only=True)
    said: list[int] = field(kw_only=True)  # the utterance so far
    shortened: bool = field(kw_only=True)  # its limit of turns is a horizon
    read: int = 0
    cached: int = 0

    @property
    def where(self) -> str:
        """See `Episode.where`."""
        return f"{super().where}, a rollout"

    async def _play(self, env: Any) -> Trajectory:
        call = f"{self.where}: restore to turn {len(self.turns)}"
        problem = await self.pool.call(env, call, restore, self.taken, self.seed)
        self.taken = None
        if problem is not None:
            raise ReplayMismatch(f"{call}: {problem}")
        seen, cut = await self._go_on(env, self.view, self.seen, self.prompt)
        return self._trajectory(seen, cut, self.view.instruction, 0.0)

    async def _speak(self, prompt_ids: list[int], spent: int = 0) -> tuple[str, Sample, float]:
        """The first utterance begins with what was said; only its rest is sampled."""
        said, self.said = self.said, []
        text, sample, seconds = await super()._speak([*prompt_ids, *said], len(said))
        if (cached := sample.extra.get("num_cached_tokens")) is not None:
            self.read, self.cached = self.read + len(prompt_ids) + len(said), self.cached + cached
        if said:
            sample = Sample([*said, *sample.ids], None, sample.extra)
            text = self.decode(sample.ids)
        return text, sample, seconds

    async def outcome(self, settings: Vine) -> Outcome:
        """Play, whatever becomes of it."""
        begun, written = len(self.turns), -len(self.said)
        try:
            trajectory = await self.play()
        except Exception as error:
            # As text: a traceback would keep the snapshot.
            text = f"{type(error).__name__}: {error}"[:MOST_ERROR]
            return Outcome(error=text, mismatch=isinstance(error, ReplayMismatch))
        turns = trajectory.turns[begun:]
        rewards = [turn.reward - (0.0 if turn.valid else settings.penalty) for turn in turns]
        value = sum(settings.gamma**j * r for j, r in enumerate(rewards))
        written += sum(len(turn.action_ids) for turn in turns)
        most = self.limits.max_turns or math.inf
        cut = self.shortened and trajectory.truncated and len(trajectory.turns) >= most
        cut = cut and trajectory.info["truncation"] == "turns" and self._actions_left() != 0
        return Outcome(value, len(turns), written, self.read, self.cached, trajectory.truncated, cut)


class Branching(Episode):
    """An episode from whose states others are played on."""

    def _key(self, view: View, seen: Observed, prompt: NextPrompt, said: list[int], dedupe: str) -> Key:
        """Equal where the value is: what the policy reads and has said, the state, and the budgets left.

        Turns and actions taken say how many are left; in trajectory rows the prompt says it of tokens,
        and of an utterance its length does.
        """
        policy, past = self.layout.policy, view.past
        if dedupe != "history" and type(policy) is PromptPolicy:
            past = past[max(0, len(past) - policy.templates.history) :]  # what a later prompt may show
        read = array("q", [*prompt.ids, *said])
        ids = hashlib.blake2b(read.tobytes(), digest_size=16).hexdigest()
        mine = self.task.sample if dedupe == "none" else None
        return ids, len(said), seen.key, len(self.turns), self.acted, tuple(past), mine

    def _maker(
        self,
        seed: int,
        taken: Any,
        view: View,
        seen: Observed,
        prompt: NextPrompt,
        said: list[int],
        horizon: int | None = None,
    ) -> Callable[[int], Continuation]:
        """What makes the k-th continuation from here; all have chances of their own."""
        shared = {one.name: getattr(self, one.name) for one in fields(Episode)}
        shortened = False
        if horizon is not None:
            most = self.limits.max_turns or seen.max_turns
            shortened = len(self.turns) + horizon < most
            shared["limits"] = replace(self.limits, max_turns=min(most, len(self.turns) + horizon))
        # A layout replaces its lists, it never changes them.
        shared |= {"layout": copy(self.layout), "turns": list(self.turns), "details": []}
        view = replace(view, past=list(view.past))

        def make(k: int) -> Continuation:
            mine = derive_seed(seed, k)
            sampling = None if self.task.sampling_seed is None else derive_seed("sampling", mine)
            own: dict[str, Any] = {
                "task": replace(self.task, sampling_seed=sampling),
                "layout": copy(shared["layout"]),
                "turns": list(shared["turns"]),
                "details": [],
                "view": replace(view, past=list(view.past)),
            }
            state = {"taken": taken, "seen": seen, "prompt": prompt, "said": said}
            return Continuation(**shared | own | state, seed=mine, shortened=shortened)

        return make


@dataclass
class Rollouts:
    """The continuations of one state, for every trajectory that comes through it."""

    make: Callable[[int], Continuation] | None  # the k-th; None, and the snapshot freed, once all are made
    count: int
    task: asyncio.Task[list[Outcome]] | None = None  # None: not begun
    used: list[Outcome] = field(default_factory=list)  # for the value, once all have ended
    holders: int = 0  # trajectories that wait for them
    counted: bool = False  # in the numbers of one of them
    outside: bool = False  # some of the first returns left [0, 1], where `adaptive` knows nothing of them

    def begin(self, vines: "Vines") -> asyncio.Task[list[Outcome]]:
        """Start them, unless that was done; what they come to is the task's result."""
        if self.task is None:
            self.task = asyncio.create_task(self._play(vines))
        return self.task

    async def _play(self, vines: "Vines") -> list[Outcome]:
        settings, first = vines.settings, list[Outcome]()
        if settings.adaptive is not None:
            first = self.used = await self._some(vines, range(settings.adaptive), last=False)
            self.outside = vines.leaves_the_interval(self.returns)
            if settings.sure(self.returns):
                self.make = None
                return first
        start = len(first)
        more = await self._some(vines, range(start, start + self.count), last=True)
        self.used = more if settings.split_samples else first + more
        return first + more

    async def _some(self, vines: "Vines", numbers: range, last: bool) -> list[Outcome]:
        assert self.make is not None
        made = [self.make(k) for k in numbers]
        if last:
            self.make = None

        async def one(continuation: Continuation) -> Outcome:
            # Before it takes an environment: trajectories themselves must never wait for continuations.
            async with vines.free:
                return await continuation.outcome(vines.settings)

        async with asyncio.TaskGroup() as together:
            tasks = [together.create_task(one(continuation)) for continuation in made]
        return [task.result() for task in tasks]

    @property
    def outcomes(self) -> list[Outcome]:
        """Of all, once all have ended."""
        return [] if self.task is None else self.task.result()

    @property
    def returns(self) -> list[float]:
        """Of those that count and were played to their end."""
        return [outcome.value for outcome in self.used if not outcome.error]

    @property
    def cut(self) -> float:
        """Share of those that the horizon ended."""
        counted = [outcome.cut for outcome in self.used if not outcome.error]
        return float(np.mean(counted)) if counted else 0.0

    @property
    def value(self) -> float:
        """V(s); nan, a hole, where none was played to its end."""
        return float(np.mean(self.returns)) if self.returns else math.nan


@dataclass
class Group:
    """The states that the trajectories of a prompt have come through."""

    sessions: int = 0
    playing: int = 0  # of those; the others wait for continuations
    all_played: asyncio.Event = field(default_factory=asyncio.Event)
    returns: list[float] = field(default_factory=list)  # of those played to their end
    states: dict[Key, Rollouts] = field(default_factory=dict)

    @contextmanager
    def play(self) -> Iterator[None]:
        """While a trajectory is being played."""
        self.playing += 1
        try:
            yield
        finally:
            self.playing -= 1
            if not self.playing:
                self.all_played.set()


class Vines:
    """What the trajectories of a rollout worker share: one limit for all, and a `Group` for each prompt."""

    def __init__(self, settings: Vine) -> None:
        self.settings = settings
        self.free = asyncio.Semaphore(settings.max_inflight)
        self.groups: dict[str, Group] = {}
        self.warned = False

    def leaves_the_interval(self, returns: list[float]) -> bool:
        """Whether a return is outside of [0, 1], which `Vine.adaptive` needs; said once."""
        strange = [value for value in returns if not 0 <= value <= 1]
        if strange and not self.warned:
            self.warned = True
            log.warning(
                "multiturn.vine.adaptive needs returns in [0, 1], and one is %g: such states get all %s + %s "
                "rollouts (multiturn/vine_outside/mean counts them); scale rewards, or leave adaptive out",
                strange[0],
                self.settings.adaptive,
                self.settings.rollouts,
            )
        return bool(strange)

    @contextmanager
    def group(self, uid: str) -> Iterator[Group]:
        """The group of a prompt; it is forgotten with the last of its trajectories, however that ends."""
        group = self.groups.setdefault(uid, Group())
        group.sessions += 1
        try:
            yield group
        finally:
            group.sessions -= 1
            if not group.sessions:
                del self.groups[uid]
