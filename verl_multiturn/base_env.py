"""The base classes of environments: one episode in text, in Gymnasium's five-tuple.

An environment subclasses `Env` and writes `_reset` and `_step`; the base class counts turns, stops
at `max_turns`, refuses steps outside an episode, and gives snapshots.

Two sources of chance, never the global one: `self.rng` fixes the instance (same seed, same task)
and `self.noise` drives what happens in it, so that the members of a group share a start and differ
afterwards.
"""

import hashlib
import pickle
import random
from collections.abc import Hashable
from typing import Any, ClassVar, Literal, Self

from verl_multiturn.needs import Needs

Seed = int | str
Info = dict[str, Any]
StepResult = tuple[str, float, bool, bool, Info]


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any parts, the same in every process (unlike `hash`). Source: BLAKE2b, RFC 7693."""
    text = "".join(f"{len(str(part))}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Env:
    """Base class of all environments.

    Attributes:
        instruction: the task and the legal actions, in words; may be set by `_reset`.
        max_turns: steps after which an episode is truncated.
        snapshots: "copy" (the state is pickled), "replay" (see `ReplayEnv`) or "none".
        runs_in: "process" for a heavy or thread-unsafe environment, else "thread".
        rng: the instance's chance, seeded from `seed` before `_reset`.
        noise: the dynamics' chance, seeded from `dynamics_seed` before `_reset`.
        turn: steps taken in this episode.
        needs: packages, programs and data beyond this package; `make` refuses to build without them.
    """

    needs: ClassVar[Needs] = Needs()
    instruction: str = ""
    max_turns: int = 10
    snapshots: Literal["copy", "replay", "none"] = "copy"
    runs_in: Literal["thread", "process"] = "thread"
    rng: random.Random
    noise: random.Random
    turn: int = 0
    _phase: Literal["new", "running", "over"] = "new"
    _observation: str = ""

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        """Draw the task; return the first observation and an info with `task_type`."""
        raise NotImplementedError(f"{type(self).__name__} must define _reset(seed)")

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        """Act; return observation, reward, terminated, info.

        An unknown action changes nothing and sets `info["valid"] = False`. `info["success"]` says
        whether the task is solved; `info["truncated"]` may stop the episode before `max_turns`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define _step(action)")

    def reset(self, seed: Seed, dynamics_seed: int | None = None) -> tuple[str, Info]:
        """Start the task `seed`; without a `dynamics_seed` the noise follows from `seed` too."""
        # Hashed: a policy that draws from random.Random(seed) must not draw what the task is made of.
        self.rng = random.Random(derive_seed("task", seed))
        self.noise = random.Random(derive_seed("noise", seed if dynamics_seed is None else dynamics_seed))
        self.turn = 0
        self._observation, info = self._parts("_reset", self._reset(seed), "observation", "info")
        self._phase = "running"
        return self._observation, {"task_type": "default"} | info

    def step(self, action: str) -> StepResult:
        """Take one turn; return observation, reward, terminated, truncated, info (`valid`, `success`).

        Raises:
            RuntimeError: before `reset`, or after the episode has ended.
        """
        if self._phase != "running":
            why = "has ended" if self._phase == "over" else "has not begun"
            raise RuntimeError(f"{type(self).__name__}.step: the episode {why}; call reset first.")
        self.turn += 1
        names = ("observation", "reward", "terminated", "info")
        self._observation, reward, terminated, info = self._parts("_step", self._step(action), *names)
        cut = info.get("truncated") or self.turn >= self.max_turns
        truncated = bool(cut and not terminated)
        if terminated or truncated:
            self._phase = "over"
        info = {"valid": True, "success": False} | info
        return self._observation, reward, terminated, truncated, info

    def _parts(self, method: str, result: Any, *names: str) -> Any:
        if isinstance(result, tuple) and len(result) == len(names) and isinstance(result[-1], dict):
            return result
        raise TypeError(
            f"{type(self).__name__}.{method} must return ({', '.join(names)}) with info a dict, "
            f"not {result!r:.80}."
        )

    @classmethod
    def find_data(cls) -> str | None:
        """Where the user's data of `needs.data` was found; None: nowhere."""
        return None

    @classmethod
    def preload(cls) -> None:
        """Import what is heavy, once for all processes of `runs_in = "process"`, which then share it.

        Called before they are forked: it must start no threads and open no connections. The packages
        of `needs` are imported anyway. An environment must work without this call, too.
        """

    def tasks(self, split: str) -> list[Seed]:
        """The task ids of a split, where an environment has a fixed list; the order never changes.

        Raises:
            ValueError: it has none of that name.
        """
        raise ValueError(f"{type(self).__name__} lists no tasks of split {split!r}: its tasks are seeds")

    def peek(self, seed: Seed) -> tuple[str, str] | None:
        """Content (see `content`) and type of a task without the cost of a reset; None: reset to know."""
        return None

    def content(self, observation: str) -> str:
        """What makes this task what it is, asked after `reset` with what it showed; hashed by panels.

        Default: instruction, first observation and state key.
        """
        return "\0".join((self.instruction, observation, repr(self.state_key())))

    def admissible(self) -> list[str] | None:
        """The actions known in the current state, or None where they cannot be listed."""
        return None

    def _match(self, action: str) -> str | None:
        """The admissible action that `action` spells, whatever its case and spacing; else None."""
        known = {name.lower(): name for name in self.admissible() or ()}
        return known.get(" ".join(action.split()).lower())

    def state_key(self) -> Hashable:
        """Equal for equal states. Default: the last observation; it leaves out the turn count."""
        return self._observation

    def expert(self) -> str:
        """A scripted expert's action in the current state."""
        raise NotImplementedError(f"{type(self).__name__} has no scripted expert.")

    def random_action(self, rng: random.Random) -> str:
        """A random action, drawn with the caller's `rng`."""
        choices = self.admissible()
        if not choices:
            raise NotImplementedError(f"{type(self).__name__} lists no admissible actions to draw from.")
        return rng.choice(choices)

    def snapshot(self) -> object:
        """The whole state, detached: no later step can touch it, and it may go to another process."""
        if self.snapshots == "none":
            raise RuntimeError(f'{type(self).__name__} declares snapshots = "none".')
        return pickle.dumps(self.__dict__, pickle.HIGHEST_PROTOCOL)

    def restore(self, s: Any, seed: int | None = None) -> None:
        """Go back to snapshot `s`; `seed` renews the noise, so that siblings differ from here on."""
        self.__dict__ = pickle.loads(s)
        if seed is not None:
            self._reseed(seed)

    def fork(self, seed: int | None = None) -> Self:
        """An independent environment in the current state; `seed` as in `restore`."""
        child = type(self).__new__(type(self))
        child.restore(self.snapshot(), seed)
        return child

    def _reseed(self, seed: int) -> None:
        """Renew the noise in mid-episode; an environment with a simulator of its own seeds it here."""
        self.noise = random.Random(derive_seed("noise", seed))

    def close(self) -> None:
        """Free what the environment holds; the default holds nothing."""


