"""Processes of environments: forked from one import, killed alone, and never left behind."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from verl_multiturn.rollout import pool as pools
from verl_multiturn.rollout import workers
from verl_multiturn.rollout.pool import EnvironmentFailure, EnvPool, ProcessEnv, reset, step

ROOT = Path(__file__).parents[2]
ODD = Path(__file__).with_name("odd_environments.py")
APART, TELLING = f"{ODD}:Apart", f"{ODD}:Telling"


def alive(pid):
    """Whether a process runs; a zombie of somebody else's does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or while it was read
        return False


def gone(*pids, seconds=5.0):
    """Whether they all end in that time."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left == []


class Watched(EnvPool):
    """A pool that remembers every process it had."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.made, self.all_zygotes = [], []

    def _zygote(self, name):
        zygote = super()._zygote(name)
        if zygote not in self.all_zygotes:
            self.all_zygotes.append(zygote)
        return zygote

    async def acquire(self, name, kwargs):
        env = await super().acquire(name, kwargs)
        self.made += [env] if env not in self.made else []
        return env

    @property
    def zygotes(self):
        return [z._process.pid for z in self.all_zygotes if z._process is not None]

    @property
    def pids(self):
        return [env.pid for env in self.made if isinstance(env, ProcessEnv)]


def with_pool(play, *args, **kwargs):
    """`await play(pool)`; afterwards no process is left."""

    async def go():
        pool = Watched(*args, **kwargs)
        try:
            return await play(pool)
        finally:
            pool.close()
            assert gone(*pool.pids, *pool.zygotes)

    return asyncio.run(go())


async def episode(pool, name, *actions, task=5):
    """Reset and act, as an episode does; what the last one shows."""
    env = await pool.acquire(name, {})
    try:
        seen = await pool.call(env, "reset", reset, task, 1)
        for action in actions:
            seen = await pool.call(env, "act", step, action)
    except BaseException:
        await pool.abandon(env)
        raise
    pool.release(env, name, {})
    return seen


# ------------------------------------------------------------------------------- one import, many forks


def test_a_storm_of_64(tmp_path):
    """64 at once: one import, 64 processes, one parent, one thread, and nothing of verl in any."""
    count = tmp_path / "count"
    file = tmp_path / "counted.py"
    file.write_text(
        f"open({str(count)!r}, 'a').write('imported\\n')\n"
        "from verl_multiturn.env import Env\n"
        "class Counted(Env):\n"
        "    runs_in = 'process'\n"
        "    @classmethod\n"
        "    def preload(cls):\n"
        f"        open({str(count)!r}, 'a').write('preloaded\\n')\n"
        "        import json.tool\n"
        + textwrap.indent(
            textwrap.dedent(
                """
                def _reset(self, seed):
                    import os, sys
                    status = dict(line.split(':\\t') for line in open('/proc/self/status') if ':\\t' in line)
                    info = {'pid': os.getpid(), 'parent': int(status['PPid']), 'modules': set(sys.modules)}
                    return 'asked', info | {'threads': int(status['Threads'])}
                """
            ),
            "    ",
        )
    )

    async def play(pool):
        envs = await asyncio.gather(*(pool.acquire(str(file), {}) for _ in range(64)))
        seen = await asyncio.gather(*(pool.call(env, "reset", reset, 5, 1) for env in envs))
        (zygote,) = pool.zygotes
        infos = [one.info for one in seen]
        assert {info["pid"] for info in infos} == set(pool.pids) and len(set(pool.pids)) == 64
        assert {info["parent"] for info in infos} == {zygote} and {info["threads"] for info in infos} == {1}
        loaded = {name.partition(".")[0] for name in infos[0]["modules"]}
        assert "json.tool" in infos[0]["modules"] and not loaded & {"torch", "verl", "ray", "numpy"}
        return len(list(Path(f"/proc/{zygote}/task").iterdir()))

    assert with_pool(play, 64, 60.0) == 1
    # The pool itself imports the module too, to learn where it runs.
    assert sorted(count.read_text().split()) == ["imported", "imported", "preloaded"]


