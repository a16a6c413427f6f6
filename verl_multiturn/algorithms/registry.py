"""Where algorithms are registered, and how their keywords are checked.

An algorithm is one file: a docstring with its equation, a frozen config and a function,

    @dataclass(frozen=True)
    class MineConfig(Config):
        gamma: float = 1.0  # discount inside an episode

    @register("mine", MineConfig, needs=("reward",))
    def mine(turns: TurnBatch, config: MineConfig) -> Floats:
        '''One line for `list_algorithms`.'''

and either one import line in this package's __init__, or the name "my_package.my_file:mine".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from math import inf, isfinite
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from verl_multiturn.columns import Floats
from verl_multiturn.errors import unknown
from verl_multiturn.turns import TurnBatch


@dataclass(frozen=True)
class Config:
    """Base of every algorithm's config: the types of the fields are checked when it is built."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            self._check_type(field.name, getattr(self, field.name), hints[field.name])

    def check_range(self, key: str, low: float, high: float = inf) -> None:
        """Refuse a number outside [low, high]."""
        value = getattr(self, key)
        if not low <= value <= high:
            bound = f"in [{low}, {high}]" if high < inf else f"at least {low}"
            raise ValueError(f"{type(self).__name__}.{key} must be {bound}, not {value!r}.")

    def _check_type(self, key: str, value: object, hint: Any) -> None:
        options = _alternatives(hint)
        if any(_fits(value, option) for option in options):
            return
        words = [w for option in options for w in _words(option)]
        if isinstance(value, str) and any(get_origin(o) is Literal for o in options):
            raise unknown(f"{type(self).__name__}.{key}", value, words)
        raise ValueError(f"{type(self).__name__}.{key} must be {' or '.join(words)}, not {value!r}.")


@dataclass(frozen=True)
class Algorithm:
    """One registered algorithm."""

    name: str
    compute: Callable[[TurnBatch, Any], Floats]  # (turns, config) -> (N,)
    config: type[Config]
    needs: tuple[str, ...]  # columns of TurnBatch it reads
    summary: str  # one line

    def configure(self, options: Mapping[str, Any]) -> Config:
        """A config from a plain mapping, e.g. a YAML block; unknown keys are refused."""
        valid = [field.name for field in fields(self.config)]
        for key in options:
            if key not in valid:
                raise unknown(f"{self.name} keyword", key, valid)
        return self.config(**options)

    def __call__(self, turns: TurnBatch, config: Config) -> Floats:
        """One advantage per turn, in the rows' own order. -> (N,)."""
        A = np.asarray(self.compute(turns, config), np.float64)
        if A.shape != (len(turns),):
            raise ValueError(f"{self.name} returned shape {A.shape} for {len(turns)} turns.")
        return A


C = TypeVar("C", bound=Config)

_ALGORITHMS: dict[str, Algorithm] = {}

_ELSEWHERE = {  # methods whose unit is not the turn: a function of their own computes them
    "starpo": "starpo gives credit to tokens, not to turns: use verl_multiturn.bilevel_gae.",
    "archer": "archer's advantage comes from its critics: use verl_multiturn.critic_advantage.",
    "q_advantage": "q_advantage comes from a Q model: use verl_multiturn.search.step_value.ModelValue.",
}


def register(
    name: str, config: type[C], needs: tuple[str, ...] = ("reward",)
) -> Callable[[Callable[[TurnBatch, C], Floats]], Callable[[TurnBatch, C], Floats]]:
    """Make a function `(turns, config) -> (N,)` an algorithm under a name."""

    def keep(compute: Callable[[TurnBatch, C], Floats]) -> Callable[[TurnBatch, C], Floats]:
        taken = _ALGORITHMS.get(name)
        if taken is not None and taken.compute.__module__ != compute.__module__:
            raise ValueError(f"algorithm {name!r} is already {taken.compute.__module__}'s.")
        summary = (compute.__doc__ or name).strip().splitlines()[0]
        _ALGORITHMS[name] = Algorithm(name, compute, config, needs, summary)
        return compute

    return keep


def find(name: str) -> Algorithm:
    """The algorithm of a name, or of "package.module:name", which imports the module first."""
    module, _, short = str(name).rpartition(":")
    hint = 'One of your own: "package.module:name", an importable module that registers it.'
    if module:
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            if not module.startswith(str(error.name)):  # something the module itself imports
                raise
            raise unknown("algorithm", name, registered(), hint) from error
    if short in _ELSEWHERE:
        raise ValueError(_ELSEWHERE[short])
    if short not in _ALGORITHMS:
        raise unknown("algorithm", name, registered(), hint)
    return _ALGORITHMS[short]


def registered() -> dict[str, Algorithm]:
    """Every algorithm by name, sorted."""
    return dict(sorted(_ALGORITHMS.items()))


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union; a Literal counts as one."""
    if get_origin(hint) is Literal:
        return (hint,)
    return get_args(hint) or (hint,)


def _fits(value: object, option: Any) -> bool:
    if get_origin(option) is Literal:
        return isinstance(value, str) and value in get_args(option)
    if option in (float, int):
        kind = Real if option is float else Integral
        number = isinstance(value, kind) and not isinstance(value, bool)
        return number and isfinite(value)  # type: ignore[arg-type]
    if option is bool:
        return isinstance(value, bool | np.bool_)
    return isinstance(value, option)


def _words(option: Any) -> list[str]:
    if get_origin(option) is Literal:
        return [str(choice) for choice in get_args(option)]
    names = {float: "a number", int: "a whole number", bool: "true or false", NoneType: "null"}
    return [names.get(option, f"a {getattr(option, '__name__', option)}")]
