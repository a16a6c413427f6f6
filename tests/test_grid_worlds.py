"""The variants of Sokoban, FrozenLake and Bandit in RAGEN's papers: what is shown, played and won."""

import random

import pytest

from environments.frozen_lake import MAPS, MOVES
from verl_multiturn.check import check_env
from verl_multiturn.env import make
from verl_multiturn.exact import exact_values
from verl_multiturn.policies import expert_policy, play, random_policy

ROOM = {"max_turns": 10, "min_solution": 1}
LAKE = {"max_turns": 10, "min_distance": 1, "max_distance": 10}
VERSION_1 = {**LAKE, "hole_prob": 0.2, "slip": 2 / 3}
SURE = {  # settings without chance: the expert always wins
    "SimpleSokoban": ("sokoban", {**ROOM, "coordinates": False}),
    "CoordSokoban": ("sokoban", {**ROOM, "grid": False}),
    "both": ("sokoban", ROOM),
    "LargerSokoban": ("sokoban", {**ROOM, "size": 8, "boxes": 2, "coordinates": False}),
    "SokobanDifferentGridVocab": ("sokoban", {**ROOM, "symbols": "W.GCBA@", "coordinates": False}),
    "vocabulary and coordinates": ("sokoban", {**ROOM, "symbols": "W.GCBA@", "grid": False}),
    "deterministic": ("frozen_lake", {**LAKE, "hole_prob": 0.1, "coordinates": False}),
    "CoordFrozenLake": ("frozen_lake", {**LAKE, "hole_prob": 0.1, "grid": False}),
    "4x4": ("frozen_lake", {"map": "4x4"}),
    "8x8": ("frozen_lake", {"map": "8x8", "max_turns": 20}),
    "rows": ("frozen_lake", {"map": ["SFG", "FHF", "FFF"], "coordinates": False}),
    "Bandit": ("bandit", {"phrasing": "symbols"}),
    "BanditRev": ("bandit", {"phrasing": "symbols", "misleading": True}),
    "BanditTest reversed": ("bandit", {"misleading": True, "low_reward": 0.15}),
}
CHANCY = {
    "version 1": ("frozen_lake", VERSION_1),
    "version 2": ("frozen_lake", {**LAKE, "hole_prob": 0.1, "slip": 0.2}),
    "classic 4x4": ("frozen_lake", {"map": "4x4", "slip": 2 / 3, "max_turns": 100}),
}


@pytest.mark.parametrize("name", [*SURE, *CHANCY])
def test_contract(name):
    env, kwargs = (SURE | CHANCY)[name]
    report = check_env(env, **kwargs)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", SURE)
def test_the_expert_always_wins_within_the_turns(name):
    env = make(SURE[name][0], **SURE[name][1])
    assert all(play(env, expert_policy, seed).success for seed in range(100))


@pytest.mark.parametrize("name", CHANCY)
def test_the_expert_of_slippery_ice_beats_chance(name):
    env, wins = make(CHANCY[name][0], **CHANCY[name][1]), {"expert": 0, "random": 0}
    for seed in range(200):
        wins["expert"] += play(env, expert_policy, seed, seed).success
        wins["random"] += play(env, random_policy(random.Random(seed)), seed, seed).success
    assert wins["expert"] > 1.5 * wins["random"]


def test_instructions_of_the_default_arguments():
    """As published: panels hash them."""
    assert make("sokoban").instruction == (
        "Push every box onto a target. Symbols: # wall, _ floor, O target, X box, √ box on target, P player, "
        "S player on target. You push a box by walking into it; you cannot pull, nor push two boxes. "
        "Rows and columns count from 0 at the top left. Actions: up, down, left, right."
    )
    assert make("frozen_lake", slip=0.3).instruction == (
        "Walk on the frozen lake from P to the goal G without falling into a hole O; _ is safe ice. The last "
        "line gives row and column, counted from 0 at the top left. Actions: up, down, left, right. The ice "
        "is slippery: a move goes sideways with chance 0.3."
    )
    assert make("bandit").instruction == (
        "You face two arms, named after professions. Each pull pays a reward; one arm pays the same low "
        "amount every time, the other pays more on average but not always. Think about which name suggests "
        "which, and choose the arm that pays more on average. Actions: the name of an arm."
    )


