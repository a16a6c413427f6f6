"""TextWorld: the contract, and that it plays as textworld itself does."""

import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("textworld", reason="extra textworld is not installed")
pytest.importorskip("jericho", reason="extra textworld is not installed")

from environments.textworld_parts.frotz import command_of, tidy
from environments.textworld_parts.games import KINDS, place_of, settings_of
from verl_multiturn.check import check_env
from verl_multiturn.env import make
from verl_multiturn.panel import Panel, check_disjoint

ROOT = Path(__file__).parents[1]
# Few and small games: each one costs 2 to 5 s when it is first played on a machine.
COIN = {"kind": "coin", "level": 3, "games": 2, "max_turns": 6}
COOKING = {"kind": "cooking", "games": 1, "max_turns": 6}
CUSTOM = {"kind": "custom", "quest_length": 2, "games": 1, "max_turns": 6}


@pytest.mark.parametrize(
    ("kwargs", "episodes"),
    [
        (COIN, 2),
        (COOKING | {"reward": "intermediate", "full": True}, 2),
        (CUSTOM | {"reward": "success"}, 2),
    ],
)
def test_contract(kwargs, episodes):
    report = check_env("textworld", episodes=episodes, **kwargs)
    assert report.ok, str(report)
    assert any(f"success in {episodes} of {episodes}" in check.sentence for check in report.checks)


@pytest.mark.parametrize("kwargs", [COIN, COOKING, CUSTOM])
@pytest.mark.filterwarnings("ignore:Game")
def test_it_plays_as_textworld_does(kwargs):
    import textworld

    env = make("textworld", **kwargs | {"reward": "intermediate", "max_turns": 20})
    asked = {"admissible_commands": True, "intermediate_reward": True, "policy_commands": True}
    asked |= {"score": True, "max_score": True}
    for seed in range(2):
        env.reset(seed)
        stock = textworld.start(str(env._now.rom), textworld.EnvInfos(**asked))
        state, rng = stock.reset(), random.Random(seed)
        assert env.max_score == state.max_score
        for turn in range(20):
            assert env.admissible() == state.admissible_commands
            assert env._engine.plan() == state.policy_commands
            action = env.expert() if turn % 2 else env.random_action(rng)
            state, score, done = stock.step(action)
            text, reward, terminated, _, info = env.step(action)
            assert (info["score"], terminated) == (score, done) and reward == state.intermediate_reward
            told = state.feedback.partition("Would you like to RESTART")[0]
            assert text == tidy(told)
            if done:
                break
        stock.close()


def test_rewards():
    for reward, expected in (("score", [0.25] * 4), ("success", [0, 0, 0, 1]), ("intermediate", [1] * 4)):
        env = make("textworld", **COOKING | {"reward": reward})
        env.reset(0)
        rewards = []
        while env._phase == "running":
            rewards.append(env.step(env.expert())[1])
        assert rewards == expected
    env = make("textworld", **COIN | {"reward": "intermediate"})
    env.reset(0)
    there = env.expert()
    back = {"north": "south", "south": "north", "east": "west", "west": "east"}[there.split()[1]]
    assert [env.step(a)[1] for a in (there, f"go {back}", "look", there)] == [1, -1, 0, 1]


def test_what_does_nothing_is_invalid_and_changes_nothing():
    env = make("textworld", **COIN | {"max_turns": 30})
    env.reset(0)
    way = env.expert().split()[1]
    files = sorted(env._now.folder.iterdir())
    before, machine = env.state_key(), env._engine.save()[0][0].tobytes()
    nothing = ["wait", "take moon", "xyzzy", "save", "RESTART", "quit", "undo", "tw-trace-actions", ""]
    for action in [*nothing, f"go {way}. look", f"go {way} then look", "look\u2603", "x" * 500]:
        text, reward, terminated, _, info = env.step(action)
        assert text and (reward, terminated, info["valid"]) == (0, False, False), action
        assert env.state_key() == before and env._engine.save()[0][0].tobytes() == machine, action
    assert sorted(env._now.folder.iterdir()) == files
    assert env.step(way[0].upper())[4]["valid"] and env.state_key() != before  # the parser's "n"


