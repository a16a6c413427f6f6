"""Countdown: every task can be solved, and no answer is taken that the rules forbid."""

import ast
import random
import re
import warnings
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.countdown import parse
from verl_multiturn.check import check_env
from verl_multiturn.env import make
from verl_multiturn.panel import Panel, check_disjoint
from verl_multiturn.policies import expert_policy, play, random_policy

VARIANT = {"operators": "+-*/", "min_numbers": 2, "max_numbers": 5, "max_turns": 3, "use_all": False}


def task(numbers, target, **kwargs):
    env = make("countdown", **kwargs)
    env.reset(0)
    env.numbers, env.target = numbers, target
    return env


@pytest.mark.parametrize("kwargs", [{}, VARIANT])
def test_contract(kwargs):
    report = check_env("countdown", **kwargs)
    assert report.ok, str(report)


def test_texts_do_not_change():
    env = make("countdown")
    assert env.reset(3)[0] == "Numbers: 41 1 46\nTarget: 4"


@pytest.mark.parametrize("kwargs", [{}, VARIANT, {"operators": "*/"}])
def test_every_task_is_solved_by_its_expert_with_the_operators_that_are_allowed(kwargs):
    env = make("countdown", **kwargs)
    for seed in range(60):
        env.reset(seed)
        answer = env.expert()
        assert set(answer) & set("+-*/") <= set(env.operators)
        assert 1 <= env.target <= 99 and env.target not in env.numbers
        _, reward, terminated, _, info = env.step(answer)
        assert (reward, terminated, info["success"]) == (1, True, True)


def test_random_play_sometimes_wins():
    rewards = [
        play(make("countdown"), random_policy(random.Random(seed)), seed).episode_return
        for seed in range(100)
    ]
    assert set(rewards) == {0.1, 1.0} and 0.02 < rewards.count(1.0) / 100 < 0.4


@pytest.mark.parametrize(
    "answer",
    [
        "3-2#5",
        "5 and 3-2",
        "3-2 #5",
        "3-2;5",
        "3-2,5",
        "3-2\n5",
        "3--2+5",
        "-3+5*2",
        "3**2-5",
        "9//2",
        "3-2==5",
        "3.0-2",
        "3-2j",
        "0x3-2",
        "3_2-5",
        "(3-2",
        "()",
        "5(3-2)",
        "٣-2",
        "len('3')-2",
        "__import__('os').getpid()",
        "[3-2][0]",
        "3-2 if 5 else 0",
        "3 - 2 = 1",
        "03-2",
        "9**9**9**9**9",
        "(" * 90 + "3-2",
        "(" * 40_000 + "3" + ")" * 40_000,
        "1+" * 60 + "1",
        "",
    ],
)
def test_what_is_no_arithmetic_of_two_operands_is_an_invalid_turn(answer):
    env = task([5, 3, 2], 1, operators="+-*/", use_all=False, max_turns=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text, reward, terminated, truncated, info = env.step(answer)
    assert text == "Numbers: 5 3 2\nTarget: 1"
    assert (reward, terminated, truncated) == (0, False, False)
    assert not info["valid"] and not info["success"]
    assert env.step("3-2")[1] == 1


def test_operators_that_the_settings_forbid_are_invalid():
    env = task([6, 3, 2], 4, operators="+-", max_turns=2)
    assert "Allowed: + - and parentheses" in env.instruction and "*" not in env.instruction
    assert not env.step("6/3+2")[4]["valid"]
    assert env.step("6-(3-2)")[4]["valid"]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("(6 - 3) * 2", 1),
        (" ( 6-3 )*2 ", 1),
        ("2*6 - 2*3", 0),  # 2 twice
        ("6", 0),  # the target itself, but numbers are left
        ("6 + 0*3*2", 0),  # a number that is not given
        ("6 - 3 + 2", 0.1),
        ("6 / (3 - 2 - 1)", 0),
        ("6 - 3 / 2", 0.1),
    ],
)
def test_rewards_of_a_single_attempt(answer, reward):
    env = task([6, 3, 2], 6, operators="+-*/")
    _, got, terminated, _, info = env.step(answer)
    assert (got, terminated, info["valid"], info["success"]) == (reward, True, True, reward == 1)


