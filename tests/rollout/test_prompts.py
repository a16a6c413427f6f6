"""Prompts: the window of history, what is dropped to fit, and templates that name nothing unknown."""

import pytest

from verl_multiturn.rollout.prompts import (
    PromptPolicy,
    PromptTooLong,
    Templates,
    View,
    load_policy,
)

PAST = [("o0", "a0"), ("o1", "a1"), ("o2", "a2")]
SHORT = Templates(
    first="{instruction}|{observation}|{admissible}",
    turn="{instruction}|{turn}|{shown}|{history}|{observation}|{admissible}",
    next="{observation}|{admissible}",
    history_item="{index}:{observation}>{action}",
    admissible="[{actions}]",
)


def encode(messages):
    """A token a character."""
    return [ord(letter) for message in messages for letter in message["content"]]


def fit(budget=10_000, history=2, past=PAST, admissible=("l", "r"), **templates):
    policy = PromptPolicy(Templates(**(vars_of(SHORT) | templates | {"history": history})))
    return policy.fit(View("do", "o3", list(admissible), list(past)), encode, budget)


def vars_of(templates):
    return {name: getattr(templates, name) for name in templates.__dataclass_fields__}


def text(prompt):
    return prompt.messages[-1]["content"]


def test_what_is_left_to_read_where_a_prompt_is_too_long():
    """By another model: from what the policy read on, in the order in which things go."""
    policy = PromptPolicy(SHORT)
    view = View("do", "o3", ["l", "r"], list(PAST))
    read = fit(len("do|3|1|2:o2>a2|o3|[l, r]")).messages  # the policy's budget left it one turn
    texts = [messages[-1]["content"] for messages in policy.shorter(view, read)]
    assert texts == ["do|o3|[l, r]", "do|o3|[l]", "do|o3|"]
    assert policy.shorter(view, [{"role": "user", "content": "a running chat"}]) == []
    assert [m for m, _, _ in policy.choices(view)][1:] == policy.shorter(view, fit().messages)


@pytest.mark.parametrize(
    ("history", "past", "expected"),
    [
        (2, PAST, "do|3|2|1:o1>a1\n2:o2>a2|o3|[l, r]"),
        (9, PAST, "do|3|3|0:o0>a0\n1:o1>a1\n2:o2>a2|o3|[l, r]"),
        (1, PAST, "do|3|1|2:o2>a2|o3|[l, r]"),
        (0, PAST, "do|o3|[l, r]"),
        (2, [], "do|o3|[l, r]"),
    ],
)
def test_window_of_history(history, past, expected):
    prompt = fit(history=history, past=past)
    assert text(prompt) == expected
    assert prompt.ids == encode(prompt.messages)
    assert (prompt.dropped_turns, prompt.dropped_actions) == (0, 0)


def test_what_goes_first():
    """One token less each time: history, oldest first, then actions from the end, then nothing more."""
    many = ("aa", "bb", "cc", "dd")
    seen, budget = [], 10_000
    while True:
        try:
            prompt = fit(budget, history=2, admissible=many)
        except PromptTooLong as error:
            assert str(error) == (
                f"the prompt of turn 3 has {len('do|o3|')} tokens without any history, "
                f"data.max_prompt_length is {budget}: raise it, or shorten the observation"
            )
            break
        assert len(prompt.ids) <= budget and "do" in text(prompt) and "o3" in text(prompt)
        seen.append((text(prompt), prompt.dropped_turns, prompt.dropped_actions))
        budget = len(prompt.ids) - 1
    assert seen == [
        ("do|3|2|1:o1>a1\n2:o2>a2|o3|[aa, bb, cc, dd]", 0, 0),
        ("do|3|1|2:o2>a2|o3|[aa, bb, cc, dd]", 1, 0),
        ("do|o3|[aa, bb, cc, dd]", 2, 0),
        ("do|o3|[aa, bb]", 2, 2),
        ("do|o3|[aa]", 2, 3),
        ("do|o3|", 2, 4),
    ]


def test_without_listed_actions_there_is_no_line_about_them():
    assert text(fit(past=[], admissible=())) == "do|o3|"
    assert PromptPolicy(SHORT).follow_up(View("do", "o3"))["content"] == "o3|"


