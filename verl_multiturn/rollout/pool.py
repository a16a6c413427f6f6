"""Environments off the event loop: a thread or a process each call, a time-out around each.

Stock verl has no time-out around an agent loop: one environment that hangs would stop the run for
ever, and one that blocks the event loop stops every other trajectory meanwhile.
"""

import asyncio
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Any

from verl_multiturn.env import Env, make
from verl_multiturn.load import load_class
from verl_multiturn.panel import content_hash


class EnvironmentFailure(RuntimeError):
    """An environment raised, hung, or broke its contract; the message names it and the call."""


@dataclass(frozen=True)
class Observed:
    """What an environment shows after `reset` or `step`, read in one visit to its thread."""

    observation: str
    key: Hashable  # state_key()
    admissible: list[str] | None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    instruction: str = ""
    max_turns: int = 0
    content: str = ""  # content hash of the task, after reset only


def reset(env: Env, task: int | str, dynamics_seed: int) -> Observed:
    """Start a task and look at it."""
    observation, info = env.reset(task, dynamics_seed)
    return _look(env, observation, info, content=content_hash(env, observation))


def step(env: Env, action: str) -> Observed:
    """Act and look."""
    observation, reward, terminated, truncated, info = env.step(action)
    for name, value, kind in (
        ("reward", reward, int | float),
        ("terminated", terminated, bool),
        ("truncated", truncated, bool),
    ):
        # NumPy's scalars are what Gymnasium environments return.
        plain = value.item() if hasattr(value, "item") else value
        if not isinstance(plain, kind):
            raise TypeError(f"step returned {name} of type {type(value).__name__}")
    if not math.isfinite(reward):
        raise TypeError(f"step returned the reward {reward}")
    return _look(
        env,
        observation,
        info,
        reward=float(reward),
        terminated=bool(terminated),
        truncated=bool(truncated) and not terminated,
    )


def _look(env: Env, observation: Any, info: Any, **more: Any) -> Observed:
    if not isinstance(observation, str):
        raise TypeError(f"the observation has type {type(observation).__name__}, must be str")
    if not isinstance(info, dict):
        raise TypeError(f"the info has type {type(info).__name__}, must be dict")
    key = env.state_key()
    try:
        hash(key)
    except TypeError:
        raise TypeError(f"state_key() has type {type(key).__name__}, which has no hash") from None
    actions, instruction = env.admissible(), env.instruction
    return Observed(
        observation,
        key,
        actions,
        info=info,
        instruction=instruction,
        max_turns=env.max_turns,
        **more,
    )


class ThreadEnv:
    """An environment of this process."""

    env: Env | None = None

    def make(self, name: str, kwargs: dict[str, Any]) -> None:
        """Build the environment; called once, before anything else."""
        self.env = make(name, **kwargs)

    def call(self, function: Callable[..., Observed], *args: Any) -> Observed:
        """Run `function(env, *args)` here."""
        return function(self.env, *args)

    def close(self) -> None:
        """Close the environment."""
        if self.env is not None:
            self.env.close()

    def abandon(self) -> None:
        """Close it as well as it goes: what failed before matters more than how it closes."""
        with suppress(Exception):
            self.close()


class ProcessEnv:
    """An environment with a process of its own: heavy, thread-unsafe, or in need of killing."""

    def __init__(self) -> None:
        self.connection, child = Pipe()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        command = [sys.executable, "-m", __name__, str(child.fileno())]
        self.process = subprocess.Popen(
            command, pass_fds=[child.fileno()], env={**os.environ, "PYTHONPATH": path}
        )
        child.close()

    def make(self, name: str, kwargs: dict[str, Any]) -> None:
        """Build the environment in the other process; called once, before anything else."""
        self._ask(name, kwargs)

    def call(self, function: Callable[..., Observed], *args: Any) -> Observed:
        """Run `function(env, *args)` in the other process; its exception is raised here."""
        answer: Observed = self._ask(function, args)
        return answer

    def _ask(self, *message: Any) -> Any:
        try:
            self.connection.send(message)
            ok, answer = self.connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = self.process.wait()
            raise EnvironmentFailure(f"its process ended with exit code {code}") from None
        if not ok:
            raise answer
        return answer

    def close(self) -> None:
        """End the process, which closes the environment."""
        self.connection.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.abandon()

    def abandon(self) -> None:
        """Kill the process: it hangs, or what it says is no longer trusted."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


class EnvPool:
    """Environments of one rollout worker, reused between episodes, called with a time-out.

    Args:
        threads: calls that may run at the same time.
        timeout: seconds a call may take.
    """

    def __init__(self, threads: int = 64, timeout: float = 60.0) -> None:
        self.threads, self.timeout = threads, timeout
        self._executor = ThreadPoolExecutor(threads, "environment")
        # A call's time begins when it has a thread, not while it waits for one.
        self._free = asyncio.Semaphore(threads)
        self._idle: dict[str, list[ThreadEnv | ProcessEnv]] = defaultdict(list)

    async def acquire(self, name: str, kwargs: dict[str, Any]) -> ThreadEnv | ProcessEnv:
        """An idle environment of this name and arguments, else a new one."""
        idle = self._idle[f"{name} {kwargs!r}"]
        if idle:
            return idle.pop()
        apart = getattr(load_class(name, Env), "runs_in", "thread") == "process"
        env = ProcessEnv() if apart else ThreadEnv()
        try:
            await self._run(f"make({name!r})", env.make, name, kwargs)
        except BaseException:
            env.abandon()
            raise
        return env

    def release(self, env: ThreadEnv | ProcessEnv, name: str, kwargs: dict[str, Any]) -> None:
        """Give an environment back after an episode that went well."""
        self._idle[f"{name} {kwargs!r}"].append(env)

    async def call(
        self, env: ThreadEnv | ProcessEnv, what: str, function: Callable[..., Observed], *args: Any
    ) -> Observed:
        """Run `function(env, *args)`; `what` names the call in an error.

        Raises:
            EnvironmentFailure: it raised, broke the contract, or took longer than `timeout`.
        """
        observed: Observed = await self._run(what, env.call, function, *args)
        return observed

    async def _run(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        async with self._free:
            running = asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
            done, _ = await asyncio.wait([running], timeout=self.timeout)
        if not done:
            # The thread cannot be killed: it stays lost with its executor, whose waiting calls the
            # other threads still serve.
            self._executor = ThreadPoolExecutor(self.threads, "environment")
            raise EnvironmentFailure(f"{what} took longer than {self.timeout:g} s")
        try:
            return running.result()
        except EnvironmentFailure as error:
            raise EnvironmentFailure(f"{what}: {error}") from None
        except Exception as error:
            # Whatever a user's environment raises costs its trajectory, never the run.
            raise EnvironmentFailure(f"{what} raised {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close every idle environment."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()
        self._executor.shutdown(wait=False, cancel_futures=True)


def _serve(connection: Connection) -> None:
    """The other end of `ProcessEnv`: make one environment, answer calls until the pipe closes."""
    env = ThreadEnv()
    while True:
        try:
            first, second = connection.recv()
        except EOFError:
            break
        try:
            answer = None
            if env.env is None:
                env.make(first, second)
            else:
                answer = env.call(first, *second)
            connection.send((True, answer))  # here: not everything that an info holds can be sent
        except Exception as error:
            connection.send((False, EnvironmentFailure(f"{type(error).__name__}: {error}")))
    env.close()


if __name__ == "__main__":
    # Under `-m` this file is `__main__`; the functions that arrive by name belong to the module.
    from verl_multiturn.rollout.pool import _serve as serve

    serve(Connection(int(sys.argv[1])))