def test_children_share_no_chances_and_no_half_lines(capfd, monkeypatch):
    """A fork copies the state of the global generators, and of what was not written yet."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    async def play(pool):
        envs = await asyncio.gather(*(pool.acquire(TELLING, {}) for _ in range(3)))
        seen = [(await pool.call(env, "reset", reset, 5, 1)).info for env in envs]
        assert all(set(info["threads"].values()) == {"1"} for info in seen)
        for env in envs:
            pool.release(env, TELLING, {})
        return [info["chances"] for info in seen]

    for drawn in zip(*with_pool(play), strict=True):
        assert len(set(drawn)) == 3
    assert capfd.readouterr().out.count("preloaded") == 1


def test_files_working_directory_and_path(tmp_path, monkeypatch):
    """A path relative to the working directory, a helper beside it on sys.path, ./environments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helper_of_mine.py").write_text("WORD = 'helped'")
    (tmp_path / "environments").mkdir()
    text = (
        "import os\nfrom helper_of_mine import WORD\nfrom verl_multiturn.env import Env\n"
        "class Mine(Env):\n"
        "    runs_in = 'process'\n"
        "    def _reset(self, seed):\n"
        "        return f'{WORD} in {os.getcwd()}', {}\n"
    )
    (tmp_path / "mine_in_a_file.py").write_text(text)
    (tmp_path / "environments" / "mine_by_name.py").write_text(text)

    async def play(pool):
        names = ("mine_in_a_file.py:Mine", "mine_by_name", "mine_in_a_file:Mine")
        return {(await episode(pool, name)).observation for name in names}

    assert with_pool(play) == {f"helped in {tmp_path}"}


def test_a_module_that_starts_threads_is_imported_by_each_process(tmp_path, capfd):
    """A fork would lose its threads; that is said."""
    file = tmp_path / "threaded.py"
    file.write_text(
        "import os, threading, time\nfrom verl_multiturn.env import Env\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "class Threaded(Env):\n"
        "    runs_in = 'process'\n"
        "    def _reset(self, seed):\n"
        "        return str(len(os.listdir('/proc/self/task'))), {}\n"
    )

    async def play(pool):
        return [(await episode(pool, str(file))).observation for _ in range(2)]

    assert with_pool(play) == ["2", "2"]
    assert "starts threads when it is imported (1), which a fork would lose" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("raise OSError('no display')", "OSError: no display"),
        ("os._exit(4)", "the process that forks its processes ended with exit code 4"),
    ],
)
def test_an_import_that_fails_in_the_zygote(tmp_path, text, sentence):
    file = tmp_path / "failing.py"
    file.write_text(
        f"import os\nif os.getsid(0) == os.getpid():\n    {text}\n"
        "from verl_multiturn.env import Env\nclass Failing(Env):\n    runs_in = 'process'\n"
    )

    async def play(pool):
        failures = await asyncio.gather(*(episode(pool, str(file)) for _ in range(8)), return_exceptions=True)
        assert len(pool.zygotes) < 8  # one for all who wait for it; who comes later tries again
        return {str(failure) for failure in failures}

    assert with_pool(play) == {f"make({str(file)!r}): {sentence}"}


def test_what_is_missing_is_said(tmp_path):
    file = tmp_path / "needy.py"
    file.write_text(
        "from verl_multiturn.env import Env\nfrom verl_multiturn.needs import Needs\n"
        "class Needy(Env):\n    runs_in, needs = 'process', Needs(packages=('no_such_engine',))\n"
    )
    with pytest.raises(EnvironmentFailure, match=r"needs no_such_engine: pip install no-such-engine$"):
        with_pool(lambda pool: episode(pool, str(file)))


