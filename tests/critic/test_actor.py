"""The critic as a run has it: what it asks for, what it remembers, and how its end is told. No Ray."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from verl_multiturn.critic import actor as module
from verl_multiturn.critic.actor import CriticActor, RemoteCritic
from verl_multiturn.critic.config import ArcherConfig, CriticConfig
from verl_multiturn.critic.replay import Transition
from verl_multiturn.errors import RunStopped

CONFIG = CriticConfig(
    encoder="ngrams", max_tokens=64, hidden=8, lr=1e-2, batch=8, micro_batch=8, capacity=16, min_size=4
)
ARCHER = ArcherConfig(updates=3)


def turn(k, version=0):
    return Transition(f"s{k}", f"a{k}", -1.0, f"s{k + 1}", k % 2 == 1, -1.0, version, f"t{k}")


def filled(count=6, **options):
    made = CriticActor(replace(CONFIG, **options), ARCHER)
    made.add([turn(k) for k in range(count)], {f"s{k}": [k, k + 100] for k in range(count)})
    return made


def answer(actor, version=0):
    wanted, _ = actor.wanted(version)
    actor.heard({state: [f"fresh {state} {version}"] for state in wanted})
    return wanted


def test_it_asks_at_the_states_that_it_will_draw():
    actor = filled()
    wanted, drawn = actor.wanted(0)
    assert set(wanted) == set(actor.critic.upcoming(3)) and drawn == len(wanted) > 0
    assert all(ids == [int(state[1:]), int(state[1:]) + 100] for state, ids in wanted.items())
    answer(actor)
    found = actor.train()
    assert found["steps"] == found["all_steps"] == 3 and found["fresh"] == 1.0
    assert 0 < found["target_lag"] < 1


def test_utterances_are_kept_for_as_long_as_the_policy_stays():
    """Warm-up: the same policy is asked at a state once. Another version is asked again."""
    actor = filled()
    first = answer(actor)
    again, drawn = actor.wanted(0)
    assert again == {} and drawn == len(first)
    later, drawn = actor.wanted(1)
    assert set(later) == set(first) and drawn == len(first)
    assert actor.fresh == {}


def test_nothing_is_asked_where_nothing_is_learnt():
    few = filled(3)
    assert few.wanted(0) == ({}, 0) and few.train()["steps"] == 0
    other = filled(v_target="sarsa")
    assert other.wanted(0) == ({}, 0)
    assert other.train()["steps"] == 3


def test_what_left_the_replay_is_forgotten():
    actor = filled(16)
    answer(actor)
    heard = set(actor.fresh)
    actor.add([turn(k) for k in range(100, 110)], {f"s{k}": [k] for k in range(100, 110)})
    alive = {f"s{k}" for k in (*range(10, 16), *range(100, 110))}
    assert set(actor.prompts) == alive and set(actor.fresh) == heard & alive
    answer(actor)
    assert actor.train()["steps"] == 3


def test_draws_carry_their_prompts_and_leave_the_critics_draws_alone():
    """What was asked is what `train` draws, whatever the actor draws between the two."""
    actor = filled(16)
    upcoming = actor.critic.upcoming(3)
    drawn = actor.draw(50)
    assert len(drawn) == 50 and len({state for state, _ in drawn}) > 10
    assert actor.critic.upcoming(3) == upcoming and actor.draw(50) != drawn
    assert all(ids == actor.prompts[state] for state, ids in drawn)


def test_what_it_judges_is_the_critics_advantage():
    actor = filled()
    answer(actor)
    actor.train()
    A, V = actor.judge(["s1", "s2"], ["a1", "x"])
    np.testing.assert_array_equal(A, actor.critic.advantage(["s1", "s2"], ["a1", "x"]))
    np.testing.assert_array_equal(V, actor.critic.values(["s1", "s2"]))


def test_a_saved_critic_goes_on_to_the_bit(tmp_path):
    """Replay, draws, networks, optimizer, and what the policy said: the next step is the same."""
    actor, path = filled(), tmp_path / "folder" / module.FILE
    answer(actor)
    actor.train()
    actor.save(str(path))
    other = CriticActor(CONFIG, ARCHER)
    other.load(str(path))
    assert (other.prompts, other.fresh, other.version) == (actor.prompts, actor.fresh, actor.version)
    for one in (actor, other):
        one.add([turn(k, 1) for k in (7, 8)], {"s7": [7], "s8": [8]})
        answer(one, 1)
    assert other.draw(5) == actor.draw(5)
    metrics = actor.train()
    assert other.train() == metrics and metrics["all_steps"] == 6
    mine, theirs = actor.critic.state_dict(), other.critic.state_dict()
    assert mine.keys() == theirs.keys()
    for name, x in mine.items():
        np.testing.assert_array_equal(x, theirs[name], err_msg=name)
    assert [path.name for path in path.parent.iterdir()] == [module.FILE]


def test_another_critic_is_refused(tmp_path):
    path = str(tmp_path / "critic.npz")
    filled().save(path)
    with pytest.raises(ValueError, match="capacity 16, not 17"):
        CriticActor(replace(CONFIG, capacity=17), ARCHER).load(path)
    (tmp_path / "text").write_text("no")
    with pytest.raises(ValueError, match="is no file that a critic saved"):
        CriticActor(CONFIG, ARCHER).load(str(tmp_path / "text"))


# ------------------------------------------------------------------------------- behind Ray


def remote(outcome, monkeypatch):
    """A RemoteCritic whose actor answers, or whose call raises what Ray raises."""
    ray = pytest.importorskip("ray")

    def get(value, timeout=None):
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(ray, "get", get)
    method = SimpleNamespace(remote=lambda *arguments: outcome if outcome else arguments)
    return RemoteCritic(SimpleNamespace(train=method), lambda: "the same command resumes from STEP")


def test_a_call_reaches_the_actor(monkeypatch):
    assert remote(None, monkeypatch)("train", 1, "two") == (1, "two")


def test_a_dead_actor_ends_the_run_in_one_sentence(monkeypatch):
    from ray.exceptions import ActorDiedError

    with pytest.raises(RunStopped) as error:
        remote(ActorDiedError(), monkeypatch)("train")
    assert str(error.value) == (
        "the utterance critic's process ended in train, and with it what it learnt since the last "
        "checkpoint: the same command resumes from STEP"
    )


def test_what_the_critic_raises_is_told(monkeypatch):
    from ray.exceptions import RayTaskError

    cause = RayTaskError("train", "...", FloatingPointError("the critic's gradient is nan at step 3"))
    with pytest.raises(RunStopped, match=r"^the utterance critic, in train: the critic's gradient is nan"):
        remote(cause, monkeypatch)("train")


def test_an_actor_that_does_not_answer_ends_the_run(monkeypatch):
    ray = pytest.importorskip("ray")
    seen = []

    def late(value, timeout=None):
        seen.append(timeout)
        raise ray.exceptions.GetTimeoutError

    critic = remote(None, monkeypatch)
    critic.patience = 5.0
    monkeypatch.setattr(ray, "get", late)
    with pytest.raises(RunStopped) as error:
        critic("train")
    assert str(error.value) == (
        "the utterance critic has not answered in train for 5 s (multiturn.phase_timeout): the same command "
        "resumes from STEP"
    )
    assert seen == [5.0]


def test_it_never_starts_again_and_has_its_share(monkeypatch):
    """Ray would restart an actor with an empty replay."""
    ray, seen = pytest.importorskip("ray"), {}

    class Actor:
        @classmethod
        def options(cls, **options):
            seen["options"] = options
            return cls

        @classmethod
        def remote(cls, *arguments):
            seen["arguments"] = arguments
            return SimpleNamespace(size=SimpleNamespace(remote=lambda: 0))

    monkeypatch.setattr(ray, "remote", lambda kind: Actor)
    monkeypatch.setattr(ray, "get", lambda value, timeout=None: value)
    module.start(CONFIG, ARCHER, 0, 1, str)
    assert seen["options"] == {"num_cpus": 1, "num_gpus": 0, "max_restarts": 0}
    assert seen["arguments"] == (CONFIG, ARCHER, "cpu")
    module.start(CONFIG, ARCHER, 0.25, 1, str, bundles="group")
    place = seen["options"]["scheduling_strategy"]
    assert (place.placement_group, place.placement_group_bundle_index) == ("group", 0)
    assert seen["arguments"][2] == "cuda"

    def late(value, timeout=None):
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", late)
    with pytest.raises(RunStopped, match="no room for the utterance critic"):
        module.start(CONFIG, ARCHER, 0.25, 1, str)
