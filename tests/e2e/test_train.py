"""Real runs: verl's V1 trainer, TransferQueue, FSDP and vLLM on the CPU. Each start costs about a minute."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from verl_multiturn.algorithms import advantages
from verl_multiturn.algorithms.starpo import keep_groups
from verl_multiturn.runs import Run, to_turns

pytestmark = pytest.mark.e2e
REPOSITORY = Path(__file__).parents[2]
SMALL = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "multiturn.val_size=16")
TIMEOUT = 600


def command(recipe: str, run: Path, *overrides: str) -> list[str]:
    start = [sys.executable, "-m", "verl_multiturn.main", "--config-name", recipe, "hardware=cpu"]
    cache = f"multiturn.small_model.cache={run.parent}/models"
    return [*start, f"multiturn.run={run}", cache, "multiturn.small_model.steps=40", *SMALL, *overrides]


def train(recipe: str, run: Path, *overrides: str, expect: int = 0) -> str:
    done = subprocess.run(
        command(recipe, run, *overrides),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == expect, done.stdout[-6000:]
    return done.stdout


def start(recipe: str, run: Path, *overrides: str) -> subprocess.Popen:
    return subprocess.Popen(
        command(recipe, run, *overrides),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def steps(output: str) -> list[int]:
    return [int(found) for found in re.findall(r"^step (\d+)/", output, re.MULTILINE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def gigpo(folder):
    """GiGPO with turn rows, seeded, killed after the checkpoint of step 2, then resumed to step 3."""
    run = folder / "gigpo"
    overrides = (
        "multiturn.seeded=true",
        "trainer.total_training_steps=3",
        "trainer.test_freq=2",
        "trainer.save_freq=2",
    )
    process = start("gigpo_frozenlake", run, *overrides)
    first = []
    for line in process.stdout:
        first.append(line)
        if line.startswith("step 2/"):
            os.kill(process.pid, signal.SIGKILL)
            break
    process.communicate(timeout=60)
    assert steps("".join(first)) == [1, 2], "".join(first)[-6000:]
    time.sleep(5)  # Ray's processes notice that their driver is gone
    return run, train("gigpo_frozenlake", run, *overrides)


def test_a_killed_run_resumes_at_the_right_step(gigpo):
    run, resumed = gigpo
    assert steps(resumed) == [3]
    recorded = [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]
    assert sorted(set(recorded)) == [0, 1, 2, 3]
    assert Run(run).steps("train") == [1, 2, 3]
    assert (run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_rollout_and_actor_agree(gigpo):
    """The tokens trained are the tokens sampled, under the weights that sampled them."""
    metrics = Run(gigpo[0]).metrics
    assert metrics["training/rollout_probs_diff_max"].dropna().max() < 1e-3
    assert metrics["actor/grad_norm"].dropna().gt(0).any()


def test_recorded_advantages_are_the_algorithms(gigpo):
    """What was trained on, read back from the run folder, is what the pure function says."""
    run = Run(gigpo[0])
    trajectories = run.trajectories("train", 2)
    recorded = [turn["advantage"] for t in trajectories for turn in t["turns"]]
    again = advantages("gigpo", to_turns(trajectories), **run.config["multiturn"]["gigpo"])
    assert recorded == pytest.approx(again, abs=1e-5)
    starts = {(t["group"], t["turns"][0]["observation"]) for t in trajectories}
    assert len(starts) == len({t["group"] for t in trajectories}) == 4


def test_the_same_seed_gives_the_same_run(gigpo, folder):
    again = folder / "again"
    train(
        "gigpo_frozenlake",
        again,
        "multiturn.seeded=true",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "trainer.save_freq=-1",
        "trainer.val_before_train=false",
    )
    first, second = Run(gigpo[0]), Run(again)
    texts = [
        [[turn["text"] for turn in t["turns"]] for t in sorted(run.trajectories("train", 2), key=by_sample)]
        for run in (first, second)
    ]
    assert texts[0] == texts[1]
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "multiturn/success/mean"):
        for step in (1, 2):
            assert first.metrics.loc[step, name] == second.metrics.loc[step, name], (name, step)


def by_sample(trajectory: dict) -> tuple:
    return trajectory["task"], trajectory["trajectory"]


def test_grpo_with_trajectory_rows(folder):
    run = folder / "grpo"
    output = train(
        "grpo_frozenlake",
        run,
        "trainer.total_training_steps=3",
        "trainer.test_freq=3",
        "trainer.save_freq=-1",
    )
    assert steps(output) == [1, 2, 3]
    recorded = Run(run)
    metrics = recorded.metrics
    assert (metrics["multiturn/rows/mean"].dropna() == 32).all()
    assert metrics["training/rollout_probs_diff_max"].dropna().max() < 1e-3
    assert metrics.loc[3, "val/episodes"] == 16
    trajectories = recorded.trajectories("train", 3)
    turns = to_turns(trajectories)
    seen = [turn["advantage"] for t in trajectories for turn in t["turns"]]
    assert seen == pytest.approx(advantages("grpo", turns), abs=1e-4)


def test_starpo_s_with_trajectory_rows(folder):
    """A quarter of the groups is trained on, only their rows cost a forward pass; the rest is recorded."""
    run = folder / "starpo_s"
    output = train(
        "starpo_s_frozenlake",
        run,
        "multiturn.seeded=true",
        "multiturn.information={every: 2, samples: 8}",
        "multiturn.collapse.no_success={warmup: 0}",
        "critic.ppo_mini_batch_size=4",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.val_before_train=false",
    )
    assert steps(output) == [1, 2]
    recorded = Run(run)
    metrics = recorded.metrics
    assert (metrics["multiturn/rows/mean"] == 8).all() and (metrics["multiturn/padded_rows/mean"] == 0).all()
    assert (metrics["multiturn/kept_share/mean"] == 0.25).all() and metrics["critic/vf_loss"].gt(0).all()
    assert metrics.loc[2, "multiturn/mi_per_token/mean"] <= metrics.loc[2, "multiturn/mi_bound/mean"]
    for step in (1, 2):
        played = recorded.trajectories("train", step)
        groups = {t["group"]: [] for t in played}
        for t in played:
            groups[t["group"]].append(t["return"])
        (kept,) = {t["group"] for t in played if t["trained"]}
        best = keep_groups(list(groups.values()), strategy="top_k", value=0.25, include_zero=True)
        assert kept == list(groups)[best[0]]
        credit = {t["trained"]: [turn["advantage"] for turn in t["turns"]] for t in played}
        assert None not in credit[True] and set(credit[False]) == {None}


def test_own_environment_with_a_critic(folder):
    """One file, trained on by PPO over turns; a third of the episodes fail on purpose."""
    run = folder / "own"
    output = train(
        "gigpo_frozenlake",
        run,
        f"multiturn.env={REPOSITORY}/tests/e2e/flaky.py:Flaky",
        "multiturn.algorithm=turn_gae",
        "multiturn.val={first_seed: 0, size: 16}",
        "multiturn.test=null",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.val_before_train=false",
    )
    assert steps(output) == [1, 2]
    recorded = Run(run)
    assert recorded.metrics["critic/vf_loss"].dropna().gt(0).all()
    assert recorded.metrics["multiturn/failed_trajectories/mean"].max() > 0
    assert {f["error"].split(" raised ")[1][:17] for f in recorded.failures} == {"ZeroDivisionError"}


def test_vineppo_without_a_value_network(folder):
    """Values are means of continuations, played before the servers sleep; no critic is built."""
    run = folder / "vineppo"
    output = train(
        "vineppo_frozenlake",
        run,
        "multiturn.vine.rollouts=2",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.val_before_train=false",
    )
    assert steps(output) == [1, 2]
    recorded = Run(run)
    metrics = recorded.metrics
    assert "critic/vf_loss" not in metrics and metrics["multiturn/vine_failed/mean"].eq(0).all()
    shared = metrics["multiturn/vine_unique_states/mean"]
    assert (metrics["multiturn/vine_rollouts/mean"] == 2 * shared).all()
    assert (shared <= metrics["multiturn/vine_states/mean"]).all()
    trajectories = recorded.trajectories("train", 2)
    assert all(turn["value"] is not None for t in trajectories for turn in t["turns"])
    seen = [turn["advantage"] for t in trajectories for turn in t["turns"]]
    settings = recorded.config["multiturn"]["vineppo"]
    assert seen == pytest.approx(advantages("vineppo", to_turns(trajectories), **settings), abs=1e-4)


def test_alfworld_with_a_process_killed(folder, alfworld_games):
    """The real engine, an environment a process; one of them is killed while a step is rolled out."""
    run = folder / "alfworld"
    overrides = (
        f"multiturn.env_kwargs.data={alfworld_games}",
        "multiturn.env_kwargs.max_turns=6",
        "multiturn.small_model.steps=10",
        "multiturn.small_model.episodes=20",
        "multiturn.small_model.batch=32",
        "multiturn.failures.group=drop",
        "algorithm.rollout_correction.bypass_mode=false",  # log-probs are computed again, to compare
        "multiturn.val={split: valid_seen}",
        "multiturn.val_size=null",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "trainer.save_freq=-1",
    )
    began = time.time() - 1
    process = start("gigpo_alfworld", run, *overrides)
    output, killed = [], []
    for line in process.stdout:
        output.append(line)
        if line.startswith("step 1/"):
            # Between two episodes or in one: they live for the whole run.
            killed = environment_processes(began)[:1]
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
    assert process.wait(timeout=60) == 0, "".join(output)[-6000:]
    assert steps("".join(output)) == [1, 2]
    assert killed, "no environment had a process of its own:\n" + "".join(output)[-6000:]
    recorded = Run(run)
    assert (
        recorded.metrics.loc[2, "val/episodes"] == 5 and recorded.metrics.loc[2, "val/unseen/episodes"] == 5
    )
    assert recorded.metrics["training/rollout_probs_diff_max"].dropna().max() < 1e-3
    kinds = {t["task_type"] for step in (1, 2) for t in recorded.trajectories("train", step)}
    assert kinds <= {"pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep",
                     "pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep"}  # fmt: skip
    assert not environment_processes(began)


def environment_processes(since: float) -> list[int]:
    """The environments' own processes: children of a zygote that began after this moment."""
    zygotes, parents = set(), {}
    for process in psutil.process_iter(["pid", "ppid", "create_time", "cmdline"]):
        if process.info["create_time"] >= since and "rollout.zygote" in " ".join(
            process.info["cmdline"] or ()
        ):
            zygotes.add(process.info["pid"])
            parents[process.info["pid"]] = process.info["ppid"]
    return [pid for pid, parent in parents.items() if parent in zygotes]
