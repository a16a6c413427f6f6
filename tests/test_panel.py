"""Panels: distinct by content, disjoint, stable, and honest about change."""

import json
from itertools import count

import pytest

from verl_multiturn.env import list_envs
from verl_multiturn.panel import FIRST_ID, Panel, Task, check_disjoint, load_panel
from verl_multiturn.policies import evaluate, expert_policy

BUILT_IN = ["bandit", "chain_sum", "frozen_lake", "sokoban"]
SHIPPED = [f"{env}-{split}" for env in BUILT_IN for split in ("test", "val")]


@pytest.fixture(scope="module")
def lake():
    return Panel.build("frozen_lake", {}, count(), "test", n=20)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_panels_are_what_the_environments_make_today(name):
    panel = load_panel(name)
    panel.verify()
    assert panel.env in list_envs() and len(panel.hashes) == len(panel.tasks)
    assert panel.tasks[0].id == FIRST_ID[panel.split]


@pytest.mark.parametrize("env", BUILT_IN)
def test_splits_are_disjoint_and_leave_room_for_training(env):
    test, val = load_panel(f"{env}-test"), load_panel(f"{env}-val")
    taken = test.hashes | val.hashes
    train = Panel.build(env, {}, count(FIRST_ID["train"]), "train", exclude=taken, n=16)
    check_disjoint(test, val, train)


def test_build_skips_what_it_has_seen(lake):
    again = Panel.build("frozen_lake", {}, [0, 0, 1, 2], "val", exclude={lake.tasks[1].hash})
    assert [task.id for task in again.tasks] == [0, 2]
    with pytest.raises(ValueError, match="frozen_lake-test and frozen_lake-val share 2 tasks"):
        check_disjoint(lake, again)


def test_build_ends_where_the_content_ends():
    everything = Panel.build("bandit", {}, count(), "test")
    assert len(everything.tasks) == 16
    with pytest.raises(ValueError, match="only 16 distinct tasks for split 'test', not 17"):
        Panel.build("bandit", {}, count(), "test", n=17)


def test_save_and_load(lake, tmp_path):
    path = tmp_path / "mine.json"
    lake.save(path)
    assert Panel.load(path) == lake == load_panel(str(path))
    assert Panel.load(path).fingerprint == lake.fingerprint
    assert [p.name for p in tmp_path.iterdir()] == ["mine.json"]
    assert path.read_text().count("\n") == 20 + 2  # a task a line
    json.loads(path.read_text())


def test_load_errors_are_one_sentence(lake, tmp_path):
    path = tmp_path / "mine.json"
    with pytest.raises(ValueError, match="no panel at"):
        Panel.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        Panel.load(path)
    path.write_text('{"env": "x"}')
    with pytest.raises(ValueError, match="is not a panel"):
        Panel.load(path)
    lake.save(path)
    path.write_text(path.read_text().replace('"id": 3', '"id": 33'))
    with pytest.raises(ValueError, match="was changed after it was saved"):
        Panel.load(path)
    with pytest.raises(ValueError, match="Did you mean 'frozen_lake-test'"):
        load_panel("frozen_lake-tset")


def test_verify_names_what_differs(lake):
    other = Panel("frozen_lake", {"size": 5}, "test", lake.tasks)
    with pytest.raises(ValueError, match=r"20 of 20 tasks .* with \{'size': 5\} .* first: 0, 1, 2"):
        other.verify()
    one = Panel("frozen_lake", {}, "test", (*lake.tasks[:3], Task(3, "0" * 32, "near")))
    one.verify(limit=3)
    with pytest.raises(ValueError, match=r"1 of 4 tasks .* first: 3"):
        one.verify()


def test_fingerprint_sees_everything(lake):
    others = [
        Panel("sokoban", {}, "test", lake.tasks),
        Panel("frozen_lake", {"size": 4}, "test", lake.tasks),
        Panel("frozen_lake", {}, "val", lake.tasks),
        Panel("frozen_lake", {}, "test", lake.tasks[::-1]),
    ]
    assert len({panel.fingerprint for panel in [lake, *others]}) == 5


def test_evaluate_plays_every_task_with_its_own_noise():
    panel = Panel.build("bandit", {}, count(), "test", n=4)
    episodes = evaluate(panel, expert_policy, samples=50)
    assert [e.task for e in episodes[::50]] == [task.id for task in panel.tasks]
    assert all(e.success and e.turns == 1 and not e.invalid for e in episodes)
    assert {e.episode_return for e in episodes[:50]} == {0.0, 1.0}
    assert episodes == evaluate(panel, expert_policy, samples=50)
