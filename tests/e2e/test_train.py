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
    """GiGPO with turn rows, seeded."""
    run = folder / "gigpo"
    output = train(
        "gigpo_frozenlake",
        run,
        "multiturn.seeded=true",
        "trainer.total_training_steps=3",
        "trainer.test_freq=2",
        "trainer.save_freq=2",
    )
    assert steps(output) == [1, 2, 3]
    assert Run(run).steps("train") == [1, 2, 3]
    return run


def test_rollout_and_actor_agree(gigpo):
    """The tokens trained are the tokens sampled, under the weights that sampled them."""
    metrics = Run(gigpo).metrics
    assert metrics["training/rollout_probs_diff_max"].dropna().max() < 1e-3
    assert metrics["actor/grad_norm"].dropna().gt(0).any()


def test_recorded_advantages_are_the_algorithms(gigpo):
    """What was trained on, read back from the run folder, is what the pure function says."""
    run = Run(gigpo)
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
    first, second = Run(gigpo), Run(again)
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


@pytest.fixture(scope="module")
def archer(folder):
    """ArCHer on an environment of one file, a third of whose episodes fail on purpose.

    Killed after the checkpoint of step 2, resumed; after step 3 the process of its critic is killed.
    """
    run = folder / "archer"
    overrides = (
        f"multiturn.env={REPOSITORY}/tests/e2e/flaky.py:Flaky",
        "multiturn.val={first_seed: 0, size: 16}",
        "multiturn.test=null",
        "multiturn.critic.min_size=16",
        "multiturn.critic.batch=32",
        "multiturn.archer.updates=5",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "trainer.critic_warmup=2",
        "trainer.total_training_steps=9",
        "trainer.test_freq=-1",
        "trainer.save_freq=2",
        "trainer.val_before_train=false",
    )
    outputs, heard = [], set()
    for step, victim in ((2, "run"), (3, "critic")):
        began, output = time.time() - 1, []
        process = start("archer_frozenlake", run, *overrides)
        for line in process.stdout:
            output.append(line)
            if line.startswith(f"step {step}/"):
                heard |= listening(process.pid)
                pid = process.pid if victim == "run" else ray_process("CriticActor", began)
                os.kill(pid, signal.SIGKILL)
                break
        output.append(process.communicate(timeout=TIMEOUT)[0])
        outputs.append("".join(output))
        time.sleep(5)  # Ray's processes notice that their driver is gone
    assert steps(outputs[0]) == [1, 2], outputs[0][-6000:]
    assert process.returncode == 1, outputs[1][-6000:]
    return run, outputs[1], heard


def listening(pid: int) -> set[tuple[str, str]]:
    """The name of each process of a run that listens, and its address there."""
    found = set()
    for process in psutil.Process(pid).children(recursive=True):
        for connection in process.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                found.add((process.name(), connection.laddr.ip))
    return found


def test_what_listens(archer):
    """Ray, TransferQueue, verl's LLM server and torch's groups: all on loopback."""
    loopback = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    assert {"gcs_server", "raylet"} <= {name for name, _ in archer[2]}
    assert {(name, address) for name, address in archer[2] if address not in loopback} == set()


def ray_process(actor: str, since: float) -> int:
    """The process of a Ray actor that began after this moment."""
    for process in psutil.process_iter(["pid", "create_time", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if process.info["create_time"] >= since and command.startswith(f"ray::{actor}"):
            return process.info["pid"]
    raise AssertionError(f"no process ray::{actor}")


def test_a_killed_run_resumes_at_the_right_step(archer):
    run, resumed, _ = archer
    assert steps(resumed)[0] == 3
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert list(dict.fromkeys(line["step"] for line in lines))[:3] == [1, 2, 3]
    # A step with a checkpoint has two lines, what was known before it and the rest; only times are in both.
    clocks = ("timing_s/", "perf/")
    values = [
        (line["step"], name) for line in lines for name in line["metrics"] if not name.startswith(clocks)
    ]
    assert len(values) == len(set(values))


def test_the_actor_waits_for_the_critic(archer):
    """Its first update is in step trainer.critic_warmup; verl builds no critic; lost episodes cost no run."""
    recorded = Run(archer[0])
    metrics = recorded.metrics
    assert metrics["actor/grad_norm"].notna().tolist()[:3] == [False, True, True]
    assert "critic/vf_loss" not in metrics and metrics["multiturn/archer/steps/mean"].eq(5).all()
    # The policy of step 2 is that of step 1: what it said there is kept. That of step 3 is new.
    assert metrics["multiturn/archer/cached_share/mean"].gt(0).tolist()[:3] == [False, True, False]
    assert metrics["multiturn/failed_trajectories/mean"].max() > 0
    assert {f["error"].split(" raised ")[1][:17] for f in recorded.failures} == {"ZeroDivisionError"}
    turns = [turn for t in recorded.trajectories("train", 3) for turn in t["turns"]]
    assert all(turn["value"] is not None and turn["advantage"] is not None for turn in turns)


def test_the_replay_outlives_a_kill(archer):
    """Step 3 draws from all that was played, before and after the kill; the steps of the critic go on."""
    recorded = Run(archer[0])
    played = [sum(len(t["turns"]) for t in recorded.trajectories("train", step)) for step in (1, 2, 3)]
    replay = recorded.metrics["multiturn/archer/replay/mean"].tolist()[:3]
    assert replay == [played[0], sum(played[:2]), sum(played)]
    assert recorded.metrics["multiturn/archer/all_steps/mean"].tolist()[:3] == [5, 10, 15]


def test_a_dead_critic_stops_the_run(archer):
    """By the call that it did not answer, or by the watch over the run's processes, whichever is first."""
    run, output, _ = archer
    latest = (run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text()
    called = (
        "the utterance critic's process ended in ",
        f"the same command resumes from {run}/checkpoints/global_step_{latest}",
    )
    watched = "the process of CriticActor ", "the same command resumes from the last checkpoint"
    sentences = re.findall(r"^error: (.*)$", output, re.MULTILINE)
    assert sentences
    for sentence in sentences:
        assert any(sentence.startswith(start) and sentence.endswith(end) for start, end in (called, watched))


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
        "multiturn.env_kwargs.types=[pick_and_place_simple,look_at_obj_in_light,pick_clean_then_place_in_recep,"
        "pick_heat_then_place_in_recep,pick_cool_then_place_in_recep]",
        "multiturn.env_kwargs.max_turns=6",
        "data.max_prompt_length=384",
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