@pytest.mark.parametrize(
    ("name", "kwargs", "said", "unsaid"),
    [
        ("sokoban", {"coordinates": False}, ["S player on target"], ["Rows", "6 x 6"]),
        ("sokoban", {"grid": False, "size": 7}, ["Rows and columns", "7 x 7"], ["floor", "√", "S player"]),
        ("sokoban", {"symbols": "W.GCBA@"}, ["C box on target", "A player,"], ["#", "√", "P player"]),
        ("frozen_lake", {"coordinates": False}, ["_ is safe ice"], ["row", "slippery", "4 x 4"]),
        ("frozen_lake", {"grid": False, "slip": 0.2}, ["4 x 4", "row and column", "0.2"], ["_", "last line"]),
        ("frozen_lake", {"grid": False, "map": "8x8", "max_turns": 20}, ["8 x 8"], ["4 x 4"]),
        ("bandit", {"phrasing": "symbols"}, ["symbolic names"], ["profession"]),
    ],
)
def test_the_instruction_follows_the_arguments(name, kwargs, said, unsaid):
    instruction = make(name, **kwargs).instruction
    assert all(words in instruction for words in said)
    assert not any(words in instruction for words in unsaid)


def drawn(line, size, border, merged):
    """The grid that a line of coordinates tells; `merged`: what two symbols on one cell look like."""
    words, inner = line.split(), range(1, size - 1)
    cells = {(r, c): "_" if r in inner and c in inner else border for r in range(size) for c in range(size)}
    for symbol, row, column in zip(words[::3], words[1::3], words[2::3], strict=True):
        cell = int(row), int(column)
        cells[cell] = merged.get(cells[cell] + symbol, symbol)
    return "\n".join("".join(f" {cells[row, column]}" for column in range(size)) for row in range(size))


@pytest.mark.parametrize("boxes", [1, 2])
def test_sokoban_shows_the_same_room_either_way(boxes):
    kwargs = {"size": 7, "boxes": boxes, "max_turns": 40, "max_solution": 12}
    grid, line, both = (
        make("sokoban", **kwargs, **more) for more in ({"coordinates": False}, {"grid": False}, {})
    )
    rng = random.Random(0)
    for seed in range(40):
        texts = [env.reset(seed)[0] for env in (grid, line, both)]
        ended = False
        while not ended:
            assert texts[0] == drawn(texts[1], 7, "#", {"XO": "√", "PO": "S"})
            head, _, last = texts[2].rpartition("\n")
            assert head == texts[0] and texts[1].startswith(last)
            action = grid.expert() if rng.random() < 0.5 else rng.choice(grid.admissible())
            results = [env.step(action) for env in (grid, line, both)]
            texts, ended = [result[0] for result in results], results[0][2] or results[0][3]
            assert len({result[1:4] for result in results}) == 1


def test_frozen_lake_shows_the_same_map_either_way():
    grid, line, both = (
        make("frozen_lake", size=5, **more) for more in ({"coordinates": False}, {"grid": False}, {})
    )
    for seed in range(40):
        shown, told, whole = (env.reset(seed)[0] for env in (grid, line, both))
        assert "O" not in whole.split("\n")[-1] and whole.startswith(shown + "\n")
        assert told.startswith(whole.split("\n")[-1])
        assert drawn(told, 5, "_", {}) == shown


