"""Kill -9, again and again: a small training run loses a process at a random moment, stops, and resumes.

    python tests/bench/crashes.py --folder FOLDER [--rounds 2] [--seed 1] [--lock FILE]
    python tests/bench/crashes.py --folder FOLDER --config archer_frozenlake --targets critic,"LLM server"

Each start resumes the run that the kill before it ended, trains two steps, and is killed in its turn: at a
moment of the two steps after them, drawn over the time that two steps take, or in a phase that is too short
to be met by chance. Every second step is validated, each has a checkpoint. What must hold: the run goes on or
ends within a minute with one sentence; none of its processes is left; the first step of a start is the one
after the checkpoint that it found; in the end no step is missing or doubled, no trajectory either, and with
fixed seeds the metrics and weights equal those of a run that nothing hit.
Each try is a line of FOLDER/crashes.jsonl, written at once: a second call goes on behind them.
"""

import argparse
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import psutil

from verl_multiturn.heartbeat import read
from verl_multiturn.runs import Run

ROOT = Path(__file__).parents[2]
TARGETS = ("rollout worker", "LLM server", "raylet", "gcs_server", "environment", "driver", "actor",
           "TransferQueue")  # fmt: skip
ROLES = {"rollout worker": "AgentLoopWorkerTQ", "LLM server": "LLMHttpServer|HttpServer", "raylet": "raylet",
         "gcs_server": "gcs_server", "actor": "WorkerDict", "TransferQueue": "StorageUnit|Controller",
         "critic": "CriticActor"}  # fmt: skip
# By the number of the try: the phase that is waited for, or None for a moment by chance. Seven of them, so
# that a target meets another one in every round.
AIMS = (None, "checkpoint", "weight transfer", None, "validation", "actor update", None)
STEPS, BATCH, SIZE = 400, 4, 8
SPAN = 2  # steps: one with a validation, one without
LIMIT = 60.0  # seconds to stop
PATIENCE = 900.0  # seconds to start and to train SPAN steps, on a machine with other work
ENVIRONMENT = (
    "from environments.frozen_lake import FrozenLake\n"
    "class Apart(FrozenLake):\n    '''FrozenLake in a process of its own.'''\n    runs_in = 'process'\n"
)
# What differs from run to run by its nature.
UNLIKE = re.compile(r"^(timing|perf/|training/epoch)|seconds|memory|throughput|rollout_probs|tokens_per")


def start(folder, name, total, config):
    """The training; its output goes to a file."""
    apart = folder / "apart.py"
    apart.write_text(ENVIRONMENT)
    overrides = [
        "hardware=cpu", f"multiturn.run={folder / name}", f"multiturn.env={apart}:Apart",
        f"multiturn.small_model.cache={folder / 'models'}", "multiturn.small_model.steps=40",
        "multiturn.train={first_seed: 1000000, size: 64}", "multiturn.val={first_seed: 500000, size: 4}",
        "multiturn.test=null", "multiturn.seeded=true", f"data.train_batch_size={BATCH}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}", "trainer.val_before_train=false",
        f"trainer.test_freq={SPAN}", "trainer.save_freq=1", f"trainer.total_training_steps={total}",
        "trainer.max_actor_ckpt_to_keep=null",
    ]  # fmt: skip
    command = [sys.executable, "-m", "verl_multiturn.main", "--config-name", config, *overrides]
    with (folder / f"{name}.log").open("a") as log:
        log.write("\n== start\n")
        log.flush()
        # Other work on the machine must not look like a fault.
        env = os.environ | {"RAY_raylet_start_wait_time_s": "300"}
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=env)


def family(pid):
    """A process and all its descendants, with what tells them from later ones of their number."""
    try:
        whole = psutil.Process(pid)
        return [whole, *whole.children(recursive=True)]
    except psutil.Error:
        return []


def victim(target, process, beat):
    """The process to be killed, or None while it is not there."""
    if target == "driver":
        return process.pid
    if target == "environment":
        zygotes = [one for one in family(process.pid) if "rollout.zygote" in " ".join(safely(one.cmdline))]
        parents = {one.pid for one in zygotes}
        found = [one.pid for one in zygotes if safely(one.ppid) in parents]
    else:
        kind = re.compile(ROLES[target])
        found = [pid for name, pids in beat["processes"].items() if kind.search(name) for pid in pids]
    return random.choice(found) if found else None


