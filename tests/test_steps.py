"""Utterances cut into steps at the starts of their tokens, and records taken apart by step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verl_multiturn as vm
from verl_multiturn.steps import SPLITTERS, by_step, numbered, token_cuts

WORDS = ["a", "bc", "\n", "d\ne", ".\n\n", " X", "", "<eos>"]


def decode(ids):
    """Special tokens are left out, as verl_multiturn decodes."""
    return "".join(WORDS[i] for i in ids).replace("<eos>", "")


def cut(*ids, splitter="line", size=64):
    return token_cuts(ids, decode(ids), decode, splitter, size)


def test_cuts_move_up_to_the_start_of_the_next_token():
    assert cut(0, 2, 0, 2, 0, 7) == [1, 3]  # "a", "\na", "\na": a newline is the front of its step
    assert cut(0, 3, 1, 7) == [2]  # "d\ne" is one token: the step begins behind it
    assert cut(0, 3, 7) == [] and cut(0, 3) == []  # nothing is left to say there
    assert cut(3, 3, 3, 0) == [1, 2, 3]
    assert cut(0, 6, 2, 0) == [1]  # an empty token belongs to what follows
    assert cut(7) == cut() == []


def test_fixed_tokens_turn_and_none():
    assert cut(0, 1, 0, 1, 0, 7, splitter="fixed_tokens", size=2) == [2, 4]
    assert cut(0, 1, 0, 1, 7, splitter="fixed_tokens", size=2) == [2]  # only the end is behind 4
    assert cut(0, 2, 0, splitter="turn") == cut(0, 2, 0, splitter="none") == []


def test_half_a_character_is_no_place_to_begin():
    """é is two tokens; the line behind it begins at the token behind both."""
    parts = [b"a", b"\xc3", b"\xa9", b"\nb"]

    def text(ids):
        return b"".join(parts[i] for i in ids).decode(errors="replace")

    assert token_cuts([0, 1, 2, 3], text([0, 1, 2, 3]), text, "line") == [3]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 7), max_size=30), st.sampled_from(SPLITTERS), st.integers(1, 5))
def test_cuts_are_inside_and_increase(ids, splitter, size):
    text = decode(ids)
    cuts = token_cuts(ids, text, decode, splitter, size)
    assert cuts == sorted(set(cuts)) and all(0 < one < len(ids) for one in cuts)
    assert all(decode(ids[one:]) for one in cuts)
    if splitter in ("line", "math", "sentence"):
        bounds = vm.split_steps(text, splitter)
        for one in cuts:  # some boundary lies in the token before
            assert any(len(decode(ids[: one - 1])) < bound <= len(decode(ids[:one])) for bound in bounds)


def turn(t, **more):
    return {"index": t, "reward": 1.0, "penalty": 0.5, "anchor": "s", "span": [4, 9], "value": 0.1,
            "action_ids": [1, 2, 3, 4, 5], "log_probs": None} | more  # fmt: skip


STEPS = [{"span": [0, 2], "value": 0.25, "advantage": 0.5}, {"span": [2, 5], "value": None}]


def test_a_turn_by_step():
    first, last = by_step(turn(0, steps=STEPS))
    assert (first["span"], last["span"]) == ([4, 6], [6, 9])
    assert (first["action_ids"], last["action_ids"], last["log_probs"]) == ([1, 2], [3, 4, 5], None)
    assert (first["reward"], first["penalty"], last["reward"], last["penalty"]) == (0, 0, 1.0, 0.5)
    assert (first["value"], first["advantage"], last["value"]) == (0.25, 0.5, None)
    assert (first["anchor"], last["anchor"]) == ("s", None) and first["step"] is STEPS[0]
    whole = turn(0)
    assert by_step(whole)[0] is whole


def test_steps_of_a_trajectory_are_counted_through():
    turns = [turn(0, steps=STEPS), turn(1, steps=STEPS[:1]), turn(2, steps=STEPS)]
    assert [one["index"] for one in numbered(turns)] == [0, 1, 2, 3, 4]
    assert numbered(plain := [turn(0), turn(1)]) == plain


@pytest.mark.parametrize("splitter", ["line", "math", "sentence"])
def test_rules_are_those_of_split_steps(splitter):
    text = "We have $x=2$.\nSo $x^2=4$.\nThe answer is $\\boxed{4}$."
    found = token_cuts(list(range(len(text))), text, lambda ids: "".join(text[i] for i in ids), splitter)
    assert found == vm.split_steps(text, splitter)[1:-1] and len(found) > 0
