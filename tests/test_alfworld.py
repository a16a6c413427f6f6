"""ALFWorld: the environment and its engine, on games generated here."""

import json
import random
import shutil

import pytest

pytest.importorskip("alfworld", reason='needs pip install "verl-multiturn[alfworld]"')

from environments.alfworld_parts import library
from environments.alfworld_parts.engine import new_engine, stock_engine
from environments.alfworld_parts.games import Request, write_games
from environments.alfworld_parts.library import TASK_TYPES
from verl_multiturn.check import check_env
from verl_multiturn.env import make
from verl_multiturn.panel import Panel, check_disjoint


@pytest.fixture(scope="session")
def data(alfworld_games):
    return alfworld_games


@pytest.fixture(scope="session")
def scenes(tmp_path_factory, data):
    """Files of six games: three of small scenes, three of full ones."""
    folder = tmp_path_factory.mktemp("alfworld") / "full"
    write_games(folder, Request({"train": 3}, seed=6), quiet=True)
    return [*sorted(data.rglob("game.tw-pddl"))[:3], *sorted(folder.rglob("game.tw-pddl"))]


@pytest.fixture
def env(data):
    env = make("alfworld", data=str(data))
    yield env
    env.close()


# ------------------------------------------------------------------ the engine


def play(engine, game, turns):
    rng = random.Random(0)
    engine.load(str(game))
    state = engine.reset()
    said = [(state.feedback, state["admissible_commands"])]
    for turn in range(turns):
        command = "dance" if turn % 6 == 5 else rng.choice(state["admissible_commands"])
        state, reward, done = engine.step(command)
        said.append((command, state.feedback, state["admissible_commands"], reward, done, state["won"]))
        if done:
            break
    return said


def test_the_caches_change_no_word(scenes):
    """Observations, commands, rewards, endings: as stock (30 games and 1,680 steps in tests/bench)."""
    stock, fast = stock_engine(), new_engine()
    for game in scenes:
        assert play(fast, game, 14) == play(stock, game, 14)


def test_the_stock_engine_stays_stock(scenes):
    """Our caches are in place only while our engine works."""
    import fast_downward
    from textworld.envs.pddl import textgen

    before = fast_downward.pddl2sas, textgen._parse_and_convert, textgen.deepcopy
    play(new_engine(), scenes[0], 2)
    assert (fast_downward.pddl2sas, textgen._parse_and_convert, textgen.deepcopy) == before


def test_an_engine_snapshot_is_small_and_exact(scenes):
    engine = new_engine()
    for game in scenes:
        play(engine, game, 20)
        snapshot, before = engine.unwrapped.snapshot(), engine.unwrapped.state
        facts = set(map(str, before["_facts"]))
        engine.reset()
        after = engine.unwrapped.restore(snapshot)
        assert (after.feedback, after["admissible_commands"]) == (
            before.feedback, before["admissible_commands"])  # fmt: skip
        assert set(map(str, after["_facts"])) == facts and len(snapshot[0]) <= 20


# ------------------------------------------------------------------ the environment


def test_it_keeps_the_contract(data):
    report = check_env("alfworld", episodes=2, data=str(data), max_turns=25)
    assert report.ok, str(report)


def test_the_expert_wins_every_game_of_every_type(env):
    for game in env.tasks("train"):
        _, info = env.reset(game)
        over, turns = False, 0
        while not over:
            action = env.expert()
            assert action in env.admissible()
            _, reward, terminated, truncated, last = env.step(action)
            over, turns = terminated or truncated, turns + 1
        assert last["success"] and reward == 1.0 and turns < 50, (info, turns)
    assert {env.peek(game)[1] for game in env.tasks("train")} == set(TASK_TYPES)


def test_the_expert_finds_its_way_back_from_anywhere(env):
    """From the state that random commands lead to, also with the wrong thing in its hand."""
    for game in env.tasks("train")[:6]:
        env.reset(game)
        rng = random.Random(game)
        over = False
        for _ in range(12):
            if not over:
                _, _, over, _, _ = env.step(env.random_action(rng))
        while not over:
            _, _, terminated, truncated, last = env.step(env.expert())
            over = terminated or truncated
            assert last["valid"]
        assert terminated


def test_what_a_turn_shows(env):
    observation, info = env.reset(env.tasks("valid_unseen")[0])
    assert observation.startswith("You are in the middle of a room.")
    assert env.instruction.startswith("Your task is to: ") and "\n" not in env.instruction
    assert info["game"].startswith("valid_unseen/") and info["task_type"] in TASK_TYPES
    assert "help" not in env.admissible() and "inventory" in env.admissible()
    before = env.state_key()
    answer, reward, terminated, truncated, last = env.step("fly to the moon")
    assert (answer, reward, terminated, truncated) == ("Nothing happens.", 0.0, False, False)
    assert not last["valid"] and env.state_key() == before
    answer, *_, last = env.step("  Help ")  # hidden is not illegal
    assert "Available commands" in answer and last["valid"]


@pytest.mark.parametrize("key", ["state", "obs", "obs+actions"])
def test_nothing_happens_is_no_place(data, key):
    env = make("alfworld", data=str(data), key=key)
    env.reset(0)
    keys = [env.state_key()]
    for action in env.admissible()[:2]:
        env.step(action)
        keys += [env.state_key()]
        env.step("dance")
        assert env.state_key() == keys[-1]
    assert len(set(keys)) == 3