def test_a_vocabulary_only_renames():
    one, other = make("sokoban"), make("sokoban", symbols="W.GCBA@")
    renamed = str.maketrans("#_O√XPS", "W.GCBA@")
    for seed in range(30):
        assert one.reset(seed)[0].translate(renamed) == other.reset(seed)[0]
        while True:
            action = one.expert()
            mine, theirs = one.step(action), other.step(action)
            assert mine[0].translate(renamed) == theirs[0] and mine[1:] == theirs[1:]
            if mine[2]:
                break


def test_the_solution_is_as_long_as_told_and_none_is_shorter():
    env = make("sokoban", size=7, boxes=2, max_turns=20, min_solution=3, max_solution=14)
    for seed in range(40):
        length = env.reset(seed)[1]["solution"]
        assert 3 <= length <= 14
        assert play(env, expert_policy, seed).turns == length
    env = make("sokoban", min_solution=1, max_solution=5)
    for seed in range(20):
        length = env.reset(seed)[1]["solution"]
        assert length == 1 or not wins(env.fork(), length - 1)


def wins(env, turns):
    """Whether any `turns` moves end in success: tried one by one."""
    for action in env.admissible():
        child = env.fork()
        _, _, _, over, info = child.step(action)
        if info["success"] or (turns > 1 and not over and wins(child, turns - 1)):
            return True
    return False


def test_sokoban_pays_and_takes_for_each_box():
    env = make("sokoban", size=7, boxes=2, max_turns=20)
    env.reset(0)
    env.floor = {(3, column) for column in range(1, 6)} | {(2, 1), (2, 2)}
    env.targets, env.boxes = frozenset({(3, 3), (2, 2)}), frozenset({(3, 2), (3, 5)})
    env.player = (3, 1)
    text, reward, solved, _, _ = env.step("right")
    assert (text.split("\n")[3], reward, solved) == (" # _ P √ _ X #", pytest.approx(0.9), False)
    text, reward, solved, _, _ = env.step("right")
    assert (text.split("\n")[3], reward, solved) == (" # _ _ S X X #", pytest.approx(-1.1), False)
    assert env.step("right")[:2] == (text, -0.1)  # two boxes


@pytest.mark.parametrize(("name", "slip"), [("4x4", 2 / 3), ("8x8", 2 / 3), ("4x4", 0.0), ("4x4", 0.2)])
def test_fixed_maps_and_slips_are_gymnasiums(name, slip):
    library = pytest.importorskip("gymnasium.envs.toy_text.frozen_lake")
    assert {key: rows.split() for key, rows in MAPS.items()} == library.MAPS
    more = {"is_slippery": slip > 0} | ({"success_rate": 1 - slip} if slip == 0.2 else {})
    truth = library.FrozenLakeEnv(map_name=name, **more).P
    env = make("frozen_lake", map=name, slip=slip, max_turns=20)
    env.reset(0)
    size = int(name[0])
    for state in range(size * size):
        cell = divmod(state, size)
        if cell == env.goal or cell in env.holes:
            continue
        for number, action in enumerate(["left", "down", "right", "up"]):
            assert merged(env.transitions(cell, action)) == pytest.approx(
                merged((p, divmod(int(s), size), r, bool(over)) for p, s, r, over in truth[state][number])
            )


def merged(outcomes):
    chances = {}
    for p, *outcome in outcomes:
        chances[tuple(outcome)] = chances.get(tuple(outcome), 0.0) + p
    return chances


def test_a_fixed_map_is_the_same_for_every_seed():
    env = make("frozen_lake", map="SFFF\nFHFH\nFFFH\nHFFG")
    assert len({env.reset(seed)[0] for seed in range(10)}) == 1
    assert env.reset(0) == make("frozen_lake", map="4x4").reset(7)
    assert env.reset(0)[1]["distance"] == 6


