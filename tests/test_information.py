"""Mutual information against vector 12 of data/starpo_vectors.json, exact values and its laws."""

import json
from math import log
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_multiturn.algorithms.information import RANKS, mutual_information, sample_pairs

VECTOR = json.loads((Path(__file__).parent / "data" / "starpo_vectors.json").read_text())["12_mi"]
L12 = [[-2, -6, -6], [-9, -3, -3], [-3.9, -4, -4]]
GIVEN = dict(log_probs=L12, lengths=[2, 3, 4], own=[0, 1, 2], prompts=["a", "b", "b"])
INFORMATION = ("mi_sequence", "mi_per_token", "mi_mean_of_tokens")
quick = settings(max_examples=100, deadline=None)


def close(actual, expected, atol=1e-12):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def test_vector_12():
    found = mutual_information(**GIVEN)
    close(found["mi_mean_of_tokens"], VECTOR["mi_token_repo"])
    close(found["mi_per_token"], VECTOR["mi_token_paper"])
    close(found["mi_sequence"], VECTOR["mi_seq"])
    close(found["mi_z_score"], VECTOR["mi_zscore"])
    close(found["reasoning_entropy_given_prompt"], VECTOR["cond_entropy_token"])
    close(found["retrieval_at_1"], VECTOR["retrieval_acc"])
    close(found["retrieval_chance_at_1"], VECTOR["chance"])
    close(found["mi_bound"], VECTOR["upper_bound"])


def test_vector_12_further_ranks():
    """Of two random columns, "a" is one with probability 2/3, a "b" always."""
    found = mutual_information(**GIVEN)
    close(found["retrieval_chance_at_2"], (2 / 3 + 1 + 1) / 3)
    close([found[f"retrieval_at_{k}"] for k in (2, 4, 8)], [1, 1, 1])
    close([found[f"retrieval_chance_at_{k}"] for k in (4, 8)], [1, 1])


def test_a_channel_with_a_known_information():
    """Binary symmetric channel, reasonings in exact proportion: I = log 2 − H(1/4)."""
    p = np.array([[0.75, 0.25], [0.25, 0.75]])  # p(z | x)
    z = np.array([0, 0, 0, 1, 1, 1, 1, 0])
    own = np.repeat([0, 1], 4)
    found = mutual_information(np.log(p[:, z].T), [1] * 8, own)
    entropy = -(0.75 * log(0.75) + 0.25 * log(0.25))
    for name in INFORMATION:
        close(found[name], log(2) - entropy)
    close(found["reasoning_entropy"], log(2))
    close(found["reasoning_entropy_given_prompt"], entropy)
    close(found["retrieval_at_1"], 0.75)


def test_reasonings_that_give_their_prompt_away():
    L = np.full((8, 8), -1e5) + np.diag(np.full(8, 1e5 - 1000.0))  # exp underflows everywhere
    found = mutual_information(L, [100] * 8, range(8))
    close([found["mi_sequence"], found["mi_per_token"]], [log(8), log(8) / 100])
    close([found["mi_mean_of_tokens"], found["retrieval_at_1"]], [log(8), 1])
    close([found[f"retrieval_chance_at_{k}"] for k in RANKS], [1 / 8, 1 / 4, 1 / 2, 1])


def test_prompts_are_distinct_unless_they_say_otherwise():
    apart = mutual_information(**{**GIVEN, "prompts": None})
    close([apart["retrieval_at_1"], apart["retrieval_chance_at_1"]], [(1 + 1 / 2) / 3, 1 / 3])
    named = mutual_information(**{**GIVEN, "prompts": [(1, 2), (1, 3), (1, 4)]})
    assert apart == named


def test_identical_prompts_that_round_differently_are_one():
    L = [[-2 - 1e-9, -2, -2], [-5, -1, -1]]
    found = mutual_information(L, [1, 1], [0, 1], ["a", "a", "b"])
    close(found["retrieval_at_1"], 2 / 3)  # "b" ties with the better copy: one of three columns misses


