"""Where responses are cut: vector 1 of data/vineppo_vectors.json, the authors' examples, totality."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import verl_multiturn as vm

VECTORS = json.loads((Path(__file__).parent / "data" / "vineppo_vectors.json").read_text())

GSM8K = [
    "Ann has two apples.\nSo there is 2.\n#### 2",
    "\na\nb\n#### 42",  # a blank line before the first
    "#### 5",
    "a\n\n#### 5",  # blank lines before the answer
    "a\n\nb\n#### 5",  # a blank line in between is a step, as in the authors' code
]


def test_vector_1_lines():
    expected = [json.loads(boundaries) for boundaries in VECTORS["V1 line splitting"]["boundaries"]]
    assert [vm.split_steps(text) for text in GSM8K] == expected
    assert vm.split_steps("a\n#### 5\n#### 6") == json.loads(VECTORS["V1 line splitting"]["double_marker"])


COMMA = "x" * 30 + " " + "y" * 41 + ", " + "z" * 90


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("math", "We have $x=2$.\nSo $x^2=4$.\nThe answer is $\\boxed{4}$.", [0, 26, 53]),
        ("math", COMMA, [0, 73, 164]),
        ("math", "42", [0, 2]),  # the authors' code fails on these three
        ("math", "Short", [0, 5]),
        ("math", "It is 5.", [0, 8]),
        ("math", "\\[ \\begin{tabular}a\nb\\end{tabular} \\]", [0, 19, 37]),  # and on this
        ("math", "The first sentence is here. Then comes another.", [0, 27, 47]),
        ("math", "Take $a.$ and after it comes the remainder of all", [0, 9, 49]),  # .$ ends a step
        ("math", "This is it: $$a = b\nc = d + e$$ where all is known", [0, 19, 50]),
        ("math", "$" + "a" * 60 + "=" + "b" * 60 + "$", [0, 62, 123]),  # a long formula, at its =
        ("math", "a" * 300, [0, 300]),
        ("sentence", "One was. Two is\n\nthree! E.g. A. is it? Yes", [0, 8, 15, 23, 38, 42]),
        ("sentence", "\n\nOne.", [0, 6]),
        ("sentence", "One.\n\n", [0, 6]),
        ("line", "\n\n", [0, 2]),
        ("line", "a\nb\n\n", [0, 1, 5]),
        ("line", "\n#### 5", [0, 7]),
        ("none", "a\nb", [0, 3]),
    ],
)
def test_boundaries(rule, text, expected):
    assert vm.split_steps(text, rule) == expected


pieces = st.sampled_from(
    ["$", "$$", "\\(", "\\)", "\\[", "\\]", "\\begin{a}", "\\end{a}", "[asy]", "[/asy]", "\n", "\n#### ",
     " ", ".", ", ", "=", " and ", "Then", "word word word word", "Fig. A", "\0", "é", "x+y"]
)  # fmt: skip


@pytest.mark.parametrize("rule", ["line", "math", "sentence", "none"])
@settings(max_examples=50, deadline=None)
@example("")
@given(text=st.lists(pieces, max_size=60).map("".join) | st.text(max_size=200))
def test_splitters_are_total_and_strictly_increasing(rule, text):
    boundaries = vm.split_steps(text, rule)
    assert boundaries[0] == 0 and boundaries[-1] == len(text)
    assert all(a < b for a, b in itertools.pairwise(boundaries))
    assert boundaries == [0] or text


def test_an_unknown_rule():
    with pytest.raises(ValueError, match=r"unknown rule 'lines'; valid: line, .*Did you mean 'line'"):
        vm.split_steps("a", "lines")
