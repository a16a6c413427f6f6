"""A Q-model recipe as a user runs it: killed while trees grow, taken up again, a table at the end."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
REPOSITORY = Path(__file__).parents[2]
TIMEOUT = 900


def command(run):
    small = {
        "multiturn.small_model.steps": 60, "multiturn.qvalue.tasks": 24, "multiturn.search.iterations": 12,
        "multiturn.pairs.held_out": 0.3, "multiturn.qvalue.limit": 16, "multiturn.fit.epochs": 4,
        "multiturn.fit.batch": 8, "multiturn.run": run, "multiturn.small_model.cache": run.parent / "models",
    }  # fmt: skip
    start = [
        sys.executable,
        "-m",
        "verl_multiturn.main",
        "--config-name",
        "qvalue_frozenlake",
        "hardware=cpu",
    ]
    return [*start, *(f"{key}={value}" for key, value in small.items())]


def trees(run):
    path = run / "trees" / "trees.jsonl"
    return [json.loads(line)["task"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_killed_collection_goes_on(tmp_path):
    run = tmp_path / "run"
    first = subprocess.Popen(command(run), cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + TIMEOUT
    while not trees(run) and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = trees(run)
    assert before, "it was not killed while trees grew"
    done = subprocess.run(command(run), cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    after = trees(run)
    assert after[: len(before)] == before and len(set(after)) == len(after) == 24
    for row in ("greedy", "majority of 5", "random of 5", "Q-guided best of 5", "oracle of 5"):
        assert row in done.stdout
    again = subprocess.run(command(run), cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT)
    assert again.returncode == 0 and again.stdout.count("done before") == 8
