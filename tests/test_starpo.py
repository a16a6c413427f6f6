"""StarPO-S against data/starpo_vectors.json: which groups are kept, and bi-level GAE.

Of vector 10, the soft weights and kept-ratio scales, and vector 12 (mutual information) belong to nothing
here; 10 and 11 are otherwise met by `relative`, which grpo is made of.
"""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verl_multiturn as vm
from verl_multiturn.algorithms.vineppo import whiten
from verl_multiturn.returns import relative
from verl_multiturn.turns import TurnBatch

VECTORS = json.loads((Path(__file__).parent / "data" / "starpo_vectors.json").read_text())
FOUR = [[0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 1], [-0.1, -0.2, 0, -0.1]]
quick = settings(max_examples=50, deadline=None)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


def keep(scores, **keywords):
    return vm.keep_groups([[0.0]] * len(scores), scores=scores, **keywords).tolist()


def test_vector_1_std_and_top_k():
    expected = VECTORS["1_std_and_topk"]
    close([np.std(R, ddof=1) for R in FOUR], expected["std"])

    def kept(value, **more):
        return vm.keep_groups(FOUR, strategy="top_k", value=value, **more).tolist()

    assert kept(0.25) == expected["top_k_0.25"]
    assert kept(0.5) == expected["top_k_0.5"]
    assert kept(0.1) == expected["top_k_0.1_floor_is_one"]
    assert vm.keep_groups(FOUR, strategy="top_k_abs", value=9).tolist() == expected["top_k_abs_9_no_zero"]
    assert kept(0.5, largest=False) == expected["top_k_0.5_smallest_no_zero"]


def test_vector_2_top_p():
    expected = VECTORS["2_top_p"]
    for mass in ("linear", "softmax"):
        for value in (0.6, 0.9):
            assert keep([4, 3, 2, 1], mass=mass, value=value) == expected[f"{mass}_{value}"]
        binary = keep([0.5] * 4 + [0] * 4, mass=mass, include_zero=True)
        assert len(binary) == expected[f"binary_{mass}_0.9_count"]
    assert keep([0, 1, 0, 2], value=1) == expected["value_1_no_zero"]


def test_vector_3_min_p():
    expected = VECTORS["3_min_p"]
    assert keep([1, 0.5, 0.49, 0], strategy="min_p", value=0.5) == expected["largest_0.5"]
    smallest = keep([0.1, 0.2, 0.21, 0.5], strategy="min_p", value=0.5, largest=False)
    assert smallest == expected["smallest_0.5"]


def test_vector_4_nothing_to_learn_from():
    expected = VECTORS["4_all_zero"]
    same = [[1, 1, 1], [0, 0, 0], [0.1, 0.1, 0.1], [5, 5, 5]]

    def kept(**keywords):
        return vm.keep_groups(same, **keywords).tolist()

    assert kept(include_zero=True) == expected["linear_0.9"] == []
    assert kept(include_zero=True, mass="softmax") == expected["softmax_0.9"]
    assert kept(include_zero=True, value=1.0) == expected["top_p_1"]
    one = kept(include_zero=True, strategy="top_k", value=0.25)
    assert one == [0] and len(one) == expected["top_k_0.25_count"]
    assert kept(include_zero=True, strategy="min_p", value=0.5) == expected["min_p_0.5"]
    for strategy in ("top_k", "top_k_abs", "top_p", "min_p"):
        assert kept(strategy=strategy, value=1) == expected["any_no_zero"] == []
    assert keep([0.004, 0.003, 0.002, 0.001]) == expected["near_zero_linear_eps"] == []
    assert keep([0.004, 0.003, 0.002, 0.001], eps=0) == [0, 1, 2]


def test_vector_5_variances_are_a_smaller_nucleus():
    expected = VECTORS["5_std_vs_variance_mass"]
    groups = [[0, 4 * 2**0.5], *[[0, 2**0.5]] * 3]  # std 4, 1, 1, 1
    assert len(vm.keep_groups(groups, value=0.6)) == expected["std_linear_0.6_count"]
    kept = vm.keep_groups(groups, score="variance", value=0.6, eps=0)
    assert kept.tolist() == expected["variance_linear_0.6"]


