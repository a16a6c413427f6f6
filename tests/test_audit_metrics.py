"""What the audit of values measures, by hand."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from verl_multiturn.audit_metrics import Audited, audited, of_audit, ranking

V16 = json.loads((Path(__file__).parent / "data/vineppo_vectors.json").read_text())["V16 pairwise ranking"]
WORTH, VALUES = (
    [0.2, 0.5, 0.5, 0.9],
    [0.3, 0.7, 0.25, 0.8],
)  # one pair is tied, one wrong


def test_pairs_of_equal_worth_are_skipped():
    assert ranking(VALUES, WORTH) == pytest.approx(V16["ties_skipped"])
    assert np.mean(np.abs(np.subtract(VALUES, WORTH))) == pytest.approx(V16["mae"])
    assert ranking(WORTH, WORTH) == 1 and ranking(np.negative(WORTH), WORTH) == 0
    assert ranking([0.4] * 4, WORTH) == 0.5  # a constant decides nothing
    assert ranking([0.3, 0.3, 0.25, 0.8], WORTH) == pytest.approx((3 + 0.5) / 5)


def test_pairs_of_one_group():
    """The wrong pair is of two groups, the tied one of one."""
    assert ranking(VALUES, WORTH, ["a", "b", "b", "a"]) == 1
    assert ranking(VALUES, WORTH, ["a", "b", "a", "b"]) == 0.5
    assert math.isnan(ranking(VALUES, WORTH, ["a", "b", "b", "c"])) and math.isnan(ranking([1], [1]))


def test_order_and_relabelling_change_nothing():
    random = np.random.default_rng(0)
    V, W, groups = random.integers(5, size=30), random.integers(5, size=30), random.integers(4, size=30)
    order = random.permutation(30)
    assert ranking(V, W, groups) == ranking(V[order], W[order], groups[order])
    assert ranking(V, W) == ranking(V[order], W[order])
    assert ranking(V, W) + ranking(-V, W) == pytest.approx(1)


class Rows:
    """As much of `rollout.rows.Rows` as is read."""

    keys = ("g_0_0", "pad", "h_0_0", "h_1_0")

    def __init__(self, places):
        self.places = places


def test_values_are_joined_to_the_states_they_were_given_to():
    """Turns are named by their index, whatever row they are in; holes and states without returns are not."""
    one = {"audit": {"returns": {"0": [1.0, 0.0], "2": [1.0, 1.0]}}}
    two = {"audit": {"returns": {"0": [], "1": [0.0, 0.5]}}}
    rows = Rows(
        [
            (2, {"index": 1, "value": 0.25, "steps": [{"value": 0.75}, {"value": 0.1}]}, two),
            (0, {"index": 2, "value": 0.9}, one),
            (2, {"index": 0, "value": 0.5}, two),
            (0, {"index": 0, "value": math.nan}, one),
            (0, {"index": 1, "value": 0.2}, one),
            (3, {"index": 0, "value": 0.3}, {}),
        ]
    )
    assert audited(rows) == [Audited("h", 0.75, [0.0, 0.5]), Audited("g", 0.9, [1.0, 1.0])]


def test_of_audit():
    """Means 0.25, 1 and 0.5; values 0.5, 0.75 and 0.5."""
    states = [Audited("h", 0.5, [0.0, 0.5]), Audited("g", 0.75, [1.0, 1.0]), Audited("h", 0.5, [0.5, 0.5])]
    played = {"rollouts": 6, "failed": 1, "tokens": 40, "seconds": 2.0}
    found = of_audit(states, [{"audit": played}, {}, {"audit": played | {"rollouts": 2, "seconds": 3.0}}])
    expected = {
        "states": 3, "rollouts": 8, "failed_share": 0.25, "tokens": 80, "seconds": 3.0, "error": 0.5 / 3,
        "bias": 0, "constant_error": 0.75 / 3, "standard_error": 0.25 / 3, "ranking": (1 + 1 + 0.5) / 3,
        "group_ranking": 0.5,
    }  # fmt: skip
    assert found == pytest.approx({f"multiturn/audit/{name}/mean": one for name, one in expected.items()})
    nothing = of_audit([], [{"audit": played}])
    assert nothing["multiturn/audit/states/mean"] == 0 and "multiturn/audit/error/mean" not in nothing
