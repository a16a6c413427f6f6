"""Returns, group baselines and GAE against literal numbers and against slow definitions."""

import json
from pathlib import Path

import numpy as np
import pytest

from verl_multiturn.returns import (
    discounted_sum,
    episode_return,
    gae,
    leave_one_out,
    relative,
    returns_to_go,
)
from verl_multiturn.turns import TurnBatch

VECTORS = json.loads((Path(__file__).parent / "data" / "gigpo_vectors.json").read_text())


def batch(r, traj=None, t=None, **more):
    traj = traj or ["a"] * len(r)
    t = t or list(range(len(r)))
    return TurnBatch.from_lists(group=["g"] * len(r), trajectory=traj, index=t, reward=r, **more)


@pytest.mark.parametrize("name", ["01_returns_sparse", "02_returns_rows_shuffled"])
def test_returns_to_go(name):
    given = VECTORS[name]["in"]
    turns = batch(given["r"], given["traj"], given["t"])
    np.testing.assert_allclose(returns_to_go(turns, given["gamma"]), VECTORS[name]["out"])


def test_returns_of_dense_rewards():
    turns = batch(VECTORS["03_returns_dense_sokoban"]["in"]["r"])
    np.testing.assert_allclose(returns_to_go(turns, 0.95), VECTORS["03_returns_dense_sokoban"]["out"])
    expected = VECTORS["03b_returns_gamma_0_and_1"]["out"]
    np.testing.assert_allclose(returns_to_go(turns, 0.0), expected[0])
    np.testing.assert_allclose(returns_to_go(turns, 1.0), expected[1])


def test_episode_return_is_undiscounted_and_per_trajectory():
    turns = batch([10, 0, 10, 0, 1], list("ababa"), [2, 0, 0, 1, 1])
    assert episode_return(turns).tolist() == [21, 0, 21, 0, 21]


def test_episode_unit_by_votes():
    given = VECTORS["05_episode_unit_row_vs_traj_mean"]
    x, codes = np.array(given["in"]["score"], float), np.zeros(6, int)
    once = np.array([1, 0, 1, 0, 0, 0], bool)
    for by_std, name in [
        (False, "05_episode_unit_row_vs_traj_mean"),
        (True, "05b_episode_unit_row_vs_traj_std"),
    ]:
        by_row, by_trajectory = VECTORS[name]["out"]
        np.testing.assert_allclose(relative(x, codes, by_std=by_std), by_row, atol=1e-8)
        np.testing.assert_allclose(relative(x, codes, votes=once, by_std=by_std), by_trajectory, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("04_episode_traj_mean", {}),
        ("04b_episode_traj_std", {"by_std": True}),
        ("04c_episode_traj_std_ddof0", {"by_std": True, "ddof": 0}),
    ],
)
def test_relative(name, keywords):
    x = np.array(VECTORS[name]["in"]["R"], float)
    np.testing.assert_allclose(relative(x, np.zeros(4, int), **keywords), VECTORS[name]["out"], atol=1e-8)


def test_a_constant_group_is_exactly_zero_at_any_size():
    for n in range(2, 65):
        for k in (0, 1, 3, 7, 20):
            x = np.full(n, 10 * 0.95**k)
            for by_std in (False, True):
                assert not relative(x, np.zeros(n, int), by_std=by_std).any()
            assert not leave_one_out(x, np.zeros(n, int)).any()
    assert relative(np.full(23, 8.573749999999999), np.zeros(23, int), by_std=True).tolist() == [
        *VECTORS["11_constant_group_is_exactly_zero"]["out"]
    ]


@pytest.mark.parametrize("by_std", [False, True])
def test_a_single_vote(by_std):
    x, codes = np.array([7.0, 1.0, 3.0]), np.array([0, 1, 1])
    assert relative(x, codes, by_std=by_std)[0] == 0
    assert relative(x, codes, by_std=by_std, singleton="raw")[0] == 7
    assert leave_one_out(x, codes)[0] == 0


