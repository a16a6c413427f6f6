"""Arithmetic: problems are solved by their solutions; files are read and graded by the papers' rules."""

import json
import random
import re

import pytest

from environments.arithmetic_parts.answers import algebra, boxed, equal, marked, normal
from verl_multiturn.check import check_env
from verl_multiturn.env import make
from verl_multiturn.panel import Panel, check_disjoint
from verl_multiturn.policies import expert_policy, play, random_policy

GSM8K = [
    {"question": f"{n} and {n}?", "answer": f"{n} + {n} = <<{n}+{n}={2 * n}>>{2 * n:,}\n#### {2 * n:,}"}
    for n in range(600, 700)
]
MATH = [{"problem": f"Half of {n}?", "solution": rf"It is $\boxed{{\frac{{{n}}}{{2}}}}$.", "type": "Algebra",
         "level": "Level 1"} for n in range(1, 60, 2)]  # fmt: skip


QUESTION = (
    "Eli has 17 books. Then 8 are lost. Then 2 more come. Then 14 more come. Then 3 more come. How many "
    "books are there now?"
)
SOLUTION = "17 - 8 = 9\n9 + 2 = 11\n11 + 14 = 25\n25 + 3 = 28\n#### 28"


def save(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("kwargs", [{}, {"steps": [1, 2]}])
def test_contract(kwargs):
    report = check_env("arithmetic", **kwargs)
    assert report.ok, str(report)


def test_contract_with_files(tmp_path):
    for kwargs in (
        {"file": save(tmp_path / "gsm8k.jsonl", GSM8K)},
        {"file": save(tmp_path / "math.jsonl", MATH), "grade": "math"},
    ):
        report = check_env("arithmetic", episodes=4, **kwargs)
        assert report.ok, str(report)


def test_texts_do_not_change():
    env = make("arithmetic")
    assert env.reset(3)[0] == env.state_key()
    assert (env.problem.question, env.expert()) == (QUESTION, SOLUTION)


def test_every_problem_is_solved_by_its_solution_and_true_to_its_story():
    env = make("arithmetic")
    for seed in range(200):
        _, info = env.reset(seed)
        *lines, last = env.expert().splitlines()
        assert info["task_type"] == f"steps-{len(lines)}" and 2 <= len(lines) <= 4
        now = int(re.search(r"has (\d+)", env.problem.question)[1])
        for line in lines:
            left, result = line.split(" = ")
            assert left.startswith(f"{now} ") and eval(left) == int(result) and 0 < int(result) <= 99
            now = int(result)
        assert last == f"#### {now}"
        _, reward, terminated, _, info = env.step(env.expert())
        assert (reward, terminated, info["success"]) == (1, True, True)


def test_slips_sometimes_win():
    wins = [play(make("arithmetic"), random_policy(random.Random(n)), n).success for n in range(100)]
    assert 5 < sum(wins) < 60
    assert all(play(make("arithmetic"), expert_policy, n).success for n in range(20))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 5", "5"),
        ("a\n#### 1\n#### 1,234 ", "1234"),
        ("5", None),
        ("####", None),
        ("a\n####   \n", None),
        ("####-7", "-7"),
    ],
)
def test_gsm8k_answers(text, answer):
    assert marked(text) == answer


def test_an_answer_that_is_missing_is_no_answer():
    env = make("arithmetic")
    env.reset(1)
    _, reward, terminated, truncated, info = env.step("I do not know")
    assert (reward, terminated, truncated, info["valid"], info["success"]) == (0, False, True, False, False)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $\boxed{4}$", "4"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{", None),
        (r"\boxed{}", None),
        ("4", None),
    ],
)
def test_math_answers(text, answer):
    assert boxed(text) == answer


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (r"\dfrac{1}{2}", r"\frac12"),
        (r"\left( 3, 4 \right)", "(3,4)"),
        (r"5\text{ cm}", "5cm"),
        ("1,000", "1000"),
        (r"10\%", "10"),
        (".5", "0.5"),
        (r"90^\circ", "90"),
    ],
)
def test_equal_as_texts(a, b):
    assert normal(a) == normal(b) and equal(a, b)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        ("(x+1)^2", "x^2+2x+1", True),
        ("2", "3", False),
    ],
)
def test_equal_as_expressions(a, b, same):
    pytest.importorskip("sympy")
    assert equal(a, b) is same