def test_more_processes_than_files(tmp_path):
    """What cannot be forked is said, and costs nobody else."""
    code = (
        "import asyncio, resource, sys\n"
        "from verl_multiturn.rollout.pool import *\n"
        "async def main():\n"
        "    pool = EnvPool(4, 30.0)\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (14, 4096))\n"
        "    first = await pool.acquire(sys.argv[1], {})\n"  # its zygote keeps this limit
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n"
        "    made = [first]\n"
        "    try:\n"
        "        while len(made) < 40: made.append(await pool.acquire(sys.argv[1], {}))\n"
        "    except EnvironmentFailure as error: print(error)\n"
        "    seen = [await pool.call(one, 'reset', reset, 5, 1) for one in made]\n"
        "    print(0 < len({one.observation for one in seen}) == len(made) < 12)\n"
        "    pool.close()\n"
        "asyncio.run(main())\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, APART], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    said = f"make({APART!r}): its process could not be forked: too many files are open (see ulimit -n)\n"
    assert run.stdout == f"{said}True\n", run.stderr


# ------------------------------------------------------------------------------- faults

ENDINGS = {
    "die": "its process ended with exit code 7",
    "exit": "its process ended with exit code 3",
    "kill": "its process was ended by signal 9 (SIGKILL)",
    "segfault": "its process was ended by signal 11 (SIGSEGV)",
}


@pytest.mark.parametrize("word", ENDINGS)
def test_a_process_that_ends_in_reset_or_step(word):
    async def play(pool):
        for call, actions, task in (("reset", (), word), ("act", ("1", word), 5)):
            with pytest.raises(EnvironmentFailure) as caught:
                await episode(pool, APART, *actions, task=task)
            assert str(caught.value) == f"{call}: {ENDINGS[word]}"
            assert gone(pool.pids[-1], seconds=0)
            assert (await episode(pool, APART, "7")).reward == 7.0
        assert len(pool.zygotes) == 1 and len(set(pool.pids)) == 3

    with_pool(play)


def test_many_at_once_and_the_pool_works_on():
    """Two threads, eight episodes, each another fault: each costs itself."""
    words = [*ENDINGS, "hang for ever", "raise", "1", "win"]

    async def play(pool):
        await episode(pool, APART)
        pool.timeout = 1.5
        return await asyncio.gather(*(episode(pool, APART, word) for word in words), return_exceptions=True)

    *failures, one, won = with_pool(play, 4, 30.0)
    assert all(isinstance(failure, EnvironmentFailure) for failure in failures)
    assert str(failures[4]) == "act took longer than 1.5 s"
    assert (one.reward, won.terminated) == (1.0, True)


@pytest.mark.parametrize(("actions", "task"), [((), "hang for ever"), (("hang for ever",), 5)])
def test_a_hang_is_given_up_and_killed(actions, task):
    async def play(pool):
        await episode(pool, APART)
        pool.timeout = 0.3
        with pytest.raises(EnvironmentFailure, match=r"took longer than 0\.3 s"):
            await episode(pool, APART, *actions, task=task)
        assert gone(pool.pids[-1], seconds=0)
        pool.timeout = 30.0
        assert (await episode(pool, APART, "1")).reward == 1.0
        assert len(set(pool.pids)) == 2

    with_pool(play, 1, 30.0)


def test_an_import_that_hangs_is_given_up(tmp_path):
    """All who wait for it fail, in their time; nothing of it is left."""
    file = tmp_path / "hanging.py"
    file.write_text(
        "import os, time\nfrom verl_multiturn.env import Env\n"
        "if os.getsid(0) == os.getpid(): time.sleep(600)\n"
        "class Hanging(Env):\n    runs_in = 'process'\n"
    )

    async def play(pool):
        started = time.monotonic()
        failures = await asyncio.gather(*(episode(pool, str(file)) for _ in range(4)), return_exceptions=True)
        assert time.monotonic() - started < 4 and gone(*pool.zygotes, seconds=0)
        return {str(failure) for failure in failures}

    assert f"make({str(file)!r}) took longer than 0.5 s" in with_pool(play, 4, 0.5)


@pytest.mark.parametrize("name", ["HangingClose", "HangingCloseHere"])
def test_a_close_that_hangs_holds_nobody_up(name, monkeypatch, caplog):
    """Neither the episode after it, nor the end of the pool."""
    for module in (workers, pools):
        monkeypatch.setattr(module, "CLOSE_SECONDS", 0.4)

    async def play(pool):
        started = time.monotonic()
        for _ in range(3):
            await episode(pool, f"{ODD}:{name}", "1")
        return started, set(pool.pids)

    started, pids = with_pool(play, 2, 30.0, max_episodes=1)
    killed = "could not be closed: TimeoutError: its close took longer than 0.4 s, its process was killed"
    assert len(pids) == (0 if name.endswith("Here") else 3) == caplog.text.count(killed)
    assert time.monotonic() - started < 8


def test_a_leaking_process_is_replaced(caplog):
    """20 MiB an episode, limit 70: three episodes fit, the fourth is the last one."""

    async def play(pool):
        for _ in range(9):
            await episode(pool, f"{ODD}:Leaking")
        return pool.pids, [env.episodes for env in pool.made]

    pids, episodes = with_pool(play, 2, 30.0, max_memory_mb=70)
    assert len(pids) == 3 and episodes[:2] == [episodes[0]] * 2 and 3 <= episodes[0] <= 4
    assert "of its own, more than multiturn.env_max_memory_mb=70" in caplog.text


@pytest.mark.parametrize("name", [APART, f"{ODD}:Odd"])
def test_replaced_after_so_many_episodes(name):
    async def play(pool):
        for _ in range(5):
            await episode(pool, name, "1")
        return [env.episodes for env in pool.made]

    assert with_pool(play, 2, 30.0, max_episodes=2) == [2, 2, 1]


def test_limits_of_a_run():
    settings = {"env": APART, "env_threads": 3, "step_timeout": 9.0, "env_max_episodes": 7}
    pool = EnvPool.of({**settings, "env_max_memory_mb": 100})
    assert (pool.timeout, pool.max_memory_mb, pool.max_episodes) == (9.0, 100, 7)
    with pytest.raises(
        ValueError, match=r"frozen_lake runs in threads: give its class runs_in = \"process\""
    ):
        EnvPool.of({**settings, "env": "frozen_lake", "env_max_memory_mb": 100})


def test_memory_that_cannot_be_read_is_refused(monkeypatch):
    def denied(pid):
        raise PermissionError(13, "Permission denied", f"/proc/{pid}/smaps_rollup")

    monkeypatch.setattr(pools, "private_mb", denied)
    with pytest.raises(
        ValueError, match=r"env_max_memory_mb=5 cannot be kept: /proc/\d+/smaps_rollup cannot"
    ):
        EnvPool(max_memory_mb=5)
    EnvPool()


def test_an_idle_process_that_was_killed_costs_nobody_an_episode(caplog):
    async def play(pool):
        await episode(pool, APART)
        os.kill(pool.pids[0], signal.SIGKILL)
        assert gone(pool.pids[0])  # the zygote may not have heard of it yet
        assert (await episode(pool, APART, "1")).reward == 1.0
        return len(set(pool.pids))

    assert with_pool(play) == 2
    assert "is replaced: its process was ended by signal 9 (SIGKILL)" in caplog.text


def test_an_environment_that_nobody_holds_ends():
    async def play(pool):
        pool.made.clear()
        env = await EnvPool.acquire(pool, APART, {})
        pid = env.pid
        del env
        assert gone(pid)

    with_pool(play)


def test_an_idle_process_is_lost_before_its_zygote_knows():
    async def play(pool):
        await episode(pool, APART)
        (env,), (zygote,) = pool.made, pool.zygotes
        assert env.lost() is None
        os.kill(zygote, signal.SIGSTOP)
        os.kill(env.pid, signal.SIGKILL)
        assert gone(env.pid) and env.ended() is None
        assert env.lost() == "its process speaks out of turn"
        os.kill(zygote, signal.SIGCONT)
        assert env.ended(5.0) == env.lost() == "its process was ended by signal 9 (SIGKILL)"

    with_pool(play)


def test_a_zygote_that_is_killed_is_replaced():
    """Its children die with it, even one that hangs; the next environment has another."""

    async def play(pool):
        env = await pool.acquire(APART, {})
        await pool.call(env, "reset", reset, 5, 1)
        hanging = asyncio.create_task(pool.call(env, "act", step, "hang for ever"))
        await asyncio.sleep(0.2)
        os.kill(pool.zygotes[0], signal.SIGKILL)
        with pytest.raises(EnvironmentFailure) as caught:
            await hanging
        assert str(caught.value) == "act: the process that forks its processes ended with signal 9 (SIGKILL)"
        assert gone(env.pid, seconds=1)
        assert (await episode(pool, APART, "1")).reward == 1.0
        return len(pool.zygotes)

    assert with_pool(play) == 2


def test_what_an_environment_started_ends_with_it():
    async def play(pool):
        started = []
        for ending in (signal.SIGKILL, None):
            env = await pool.acquire(TELLING, {})
            await pool.call(env, "reset", reset, 5, 1)
            started.append((await pool.call(env, "act", step, "start")).info["started"])
            assert alive(started[-1])
            if ending:
                os.kill(env.pid, ending)
            else:
                await pool.abandon(env)
        assert gone(*started)

    with_pool(play)


def test_success_flags_do_not_leak_between_processes():
    """`Sticky` keeps its success with the class: one that won says so for ever, and nobody else does."""

    async def play(pool):
        name = f"{ODD}:Sticky"
        first, second = [await pool.acquire(name, {}) for _ in range(2)]
        for env in (first, second):
            await pool.call(env, "reset", reset, 5, 1)
        assert (await pool.call(first, "act", step, "win")).info["success"] is True
        assert (await pool.call(second, "act", step, "1")).info["success"] is False
        third = await pool.acquire(name, {})  # forked after the win
        await pool.call(third, "reset", reset, 5, 1)
        assert (await pool.call(third, "act", step, "1")).info["success"] is False

    with_pool(play)


def test_success_flags_do_not_leak_between_episodes_of_one_each():
    """With env_max_episodes=1 not even a process that never forgets can carry one over."""

    async def play(pool):
        return [
            (await episode(pool, f"{ODD}:Sticky", action)).info["success"]
            for action in ("win", "1", "win", "1")
        ]

    assert with_pool(play, 2, 30.0, max_episodes=1) == [True, False, True, False]
    assert with_pool(play, 2, 30.0) == [True, True, True, True]  # what check_env warns of


# ------------------------------------------------------------------------------- no orphans

WORKER = """
import asyncio, sys
from verl_multiturn.rollout.pool import EnvPool, reset, step

async def main():
    pool, name = EnvPool(16, 600.0), sys.argv[1]
    envs = await asyncio.gather(*(pool.acquire(name, {}) for _ in range(6)))
    await asyncio.gather(*(pool.call(env, "reset", reset, 5, 1) for env in envs))
    hanging = [asyncio.create_task(pool.call(env, "act", step, "hang for ever")) for env in envs[:3]]
    importing = asyncio.create_task(pool.acquire(sys.argv[2], {}))
    while name2 not in pool._zygotes or pool._zygotes[name2]._process is None:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    print(*(env.pid for env in envs), *(z._process.pid for z in pool._zygotes.values()), flush=True)
    await asyncio.sleep(600)

name2 = sys.argv[2]
asyncio.run(main())
"""


def test_nothing_outlives_a_rollout_worker_that_is_killed(tmp_path):
    """Six environments, three of them hanging, and a zygote that hangs in its import, in C."""
    file = tmp_path / "hanging_import.py"
    file.write_text(
        "import os\nfrom verl_multiturn.env import Env\n"
        "if os.getsid(0) == os.getpid():\n"
        "    import signal\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "    while True: signal.sigwait([signal.SIGUSR1])\n"
        "class Hanging(Env):\n    runs_in = 'process'\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, APART, str(file)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    pids = [int(pid) for pid in worker.stdout.readline().split()]
    assert len(pids) == 8 and all(map(alive, pids))
    worker.kill()
    worker.wait()
    assert gone(*pids)


def test_nothing_outlives_a_ray_actor_that_is_killed(monkeypatch):
    """As verl's rollout workers are: an asynchronous actor, ended without a word."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    folder = tempfile.mkdtemp(prefix="vm", dir="/tmp")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(entry for entry in sys.path if entry))
    small = {"num_cpus": 1, "object_store_memory": 100 << 20, "log_to_driver": False}
    ray.init(address="local", include_dashboard=False, _temp_dir=folder, **small)
    try:

        class Worker:
            async def start(self, name):
                self.pool = EnvPool(8, 60.0)
                envs = self.envs = await asyncio.gather(*(self.pool.acquire(name, {}) for _ in range(4)))
                seen = [await self.pool.call(env, "reset", reset, 5, 1) for env in envs]
                self.hanging = asyncio.create_task(self.pool.call(envs[0], "act", step, "hang for ever"))
                zygotes = [zygote._process.pid for zygote in self.pool._zygotes.values()]
                shown = [one.observation for one in seen]
                return os.getpid(), [env.pid for env in envs], zygotes, shown

        actor = ray.remote(Worker).remote()
        own, pids, zygotes, observations = ray.get(actor.start.remote(APART))
        assert observations == [f"task 5 in {pid}" for pid in pids]
        assert len(zygotes) == 1 and all(map(alive, [*pids, *zygotes]))
        os.kill(own, signal.SIGKILL)
        assert gone(own, *pids, *zygotes)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------- threads


@pytest.mark.parametrize(
    ("word", "sentence"), [("exit", "SystemExit: 3"), ("stop iteration", "StopIteration: no more")]
)
def test_what_would_end_the_event_loop_costs_one_call(word, sentence):
    with pytest.raises(EnvironmentFailure) as caught:
        with_pool(lambda pool: episode(pool, f"{ODD}:Odd", word), 1, 5.0)
    assert str(caught.value) == f"act raised {sentence}"


def test_a_thread_that_hangs_for_ever_does_not_keep_the_program_alive(tmp_path):
    code = (
        "import asyncio, sys\n"
        "from verl_multiturn.rollout.pool import *\n"
        "async def main():\n"
        "    pool = EnvPool(2, 0.2)\n"
        "    env = await pool.acquire(sys.argv[1], {})\n"
        "    await pool.call(env, 'reset', reset, 5, 1)\n"
        "    try: await pool.call(env, 'act', step, 'hang for ever')\n"
        "    except EnvironmentFailure as error: print(error)\n"
        "    await pool.abandon(env)\n"
        "    pool.close()\n"
        "asyncio.run(main())\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, f"{ODD}:Odd"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
    )
    assert run.stdout == "act took longer than 0.2 s\n"


def test_an_engine_is_not_closed_under_a_running_call():
    """What hangs is closed when it returns, not before."""
    closed = []

    class Slow:
        def close(self):
            closed.append(time.monotonic())

    env = workers.ThreadEnv()
    env.env = Slow()
    returned = []

    def work(one):
        time.sleep(0.3)
        returned.append(time.monotonic())

    thread = threading.Thread(target=env.call, args=(work,))
    thread.start()
    time.sleep(0.05)
    env.abandon()
    assert not closed
    thread.join()
    assert closed and closed[0] >= returned[0]
