"""VinePPO's rollouts inside the agent loop: the value of a state is the mean return of continuations from it.

Before a turn of a training trajectory the environment is snapshotted, and K continuations start at once,
beside the trajectory itself (Kazemnejad et al. 2024, arXiv:2410.01679; a step of the paper is a turn
here). Each plays on from the very tokens that the policy is about to read, under the budgets that are
left, with chances of its own; only its return is kept. Equal states of a prompt's group share them.
"""

import asyncio
import hashlib
import logging
import math
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np

from verl_multiturn.env import derive_seed
from verl_multiturn.errors import unknown
from verl_multiturn.rollout.episode import MOST_ERROR, Episode
from verl_multiturn.rollout.layouts import NextPrompt
from verl_multiturn.rollout.observed import restore, snapshot
from verl_multiturn.rollout.pool import EnvironmentFailure, Observed
from verl_multiturn.rollout.prompts import PromptPolicy, View
from verl_multiturn.turns import Trajectory

ROOTS = ("siblings", "rollouts", "both")
DEDUPE = ("state", "history", "none")
Key = tuple[Any, ...]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Vine:
    """The block `multiturn.vine`, and what continuations need of the rest of a run.

    Attributes:
        rollouts: K, continuations of a state.
        root: V(s_0) from the other trajectories of the group ("siblings", no continuations), from
            "rollouts", or from "both": siblings, and as many continuations as they lack to K.
        max_states: M: the turns behind s_M get none and share the credit of the last known one; None:
            all do.
        every: every so many turns a state gets some; the turns between two share their credit.
        dedupe: states are equal whose prompt, budgets and state key are ("state"), whose history of
            observations and actions is, too ("history"), or never ("none").
        max_inflight: continuations that a rollout worker plays at the same time.
        gamma: γ, from turn to turn.
        penalty: what a turn without a valid action costs in training.
        group: n, trajectories of a prompt.
    """

    rollouts: int = 9
    root: str = "siblings"
    max_states: int | None = None
    every: int = 1
    dedupe: str = "state"
    max_inflight: int = 256
    gamma: float = 1.0
    penalty: float = 0.0
    group: int = 8

    def __post_init__(self) -> None:
        if self.root not in ROOTS:
            raise unknown("value of multiturn.vine.root", self.root, ROOTS)
        if self.dedupe not in DEDUPE:
            raise unknown("value of multiturn.vine.dedupe", self.dedupe, DEDUPE)
        if self.rollouts == 0 and self.root == "rollouts":
            raise ValueError(
                "multiturn.vine.rollouts=0 leaves multiturn.vine.root=rollouts without a value: use 1 or "
                "more (the paper: 9), or root=siblings"
            )
        if self.rollouts == 0 and self.max_states is not None:
            raise ValueError(
                f"multiturn.vine.max_states={self.max_states} caps the states with rollouts, and "
                "multiturn.vine.rollouts=0 gives none: leave it out"
            )
        if self.max_states is not None and self.max_states < self.every and not self.at(0):
            raise ValueError(
                f"multiturn.vine.max_states={self.max_states}, every={self.every} and root={self.root} leave "
                "no state with rollouts: set multiturn.vine.rollouts=0, or root=rollouts"
            )
        if self.group == 1 and not self.at(0):
            raise ValueError(
                f"multiturn.vine.root={self.root} takes the value of a start from the others of its group, "
                "and actor_rollout_ref.rollout.n=1 leaves none: use root=rollouts, or n=2 or more"
            )

    @classmethod
    def of(cls, settings: Mapping[str, Any], group: int) -> Self:
        """Of a run: its group `multiturn`, and its `rollout.n`."""
        more = {"gamma": settings["vineppo"]["gamma"], "penalty": settings["format_penalty"]}
        return cls(**settings["vine"], **more, group=group)

    def at(self, t: int) -> int:
        """How many continuations the state before turn t gets."""
        if t > 0:
            capped = self.max_states is not None and t > self.max_states
            return 0 if capped or t % self.every else self.rollouts
        return {"siblings": 0, "rollouts": self.rollouts, "both": max(0, self.rollouts - self.group + 1)}[
            self.root
        ]

    @property
    def pooled(self) -> int | None:
        """How many continuations V(s_0) averages together with the siblings; None: it stands alone."""
        return self.at(0) if self.root == "both" else None


