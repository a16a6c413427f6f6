"""Guess My City: one guess a question, no answer that names the city, every city can be found."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.twenty_questions_parts.cities import ANSWERS, COUNTRIES, FLAGS, ROWS, TRUE
from environments.twenty_questions_parts.exact import random_return, reference_returns
from environments.twenty_questions_parts.words import normal
from verl_multiturn.check import check_env
from verl_multiturn.env import make
from verl_multiturn.panel import FIRST_ID, Panel, check_disjoint
from verl_multiturn.policies import expert_policy, play

TEN = ["Paris", "London", "Rome", "Tokyo", "Cairo", "Lima", "Sydney", "Toronto", "Moscow", "Lagos"]


def ask(question, hidden="Paris"):
    """(answer, valid, success) of one question."""
    env = make("guess_my_city", full=False)
    env.reset(hidden)
    text, _, _, _, info = env.step(question)
    return text, info["valid"], info["success"]


@pytest.mark.parametrize("kwargs", [{}, {"words": 8, "questions": "listed", "max_turns": 6}])
def test_contract(kwargs):
    report = check_env("guess_my_city", episodes=4, **kwargs)
    assert report.ok, str(report)


def test_the_table():
    assert len(ROWS) == 96 and all(len(row) == 8 for row in ROWS.values())
    assert all(set(row[7]) <= set(FLAGS) and row[6] in "1234" for row in ROWS.values())
    assert all(0 < len(true) < 96 for _, true in TRUE.values())
    assert not {normal(country) for country in COUNTRIES} & {normal(city) for city in ROWS}


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("In which part of the world is it?", "It is in Europe."),
        ("Where is it?", "It is in Europe."),
        ("What do people speak?", "They mostly speak French."),
        ("How many people live there?", "More than ten million people live there."),
        ("What is it famous for?", "It is known for an iron tower."),
        ("Is it in France?", "Yes."),
        ("Is it in Italy or Spain?", "No."),
        ("Is it in Europe and by the sea?", "No."),
        ("Is it not by the sea?", "Yes."),
        ("Is it hot there?", "No."),
        ("Is it Rome?", "No."),
        ("Which country is it in?", "I cannot answer that."),
        ("What is it called?", "I cannot answer that."),
        ("Is it Paris or Rome?", "I cannot answer that."),
        ("Paris, Rome, London, Tokyo", "I cannot answer that."),
        ("Is it near Paris?", "I cannot answer that."),
    ],
)
def test_answers(question, answer):
    said, valid, success = ask(question)
    assert said == answer and valid == (answer != "I cannot answer that.") and not success


@pytest.mark.parametrize(
    "guess", ["Is it {}?", "{}", "I think it is {}!", "is it the city of {}, {country}?"]
)
def test_every_city_can_be_guessed(guess):
    for city, row in ROWS.items():
        for name in row[0].split(", "):
            assert ask(guess.format(name, country=row[1]), city)[2], name
    assert ask("São Paulo", "Sao Paulo")[2]


@given(st.sampled_from(sorted(ROWS)), st.one_of(st.text(max_size=60), st.sampled_from(sorted(ANSWERS))))
@settings(max_examples=200, deadline=None)
def test_no_answer_names_the_city(city, question):
    said, valid, success = ask(question, city)
    assert said and (valid or said == "I cannot answer that.")
    assert success or normal(city) not in normal(said)


def test_the_rules_never_name_a_city_or_its_country():
    for answers in ANSWERS.values():
        for city, said in answers.items():
            names = (*ROWS[city][0].split(", "), ROWS[city][1])
            assert all(f" {normal(name)} " not in f" {normal(said)} " for name in names)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("It has a tower.\nIt is Paris.", "It has a tower."),
        ("Paris has a tower.", None),
        ("PARÍS has a tower", None),
        ("The Parisians speak French", None),
        ("", None),
    ],
)
def test_what_a_model_says_is_guarded(said, kept):
    assert make("guess_my_city").table.read("Paris", said) == kept


def test_the_expert_and_reference_returns():
    env = make("guess_my_city")
    episodes = [play(env, expert_policy, city) for city in ROWS]
    mean = sum(one.episode_return for one in episodes) / len(episodes)
    assert all(one.success for one in episodes) and mean == pytest.approx(-1.5521, abs=1e-4)
    assert random_return(12 + 96, 20) == pytest.approx(-18.165, abs=1e-3)
    few = make("guess_my_city", words=TEN)
    exact = reference_returns(few)
    played = sum(play(few, expert_policy, city).episode_return for city in TEN) / 10
    assert exact["random"] < played <= exact["best"] < 0


def test_splits_hide_different_cities():
    panels = [
        Panel.build("guess_my_city", {}, count(FIRST_ID[split]), split, n=8)
        for split in ("test", "val", "train")
    ]
    check_disjoint(*panels)
