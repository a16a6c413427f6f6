"""The metrics of a run: names that verl does not reduce again, and numbers worked out by hand."""

import numpy as np
import pytest

from verl_multiturn import metrics
from verl_multiturn.turns import TurnBatch


def session(success, turns, result, seconds=1.0):
    scores = {"success": float(success), "turns": float(turns), "valid": 1.0, "truncated": 0.0}
    return {"scores": scores, "return": result, "seconds": seconds}


def test_of_sessions():
    found = metrics.of_sessions([session(1, 2, 1.0), session(0, 6, -0.5, 2.0)])
    expected = {
        "success": 0.5, "turns": 4.0, "valid": 1.0, "truncated": 0.0, "return": 0.25,
        "episode_seconds": 1.5, "trajectories": 2.0,
    }  # fmt: skip
    assert found == {f"multiturn/{name}/mean": value for name, value in expected.items()}


def test_of_turns():
    turns = TurnBatch.from_lists(
        group=["g"] * 4, trajectory=[0, 0, 1, 1], index=[0, 1, 0, 1], reward=[0, 1, 0, 0],
        anchor=["a", "b", "a", "c"],
    )  # fmt: skip
    found = metrics.of_turns(turns, np.array([1.0, 0.0, -1.0, 0.0]))
    assert found["multiturn/zero_advantage/mean"] == 0.5
    assert found["multiturn/advantage_std/mean"] == pytest.approx(0.5**0.5)
    assert found["multiturn/anchor_group_size/mean"] == pytest.approx(4 / 3)
    assert found["multiturn/anchor_singleton_share/mean"] == 0.5
    for name in found:  # verl picks a reduction by these words
        assert name.startswith("multiturn/") and name.endswith("/mean")
        assert not any(word in name for word in ("max", "min", "sum", "total"))


def won(success, task_type="near", turns=2):
    return {"task_type": task_type, "success": success, "return": float(success), "turns": [None] * turns}


def test_of_validation():
    found = metrics.of_validation([won(True), won(True, "far", 4), won(False, "far"), won(False)], expected=6)
    assert found["val/episodes"] == 4 and found["val/failed"] == 2
    assert found["val/success"] == 0.5 and found["val/turns"] == 2.5
    # Wilson 1927 for 2 of 4 at z = 1.96.
    assert (found["val/success_low"], found["val/success_high"]) == pytest.approx((0.15, 0.85), abs=1e-3)
    assert found["val/success/near"] == 0.5 and found["val/success/far"] == 0.5


def test_of_validation_with_one_type_and_with_nothing():
    assert metrics.of_validation([won(True)], 1)["val/success/near"] == 1  # a name may say what was played
    assert "val/success/default" not in metrics.of_validation([won(True, "default")], 1)
    assert metrics.of_validation([], 8) == {"val/episodes": 0.0, "val/failed": 8.0}


def test_of_several_panels():
    """The run's own numbers stay where they were; each further panel has its own, failures included."""
    own = [won(True) | {"split": "val", "panel": "val"}, won(False, "far") | {"split": "val", "panel": "val"}]
    seen = [
        won(True, task_type) | {"split": "val", "panel": "train"} for task_type in ("near", "near", "far")
    ]
    found = metrics.of_panels([*seen, *own], expected=12, also={"train": 4, "unseen": 5})
    also = {name: value for name, value in found.items() if name.startswith(("val/train/", "val/unseen/"))}
    assert {name: value for name, value in found.items() if name not in also} == metrics.of_validation(own, 3)
    alone = metrics.of_validation(seen, 4)
    assert {name.replace("val/train/", "val/"): v for name, v in also.items() if "train" in name} == alone
    assert (also["val/train/success"], also["val/train/success/far"], also["val/train/failed"]) == (1, 1, 1)
    assert also["val/train/success_low"] == pytest.approx(3 / (3 + 1.96**2))  # Wilson at k = n
    assert (also["val/unseen/episodes"], also["val/unseen/failed"]) == (0, 5)
    assert "val/unseen/success" not in also
