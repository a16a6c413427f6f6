"""The replay: a ring with uniform draws, exact state, and what it refuses."""

import json
from collections import Counter
from dataclasses import replace
from math import inf, isnan, nan
from pathlib import Path

import numpy as np
import pytest

from verl_multiturn.critic.replay import Replay, Transition, history, of_episode
from verl_multiturn.returns import returns_to_go
from verl_multiturn.turns import TurnBatch

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "archer_vectors.json").read_text())


def row(k, **more):
    values = {
        "state": f"s{k}", "action": f"a{k}", "reward": k / 3, "next_state": f"s{k + 1}", "done": k % 3 == 0,
        "mc_return": -k / 7, "version": k, "id": f"u_{k}",
    }  # fmt: skip
    return Transition(**(values | more))


def filled(count, **options):
    replay = Replay(**options)
    replay.add(map(row, range(count)))
    return replay


def chi_square(replay, draws):
    counts = Counter(one.id for one in replay.sample(draws))
    expected = draws / len(replay)
    return sum((counts[one.id] - expected) ** 2 / expected for one in replay.rows)


def test_a13_a_ring_of_four_after_six_inserts():
    expected = VECTORS["A13 ring buffer cap 4 after 6 inserts"]
    replay = filled(6, capacity=4)
    assert [one.version for one in replay.rows] == expected["slots"]
    assert len(replay) == expected["correct_len"]
    counts = Counter(one.version for one in replay.sample(40_000))
    shares = [counts[version] / 40_000 for version in expected["slots"]]
    np.testing.assert_allclose(shares, expected["correct_prob"], atol=0.01)
    assert np.max(np.abs(np.array(shares) - expected["original_sampling_prob"])) > 0.05


@pytest.mark.parametrize("inserts", [7, 20, 50, 53, 131])
def test_draws_are_uniform_before_and_after_the_wrap(inserts):
    replay = filled(inserts, capacity=50)
    freedom = min(inserts, 50) - 1
    statistic = chi_square(replay, 20_000)
    # Wilson and Hilferty's normal approximation: both tails beyond 3.3 deviations, p < 0.001
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert abs(z) < 3.3
    assert {one.version for one in replay.sample(5_000)} == set(range(max(0, inserts - 50), inserts))


def test_a18_distinct_states_among_draws():
    expected = VECTORS["A18 expected unique states, 12800 draws"]
    replay = filled(2560, capacity=2560)
    assert len(replay.upcoming(50, 256)) == pytest.approx(expected["N2560"], abs=15)


def test_draws_do_not_touch_the_global_generator():
    first, second = filled(9, seed=3), filled(9, seed=3)
    drawn = first.sample(20)
    np.random.seed(0)
    assert second.sample(20) == drawn
    assert filled(9, seed=4).sample(20) != drawn


def test_transitions_that_are_too_old_are_not_drawn():
    replay = filled(10, capacity=8, max_age=2)
    assert len(replay) == 3 and {one.version for one in replay.sample(300)} == {7, 8, 9}
    replay.add([row(10, version=20)])
    assert {one.version for one in replay.sample(20)} == {20}
    replay.add([row(11, version=19), row(12, version=5)])  # an asynchronous run's late answers
    assert {one.version for one in replay.sample(100)} == {19, 20}


def test_upcoming_tells_the_states_of_the_next_draws():
    replay = filled(30, capacity=30)
    told = replay.upcoming(3, 4)
    assert told == list(dict.fromkeys(one.state for _ in range(3) for one in replay.sample(4)))


@pytest.mark.parametrize("count", [0, 3, 5, 13])
def test_the_state_is_exact(count, tmp_path):
    replay = filled(count, capacity=5, seed=1)
    if count:
        odd = row(
            99, state="日本 \n\x00 \U0001f600 \ud800", next_state="", mc_return=nan, reward=np.float32(0.1)
        )
        replay.add([odd])
        replay.sample(3)
    path = tmp_path / "replay.npz"
    np.savez(path, **replay.state_dict())
    again = Replay(capacity=5)
    with np.load(path, allow_pickle=False) as arrays:
        again.load_state_dict(arrays)
    assert len(again) == len(replay) and again.newest == replay.newest
    if count:
        names = Transition.__dataclass_fields__
        for one, other in zip(replay.rows, again.rows, strict=True):
            for name in names:
                mine, theirs = getattr(one, name), getattr(other, name)
                assert mine == theirs or (isnan(mine) and isnan(theirs))
        replay.add([row(200)])
        again.add([row(200)])
        assert [one.id for one in again.sample(50)] == [one.id for one in replay.sample(50)]
        assert {name: x.tobytes() for name, x in again.state_dict().items()} == {
            name: x.tobytes() for name, x in replay.state_dict().items()
        }


def test_a_saved_replay_of_another_capacity_is_refused():
    with pytest.raises(ValueError, match="capacity 5, not 6"):
        Replay(capacity=6).load_state_dict(filled(3, capacity=5).state_dict())


