"""Sudoku: one solution, legal moves only, and nothing is paid twice."""

import random
from itertools import product

import pytest

from verl_multiturn.check import check_env
from verl_multiturn.env import make
from verl_multiturn.policies import expert_policy, play, random_policy


@pytest.mark.parametrize("kwargs", [{}, {"size": 9, "blanks": 30, "max_turns": 36}])
def test_contract(kwargs):
    report = check_env("sudoku", episodes=4, **kwargs)
    assert report.ok, str(report)


def groups(size):
    box = {4: 2, 9: 3}[size]
    side = range(size)
    yield from ([(r, c) for c in side] for r in side)
    yield from ([(r, c) for r in side] for c in side)
    for top, left in product(range(0, size, box), repeat=2):
        yield [(top + r, left + c) for r, c in product(range(box), repeat=2)]


def solutions(grid, size):
    """All of them, by trying every number in every blank in turn: plain, and not the generator's way."""
    if 0 not in grid:
        return [grid]
    cell = grid.index(0)
    here = divmod(cell, size)
    near = {r * size + c for group in groups(size) if here in group for r, c in group}
    taken = {grid[other] for other in near}
    found = []
    for number in set(range(1, size + 1)) - taken:
        found += solutions([*grid[:cell], number, *grid[cell + 1 :]], size)
    return found


@pytest.mark.parametrize(
    ("size", "blanks", "seeds"), [(4, 1, 5), (4, 8, 40), (4, 12, 10), (9, 30, 3), (9, 45, 1)]
)
def test_the_solution_is_the_only_one(size, blanks, seeds):
    env = make("sudoku", size=size, blanks=blanks)
    for seed in range(seeds):
        env.reset(seed)
        assert env.grid.count(0) == blanks
        assert solutions(env.grid, size) == [env.solution]
        for group in groups(size):
            assert {env.solution[r * size + c] for r, c in group} == set(range(1, size + 1))


@pytest.mark.parametrize(("size", "blanks"), [(4, 8), (9, 40)])
def test_the_expert_needs_a_turn_for_each_blank(size, blanks):
    env = make("sudoku", size=size)
    for seed in range(100 if size == 4 else 5):
        episode = play(env, expert_policy, seed)
        assert episode.success and episode.turns == blanks and env.max_turns == blanks + 4
        assert episode.episode_return == blanks + 10


def test_random_play_rarely_wins():
    env = make("sudoku")
    won = sum(play(env, random_policy(random.Random(seed)), seed).success for seed in range(100))
    assert won < 20


def puzzle():
    """A grid of its own: two blanks in the first row, two in the second."""
    env = make("sudoku", blanks=4)
    env.reset(0)
    env.solution = [1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1]
    env.grid = [0, 0, 3, 4, 0, 0, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1]
    env.given = [number > 0 for number in env.grid]
    return env


def test_rewards_of_placing_and_clearing():
    env = puzzle()
    env.grid[8:10] = [0, 0]  # now 2 is legal, if wrong, in the first cell
    env.given[8:10] = [False, False]
    assert env.step("place 2 at row 1 column 1")[1] == 0
    assert env.expert() == "clear row 1 column 1"
    assert env.step("clear row 1 column 1")[1] == 0
    text, reward, *_ = env.step("PLACE 1  at row 1 col 1")
    assert reward == 1 and text.split("\n")[0] == " (1) _ 3 4"
    assert env.step("clear row 1 column 1")[1] == -1


def test_progress_pays_once_whatever_the_way():
    env = puzzle()
    total = 0
    for action in (
        "place 1 at row 1 column 1",
        "clear row 1 column 1",
        "place 1 at row 1 column 1",
        "place 2 at row 1 column 2",
        "place 3 at row 2 column 1",
        "place 4 at row 2 column 2",
    ):
        _, reward, terminated, _, info = env.step(action)
        total += reward
    assert terminated and info["success"] and total == 14


@pytest.mark.parametrize(
    "action",
    [
        "place 3 at row 1 column 1",  # in its row
        "place 4 at row 1 column 1",  # in its column
        "place 1 at row 1 column 2",  # in its column
        "place 3 at row 1 column 3",  # given, and just that number
        "clear row 1 column 3",  # given
        "clear row 1 column 1",  # blank
        "place 5 at row 1 column 1",
        "place 0 at row 1 column 1",
        "place 1 at row 0 column 1",
        "place 1 at row 5 column 1",
        "place 1 at row 1 column 11",
        "place 1 at row 1",
        "1,1,1",
        "place ١ at row 1 column 1",
    ],
)
def test_invalid_actions_cost_a_tenth_and_change_nothing(action):
    env = puzzle()
    before = env.grid.copy()
    _, reward, terminated, _, info = env.step(action)
    assert (reward, terminated, info["valid"]) == (-0.1, False, False) and env.grid == before


def test_a_placed_number_must_be_cleared_before_another():
    env = puzzle()
    env.step("place 1 at row 1 column 1")
    assert not env.step("place 1 at row 1 column 1")[4]["valid"]
    assert not env.step("place 2 at row 1 column 1")[4]["valid"]


def test_all_that_is_listed_is_valid_and_nothing_else():
    env = make("sudoku")
    everything = [
        *(f"place {n} at row {r} column {c}" for n, r, c in product(range(1, 5), repeat=3)),
        *(f"clear row {r} column {c}" for r, c in product(range(1, 5), repeat=2)),
    ]
    rng = random.Random(0)
    for seed in range(10):
        env.reset(seed)
        for _ in range(4):
            listed = env.admissible()
            assert {a for a in everything if env.fork().step(a)[4]["valid"]} == set(listed)
            env.step(rng.choice(listed))


def test_the_type_tells_whether_single_candidates_are_enough():
    env = make("sudoku", size=9, blanks=52)
    assert {env.reset(seed)[1]["task_type"] for seed in range(8)} == {"singles", "search"}
    assert make("sudoku", blanks=1).reset(0)[1]["task_type"] == "singles"


@pytest.mark.parametrize(("size", "box"), [(4, "2x2"), (9, "3x3")])
def test_the_prompt_speaks_of_its_own_grid(size, box):
    text = make("sudoku", size=size).instruction
    assert f"from 1 to {size} " in text and f"every {box} box" in text


def test_texts_do_not_change():
    assert make("sudoku").reset(3)[0] == " _ 2 1 _\n _ 4 _ 2\n _ _ 4 3\n _ 3 2 _"


def test_seeds_lead_to_different_grids():
    env = make("sudoku")
    assert len({env.reset(seed)[0] for seed in range(300)}) == 300


@pytest.mark.parametrize(
    "kwargs",
    [{"size": 6}, {"blanks": 0}, {"blanks": 13}, {"size": 9, "blanks": 55}, {"blanks": 8, "max_turns": 7}],
)
def test_impossible_arguments_are_refused(kwargs):
    with pytest.raises(ValueError, match="needs"):
        make("sudoku", **kwargs)
