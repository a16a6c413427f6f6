"""VinePPO's rollouts inside the agent loop: the value of a state is the mean return of continuations from it.

Before a turn of a training trajectory the environment is snapshotted, and K continuations start at once,
beside the trajectory itself (Kazemnejad et al. 2024, arXiv:2410.01679). Each plays on from the very tokens
that the policy is about to read, under the budgets that are left, with chances of its own; only its return
is kept. Where utterances are cut into steps, too (`multiturn.vine.splitter`), the continuations of the
states inside one start when it is complete, before the environment acts on it. Equal states of a prompt's
group share them.
"""

import asyncio
import logging
import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl_multiturn.env import derive_seed
from verl_multiturn.rollout.continuations import Branching, Group, Key, Rollouts, Vines
from verl_multiturn.rollout.layouts import NextPrompt
from verl_multiturn.rollout.observed import snapshot
from verl_multiturn.rollout.pool import Observed
from verl_multiturn.rollout.prompts import View
from verl_multiturn.steps import token_cuts
from verl_multiturn.turns import Trajectory

SAME = 1e-9  # returns that differ by less are equal
Place = tuple[int, int]  # a state: before a turn, after so many tokens of its utterance

log = logging.getLogger(__name__)


@dataclass
class VineEpisode(Branching):
    """An episode of training whose steps get values; `info["vine"]` of its trajectory counts what it took."""

    vines: Vines = field(kw_only=True)
    seed: int = field(kw_only=True)  # of this prompt in this step of this run
    group: Group = field(init=False)
    held: dict[Place, Key] = field(default_factory=dict)
    cuts: list[list[int]] = field(default_factory=list)  # per turn, where its steps begin
    skipped: int = 0  # states left without continuations

    async def play(self) -> Trajectory:
        """See `Episode.play`; ends when the continuations of all its states have ended."""
        with self.vines.group(self.task.group) as self.group:
            try:
                with self.group.play():
                    trajectory = await super().play()
                    self.group.returns.append(sum(self._paid(trajectory)))
                await self._choose(trajectory)
                ended = time.time()
                # Not gather: to cancel this trajectory must not cancel what others wait for.
                if tasks := [self.group.states[key].begin(self.vines) for key in self.held.values()]:
                    await asyncio.wait(tasks)
            except BaseException:
                await self._let_go()
                raise
            counts = self._count(trajectory) | {"ended": ended, "tail_seconds": time.time() - ended}
            trajectory.info["vine"] = counts
            self._set_values(trajectory)
        return trajectory

    def _set_values(self, trajectory: Trajectory) -> None:
        def value(t: int, start: int) -> float:
            key = self.held.get((t, start))
            return math.nan if key is None else self.group.states[key].value

        for t, turn in enumerate(trajectory.turns):
            trajectory.turns[t] = replace(turn, value=value(t, 0))
            if self.vines.settings.horizon_value == "group":
                key = self.held.get((t, 0))
                self.details[t]["cut"] = 0.0 if key is None else self.group.states[key].cut
            if self.vines.settings.within:
                ends = [*self.cuts[t][1:], len(turn.action_ids)]
                self.details[t]["steps"] = [
                    {"span": [start, end], "value": value(t, start)}
                    for start, end in zip(self.cuts[t], ends, strict=True)
                ]

    def _paid(self, trajectory: Trajectory) -> list[float]:
        lost = self.vines.settings.penalty
        return [turn.reward - (0.0 if turn.valid else lost) for turn in trajectory.turns]

    async def _choose(self, trajectory: Trajectory) -> None:
        """Leave out the states that `Vine.select` and `Vine.agreeing_groups` save."""
        settings, kept = self.vines.settings, set(self.held)
        if settings.agreeing_groups == "skip":
            await self.group.all_played.wait()
            returns = self.group.returns
            if len(returns) > 1 and max(returns) - min(returns) < SAME:
                kept = set()
        if settings.select == "bisect" and kept:
            kept = await self._bisect(trajectory)
        for place in set(self.held) - kept:
            rollouts = self.group.states[key := self.held.pop(place)]
            rollouts.holders -= 1
            self.skipped += 1
            if not rollouts.holders and rollouts.task is None:
                del self.group.states[key]

    async def _bisect(self, trajectory: Trajectory) -> set[Place]:
        """The ends, and what lies in the middle of two that do not agree, again and again."""
        places, kept = sorted(self.held), set[Place]()

        async def ask(i: int) -> None:
            kept.add(places[i])
            await asyncio.wait([self.group.states[self.held[places[i]]].begin(self.vines)])

        async def between(low: int, high: int) -> None:
            if high - low > 1 and not self._agree(trajectory, places[low], places[high]):
                middle = (low + high) // 2
                await ask(middle)
                await asyncio.gather(between(low, middle), between(middle, high))

        await asyncio.gather(ask(0), ask(len(places) - 1))
        await between(0, len(places) - 1)
        return kept

    def _agree(self, trajectory: Trajectory, a: Place, b: Place) -> bool:
        """Whether the returns of each are all equal, and those of a are those of b after what was paid."""
        first, second = (self.group.states[self.held[place]].returns for place in (a, b))
        if not first or not second or np.ptp(first) > SAME or np.ptp(second) > SAME:
            return False
        gamma = self.vines.settings.gamma
        paid = sum(gamma**j * r for j, r in enumerate(self._paid(trajectory)[a[0] : b[0]]))
        return abs(paid + gamma ** (b[0] - a[0]) * second[0] - first[0]) <= SAME

    async def before_turn(self, env: Any, view: View, seen: Observed, prompt: NextPrompt) -> None:
        """Start the continuations of this state, unless a trajectory of the group has."""
        await self._start(env, view, seen, prompt, {sum(map(len, self.cuts)): []})

    async def after_speaking(
        self, env: Any, view: View, seen: Observed, prompt: NextPrompt, ids: list[int], text: str
    ) -> None:
        """Start those of the states inside the utterance; the environment has not heard it yet."""
        settings, cuts = self.vines.settings, list[int]()
        if settings.within:
            rule = settings.splitter, settings.fixed_tokens
            cuts = await asyncio.to_thread(token_cuts, ids, text, self.decode, *rule)
        second = sum(map(len, self.cuts)) + 1
        await self._start(env, view, seen, prompt, {second + i: ids[:cut] for i, cut in enumerate(cuts)})
        self.cuts.append([0, *cuts])

    async def _start(
        self, env: Any, view: View, seen: Observed, prompt: NextPrompt, said: dict[int, list[int]]
    ) -> None:
        """Of the states before these steps of the coming turn, each with what of it is said by then."""
        t, states, taken = len(self.turns), self.group.states, None
        for step, begun in said.items():
            count = self.vines.settings.at(step)
            if not count:
                continue
            key = self._key(view, seen, prompt, begun, self.vines.settings.dedupe)
            if key not in states:
                if taken is None:
                    taken = await self.pool.call(env, f"{self.where}: snapshot at turn {t}", snapshot)
                if key not in states:  # nobody was quicker meanwhile
                    given = taken, view, seen, prompt, begun, self.vines.settings.horizon
                    states[key] = Rollouts(self._maker(derive_seed(self.seed, repr(key)), *given), count)
                    if not self.vines.settings.later:
                        states[key].begin(self.vines)
            states[key].holders += 1
            self.held[t, len(begun)] = key

    async def _let_go(self) -> None:
        """End the continuations that nobody else waits for; their environments are given up."""
        alone = list[asyncio.Task[Any]]()
        for key in self.held.values():
            rollouts = self.group.states[key]
            rollouts.holders -= 1
            if not rollouts.holders and (rollouts.task is None or not rollouts.task.done()):
                del self.group.states[key]
                alone += [] if rollouts.task is None else [rollouts.task]
        for task in alone:
            task.cancel()
        if alone:
            await asyncio.wait(alone)

    def _count(self, trajectory: Trajectory) -> dict[str, Any]:
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
        lengths = [len(turn.action_ids) for turn in trajectory.turns]
        left = [sum(lengths[t:]) - start for t, starts in enumerate(self.cuts) for start in starts]
        return {
            "states": len(states),
            "holes": sum(math.isnan(rollouts.value) for rollouts in states),
            "unique_states": len(mine),
            "skipped_states": self.skipped,
            "outside": sum(rollouts.outside for rollouts in mine),
            "rollouts": len(outcomes),
            "failed": len(errors),
            "mismatches": sum(outcome.mismatch for outcome in outcomes),
            "turns": sum(outcome.turns for outcome in outcomes),
            "tokens": sum(outcome.tokens for outcome in outcomes),
            # K continuations of every state, each as long as this trajectory was from there on.
            "naive_tokens": self.vines.settings.rollouts * sum(left),
            "read": sum(outcome.read for outcome in outcomes),
            "cached": sum(outcome.cached for outcome in outcomes),
            "truncated": sum(outcome.truncated for outcome in outcomes),
            "return_std": float(np.mean(spreads)) if spreads else 0.0,
            "error": errors[0] if errors else None,
            "returns": {
                str(t): self.group.states[key].returns for (t, begun), key in self.held.items() if not begun
            },
        }
