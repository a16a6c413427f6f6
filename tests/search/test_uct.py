"""UCT against data/qvalue_vectors.json, by law, and against the original's double division."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verl_multiturn as vm

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "qvalue_vectors.json").read_text())


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9)


def test_v1_selection():
    given = VECTORS["V1_uct_select"]
    n = np.array(given["n"])
    scores = vm.uct(np.array(given["q"]) * n, n, given["n_parent"])
    close(scores, given["scores"])
    assert scores.argmax() == given["argmax"]
    assert vm.uct(0, 0, 10) == float(given["unvisited"])


def test_b1_the_mean_is_not_divided_by_n_again():
    given = VECTORS["V2_uct_repo_double_division"]
    q, n = np.array(given["q"]), np.array(given["n"])
    ours, original = vm.uct(q * n, n, given["n_parent"]), vm.uct(q, n, given["n_parent"])
    close(ours, given["ref"]), close(original, given["repo"])
    assert (ours.argmax(), original.argmax()) == (given["ref_argmax"], given["repo_argmax"])


def test_v10_virtual_loss_is_uct_on_shifted_counts():
    given = VECTORS["V10_virtual_loss"]
    n, W, parent = np.array(given["n"]), np.multiply(given["q"], given["n"]), given["n_parent"]
    flying = np.zeros(2)
    for turn, pick in enumerate(given["picks"], start=1):
        scores = vm.uct(W - given["virtual_loss"] * flying, n + flying, parent + flying.sum())
        close(scores, given[f"scores{turn}"])
        assert scores.argmax() == pick
        flying[pick] += 1


def test_broadcasting():
    W, N = np.ones((2, 1)), np.array([1, 2, 0])
    scores = vm.uct(W, N, [[4], [9]], c=0.5)
    assert scores.shape == (2, 3) and scores.dtype == np.float64
    close(scores[1, 1], 0.5 + 0.5 * np.sqrt(np.log(9) / 2))
    assert np.isinf(scores[:, 2]).all()
    assert vm.uct(3, 4, 5).shape == ()
    close(vm.uct(3, 4, 5, c=0), 0.75)
    close(vm.uct(3, 1, 1), 3)


@settings(max_examples=50, deadline=None)
@given(st.floats(-9, 9), st.integers(1, 99), st.integers(0, 99), st.floats(0, 3))
def test_laws(Q, N, more, c):
    parent = N + more
    score = vm.uct(Q * N, N, parent, c)
    assert score >= Q - 1e-9
    assert vm.uct(Q * N + 1, N, parent, c) > score
    assert vm.uct(Q * N, N, parent + 1, c) >= score
    assert vm.uct(Q * (N + 1), N + 1, parent + 1, c) <= vm.uct(Q * N, N, parent + 1, c) + 1e-9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1, np.nan], [1, 1], 2), "W must be finite: entry 1 is nan"),
        ((1, -1, 2), "N must be at least 0, not -1"),
        ((1, 1, 0), "N_parent must be at least 1 where the child was visited"),
        ((1, 1, np.inf), "N_parent must be finite"),
        (([1, 2], [1, 2, 3], 4), r"shapes do not go together: W \(2,\), N \(3,\)"),
        ((1, 1, 1, -1), "c must lie in"),
        (("1", 1, 1), "W must hold numbers"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(ValueError, match=words):
        vm.uct(*arguments)
