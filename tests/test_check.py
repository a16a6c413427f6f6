"""`check_env` catches each way to break the contract, and names it."""

import random
import re

import numpy as np
import pytest

from verl_multiturn.check import check_env
from verl_multiturn.env import Env


class Sound(Env):
    """Counts to three; the broken ones below each break one thing."""

    instruction, max_turns = "Count. Actions: go, stay.", 6

    def _reset(self, seed):
        self.count, self.goal = 0, 3 + self.rng.randint(0, 1)
        return f"0 of {self.goal}", {"task_type": "count"}

    def _step(self, action):
        if action not in self.admissible():
            return self._observation, 0.0, False, {"valid": False}
        self.count += action == "go"
        done = self.count == self.goal
        return f"{self.count} of {self.goal}", float(done), done, {"success": done}

    def admissible(self):
        return ["go", "stay"]

    def expert(self):
        return "go"


def broken(**methods):
    cls = globals()["Broken"] = type("Broken", (Sound,), methods)  # global, so that it pickles
    return cls


def raising(self, action):
    if action not in self.admissible():
        raise KeyError(action)
    return Sound._step(self, action)


def with_result(i, value):
    def step(self, action):
        result = list(Sound.step(self, action))
        result[i] = value
        return tuple(result)

    return step


def endless(self, action):
    self._phase = "running"
    self.turn = 0
    text, reward, _, _, info = Sound.step(self, action)
    return text, reward, False, False, info


def never_over(self, action):
    self._phase = "running"
    return Sound.step(self, action)


def both(self, action):
    text, reward, terminated, truncated, info = Sound.step(self, action)
    return text, reward, terminated, terminated or truncated, info


def from_global_chance(self, seed):
    random.seed(seed)
    return Sound._reset(self, seed)


def from_numpy(self, seed):
    np.random.seed(seed)
    return Sound._reset(self, seed)


SHARED = []


def shared_step(self, action):
    SHARED.append(action)
    text, *rest = Sound._step(self, action)
    return f"{text} {len(SHARED)}", *rest


def noisy_start(self, seed):
    text, info = Sound._reset(self, seed)
    return f"{text} {self.noise.random()}", info


def lossy_restore(self, s, seed=None):
    Env.restore(self, s, seed)
    self.count = 0


def lossy_pickle(self):
    return {**self.__dict__, "goal": 99}


def changed_by_nonsense(self, action):
    if action not in self.admissible():
        return "what?", 0.0, False, {"valid": False}
    return Sound._step(self, action)


BOARD = {}


def board_reset(self, seed):
    BOARD.update(count=0)
    return Sound._reset(self, seed)


def board_step(self, action):
    self.count = BOARD["count"]
    result = Sound._step(self, action)
    BOARD.update(count=self.count)
    return result


def never_forgets(self, action):
    text, reward, terminated, info = Sound._step(self, action)
    self.won = getattr(self, "won", False) or terminated
    return text, reward, terminated, info | {"success": self.won}


