"""ArCHer's equations against data/archer_vectors.json (inputs: the spec's vector table) and by law.

Not here: A2, A4, A6-A8, A12, A13, A15, A17 and A18 concern the critic's networks, replay and actor,
A16 is `gae` over turns and is met in test_returns.py.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verl_multiturn as vm
from verl_multiturn.algorithms.archer import awr_weights, expectile, policy_targets, scaled
from verl_multiturn.returns import returns_to_go
from verl_multiturn.turns import TurnBatch

VECTORS = json.loads((Path(__file__).parent / "data" / "archer_vectors.json").read_text())
quick = settings(max_examples=50, deadline=None)
numbers = st.floats(-1e3, 1e3)
taus = st.floats(0.01, 0.99)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9)


def test_a1_q_targets():
    v1, v2 = [-3, -2, 5, 5], [-2.5, -2.2, 5, 5]
    y1, y2 = vm.q_targets([-1, -1, 0, -1], [0, 0, 1, 1], v1, v2, 0.95)
    close(y1, VECTORS["A1 Q targets gamma=.95"]["y1"])
    close(y2, VECTORS["A1 Q targets gamma=.95"]["y2"])
    assert y1.shape == y2.shape == (4,) and y1.dtype == np.float64


def test_a11_turn_limit_as_an_end_or_bootstrapped():
    expected = VECTORS["A11 time limit"]
    close(vm.q_targets([-1], [True], [-4], [-4], 0.95)[0], expected["as_terminal"])
    close(vm.q_targets([-1], [False], [-4], [-4], 0.95)[0], -1 + 0.95 * -4)
    close(expected["bootstrapped"], [-4.8])


def test_the_minimum_is_not_in_the_targets():
    y1, y2 = vm.q_targets([0], [0], [1], [2], 1.0)
    assert (y1[0], y2[0]) == (1, 2)


@quick
@given(st.lists(st.tuples(numbers, st.booleans(), numbers, numbers), min_size=1, max_size=6), st.floats(0, 1))
def test_q_targets_by_definition(rows, gamma):
    r, d, v1, v2 = (list(column) for column in zip(*rows, strict=True))
    y1, y2 = vm.q_targets(r, d, v1, v2, gamma)
    close(y1, [a if end else a + gamma * v for a, end, v in zip(r, d, v1, strict=True)])
    close(vm.q_targets(r, d, v1, v2, 0.0), [r, r])
    close(y2, vm.q_targets(r, d, v2, v1, gamma)[0])


def test_nothing_is_read_after_an_end():
    y1, y2 = vm.q_targets(np.array([1.0, 0]), np.array([1, 0]), [np.nan, 2], [np.inf, 3], 0.5)
    assert y1.tolist() == [1, 1] and y2.tolist() == [1, 1.5]


def test_a3_each_minimum_on_its_own():
    expected = VECTORS["A3 advantage"]
    q1, q2 = np.array([-3.6, -2.9, 0.3, -0.9]), np.array([-3.8, -3.1, 0.5, -0.8])
    v1, v2 = np.array([-3.2, -3.2, 0.0, -1.0]), np.array([-3.6, -3.0, 0.2, -0.9])
    close(vm.critic_advantage(q1, q2, v1, v2), expected["adv"])
    minimum = np.minimum(q1 - v1, q2 - v2)
    close(minimum, expected["alternative_min_of_differences"])
    assert (abs(minimum - expected["adv"]) > 1e-9).tolist() == expected["differs"]


@quick
@given(st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=1, max_size=6), numbers)
def test_advantage_laws(rows, shift):
    q1, q2, v1, v2 = np.array(rows).T
    A = vm.critic_advantage(q1, q2, v1, v2)
    close(vm.critic_advantage(q2, q1, v2, v1), A)
    close(vm.critic_advantage(q1 + shift, q2 + shift, v1 + shift, v2 + shift), A)
    close(vm.critic_advantage(q1, q2, q2, q1), np.zeros(len(A)))


def test_a5_monte_carlo_targets_are_returns_to_go():
    expected = VECTORS["A5 MC returns"]

    def G(r, gamma):
        n = len(r)
        return returns_to_go(TurnBatch.from_lists([0] * n, [0] * n, list(range(n)), r), gamma)

    close(G([-1, -1, -1, 0], 0.95), expected["solved_turn4"])
    close(G([-1, -1, -1, 0], 1.0)[0], expected["undiscounted4"])
    close(G([-1] * 20, 1.0)[0], expected["unsolved_undiscounted"])
    close(G([-1] * 20, 0.95)[0], expected["unsolved_g95"])


def test_a9_expectile_loss_and_its_minimiser():
    expected, u = VECTORS["A9 expectile loss"], [1, -1, 0.5, -0.25]
    close(vm.expectile_loss(u, 0.9), expected["tau_0p9"])
    close(vm.expectile_loss(u, 0.5), expected["tau_0p5"])
    close(np.mean(np.square(u)) / 2, expected["half_mse"])
    close(expectile([0, 1], 0.9), expected["minimiser_q01_tau_0p9"])
    close(expectile([-3, -1, 0], 0.9), expected["minimiser_3pt"])
    close(expectile([-3, -1, 0], 0.5), expected["mean_3pt"])


@quick
@given(st.lists(numbers, min_size=1, max_size=8), taus, st.floats(-10, 10))
def test_expectile_minimises_the_loss(x, tau, step):
    v, x = expectile(x, tau), np.array(x)
    best = vm.expectile_loss(x - v, tau)
    assert best <= vm.expectile_loss(x - v - step, tau) + 1e-6
    assert min(x) - 1e-9 <= v <= max(x) + 1e-9
    close(expectile(np.repeat(x, 2), tau), v)
    close(expectile(x, tau, weights=np.full(len(x), 3.0)), v)


def test_a10_weights_of_recorded_utterances():
    expected, A = VECTORS["A10 AWR weights beta=1"], [-2, -0.5, 0, 0.5, 3, 8]
    close(awr_weights(A), expected["raw"])
    close(awr_weights(A, clip=20), expected["clipped_20"])
    assert awr_weights([1e6], clip=20).tolist() == [20]
    with pytest.raises(ValueError, match="give a clip"):
        awr_weights([1e6])


def test_a14_what_v_learns_under_each_rule():
    expected, Q, old, new = VECTORS["A14 V target"], np.array([-2.0, -1.0]), [0.8, 0.2], [0.3, 0.7]
    draws = [[-2.0] * 8 + [-1.0] * 2, [-2.0] * 3 + [-1.0] * 7]  # ten utterances as each policy draws them
    close(policy_targets(draws), [expected["behaviour_sarsa"], expected["current_policy"]])
    close(expectile(Q, 0.9, old), expected["iql_0p9_behaviour"])
    close(expectile(Q, 0.5, new), expected["current_policy"])
    close(policy_targets(Q), Q)  # M = 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: vm.q_targets([1, 2], [0], [1, 2], [1, 2], 1), "dones has 1 entries, but rewards has 2"),
        (lambda: vm.q_targets([1], [0], [1, 2], [1], 1), "v1_next has 2 entries, but rewards has 1"),
        (lambda: vm.q_targets([np.nan], [1], [1], [1], 1), "rewards must be finite: entry 0 is nan"),
        (lambda: vm.q_targets([1], [0], [1], [np.nan], 1), "v2_next must be finite"),
        (lambda: vm.q_targets([1], [0.5], [1], [1], 1), "dones must hold booleans"),
        (lambda: vm.q_targets([1], [0], [1], [1], 1.1), r"gamma must lie in \[0, 1\], not 1.1"),
        (lambda: vm.q_targets([1], [0], [1], [1], np.nan), "gamma must lie"),
        (lambda: vm.q_targets(["1"], [0], [1], [1], 1), "rewards must hold numbers"),
        (lambda: vm.q_targets([[1]], [0], [1], [1], 1), "one-dimensional"),
        (lambda: vm.q_targets([], [], [], [], 1), "rewards is empty"),
        (lambda: vm.critic_advantage([1], [1], [1, 2], [1]), "v1 has 2 entries, but q1 has 1"),
        (lambda: vm.critic_advantage([1], [np.nan], [1], [1]), "q2 must be finite"),
        (lambda: vm.expectile_loss([1], 0), r"tau must lie in \(0, 1\), not 0"),
        (lambda: vm.expectile_loss([1], 1.0), "tau must lie"),
        (lambda: vm.expectile_loss([1], "0.9"), "tau must lie"),
        (lambda: vm.expectile_loss([1, np.nan], 0.9), "u must be finite: entry 1"),
        (lambda: vm.expectile_loss([[1], [1, 2]], 0.9), "u must hold numbers"),
        (lambda: expectile([1, 2], 0.9, [1]), "weights has 1 entries"),
        (lambda: expectile([1, 2], 0.9, [-1, 1]), "weights must be at least 0"),
        (lambda: policy_targets([[[1.0]]]), "q_policy must be"),
        (lambda: awr_weights([1.0], beta=0), "beta must lie"),
    ],
)
def test_one_sentence_says_what_is_wrong(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_advantages_are_scaled_by_tokens():
    """The paper's actor takes them as they are; std keeps the sign; tokens weigh mean and deviation."""
    A = [0.5, -0.25, 1.0]
    close(scaled(A), A)
    close(scaled(A, "std"), np.array(A) / np.std(A))
    close(scaled(A, "std", tokens=[1, 2, 0])[:2], np.array(A[:2]) / np.std([0.5, -0.25, -0.25]))
    close(scaled(A, "whiten"), (np.array(A) - np.mean(A)) / np.sqrt(np.var(A, ddof=1) + 1e-8))
    close(scaled(A, clip=0.4), [0.4, -0.25, 0.4])
    close(scaled([2.0, 2.0], "std"), [2, 2])
    with pytest.raises(ValueError, match="Did you mean 'whiten'"):
        scaled(A, "whitened")
    with pytest.raises(ValueError, match="tokens has 2 entries, but advantages has 3"):
        scaled(A, tokens=[1, 2])
