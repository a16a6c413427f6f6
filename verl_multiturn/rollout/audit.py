"""The audit of values inside the agent loop: what some states of a training step are really worth.

As the paper measures the accuracy of values (Kazemnejad et al. 2024, arXiv:2410.01679): from a state many
fresh continuations are played, as VinePPO plays its own, and the mean of their returns is what a value of
this state is compared with, whoever gave it. The snapshots are taken while a trajectory is played; which
of its states are audited is drawn once it has ended. Nothing of it is trained on.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from verl_multiturn.env import derive_seed
from verl_multiturn.rollout.audit_config import Audit
from verl_multiturn.rollout.continuations import Branching, Continuation, Key, Outcome, Rollouts, Vines
from verl_multiturn.rollout.layouts import NextPrompt
from verl_multiturn.rollout.observed import snapshot
from verl_multiturn.rollout.pool import Observed
from verl_multiturn.rollout.prompts import View
from verl_multiturn.rollout.vine import VineEpisode
from verl_multiturn.rollout.vine_config import Vine
from verl_multiturn.turns import Trajectory

log = logging.getLogger(__name__)


class Audits(Vines):
    """What the audited trajectories of a rollout worker share; a group's states are each audited once."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit
        super().__init__(
            Vine(
                rollouts=audit.rollouts,
                root="rollouts",
                max_inflight=audit.max_inflight,
                gamma=1.0 if audit.whole else audit.gamma,
                penalty=audit.penalty,
                group=audit.group,
            )
        )

    def worth(self, outcome: Outcome, paid: float) -> float:
        """What a value of the state should have said of this continuation; `paid` is what came before it."""
        if not self.audit.whole:
            return self.audit.scale * outcome.value
        return self.audit.scale * self.audit.gamma ** (outcome.turns - 1) * (paid + outcome.value)


@dataclass
class AuditedEpisode(Branching):
    """An episode of training; `info["audit"]` of its trajectory holds what some of its states are worth."""

    audits: Audits = field(kw_only=True)
    audited: int = field(kw_only=True)  # so many states, if it has as many
    audit_seed: int = field(kw_only=True)  # of this prompt in this step of this run
    left: dict[int, tuple[Key, Callable[[int], Continuation]]] = field(default_factory=dict)  # by turn

    async def play(self) -> Trajectory:
        """See `Episode.play`; ends when the continuations of its audited states have ended."""
        with self.audits.group(self.task.group) as group:
            trajectory = await super().play()
            started = time.time()
            left, self.left = self.left, {}
            fresh = [t for t in self._valued(trajectory) if left[t][0] not in group.states]
            random = Random(derive_seed("states", self.audit_seed, self.task.sample))
            chosen = {}
            for t in sorted(random.sample(fresh, min(self.audited, len(fresh)))):
                key, make = left[t]
                chosen[t] = group.states[key] = Rollouts(make, self.audits.settings.rollouts)
            del left
            await self._wait([rollouts.begin(self.audits) for rollouts in chosen.values()])
            trajectory.info["audit"] = self._found(trajectory, chosen) | {"seconds": time.time() - started}
        return trajectory

    def _valued(self, trajectory: Trajectory) -> list[int]:
        """The turns whose states will have a value: a critic gives one to all."""
        return list(range(len(trajectory.turns)))

    async def before_turn(self, env: Any, view: View, seen: Observed, prompt: NextPrompt) -> None:
        """Keep what it takes to play on from here."""
        await super().before_turn(env, view, seen, prompt)
        t = len(self.turns)
        key = self._key(view, seen, prompt, [], "state")
        taken = await self.pool.call(env, f"{self.where}: snapshot at turn {t}", snapshot)
        seed = derive_seed(self.audit_seed, repr(key))
        self.left[t] = key, self._maker(seed, taken, view, seen, prompt, [])

    async def _wait(self, tasks: list[asyncio.Task[list[Outcome]]]) -> None:
        """Nobody else waits for them: they end with this trajectory."""
        if not tasks:
            return
        try:
            await asyncio.wait(tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise

    def _found(self, trajectory: Trajectory, chosen: dict[int, Rollouts]) -> dict[str, Any]:
        outcomes = [outcome for rollouts in chosen.values() for outcome in rollouts.outcomes]
        errors = [outcome.error for outcome in outcomes if outcome.error]
        if errors:
            log.warning("%s: %d of %d audited rollouts failed: %s", self.where, len(errors), len(outcomes),
                        errors[0])  # fmt: skip
        lost, paid = self.audits.settings.penalty, [0.0]
        for turn in trajectory.turns:
            paid.append(paid[-1] + turn.reward - (0.0 if turn.valid else lost))
        return {
            "returns": {
                str(t): [self.audits.worth(one, paid[t]) for one in rollouts.outcomes if not one.error]
                for t, rollouts in chosen.items()
            },
            "rollouts": len(outcomes),
            "failed": len(errors),
            "tokens": sum(outcome.tokens for outcome in outcomes),
            "error": errors[0] if errors else None,
        }


@dataclass
class AuditedVineEpisode(AuditedEpisode, VineEpisode):
    """The same for VinePPO, whose own continuations give the values."""

    def _valued(self, trajectory: Trajectory) -> list[int]:
        """That of the first state may come from the others of the group."""
        return [t for t, turn in enumerate(trajectory.turns) if t == 0 or not math.isnan(turn.value)]
