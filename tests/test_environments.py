"""Every environment keeps the contract, and what is special about each."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_multiturn.check import check_env
from verl_multiturn.env import derive_seed, list_envs, make
from verl_multiturn.exact import exact_values
from verl_multiturn.policies import expert_policy, play, random_policy

EXAMPLE = str(Path(__file__).parents[1] / "examples" / "new_environment.py")
BUILT_IN = ["bandit", "chain_sum", "frozen_lake", "sokoban"]
VARIANTS = [
    ("frozen_lake", {"slip": 0.3, "max_turns": 20}),
    ("bandit", {"turns": 4}),
    ("sokoban", {"size": 7, "boxes": 2, "max_turns": 20, "coordinates": False}),
]


@pytest.mark.parametrize(("name", "kwargs"), [*((n, {}) for n in [*BUILT_IN, EXAMPLE]), *VARIANTS])
def test_contract(name, kwargs):
    report = check_env(name, **kwargs)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", sorted(set(list_envs()) - {*BUILT_IN}))
def test_every_other_environment_has_a_contract_test_of_its_own(name):
    """On a real instance of its library, in a file that is skipped where the library is absent."""
    files = [
        path for stem in (name, f"adapter_{name}") for path in Path(__file__).parent.glob(f"test_{stem}*.py")
    ]
    assert any("check_env(" in path.read_text() for path in files), name


@pytest.mark.parametrize("name", BUILT_IN)
def test_texts_do_not_change(name):
    """A task is its seed: recorded panels and papers' tables rest on it."""
    env = make(name)
    first = {
        "bandit": "Arms: Dentist, Inventor.",
        "chain_sum": "Numbers: 6 3 1 7\nTotal of the first 0: 0",
        "frozen_lake": " _ O _ P\n G _ _ O\n _ O _ _\n _ O _ _\nP 0 3 G 1 0",
        "sokoban": " # # # # # #\n # _ _ # # #\n # _ _ _ # #\n # _ X _ # #\n # _ O P # #\n # # # # # #\n"
        "P 4 3 X 3 2 O 4 2",
    }
    assert env.reset(3)[0] == first[name]


@pytest.mark.parametrize("name", ["chain_sum", "frozen_lake", "sokoban", EXAMPLE])
def test_the_expert_always_wins_where_nothing_is_left_to_chance(name):
    env = make(name)
    assert all(play(env, expert_policy, seed).success for seed in range(100))


def mean_return(env, policy, seed, samples=4000):
    returns = [play(env, policy, seed, derive_seed(seed, i)).episode_return for i in range(samples)]
    mean = sum(returns) / samples
    sd = (sum((r - mean) ** 2 for r in returns) / (samples - 1)) ** 0.5
    return mean, 4 * sd / samples**0.5


@pytest.mark.parametrize(
    ("name", "kwargs"), [("bandit", {"turns": 3}), ("frozen_lake", {"slip": 0.4}), ("frozen_lake", {})]
)
def test_exact_values_agree_with_play(name, kwargs):
    env = make(name, **kwargs)
    env.reset(11)
    truth = exact_values(env, "uniform").start
    mean, four_sigma = mean_return(env, random_policy(random.Random(1)), 11)
    assert abs(mean - truth) < four_sigma


def test_exact_values_of_the_bandit():
    env = make("bandit", turns=2)
    env.reset(0)
    values = exact_values(env, gamma=0.5)
    assert values.Q[0, 2][env.high] == pytest.approx(0.25 + 0.5 * 0.175)
    assert values.Q[0, 2][env.low] == pytest.approx(0.1 + 0.5 * 0.175)
    assert exact_values(env, "optimal").start == pytest.approx(0.5)