@dataclass(frozen=True)
class Outcome:
    """How one continuation ended; `error` says what kept it from its end."""

    value: float = math.nan  # Σ_j γ^j r_{t+j}, penalties taken off
    turns: int = 0
    tokens: int = 0  # that the policy wrote
    truncated: bool = False
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


@dataclass
class Rollouts:
    """The continuations of one state, for every trajectory that comes through it."""

    tasks: list[asyncio.Task[Outcome]]
    holders: int = 0  # trajectories that wait for them
    counted: bool = False  # in the numbers of one of them

    @property
    def outcomes(self) -> list[Outcome]:
        """Of all, once all have ended."""
        return [task.result() for task in self.tasks]

    @property
    def returns(self) -> list[float]:
        """Of those that were played to their end."""
        return [outcome.value for outcome in self.outcomes if not outcome.error]

    @property
    def value(self) -> float:
        """V(s); nan, a hole, where none was played to its end."""
        return float(np.mean(self.returns)) if self.returns else math.nan


@dataclass
class Group:
    """The states that the trajectories of a prompt have come through."""

    sessions: int = 0
    states: dict[Key, Rollouts] = field(default_factory=dict)


class Vines:
    """What the trajectories of a rollout worker share: one limit for all, and a `Group` for each prompt."""

    def __init__(self, settings: Vine) -> None:
        self.settings = settings
        self.free = asyncio.Semaphore(settings.max_inflight)
        self.groups: dict[str, Group] = {}

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