def test_vector_6_a_trajectory_votes_once_however_many_turns():
    expected = VECTORS["6_turn_rows"]
    turns = TurnBatch.from_lists(list("aaabb"), [0, 0, 1, 0, 1], [0, 1, 0, 0, 0], [1, 0, 0, 0, 0])
    groups = [[1, 0], [0, 0]]
    close([np.std(R, ddof=1) for R in groups], expected["group_std"])
    kept = vm.keep_groups(groups, strategy="top_k", value=0.5)
    rows = np.flatnonzero(np.isin(turns.group_code, kept))
    assert rows.tolist() == expected["rows"]
    close(np.array(expected["group_std"])[turns.group_code[rows]], expected["row_std"])


def test_vectors_10_and_11_are_grpo():
    def grpo(group, trajectory, reward, **keywords):
        seen = {}
        index = []
        for key in zip(group, trajectory, strict=True):
            index.append(seen[key] if key in seen else 0)
            seen[key] = index[-1] + 1
        return vm.advantages("grpo", TurnBatch.from_lists(group, trajectory, index, reward), **keywords)

    expected, group = VECTORS["10_grpo"], list("aaaabbc")
    for name, by_std in (("grpo", True), ("dr_grpo", False)):
        A = grpo(group, range(7), [1, 0, 0, 0, 2, 2, 0.7], by_std=by_std)
        close(A[:6], expected[name][:6])
        assert A[6] == 0  # deviation: alone in its group, it is compared with nothing
    expected = VECTORS["11_grpo_turns"]
    close(grpo(list("aaaaa"), [0, 0, 0, 1, 2], [0, 0, 1, 0, 0]), expected["per_episode"])
    close(grpo(list("aaaa"), range(4), [1, 0, 0, 0]), expected["before_padding"])
    rows = np.array([1.0, 1, 1, 0, 0])
    close(relative(rows, np.zeros(5, int), by_std=True), expected["per_row_wrong"])
    copied = relative(np.array([1.0, 0, 0, 0, 1]), np.zeros(5, int), by_std=True)
    close(copied, expected["after_duplicating_row0_wrong"])


def test_scores_of_a_group():
    groups = [[1, 2, 6], [4], [2, 3]]
    assert vm.keep_groups(groups, strategy="top_k_abs", value=3).tolist() == [0, 2]  # alone: 0
    assert vm.keep_groups(groups, strategy="top_k_abs", value=3, include_zero=True).tolist() == [0, 2, 1]
    assert vm.keep_groups(groups, score="mean", strategy="top_k_abs", value=3).tolist() == [1, 0, 2]
    assert vm.keep_groups(groups, score="sum", strategy="top_k_abs", value=3).tolist() == [0, 2, 1]
    assert keep([0.1, 0.9, 0.5], strategy="top_k", value=0.4) == [1]  # entropy, say


def test_shares_are_not_lost_to_rounding():
    assert 0.29 * 100 < 29
    assert len(keep(list(range(1, 101)), strategy="top_k", value=0.29)) == 29
    assert keep([3, 0.3], strategy="min_p", value=0.1) == [0, 1]


def test_v1_preset():
    returns = np.random.default_rng(0).normal(size=(8, 16)) * np.arange(8)[:, None]
    kept = vm.keep_groups(returns, strategy="top_k", value=0.25, include_zero=True)
    assert kept.tolist() == [7, 6] and kept.dtype == np.int64


