"""Rubik's cube: the turns obey the laws of the 2x2x2 group, and the solver is exact."""

import random
from functools import reduce

import pytest

from environments.rubiks_cube import ENOUGH, INVERSE, MOVES, SOLVED, solve, turn
from verl_multiturn.check import check_env
from verl_multiturn.env import make
from verl_multiturn.policies import expert_policy, play, random_policy

PLAIN = SOLVED[0]
MARKED = "abcdefghijklmnopqrstuvwx"  # 24 cells told apart, so that no difference is hidden by equal colours


@pytest.mark.parametrize("kwargs", [{}, {"min_scramble": 2, "max_scramble": 5, "max_turns": 6}])
def test_contract(kwargs):
    report = check_env("rubiks_cube", **kwargs)
    assert report.ok, str(report)


def after(moves, cube=MARKED):
    return reduce(turn, moves.split(), cube)


def order(moves):
    cube, times = after(moves), 1
    while cube != MARKED:
        cube, times = after(moves, cube), times + 1
    return times


@pytest.mark.parametrize("move", MOVES)
def test_a_turn_has_order_four_and_is_undone_by_its_inverse(move):
    assert order(move) == 4
    assert after(f"{move} {INVERSE[move]}") == MARKED == after(f"{INVERSE[move]} {move}")
    assert INVERSE[INVERSE[move]] == move
    assert sum(a != b for a, b in zip(after(move), MARKED, strict=True)) == 12


@pytest.mark.parametrize(
    ("moves", "times"),
    [
        ("R U R' U'", 6),
        ("R' D' R D", 6),
        ("R U", 15),
        ("R U'", 9),
        ("R U R' U", 5),
        ("R U R' U R U U R'", 6),
        ("R L'", 4),
        ("R L", 4),
        ("U D", 4),
    ],
)
def test_orders_of_sequences(moves, times):
    assert order(moves) == times


@pytest.mark.parametrize(("one", "other"), ["UD", "RL", "FB"])
def test_opposite_turns_commute_and_turn_the_cube_as_a_whole(one, other):
    assert after(f"{one} {other}") == after(f"{other} {one}")
    assert after(f"{one} {other}'", PLAIN) in SOLVED and after(f"{one} {other}'", PLAIN) != PLAIN


def test_neighbouring_turns_do_not_commute():
    assert after("U R") != after("R U") and after("R F") != after("F R") and after("U F") != after("F U")


@pytest.mark.parametrize(
    ("move", "text"),
    [
        ("U", "U: w w / w w\nR: b b / r r\nF: r r / g g\nD: y y / y y\nL: g g / o o\nB: o o / b b"),
        ("R", "U: w g / w g\nR: r r / r r\nF: g y / g y\nD: y b / y b\nL: o o / o o\nB: w b / w b"),
        ("F", "U: w w / o o\nR: w r / w r\nF: g g / g g\nD: r r / y y\nL: o y / o y\nB: b b / b b"),
        ("D'", "U: w w / w w\nR: r r / b b\nF: g g / r r\nD: y y / y y\nL: o o / g g\nB: b b / o o"),
        ("L'", "U: g w / g w\nR: r r / r r\nF: y g / y g\nD: b y / b y\nL: o o / o o\nB: b w / b w"),
        ("B", "U: r r / w w\nR: r y / r y\nF: g g / g g\nD: y y / o o\nL: w o / w o\nB: b b / b b"),
    ],
)
def test_turns_of_a_solved_cube_held_white_up_and_green_in_front(move, text):
    env = make("rubiks_cube")
    env.reset(0)
    env.cube = PLAIN
    assert env.step(move)[0] == text


