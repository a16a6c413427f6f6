"""Detective's defaults and refusals, on a TextWorld game under its name: the game itself does not ship."""

import shutil

import pytest

pytest.importorskip("jericho", reason="extra textworld is not installed")
pytest.importorskip("textworld", reason="extra textworld is not installed: it makes the story file")

from environments.textworld_parts import guess
from verl_multiturn.check import check_env
from verl_multiturn.env import make
from verl_multiturn.load import load_class


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("roms")
    env = make("textworld", games=2, kind="coin", level=3)
    env.reset(0)
    shutil.copy(env._now.rom, made / "detective.z8")
    shutil.copy(env._now.rom, made / "other.z8")
    return made


def test_contract(folder):
    report = check_env("detective", episodes=1, rom=str(folder), max_turns=4)
    assert report.ok, str(report)


def test_the_papers_defaults(folder, monkeypatch):
    monkeypatch.setenv("JERICHO_ROMS", str(folder))
    env = make("detective")
    assert (env.max_turns, env.full, env.actions, list(env.roms)) == (50, True, "try", ["detective"])
    text, info = env.reset(0)
    assert info["task_type"] == "detective" and "carrying nothing" in text
    assert load_class("detective", object).find_data() == f"{folder}/detective.z8"
    assert list(make("detective", rom=str(folder / "other.z8")).roms) == ["other"]


def test_valid_actions_are_looked_for_once_in_a_state(folder, monkeypatch):
    monkeypatch.setattr(guess, "_found", {})
    calls, find = [], guess.tried
    monkeypatch.setattr(guess, "tried", lambda story: calls.append(1) or find(story))
    one, two = (make("detective", rom=str(folder)) for _ in range(2))
    for env in (one, two):
        env.reset(0)
    first = one.admissible()
    assert one.admissible() == two.admissible() == first and len(calls) == 1
    first.clear()  # a caller's list is its own
    assert one.admissible()
    one.step(two.admissible()[0])
    assert one.admissible() == find(one._story) and len(calls) == 2
    saved = one.snapshot()
    one.step("look")
    one.restore(saved)
    one.admissible()
    assert len(calls) == 2
    monkeypatch.setattr(guess, "REMEMBERED", 2)
    one.step("look")
    one.admissible()
    assert len(calls) == 3 and len(guess._found) == 1


def test_it_says_where_the_file_must_be_put(folder, monkeypatch, tmp_path):
    monkeypatch.delenv("JERICHO_ROMS", raising=False)
    assert load_class("detective", object).find_data() is None
    with pytest.raises(
        FileNotFoundError, match=r"no place was named; put detective\.z5 into a folder of you"
    ):
        make("detective")
    with pytest.raises(
        FileNotFoundError, match=rf"none in {tmp_path}; put detective\.z5 .*JERICHO_ROMS=FOLDER"
    ):
        make("detective", rom=str(tmp_path))