def test_no_groups():
    assert vm.keep_groups([]).tolist() == []
    assert vm.keep_groups([], include_zero=True, mass="softmax").tolist() == []


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"score": "stdd"}, "unknown score 'stdd'; valid: std, variance, mean, sum. Did you mean 'std'"),
        ({"strategy": "topp"}, "Did you mean 'top_p'"),
        ({"mass": "linaer"}, "Did you mean 'linear'"),
        ({"strategy": "top_k", "value": 2}, "value of top_k must be a share .* top_k_abs"),
        ({"strategy": "top_k_abs", "value": 1.5}, "a whole number of groups"),
        ({"strategy": "top_k_abs", "value": 0}, "at least 1"),
        ({"strategy": "min_p", "value": 1.1}, "a share of the best score"),
        ({"value": 0}, "value of top_p must be"),
        ({"value": -0.5}, "value of top_p must be"),
        ({"value": float("nan")}, "value of top_p must be"),
        ({"value": float("inf")}, "value of top_p must be"),
        ({"value": True}, "value of top_p must be"),
        ({"value": "0.9"}, "value of top_p must be"),
        ({"eps": -1}, "eps must be"),
        ({"eps": float("nan")}, "eps must be"),
        ({"largest": False, "include_zero": True}, "zeros come first"),
        ({"score": "mean"}, "needs scores of at least 0, not -0.1"),
        ({"scores": [1, 2]}, "scores has 2 entries, but returns has 4 groups"),
        ({"scores": [1, float("nan"), 1, 1]}, "scores must be finite: that of group 1 is nan"),
        ({"scores": [-1, -2, -3, -4], "strategy": "min_p"}, "min_p needs a best score"),
    ],
)
def test_impossible_calls(keywords, words):
    with pytest.raises(ValueError, match=words):
        vm.keep_groups(FOUR, **keywords)


@pytest.mark.parametrize("bad", [[], [1, float("nan")], [float("inf")], [[1, 2]], ["a"]])
def test_bad_returns(bad):
    with pytest.raises(ValueError, match="returns"):
        vm.keep_groups([[0, 1], bad])


groups = st.lists(st.lists(st.sampled_from([0.0, 1.0, -0.1, 10.0]), min_size=1, max_size=5), max_size=8)
modes = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(["top_k", "top_p", "min_p"]),
        "value": st.floats(0.01, 1.0),
        "mass": st.sampled_from(["linear", "softmax"]),
        "include_zero": st.booleans(),
    }
)


@quick
@given(returns=groups, mode=modes, data=st.data())
def test_kept_groups_are_distinct_ordered_and_do_not_depend_on_their_order(returns, mode, data):
    kept = vm.keep_groups(returns, **mode).tolist()
    std = [np.std(R, ddof=1) if len(R) > 1 else 0.0 for R in returns]
    assert len(set(kept)) == len(kept)
    if mode["value"] < 1:
        assert all(std[a] >= std[b] - 1e-12 for a, b in pairwise(kept))
    assert all(std[g] > 0 for g in kept) or mode["include_zero"]
    order = data.draw(st.permutations(range(len(returns))))
    shuffled = vm.keep_groups([returns[g][::-1] for g in order], **mode)
    close(sorted(std[order[g]] for g in shuffled), sorted(std[g] for g in kept))


# --- Bi-level GAE ---

V6 = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]


def plain_gae(r, V, gamma, lam):
    """GAE over tokens, rewards per token."""
    A, following = np.zeros(len(V)), 0.0
    for i in reversed(range(len(V))):
        next_V = V[i + 1] if i + 1 < len(V) else 0.0
        A[i] = following = r[i] + gamma * next_V - V[i] + gamma * lam * following
    return A


def test_vector_7():
    expected = VECTORS["7_bilevel"]
    A, R = vm.bilevel_gae([1, 2], V6, [2, 5], [1] * 6, 1.0, 1.0, 0.95)
    close(A, expected["adv"]), close(R, expected["ret"])
    close(whiten(A), expected["whitened"])


def test_vector_8_an_observation_in_between():
    expected = VECTORS["8_bilevel_obs"]
    values, mask = [*V6[:3], 9.0, *V6[3:]], [1, 1, 1, 0, 1, 1, 1]
    A, R = vm.bilevel_gae([1, 2], values, [2, 6], mask, gamma=0.99, lam=0.95, gamma_turn=0.9)
    close(A, expected["adv"]), close(R, expected["ret"])
    close(whiten(A, weights=mask), expected["whitened"])


def test_vector_9_turns_without_reward_and_both_identities():
    expected = VECTORS["9_zero_turns_and_identities"]
    close(vm.bilevel_gae([1, 0], V6, [2, 5], [1] * 6, 1, 1, 0.95)[0], expected["last_turn_zero"])
    close(vm.bilevel_gae([0, 2], V6, [2, 5], [1] * 6, 1, 1, 0.95)[0], expected["first_turn_zero"])
    one = vm.bilevel_gae([3], V6, [5], [1] * 6, gamma=0.99, lam=0.9, gamma_turn=0.5)[0]
    close(one, expected["single_turn_adv"])


