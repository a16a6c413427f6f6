"""ScienceWorld: the contract, its tasks, and what its simulator does without our care."""

import os
import shutil
import time

import pytest

pytest.importorskip("scienceworld", reason="extra scienceworld is not installed")
if shutil.which("java") is None:
    pytest.skip("java is not installed", allow_module_level=True)

from environments.textworld_parts.science import TASKS, Simulator, borrow, ids, leave
from verl_multiturn.check import check_env
from verl_multiturn.env import make

SHORT = {"tasks": "find-non-living-thing", "max_turns": 7}  # its solution has 5 or 7 steps


@pytest.fixture(scope="module")
def simulator():
    """One Java machine for the tests that ask the simulator itself."""
    one = borrow()
    yield one
    leave(one)


@pytest.fixture
def env():
    one = make("scienceworld", tasks=["boil", "lifespan-longest-lived"])
    yield one
    one.close()


def test_contract():
    report = check_env("scienceworld", episodes=1, full=True, **SHORT)
    assert report.ok, str(report)
    assert any("shown by the expert" in check.sentence for check in report.checks)


def test_tasks_and_splits_are_the_packages(simulator):
    api = simulator._api
    assert set(api.getTaskNames()) == set(TASKS)
    for task, sizes in TASKS.items():
        assert api.getTaskMaxVariations(task) == sum(sizes)
    for task in ("boil", "lifespan-longest-lived", "grow-plant"):
        simulator.load(task, 0, "")
        theirs = [list(api.getVariationsTrain()), list(api.getVariationsDev()), list(api.getVariationsTest())]
        for split, variations in zip(("train", "dev", "test"), theirs, strict=True):
            assert sorted(ids(split, (task,))) == sorted(f"{task}/{number}" for number in variations)


def test_tasks_need_no_simulator():
    env = make("scienceworld", simplifications="easy")
    assert [len(env.tasks(split)) for split in ("train", "dev", "val", "test")] == [3592, 1796, 1796, 1819]
    assert env.peek(0) == env.peek(env.tasks("test")[0]) == env.peek(1819)
    assert env.peek(1_000_003) == env.peek(env.tasks("train")[3])
    assert env.peek(500_000) == env.peek(env.tasks("dev")[0]) and env.peek("boil/3") == (
        "boil/3/easy",
        "boil",
    )
    assert len({env.peek(seed)[1] for seed in range(60)}) > 10  # the tasks are mixed
    assert env._simulator is None


def test_another_java_machine_shows_the_same():
    """Without the constant identity hash it shows things in another order: science.JAVA."""
    shown = []
    for _ in range(2):
        one = Simulator()
        one.load("find-plant", 1, "")
        shown.append([one.look(), one.do("open door to hallway"), one.valid()])
        one.close()
    assert shown[0] == shown[1]


def test_to_list_the_actions_rolls_no_dice(simulator):
    """It does in the simulator, which tries them out: then an episode depends on who asked how often."""
    simulator.load("mendelian-genetics-known-plant", 0, "")
    dice = simulator.dice()
    assert len(simulator.valid()) > 100 and simulator.look() and simulator.dice() == dice
    simulator._api.getValidActionObjectCombinations()
    assert simulator.dice() != dice
    simulator.load("mendelian-genetics-known-plant", 0, "")
    assert simulator.dice() == dice


def test_the_solution_wins_after_a_detour_and_is_worked_out_late(env):
    assert env.reset("lifespan-longest-lived/3")[1] == {"task_type": "lifespan-longest-lived", "variation": 3}
    assert env.instruction.startswith("Your task is to find the animal with the longest life span.")
    rewards = [env.step("look around")[1], env.step("inventory")[1]]
    while env._phase == "running":
        _, reward, terminated, _, info = env.step(env.expert())
        rewards.append(reward)
    assert terminated and info["success"] and info["score"] == 100
    assert sum(rewards) == pytest.approx(1.0) and min(rewards) >= 0


def test_a_wrong_answer_ends_the_episode(env):
    env.reset("boil/0")
    _, reward, terminated, _, info = env.step("focus on air")
    assert (reward, terminated, info["success"], info["score"]) == (-1.0, True, False, -100)


def test_an_open_question_takes_a_number_or_is_dropped(env):
    env.reset("boil/0")
    key = env.state_key()
    assert env.step("gibberish")[4]["valid"] is False and env.state_key() == key
    for answer, reply in (("0", "A door to the"), ("open door", "Unknown action")):
        question, _, _, _, info = env.step("look at door")
        assert question.startswith("Ambiguous request") and info["valid"] and env.state_key() != key
        env.actions = True
        assert env.admissible()[:2] == ["0", "1"]
        text, _, _, _, info = env.step(answer)
        assert text.startswith(reply) and info["valid"] and env.state_key() == key


def test_a_snapshot_is_replayed(env):
    env.reset("lifespan-longest-lived/0")
    env.step(env.expert())
    child = env.fork()
    assert child.state_key() == env.state_key() and child._simulator is not env._simulator
    assert child.step(child.expert())[:2] == env.step(env.expert())[:2]
    child.close()


def test_an_unused_simulator_ends():
    one = Simulator()
    one.close()
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{one.pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{one.pid}")


def test_without_java_it_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ImportError, match="scienceworld needs java: install java"):
        make("scienceworld")


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"tasks": "boyl"}, "Did you mean 'boil'"),
        ({"tasks": []}, "at least one task"),
        ({"simplifications": "easi"}, "Did you mean 'easy'"),
        ({"tasks": "power-component", "simplifications": "noElectricalAction"}, "impossible"),
        ({"max_turns": 0}, "max_turns of at least 1"),
    ],
)
def test_wrong_arguments(kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        make("scienceworld", **kwargs)


@pytest.mark.parametrize("id", ["boil/30", "boil", "boil/x", "freez/1"])
def test_wrong_ids(id):
    with pytest.raises(ValueError, match=r"0 to 29|Did you mean 'freeze'"):
        make("scienceworld").peek(id)