def test_the_number_of_cubes_at_each_distance_is_the_known_one():
    """Of the 3,674,160 cubes 1, 6, 27, 120, 534, 2256, ... need 0, 1, 2, ... quarter turns."""
    layers, seen = [[PLAIN]], {PLAIN}
    for _ in range(5):
        found = {turn(cube, move) for cube in layers[-1] for move in ENOUGH} - seen
        seen |= found
        layers.append(sorted(found))
    assert [len(layer) for layer in layers] == [1, 6, 27, 120, 534, 2256]
    for distance, layer in enumerate(layers):
        assert all(len(solve(cube)) == distance for cube in layer[:40])


def test_solutions_of_cubes_far_away_solve_them():
    rng = random.Random(0)
    for _ in range(3):
        cube = rng.choice(SOLVED)
        for _ in range(14):
            cube = turn(cube, rng.choice(list(MOVES)))
        assert len(solve(cube)) <= 14
        assert after(" ".join(solve(cube)), cube) in SOLVED


def test_there_are_24_ways_to_hold_it():
    assert len(set(SOLVED)) == 24
    for cube in SOLVED:
        faces = [cube[4 * i : 4 * i + 4] for i in range(6)]
        assert all(len(set(face)) == 1 for face in faces) and solve(cube) == ()


@pytest.mark.parametrize("kwargs", [{}, {"min_scramble": 5, "max_scramble": 6}])
def test_the_expert_solves_in_as_many_turns_as_it_was_scrambled_with(kwargs):
    env = make("rubiks_cube", **kwargs)
    lengths = set()
    for seed in range(60):
        _, info = env.reset(seed)
        episode = play(env, expert_policy, seed)
        assert episode.success and episode.turns == info["solution"] and episode.episode_return == 1
        lengths.add(info["solution"])
    assert lengths == set(range(env.min_scramble, env.max_scramble + 1))


def test_the_expert_finds_back_from_anywhere():
    env = make("rubiks_cube", max_turns=20)
    env.reset(1)
    for move in ("F", "L", "D'", "B", "R"):
        assert not env.step(move)[2]
    for _ in range(15):
        _, reward, terminated, _, info = env.step(env.expert())
        if terminated:
            break
    assert info["success"] and reward == 1


def test_a_solved_cube_may_be_held_in_any_way():
    env = make("rubiks_cube")
    for last, solved in (("U'", True), ("D'", True), ("D", False), ("U", False)):
        env.reset(0)
        env.cube = turn(PLAIN, "U")
        _, reward, terminated, _, info = env.step(last)
        assert (reward, terminated, info["success"]) == (float(solved), solved, solved)


def test_actions_in_any_case_and_with_a_curly_apostrophe():
    env = make("rubiks_cube")
    text = env.reset(4)[0]
    for action in ("X", "U2", "UR", "U ''", "up"):
        assert env.step(action)[0] == text and not env.fork().step(action)[4]["valid"]
    turned = env.fork().step("R'")[0]
    for action in ("r'", " R’ ", "r’"):
        got, _, _, _, info = env.fork().step(action)
        assert got == turned and info["valid"]


def test_random_play_rarely_wins():
    env = make("rubiks_cube")
    won = sum(play(env, random_policy(random.Random(seed)), seed).success for seed in range(200))
    assert 0 < won < 40


def test_texts_do_not_change():
    assert make("rubiks_cube").reset(3)[0] == (
        "U: b b / r r\nR: b o / y y\nF: y y / r g\nD: g o / g o\nL: r g / w w\nB: w w / b o"
    )


def test_the_prompt_names_the_budget_and_every_turn():
    text = make("rubiks_cube", max_scramble=1, max_turns=1).instruction
    assert "at most 1 turn:" in text and text.endswith(f"Actions: {', '.join(MOVES)}.")


@pytest.mark.parametrize(
    "kwargs",
    [{"min_scramble": 0}, {"min_scramble": 4}, {"max_scramble": 9, "max_turns": 20}, {"max_turns": 2}],
)
def test_impossible_arguments_are_refused(kwargs):
    with pytest.raises(ValueError, match="needs"):
        make("rubiks_cube", **kwargs)
