"""reasoning-gym's tasks: the contract, and that its scorer decides."""

import random

import pytest

from verl_multiturn.check import check_env
from verl_multiturn.env import derive_seed, make

rg = pytest.importorskip("reasoning_gym", reason="pip install verl-multiturn[reasoning]")

IDS = ["countdown", "chain_sum", "gsm_symbolic", "maze", "sokoban", "tower_of_hanoi", "pool_matrix"]


def sums(seed, size, digits=1):
    """A user's own: a function that returns a data set."""
    return rg.create_dataset("chain_sum", seed=seed, size=size, min_digits=digits, max_digits=digits)


@pytest.mark.parametrize("id", [*IDS, "prime_factorization", "graph_color", f"{__file__}:sums"])
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_contract(id):
    report = check_env("reasoning_gym", episodes=2, id=id, attempts=2)
    assert report.ok, str(report)


@pytest.mark.parametrize("id", IDS)
def test_the_librarys_answer_wins_at_once(id):
    env = make("reasoning_gym", id=id)
    for seed in range(5):
        env.reset(seed)
        assert env.step(env.expert())[1:4] == (1.0, True, False)


def test_the_librarys_score_is_paid_for_the_last_attempt():
    env = make("reasoning_gym", id="countdown", attempts=2)
    question, _ = env.reset(5)
    number = random.Random(derive_seed("task", 5)).getrandbits(31)
    dataset = rg.create_dataset("countdown", seed=number, size=1)
    assert question == dataset[0]["question"]
    partial = dataset.score_answer("1 + 1", dataset[0])
    assert 0 < partial < 1
    text, reward, terminated, _, info = env.step("<answer>1 + 1</answer>")
    assert (reward, terminated, info["score"]) == (0.0, False, partial) and "Attempts left: 1." in text
    text, reward, terminated, _, info = env.step("1 + 1")
    assert (reward, terminated, info["success"]) == (partial, True, False)


def test_no_answer_is_an_invalid_turn():
    env = make("reasoning_gym", attempts=2)
    question, _ = env.reset(0)
    assert env.step(" ")[0] == question
    assert env.step("")[2:4] == (False, True)


def test_an_answer_that_the_scorer_cannot_read_is_invalid():
    env = make("reasoning_gym", id="prime_factorization", attempts=2)
    env.reset(0)
    info = env.step("two times two")[4]
    assert not info["valid"] and info["fault"].startswith("ValueError")


def test_keywords_reach_the_data_set():
    env = make("reasoning_gym", id=f"{__file__}:sums", keywords={"digits": 3})
    assert sum(len(word) == 3 and word.isdigit() for word in env.reset(0)[0].replace("?", "").split()) >= 2


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"id": "countdwn"}, "Did you mean 'countdown'"),
        ({"keywords": {"min_number": 3}}, "min_number"),
        ({"keywords": {"min_numbers": -3}}, "countdown with"),
        ({"attempts": 0}, "at least 1"),
        ({"id": f"{__file__}:sum"}, "Did you mean 'sums'"),
    ],
)
def test_wrong_arguments_are_named(kwargs, says):
    with pytest.raises(ValueError, match=says):
        make("reasoning_gym", **kwargs)