def test_commands_that_may_be_sent():
    assert command_of("  Take  the red-hot pepper ") == "take the red-hot pepper"
    assert (
        command_of('k9, say "hello"') is None
        and command_of('K9, say "hello"', wide=True) == 'k9, say "hello"'
    )
    assert command_of("saved", wide=True) == "saved" and command_of("restor", wide=True) is None


CONTINUE = """
import pickle, sys
env = pickle.loads(open(sys.argv[1], "rb").read())
print(env.state_key(), *env.admissible(), sep="|")
while env._phase == "running":
    info = env.step(env.expert())[4]
assert info["success"]
"""


def test_a_snapshot_goes_on_in_a_process_with_other_hashes(tmp_path):
    env = make("textworld", **COOKING)
    env.reset(0)
    env.step("examine cookbook")
    env.step(env.expert())
    saved = tmp_path / "env.pickle"
    saved.write_bytes(pickle.dumps(env))
    for hashes in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", CONTINUE, str(saved)],
            env={**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().split("|") == [env.state_key(), *env.admissible()]
    assert len(env.snapshot()) < 25_000


def test_a_snapshot_of_another_game_is_refused():
    env = make("textworld", **COIN)
    env.reset("test/1")
    state = env._engine.save()
    env.reset("test/0")
    with pytest.raises(RuntimeError, match="is not the game"):
        env._engine.load(env._now.rom, state)


def test_tasks():
    env = make("textworld", **COIN)
    assert env.tasks("train") == ["train/0", "train/1"]
    assert place_of(3, 2) == ("test", 1) == place_of("test/1", 2)
    assert place_of(500_000, 64) == ("val", 0) and place_of(1_000_065, 64) == ("train", 1)
    assert env.peek(0) == env.peek("test/0") == env.peek(2) != env.peek(1)
    assert env.peek(0) == (env.content(env.reset(0)[0]), "coin")
    panel = Panel.build("textworld", COIN, "test", "test")
    assert [task.id for task in panel.tasks] == ["test/0", "test/1"]
    check_disjoint(panel, Panel.build("textworld", CUSTOM, range(3), "val"))
    for id in ("test/2", "exam/0", "test", "test/x"):
        with pytest.raises(ValueError, match="number from 0 to 1"):
            env.reset(id)
    with pytest.raises(ValueError, match="Did you mean 'train'"):
        env.tasks("trian")


def test_two_processes_make_one_game_and_everywhere_the_same(tmp_path):
    kwargs = ", ".join(f"{name}={value!r}" for name, value in COOKING.items())
    ask = f"from verl_multiturn.env import make; print(*make('textworld', {kwargs}).peek(0))"
    path = {"PYTHONPATH": str(ROOT), "VERL_MULTITURN_CACHE": str(tmp_path), "PYTHONHASHSEED": "77"}
    both = [
        subprocess.Popen([sys.executable, "-c", ask], env={**os.environ, **path}, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    said = [one.communicate()[0].decode().split() for one in both]
    assert said == [list(make("textworld", **COOKING).peek(0))] * 2
    (folder,) = (one for one in (tmp_path / "textworld").iterdir() if one.is_dir())
    assert sorted(file.name for file in folder.iterdir()) == ["game.json", "game.z8", "meta.json"]


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"kind": "coyn"}, "Did you mean 'coin'"),
        ({"kind": "cooking", "recipies": 2}, "Did you mean 'recipe'"),
        ({"kind": "cooking", "recipe": 2, "take": 3}, "take from 0 to recipe"),
        ({"kind": "cooking", "go": 2}, "go of 1, 6, 9 or 12"),
        ({"kind": "cooking", "cook": 1}, "must be of type bool"),
        ({"level": 160}, "at most 100 rooms"),
        ({"kind": "custom", "quest_length": 0}, "quest_length of at least 1"),
        ({"reward": "scores"}, "Did you mean 'score'"),
        ({"games": 0}, "games and max_turns of at least 1"),
    ],
)
def test_wrong_arguments(kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        make("textworld", **kwargs)


def test_settings_have_defaults_for_every_kind():
    assert all(settings_of(kind, {}) for kind in KINDS)


def test_a_game_that_cannot_be_made_says_so():
    with pytest.raises(ValueError, match="cannot make a custom game"):
        make("textworld", kind="custom", theme="nowhere").reset(0)
