"""Has a run collapsed? Detectors, all off unless configured, that say why a run should stop.

A detector reads metrics of each step and speaks once its rule has held at `patience` measurements in
succession; a step without one of its metrics is no measurement. What was never better is a warm-up,
however long: by default every rule needs something that was there and is lost.

RAGEN (arXiv:2504.20073) stops at a collapse of the returns' spread, at validation success below 1 % and
at empty steps, without a switch; echo trap is that paper's term, template collapse RAGEN-2's
(arXiv:2604.06268). The papers describe both by their curves: the rules and their thresholds are ours.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf, isfinite
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from verl_multiturn.algorithms.registry import Config
from verl_multiturn.algorithms.starpo import ZERO
from verl_multiturn.columns import Bools, Floats
from verl_multiturn.errors import unknown

METRICS = {  # what a rule reads -> the metric's name in the log
    "group_std": "multiturn/group_std/mean",
    "success": "multiturn/success/mean",
    "valid": "multiturn/valid/mean",
    "empty": "multiturn/empty_step/mean",
    "mi": "multiturn/mi_per_token/mean",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "val_success": "val/success",
}
SCHEDULED = ("mi", "val_success")  # not measured at every step
HELD = 0.5  # share of a level that each of its measurements reaches
RARELY = 20  # steps that a measurement on a schedule may take, before it counts as missing

Seen = Mapping[str, Floats]  # step, and what the rule reads: (T,) each, oldest first


@dataclass(frozen=True)
class Rule(Config, ABC):
    """When a run looks collapsed, from the measurements so far; a pure function of them."""

    patience: int = 10  # measurements in succession at which the rule must hold

    reads: ClassVar[tuple[str, ...]]  # keys of METRICS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("patience", 1)

    @abstractmethod
    def holds(self, seen: Seen) -> bool:
        """Whether the latest measurement looks like a collapse."""

    @abstractmethod
    def reason(self, seen: Seen) -> str:
        """What is wrong, with its numbers; only where the rule holds."""


@dataclass(frozen=True)
class ReturnsCollapse(Rule):
    """The groups no longer disagree: their mean std is below `share` of what it was.

    What it was: its mean over the first `first` steps in succession with a std above 0. RAGEN takes
    the first steps whatever they are, which ends runs whose success is still rare. A solved task
    looks the same: there is nothing left to learn from.
    """

    share: float = 0.1
    first: int = 10

    reads: ClassVar = ("group_std",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("share", 0, 1)
        self.check_range("first", 1)

    def holds(self, seen: Seen) -> bool:
        """std_T < share · mean of the first informative steps, which lie before T."""
        std = seen["group_std"]
        end = _first_run(std > ZERO, self.first)
        return 0 < end < len(std) and bool(std[-1] < self.share * self._before(std))

    def reason(self, seen: Seen) -> str:
        """The std, and what it was."""
        std = seen["group_std"]
        return (
            f"the groups no longer disagree, their standard deviation of {std[-1]:.3g} is below "
            f"{self.share:g} of the {self._before(std):.3g} of the first {self.first} informative steps"
        )

    def _before(self, std: Floats) -> float:
        end = _first_run(std > ZERO, self.first)
        return float(std[end - self.first : end].mean())


@dataclass(frozen=True)
class EchoTrap(Rule):
    """Spread and success have fallen from their best while the gradient spikes, all three at once.

    With means over `window` steps: the groups' std below `std_share` of its best window, success
    below `success_share` of its best, and the largest gradient norm of the last window more than
    `spike` times the median before it. The best is sought among windows without a single 0, since a
    success that is still rare comes and goes; zero gradients do not count either.
    """

    patience: int = 5
    window: int = 10
    std_share: float = 0.5
    success_share: float = 0.5
    spike: float = 3.0

    reads: ClassVar = ("group_std", "success", "grad_norm")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("window", 1)
        self.check_range("std_share", 0, 1)
        self.check_range("success_share", 0, 1)
        self.check_range("spike", 1)

    def holds(self, seen: Seen) -> bool:
        """All three, at the latest step."""
        if len(seen["step"]) < 2 * self.window:
            return False
        std, best_std = self._fall(seen["group_std"])
        success, best_success = self._fall(seen["success"])
        largest, usual = self._gradient(seen["grad_norm"])
        fallen = std < self.std_share * best_std and success < self.success_share * best_success
        return fallen and largest > self.spike * usual

    def reason(self, seen: Seen) -> str:
        """The three numbers, and what they were."""
        std, best_std = self._fall(seen["group_std"])
        success, best_success = self._fall(seen["success"])
        largest, usual = self._gradient(seen["grad_norm"])
        return (
            f"over {self.window} steps success fell from {best_success:.3g} to {success:.3g} and "
            f"the groups' standard deviation from {best_std:.3g} to {std:.3g}, while the gradient norm "
            f"reached {largest:.3g} (median before: {usual:.3g})"
        )

    def _fall(self, x: Floats) -> tuple[float, float]:
        """Mean of the last window, and of the best one before; 0, from which nothing falls: none."""
        windows = sliding_window_view(x, self.window)
        means, whole = windows.mean(1), windows.min(1) > ZERO
        return float(means[-1]), float(means[:-1].max(initial=0.0, where=whole[:-1]))

    def _gradient(self, x: Floats) -> tuple[float, float]:
        """Largest of the last window, and median of all before; inf, which nothing exceeds: none."""
        before = x[: -self.window]
        usual = float(np.median(before[before > 0])) if before.any() else inf
        return float(x[-self.window :].max()), usual


@dataclass(frozen=True)
class TemplateCollapse(Rule):
    """Reasoning still varies, but no longer with its prompt: entropy stays, information is lost.

    Mutual information below `share` of the best level that it held, entropy at `entropy_share` or
    more of its mean there. A level is the mean of `window` measurements in succession; it is held if
    all of them reach half of it, which noise around 0 hardly ever does. Where entropy is lost too,
    it is another collapse.
    """

    patience: int = 5
    window: int = 10
    share: float = 0.25
    entropy_share: float = 0.8

    reads: ClassVar = ("mi", "entropy")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("window", 1)
        self.check_range("share", 0, 1)
        self.check_range("entropy_share", 0)

    def holds(self, seen: Seen) -> bool:
        """MI_T < share · level, level > 0, entropy_T ≥ entropy_share · the entropy of then."""
        if len(seen["mi"]) <= self.window:
            return False
        level, entropy = self._best(seen)
        lost = 0 < level and seen["mi"][-1] < self.share * level
        return bool(lost and seen["entropy"][-1] >= self.entropy_share * entropy)

    def reason(self, seen: Seen) -> str:
        """Information and entropy, and what they were."""
        level, entropy = self._best(seen)
        return (
            f"mutual information per token fell from {level:.3g} to {seen['mi'][-1]:.3g}, while entropy went "
            f"from {entropy:.3g} to {seen['entropy'][-1]:.3g}"
        )

    def _best(self, seen: Seen) -> tuple[float, float]:
        """The best level held before the latest measurement, 0 if none, and the mean entropy of then."""
        windows = sliding_window_view(seen["mi"][:-1], self.window)
        mean = windows.mean(1)
        level = np.where(windows.min(1) >= HELD * mean, mean, 0.0)
        best = int(level.argmax())
        return float(level[best]), float(seen["entropy"][best : best + self.window].mean())


@dataclass(frozen=True)
class Lost(Rule):
    """What was good at `patience` measurements in succession is bad; or it is bad after the warm-up."""

    warmup: int | None = None  # steps after which never having been good counts too; null: no number

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup is not None:
            self.check_range("warmup", 0)

    @abstractmethod
    def bad(self, seen: Seen) -> Bools:
        """Which measurements are bad. -> (T,)."""

    def holds(self, seen: Seen) -> bool:
        """Bad now, and good before or past the warm-up."""
        bad = self.bad(seen)
        late = self.warmup is not None and seen["step"][-1] > self.warmup
        return bool(bad[-1]) and (late or _first_run(~bad, self.patience) > 0)


@dataclass(frozen=True)
class InvalidActions(Lost):
    """More than `share` of the actions cannot be parsed or carried out."""

    share: float = 0.9

    reads: ClassVar = ("valid",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("share", 0, 1)

    def bad(self, seen: Seen) -> Bools:
        """1 − valid > share."""
        return np.asarray(1 - seen["valid"] > self.share)

    def reason(self, seen: Seen) -> str:
        """The rate."""
        return f"{1 - seen['valid'][-1]:.1%} of the actions are invalid, more than {self.share:.1%}"


@dataclass(frozen=True)
class NoSuccess(Lost):
    """Success on the validation panel is below `share`; measurements are validations (RAGEN: 5 of them)."""

    share: float = 0.01

    reads: ClassVar = ("val_success",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("share", 0, 1)

    def bad(self, seen: Seen) -> Bools:
        """val_success < share."""
        return np.asarray(seen["val_success"] < self.share)

    def reason(self, seen: Seen) -> str:
        """The rate."""
        return f"validation success is {seen['val_success'][-1]:.1%}, below {self.share:.1%}"


@dataclass(frozen=True)
class EmptySteps(Lost):
    """The filter keeps no group; RAGEN ends a run after 5 such steps, as rare a success as it may be."""

    patience: int = 20

    reads: ClassVar = ("empty",)

    def bad(self, seen: Seen) -> Bools:
        """Steps without an update."""
        return np.asarray(seen["empty"] > 0)

    def reason(self, seen: Seen) -> str:
        """No number says more."""
        return "the filter keeps no group, so nothing is trained"


RULES: dict[str, type[Rule]] = {
    "returns_collapse": ReturnsCollapse,
    "echo_trap": EchoTrap,
    "template_collapse": TemplateCollapse,
    "invalid_actions": InvalidActions,
    "no_success": NoSuccess,
    "empty_steps": EmptySteps,
}


class Detector:
    """A rule and what it has seen; a resumed run shows it the recorded steps again, so the rule may change.

    Attributes:
        name: a key of RULES.
        rule: its settings.
    """

    def __init__(self, name: str, rule: Rule) -> None:
        self.name, self.rule = name, rule
        self._steps = 0  # updates so far
        self._came: set[str] = set()  # what was measured at least once
        self._rows: list[list[float]] = []  # [step, one value for each of rule.reads]
        self._streak = 0  # of the latest rows, at how many the rule held

    def update(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Why the run should stop, in one sentence; None: it need not.

        Args:
            step: the global step.
            metrics: all that was measured at it; nan and infinite are not measured.
        """
        self._steps += 1
        values = {name: float(metrics[METRICS[name]]) for name in self.rule.reads if METRICS[name] in metrics}
        values = {name: value for name, value in values.items() if isfinite(value)}
        self._came |= set(values)
        if len(values) < len(self.rule.reads):
            return None
        self._rows.append([int(step), *(values[name] for name in self.rule.reads)])
        columns = np.array(self._rows, np.float64).T
        seen = dict(zip(("step", *self.rule.reads), columns, strict=True))
        self._streak = self._streak + 1 if self.rule.holds(seen) else 0
        if self._streak < self.rule.patience:
            return None
        return (
            f"{self.name} at step {step}: {self.rule.reason(seen)}, at every measurement since {self.since}."
        )

    @property
    def since(self) -> int | None:
        """The step since which the rule holds; checkpoints before it are good. None: it does not hold."""
        return int(self._rows[-self._streak][0]) if self._streak else None

    @property
    def missing(self) -> list[str]:
        """Metrics that never came although they should have; not empty after one update only."""
        return [
            METRICS[name]
            for name in self.rule.reads
            if name not in self._came
            and self._steps == self.rule.patience * (RARELY if name in SCHEDULED else 1)
        ]


def detectors(settings: Mapping[str, Mapping[str, Any] | None]) -> list[Detector]:
    """One detector for each block that is not null, in the order of the blocks.

    Args:
        settings: name of a rule -> its settings; {} means the defaults, null that it is off.

    Raises:
        ValueError: an unknown name or key, with the nearest match, or a value that cannot be.
    """
    found = []
    for name, block in settings.items():
        if name not in RULES:
            raise unknown("detector", name, RULES)
        if block is None:
            continue
        if not isinstance(block, Mapping):
            raise ValueError(f"{name} must be a group of keys, or null for off, not {block!r}.")
        valid = [field.name for field in fields(RULES[name])]
        for key in block:
            if key not in valid:
                raise unknown(f"key of {name}", key, valid)
        found.append(Detector(name, RULES[name](**block)))
    return found


def _first_run(flags: Bools, n: int) -> int:
    """The index just behind the first n flags in succession that are set; 0: there are none."""
    runs = sliding_window_view(flags, n).all(1) if len(flags) >= n else np.zeros(0, np.bool_)
    return int(runs.argmax()) + n if runs.any() else 0