def safely(call):
    try:
        return call()
    except psutil.Error:
        return []


def steps_done(run):
    return Run(run).steps("train") if (run / "trajectories" / "train").exists() else []


def last(log, since):
    """What was written after a moment, its last sentence first."""
    text = log.read_text()[since:]
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    return errors[-1] if errors else "", text


@contextmanager
def held(lock):
    """One real run at a time on this machine."""
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Moment:
    """When to kill: by chance in the SPAN steps after the first SPAN, or in a phase of them."""

    def __init__(self, chance, aim):
        self.share, self.aim, self.first, self.begins = chance.random(), aim, None, {}

    def come(self, beat):
        """Whether it has come; learns from each beat when the steps begin."""
        if beat["phase"] == "rollout":
            self.begins.setdefault(beat["step"], time.monotonic())
            self.first = self.first or beat["step"]
        if not self.first or self.first + SPAN not in self.begins:
            return False
        if self.aim is not None:
            return beat["phase"] == self.aim
        begin = self.begins[self.first + SPAN]
        return time.monotonic() - begin >= self.share * (begin - self.begins[self.first])


def attempt(target, aim, folder, chance, total, config):
    """One start, one kill; what came of it."""
    run, log = folder / "hit", folder / "hit.log"
    before, offset = steps_done(run), log.stat().st_size if log.exists() else 0
    checkpoint, pid, beat, moment = tracker(run), None, {}, Moment(chance, aim)
    process, started = start(folder, "hit", total, config), time.monotonic()
    while process.poll() is None and pid is None:
        time.sleep(0.02)
        beat = read(run) or {}
        if beat.get("pid") == process.pid and moment.come(beat):
            pid = victim(target, process, beat)
        if time.monotonic() - started > PATIENCE:
            process.kill()
    record = {
        "target": target, "aim": aim, "phase": beat.get("phase"), "step": beat.get("step"),
        "checkpoint": checkpoint, "recorded": before[-1] if before else 0, "first_step": moment.first,
        "resumed_right": moment.first == checkpoint + 1,
    }  # fmt: skip
    if pid is None:
        return record | {"hit": False, "output": last(log, offset)[1][-2000:]}
    everyone = family(process.pid)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    outcome = "hangs"
    while time.monotonic() - killed < LIMIT:
        if process.poll() is not None:
            outcome = "stops"
            break
        done = steps_done(run)
        # Two steps further than the one that was hit: whatever the victim was, the run does without it.
        if done and done[-1] >= (beat.get("step") or 0) + 2:
            outcome = "continues"
            break
        time.sleep(0.1)
    seconds = time.monotonic() - killed
    sentence = last(log, offset)[0]
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait()
    until = time.monotonic() + 30
    while (left := [one for one in everyone if one.is_running() and safely(one.status) != "zombie"]) and (
        time.monotonic() < until
    ):
        time.sleep(0.2)
    gone, names = time.monotonic() - killed, [safely(one.name) for one in left]
    for one in left:
        one.kill()
    return record | {
        "hit": True, "outcome": outcome, "seconds": round(seconds, 1), "sentence": sentence, "left": names,
        "gone_after": round(gone, 1), "exit": process.returncode, "checkpoint_after": tracker(run),
    }  # fmt: skip


def tracker(run):
    path = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(path.read_text()) if path.exists() else 0


def finish(folder, name, total, config, lock):
    """Train to the end without a kill."""
    log, checkpoint = folder / f"{name}.log", tracker(folder / name)
    with held(lock):
        began, offset = time.monotonic(), log.stat().st_size if log.exists() else 0
        code = start(folder, name, total, config).wait(timeout=3600)
    first = re.search(r"^step (\d+)/", last(log, offset)[1], re.MULTILINE)
    first = int(first[1]) if first else None
    return {
        "exit": code, "seconds": round(time.monotonic() - began, 1), "checkpoint": checkpoint,
        "first_step": first, "resumed_right": first in (None, checkpoint + 1),
    }  # fmt: skip


