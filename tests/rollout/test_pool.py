"""The pool of environments: whatever one of them does costs one call and gives one clear sentence."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from verl_multiturn.rollout.pool import EnvironmentFailure, EnvPool, ProcessEnv, reset, step

ODD = Path(__file__).with_name("odd_environments.py")
PLACES = {"thread": f"{ODD}:Odd", "process": f"{ODD}:Apart"}


def alive(pid):
    """Whether a process runs; one that ended and was not waited for counts, it would be an orphan."""
    return Path(f"/proc/{pid}").exists()


def meet(*actions, env=PLACES["thread"], kwargs=None, timeout=10.0):
    """Reset an environment and take these actions, each named "act"; what the last one shows."""

    async def go():
        pool = EnvPool(2, timeout)
        one = await pool.acquire(env, kwargs or {})
        try:
            seen = await pool.call(one, "reset", reset, 5, 1)
            for action in actions:
                seen = await pool.call(one, "act", step, action)
            return seen
        finally:
            one.abandon()
            pool.close()

    return asyncio.run(go())


def test_what_is_seen():
    seen = meet("3")
    assert seen.observation == "told ['3']" and seen.key == ("3",) and seen.reward == 3.0
    assert (seen.instruction, seen.max_turns, seen.admissible) == ("do as told", 6, None)
    start = meet()
    assert start.observation.startswith("task 5 in ") and len(start.content) == 32


WRONG = [
    ("raise", "raised KeyError: 'no such door'"),
    ("number", "raised TypeError: the observation has type int, must be str"),
    ("text reward", "raised TypeError: step returned reward of type str"),
    ("nan", "raised TypeError: step returned the reward nan"),
    ("maybe", "raised TypeError: step returned terminated of type str"),
    ("no info", "raised TypeError: the info has type NoneType, must be dict"),
    ("unhashable", "raised TypeError: state_key() has type list, which has no hash"),
]


@pytest.mark.parametrize(("action", "sentence"), WRONG, ids=[action for action, _ in WRONG])
def test_what_goes_wrong_is_one_sentence(action, sentence):
    with pytest.raises(EnvironmentFailure) as caught:
        meet(action)
    assert str(caught.value) == f"act {sentence}"


def test_what_goes_wrong_in_a_process_is_the_same_sentence():
    async def go():
        pool, said = EnvPool(2, 20.0), []
        one = await pool.acquire(PLACES["process"], {})
        for action, _ in [*WRONG, ("secret", "")]:
            await pool.call(one, "reset", reset, 5, 1)
            with pytest.raises(EnvironmentFailure) as caught:
                await pool.call(one, "act", step, action)
            said.append(str(caught.value))
        seen = await pool.call(one, "reset", reset, 5, 1)  # after all that it still answers
        pid = one.pid
        assert seen.observation == f"task 5 in {pid}" and pid != os.getpid()
        with pytest.raises(EnvironmentFailure) as caught:
            await pool.call(one, "act", step, "die")
        assert str(caught.value) == "act: its process ended with exit code 7"
        one.abandon()
        assert not alive(pid)
        pool.close()
        return said

    *said, secret = asyncio.run(go())
    assert said == [f"act: {sentence.removeprefix('raised ')}" for _, sentence in WRONG]
    assert secret.startswith("act: ") and "pickle" in secret  # an info that cannot be sent


@pytest.mark.parametrize("name", ["BadStart", "BadStartApart"])
def test_an_environment_that_cannot_be_made(name):
    with pytest.raises(EnvironmentFailure) as caught:
        meet(env=f"{ODD}:{name}")
    assert str(caught.value).startswith(f"make('{ODD}:{name}')")
    assert "RuntimeError: no licence" in str(caught.value)


def test_one_that_cannot_be_closed_hides_nothing(caplog):
    with pytest.raises(EnvironmentFailure, match=r"^act raised KeyError"):
        meet("raise", env=f"{ODD}:BadClose")

    async def go():
        pool, name = EnvPool(2, 5.0), f"{ODD}:BadClose"
        pool.release(await pool.acquire(name, {}), name, {})
        pool.close()

    asyncio.run(go())
    assert "an environment could not be closed: OSError: closed already" in caplog.text


def test_more_hanging_calls_than_threads():
    """Two threads, five calls that hang: each is given up in time, and the pool goes on working."""

    async def go():
        pool = EnvPool(2, 0.2)
        envs = [await pool.acquire(PLACES["thread"], {}) for _ in range(5)]
        for env in envs:
            await pool.call(env, "reset", reset, 5, 1)
        started = time.perf_counter()
        hanging = [pool.call(env, f"act {n}", step, "hang") for n, env in enumerate(envs)]
        failures = await asyncio.gather(*hanging, return_exceptions=True)
        assert time.perf_counter() - started < 0.7  # less than a hang, 0.8 s
        assert [str(failure) for failure in failures] == [f"act {n} took longer than 0.2 s" for n in range(5)]
        assert all(isinstance(failure, EnvironmentFailure) for failure in failures)
        healthy = await pool.acquire(PLACES["thread"], {})
        return await pool.call(healthy, "reset", reset, 1, 1)

    assert asyncio.run(go()).observation.startswith("task 1 in ")


def test_the_event_loop_runs_on_while_an_environment_works():
    async def go():
        pool = EnvPool(1, 5.0)
        env = await pool.acquire(PLACES["thread"], {})
        await pool.call(env, "reset", reset, 5, 1)
        working = asyncio.create_task(pool.call(env, "act", step, "hang"))
        for _ in range(5):
            await asyncio.sleep(0.02)
            assert not working.done()
        working.cancel()

    asyncio.run(go())


def test_a_hanging_process_is_killed():
    async def go():
        pool = EnvPool(1, 10.0)
        env = await pool.acquire(PLACES["process"], {})
        await pool.call(env, "reset", reset, 5, 1)
        pool.timeout, pid = 0.2, env.pid
        with pytest.raises(EnvironmentFailure, match=r"^act took longer than 0\.2 s$"):
            await pool.call(env, "act", step, "hang for ever")
        assert alive(pid)
        env.abandon()
        assert not alive(pid)
        pool.close()

    asyncio.run(go())


def test_a_process_that_hangs_while_it_is_made_is_killed(tmp_path):
    file = tmp_path / "pid"

    async def go():
        pool = EnvPool(1, 30.0)
        making = asyncio.create_task(pool.acquire(f"{ODD}:HangingStartApart", {"file": str(file)}))
        while not (file.exists() and file.read_text()):
            await asyncio.sleep(0.02)
            assert not making.done()
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert not alive(int(file.read_text()))
        pool.close()

    asyncio.run(go())


def test_environments_are_used_again_and_closed_with_the_pool():
    async def go():
        pool, name = EnvPool(2, 20.0), PLACES["process"]
        first = await pool.acquire(name, {})
        pool.release(first, name, {})
        again = await pool.acquire(name, {})
        assert again is first and isinstance(first, ProcessEnv)
        pool.release(again, name, {})
        thread = await pool.acquire("frozen_lake", {"size": 4})
        pool.release(thread, "frozen_lake", {"size": 4})
        other = await pool.acquire("frozen_lake", {"size": 5})
        assert other is not thread  # other arguments, another environment
        assert await pool.acquire("frozen_lake", {"size": 4}) is thread
        pool.close()
        assert first.ended() == "its process ended with exit code 0" and not alive(first.pid)

    asyncio.run(go())


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'frozen_lake'"):
        meet(env="frozen_lak")


def test_waiting_for_a_thread_is_not_the_environments_time():
    """Six calls of 0.8 s on two threads take 2.4 s in all, each less than its limit."""

    async def go():
        pool = EnvPool(2, timeout=2.0)

        async def one():
            env = await pool.acquire(PLACES["thread"], {})
            await pool.call(env, "reset", reset, 5, 1)
            return await pool.call(env, "act", step, "slow")

        return await asyncio.gather(*(one() for _ in range(6)))

    assert len(asyncio.run(go())) == 6
