"""Where an environment lives: in this process, or in one of its own, forked from a zygote."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from verl_multiturn.env import Env, make
from verl_multiturn.load import import_path
from verl_multiturn.rollout.observed import EnvironmentFailure

READY = b"ready"  # what a zygote says after its imports; anything else is what went wrong
CLOSE_SECONDS = 10.0  # that an environment, or a zygote with all of its own, has to close
T = TypeVar("T")
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


class ThreadEnv:
    """An environment of this process.

    Attributes:
        episodes: played to the end.
    """

    def __init__(self) -> None:
        self.env: Env | None = None
        self.episodes = 0
        self._busy = self._given_up = False

    def lost(self) -> str | None:
        """Why an idle environment cannot be used again; None: it can."""
        return None

    def private_mb(self) -> float:
        """MiB of memory of its own; 0: it shares this process."""
        return 0.0

    def make(self, name: str, kwargs: dict[str, Any]) -> None:
        """Build the environment; called once, before anything else."""
        self.env = self._visit(make, name, **kwargs)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(env, *args)` here."""
        answer: T = self._visit(function, self.env, *args)
        return answer

    def _visit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._busy = True
        try:
            return function(*args, **kwargs)
        finally:
            self._busy = False
            if self._given_up:
                self.abandon()

    def close(self) -> None:
        """Close the environment."""
        env, self.env = self.env, None
        if env is not None:
            env.close()

    def abandon(self) -> None:
        """Close it as well as it goes, once the call that may still run in it has returned."""
        self._given_up = True
        if not self._busy:  # closing an engine under a running call could take this process with it
            with suppress(Exception):  # what failed before matters more than how it closes
                self.close()


class Zygote:
    """Forks processes for the environments of one module; starts with the first of them.

    Args:
        name: of an environment; its module is imported once, in a process of the zygote's own.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None  # once it is ready
        self._lock = threading.Lock()  # the first who comes starts it, the others wait
        self._ended = ""  # for good, and why: a pool makes another one

    @property
    def alive(self) -> bool:
        """Whether it can fork, or has not been asked yet."""
        return not self._ended and (self._process is None or self._process.poll() is None)

    def fork(self) -> tuple[Connection, Connection]:
        """A new process: the connection to its environment, and its lifeline.

        Raises:
            EnvironmentFailure: the module cannot be imported, or the zygote has ended.
        """
        with self._lock:
            if self._process is None and not self._ended:
                self._start()
        (ours, theirs), (life, death) = socket.socketpair(), socket.socketpair()
        with theirs, death:
            try:
                if self._control is None:
                    raise EnvironmentFailure(self._ended)
                socket.send_fds(self._control, [b"f"], [theirs.fileno(), death.fileno()])
            except (BrokenPipeError, ConnectionResetError):
                raise EnvironmentFailure(self.ending()) from None
        return Connection(ours.detach()), Connection(life.detach())

    def _start(self) -> None:
        control, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "verl_multiturn.rollout.zygote", str(fd), self.name],
                stdin=subprocess.DEVNULL,
                pass_fds=[fd],
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": import_path()},
                # Ctrl-C is for the rollout worker, which ends its environments in order.
                start_new_session=True,
            )
        answer = control.recv(65536)
        if answer == READY:
            self._control = control
        else:
            self._ended = self._ended or answer.decode() or self.ending()

    def ending(self) -> str:
        """How it ended; asked once it has."""
        assert self._process is not None
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "its process could not be forked: too many files are open (see ulimit -n)"
        how = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
        return f"the process that forks its processes ended with {how}"

    def give_up(self) -> None:
        """End it if it still imports: whoever waited for it has waited too long."""
        if self._process is not None and self._control is None:
            self._ended = self._ended or "importing it took too long"
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End it, and with it every process that it has forked."""
        self._ended = self._ended or "the pool is closed"
        if self._process is None:
            return
        if self._control is not None:
            self._control.close()
            self._control = None
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_SECONDS)
        self._process.kill()
        self._process.wait()


class ProcessEnv:
    """An environment with a process of its own: heavy, thread-unsafe, or in need of killing.

    Attributes:
        pid: of the process; 0 before it is forked.
        episodes: played to the end.
    """

    def __init__(self, zygote: Zygote) -> None:
        self.zygote, self.pid, self.episodes = zygote, 0, 0
        self._connection: Connection | None = None
        self._lifeline: Connection | None = None
        self._lock = threading.Lock()  # of the lifeline
        self._ending: str | None = None
        self._given_up = False

    def make(self, name: str, kwargs: dict[str, Any]) -> None:
        """Fork, and build the environment in the other process; called once, before anything else."""
        self._connection, self._lifeline = self.zygote.fork()
        self.ended(None)  # its first word is the process id
        if self._given_up:  # while the zygote was starting
            self.abandon()
        self._ask(name, kwargs)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(env, *args)` in the other process; its exception is raised here."""
        answer: T = self._ask(function, args)
        return answer

    def _ask(self, *message: Any) -> Any:
        assert self._connection is not None
        try:
            self._connection.send(message)
            ok, answer = self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            ending = self.ended(CLOSE_SECONDS) or "its process closed the connection"
            raise EnvironmentFailure(ending) from None
        if not ok:
            raise answer
        return answer

    def ended(self, seconds: float | None = 0.0) -> str | None:
        """How the process ended; None: within `seconds` (None: without limit) it did not."""
        with self._lock:
            if self._ending is None and self._lifeline is not None and self._lifeline.poll(seconds):
                try:
                    word = self._lifeline.recv()
                except (EOFError, ConnectionResetError):
                    word = self.zygote.ending()
                if isinstance(word, int):
                    self.pid = word
                else:
                    self._ending = word
            return self._ending

    def lost(self) -> str | None:
        """Why an idle environment cannot be used again; None: it can."""
        if self._connection is not None and self._connection.poll():  # nobody asked: this is its end
            return self.ended(1.0) or "its process speaks out of turn"
        return self.ended()

    def private_mb(self) -> float:
        """MiB of memory that would be free without the process; 0 if it has ended."""
        return private_mb(self.pid) if self.ended() is None else 0.0

    def close(self) -> None:
        """End the process, which closes the environment first."""
        if self._connection is not None:
            self._connection.close()
        if self.ended(CLOSE_SECONDS) is None:
            self.abandon()
            raise TimeoutError(f"its close took longer than {CLOSE_SECONDS:g} s, its process was killed")

    def abandon(self) -> None:
        """Kill the process: it hangs, or what it says is no longer trusted."""
        self._given_up = True
        if self._lifeline is None:
            self.zygote.give_up()
            return
        # The sockets stay open until nobody waits at them: their numbers could be others' by then.
        with suppress(OSError):
            self._lifeline.send(None)
        self.ended(CLOSE_SECONDS)


def private_mb(pid: int) -> float:
    """MiB that process `pid` alone uses: memory shared with the zygote does not count."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024
