"""A run's sign of life: `heartbeat.json` in its folder, written anew every few seconds by the driver.

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
GRACE = 25.0  # that the driver has to stop in order once a process is lost; then it is ended
_over = threading.Event()


class Watch(Protocol):
    """Looks after the processes of a run."""

    @property
    def processes(self) -> dict[str, list[int]]:
        """Their ids, by role."""
        ...

    def lost(self) -> str | None:
        """Which one is gone, in a sentence; None: all are there."""
        ...


class Heartbeat:
    """Beats in a thread of its own, and says when a process of the run is lost.

    Args:
        folder: of the run.
        interval: seconds between two beats.
        grace: seconds that the driver's main thread has to stop once a process is lost. It may wait for
            an answer that never comes: then this process is ended, with the sentence on standard error.
    """

    def __init__(self, folder: str | Path, interval: float = INTERVAL, grace: float = GRACE) -> None:
        self.path, self.interval, self.grace = Path(folder) / NAME, interval, grace
        self.problem: str | None = None
        self._watch: Watch | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
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
        self._watch = watch

    def enter(self, phase: str, step: int) -> None:
        """A phase begins."""
        with self._lock:
            self._state |= {"phase": phase, "step": step, "since": time.time()}

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
        """The last beat: "done", "stopped" or "interrupted", and why."""
        self._ended.set()
        with self._lock:
            self._state |= {"ending": ending, "reason": reason}
        self._write()

    def _beat(self) -> None:
        while not self._ended.wait(self.interval):
            if self._watch is not None and self.problem is None:
                problem = self._watch.lost()
                with self._looked:
                    self.problem = problem and f"{problem}, in phase {self._where}; {RESUMES}"
                    self._looked.notify_all()
                if self.problem:
                    # At once: without its raylet Ray ends this process within seconds, without a word.
                    sys.stderr.write(f"error: {self.problem}\n")
                    sys.stderr.flush()
                    with self._lock:
                        self._state |= {"ending": "stopped", "reason": self.problem}
                    threading.Thread(target=self._end, daemon=True).start()
            try:
                self._write()
            except OSError as error:  # a full disk stops the run where it matters: at its records
                sys.stderr.write(f"warning: {self.path} cannot be written: {error.strerror}\n")

    @property
    def _where(self) -> str:
        return f"{self._state['phase']!r} of step {self._state['step']}"

    def _end(self) -> None:
        """End this process if the run has not left it in time: see `grace`."""
        if not _over.wait(self.grace):
            os._exit(1)

    def _write(self) -> None:
        with self._lock:
            self._state["time"] = time.time()
            if self._watch is not None:
                self._state["processes"] = self._watch.processes
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
        wrong = [name for name in ("time", "step", "phase", "since", "pid", "host") if name not in beat]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if wrong:
        raise ValueError(f"{path} is damaged: it has no {', '.join(wrong)}")
    return dict(beat)


def born(pid: int) -> int | None:
    """When a process began, in the kernel's clock ticks; None: there is no such process, or it is dead."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
