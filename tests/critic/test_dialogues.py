"""From rows to transitions: independent of the rows' order, penalties off, prompts as they were read."""

from math import isnan
from types import SimpleNamespace

import numpy as np
import pytest

from verl_multiturn.critic.config import CriticConfig
from verl_multiturn.critic.dialogues import calibration, dialogues, prompts

CONFIG = CriticConfig(encoder="ngrams", gamma=0.5)


def record(index, reward, span=(0, 2), penalty=0.0):
    return {
        "index": index, "reward": reward, "penalty": penalty, "span": list(span),
        "observation": f"o{index}", "text": f"a{index}",
    }  # fmt: skip


def rows(*places, keys):
    return SimpleNamespace(places=list(places), keys=list(keys))


def whole(terminated=True, final=None):
    return {"instruction": "play", "terminated": terminated, "final_observation": final}


# Turn rows of one trajectory, in no order, and a second trajectory of one turn between them.
MIXED = rows(
    (0, record(1, 1.0, penalty=0.25), whole()),
    (1, record(0, -1.0), whole()),
    (2, record(0, 0.5), whole()),
    keys=["g_0_1", "g_1_0", "g_0_0"],
)


def test_transitions_of_a_step():
    first, second = dialogues(MIXED, CONFIG, version=3, step=7)
    assert (first.session, first.places) == ("g_0", [2, 0])
    assert (second.session, second.places) == ("g_1", [1])
    one, two = first.transitions
    assert (one.state, one.action, one.reward, one.done) == ("play\no0", "a0", 0.5, False)
    assert one.next_state == two.state == "play\no0\na0\no1"
    assert (two.reward, two.done) == (0.75, True)
    assert (one.mc_return, two.mc_return) == (0.5 + 0.5 * 0.75, 0.75)
    assert [turn.id for turn in first.transitions] == ["7:g_0:0", "7:g_0:1"]
    assert {turn.version for turn in first.transitions} == {3}


def test_a_turn_limit_is_an_end_or_is_bootstrapped():
    cut = rows((0, record(0, -1.0), whole(terminated=False, final="o1")), keys=["g_0_0"])
    ((end,),) = (one.transitions for one in dialogues(cut, CONFIG, 0, 1))
    assert end.done
    on = CriticConfig(encoder="ngrams", bootstrap_on_truncation=True)
    ((more,),) = (one.transitions for one in dialogues(cut, on, 0, 1))
    assert (more.done, more.next_state) == (False, "play\no0\na0\no1")


def test_what_a_state_is():
    """An observation that says all needs no history; a prompt is taken as it was read."""
    cut = rows(
        (0, record(0, 0.0) | {"prompt": "p0"}, whole(False, "o2")),
        (1, record(1, 0.0) | {"prompt": "p1"}, whole(False, "o2")),
        keys=["g_0_0", "g_0_1"],
    )
    on = CriticConfig(encoder="ngrams", bootstrap_on_truncation=True)
    ((first, last),) = (one.transitions for one in dialogues(cut, on, 0, 1, state="observation"))
    assert (first.state, first.next_state, last.next_state) == ("play\no0", "play\no1", "play\no2")
    ((first, last),) = (one.transitions for one in dialogues(cut, CONFIG, 0, 1, state="prompt"))
    assert (first.state, first.next_state, last.state, last.done) == ("p0", "p1", "p1", True)


def test_prompts_of_both_layouts():
    """A turn row has its own; in a trajectory row it is all that stands before the utterance."""
    found = dialogues(MIXED, CONFIG, 0, 1)
    read = prompts(MIXED, found, [[1], [2], [3]], [[9, 9], [9, 9], [9, 9]])
    assert read == {"play\no0": [2], "play\no0\na0\no1": [1]}  # equal states: the last
    chat = rows((0, record(0, 0.0, (0, 2)), whole()), (0, record(1, 0.0, (3, 5)), whole()), keys=["g_0_0"])
    found = dialogues(chat, CONFIG, 0, 1)
    read = prompts(chat, found, [[1, 2]], [[10, 11, 20, 12, 13]])
    assert read == {"play\no0": [1, 2], "play\no0\na0\no1": [1, 2, 10, 11, 20]}


def test_calibration_by_hand():
    """Q = A + V; r + γ V(s') − Q is 0.5 + 0.5·2 − 1, 0.75 − 3 and −1 − 0.5."""
    found = dialogues(MIXED, CONFIG, 0, 1)
    A, V = np.array([1.0, 0.5, -1.0]), np.array([2.0, 0.0, 2.0])
    numbers = calibration(found, A, V, 0.5)
    assert numbers["td_error"] == pytest.approx((0.5 + 2.25 + 1.5) / 3)
    assert numbers["advantage_turn_0"] == -0.25 and numbers["advantage_turn_1"] == 1.0
    assert numbers["value_error_turn_0"] == pytest.approx((2 - 0.875 + 0 + 1) / 2)
    assert numbers["explained_variance_turn_0"] == pytest.approx(
        1 - np.var([0.875 - 2, -1 - 0]) / np.var([0.875, -1])
    )
    assert "explained_variance_turn_1" not in numbers  # one turn: nothing to explain
    perfect = calibration(found, np.zeros(3), np.array([0.75, -1.0, 0.875]), 0.5)
    assert perfect["explained_variance_turn_0"] == 1 and perfect["td_error"] == pytest.approx(0)
    twice = calibration(found, np.zeros(3), 2 * np.array([0.75, -1.0, 0.875]), 0.5, scale=2)
    assert twice["td_error"] == pytest.approx(0) and twice["value_error_turn_0"] == pytest.approx(0)


def test_late_turns_are_counted_by_tens():
    many = rows(*((0, record(t, 0.0), whole()) for t in range(25)), keys=["g_0_0"])
    numbers = calibration(dialogues(many, CONFIG, 0, 1), np.arange(25.0), np.zeros(25), 0.5)
    assert numbers["advantage_turn_9"] == 9 and numbers["advantage_turn_10_to_19"] == 14.5
    assert numbers["advantage_turn_20_to_29"] == 22 and not any(map(isnan, numbers.values()))
