"""Measuring environments: what is found, and that one that hangs or crashes stops nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from environments.frozen_lake import FrozenLake
from verl_multiturn.cli import app
from verl_multiturn.env import list_envs, make
from verl_multiturn.measure import VARIANTS, Plan, Variant, chosen, machine, measure, save, summary
from verl_multiturn.measure_one import Subject, again, parts, resident_mib, tasks_of
from verl_multiturn.measure_table import markdown
from verl_multiturn.policies import expert_policy
from verl_multiturn.stats import wilson

FAST = Plan(episodes=8, seconds=2, limit=60)
ENV = """
import os, time
from verl_multiturn.env import Env

class One(Env):
    instruction = "Go."
    max_turns = 3

    def __init__(self, trouble=""):
        self.trouble = trouble
        self.load = bytearray(2_000_000)

    def _reset(self, seed):
        return f"room {seed}", {}

    def _step(self, action):
        if self.trouble == "hang":
            time.sleep(600)
        if self.trouble == "crash":
            os._exit(3)
        if self.trouble == "raise":
            raise KeyError("lost")
        return "end", 1.0, action == "go", {"valid": action in ("go", "stay"), "success": action == "go"}

    def admissible(self):
        return ["go", "stay"]

    def expert(self):
        if self.trouble == "late":
            time.sleep(600)
        return "go"
"""


@pytest.fixture
def one(tmp_path):
    (tmp_path / "one.py").write_text(ENV)
    return f"{tmp_path / 'one.py'}:One"


def told():
    lines = []
    return lines, lines.append


def test_what_is_measured():
    found = {}
    for doing, more in parts("frozen_lake", {"size": 4}, 16, 5):
        found |= more | {"doing": doing}
    assert found["doing"] == "" and found["check"] == {"ok": True, "failures": []}
    expert = found["expert"]
    assert (expert["success"], expert["low"], expert["n"]) == (1, wilson(16, 16).low, 16)
    assert found["random"]["success"] < 1 and found["random"]["n"] == 16
    assert found["steps_per_second"] > 100 and found["reset_ms"] > 0
    assert found["snapshot_ms"] > 0 and found["restore_ms"] > 0 and found["memory_mib"] >= 0
    assert (found["snapshots"], found["runs_in"], found["max_turns"]) == ("copy", "thread", 8)
    assert found["tasks"] == "seeds from 0 to 15" and found["licence"] == "Apache-2.0"


def test_an_environment_with_nothing_but_a_text(tmp_path):
    """Neither actions nor an expert: speed is measured all the same."""
    text = 'from verl_multiturn.env import Env\nclass Bare(Env):\n    instruction, max_turns = "x", 2\n'
    text += '    snapshots = "none"\n    def _reset(self, seed):\n        return "a", {}\n'
    text += '    def _step(self, action):\n        return "b", 0.0, False, {}\n'
    (tmp_path / "bare.py").write_text(text)
    found = {}
    for _, more in parts(f"{tmp_path / 'bare.py'}", {}, 4, 1):
        found |= more
    assert found["random"] is None and found["expert"] is None
    assert found["steps_per_second"] > 0 and "snapshot_ms" not in found


def test_time_ends_what_episodes_do_not():
    subject = Subject(make("frozen_lake"), list(range(100_000)), 100_000, 0.2)
    played = subject.row(expert_policy)["n"]
    assert 1 <= played == subject.played < 100_000
    assert subject.pace == len(subject.steps) / sum(subject.steps) > 0


def test_tasks_are_those_of_a_list_where_there_is_one(tmp_path):
    env = make("frozen_lake")
    assert tasks_of(env, 3) == ([0, 1, 2], "seeds from 0 to 2")

    class Listed(type(env)):
        def tasks(self, split):
            if split != "valid_unseen":
                raise ValueError(split)
            return [f"u{n}" for n in range(5)]

    assert tasks_of(Listed(), 2) == (["u0", "u1"], "the first of 5 in valid_unseen")
    assert tasks_of(Listed(), 9) == ([f"u{n}" for n in range(5)], "all of valid_unseen")


MEMORY = """
import sys
from verl_multiturn.env import make
from verl_multiturn.measure_one import Subject, memory
from verl_multiturn.policies import expert_policy

