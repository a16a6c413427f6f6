"""Environments: the contract (`Env`, `ReplayEnv`) and `make`, which builds one from a name."""

import inspect
from typing import Any

from verl_multiturn.base_env import Env, Info, ReplayEnv, Seed, StepResult, derive_seed
from verl_multiturn.errors import unknown
from verl_multiturn.load import list_envs, load_class

__all__ = ["Env", "Info", "ReplayEnv", "Seed", "StepResult", "as_env", "derive_seed", "list_envs", "make"]


def make(name: str, **kwargs: Any) -> Env:
    """Build an environment from a name.

    Args:
        name: "frozen_lake" (a file in an `environments` folder, ours or yours), "pkg.module:Class",
            "pkg.module", "path/to/file.py:Class" or "path/to/file.py".
        **kwargs: passed to the class.

    Raises:
        ValueError: an unknown name, class or keyword; the sentence lists the valid ones.
        ImportError: a package or program it needs is missing; the sentence says how to get it.
    """
    cls = load_class(name, Env)
    getattr(cls, "needs", Env.needs).require(name)
    given = {} if cls.__init__ is object.__init__ else inspect.signature(cls.__init__).parameters
    valid = [key for key in given if key != "self"]
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in given.values()):
        for key in kwargs:
            if key not in valid:
                raise unknown(f"keyword of {name}", key, valid)
    try:
        made = cls(**kwargs)
    except TypeError as error:
        raise ValueError(f"{name} cannot be made with {kwargs}: {error}") from error
    return as_env(made)


def as_env(thing: Any) -> Env:
    """`thing` itself if it is an `Env`; else wrapped, with `Env`'s defaults (10 turns) for what it lacks."""
    return thing if isinstance(thing, Env) else _Adapted(thing)


class _Adapted(Env):
    """Gives any object with `reset` and `step` the rest of the contract; snapshots pickle it."""

    _BORROWED = (
        *("instruction", "max_turns", "snapshots", "runs_in"),
        *("admissible", "state_key", "expert", "random_action", "close"),
    )

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._borrow()

    def _borrow(self) -> None:
        for name in self._BORROWED:
            if hasattr(self.inner, name):
                setattr(self, name, getattr(self.inner, name))

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        more = {}
        if "dynamics_seed" in inspect.signature(self.inner.reset).parameters:
            more = {"dynamics_seed": self.noise.getrandbits(63)}
        observation, info = self.inner.reset(seed=seed, **more)
        self._borrow()  # the instruction may depend on the task
        return observation, info

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        observation, reward, terminated, truncated, info = self.inner.step(action)
        return observation, reward, terminated, {**info, "truncated": truncated}
