"""What counts as an action, and that nothing else does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_multiturn.rollout.parsing import INVALID, ActionFormat, Parsed, parse

THINKS = ActionFormat()
BARE = ActionFormat(tag=None, think=False)
TAGGED = ActionFormat(tag="answer", think=False)
SEVERAL = ActionFormat(tag="answer", think=False, max_actions=3)


@pytest.mark.parametrize(
    ("text", "form", "actions"),
    [
        ("<think>why</think><action>up</action>", THINKS, ["up"]),
        ("so <think>a\nb</think> then\n<action>\n up \n</action> bye", THINKS, ["up"]),
        ("<think></think><action>up</action>", THINKS, ["up"]),
        ("<action>up</action>", THINKS, None),  # no thought
        ("<think>why<action>up</action>", THINKS, None),  # never closed
        ("<action>up</action><think>why</think>", THINKS, None),  # too late
        ("<think><action>up</action></think>", THINKS, None),  # only thought of
        ("<think><action>up</action></think><action>down</action>", THINKS, ["down"]),
        ("why</think><action>up</action>", THINKS, None),
        ("<think>a</think><action>up", THINKS, None),
        ("<answer>up</answer>", TAGGED, ["up"]),
        ("<action>up</action>", TAGGED, None),
        ("<ANSWER>up</ANSWER>", TAGGED, None),
        ("<answer>up</answer><answer>down</answer>", TAGGED, ["up"]),  # the first pair counts
        ("<answer> \n </answer>", TAGGED, None),
        ("<answer></answer><answer>up</answer>", TAGGED, None),
        ("<answer>up||down</answer>", TAGGED, ["up||down"]),  # one action: nothing separates
        ("<answer>nach oben ↑ 東</answer>", TAGGED, ["nach oben ↑ 東"]),
        ("<answer>up || down</answer>", SEVERAL, ["up", "down"]),
        ("<answer>|| up ||  || down||</answer>", SEVERAL, ["up", "down"]),  # empty ones do not count
        ("<answer>a||b||c||d</answer>", SEVERAL, ["a", "b", "c"]),  # later ones are dropped
        ("<answer> || ||</answer>", SEVERAL, None),
        (" go left\n", BARE, ["go left"]),
        (" \n", BARE, None),
        ("", BARE, None),
        ("", THINKS, None),
    ],
)
def test_rules(text, form, actions):
    parsed = parse(text, form)
    assert parsed.valid is (actions is not None)
    assert list(parsed.actions) == (actions or [])


@pytest.mark.parametrize(
    ("text", "form", "thinks"),
    [
        ("<think>why</think><action>up</action>", THINKS, True),
        ("<think>why</think>up", THINKS, True),  # what is missing is the action
        ("<think>why</think><action> </action>", THINKS, True),
        ("<think>why<action>up</action>", THINKS, False),
        ("<action>up</action>", THINKS, False),
        ("<think>why</think><answer>up</answer>", TAGGED, None),  # not asked for
        ("up", TAGGED, None),
    ],
)
def test_whether_it_thinks(text, form, thinks):
    assert parse(text, form).thinks is thinks


def test_a_thought_is_kept_and_a_tag_is_literal():
    whole = parse("<think> why </think><action>up</action>", THINKS)
    assert whole == Parsed(("up",), True, "why", thinks=True)
    odd = ActionFormat(tag="a.c+", think=False)
    assert parse("<a.c+>up</a.c+>", odd).actions == ("up",)
    assert parse("<abcc>up</abcc>", odd) == INVALID


def test_other_separators():
    form = ActionFormat(tag=None, think=False, separator=",", max_actions=2)
    assert parse("up, down", form).actions == ("up", "down")


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="max_actions is 0"):
        ActionFormat(max_actions=0)
    with pytest.raises(ValueError, match="separator is empty"):
        ActionFormat(max_actions=2, separator="")


pieces = st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "||", " ", "\n", "up", "\x00", "<"])


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(st.text(), st.lists(pieces).map("".join)),
    st.booleans(),
    st.sampled_from([None, "answer", "(", "\\"]),
    st.integers(1, 3),
)
def test_nothing_raises_and_every_action_stands_in_the_text(text, think, tag, most):
    parsed = parse(text, ActionFormat(tag, think, max_actions=most))
    assert bool(parsed.actions) is parsed.valid and len(parsed.actions) <= most
    for action in parsed.actions:
        assert action and action == action.strip() and action in text