def test_leave_one_out():
    R = np.array(VECTORS["20_rloo_is_scaled_mean_norm"]["in"]["R"], float)
    np.testing.assert_allclose(
        leave_one_out(R, np.zeros(4, int)), VECTORS["20_rloo_is_scaled_mean_norm"]["out"]
    )


def test_relative_against_its_definition_and_for_any_order():
    rng = np.random.default_rng(0)
    x, codes = rng.normal(size=200), rng.integers(0, 30, 200)
    expected = [
        0 if (codes == c).sum() == 1 else (v - x[codes == c].mean()) / (x[codes == c].std(ddof=1) + 1e-6)
        for v, c in zip(x, codes, strict=True)
    ]
    A = relative(x, codes, by_std=True)
    np.testing.assert_allclose(A, expected, atol=1e-12)
    shuffle = rng.permutation(200)
    assert (relative(x[shuffle], codes[shuffle], by_std=True) == A[shuffle]).all()  # to the bit


def test_gae_by_hand():
    turns = batch([1.0, 2.0, 3.0], value=[0.5, 0.25, 0.125])
    # δ = 1 + .9·.25 − .5, 2 + .9·.125 − .25, 3 − .125
    d = [0.725, 1.8625, 2.875]
    expected = [d[0] + 0.45 * (d[1] + 0.45 * d[2]), d[1] + 0.45 * d[2], d[2]]
    np.testing.assert_allclose(gae(turns, 0.9, 0.5), expected)


def test_gae_bootstraps_after_truncation_only():
    more = dict(value=[0.0, 0.0], next_value=[9.0, 4.0])
    cut = batch([0.0, 1.0], truncated=[False, True], **more)
    np.testing.assert_allclose(gae(cut, 0.5, 1.0), [1.5, 3.0])
    np.testing.assert_allclose(gae(batch([0.0, 1.0], **more), 0.5, 1.0), [0.5, 1.0])
    both = batch([0.0, 1.0], truncated=[False, True], terminated=[False, True], **more)
    np.testing.assert_allclose(gae(both, 0.5, 1.0), [0.5, 1.0])


def test_gae_names_the_missing_value():
    with pytest.raises(ValueError, match=r"^value is missing .* turn 1 of trajectory 'a'"):
        gae(batch([0.0, 1.0], value=[0.0, np.nan]), 1.0, 1.0)
    with pytest.raises(ValueError, match=r"^next_value is missing .* turn 1 of trajectory 'a'"):
        gae(batch([0.0, 1.0], value=[0.0, 0.0], truncated=[False, True]), 1.0, 1.0)


def test_gae_with_lambda_one_is_return_minus_value():
    rng = np.random.default_rng(1)
    traj = np.repeat(np.arange(20), rng.integers(1, 9, 20))
    t = np.concatenate([np.arange(n) for n in np.bincount(traj)])
    shuffle = rng.permutation(len(t))
    V = rng.normal(size=len(t))
    turns = TurnBatch.from_lists(
        np.zeros(len(t), int), traj[shuffle], t[shuffle], rng.normal(size=len(t)), value=V
    )
    np.testing.assert_allclose(gae(turns, 0.9, 1.0), returns_to_go(turns, 0.9) - V)
    np.testing.assert_allclose(
        discounted_sum(turns, turns.reward, 1.0)[turns.index == 0],
        episode_return(turns)[turns.index == 0],
    )


def test_nothing_in_nothing_out():
    empty = TurnBatch.from_lists(group=[], trajectory=[], index=[], reward=[])
    for A in (
        returns_to_go(empty, 0.9),
        episode_return(empty),
        gae(empty, 1.0, 1.0),
        relative(empty.reward, empty.group_code, by_std=True),
        leave_one_out(empty.reward, empty.group_code),
    ):
        assert A.shape == (0,) and A.dtype == np.float64