def test_messages_of_a_running_chat_and_the_system_message():
    policy = PromptPolicy(Templates(**(vars_of(SHORT) | {"system": "be brief"})))
    view = View("do", "o3", ["l"], list(PAST))
    assert policy.messages(view, 0, None)[0] == {"role": "system", "content": "be brief"}
    assert policy.follow_up(view) == {"role": "user", "content": "o3|[l]"}


def test_braces_in_an_observation_are_text():
    view = View("use {curly}", "{observation} {0} {", None, [("{history}", "{}")])
    messages = PromptPolicy(SHORT).messages(view, 1, None)
    assert messages[-1]["content"] == "use {curly}|1|1|0:{history}>{}|{observation} {0} {|"


@pytest.mark.parametrize(
    ("field", "template", "guess"),
    [
        ("first", "{observatoin}", "observation"),
        ("turn", "{instructions}", "instruction"),
        ("next", "{admisible}", "admissible"),
        ("history_item", "{idx} {acton}", None),
        ("admissible", "{action}", "actions"),
    ],
)
def test_an_unknown_placeholder_names_the_nearest(field, template, guess):
    with pytest.raises(ValueError, match=f"unknown placeholder in multiturn.prompt.{field}") as caught:
        Templates(**{field: template})
    if guess:
        assert f"Did you mean '{guess}'?" in str(caught.value)


def of(max_turns=5, max_actions=10, action=None, **prompt):
    """Templates of a run's settings."""
    texts = {name: value for name, value in vars_of(SHORT).items() if name != "history"}
    block = {"prompt": texts | {"policy": None} | prompt, "max_turns": max_turns, "max_actions": max_actions}
    return Templates.of(block | {"action": {"max_actions": 3, "separator": "{;}"} | (action or {})})


def test_templates_say_what_the_run_allows():
    first = "{number}/{max_turns} {budget} {{x}} {observation!r:>6}{several}"
    templates = of(first=first, next="{turn}{number}{several}", several=" {max_actions} by {separator} }}")
    policy = PromptPolicy(templates)
    assert policy.messages(View("do", "o"), 0, None)[-1]["content"] == "1/5 10 {x}    'o' 3 by {;} }"
    assert policy.follow_up(View("do", "o3", past=list(PAST)))["content"] == "34 3 by {;} }"
    for settings, text in (({"action": {"max_actions": 1}}, "1"), ({"max_actions": 1}, "1"), ({}, "1 3")):
        policy = PromptPolicy(of(next="{number}{several}", several=" {max_actions}", **settings))
        assert policy.follow_up(View("do", "o"))["content"] == text


def test_what_no_template_shows_changes_nothing():
    """Small models are found by the templates: runs whose prompts are equal must find the same."""
    assert of() == of(max_turns=None, max_actions=None, action={"max_actions": 9}, several=" {max_actions}")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"max_turns": None, "first": "{max_turns}"},
            r"prompt\.first shows \{max_turns\}, and multiturn\.max_turns",
        ),
        (
            {"max_actions": None, "next": "{budget}"},
            r"multiturn\.max_actions is null: set it, or leave \{budget\}",
        ),
        ({"turn": "{max_turn}"}, "multiturn.prompt.turn .*Did you mean 'max_turns'"),
        ({"several": "{seperator}"}, "multiturn.prompt.several .*Did you mean 'separator'"),
    ],
)
def test_a_limit_that_is_not_there_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        of(**settings)


def test_negative_history_is_refused():
    with pytest.raises(ValueError, match="history is -1"):
        Templates(history=-1)


CUSTOM = """
from verl_multiturn.rollout.prompts import PromptPolicy


class Loud(PromptPolicy):
    def messages(self, view, shown, actions):
        return [{"role": "user", "content": view.observation.upper()}]


def quiet():
    pass
"""


def test_a_policy_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "loud_prompts.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    policy = load_policy("loud_prompts:Loud")(SHORT)
    assert text(policy.fit(View("do", "o3"), encode, 99)) == "O3"
    assert load_policy(None) is PromptPolicy
    for name in ("loud_prompts:quiet", "loud_prompts:Missing"):
        with pytest.raises(ValueError, match="is not a subclass of PromptPolicy"):
            load_policy(name)