def test_a_known_id_is_refused_and_nothing_is_added():
    replay = filled(3, capacity=4)
    with pytest.raises(ValueError, match="'u_2' is in the replay already"):
        replay.add([row(7), row(2)])
    with pytest.raises(ValueError, match="'u_8'"):
        replay.add([row(8), row(8)])
    assert [one.id for one in replay.rows] == ["u_0", "u_1", "u_2"]
    replay.add([row(3), row(4)])
    replay.add([row(0)])  # the first u_0 has gone
    assert [one.id for one in replay.rows] == ["u_4", "u_0", "u_2", "u_3"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward": nan}, r"transition 'u_1': its reward must be a finite number, not nan\."),
        ({"reward": -inf}, "reward must be a finite number"),
        ({"reward": None}, "reward must be a finite number, not None"),
        ({"reward": True}, "reward must be a finite number, not True"),
        ({"mc_return": inf}, "mc_return must be a finite number, or nan"),
        ({"done": 1}, "done must be a boolean, not 1"),
        ({"version": -1}, "version must be a whole number of at least 0"),
        ({"version": 1.5}, "version must be a whole number"),
        ({"state": None}, "its state must be a text, not None"),
        ({"next_state": 3}, "its next_state must be a text"),
        ({"id": 3}, "its id must be a text"),
    ],
)
def test_a_malformed_transition_is_refused_in_one_sentence(change, words):
    with pytest.raises(ValueError, match=words):
        replace(row(1), **change)


def test_what_cannot_be():
    with pytest.raises(ValueError, match="the replay is empty"):
        Replay().sample(1)
    with pytest.raises(ValueError, match="capacity must lie"):
        Replay(capacity=0)
    with pytest.raises(ValueError, match="max_age must lie"):
        Replay(max_age=-1)


def test_a_state_is_all_text_so_far():
    assert history(["o0", "o1", "o2"], ["a0", "a1"], "task") == [
        "task\no0",
        "task\no0\na0\no1",
        "task\no0\na0\no1\na1\no2",
    ]
    assert history(["o0", "o1"], ["a0", "a1"]) == ["o0", "o0\na0\no1"]
    assert history(["o0", "o1"], ["a0"], "task", limit=4) == ["k\no0", "0\no1"]


def test_transitions_of_an_episode():
    rewards, states = [-1.0, -1.0, 0.0], ["x", "y", "z"]
    rows = of_episode(states, ["a", "b", "c"], rewards, id="g_0", gamma=0.95, version=4)
    assert [one.id for one in rows] == ["g_0:0", "g_0:1", "g_0:2"]
    assert [(one.state, one.next_state, one.done) for one in rows] == [
        ("x", "y", False),
        ("y", "z", False),
        ("z", "", True),
    ]
    assert {one.version for one in rows} == {4}
    G = returns_to_go(TurnBatch.from_lists([0] * 3, [0] * 3, [0, 1, 2], rewards), 0.95)
    np.testing.assert_allclose([one.mc_return for one in rows], G, rtol=0, atol=1e-12)


def test_a5_returns_of_twenty_questions():
    expected = VECTORS["A5 MC returns"]
    rows = of_episode(list("stuv"), list("abcd"), [-1, -1, -1, 0], id="", gamma=0.95)
    np.testing.assert_allclose([one.mc_return for one in rows], expected["solved_turn4"], atol=1e-12)
    unsolved = of_episode(["s"] * 20, ["a"] * 20, [-1] * 20, id="", gamma=0.95, terminated=False)
    assert unsolved[0].mc_return == pytest.approx(expected["unsolved_g95"], abs=1e-12)
    assert [one.done for one in unsolved] == [False] * 19 + [True]  # the turn limit is an end


def test_a_cut_episode_may_be_bootstrapped():
    cut = {"id": "g", "gamma": 1.0, "terminated": False, "bootstrap_on_truncation": True}
    last = of_episode(["s", "t", "u"], ["a", "b"], [1, 2], **cut)[-1]
    assert (last.next_state, last.done, last.mc_return) == ("u", False, 2)
    assert of_episode(["s", "t"], ["a"], [1], **(cut | {"terminated": True}))[-1].done
    with pytest.raises(ValueError, match="'g' was cut by a limit: bootstrapping needs the state after"):
        of_episode(["s"], ["a"], [1], **cut)


@pytest.mark.parametrize(
    ("states", "rewards", "words"),
    [
        (["s"], [1, 2], "2 actions, 2 rewards and 1 states"),
        (["s", "t"], [1], "2 actions, 1 rewards"),
        (["s", "t"], [1, nan], "'g:1': its reward must be a finite number, not nan"),
        (["s", "t"], [nan, 1], "'g:0': its reward must be"),
        (["s", "t"], [1, None], "'g:1': its reward must be a finite number, not None"),
    ],
)
def test_a_malformed_episode_is_refused(states, rewards, words):
    with pytest.raises(ValueError, match=words):
        of_episode(states, ["a", "b"], rewards, id="g", gamma=0.9)