def test_a_deviation_of_ones_own():
    own = mutual_information(**GIVEN)
    again = mutual_information(**GIVEN, marginal_std=own["mi_marginal_std"])
    assert again == own and own["mi_marginal_std"] > 0
    close(mutual_information(**GIVEN, marginal_std=1.0)["mi_z_score"], own["mi_mean_of_tokens"] / 1.001)


@st.composite
def samples(draw):
    """Arguments of mutual_information, ties and repeated prompts included."""
    n, P = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    number = st.one_of(st.sampled_from([-1.0, -2.0]), st.floats(-300, 0))
    L = np.array(draw(st.lists(number, min_size=n * P, max_size=n * P))).reshape(n, P)
    prompts = draw(st.lists(st.sampled_from("abcd"), min_size=P, max_size=P))
    L = L[:, [prompts.index(prompt) for prompt in prompts]]  # identical prompts score the same
    lengths = draw(st.lists(st.integers(1, 40), min_size=n, max_size=n))
    return (
        L,
        np.array(lengths),
        np.array(draw(st.lists(st.integers(0, P - 1), min_size=n, max_size=n))),
        prompts,
    )


@quick
@given(sample=samples())
def test_information_is_bounded_and_a_difference_of_entropies(sample):
    found = mutual_information(*sample)
    assert all(found[name] <= found["mi_bound"] + 1e-9 for name in INFORMATION)
    for name, suffix in (("mi_sequence", "_sequence"), ("mi_per_token", "")):
        H, H_given = found[f"reasoning_entropy{suffix}"], found[f"reasoning_entropy_given_prompt{suffix}"]
        close(found[name], H - H_given, atol=1e-9)
    for kind in ("at", "chance_at"):
        shares = [found[f"retrieval_{kind}_{k}"] for k in RANKS]
        assert shares == sorted(shares) and 0 <= shares[0] and shares[-1] <= 1
    assert found["retrieval_at_8"] == found["retrieval_chance_at_8"] == 1


@quick
@given(sample=samples(), data=st.data())
def test_the_order_of_reasonings_and_prompts_changes_nothing(sample, data):
    L, lengths, own, prompts = sample
    rows = data.draw(st.permutations(range(len(L))))
    columns = data.draw(st.permutations(range(len(prompts))))
    moved = mutual_information(
        L[rows][:, columns], lengths[rows], np.argsort(columns)[own[rows]], [prompts[j] for j in columns]
    )
    before = mutual_information(*sample)
    assert list(moved) == list(before)
    close(list(moved.values()), list(before.values()), atol=1e-9)


@quick
@given(sample=samples())
def test_every_prompt_twice_adds_to_the_bound_only(sample):
    L, lengths, own, prompts = sample
    once, twice = (
        mutual_information(*sample),
        mutual_information(np.hstack([L, L]), lengths, own, prompts * 2),
    )
    for name in (*INFORMATION, "mi_z_score", "reasoning_entropy", "retrieval_at_1", "retrieval_chance_at_1"):
        close(twice[name], once[name], atol=1e-9)
    close(twice["mi_bound"], once["mi_bound"] + log(2))