@pytest.mark.parametrize("name", CHANCY)
def test_the_expert_of_slippery_ice_is_the_best_there_is(name):
    env = make(CHANCY[name][0], **CHANCY[name][1])
    for seed in range(5):
        env.reset(seed)
        values = exact_values(env, "optimal")
        env.expert()
        assert env.chances[-1][env.start] == pytest.approx(values.start)
        child = env.fork(seed=1)
        for left in range(env.max_turns, 0, -1):
            action = child.expert()
            best = max(values.Q[child.position, left].values())
            assert values.Q[child.position, left][action] == pytest.approx(best)
            if child.step(action)[2]:
                break


def test_members_of_a_group_slip_differently_and_repeat_their_own():
    env = make("frozen_lake", **VERSION_1)
    walks = set()
    for member in [*range(16), *range(16)]:
        env.reset(4, dynamics_seed=member)
        walk = []
        while not walk or not (walk[-1][2] or walk[-1][3]):
            walk.append(env.step(list(MOVES)[len(walk) % 4])[:4])
        walks.add(tuple(walk))
    assert 1 < len(walks) <= 16


def test_the_bandit_has_its_papers_pairs():
    env = make("bandit", phrasing="symbols")
    for first, pair in ((0, ("Teacher", "Engineer")), (1_000_000, ("Phoenix", "Dragon"))):
        shown = set()
        for seed in range(first, first + 20):
            text, _ = env.reset(seed)
            shown.add(text)
            assert (env.low, env.high) == pair
        assert shown == {f"Arms: {pair[0]}, {pair[1]}.", f"Arms: {pair[1]}, {pair[0]}."}


@pytest.mark.parametrize("phrasing", ["professions", "symbols"])
def test_a_misleading_bandit_shows_the_same_and_pays_the_reverse(phrasing):
    one, other = make("bandit", phrasing=phrasing), make("bandit", phrasing=phrasing, misleading=True)
    assert one.instruction == other.instruction
    for seed in [*range(20), 500_000, 1_000_000]:
        assert one.reset(seed) == other.reset(seed)
        assert (one.low, one.high) == (other.high, other.low)
        assert other.expert() == one.low
        assert other.step(one.high)[1:5:3] == (0.1, {"valid": True, "success": False})


def test_the_low_arm_pays_what_it_is_told():
    env = make("bandit", low_reward=0.15)
    env.reset(0)
    assert exact_values(env).start == pytest.approx(0.2)
    assert env.step(env.low)[:2] == (f"Arms: {', '.join(env.shown)}. {env.low} paid 0.15.", 0.15)


@pytest.mark.parametrize(
    ("name", "kwargs", "sentence"),
    [
        ("sokoban", {"grid": False, "coordinates": False}, "needs grid or coordinates"),
        ("sokoban", {"symbols": "#_OXPS"}, "needs 7 different symbols"),
        ("sokoban", {"symbols": "#_OXXPS"}, "needs 7 different symbols"),
        ("sokoban", {"symbols": "#_O XPS"}, "none a space or a digit"),
        ("frozen_lake", {"grid": False, "coordinates": False}, "needs grid or coordinates"),
        ("frozen_lake", {"map": "4x5"}, "unknown map '4x5'.* Did you mean '4x4'"),
        ("frozen_lake", {"map": ["SF", "FFG"]}, "needs a square map .* not 'SF FFG'"),
        ("frozen_lake", {"map": "SF FF"}, "one S and one G"),
        ("frozen_lake", {"map": ["SX", "FG"]}, "needs a square map of S, F, H and G"),
        ("frozen_lake", {"map": ["SH", "HG"]}, "a path of 2 to 6 steps .* not none"),
        ("frozen_lake", {"map": "8x8"}, "a path of 2 to 6 steps .* not 14"),
        ("frozen_lake", {"map": "8x8", "max_turns": 10, "max_distance": 20}, "2 to 10 steps .* not 14"),
        ("bandit", {"phrasing": "symbol"}, "Did you mean 'symbols'"),
        ("bandit", {"low_reward": 0.25}, r"needs 0 <= low_reward < 0\.25"),
    ],
)
def test_impossible_arguments_are_refused(name, kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(name, **kwargs)