def hopeless(self, action):
    text, _, terminated, info = Sound._step(self, action)
    return text, 0.0, terminated, {**info, "success": False}


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"reset": lambda self, seed, dynamics_seed=None: "text"}, r"reset must return \(observation"),
        ({"_reset": lambda self, seed: (7, {})}, "reset's observation is int, not str"),
        ({"_reset": lambda self, seed: 1 / 0}, "raised ZeroDivisionError: division by zero"),
        ({"step": with_result(0, None)}, "step's observation is missing, not str"),
        ({"step": with_result(1, "1")}, "step's reward is str, not float"),
        ({"step": with_result(1, float("nan"))}, "step's reward is nan, not finite"),
        ({"step": with_result(2, 1)}, "step's terminated is int, not bool"),
        ({"step": with_result(3, None)}, "step's truncated is missing, not bool"),
        ({"step": with_result(4, {"valid": True})}, r"info\['success'\] is missing, not bool"),
        ({"step": lambda self, action: ("a", 0.0, False)}, "step must return"),
        ({"max_turns": 0}, "max_turns is 0, not a positive int"),
        ({"instruction": ""}, "instruction must be a text"),
        ({"step": endless}, "still running after max_turns = 6"),
        ({"step": never_over}, "endings: step after the end must raise"),
        ({"step": never_over}, "before reset: step before the first reset must raise"),
        ({"step": both}, "terminated and truncated at once"),
        ({"_step": shared_step}, "the same seeds and actions do not give the same episode"),
        ({"_reset": noisy_start}, "another dynamics_seed changes the start"),
        ({"state_key": lambda self: [self.count]}, "state_key.. returned list: unhashable"),
        ({"state_key": lambda self: object()}, "differs between equal states"),
        ({"_step": raising}, "action '' raised KeyError"),
        ({"_step": changed_by_nonsense}, "invalid action '' changed the state key"),
        ({"restore": lossy_restore}, "snapshot: "),
        ({"fork": lambda self, seed=None: self}, "fork returns the environment itself"),
        ({"__getstate__": lossy_pickle}, "pickle: after a pickle round trip"),
        ({"_reset": from_global_chance}, "the global `random`"),
        ({"_reset": from_numpy}, "the global `numpy.random`"),
        (
            {"_reset": board_reset, "_step": board_step, "snapshots": "none"},
            r"instances: two instances stepped in turns do not do what each does alone \(seeds 0, 1\)",
        ),
        (
            {"_step": never_forgets},
            "success flags: success of seed 0 at step 0 was False at first and is True after other episodes",
        ),
        ({"_step": never_forgets}, "unknown action: info..success.. is True after the invalid action ''"),
        ({"_step": hopeless}, "the expert never succeeded in 8 episodes"),
    ],
)
def test_each_breakage_is_caught_and_named(methods, message):
    report = check_env(broken(**methods))
    assert not report.ok
    assert any(re.search(message, failure) for failure in report.failures), str(report)
    assert "FAIL" in str(report)


def test_a_sound_environment_passes_as_class_and_as_instance():
    for given in (Sound, Sound()):
        report = check_env(given, episodes=3)
        assert report.ok, str(report)
        assert report.reset_ms > 0 and report.step_ms > 0
        assert str(report).count("\n") == len(report.checks) + 1


def test_what_cannot_be_shown_is_said_and_no_failure():
    class Mute(Sound):
        snapshots = "none"

        def expert(self):
            raise NotImplementedError

        def _step(self, action):
            return hopeless(self, action)

    report = check_env(Mute)
    text = str(report)
    assert "not shown: it has no scripted expert" in text
    assert "not shown: neither an expert nor the random policy" in text
    assert 'not tried: snapshots = "none"' in text
    assert all(failure.startswith("pickle") for failure in report.failures)  # a local class


def test_instances_with_processes_of_their_own_may_share_what_they_like():
    cls = broken(_reset=board_reset, _step=board_step, snapshots="none", runs_in="process")
    report = check_env(cls)
    assert not any(failure.startswith("instances") for failure in report.failures)
    assert "not tried: each instance has a process of its own" in str(report)


def test_constructor_and_names():
    assert check_env("frozen_lake", slip=3).failures == [
        "make: raised ValueError: needs 0 <= hole_prob < 1 and 0 <= slip <= 1, not 0.25, 3"
    ]
    with pytest.raises(ValueError, match="Did you mean 'frozen_lake'"):
        check_env("frozen_lak")
    with pytest.raises(ValueError, match="not with an instance"):
        check_env(Sound(), size=3)
    with pytest.raises(ValueError, match="episodes must be at least 1"):
        check_env(Sound, episodes=0)


def test_global_generators_survive_a_check():
    before = random.getstate()
    check_env("frozen_lake", episodes=2)
    assert random.getstate() == before
