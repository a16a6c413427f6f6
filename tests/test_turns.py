"""The data model: what a batch accepts, what it refuses and in which words."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest

from verl_multiturn.turns import Trajectory, Turn, TurnBatch

ROWS = dict(group=["g"] * 3, trajectory=["a", "a", "b"], index=[0, 1, 0], reward=[0.0, 1.0, 2.0])


def batch(**changes):
    return TurnBatch.from_lists(**{**ROWS, **changes})


def test_lists_arrays_and_tuples_are_one():
    lists = batch(anchor=["x", "y", "x"])
    arrays = TurnBatch.from_lists(
        group=np.array(["g"] * 3),
        trajectory=np.array(["a", "a", "b"]),
        index=np.array([0, 1, 0], np.int32),
        reward=np.array([0, 1, 2], np.float32),
        anchor=np.array(["x", "y", "x"], object),
    )
    for name in ("group_code", "trajectory_code", "anchor_code", "order", "reward", "last"):
        np.testing.assert_array_equal(getattr(lists, name), getattr(arrays, name))
    assert lists.reward.dtype == np.float64 and len(lists) == 3
    assert "3 turns, 2 trajectories, 1 groups" in repr(lists)


@pytest.mark.parametrize("field", ["group", "trajectory", "anchor"])
def test_ids_may_be_tuples_of_equal_length(field):
    column = {
        "group": [(1, 2)] * 3,
        "trajectory": [("a", 0), ("a", 0), ("a", 1)],
        "anchor": [(1, 2), (3, 4), (1, 2)],
    }[field]
    turns = batch(**{field: column})
    assert turns.trajectory_code.tolist() == [0, 0, 1]
    assert list(getattr(turns, field)) == column


def test_same_trajectory_name_in_two_groups_is_two_trajectories():
    turns = TurnBatch.from_lists(
        group=["g", "h"], trajectory=[0, 0], index=[0, 0], reward=[1, 2], anchor=["s", "s"]
    )
    assert len(set(turns.trajectory_code.tolist())) == 2
    assert len(set(turns.anchor_code.tolist())) == 2  # equal text under another uid stays apart


def test_an_anchor_that_is_none_equals_no_other():
    assert len(set(batch().anchor_code.tolist())) == 3
    assert len(set(batch(anchor=[None, None, "s"]).anchor_code.tolist())) == 3


def test_anchor_text_defaults_to_string_anchors():
    assert list(batch(anchor=["x", "y", "z"]).anchor_text) == ["x", "y", "z"]
    assert batch(anchor=[1, 2, 3]).anchor_text is None
    assert list(batch(anchor=[1, 2, 3], anchor_text=["p", "q", "r"]).anchor_text) == ["p", "q", "r"]


def test_ends_by_default_and_by_implication():
    assert batch().terminated.tolist() == [False, True, True]
    assert not batch().truncated.any()
    cut = batch(truncated=[False, True, False])
    assert cut.terminated.tolist() == [False, False, True]
    ended = batch(terminated=[0, 0, 1])
    assert ended.truncated.tolist() == [False, True, False]
    neither = batch(terminated=[0, 0, 0], truncated=[0, 0, 0])
    assert not neither.terminated.any() and not neither.truncated.any()


def test_layout_of_shuffled_rows():
    turns = TurnBatch.from_lists(
        group=["g"] * 5, trajectory=list("abaab"), index=[2, 0, 0, 1, 1], reward=[0] * 5
    )
    assert [turns.order[s : s + n].tolist() for s, n in zip(turns.starts, turns.lengths, strict=True)] == [
        [2, 3, 0],
        [1, 4],
    ]
    assert [sorted(rows.tolist()) for rows in turns.by_time] == [[1, 2], [3, 4], [0]]
    assert turns.last.tolist() == [True, False, False, False, True]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index": [0, 0, 0]}, r"index: trajectory 'a' of group 'g' has turn 0 twice"),
        ({"index": [0, 2, 0]}, r"index: trajectory 'a' of group 'g' has a gap, turn 1 is missing"),
        ({"index": [0, 1, 1]}, r"index: trajectory 'b' of group 'g' has a gap, turn 0 is missing"),
        ({"index": [0, 1, -1]}, r"'b' of group 'g' has the negative turn -1"),
        ({"index": [0, 1.5, 0]}, r"index must hold whole numbers"),
        ({"index": [0, 1]}, r"index has 2 entries, but group has 3"),
        ({"reward": [0, 1]}, r"reward has 2 entries, but group has 3"),
        ({"trajectory": ["a"]}, r"trajectory has 1 entries, but group has 3"),
        ({"anchor": ["a"]}, r"anchor has 1 entries, but group has 3"),
        ({"reward": [0, math.nan, 0]}, r"reward must be finite: turn 1 of trajectory 'a' .* nan"),
        ({"reward": [0, None, 0]}, r"reward must be finite: turn 1 of trajectory 'a'"),
        ({"reward": [0, math.inf, 0]}, r"reward must be finite: turn 1 of trajectory 'a'"),
        ({"reward": ["0", "1", "0"]}, r"reward must hold numbers"),
        ({"reward": [[0], [1], [0]]}, r"reward must be a list or a one-dimensional array"),
        ({"reward": [[0], [1, 2], [0]]}, r"reward must be"),
        ({"reward": 1.0}, r"reward must be a list or a one-dimensional array"),
        ({"group": "ggg"}, r"group must be a list or a one-dimensional array"),
        ({"value": [0, math.inf, 0]}, r"value must be finite.*'a'"),
        ({"terminated": [True, False, True]}, r"terminated may be true on a last turn.*turn 0.*'a'"),
        ({"truncated": [True, False, False]}, r"truncated may be true on a last turn.*turn 0.*'a'"),
        ({"terminated": ["False"] * 3}, r"terminated must hold numbers or booleans"),
        ({"truncated": [0, 2, 0]}, r"truncated must hold booleans"),
        ({"anchor": [["s"], ["s"], ["s"]]}, r"anchor must be hashable"),
        ({"tokens": [1, -1, 1]}, r"tokens must not be negative.*'a'"),
    ],
)
def test_malformed_batches_are_refused_in_one_sentence(changes, words):
    with pytest.raises(ValueError, match=words):
        batch(**changes)


def test_columns_are_copies_and_read_only():
    reward = np.array([0.0, 1.0, 2.0])
    turns = batch(reward=reward)
    reward[0] = 9
    assert turns.reward[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        turns.reward[0] = 1


def test_values_can_be_filled_in_later():
    turns = replace(batch(anchor=["x", "y", "x"]), value=np.array([1.0, 2.0, 3.0]))
    assert turns.value.tolist() == [1, 2, 3] and turns.last.tolist() == [False, True, True]
    again = pickle.loads(pickle.dumps(turns))
    assert again.anchor_code.tolist() == turns.anchor_code.tolist()


def test_empty_batch():
    turns = TurnBatch.from_lists(group=[], trajectory=[], index=[], reward=[])
    assert len(turns) == 0 and turns.by_time == []


def turn(reward, anchor, **more):
    return Turn([1, 2], [3, 4, 5], None, anchor, reward, **more)


def test_from_trajectories():
    a = Trajectory("g", 0, [turn(0.0, "s", value=0.5), turn(1.0, "t", valid=False)], terminated=True)
    b = Trajectory("g", 1, [turn(2.0, "s")], truncated=True, next_value=0.25)
    assert a.episode_return == 1.0
    turns = TurnBatch.from_trajectories([a, b])
    assert turns.index.tolist() == [0, 1, 0]
    assert turns.reward.tolist() == [0, 1, 2]
    assert turns.terminated.tolist() == [False, True, False]
    assert turns.truncated.tolist() == [False, False, True]
    assert turns.valid.tolist() == [True, False, True]
    assert turns.tokens.tolist() == [3, 3, 3]
    np.testing.assert_array_equal(turns.value, [0.5, math.nan, math.nan])
    np.testing.assert_array_equal(turns.next_value, [math.nan, math.nan, 0.25])
    assert turns.anchor_code[0] == turns.anchor_code[2] != turns.anchor_code[1]


def test_a_trajectory_without_turns_is_refused():
    with pytest.raises(ValueError, match="trajectory 7 of group 'g' has none"):
        TurnBatch.from_trajectories([Trajectory("g", 7)])


def test_a_turn_is_frozen():
    with pytest.raises(AttributeError):
        turn(0.0, "s").reward = 1.0