def test_expressions_that_take_for_ever_are_not_equal(monkeypatch):
    pytest.importorskip("sympy")
    monkeypatch.setattr("environments.arithmetic_parts.answers.SECONDS", 0.5)
    assert not equal("9^{9^9}^9", "1") and not equal("(9^9)^(9^9)^9", "1")


@pytest.mark.parametrize(
    "text", ["exit()", "exec(chr(97))", "__import__", "lambda:1", "a.b", "xy", "1" * 201]
)
def test_nothing_but_algebra_reaches_sympy(text):
    assert algebra(text) is None and not equal(text, "1")


def test_panels_share_no_problem():
    panels = [Panel.build("arithmetic", {}, split, split, n=200) for split in ("train", "val", "test")]
    check_disjoint(*panels)
    assert panels[0].tasks[0].id == 1_000_000 and panels[1].tasks[0].id == 500_000


def test_splits_of_files(tmp_path):
    one = save(tmp_path / "all.jsonl", GSM8K)
    shares = {split: make("arithmetic", file=one).tasks(split) for split in ("train", "val", "test")}
    assert sum(map(len, shares.values())) == 100 and len(shares["train"]) > 60 and all(shares.values())
    save(tmp_path / "train.jsonl", GSM8K[:80])
    save(tmp_path / "test.jsonl", GSM8K[80:])
    folder = make("arithmetic", file=str(tmp_path))
    assert len(folder.tasks("test")) == 20 and len(folder.tasks("train")) + len(folder.tasks("val")) == 80
    panels = [Panel.build("arithmetic", {"file": str(tmp_path)}, split, split) for split in shares]
    check_disjoint(*panels)
    assert folder.reset(panels[2].tasks[0].id)[0] == "680 and 680?"
    _, reward, _, _, info = folder.step("It is\n#### 1360")
    assert reward == 1 and info["success"]


@pytest.mark.parametrize(
    ("records", "kwargs", "words"),
    [
        ([{"question": "?"}], {}, "line 1 has no text 'answer'"),
        ([{"question": "?", "answer": "4"}], {}, "line 1: its answer has no '####' at the end"),
        ([{"question": "?", "answer": "#### 4"}], {"grade": "math"}, r"no \\boxed"),
        ([["?"]], {}, "line 1 has no text 'question'"),
    ],
)
def test_files_that_hold_no_problems(tmp_path, records, kwargs, words):
    env = make("arithmetic", file=save(tmp_path / "x.jsonl", records), **kwargs)
    with pytest.raises(ValueError, match=words):
        env.tasks("train")


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'gsm8k'"):
        make("arithmetic", grade="gsm8")
    with pytest.raises(ValueError, match="needs a file"):
        make("arithmetic", grade="math")
    with pytest.raises(ValueError, match="1 <= least <= most"):
        make("arithmetic", steps=[3, 2])
    with pytest.raises(ValueError, match="needs 8 <= most <= 99"):
        make("arithmetic", most=7)
    with pytest.raises(ValueError, match=r"no problems at .*train.jsonl: No such file"):
        make("arithmetic", file=str(tmp_path)).tasks("train")
    env = make("arithmetic", file=save(tmp_path / "x.jsonl", GSM8K))
    with pytest.raises(ValueError, match="unknown split 'tests'"):
        env.tasks("tests")
    with pytest.raises(ValueError, match="is none of the"):
        env.reset("test/999")


@pytest.mark.parametrize("most", [8, 20, 99])
def test_no_number_is_above_the_largest(most):
    env, seen = make("arithmetic", steps=[1, 8], most=most), set()
    for seed in range(1_000_000, 1_000_200):
        env.reset(seed)
        seen |= {int(n) for n in re.findall(r"\d+", env.problem.question + env.expert())}
    assert most - 4 <= max(seen) <= most