class ReplayEnv(Env):
    """An environment whose state cannot be copied: a snapshot is the way to it.

    A snapshot holds the seeds, the actions and a hash of each observation. `restore` resets, acts
    again and compares; the pickle of an instance is made the same way, so handles to a simulator
    never travel.
    """

    snapshots: Literal["copy", "replay", "none"] = "replay"
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]
    _start: tuple[Seed, int | None, str] | None = None
    _events: tuple[tuple[str, Any, str], ...] = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep the arguments: a fork is built with them."""
        self = super().__new__(cls)
        self._arguments = (args, kwargs)
        return self

    def __init__(self) -> None:
        # Without this, object.__init__ would accept any argument, because __new__ does.
        super().__init__()

    def reset(self, seed: Seed, dynamics_seed: int | None = None) -> tuple[str, Info]:
        """See `Env.reset`."""
        observation, info = super().reset(seed, dynamics_seed)
        self._start, self._events = (seed, dynamics_seed, _digest(observation)), ()
        return observation, info

    def step(self, action: str) -> StepResult:
        """See `Env.step`."""
        result = super().step(action)
        self._events += (("step", action, _digest(result[0])),)
        return result

    def snapshot(self) -> object:
        """Seeds, actions and observation hashes; None before the first reset."""
        return self._start and (*self._start, self._events)

    def restore(self, s: Any, seed: int | None = None) -> None:
        """Reset and act again.

        Raises:
            RuntimeError: an observation differs from the recorded one; the first such step is
            named.
        """
        if s is None:
            self._start, self._events, self._phase = None, (), "new"
            return
        task, dynamics_seed, digest, events = s
        observation, _ = self.reset(task, dynamics_seed)
        self._compare(observation, digest, f"reset(seed={task!r})")
        for number, (kind, value, digest) in enumerate(events):
            if kind == "step":
                self._compare(self.step(value)[0], digest, f"step {number} ({value!r})")
            else:
                self._reseed(value)
                self._events += ((kind, value, digest),)
        if seed is not None:
            self._reseed(seed)
            self._events += (("noise", seed, ""),)

    def _compare(self, observation: str, digest: str, where: str) -> None:
        if _digest(observation) != digest:
            raise RuntimeError(
                f"{type(self).__name__} cannot be replayed: at {where} it shows another observation "
                "than before."
            )

    def fork(self, seed: int | None = None) -> Self:
        """See `Env.fork`; built anew with the same arguments."""
        child: Self = _rebuild(type(self), self._arguments, self.snapshot(), seed)
        return child

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._arguments, self.snapshot(), None)


def _rebuild(cls: Any, arguments: Any, snapshot: object, seed: int | None) -> Any:
    args, kwargs = arguments
    env = cls(*args, **kwargs)
    env.restore(snapshot, seed)
    return env


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