@given(st.lists(st.floats(0, 1), min_size=4, max_size=4))
@settings(max_examples=20, deadline=None)
def test_chain_sum_has_the_closed_form(p):
    env = make("chain_sum")
    env.reset(7)

    def table(state):
        right = sum(env.numbers[: state + 1])
        return {str(right): p[state], str(right % 36 + 1): 1 - p[state]}

    values = exact_values(env, table)
    for k in range(4):
        product = 1.0
        for chance in p[k:]:
            product *= chance
        assert values.V[k, 4 - k] == pytest.approx(product)


def test_exact_optimum_is_what_the_expert_gets_on_dry_ice():
    env = make("frozen_lake")
    for seed in range(20):
        distance = env.reset(seed)[1]["distance"]
        assert exact_values(env, "optimal", gamma=0.9).start == pytest.approx(0.9 ** (distance - 1))


def test_exact_values_refuse_nonsense():
    env = make("bandit")
    env.reset(0)
    with pytest.raises(ValueError, match="Did you mean 'optimal'"):
        exact_values(env, "optimum")
    with pytest.raises(ValueError, match=r"sum to 0\.5, not 1"):
        exact_values(env, lambda state: {env.high: 0.5})


def test_members_of_a_group_share_the_map_but_not_the_slips():
    env = make("frozen_lake", slip=0.5, max_turns=20)
    starts, ends = set(), set()
    for member in range(16):
        starts.add(env.reset(2, dynamics_seed=member)[0])
        ends.add(env.step("up")[0])
    assert len(starts) == 1 and len(ends) > 1


def test_frozen_lake_format_and_bounds():
    env = make("frozen_lake", min_distance=3, max_distance=5)
    for seed in range(50):
        text, info = env.reset(seed)
        *rows, last = text.split("\n")
        assert 3 <= info["distance"] <= 5 and len(rows) == 4
        assert all(len(row) == 8 and set(row[::2]) == {" "} for row in rows)
        p, r, c, g, goal_r, goal_c = last.split()
        assert (p, g) == ("P", "G")
        assert rows[int(r)][2 * int(c) + 1] == "P" and rows[int(goal_r)][2 * int(goal_c) + 1] == "G"
        assert env.expert() in env.experts()
    text = env.reset(0)[0]
    assert env.step(" UP\n")[4]["valid"] and not env.step("north")[4]["valid"]


def test_sokoban_pays_as_gym_sokoban_does():
    env = make("sokoban")
    for seed in range(30):
        _, info = env.reset(seed)
        episode = play(env, expert_policy, seed)
        assert episode.turns == info["solution"] and 2 <= episode.turns <= 10
        assert episode.episode_return == pytest.approx(11 - 0.1 * episode.turns)


def test_sokoban_pushes_and_does_not_pull():
    env = make("sokoban")
    env.reset(0)
    env.floor = {(2, c) for c in range(1, 5)}
    env.targets, env.boxes, env.player, env.plan = frozenset({(2, 3)}), frozenset({(2, 2)}), (2, 1), {}
    assert env.expert() == "right"
    assert env.step("left")[1:3] == (-0.1, False)  # a wall
    text, reward, terminated, _, info = env.step("right")
    assert (reward, terminated, info["success"]) == (pytest.approx(10.9), True, True)
    assert text.split("\n")[2] == " # _ P √ _ #"
    env.boxes = frozenset({(2, 4)})  # against the wall for good
    assert env.expert() == "up"


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("frozen_lake", {"min_distance": 9}),
        ("frozen_lake", {"slip": 2}),
        ("sokoban", {"max_solution": 99}),
        ("sokoban", {"boxes": 9}),
        ("bandit", {"turns": 0}),
        ("chain_sum", {"length": 0}),
    ],
)
def test_impossible_arguments_are_refused(name, kwargs):
    with pytest.raises(ValueError, match=r"at least 1|needs"):
        make(name, **kwargs)


def test_a_room_or_map_that_cannot_be_drawn_says_so():
    with pytest.raises(RuntimeError, match="no map of size 2"):
        make("frozen_lake", size=2, min_distance=5).reset(0)
