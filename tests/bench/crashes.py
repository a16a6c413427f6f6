"""Kill -9, again and again: a small training run loses a process at a random moment, stops, and resumes.

    python tests/bench/crashes.py --folder FOLDER [--rounds 2] [--seed 1] [--lock FILE]
    python tests/bench/crashes.py --folder FOLDER --config archer_frozenlake --targets critic,"LLM server"

Each start resumes the run that the kill before it ended, and is killed in its turn. What must hold:
the run goes on or ends within a minute with one sentence; none of its processes is left; the next
start continues at the step after the last checkpoint; in the end no step is missing or doubled, no
trajectory either, and with fixed seeds the metrics and weights equal those of a run that nothing hit.
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
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import psutil

from verl_multiturn.heartbeat import read
from verl_multiturn.runs import Run

ROOT = Path(__file__).parents[2]
TARGETS = ("rollout worker", "LLM server", "raylet", "environment", "driver", "actor", "TransferQueue")
ROLES = {"rollout worker": "AgentLoopWorkerTQ", "LLM server": "LLMHttpServer|HttpServer", "raylet": "raylet",
         "actor": "WorkerDict", "TransferQueue": "StorageUnit|Controller",
         "critic": "CriticActor"}  # fmt: skip
STEPS, BATCH, SIZE = 80, 4, 8
LIMIT = 60.0  # seconds to stop
PATIENCE = 600.0  # seconds to start, on a machine with other work
ENVIRONMENT = (
    "from environments.frozen_lake import FrozenLake\n"
    "class Apart(FrozenLake):\n    '''FrozenLake in a process of its own.'''\n    runs_in = 'process'\n"
)
# What differs from run to run by its nature.
UNLIKE = re.compile(r"^(timing|perf/|val/|training/epoch)|seconds|memory|throughput|rollout_probs|tokens_per")


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
        "trainer.test_freq=-1", "trainer.save_freq=1", f"trainer.total_training_steps={total}",
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


def victim(target, process, run):
    """The process to be killed, or None while it is not there."""
    beat = read(run) or {}
    if beat.get("pid") != process.pid:
        return None
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


def attempt(target, folder, rng, total, config):
    """One start, one kill; what came of it."""
    run, log = folder / "hit", folder / "hit.log"
    before, offset = steps_done(run), log.stat().st_size if log.exists() else 0
    checkpoint = tracker(run)
    process, started = start(folder, "hit", total, config), time.monotonic()
    wait, first, pid = rng.uniform(0.0, 8.0), None, None
    while process.poll() is None and pid is None:
        time.sleep(0.05)
        first = first or (time.monotonic() if (read(run) or {}).get("phase") not in (None, "start-up")
                          and (read(run) or {}).get("pid") == process.pid else None)  # fmt: skip
        if first and time.monotonic() - first >= wait:
            pid = victim(target, process, run)
        if time.monotonic() - started > PATIENCE:
            process.kill()
    beat = read(run) or {}
    record = {
        "target": target, "phase": beat.get("phase"), "step": beat.get("step"), "checkpoint": checkpoint,
        "recorded": before[-1] if before else 0,
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
    resumed = re.findall(r"^step (\d+)/", last(log, offset)[1], re.MULTILINE)
    return record | {
        "hit": True, "outcome": outcome, "seconds": round(seconds, 1), "sentence": sentence, "left": names,
        "gone_after": round(gone, 1), "exit": process.returncode,
        "first_step": int(resumed[0]) if resumed else None,
    }  # fmt: skip


def tracker(run):
    path = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(path.read_text()) if path.exists() else 0


def finish(folder, name, total, config, lock):
    """Train to the end without a kill."""
    with held(lock):
        began = time.monotonic()
        code = start(folder, name, total, config).wait(timeout=900)
    return {"exit": code, "seconds": round(time.monotonic() - began, 1)}


def audit(folder):
    """What the two runs hold: gaps, doubles, halves, and where their numbers differ."""
    hit, whole = Run(folder / "hit"), Run(folder / "whole")
    steps = hit.steps("train")
    lines = [json.loads(line) for line in (hit.folder / "metrics.jsonl").open()]
    counted = Counter(line["step"] for line in lines if "timing_s/step" in line["metrics"])
    found = {"steps": len(steps), "gaps": sorted(set(range(1, steps[-1] + 1)) - set(steps))}
    found["metric_gaps"] = sorted(set(steps) - set(counted))
    found["metric_doubles"] = sorted(step for step, n in counted.items() if n > 1)
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
    common = [name for name in hit.metrics if name in whole.metrics and not UNLIKE.search(name)]
    shared = sorted(set(steps) & set(whole.steps("train")))
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
    parser.add_argument("--lock", default="/tmp/verl.lock")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--config", default="gigpo_frozenlake", help="a recipe; ArCHer's has a critic apart")
    parser.add_argument("--whole", type=int, help="only train this many steps without a kill, then compare")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    results = given.folder / "crashes.jsonl"
    if given.whole:
        for name in ("whole", "hit"):
            print(name, finish(given.folder, name, given.whole, given.config, given.lock), flush=True)
        found = audit(given.folder)
        (given.folder / "audit.json").write_text(json.dumps(found, indent=1))
        print(json.dumps(found, indent=1))
        return
    plan = given.targets.split(",") * given.rounds
    done = [json.loads(line) for line in results.open()] if results.exists() else []
    for one in done:
        if one["hit"] and one["target"] in plan:
            plan.remove(one["target"])
    random.seed(given.seed + len(done))
    for number, target in enumerate(plan, start=len(done)):
        with held(given.lock):
            chance = random.Random(given.seed * 1000 + number)
            found = attempt(target, given.folder, chance, STEPS, given.config)
        with results.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
