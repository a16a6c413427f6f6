"""Recorded runs of a four-task panel, written as training and evaluation write them."""

import pytest

from verl_multiturn.panel import Panel
from verl_multiturn.runs import RunWriter

SMALL = "/cache/frozen_lake-0123456789abcdef"


@pytest.fixture(scope="session")
def panel():
    return Panel.build("frozen_lake", {}, range(1000), "val", n=4)


def _trajectory(task, success, **more):
    turn = {"actions": ["left"], "action_ids": [1, 2, 3], "index": 0}
    record = {
        "group": str(task),
        "trajectory": 0,
        "env": "frozen_lake",
        "task": str(task),
        "task_type": "near",
    }
    return record | {"success": success, "return": float(success), "turns": [turn, turn]} | more


def _write(folder, panel, curve, algorithm="vineppo", seed=1, model=SMALL, evaluated=None, **settings):
    """A recorded run with validations {step: outcomes of the panel's tasks}, or an evaluation."""
    config = {
        "multiturn": {"algorithm": algorithm, "env": "frozen_lake", "seed": seed} | settings,
        "actor_rollout_ref": {"model": {"path": model}},
        "trainer": {"total_training_steps": max(curve), "device": "cpu"},
    }
    split = "val" if evaluated is None else "eval"
    (folder / "panels").mkdir(parents=True)
    panel.save(folder / f"panels/{split}.json")
    with RunWriter(folder, config | ({} if evaluated is None else {"eval": {"model": evaluated}})) as writer:
        for step, outcomes in curve.items():
            tasks = zip(panel.tasks, outcomes, strict=True)
            writer.trajectories(split, step, [_trajectory(task.id, won) for task, won in tasks])
            if step and split == "val":
                writer.trajectories("train", step, [_trajectory(n, False) for n in range(5)])
                writer.metrics(
                    step, {"multiturn/trajectories/mean": 5, "multiturn/turns/mean": 2, "timing_s/step": 2.0}
                )
    return folder


@pytest.fixture(scope="session")
def write():
    """(folder, panel, {step: outcomes of the tasks}, algorithm, seed, ...) -> the recorded run's folder."""
    return _write


@pytest.fixture(scope="session")
def trajectory():
    """(task, success, ...) -> a recorded trajectory of two turns with three tokens each."""
    return _trajectory
