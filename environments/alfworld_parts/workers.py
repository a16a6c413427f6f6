"""Processes that solve games one after the other, each under a time limit."""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

START_LIMIT = 120.0
Job = TypeVar("Job")
Solve = Callable[[Any], Any]


@dataclass
class _Worker(Generic[Job]):
    process: BaseProcess
    pipe: Connection
    deadline: float
    job: Job | None = None  # None: starting, or waiting for a job
    ready: bool = False


class Workers(Generic[Job]):
    """A pool whose members may hang or crash: such a one is killed, its job reported, another started.

    Args:
        make: called with `arguments` in each process; returns the function that does one job. Both
            it and the jobs must pickle.
        count: processes.
        limit: seconds for one job.
    """

    def __init__(
        self, make: Callable[..., Solve], arguments: tuple[Any, ...], count: int, limit: float
    ) -> None:
        self._make, self._arguments, self._count, self._limit = make, arguments, count, limit
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker[Job]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._workers:
            self._end(self._workers[-1])

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Any, str]]:
        """Do all jobs, in any order.

        Yields:
            (job, result, ""), or (job, None, why): "time-out", "crash" or the exception's text.

        Raises:
            RuntimeError: a process cannot be started.
        """
        queue = iter(jobs)
        more = True
        while True:
            while more and len(self._workers) < self._count:
                self._start()
            for worker in self._workers:
                if more and worker.ready and worker.job is None:
                    job = next(queue, None)
                    more = job is not None
                    if job is not None:
                        worker.job, worker.deadline = job, time.monotonic() + self._limit
                        worker.pipe.send(job)
            busy = [worker for worker in self._workers if worker.job is not None]
            if not busy and not more:
                return
            yield from self._collect()

    def _collect(self) -> Iterator[tuple[Job, Any, str]]:
        """Wait for the next message or deadline and pass on what ended."""
        active = [worker for worker in self._workers if worker.job is not None or not worker.ready]
        left = min(worker.deadline for worker in active) - time.monotonic()
        answered = wait([worker.pipe for worker in active], timeout=max(left, 0.0))
        for worker in active:
            job = worker.job
            if worker.pipe in answered:
                result, why = self._receive(worker)
            elif time.monotonic() >= worker.deadline:
                self._end(worker)
                result, why = None, "time-out"
            else:
                continue
            if job is not None:
                worker.job = None
                yield job, result, why
            elif why:
                raise RuntimeError(f"a process that solves games does not start: {why}")

    def _receive(self, worker: _Worker[Job]) -> tuple[Any, str]:
        try:
            result, why = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._end(worker)
            return None, "crash"
        worker.ready = True
        return result, why

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(theirs, self._make, self._arguments), daemon=True
        )
        process.start()
        theirs.close()  # or a crash of the process would not close the pipe
        self._workers.append(_Worker(process, ours, time.monotonic() + START_LIMIT))

    def _end(self, worker: _Worker[Job]) -> None:
        self._workers.remove(worker)
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()


def _serve(pipe: Connection, make: Callable[..., Solve], arguments: tuple[Any, ...]) -> None:
    """The life of one process: say that it is ready, then answer jobs until the pipe closes."""
    try:
        solve = make(*arguments)
    except Exception as error:
        pipe.send((None, f"{type(error).__name__}: {error}"))
        return
    pipe.send((None, ""))
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            answer = (solve(job), "")
        except Exception as error:  # a game that breaks the solver is drawn again, not the end of all
            answer = (None, f"{type(error).__name__}: {error}")
        pipe.send(answer)