def test_looking_around_is_not_another_state(data):
    env = make("alfworld", data=str(data))
    env.reset(0)
    before = env.state_key()
    env.step("inventory")
    assert env.state_key() == before
    env.step(next(a for a in env.admissible() if a.startswith("go to ")))
    assert env.state_key() != before


def test_a_snapshot_goes_to_another_game_and_back(env):
    env.reset(0)
    for _ in range(4):
        env.step(env.expert())
    snapshot, key, shown = env.snapshot(), env.state_key(), (env.instruction, env.admissible())
    assert len(snapshot) < 3000
    env.reset(1)
    env.step(env.expert())
    env.restore(snapshot)
    assert (env.state_key(), (env.instruction, env.admissible()), env.turn) == (key, shown, 4)
    child = env.fork()
    child.step(child.expert())
    assert env.state_key() == key and child.state_key() != key
    child.close()


def test_engines_are_used_again(data):
    """Each new one would leak 1.6 MB."""
    first = make("alfworld", data=str(data))
    first.reset(0)
    engine = first._engine
    first.close()
    second = make("alfworld", data=str(data))
    second.reset(1)
    assert second._engine is engine
    second.close()


# ------------------------------------------------------------------ the games


def test_the_splits_are_disjoint_by_content(env):
    splits = ("train", "valid_seen", "valid_unseen")
    kwargs = {"data": str(env.folder)}
    panels = [Panel.build("alfworld", kwargs, env.tasks(split), split) for split in splits]
    assert [len(panel.tasks) for panel in panels] == [18, 6, 6]
    check_disjoint(*panels)
    panels[0].verify(3)
    observation, _ = env.reset(panels[0].tasks[0].id)
    assert env.content(observation) == env.peek(panels[0].tasks[0].id)[0]


def test_the_order_does_not_come_from_the_file_system(data, tmp_path):
    """The same games copied in another order, to another place."""
    games = sorted((data / "json_2.1.1" / "train").glob("*/*"), key=lambda path: path.name)
    for game in games:
        shutil.copytree(game, tmp_path / "json_2.1.1" / "train" / game.parent.name / game.name)
    assert make("alfworld", data=str(tmp_path)).tasks("train") == make("alfworld", data=str(data)).tasks(
        "train"
    )


def test_a_changed_game_is_another_game(data, tmp_path):
    shutil.copytree(data / "json_2.1.1" / "train", tmp_path / "json_2.1.1" / "train")
    before = library.games(data)["train"]
    path = library.game_file(tmp_path, before[0])
    path.write_text(path.read_text().replace("(openable ", "(moveable ", 1))
    digests = {game.digest for game in library.games(tmp_path)["train"]}
    assert len(digests & {game.digest for game in before}) in (17, 18)


def test_games_of_an_older_engine_are_refused(data, tmp_path):
    game = library.games(data)["train"][0]
    path = tmp_path / "json_2.1.1" / game.id / "game.tw-pddl"
    path.parent.mkdir(parents=True)
    content = json.loads(library.game_file(data, game).read_text())
    content["grammar"] = content["grammar"].replace("move {o} to {r}", "put {o} in/on {r}")
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"before 0\.4, whose command is put, not move"):
        make("alfworld", data=str(tmp_path))


def test_unsolvable_and_foreign_games_are_left_out(data, tmp_path):
    """As upstream does: without a solution, with sliced objects, with movable receptacles."""
    games = library.games(data)["train"]
    for number, game in enumerate(games[:3]):
        folder = ("Sliced-" if number == 1 else "") + game.id.split("/")[1]
        path = tmp_path / "json_2.1.1" / "train" / folder / "trial" / "game.tw-pddl"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.loads(library.game_file(data, game).read_text())
        content["solvable"] = number != 0
        path.write_text(json.dumps(content))
    assert [game.digest for game in library.games(tmp_path)["train"]] == [games[2].digest]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"key": "stat"},
            "unknown key of alfworld 'stat'; valid: state, obs, obs[+]actions. Did you mean 'state'",
        ),
        (
            {"types": ["pick_and_place"]},
            "unknown task type of alfworld 'pick_and_place'.*pick_and_place_simple",
        ),
        ({"split": "seen"}, "unknown split of alfworld 'seen'.*Did you mean 'valid_seen'"),
        ({"data": "/nowhere"}, "no ALFWorld games under /nowhere/json_2.1.1: run alfworld-download"),
    ],
)
def test_wrong_arguments_get_a_sentence(data, wrong, said):
    with pytest.raises(ValueError, match=said):
        make("alfworld", **{"data": str(data), **wrong})


def test_the_benchmark_without_its_data(monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(ValueError, match="data=benchmark needs ALFWorld's games: run alfworld-download"):
        make("alfworld", data="benchmark")


def test_the_benchmark_is_a_folder_of_the_same_kind(data, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(data))
    env = make("alfworld", data="benchmark")
    assert len(env.tasks("train")) == 18 and type(env).find_data() == str(data)


def test_an_unknown_game_names_some(env):
    with pytest.raises(ValueError, match=r"unknown game of .* 'train/nothing'; valid: train/"):
        env.reset("train/nothing")
