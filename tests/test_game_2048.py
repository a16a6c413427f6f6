"""2048: the rules of sliding, where chance comes from, and a budget in which the goal can be met."""

import math
import random

import pytest

from verl_multiturn.check import check_env
from verl_multiturn.env import make
from verl_multiturn.policies import expert_policy, play, random_policy


@pytest.mark.parametrize("kwargs", [{}, {"goal": 16, "max_turns": 14, "start_tiles": 2}])
def test_contract(kwargs):
    report = check_env("game_2048", episodes=4, **kwargs)
    assert report.ok, str(report)


def board(*rows):
    env = make("game_2048")
    env.reset(0)
    env.board = tuple(number for row in rows for number in row)
    return env


@pytest.mark.parametrize(
    ("row", "after", "made"),
    [
        ((2, 2, 0, 0), (4, 0, 0, 0), 4),
        ((2, 0, 0, 2), (4, 0, 0, 0), 4),
        ((2, 2, 2, 0), (4, 2, 0, 0), 4),
        ((2, 2, 2, 2), (4, 4, 0, 0), 8),
        ((2, 2, 4, 0), (4, 4, 0, 0), 4),
        ((4, 2, 2, 0), (4, 4, 0, 0), 4),
        ((0, 0, 0, 2), (2, 0, 0, 0), 0),
        ((8, 0, 8, 4), (16, 4, 0, 0), 16),
    ],
)
def test_a_line_slides_and_each_number_joins_once(row, after, made):
    empty = (0, 0, 0, 0)
    for move, lines in (("left", row), ("right", row[::-1])):
        env = board(empty, lines, empty, empty)
        reward = env.step(move)[1]
        got = env.board[4:8] if move == "left" else env.board[4:8][::-1]
        spawned = [i for i, number in enumerate(env.board) if number]
        assert reward == pytest.approx(0.1 * math.log2(1 + made))
        assert all(g == a or (a == 0 and g in (2, 4)) for g, a in zip(got, after, strict=True))
        assert len(spawned) == sum(number > 0 for number in after) + 1
    for move, column in (("up", row), ("down", row[::-1])):
        env = board(*[(0, number, 0, 0) for number in column])
        assert env.step(move)[1] == pytest.approx(0.1 * math.log2(1 + made))
        got = env.board[1::4] if move == "up" else env.board[1::4][::-1]
        assert all(g == a or (a == 0 and g in (2, 4)) for g, a in zip(got, after, strict=True))


def test_a_move_that_changes_nothing_is_valid_and_costs_a_tenth():
    env = board((2, 4, 2, 4), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0))
    before = env.board
    text, reward, terminated, _, info = env.step("up")
    assert (reward, terminated, info["valid"], env.board) == (-0.1, False, True, before)
    assert text == " 2 4 2 4\n _ _ _ _\n _ _ _ _\n _ _ _ _"
    text, reward, _, _, info = env.step("north")
    assert (reward, info["valid"], env.board) == (-0.1, False, before)
    assert env.step(" DOWN\n")[1] == 0


def test_a_full_board_without_equal_neighbours_is_lost():
    env = board((2, 4, 2, 4), (4, 2, 4, 2), (2, 4, 2, 4), (4, 2, 8, 8))
    outcomes = {env.fork(seed).step("left")[2] for seed in range(40)}
    env.board = (*env.board[:14], 16, 2)
    _, reward, terminated, truncated, info = env.step("left")
    assert (reward, terminated, truncated, info["success"]) == (-0.1, True, False, False)
    assert outcomes == {True, False}  # a 2 in the last cell loses, a 4 can still be joined


def test_the_goal_ends_the_episode():
    env = board((32, 32, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0))
    _, reward, terminated, _, info = env.step("left")
    assert reward == pytest.approx(0.1 * math.log2(65))
    assert terminated and info["success"] and info["highest"] == 64


def test_texts_do_not_change():
    text = make("game_2048").reset(3)[0]
    assert text == " 2 _ _ _\n _ _ _ _\n _ _ 2 _\n 2 _ _ 2"


def test_the_start_is_the_seeds_and_what_appears_the_dynamics_seeds():
    env = make("game_2048")
    starts, later = set(), set()
    for member in range(16):
        starts.add(env.reset(2, dynamics_seed=member)[0])
        later.add(env.step("up")[0])
    assert len(starts) == 1 and len(later) > 4
    assert len({env.reset(seed)[0] for seed in range(200)}) > 180


def test_fours_appear_one_time_in_ten():
    env = board((2, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0))
    fours = sum(" 4" in env.fork(seed).step("right")[0] for seed in range(2000))
    assert abs(fours / 2000 - 0.1) < 4 * math.sqrt(0.09 / 2000)


def test_the_shipped_budget_suits_the_expert_and_not_chance():
    env = make("game_2048")
    expert = [play(env, expert_policy, seed).success for seed in range(40)]
    luck = [play(env, random_policy(random.Random(seed)), seed).success for seed in range(40)]
    assert sum(expert) >= 36 and sum(luck) <= 20


def test_the_expert_only_makes_moves_that_change_something():
    env = make("game_2048", goal=128, max_turns=96)
    env.reset(0)
    over = False
    while not over:
        before = env.board
        _, _, terminated, truncated, _ = env.step(env.expert())
        over = terminated or truncated
        assert env.board != before


def test_the_prompt_names_goal_and_budget():
    text = make("game_2048", goal=32, max_turns=30).instruction
    assert "until 32 stands" in text and "30 moves" in text and "64" not in text


@pytest.mark.parametrize(
    "kwargs",
    [{"goal": 48}, {"goal": 4}, {"goal": 4096}, {"goal": 2048, "max_turns": 800}, {"start_tiles": 0}],
)
def test_impossible_arguments_are_refused(kwargs):
    with pytest.raises(ValueError, match="needs"):
        make("game_2048", **kwargs)
