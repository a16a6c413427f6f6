"""A run killed at every instant around its checkpoints, in verl's own `fit`: nothing lost, nothing twice."""

import json
import os
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_multiturn import configure, heartbeat, run_files
from verl_multiturn.checkpoints import LATEST
from verl_multiturn.compose import compose
from verl_multiturn.errors import RunStopped
from verl_multiturn.runs import Run
from verl_multiturn.trainer import MultiTurnTrainer

TOTAL = 6


@pytest.fixture(scope="module")
def composed():
    return configure.prepare(compose("gigpo_frozenlake", ["hardware=cpu"]))


def rows(step, split):
    return [{"split": split, "step": step, "trajectory": n, "turns": []} for n in range(3)]


class Parts:
    """What verl does on devices, as folders and numbers; `at` is told every instant that a kill may hit."""

    def __init__(self, at):
        self.at = at

    def install(self, monkeypatch):
        at = self.at

        def step(self, metrics, timing_raw):
            at("rollout", self.global_steps)
            self.trained.append(self.global_steps)
            self.writer.trajectories("train", self.global_steps, rows(self.global_steps, "train"))
            metrics["actor/loss"], timing_raw["gen"] = 1.0 / self.global_steps, 0.5
            at("trained", self.global_steps)
            return KVBatchMeta(partition_id="train", keys=["k"], tags=[{}])

        def save(self):
            at("recorded", self.global_steps)
            folder = Path(self.config.trainer.default_local_dir)
            (folder / f"global_step_{self.global_steps}" / "actor").mkdir(parents=True, exist_ok=True)
            at("saved", self.global_steps)
            (folder / LATEST).write_text(str(self.global_steps))
            at("tracked", self.global_steps)

        def transfer(self):
            at("transfer", self.global_steps)
            self.timing_raw["update_weights"] = 0.25

        def validate(self):
            at("validation", self.global_steps)
            self._val_records = rows(self.global_steps, "val")
            return {"val/success": self.global_steps / 10}

        def measure(self, batch, metrics, timing_raw, global_steps, epoch):
            metrics |= {"training/global_step": global_steps, "training/epoch": epoch, "of_verl": 0.5}
            metrics |= {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
            assert "timing_s/step" in metrics, "verl's throughput divides by it"
            counts = self._rollout_moe_lb_metrics_accumulator
            counts.load_counts = (counts.load_counts or 0) + 1
            if "timing_s/update_weights" in metrics:
                at("measured", global_steps)

        for name, function in {
            "step": step, "_save_checkpoint": save, "_validate": validate, "_compute_metrics": measure,
        }.items():  # fmt: skip
            monkeypatch.setattr(PPOTrainer, name, function)
        monkeypatch.setattr(PPOTrainerSync, "on_step_end", transfer)
        bounds = {"val/success_low": 0.0, "val/success_high": 1.0, "val/episodes": 3.0}
        monkeypatch.setattr("verl_multiturn.metrics.of_panels", lambda *_: bounds)
        monkeypatch.setattr("verl_multiturn.provenance.about", lambda _, step: {"step": step})  # it asks git


@pytest.fixture
def start(composed, tmp_path, queue, monkeypatch):
    """Start, or resume, a run in this process; returns the trainer once it has ended."""

    def starts(at=lambda *_: None, **trainer):
        config = composed.copy()
        config.multiturn.run = str(tmp_path / "run")
        config.trainer.default_local_dir = str(tmp_path / "run" / "checkpoints")
        config.trainer.update({"save_freq": 2, "test_freq": 2, "val_before_train": False} | trainer)
        Parts(at).install(monkeypatch)
        made = MultiTurnTrainer(config)
        tracker = Path(config.trainer.default_local_dir) / LATEST
        made.global_steps = int(tracker.read_text()) if tracker.exists() else 0
        made.total_training_steps, made.steps_per_epoch, made.trained = TOTAL, 100, []
        made.actor_rollout_wg = SimpleNamespace(update_actor=None)
        made.val_dataset = SimpleNamespace(sizes={})
        made._shutdown_dump_executor = lambda: None  # verl's init makes it
        made.heart.interval, starts.made = 600.0, made
        made.fit(None)
        return made

    return starts


def killed(start, instant, step):
    """A start in a process of its own that is killed there, kill -9: nothing of it is closed or flushed."""

    def at(name, now):
        if (name, now) == (instant, step):
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        try:
            start(at)
        finally:  # it must not go on as a second pytest
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def audited(run, trained):
    """No step is missing or doubled, in metrics, trajectories and validations."""
    folder = Path(run.folder)
    lines = list(run_files.lines(folder / "metrics.jsonl"))
    counts = {
        name: Counter(line["step"] for line in lines if name in line["metrics"])
        for name in ("training/global_step", "actor/loss", "of_verl")
    }
    assert list(counts.values()) == [Counter(range(1, TOTAL + 1))] * 3
    assert run.metrics["actor/loss"].tolist() == [1.0 / step for step in range(1, TOTAL + 1)]
    assert not run.metrics["timing_s/step"].isna().any()
    assert Counter(line["step"] for line in lines if "val/success" in line["metrics"]) == {2: 1, 4: 1, 6: 1}
    assert run.metrics["val/success"].dropna().to_dict() == {2: 0.2, 4: 0.4, 6: 0.6}
    assert run.steps("train") == list(range(1, TOTAL + 1)) and run.steps("val") == [2, 4, 6]
    assert all(len(run.trajectories("train", step)) == 3 for step in run.steps("train"))
    assert trained == list(range(TOTAL - len(trained) + 1, TOTAL + 1))


INSTANTS = ["rollout", "trained", "recorded", "saved", "tracked", "transfer", "validation", "measured"]


@pytest.mark.parametrize("instant", INSTANTS)
def test_a_kill_around_a_checkpoint_leaves_neither_gap_nor_double(start, tmp_path, instant):
    killed(start, instant, 4)
    marked = 4 if instant in ("tracked", "transfer", "validation", "measured") else 2
    assert (tmp_path / "run/checkpoints" / LATEST).read_text() == str(marked)
    # What the mark promises is there: the step's trajectories and its numbers.
    at_mark = Run(tmp_path / "run")
    assert len(at_mark.trajectories("train", marked)) == 3
    assert at_mark.metrics.loc[marked, "actor/loss"] == 1.0 / marked
    resumed = start()
    assert resumed.trained[0] == marked + 1
    audited(Run(tmp_path / "run"), resumed.trained)


def test_a_kill_after_the_last_checkpoint_only_costs_its_validation(start, tmp_path):
    killed(start, "validation", TOTAL)
    resumed = start()
    assert resumed.trained == []
    audited(Run(tmp_path / "run"), [])


def test_a_run_without_a_kill_records_each_number_once(start, tmp_path):
    made = start()
    audited(Run(tmp_path / "run"), made.trained)
    assert Run(tmp_path / "run").metrics["timing_s/update_weights"].tolist() == [0.25] * TOTAL
    assert made._rollout_moe_lb_metrics_accumulator.load_counts == TOTAL, "verl adds to it at every call"
    assert heartbeat.read(tmp_path / "run")["ending"] == "done"


@pytest.mark.parametrize("first", [False, True])
def test_a_step_without_its_turn_is_validated_only_if_asked(start, tmp_path, first):
    """The checkpoint of step 4 of a run that does not validate; then `trainer.val_before_train`."""

    def at(name, step):
        if (name, step) == ("rollout", 5):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(at, test_freq=-1)
    start(test_freq=-1, val_before_train=first)
    run = Run(tmp_path / "run")
    assert run.steps("train") == list(range(1, TOTAL + 1))
    assert run.splits() == ["train", *["val"] * first] and (not first or run.steps("val") == [4])


def test_what_cannot_be_recorded_leaves_the_mark_where_it_was(start, tmp_path):
    """A full disk, a record that is none: the trajectories of a step are not behind its checkpoint."""

    def at(name, step):
        if (name, step) == ("rollout", 4):
            (tmp_path / "run/trajectories/train/4.jsonl.zst.tmp").mkdir()  # the writer cannot open its file

    with pytest.raises(RunStopped, match=r"could not record .*train/4.*; steps up to 3 are recorded"):
        start(at)
    assert (tmp_path / "run/checkpoints" / LATEST).read_text() == "2"
    assert not (tmp_path / "run/checkpoints/global_step_4").exists()


def test_the_phases_of_a_step_carry_its_number(start, tmp_path):
    """Also the rollout of the next one: its phase begins with its step."""
    seen = []

    def at(name, step):
        state = start.made.heart._state
        seen.append((name, step, state["phase"], state["step"]))

    start(at)
    names = {"rollout": "rollout", "trained": "rollout", "recorded": "checkpoint", "saved": "checkpoint",
             "tracked": "checkpoint", "transfer": "weight transfer", "validation": "validation",
             "measured": "metrics"}  # fmt: skip
    assert {(name, phase) for name, _, phase, _ in seen} == set(names.items())
    assert all(step == said for _, step, _, said in seen)
    assert json.loads((tmp_path / "run" / heartbeat.NAME).read_text())["step"] == TOTAL
