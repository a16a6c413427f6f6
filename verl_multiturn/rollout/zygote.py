"""The process that environments are forked from: one import for all of them, then milliseconds each.

    python -P -m verl_multiturn.rollout.zygote FD NAME [--plain]

It imports the environment's module and packages once, freezes what exists, and forks a child for
each pair of sockets that arrives on FD. Parent and children share memory until one of them writes.
One thread only: a fork copies just the thread that forks.

A child's second socket is its lifeline. The zygote writes the child's process id to it and, at its
end, how it ended; whatever comes from the other side, its closing included, ends the child and all
that it started. When FD closes, because the rollout worker is gone, everything here ends.
"""

import ctypes
import fcntl
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from verl_multiturn.env import Env
from verl_multiturn.load import load_class
from verl_multiturn.rollout.observed import EnvironmentFailure
from verl_multiturn.rollout.workers import READY, ThreadEnv

GRACE = 2.0  # seconds that environments have to close once the rollout worker is gone
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def preload(name: str) -> None:
    """Import what the environments of this name share."""
    cls = load_class(name, Env)
    needs = getattr(cls, "needs", Env.needs)
    needs.require(name)
    for package in needs.packages:
        with suppress(Exception):  # what cannot be imported fails in the environment, which says why
            import_module(package)
    getattr(cls, "preload", Env.preload)()


def described(status: Any) -> str:
    """How a process ended, from the answer of `os.waitid`."""
    if status.si_code == os.CLD_EXITED:
        return f"its process ended with exit code {status.si_status}"
    known = status.si_status in set(signal.Signals)
    name = f" ({signal.Signals(status.si_status).name})" if known else ""
    return f"its process was ended by signal {status.si_status}{name}"


def end(pid: int) -> None:
    """Kill a child and all that it started."""
    for kill in (os.killpg, os.kill):
        with suppress(OSError):
            kill(pid, signal.SIGKILL)


class Zygote:
    """Forks, reaps and kills children; `loop` returns in each child with the child's socket."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.children: dict[int, Connection] = {}  # pid -> lifeline
        self.doomed: set[int] = set()  # killed, not dead yet
        # A child that ends wakes the poll.
        self.woken, self.waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def loop(self) -> Connection | None:
        """Fork until the control socket closes (None), or return in a child."""
        while True:
            watched = {c.fileno(): pid for pid, c in self.children.items() if pid not in self.doomed}
            ready = self._wait([self.control.fileno(), *watched])
            if self.control.fileno() in ready:
                message, fds, _, _ = socket.recv_fds(self.control, 1, 2)
                if not message:
                    break
                if len(fds) < 2:  # this process may open no more: the rollout worker sees them closed
                    for fd in fds:
                        os.close(fd)
                elif child := self._fork(*map(Connection, fds)):
                    return child
            for pid in (watched[fd] for fd in ready & watched.keys()):
                end(pid)
                self.doomed.add(pid)
            self._reap()
        deadline = time.monotonic() + GRACE
        while self.children:
            self._wait([], max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                for pid in self.children:
                    end(pid)
                deadline = float("inf")
            self._reap()
        return None

    def _wait(self, fds: list[int], seconds: float = float("inf")) -> set[int]:
        """The file descriptors that can be read; none when a child has ended, or after `seconds`."""
        poll = select.poll()
        for fd in (self.woken, *fds):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(None if seconds == float("inf") else 1e3 * seconds)}
        if self.woken in ready:
            os.read(self.woken, 4096)
        return ready

    def _fork(self, connection: Connection, lifeline: Connection) -> Connection | None:
        """In the child its connection."""
        zygote = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else the child would write it once more
        try:
            pid = os.fork()
        except OSError as error:
            lifeline.send(f"its process could not be forked: {error.strerror}")
            connection.close()
            lifeline.close()
            return None
        if pid == 0:
            self._become_child(zygote, lifeline)
            return connection
        with suppress(OSError):  # the child does the same: whoever comes first
            os.setpgid(pid, pid)
        connection.close()
        self.children[pid] = lifeline
        with suppress(OSError):  # given up already: the closed lifeline is seen next
            lifeline.send(pid)
        return None

    def _become_child(self, zygote: int, lifeline: Connection) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != zygote:
            os._exit(1)  # it died before the line above
        os.setpgid(0, 0)  # a group of its own: what it starts can be ended with it
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (self.woken, self.waker):
            os.close(fd)
        self.control.close()
        for other in (lifeline, *self.children.values()):
            other.close()
        gc.enable()
        if (module := sys.modules.get("numpy.random")) is not None:
            module.seed()  # as `random` does by itself: environments must not inherit the same chances

    def _reap(self) -> None:
        for pid, lifeline in list(self.children.items()):
            # A zombie at first: as long as it is one, nobody else's group can have its number.
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is None:
                continue
            end(pid)
            os.waitpid(pid, 0)
            with suppress(OSError):
                lifeline.send(described(status))
            lifeline.close()
            del self.children[pid]
            self.doomed.discard(pid)


def serve(connection: Connection) -> None:
    """Make one environment, answer calls until the connection closes, close the environment."""
    env = ThreadEnv()
    while True:
        try:
            first, second = connection.recv()
        except (EOFError, ConnectionResetError):
            break
        try:
            answer = None
            if env.env is None:
                env.make(first, second)
            else:
                answer = env.call(first, *second)
            connection.send((True, answer))  # here: not everything that an info holds can be sent
        except BrokenPipeError:
            break
        except Exception as error:
            connection.send((False, EnvironmentFailure(f"{type(error).__name__}: {error}")))
    env.close()


def run_child(connection: Connection) -> int:
    """`serve`; return the exit code."""
    try:
        serve(connection)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(fd: int, name: str, plain: bool) -> None:
    """Preload unless `plain`, say that it is ready or what is wrong, fork on request."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())  # a thread's mask is inherited
    control = socket.socket(fileno=fd)
    gc.disable()
    if not plain:
        # An import may hang in C, where no Python runs: the kernel ends it when the rollout worker goes.
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_ASYNC)
        problem = ""
        try:
            preload(name)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        if problem:
            control.sendall(problem.encode())
            return
        if (threads := len(os.listdir("/proc/self/task")) - 1) > 0:
            logging.getLogger(__name__).warning(
                "%s starts threads when it is imported (%d), which a fork would lose: each of its "
                "processes imports it anew",
                name,
                threads,
            )
            os.set_inheritable(fd, True)
            os.execv(sys.executable, [*sys.orig_argv, "--plain"])
    gc.collect()
    gc.freeze()
    control.sendall(READY)
    connection = Zygote(control).loop()
    if connection is not None:
        code = run_child(connection)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)  # what was registered to run at exit belongs to the zygote


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], "--plain" in sys.argv[3:])
