"""Start-up and memory of environment processes: forked from a zygote, one import each, or one Ray actor each.

    PYTHONPATH=. python tests/bench/bench_pool.py [--json FILE] [--env lake] [--kind zygote popen] [--n 128]

Every kind makes `n` environments at once and resets each once. Seconds are wall time from the first
call until the last environment is made (`made`), then reset (`ready`); `again` makes one more, as after
a fault; CPU seconds are those of the processes themselves. Memory is read from /proc/PID/smaps_rollup
of all processes of the kind, the zygote included (but not Ray's own services): RSS counts a shared page
once a process, PSS once in all.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from environments.frozen_lake import FrozenLake
from verl_multiturn.rollout.observed import reset
from verl_multiturn.rollout.pool import EnvPool

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
ENVS = {"lake": f"{HERE}:Lake", "alfworld": "alfworld"}
CHILD = "import sys; from bench_pool import serve_alone; serve_alone(int(sys.argv[1]))"


class Lake(FrozenLake):
    """As light as an environment can be: what is left is the cost of its process."""

    runs_in = "process"


def cost(pids):
    """Sums over processes: memory in MiB, and seconds of CPU so far."""
    total = dict.fromkeys(("Rss", "Pss", "Private"), 0)
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, value = line.split()[:2]
            for kind in total:
                if name == f"{kind}:" or (kind == "Private" and name.startswith("Private_")):
                    total[kind] += int(value)
    ticks = 0
    for pid in pids:
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    found = {f"{kind.lower()}_mb": round(value / 1024, 1) for kind, value in total.items()}
    return {**found, "cpu_seconds": ticks / os.sysconf("SC_CLK_TCK")}


async def with_pool(pool, name, n):
    """Seconds and memory of `n` environments of a pool."""
    started = time.perf_counter()
    envs = await asyncio.gather(*(pool.acquire(name, {}) for _ in range(n)))
    made = time.perf_counter() - started
    await asyncio.gather(*(pool.call(env, "reset", reset, seed, 1) for seed, env in enumerate(envs)))
    ready = time.perf_counter() - started
    zygotes = [zygote._process.pid for zygote in pool._zygotes.values()]
    found = cost([*(env.pid for env in envs), *zygotes])
    one = time.perf_counter()
    envs.append(await pool.acquire(name, {}))
    again = time.perf_counter() - one
    for env in envs:
        pool.release(env, name, {})
    pool.close()
    return {"made": made, "ready": ready, "again": again, **found}


class Alone:
    """An environment in a process that imports everything itself."""

    def __init__(self, name):
        self.name, self.episodes = name, 0

    def make(self, name, kwargs):
        self.connection, child = Pipe()
        path = os.pathsep.join([str(HERE.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(child.fileno())],
            pass_fds=[child.fileno()],
            env={**os.environ, "PYTHONPATH": path},
        )
        child.close()
        self.pid = self.process.pid
        self._ask(name, kwargs)

    def call(self, function, *args):
        return self._ask(function, args)

    def _ask(self, *message):
        self.connection.send(message)
        ok, answer = self.connection.recv()
        if not ok:
            raise answer
        return answer

    def close(self):
        self.connection.close()
        self.process.wait()

    abandon = close


def serve_alone(fd):
    from verl_multiturn.rollout.zygote import serve

    serve(Connection(fd))


class PopenPool(EnvPool):
    """The pool with a process and an import for each environment."""

    async def acquire(self, name, kwargs):
        env = Alone(name)
        await self._run("make", env.make, name, kwargs)
        return env


def with_ray(name, n):
    """The same of actors, one environment each."""
    import ray

    class Actor:
        def __init__(self, name):
            from verl_multiturn.env import make

            self.env = make(name)

        def pid(self):
            return os.getpid()

        def reset(self, seed):
            return self.env.reset(seed)

    folder = tempfile.mkdtemp(prefix="vm", dir="/tmp")
    ray.init(address="local", include_dashboard=False, _temp_dir=folder, log_to_driver=False)
    try:
        remote = ray.remote(num_cpus=0)(Actor)
        started = time.perf_counter()
        actors = [remote.remote(name) for _ in range(n)]
        pids = ray.get([actor.pid.remote() for actor in actors])
        made = time.perf_counter() - started
        ray.get([actor.reset.remote(seed) for seed, actor in enumerate(actors)])
        ready = time.perf_counter() - started
        found = cost(pids)
        one = time.perf_counter()
        ray.get(remote.remote(name).pid.remote())
        return {"made": made, "ready": ready, "again": time.perf_counter() - one, **found}
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def measure(kind, env, n):
    if kind == "ray":
        return with_ray(ENVS[env], n)
    pool = {"zygote": EnvPool, "popen": PopenPool}[kind](64, 900.0)
    return asyncio.run(with_pool(pool, ENVS[env], n))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--env", nargs="+", choices=ENVS, default=["lake"])
    parser.add_argument("--kind", nargs="+", choices=("zygote", "popen", "ray"), default=["zygote", "popen"])
    parser.add_argument("--n", type=int, default=128)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    rows = []
    for env in given.env:
        for kind in given.kind:
            load = os.getloadavg()[0]
            row = {"env": env, "kind": kind, "n": given.n, "load": load, **measure(kind, env, given.n)}
            rows.append(row)
            print(
                f"{env:9} {kind:7} n={row['n']:<4} made {row['made']:7.2f} s  ready {row['ready']:7.2f} s  "
                f"one more {1e3 * row['again']:7.1f} ms  CPU {row['cpu_seconds']:6.1f} s  "
                f"RSS {row['rss_mb']:7.0f} MB  PSS {row['pss_mb']:7.0f} MB  load {load:.1f}",
                flush=True,
            )
    if given.json:
        known = json.loads(given.json.read_text()) if given.json.exists() else []
        given.json.write_text(json.dumps([*known, *rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
