import json
import os
import signal
import subprocess
import sys
import time
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest

from verl_multiturn import provenance
from verl_multiturn.runs import Run, RunWriter, to_turns

ROOT = Path(__file__).parents[1]


def turn(index, **more):
    record = {
        "index": index, "observation": "a ☃", "prompt_ids": [1, 2], "prompt": "a",
        "action_ids": [3], "log_probs": [-0.5], "text": "<act>right</act>", "actions": ["right"],
        "valid": True, "reward": 0.0, "anchor": None, "value": None, "advantage": None, "row": 0,
        "span": [0, 1], "generate_seconds": 0.1, "env_seconds": 0.01,
    }  # fmt: skip
    return record | more


def trajectory(step=1, group="g", number=0, turns=2, **more):
    record = {
        "split": "train", "step": step, "group": group, "trajectory": number, "env": "frozen_lake",
        "task": "7", "task_type": "small", "seed": 7, "dynamics_seed": 8, "return": 1.0,
        "success": True, "terminated": True, "truncated": False, "truncation": None,
        "seconds": 0.2, "instruction": "go", "turns": [turn(t) for t in range(turns)],
    }  # fmt: skip
    return record | more


def child(code, *arguments):
    """Start Python code that can import the package, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_round_trip(tmp_path):
    config = {"multiturn": {"algorithm": "gigpo", "name": "é"}, "lr": 1e-6, "same": "${lr}"}
    odd = turn(
        0,
        text="日本\n\u2028 \x00 \U0001f600",
        prompt_ids=np.arange(6)[::2],
        log_probs=np.array([-0.5, nan], np.float32),
        reward=np.float32(0.5),
        valid=np.bool_(False),
        row=np.int64(3),
    )
    with RunWriter(tmp_path / "run", config) as writer:
        writer.metrics(1, {"loss": np.float32(0.5), "kl": nan, "n": np.int64(3), "top": inf})
        writer.metrics(2, {"loss": 0.25})
        writer.metrics(1, {"val/success": 1})
        writer.trajectories("train", 1, [trajectory() | {"turns": [odd]}])
        writer.trajectories("val", 10, [trajectory(10), trajectory(10, number=1)])
        writer.trajectories("val", 2, [])
        writer.failure({"step": 1, "error": "boom"})
    run = Run(tmp_path / "run")

    assert run.config == config | {"same": 1e-6}
    assert run.splits() == ["train", "val"]
    assert run.steps("val") == [2, 10]
    assert run.trajectories("val", 2) == []
    assert [t["trajectory"] for t in run.trajectories("val", 10)] == [0, 1]
    assert run.trajectories("val", 10)[0] == trajectory(10)
    read = run.trajectories("train", 1)[0]["turns"][0]
    assert read["text"] == odd["text"]
    assert read["prompt_ids"] == [0, 2, 4]
    assert read["log_probs"] == [-0.5, None]
    assert (read["reward"], read["valid"], read["row"]) == (0.5, False, 3)
    assert run.metrics.index.tolist() == [1, 2]
    assert run.metrics.loc[1, ["loss", "n", "val/success"]].tolist() == [0.5, 3.0, 1.0]
    assert run.metrics.loc[1, ["kl", "top"]].isna().all()
    assert run.failures == [{"step": 1, "error": "boom"}]
    first = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert list(first) == ["step", "time", "metrics"]
    assert first["metrics"]["kl"] is None


def test_a_kill_leaves_no_half_file(tmp_path):
    code = """
import sys
from verl_multiturn import provenance
from verl_multiturn.runs import RunWriter
writer = RunWriter(sys.argv[1])
row = {"turns": [{"action_ids": [hash((t, i)) for i in range(900)]} for t in range(50)]}
for step in range(10_000):
    writer.metrics(step, {"loss": 1.0})
    writer.trajectories("train", step, [row] * 20)
    print(step, flush=True)
"""
    for attempt in range(3):
        process = child(code, tmp_path / str(attempt))
        folder = tmp_path / str(attempt) / "trajectories" / "train"
        deadline = time.monotonic() + 60
        while not list(folder.glob("*.tmp")) or len(list(folder.glob("*.zst"))) <= attempt:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close(), process.stderr.close()
        run = Run(folder.parents[1])
        assert run.steps("train") == list(range(len(run.steps("train"))))
        assert all(len(run.trajectories("train", step)) == 20 for step in run.steps("train"))
        RunWriter(run.folder, resume_step=0).close()
        assert Run(run.folder).steps("train") == [0]
        assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("what", ["trajectories", "metrics"])
def test_a_full_disk_is_one_sentence(tmp_path, what):
    # A limit on file size is the kernel's own refusal to write: a real OSError in the middle.
    code = """