def audit(folder):
    """What the run that was hit holds, and where its numbers differ from those of one that was not."""
    hit = Run(folder / "hit")
    steps = hit.steps("train")
    lines = [json.loads(line) for line in (hit.folder / "metrics.jsonl").open()]
    counted = Counter(line["step"] for line in lines if "training/global_step" in line["metrics"])
    found = {"steps": len(steps), "gaps": sorted(set(range(1, steps[-1] + 1)) - set(steps))}
    found["metric_gaps"] = sorted(set(steps) - set(counted))
    found["metric_doubles"] = sorted(step for step, n in counted.items() if n > 1)
    judged = Counter(line["step"] for line in lines if "val/success" in line["metrics"])
    found["validation_gaps"] = sorted(set(range(SPAN, steps[-1] + 1, SPAN)) - set(judged))
    found["validation_doubles"] = sorted(step for step, n in judged.items() if n > 1)
    found["trajectories"], found["doubled"], found["half"] = 0, 0, 0
    for step in steps:
        records = hit.trajectories("train", step)
        names = Counter((one["group"], one["trajectory"]) for one in records)
        found["trajectories"] += len(records)
        found["doubled"] += sum(n - 1 for n in names.values())
        found["half"] += sum(
            not one["turns"] or not (one["terminated"] or one["truncated"]) for one in records
        )
        found.setdefault("sizes", Counter())[len(records)] += 1
    found["sizes"] = {str(size): n for size, n in found.pop("sizes").items()}
    return found | against(folder, hit) if (folder / "whole").exists() else found


def against(folder, hit):
    whole, found = Run(folder / "whole"), {}
    common = [name for name in hit.metrics if name in whole.metrics and not UNLIKE.search(name)]
    shared = sorted(set(hit.steps("train")) & set(whole.steps("train")))
    found["metrics_compared"] = len(common) * len(shared)
    unequal = {step: [n for n in common if differs(hit.metrics.loc[step, n], whole.metrics.loc[step, n])]
               for step in shared}  # fmt: skip
    found["metrics_unequal"] = sum(map(len, unequal.values()))
    found["first_unequal"] = next(((step, names[:5]) for step, names in unequal.items() if names), None)
    found["weights"] = weights(folder)
    return found


def differs(a, b):
    return not (a == b or (a != a and b != b))


def weights(folder):
    """The largest difference of a weight after the last step that both have."""
    import torch

    path = "checkpoints/global_step_{}/actor/model_world_size_1_rank_0.pt"
    step = min(tracker(folder / "hit"), tracker(folder / "whole"))
    files = [folder / name / path.format(step) for name in ("hit", "whole")]
    if not all(file.exists() for file in files):
        return None
    one, two = (torch.load(file, weights_only=False) for file in files)

    def local(value):
        return value.to_local() if hasattr(value, "to_local") else value

    apart = [(local(one[name]).float() - local(two[name]).float()).abs().max().item() for name in one]
    return {"step": step, "tensors": len(apart), "unequal": sum(x > 0 for x in apart), "largest": max(apart)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2, help="kills of each target")
    parser.add_argument("--seed", type=int, default=1)
    lock = Path(tempfile.gettempdir(), "crashes.lock")
    parser.add_argument("--lock", default=lock, help="held while a run runs")
    parser.add_argument("--targets", help=f"default: {', '.join(TARGETS)}; with ArCHer its critic, too")
    parser.add_argument("--config", default="gigpo_frozenlake", help="a recipe; ArCHer's has a critic apart")
    parser.add_argument("--whole", type=int, help="only train this many steps without a kill, then compare")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    results = given.folder / "crashes.jsonl"
    if given.whole:
        ends = {}
        for name in ("whole", "hit"):
            ends[name] = finish(given.folder, name, given.whole, given.config, given.lock)
            print(name, ends[name], flush=True)
        found = audit(given.folder) | {"last_start": ends["hit"]}
        (given.folder / "audit.json").write_text(json.dumps(found, indent=1))
        print(json.dumps(found, indent=1))
        return
    every = [*TARGETS, *["critic"] * ("archer" in given.config)]
    plan = (given.targets.split(",") if given.targets else every) * given.rounds
    done = [json.loads(line) for line in results.open()] if results.exists() else []
    for one in done:
        if one["hit"] and one["target"] in plan:
            plan.remove(one["target"])
    random.seed(given.seed + len(done))
    for number, target in enumerate(plan, start=len(done)):
        with held(given.lock):
            chance = random.Random(given.seed * 1000 + number)
            aim = AIMS[number % len(AIMS)]
            found = attempt(target, aim, given.folder, chance, STEPS, given.config)
        with results.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps(found), flush=True)
    (given.folder / "audit.json").write_text(json.dumps(audit(given.folder), indent=1))


if __name__ == "__main__":
    main()
