"""A step on two nodes: two raylets with an object store each on this machine, rollout workers on both.

    PYTHONPATH=. python tests/bench/two_nodes.py --folder FOLDER [--json FILE] [KEY=VALUE]...

Starts a head and a second node as `ray start` does, trains `gigpo_frozenlake hardware=cpu` for two steps
on the cluster with two rollout workers and environments in processes of their own, and looks meanwhile
which raylet every rollout worker belongs to. Fails where a node had none, or a trajectory is missing.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
from ray.cluster_utils import Cluster

from verl_multiturn.cpu import settings
from verl_multiturn.runs import Run

ROOT = Path(__file__).parents[2]
ENVIRONMENT = (
    "from environments.frozen_lake import FrozenLake\n"
    "class Apart(FrozenLake):\n    '''FrozenLake in a process of its own.'''\n    runs_in = 'process'\n"
)
STEPS, BATCH, GROUP = 2, 8, 8


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    (given.folder / "apart.py").write_text(ENVIRONMENT)
    settings.apply()  # nodes hand their environment to what they start
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 1})
    try:
        cluster.add_node(num_cpus=8)
        nodes = {node.unique_id: node for node in cluster.list_all_nodes()}
        stores = {node.plasma_store_socket_name for node in nodes.values()}
        process = start(given, cluster.address)
        workers = watch(process, nodes)
    finally:
        cluster.shutdown()
    run = Run(given.folder / "run")
    trajectories = [len(run.trajectories("train", step)) for step in run.steps("train")]
    result = {
        "nodes": len(nodes), "object_stores": len(stores), "exit": process.returncode,
        "rollout_workers": sorted(len(pids) for pids in workers.values()),
        "environment_processes": sorted(len(set().union(*some.values())) for some in workers.values()),
        "trajectories": trajectories, "step_seconds": list(run.metrics["timing_s/step"].dropna().round(1)),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    whole = process.returncode == 0 and trajectories == [BATCH * GROUP] * STEPS
    if given.json and whole:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(not (whole and len(workers) == 2 and all(workers.values())))


def start(given, address):
    """The training; its output goes to a file."""
    command = [
        sys.executable, "-m", "verl_multiturn.main", "--config-name", "gigpo_frozenlake", "hardware=cpu",
        f"ray_kwargs.ray_init.address={address}", "actor_rollout_ref.rollout.agent.num_workers=2",
        f"multiturn.env={given.folder / 'apart.py'}:Apart", f"multiturn.run={given.folder / 'run'}",
        "multiturn.test=null", "multiturn.val={first_seed: 500000, size: 4}",
        f"data.train_batch_size={BATCH}", f"actor_rollout_ref.rollout.n={GROUP}",
        "multiturn.small_model.steps=40",
        f"trainer.total_training_steps={STEPS}", "trainer.test_freq=-1", "trainer.save_freq=-1",
        "trainer.val_before_train=false", *given.overrides,
    ]  # fmt: skip
    with (given.folder / "log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def watch(process, nodes):
    """Node -> {process id of a rollout worker: those it started}, until the training ends."""
    raylets = {
        one.process.pid: name
        for name, node in nodes.items()
        for one in node.all_processes["raylet"]
    }  # fmt: skip
    workers = {name: {} for name in nodes}
    while process.poll() is None:
        for pid, name in raylets.items():
            for child in children(pid):
                try:
                    if "AgentLoopWorker" in " ".join(child.cmdline()):
                        started = workers[name].setdefault(child.pid, set())
                        started.update(one.pid for one in children(child.pid))
                except psutil.Error:
                    continue  # it has ended meanwhile
        time.sleep(0.2)
    return workers


def children(pid):
    """All descendants that live now."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


if __name__ == "__main__":
    main()