import resource, signal, sys
from verl_multiturn import provenance
from verl_multiturn.runs import RunWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = RunWriter(sys.argv[1])
writer.trajectories("train", 1, [{"turns": []}])
writer.metrics(1, {"loss": 1.0})
while not writer._jobs.empty() or not list(writer.folder.glob("trajectories/train/1.*zst")):
    pass
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
import random
try:
    for step in range(2, 200):
        if sys.argv[2] == "trajectories":
            writer.trajectories("train", step, [{"a": [random.random() for _ in range(5000)]}])
        else:
            writer.metrics(step, {f"m{i}": random.random() for i in range(100)})
    writer.close()
except RuntimeError as error:
    print(error)
try:
    writer.metrics(300, {"loss": 1.0})
except RuntimeError as error:
    print("again")
try:
    writer.close()
except RuntimeError as error:
    print("and again")
"""
    process = child(code, tmp_path, what)
    out, err = process.communicate(timeout=60)
    message, *rest = out.splitlines()
    assert rest == ["again", "and again"], err
    assert "could not record" in message and "File too large" in message
    assert str(tmp_path / what) in message
    assert message.endswith("steps up to 1 are recorded; free space and rerun the same command to resume")
    if what == "metrics":
        with pytest.warns(UserWarning, match="cut off"):
            assert Run(tmp_path).metrics.index.tolist() == [1]
    assert Run(tmp_path).steps("train") == [1]
    assert not list(tmp_path.rglob("*.tmp"))
    RunWriter(tmp_path, resume_step=1).close()
    assert Run(tmp_path).metrics.index.tolist() == [1]


def test_what_cannot_be_json_is_reported_and_does_not_block(tmp_path):
    writer = RunWriter(tmp_path)
    writer.trajectories("train", 0, [{"bad": object()}])
    with pytest.raises(RuntimeError, match=r"0\.jsonl\.zst: .*; no step is recorded yet; correct"):
        for _ in range(20):
            writer.trajectories("train", 1, [])
            time.sleep(0.05)
    with pytest.raises(ValueError, match="metric 'loss' is not a number: 'high'"):
        RunWriter(tmp_path / "other").metrics(1, {"loss": "high"})


def test_the_message_names_the_earliest_step(tmp_path):
    writer = RunWriter(tmp_path)
    many = [{"numbers": list(range(100_000))}] * 20
    writer.trajectories("train", 3, many)
    writer.trajectories("train", 4, [*many, {"bad": object()}])
    with pytest.raises(RuntimeError, match=r"train/4.*steps up to 3 are recorded"):
        writer.failure({"step": 5, "bad": object()})  # fails at once, while the others still wait
    assert Run(tmp_path).steps("train") == [3]


def test_the_first_error_stays_visible(tmp_path):
    with pytest.raises(KeyError) as caught, RunWriter(tmp_path) as writer:
        writer.trajectories("train", 1, [{"bad": object()}])
        raise KeyError("training")
    assert "could not record" in caught.value.__notes__[0]


def record(folder, steps, config, resume_step=None):
    with RunWriter(folder, config, resume_step) as writer:
        for step in steps:
            writer.metrics(step, {"loss": step, "resumed": float(resume_step is not None)})
            writer.failure({"step": step})
            for split in ("train", "val", "test"):
                writer.trajectories(split, step, [trajectory(step)])


def test_resume_moves_later_steps_aside(tmp_path):
    record(tmp_path, range(5), {"lr": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "metrics": {"x": 1}}')  # whole, but for its newline
    record(tmp_path, [3], {"lr": 2}, resume_step=2)
    record(tmp_path, [4], {"lr": 2}, resume_step=3)
    run = Run(tmp_path)
    assert run.metrics.index.tolist() == [0, 1, 2, 3, 4]
    assert run.metrics["resumed"].tolist() == [0, 0, 0, 1, 1]
    assert run.steps("train") == run.steps("val") == [0, 1, 2, 3, 4]
    assert run.steps("test") == [0, 1, 2, 3, 4]
    assert [failure["step"] for failure in run.failures] == [0, 1, 2, 3, 4]
    assert run.config == {"lr": 1}
    assert [p.name for p in sorted(tmp_path.glob("config*"))] == ["config.1.yaml", "config.yaml"]
    (discarded,) = (tmp_path / "discarded").iterdir()
    assert len((discarded / "metrics.jsonl").read_text().splitlines()) == 3
    kept = sorted(p.relative_to(discarded).as_posix() for p in discarded.rglob("*.zst"))
    assert kept == [f"trajectories/{s}/{n}.jsonl.zst" for s in ("train", "val") for n in (3, 4)]


def test_a_config_that_was_removed_is_written_again(tmp_path):
    """What is said of a damaged one leads there; other files of the user's do not count."""
    RunWriter(tmp_path, {"a": 1}).close()
    RunWriter(tmp_path, {"a": 2}, resume_step=1).close()
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "config_old.yaml").touch()
    RunWriter(tmp_path, {"a": 3}, resume_step=1).close()
    assert Run(tmp_path).config == {"a": 3}


