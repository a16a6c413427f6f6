"""A run's sign of life: `heartbeat.json` in its folder, written by the driver every few seconds and phase.

    time, started    unix seconds: of this writing, of the start
    step, phase      what is being done; since: unix seconds, when the phase began
    host, pid, born  where the driver runs; born tells it from a later process of the same number
    processes        {role: [process ids]} that the run cannot do without
    ending           null while it runs, then "done", "stopped" or "interrupted"; reason: why, or null

A driver that is killed writes nothing any more: who reads the file afterwards knows the phase, the
time and the processes (`verl-multiturn doctor RUN`).
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

from verl_multiturn.errors import RunStopped

NAME = "heartbeat.json"
INTERVAL = 2.0  # seconds between two beats
RESUMES = "the same command resumes from the last checkpoint"
PATIENCE = 60.0  # seconds that the look at the processes may take, or fail
UNLIMITED = ("start-up", "rollout", "validation")  # episodes have limits of their own
GRACE = 25.0  # that the driver has to stop in order once a process is lost; then it is ended
KINDS = {
    "time": int | float, "step": int, "phase": str, "since": int | float, "host": str, "pid": int,
    "born": int | None, "processes": dict, "ending": str | None, "reason": str | None,
}  # fmt: skip
_over = threading.Event()


class Watch(Protocol):
    """Looks after the processes of a run."""

    @property
    def processes(self) -> dict[str, list[int]]:
        """Their ids, by role."""
        ...

    def lost(self) -> str | None:
        """Which one is gone, in a sentence; None: all are there. It may raise anything, or never return."""
        ...


class Heartbeat:
    """Beats in a thread of its own, and says when a process of the run is lost.

    Args:
        folder: of the run.
        interval: seconds between two beats.
        grace: seconds that the driver's main thread has to stop once a process is lost. It may wait for
            an answer that never comes: then this process is ended, with the sentence on standard error.
        patience: seconds without one look at the processes that succeeded, after which Ray counts as lost.
        limit: seconds of a phase after which it counts as hanging, but for those of UNLIMITED; None: none.
    """

    def __init__(
        self,
        folder: str | Path,
        interval: float = INTERVAL,
        grace: float = GRACE,
        patience: float = PATIENCE,
        limit: float | None = None,
    ) -> None:
        self.path, self.interval, self.grace, self.patience = Path(folder) / NAME, interval, grace, patience
        self.limit, self._began = limit, time.monotonic()
        self.problem: str | None = None
        self._watch: Watch | None = None
        self._unseen = 0  # beats since the last look that succeeded: a suspended machine has none
        self._trouble: str | None = None  # what the last look raised
        self._lock = threading.Lock()
        self._ended, self._news = threading.Event(), threading.Event()
        self._looked = threading.Condition()
        now = time.time()
        pid = os.getpid()
        self._state: dict[str, Any] = {
            "time": now, "started": now, "step": 0, "phase": "start-up", "since": now,
            "host": socket.gethostname(), "pid": pid, "born": born(pid), "processes": {},
            "ending": None, "reason": None,
        }  # fmt: skip

    def start(self) -> None:
        """Write the first beat and go on."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _over.clear()
        self._write()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def watch(self, watch: Watch) -> None:
        """Look after these processes from now on."""
        self._watch, self._unseen = watch, 0
        threading.Thread(target=self._look, name="watch", daemon=True).start()

    def enter(self, phase: str, step: int) -> None:
        """A phase begins."""
        with self._lock:
            self._state |= {"phase": phase, "step": step, "since": time.time()}
            self._began = time.monotonic()
        self._news.set()

    def begins(self, phase: str, step: Callable[[], int], function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which begins a phase that lasts until another one begins."""

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            self.enter(phase, step())
            return function(*args, **kwargs)

        return called

    def during(self, phase: str, step: Callable[[], int], function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, as a phase: the one before it goes on when it returns."""

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            before = self._state["phase"]
            self.enter(phase, step())
            answer = function(*args, **kwargs)  # what raises, ends in this phase
            self.enter(before, step())
            return answer

        return called

    def check(self) -> None:
        """Stop the run if a process is lost.

        Raises:
            RunStopped: which one, and what was being done.
        """
        if self.problem is not None:
            raise self.stopped()

    def explain(self, seconds: float = 3.0) -> str | None:
        """Why a call to another process may have failed: waits for the next look at them."""
        if self.problem is None and self._watch is not None:
            with self._looked:
                self._looked.wait(seconds)
        return self.problem

    def stopped(self) -> RunStopped:
        """What to raise once a process is lost."""
        error = RunStopped(self.problem)
        error.said = True
        return error

    def close(self, ending: str, reason: str | None = None) -> None:
        """The last beat: "done", "stopped" or "interrupted", and why. What is said first, stays."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._news.set()
        with self._lock:
            self._state |= {"ending": ending, "reason": reason}
        self._try_write()

    def _beat(self) -> None:
        counted = time.monotonic()
        while not self._ended.is_set():
            self._news.wait(self.interval)
            self._news.clear()
            if self._ended.is_set():
                return
            now = time.monotonic()
            with self._lock:
                limited, lasts = self._state["phase"] not in UNLIMITED, now - self._began
            if self.limit is not None and limited and lasts > self.limit:
                self._lose(f"nothing has come for {self.limit:g} s (multiturn.phase_timeout)")
            if self._watch is not None and now - counted >= self.interval:
                counted, self._unseen = now, self._unseen + 1
                if self._unseen * self.interval > self.patience:
                    self._lose(
                        f"Ray no longer answers: for {self.patience:g} s it did not say which processes are "
                        f"there{f' ({self._trouble})' if self._trouble else ''}"
                    )
            self._try_write()

    def _look(self) -> None:
        """Looks at the processes, in a thread apart: Ray's answer may never come."""
        while self._watch is not None and not self._ended.wait(self.interval):
            try:
                problem, processes = self._watch.lost(), self._watch.processes
            # Ray raises whatever its parts raise; one failure is none, `_beat` counts them.
            except Exception as error:
                self._trouble = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                continue
            self._unseen, self._trouble = 0, None
            with self._lock:
                self._state["processes"] = processes
            if problem:
                self._lose(problem)
            with self._looked:
                self._looked.notify_all()

    def _lose(self, problem: str) -> None:
        """Say it once, and see that the run ends."""
        with self._looked:
            if self.problem is not None:
                return
            self.problem = f"{problem}, in phase {self._where}; {RESUMES}"
            self._looked.notify_all()
        # At once: without its raylet Ray ends this process within seconds, without a word.
        sys.stderr.write(f"error: {self.problem}\n")
        sys.stderr.flush()
        with self._lock:
            self._state |= {"ending": "stopped", "reason": self.problem}
        threading.Thread(target=self._end, daemon=True).start()

    @property
    def _where(self) -> str:
        return f"{self._state['phase']!r} of step {self._state['step']}"

    def _end(self) -> None:
        """End this process if the run has not left it in time: see `grace`."""
        if not _over.wait(self.grace):
            os._exit(1)

    def _try_write(self) -> None:
        try:
            self._write()
        except OSError as error:  # a full disk stops the run where it matters: at its records
            sys.stderr.write(f"warning: {self.path} cannot be written: {error.strerror}\n")

    def _write(self) -> None:
        with self._lock:
            self._state["time"] = time.time()
            data = json.dumps(self._state, indent=1)
            # Not flushed to the disk: what matters is that a reader never sees half of it.
            temporary = self.path.with_name(f".{NAME}.{os.getpid()}")
            temporary.write_text(data, encoding="utf-8")
            temporary.replace(self.path)


def over() -> None:
    """The run has left this process, Ray included: the process may live on."""
    _over.set()


def read(folder: str | Path) -> dict[str, Any] | None:
    """The last beat of a run; None: it has none.

    Raises:
        ValueError: the file is damaged.
    """
    path = Path(folder) / NAME
    if not path.exists():
        return None
    try:
        beat = json.loads(path.read_text(encoding="utf-8"))
        wrong = [name for name, kind in KINDS.items() if name not in beat or not isinstance(beat[name], kind)]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if wrong:
        raise ValueError(f"{path} is damaged: it has no (usable) {', '.join(wrong)}")
    return dict(beat)


def born(pid: int) -> int | None:
    """When a process began, in the kernel's clock ticks; None: there is no such process, or it is dead."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