@quick
@given(sample=samples(), constant=st.floats(-1e4, 0))
def test_prompts_that_make_no_difference_give_exactly_nothing(sample, constant):
    L, lengths, own, prompts = sample
    found = mutual_information(np.full(L.shape, constant), lengths, own, prompts)
    assert [found[name] for name in (*INFORMATION, "mi_z_score")] == [0, 0, 0, 0]
    for k in RANKS:
        assert found[f"retrieval_at_{k}"] == found[f"retrieval_chance_at_{k}"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"log_probs": [-1, -2]}, r"an \(n, P\) matrix with n, P ≥ 1, not of shape \(2,\)"),
        ({"log_probs": np.zeros((0, 3))}, r"not of shape \(0, 3\)"),
        ({"log_probs": [[-1], [-1, -2]]}, "log_probs must be a matrix of numbers"),
        ({"log_probs": [[-1, float("nan"), -1], *L12[1:]]}, "reasoning 0 has nan under prompt 1"),
        ({"log_probs": [*L12[:2], [-1, -2, -float("inf")]]}, "reasoning 2 has -inf under prompt 2"),
        ({"log_probs": -np.array(L12)}, "at most 0: reasoning 0 has 2.0 under prompt 0"),
        ({"lengths": [2, 3]}, "lengths has 2 entries, but log_probs has 3 reasonings"),
        ({"lengths": [2, 0, 4]}, "at least 1: reasoning 1 has 0"),
        ({"lengths": [2, float("nan"), 4]}, "lengths must hold whole numbers"),
        ({"own": [0, 1]}, "own has 2 entries"),
        ({"own": [0, 1, 3]}, "columns from 0 to 2: reasoning 2 has 3"),
        ({"own": [-1, 1, 2]}, "reasoning 0 has -1"),
        ({"prompts": ["a", "b"]}, "prompts has 2 entries, but log_probs has 3 prompts"),
        ({"prompts": [["a"], ["b"], ["c"]]}, "prompts must be hashable"),
        ({"marginal_std": float("nan")}, "marginal_std must be a number of at least 0, not nan"),
    ],
)
def test_malformed_samples(change, words):
    with pytest.raises(ValueError, match=words):
        mutual_information(**{**GIVEN, **change})


# --- Which reasonings to score ---

TOKENS = [[5], [3] * 99, [0, 4], [0, 0], []]  # 2 trajectories without a first reasoning to score


def rng(seed=0):
    return np.random.default_rng(seed)


def test_a_long_trajectory_weighs_no_more_than_a_short_one():
    pairs = sample_pairs(TOKENS, 6000, rng())
    assert pairs.shape == (6000, 2) and pairs.dtype == np.int64
    assert all(TOKENS[i][t] > 0 for i, t in pairs.tolist())
    share = np.bincount(pairs[:, 0], minlength=5) / 6000
    close(share, [1 / 3, 1 / 3, 1 / 3, 0, 0], atol=0.03)
    turns = np.bincount(pairs[pairs[:, 0] == 1, 1], minlength=99)
    assert turns.min() > 0 and turns.max() < 60  # 20 each on average


def test_first_turns_are_distinct():
    assert sample_pairs(TOKENS, 64, rng(), "first_turn").tolist() == [[0, 0], [1, 0]]
    pairs = sample_pairs([[1]] * 100, 10, rng(), "first_turn")
    assert len(set(pairs[:, 0].tolist())) == len(pairs) == 10 and not pairs[:, 1].any()


@pytest.mark.parametrize("rule", ["trajectory", "first_turn"])
def test_the_generator_decides(rule):
    tokens = [[1, 1]] * 50
    first = sample_pairs(tokens, 20, rng(1), rule).tolist()
    assert first == sample_pairs(tokens, 20, rng(1), rule).tolist()
    assert first != sample_pairs(tokens, 20, rng(2), rule).tolist()


@pytest.mark.parametrize("rule", ["trajectory", "first_turn"])
@pytest.mark.parametrize("tokens", [[], [[]], [[0, 0], [0]]])
def test_nothing_to_draw(rule, tokens):
    assert sample_pairs(tokens, 4, rng(), rule).shape == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((TOKENS, 4, rng(), "first_turns"), "unknown rule 'first_turns'; .* Did you mean 'first_turn'"),
        ((TOKENS, 0, rng()), "n must be a number of pairs of at least 1, not 0"),
        (([[1], [2, -1]], 4, rng()), r"trajectory 1 has \[2, -1\]"),
        (([[1], [0.5]], 4, rng()), r"reasonings\[1\] must hold whole numbers"),
    ],
)
def test_impossible_draws(arguments, words):
    with pytest.raises(ValueError, match=words):
        sample_pairs(*arguments)