def test_a_fresh_start_counts_nothing_twice(tmp_path):
    record(tmp_path, range(3), {"lr": 1})
    record(tmp_path, range(1), {"lr": 2})
    run = Run(tmp_path)
    assert run.steps("train") == run.metrics.index.tolist() == [0]
    assert run.config == {"lr": 2}
    (old,) = (tmp_path / "discarded").iterdir()
    assert {p.name for p in old.iterdir()} == {
        "config.yaml", "metrics.jsonl", "failures.jsonl", "trajectories", "about.jsonl",
    }  # fmt: skip


def test_each_start_says_where_it_was(tmp_path):
    config = {"actor_rollout_ref": {"model": {"path": "/home/me/models/Qwen2.5-3B"}}}
    record(tmp_path, range(3), config)
    record(tmp_path, [3], config, resume_step=2)
    first, second = Run(tmp_path).about
    assert (first["step"], second["step"], second["model"]) == (0, 2, "Qwen2.5-3B")
    assert first["commit"] == provenance.commit() and "CPUs" in first["hardware"]
    assert provenance.commit(tmp_path) == "unknown"
    config["actor_rollout_ref"]["model"]["path"] = "/cache/frozen_lake-0123456789abcdef"
    record(tmp_path, range(1), config)
    assert [line["model"] for line in Run(tmp_path).about] == ["small"]
    RunWriter(tmp_path / "old").close()
    assert Run(tmp_path / "old").about == []


def test_errors_say_what_is_there(tmp_path):
    record(tmp_path / "gigpo", [0, 10], None)
    with pytest.raises(ValueError, match=r"no metrics.jsonl and no trajectories; .*/gigpo$"):
        Run(tmp_path)
    with pytest.raises(ValueError, match=r"recorded runs near it: .*/gigpo$"):
        Run(tmp_path / "gigpp")
    run = Run(tmp_path / "gigpo")
    assert run.config == {}
    with pytest.raises(ValueError, match=r"unknown step of split 'val' '5'; valid: 0, 10"):
        run.trajectories("val", 5)
    with pytest.raises(ValueError, match="unknown split 'vall'; valid: test, train, val"):
        run.steps("vall")


def test_broken_metrics_lines(tmp_path):
    record(tmp_path, [1, 2], None)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:20])
    with pytest.warns(UserWarning, match="skipped the last line"):
        assert Run(tmp_path).metrics.index.tolist() == [1]
    path.write_text(lines[0][:20] + "\n" + lines[1])
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1 is not JSON"):
        _ = Run(tmp_path).metrics


def test_to_turns():
    first = trajectory(group="a", turns=0) | {
        "turns": [turn(0, anchor="ff", reward=0.5), turn(1, anchor="ff", value=2.0, action_ids=[])]
    }
    cut = {"terminated": False, "truncated": True, "truncation": "turns"}
    second = trajectory(group="a", number=1, turns=0, **cut) | {"turns": [turn(0, valid=False)]}
    batch = to_turns([first, second])
    assert batch.reward.tolist() == [0.5, 0, 0]
    assert batch.terminated.tolist() == [False, True, False]
    assert batch.truncated.tolist() == [False, False, True]
    assert batch.tokens.tolist() == [1, 0, 1]
    assert batch.valid.tolist() == [True, True, False]
    assert np.isnan(batch.value).tolist() == [True, False, True]
    assert batch.anchor_code[0] == batch.anchor_code[1] != batch.anchor_code[2]
    assert len(to_turns([])) == 0
