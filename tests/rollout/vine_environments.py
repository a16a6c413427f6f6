"""Environments for the tests of rollouts: with chance, a hidden past, snapshots that are watched."""

import time
import weakref

from odd_environments import Odd, Steady

from verl_multiturn.env import ReplayEnv


class Forgetful(Steady):
    """Shows and compares how much it was told, not what; "count" pays for what it was told first."""

    def _reset(self, seed):
        super()._reset(seed)
        return "told 0", {}

    def _step(self, action):
        _, reward, terminated, info = super()._step(action)
        if action == "count":
            reward += float(self.told[0])
        return f"told {len(self.told)}", reward, terminated, info


class Secretive(Forgetful):
    """Shows as little, but compares what it was told."""

    def state_key(self):
        return tuple(self.told)


class Still(Forgetful):
    """Looks always the same."""

    max_turns = 20

    def _step(self, action):
        _, reward, terminated, info = super()._step(action)
        return "told 0", reward, terminated, info


class Chancy(Steady):
    """Each turn pays what its noise draws."""

    def _step(self, action):
        observation, _, terminated, info = super()._step(action)
        return observation, self.noise.random(), terminated, info


class Watched(Steady):
    """Snapshots that can be seen to be freed."""

    alive = weakref.WeakSet()

    def snapshot(self):
        taken = Taken()
        taken.state = super().snapshot()
        self.alive.add(taken)
        return taken

    def restore(self, s, seed=None):
        super().restore(s.state, seed)


class Lines(Steady):
    """Each turn pays how many of its lines are "1"; its noise decides whether 10 more; nothing ends it."""

    max_turns = 2

    def _step(self, action):
        _, _, terminated, info = super()._step(action)
        reward = float(sum(line.strip() == "1" for line in action.splitlines()))
        return f"told {len(self.told)}", reward + 10 * (self.noise.random() < 0.5), terminated, info


class AllLines(Steady):
    """One turn, which pays 1 where all of its lines are "1"."""

    max_turns = 1

    def _step(self, action):
        super()._step(action)
        return "over", float(set(action.split("\n")) == {"1"}), True, {}


class Taken:
    """What `Watched` takes."""


class BadSnapshot(Odd):
    """Cannot be snapshotted."""

    def snapshot(self):
        raise ValueError("no picture, please")


class NoSnapshots(Odd):
    """Says that it cannot."""

    snapshots = "none"


class Wandering(ReplayEnv):
    """Shows another observation each time it is acted in."""

    instruction = "do as told"
    max_turns = 3

    def _reset(self, seed):
        return "begun", {}

    def _step(self, action):
        return f"it is {time.perf_counter_ns()}", 1.0, False, {}