def test_with_fewer_numbers_allowed_a_wrong_answer_pays_only_for_all_of_them():
    kwargs = {"operators": "+-*/", "use_all": False}
    assert task([6, 3, 2], 3, **kwargs).step("6 / 2")[1] == 1
    assert task([6, 3, 2], 3, **kwargs).step("6 - 2")[1] == 0
    assert task([6, 3, 2], 3, **kwargs).step("6 - 2 * 3")[1] == 0.1
    assert task([6, 3, 2], 12, **kwargs).step("6 + 6")[1] == 0


def test_values_are_exact_and_a_division_by_zero_has_none():
    assert task([8, 3, 8, 3], 24, operators="+-*/").step("8 / (3 - 8 / 3)")[1] == 1
    text, reward, *_, info = task([5, 2, 2], 5, operators="+-*/").step("5 / (2 - 2)")
    assert "divides by 0" in text and reward == 0.1 and not info["success"]


def test_only_the_last_attempt_pays_for_the_right_numbers():
    env = task([6, 3, 2], 1, max_turns=3)
    text, reward, terminated, _, _ = env.step("6 + 3 - 2")
    assert text == "Numbers: 6 3 2\nTarget: 1\n6 + 3 - 2 makes 7. Attempts left: 2."
    assert (reward, terminated) == (0, False)
    assert not env.step("?")[4]["valid"]
    assert env.step("6 + 3 - 2")[1:4] == (0.1, True, False)


def test_an_episode_whose_last_turn_holds_no_expression_is_truncated():
    assert task([6, 3, 2], 1).step("?")[1:4] == (0, False, True)


@given(st.text("0123456789+-*/() ", max_size=30))
def test_a_parsed_tree_holds_numbers_and_the_four_operators_only(text):
    tree = parse(text, "+-*/")
    names = {type(node).__name__ for node in ast.walk(tree)} if tree else set()
    assert names <= {"BinOp", "Constant", "Add", "Sub", "Mult", "Div"}
    assert not tree or _numbers(text) == _numbers(ast.unparse(tree))


def _numbers(text):
    return Counter(int(number) for number in re.findall("[0-9]+", text))


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({' '.join(parts)})"),
    max_leaves=6,
)


@given(EXPRESSIONS)
def test_values_are_those_of_python_fractions(text):
    numbers = [int(number) for number in re.findall("[0-9]+", text)]
    said = task(numbers, 1000, operators="+-*/").step(text)[0].split("\n")[-1]
    try:
        value = eval(re.sub("[0-9]+", r"Fraction(\g<0>)", text), {"Fraction": Fraction})
    except ZeroDivisionError:
        assert " divides by 0. " in said
    else:
        assert f" makes {value}. " in said


def test_ranges_of_seeds_share_no_task():
    panels = [
        Panel.build("countdown", {"max_number": 9, "max_target": 12}, range(first, first + 400), split)
        for split, first in (("test", 0), ("val", 500_000), ("train", 1_000_000))
    ]
    check_disjoint(*panels)
    assert len(panels[0].tasks) > 50


def test_the_order_of_the_numbers_makes_no_other_task():
    env = make("countdown")
    first = env.reset(5)[0]
    content = env.content(first)
    env.numbers.reverse()
    assert env.content(first) == content
    env.target += 1
    assert env.content(first) != content


def test_a_word_as_seed_is_a_training_task():
    names = {make("countdown").reset(f"task {i}")[0] for i in range(20)}
    assert len(names) == 20


def test_numbers_follow_the_arguments():
    env = make("countdown", min_numbers=3, max_numbers=4)
    kinds = Counter(env.reset(seed)[1]["task_type"] for seed in range(200))
    assert set(kinds) == {"numbers-3", "numbers-4"} and min(kinds.values()) > 60


@pytest.mark.parametrize(
    "kwargs",
    [
        {"operators": ""},
        {"operators": "+^"},
        {"operators": "++"},
        {"min_numbers": 1},
        {"min_numbers": 4, "max_numbers": 3},
        {"max_numbers": 7},
        {"max_number": 0},
        {"max_number": 10_000},
        {"max_target": 0},
        {"max_turns": 0},
    ],
)
def test_impossible_arguments_are_refused(kwargs):
    with pytest.raises(ValueError, match="needs"):
        make("countdown", **kwargs)


def test_tasks_that_cannot_be_drawn_are_said_to_be_so():
    with pytest.raises(RuntimeError, match="no task with operators"):
        make("countdown", operators="+", max_target=1).reset(0)


def test_the_expert_wins_with_one_attempt():
    assert all(play(make("countdown"), expert_policy, seed).success for seed in range(100))