@dataclass
class VineEpisode(Episode):
    """An episode of training whose turns get values; `info["vine"]` of its trajectory counts what it took."""

    vines: Vines = field(kw_only=True)
    seed: int = field(kw_only=True)  # of this prompt in this step of this run
    group: Group = field(init=False)
    held: dict[int, Key] = field(default_factory=dict)  # turn -> its state

    async def play(self) -> Trajectory:
        """See `Episode.play`; ends when the continuations of all its states have ended."""
        with self.vines.group(self.task.group) as self.group:
            try:
                trajectory = await super().play()
                ended = time.perf_counter()
                # Not gather: to cancel this trajectory must not cancel what others wait for.
                if tasks := [task for key in self.held.values() for task in self.group.states[key].tasks]:
                    await asyncio.wait(tasks)
            except BaseException:
                await self._let_go()
                raise
            trajectory.info["vine"] = self._count() | {"tail_seconds": time.perf_counter() - ended}
            for t, key in self.held.items():
                trajectory.turns[t] = replace(trajectory.turns[t], value=self.group.states[key].value)
        return trajectory

    async def before_turn(self, env: Any, view: View, seen: Observed, prompt: NextPrompt) -> None:
        """Start the continuations of this state, unless a trajectory of the group has."""
        t, states = len(self.turns), self.group.states
        count = self.vines.settings.at(t)
        if not count:
            return
        key = self._key(view, seen, prompt)
        if key not in states:
            taken = await self.pool.call(env, f"{self.where}: snapshot at turn {t}", snapshot)
            if key not in states:  # nobody was quicker meanwhile
                seed = derive_seed(self.seed, repr(key))
                seeds = [derive_seed(seed, k) for k in range(count)]
                found = [self._continuation(one, taken, view, seen, prompt) for one in seeds]
                states[key] = Rollouts([asyncio.create_task(self._outcome(one, t)) for one in found])
        states[key].holders += 1
        self.held[t] = key

    def _key(self, view: View, seen: Observed, prompt: NextPrompt) -> Key:
        """Equal where the value is: what the policy reads, the state, and the budgets that are left.

        Turns and actions taken say how many are left; in trajectory rows the prompt says it of tokens.
        """
        settings, policy = self.vines.settings, self.layout.policy
        past = view.past
        if settings.dedupe != "history" and type(policy) is PromptPolicy:
            past = past[max(0, len(past) - policy.templates.history) :]  # what a later prompt may show
        ids = hashlib.blake2b(array("q", prompt.ids).tobytes(), digest_size=16).hexdigest()
        mine = self.task.sample if settings.dedupe == "none" else None
        return ids, seen.key, len(self.turns), self.acted, tuple(past), mine

    def _continuation(
        self, seed: int, taken: Any, view: View, seen: Observed, prompt: NextPrompt
    ) -> Continuation:
        shared = {one.name: getattr(self, one.name) for one in fields(Episode)}
        sampling = None if self.task.sampling_seed is None else derive_seed("sampling", seed)
        shared |= {
            "task": replace(self.task, sampling_seed=sampling),
            "layout": copy(self.layout),  # a layout replaces its lists, it never changes them
            "turns": list(self.turns),
            "details": [],
        }
        view = replace(view, past=list(view.past))
        return Continuation(**shared, taken=taken, seed=seed, view=view, seen=seen, prompt=prompt)

    async def _outcome(self, episode: Continuation, t: int) -> Outcome:
        # Before it takes an environment: trajectories themselves must never wait for continuations.
        async with self.vines.free:
            try:
                trajectory = await episode.play()
            except Exception as error:
                # As text: a traceback would keep the snapshot.
                text = f"{type(error).__name__}: {error}"[:MOST_ERROR]
                return Outcome(error=text, mismatch=isinstance(error, ReplayMismatch))
        turns, settings = trajectory.turns[t:], self.vines.settings
        rewards = [turn.reward - (0.0 if turn.valid else settings.penalty) for turn in turns]
        value = sum(settings.gamma**j * r for j, r in enumerate(rewards))
        tokens = sum(len(turn.action_ids) for turn in turns)
        return Outcome(value, len(turns), tokens, trajectory.truncated)

    async def _let_go(self) -> None:
        """End the continuations that nobody else waits for; their environments are given up."""
        alone = list[asyncio.Task[Outcome]]()
        for key in self.held.values():
            rollouts = self.group.states[key]
            rollouts.holders -= 1
            if not rollouts.holders and not all(task.done() for task in rollouts.tasks):
                del self.group.states[key]
                alone += rollouts.tasks
        for task in alone:
            task.cancel()
        if alone:
            await asyncio.wait(alone)

    def _count(self) -> dict[str, Any]:
        """What this trajectory's states took; continuations that it shares count once in the group."""
        states = [self.group.states[key] for key in self.held.values()]
        mine = [rollouts for rollouts in states if not rollouts.counted]
        for rollouts in mine:
            rollouts.counted = True
        outcomes = [outcome for rollouts in mine for outcome in rollouts.outcomes]
        errors = [outcome.error for outcome in outcomes if outcome.error]
        spreads = [float(np.std(rollouts.returns)) for rollouts in mine if rollouts.returns]
        if errors:
            log.warning("%s: %d of %d rollouts failed: %s", self.where, len(errors), len(outcomes), errors[0])
        return {
            "states": len(states),
            "holes": sum(math.isnan(rollouts.value) for rollouts in states),
            "unique_states": len(mine),
            "rollouts": len(outcomes),
            "failed": len(errors),
            "mismatches": sum(outcome.mismatch for outcome in outcomes),
            "turns": sum(outcome.turns for outcome in outcomes),
            "tokens": sum(outcome.tokens for outcome in outcomes),
            "truncated": sum(outcome.truncated for outcome in outcomes),
            "return_std": float(np.mean(spreads)) if spreads else 0.0,
            "error": errors[0] if errors else None,
        }
