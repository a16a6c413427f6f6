"""The rewards that are trained on: normalised, placed, less their penalties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_multiturn.rewards import Normalize, per_turn, trained_reward


def test_the_return_stands_on_the_last_turn_whatever_the_order_of_rows():
    found = per_turn(
        ["b", "a", "a", "b"], [1, 0, 1, 0], [2.0, 1.0, 0.0, 0.5], {"a": 0, "b": 0}, Normalize(), False
    )
    assert found.tolist() == [2.5, 0.0, 1.0, 0.0]


def test_turn_rewards_stay_where_they_are():
    assert per_turn(["a", "a"], [0, 1], [1.0, 2.0], {"a": 0}, Normalize(), True).tolist() == [1.0, 2.0]


def test_returns_are_normalised_beside_those_of_equal_key():
    """{1, 0, 0, 0}: ddof 1, + 1e-6; {2, 2}: 0 (vector 10 of starpo.json)."""
    R, keys = [1, 0, 0, 0, 2, 2], ["g"] * 4 + ["h"] * 2
    assert Normalize("group", "mean_std")(R, keys) == pytest.approx(
        [1.499997] + [-0.499999] * 3 + [0, 0], abs=1e-6
    )
    assert Normalize("group", "mean")(R, keys) == pytest.approx([0.75, -0.25, -0.25, -0.25, 0, 0])
    many = Normalize("batch", "asym_clip")([100.0] + [0.0] * 99, [0] * 100)
    assert many.max() == 3.0 and Normalize("batch", "mean_std")([100.0] + [0.0] * 99, [0] * 100).max() > 9


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12), st.floats(-5, 5))
def test_a_shift_of_all_returns_changes_nothing(R, shift):
    for method in ("mean", "mean_std", "asym_clip"):
        one = Normalize("batch", method)(R, [0] * len(R))
        assert np.isfinite(one).all()
        if np.std(R) > 1e-3:
            assert one == pytest.approx(
                Normalize("batch", method)([r + shift for r in R], [0] * len(R)), abs=1e-4
            )


def test_a_penalty_comes_off_the_reward():
    assert trained_reward({"reward": 1.0, "penalty": 0.1}) == 0.9 and trained_reward({"reward": 1.0}) == 1.0


@pytest.mark.parametrize(
    ("given", "words"), [({"by": "grup"}, "'group'"), ({"method": "meanstd"}, "'mean_std'")]
)
def test_unknown_values(given, words):
    with pytest.raises(ValueError, match=f"Did you mean {words}"):
        Normalize(**given)