@st.composite
def token_rows(draw):
    """(rewards, values, turn_ends, mask) of one trajectory, observations anywhere between tokens."""
    rewards, mask, ends = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        rewards.append(draw(st.sampled_from([0.0, 0.0, 1.0, -0.5])))
        mask += [0] * draw(st.integers(0, 2)) + draw(st.lists(st.sampled_from([0, 1]), max_size=4)) + [1]
        ends.append(len(mask) - 1)
    mask += [0] * draw(st.integers(0, 2))
    n = len(mask)
    return rewards, draw(st.lists(st.floats(-2, 2), min_size=n, max_size=n)), ends, mask


share = st.floats(0, 1)


@quick
@given(row=token_rows(), gamma=share, lam=share, gamma_turn=share, junk=st.sampled_from([9.0, np.nan]))
def test_observation_tokens_change_nothing(row, gamma, lam, gamma_turn, junk):
    rewards, values, ends, mask = row
    A, R = vm.bilevel_gae(rewards, values, ends, mask, gamma, lam, gamma_turn)
    trained = np.flatnonzero(mask)
    ends_without = np.searchsorted(trained, ends)
    bare = vm.bilevel_gae(
        rewards, np.array(values)[trained], ends_without, [1] * len(trained), gamma, lam, gamma_turn
    )
    assert (A[trained] == bare[0]).all() and (R[trained] == bare[1]).all()
    assert not A[np.array(mask) == 0].any() and not R[np.array(mask) == 0].any()
    other = np.where(mask, values, junk)
    assert (vm.bilevel_gae(rewards, other, ends, mask, gamma, lam, gamma_turn)[0] == A).all()


@quick
@given(row=token_rows(), gamma=share, lam=share, gamma_turn=share)
def test_both_identities(row, gamma, lam, gamma_turn):
    rewards, values, ends, mask = row
    trained = np.flatnonzero(mask)
    V = np.array(values)[trained]
    r = np.zeros(len(trained))
    r[np.searchsorted(trained, ends)] = rewards
    A = vm.bilevel_gae(rewards, values, ends, mask, 1.0, lam, 1.0)[0][trained]
    close(vm.bilevel_gae(rewards, values, ends, mask, 1, 1, 1)[0][trained], plain_gae(r, V, 1, 1))
    close(A[-1], plain_gae(r, V, 1, lam)[-1])
    last = np.zeros(len(trained))
    last[-1] = 2.0
    one = vm.bilevel_gae([2.0], values, [ends[-1]], mask, gamma, lam, gamma_turn)[0][trained]
    close(one, plain_gae(last, V, gamma, lam))


def test_a_trajectory_without_turns():
    A, R = vm.bilevel_gae([], [1.0, 2.0], [], [0, 0], 1, 1, 1)
    assert A.tolist() == R.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"turn_ends": [5, 2]}, "turn_ends must be increasing"),
        ({"turn_ends": [2, 2]}, "turn_ends must be increasing"),
        ({"turn_ends": [2, 6]}, "below 6"),
        ({"turn_ends": [-1, 5]}, "turn_ends must be increasing"),
        ({"turn_ends": [2]}, "rewards has 2 entries, but turn_ends has 1"),
        ({"turn_ends": [2, 4]}, "token 5 is trained but in no turn"),
        ({"mask": [1, 1, 0, 1, 1, 1]}, "the mask is 0 at token 2"),
        ({"mask": [1] * 5}, "values has 6 entries, but mask has 5"),
        ({"mask": [2] * 6}, "mask must hold booleans"),
        ({"values": [*V6[:5], float("nan")]}, "must be finite"),
        ({"rewards": [1, float("nan")]}, "must be finite"),
        ({"gamma_turn": 1.1}, r"gamma_turn must be in \[0, 1\]"),
        ({"lam": -1}, r"lam must be in \[0, 1\]"),
        ({"gamma": float("nan")}, r"gamma must be in \[0, 1\]"),
    ],
)
def test_malformed_trajectories(change, words):
    given = dict(rewards=[1, 2], values=V6, turn_ends=[2, 5], mask=[1] * 6, gamma=1, lam=1, gamma_turn=1)
    with pytest.raises(ValueError, match=words):
        vm.bilevel_gae(**{**given, **change})