print(memory(Subject(make(sys.argv[1]), [0, 1], 2, 5), lambda: make(sys.argv[1]), expert_policy))
"""


def test_memory_of_one_more_instance(one):
    """Each holds 2 MB that it has written; in a process of its own, as pages freed before are used again."""
    if resident_mib() is None:
        pytest.skip("no /proc on this system")
    done = subprocess.run([sys.executable, "-c", MEMORY, one], check=True, capture_output=True, text=True)
    assert 1.5 < float(done.stdout) < 4


def test_resets_are_of_tasks_that_were_played_before():
    """What is built once for a task is not counted again and again."""
    started = []

    class Watched(FrozenLake):
        def reset(self, seed, dynamics_seed=None):
            started.append(seed)
            return super().reset(seed, dynamics_seed)

    env = Watched()
    subject = Subject(env, list(range(8)), 8, 5)
    assert again(subject, expert_policy) == {} and started == []
    subject.played = 3
    assert set(again(subject, expert_policy)) == {"reset_ms", "snapshot_ms", "restore_ms"}
    assert started == [0, 1, 2]
    env.snapshots = "none"
    assert set(again(subject, expert_policy)) == {"reset_ms"}


@pytest.mark.parametrize(
    ("trouble", "sentence"),
    [
        ("hang", "took longer than 8 s, at: random policy"),
        ("late", "took longer than 8 s, at: expert"),
        ("crash", "ended with code 3, at: random policy"),
        ("raise", "KeyError: 'lost', at: random policy"),
    ],
)
def test_trouble_is_named_and_the_others_go_on(one, trouble, sentence):
    lines, tell = told()
    variants = [Variant(one, trouble, {"trouble": trouble}), Variant("bandit", "", {})]
    rows = measure(variants, Plan(4, 1, 8), tell)
    assert rows[0]["problem"] == sentence
    assert ("random" in rows[0] and rows[0]["random"]["n"] == 4) is (trouble == "late")  # what came before
    assert "problem" not in rows[1] and rows[1]["check"]["ok"]
    *_, begins, ended, _, other = lines  # before them, perhaps, that the machine is busy
    assert begins.startswith("[1/2] ") and begins.endswith(f"({trouble}) ...")
    assert sentence in ended and other.startswith("[2/2] bandit: random ")


def test_what_cannot_be_made_is_a_row(one):
    (row,) = measure([Variant(one, "", {"troubel": 1})], FAST, lambda line: None)
    assert "unknown keyword" in row["problem"] and "Did you mean 'trouble'?" in row["problem"]
    assert row["problem"].endswith("at: make") and summary(row) == row["problem"]


def test_which_are_measured():
    everything = chosen([])
    assert {one.env.partition(":")[0] for one in everything} == set(list_envs())
    assert chosen(["bandit"]) == [Variant("bandit", "", {})]
    assert str(Variant("alfworld", "full", {})) == "alfworld (full)"
    with pytest.raises(ValueError, match="Did you mean 'bandit'"):
        chosen(["bandti"])


def test_every_variant_is_one_of_an_environment_that_there_is():
    assert set(VARIANTS) <= {one.env for one in chosen([])}
    for name, variants in VARIANTS.items():
        assert variants and [one.kwargs for one in chosen([name])] == list(variants.values())


def test_the_command(tmp_path, one):
    table, speeds = tmp_path / "results" / "table.md", tmp_path / "speeds.json"
    arguments = ["measure-envs", "bandit", one, "--episodes", "4", "--seconds", "1"]
    arguments += ["--table", str(table), "--speeds", str(speeds)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "[1/2] bandit: random" in result.output and result.output.endswith(f"wrote {table} and {speeds}\n")
    rows = {row["name"]: row for row in json.loads(speeds.read_text())["rows"]}
    assert set(rows) == {"bandit", one}
    assert {"command", "commit", "machine", "steps_per_second"} <= set(rows["bandit"])
    text = table.read_text()
    assert text.startswith("# Environments, measured") and "| bandit |" in text and machine() in text
    result = CliRunner().invoke(app, [*arguments[:2], *arguments[3:]])  # one alone: the other's row stays
    assert set(row["name"] for row in json.loads(speeds.read_text())["rows"]) == {"bandit", one}
    speeds.write_text("[]")
    result = CliRunner().invoke(app, [*arguments[:2], *arguments[3:]])
    assert result.exit_code == 2 and "does not hold measured rows" in result.output


def test_the_table():
    where = {"command": "c", "commit": "abc", "machine": "two CPUs", "load": 0.1}
    half = {"success": 0.5, "low": 0.2, "high": 0.8, "n": 10, "turns": 3.25}
    measured = {"steps_per_second": 12345.6, "reset_ms": 0.01234, "memory_mib": 0.0001, "check": {"ok": True}}
    broken = {"random": half, "check": {"ok": False, "failures": ["law: x"]}}
    big = {
        "name": "a",
        "variant": "big",
        "kwargs": {"size": 9},
        "random": half,
        "expert": None,
        "max_turns": 7,
    }
    rows = [
        {**big, **measured, **where},
        {"name": "b", "variant": "", "kwargs": {}, "problem": "ImportError: pipes | break tables", **where},
        {"name": "c", "variant": "", "kwargs": {}, **broken, **where, "commit": "def"},
    ]
    text = markdown(rows)
    assert "| a | size=9 |  | 7 | 50.0 | 20.0 to 80.0 | 10 | none |  |  | 3.2 | ok |" in text
    assert "| 12,346 | 0.0123 |" in text and "< 0.001" in text
    assert "* b: ImportError: pipes \\| break tables" in text and "| b |" not in text
    assert "FAILS" in text and "* c: law: x" in text
    assert "* `c`, commit abc, two CPUs, load 0.1 at the start: a (big), b" in text
    assert "commit def, two CPUs, load 0.1 at the start: c" in text


def test_this_machine_in_words():
    import socket

    said = machine()
    assert "CPUs" in said and "Python 3" in said and socket.gethostname() not in said


def test_a_row_of_another_kind_is_kept(tmp_path):
    where = {"command": "c", "commit": "abc", "machine": "m", "load": 0.1, "kwargs": {}}
    first = [{"name": name, "variant": "", **where} for name in ("a", "b")]
    save(first, tmp_path / "t.md", tmp_path / "s.json")
    save([{"name": "b", "variant": "new", **where}], tmp_path / "t.md", tmp_path / "s.json", whole=False)
    kept = json.loads(Path(tmp_path / "s.json").read_text())["rows"]
    assert [(row["name"], row["variant"]) for row in kept] == [("a", ""), ("b", "new")]
