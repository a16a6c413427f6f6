"""Environments off the event loop: a thread or a process each, a time-out around each call.

Stock verl has no time-out around an agent loop: one environment that hangs would stop the run for
ever, and one that blocks the event loop stops every other trajectory meanwhile.
"""

import asyncio
import logging
import os
import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, Self, TypeVar

from verl_multiturn.env import Env
from verl_multiturn.load import load_class
from verl_multiturn.rollout.observed import EnvironmentFailure, Observed, reset, step
from verl_multiturn.rollout.workers import CLOSE_SECONDS, ProcessEnv, ThreadEnv, Zygote, private_mb

__all__ = ["EnvPool", "EnvironmentFailure", "Observed", "ProcessEnv", "ThreadEnv", "reset", "step"]

log = logging.getLogger(__name__)
T = TypeVar("T")


class Threads:
    """Threads as they are needed. An executor's would keep the process from ending while one hangs."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self.close = weakref.finalize(self, self._jobs.put, None)

    def submit(self, function: Callable[..., Any], *args: Any) -> "Future[tuple[Any, BaseException | None]]":
        """Call it in a thread; the future holds what it returned, and what it raised.

        As a result, not as the future's exception: SystemExit would end the event loop, and
        StopIteration never arrives there.
        """
        future: Future[tuple[Any, BaseException | None]] = Future()
        self._jobs.put((future, function, args))
        if not self._idle.acquire(blocking=False):
            threading.Thread(
                target=_work, args=(self._jobs, self._idle), name="environment", daemon=True
            ).start()
        return future


def _work(jobs: "queue.SimpleQueue[Any]", idle: threading.Semaphore) -> None:
    while (job := jobs.get()) is not None:
        future, function, args = job
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = function(*args), None
        except BaseException as error:
            outcome = None, error
        idle.release()
        future.set_result(outcome)
        del job, future, function, args, outcome  # what they hold may be collected while this waits
    jobs.put(None)  # for the next one


class EnvPool:
    """Environments of one rollout worker, reused between episodes, called with a time-out.

    Args:
        threads: calls that may run at the same time.
        timeout: seconds a call may take.
        max_memory_mb: an environment process with more memory of its own (MiB) is replaced after its
            episode; None: no limit.
        max_episodes: an environment is replaced after so many episodes; None: no limit.

    Raises:
        ValueError: a limit on memory, on a system that does not tell it.
    """

    def __init__(
        self,
        threads: int = 64,
        timeout: float = 60.0,
        max_memory_mb: float | None = None,
        max_episodes: int | None = None,
    ) -> None:
        self.timeout, self.max_memory_mb, self.max_episodes = timeout, max_memory_mb, max_episodes
        self._threads = Threads()
        # A call's time begins when it has a thread, not while it waits for one.
        self._free = asyncio.Semaphore(threads)
        self._idle: dict[str, list[ThreadEnv | ProcessEnv]] = defaultdict(list)
        self._zygotes: dict[str, Zygote] = {}
        self._retiring: set[Future[Any]] = set()
        if max_memory_mb is not None:
            try:
                private_mb(os.getpid())
            except OSError as error:
                raise ValueError(
                    f"multiturn.env_max_memory_mb={max_memory_mb:g} cannot be kept: {error.filename} cannot "
                    "be read here; use multiturn.env_max_episodes"
                ) from None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """The pool of a run; `settings` is its group `multiturn`.

        Raises:
            ValueError: a limit on memory where the environments share this process.
        """
        memory = settings["env_max_memory_mb"]
        if memory is not None and not _apart(settings["env"]):
            raise ValueError(
                f"multiturn.env_max_memory_mb={memory:g} limits environments with a process of their own, "
                f'and {settings["env"]} runs in threads: give its class runs_in = "process", or use '
                "multiturn.env_max_episodes"
            )
        return cls(settings["env_threads"], settings["step_timeout"], memory, settings["env_max_episodes"])

    async def acquire(self, name: str, kwargs: dict[str, Any]) -> ThreadEnv | ProcessEnv:
        """An idle environment of this name and arguments, else a new one.

        Raises:
            EnvironmentFailure: it cannot be made.
            ValueError: `name` names nothing.
        """
        idle = self._idle[f"{name} {kwargs!r}"]
        while idle:
            env = idle.pop()
            if (how := env.lost()) is None:
                return env
            log.warning("an idle environment %s is replaced: %s", name, how)
            self._retire(env)
        env = ProcessEnv(self._zygote(name)) if _apart(name) else ThreadEnv()
        try:
            await self._run(f"make({name!r})", env.make, name, kwargs)
        except BaseException:
            await self.abandon(env)
            raise
        return env

    def _zygote(self, name: str) -> Zygote:
        module = name.partition(":")[0]
        if module not in self._zygotes or not self._zygotes[module].alive:
            self._zygotes[module] = Zygote(name)
        return self._zygotes[module]

    def release(self, env: ThreadEnv | ProcessEnv, name: str, kwargs: dict[str, Any]) -> None:
        """Give an environment back after an episode that went well; a worn one is closed instead."""
        env.episodes += 1
        memory = 0.0 if self.max_memory_mb is None else env.private_mb()
        if self.max_memory_mb is not None and memory > self.max_memory_mb:
            log.warning(
                "environment %s is replaced: after %d episodes its process has %.0f MiB of its own, more "
                "than multiturn.env_max_memory_mb=%g",
                name,
                env.episodes,
                memory,
                self.max_memory_mb,
            )
        elif self.max_episodes is None or env.episodes < self.max_episodes:
            self._idle[f"{name} {kwargs!r}"].append(env)
            return
        self._retire(env)

    def _retire(self, env: ThreadEnv | ProcessEnv) -> None:
        """Close it in the background: a close that hangs holds nobody up."""
        closing = self._threads.submit(_close, env)
        self._retiring.add(closing)
        closing.add_done_callback(self._retiring.discard)

    async def abandon(self, env: ThreadEnv | ProcessEnv) -> None:
        """Give up an environment after an episode that went wrong; its process is killed."""
        await asyncio.wait([asyncio.wrap_future(self._threads.submit(env.abandon))], timeout=CLOSE_SECONDS)

    async def call(self, env: ThreadEnv | ProcessEnv, what: str, function: Callable[..., T], *args: Any) -> T:
        """Run `function(env, *args)`; `what` names the call in an error.

        Raises:
            EnvironmentFailure: it raised, broke the contract, or took longer than `timeout`.
        """
        answer: T = await self._run(what, env.call, function, *args)
        return answer

    async def _run(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        async with self._free:
            running = asyncio.wrap_future(self._threads.submit(function, *args))
            done, _ = await asyncio.wait([running], timeout=self.timeout)
        if not done:  # a thread cannot be killed: it stays lost, another takes its place
            raise EnvironmentFailure(f"{what} took longer than {self.timeout:g} s")
        answer, error = running.result()
        if error is None:
            return answer
        if isinstance(error, EnvironmentFailure):
            raise EnvironmentFailure(f"{what}: {error}") from None
        # Whatever a user's environment raises costs its trajectory, never the run.
        raise EnvironmentFailure(f"{what} raised {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close every idle environment and end what has a process, in a bounded time."""
        for idle in self._idle.values():
            while idle:
                self._retire(idle.pop())
        wait(list(self._retiring), timeout=CLOSE_SECONDS + 1)
        for zygote in self._zygotes.values():
            zygote.close()
        self._threads.close()


def _close(env: ThreadEnv | ProcessEnv) -> None:
    try:
        env.close()
    except Exception as error:
        log.warning("an environment could not be closed: %s: %s", type(error).__name__, error)


def _apart(name: str) -> bool:
    return bool(getattr(load_class(name, Env), "runs_in", "thread") == "process")
