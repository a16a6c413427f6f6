"""The block `multiturn.vine`: which states get continuations, how many, and what is shared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from verl_multiturn.errors import unknown
from verl_multiturn.stats import wilson
from verl_multiturn.steps import SPLITTERS, WITHIN

ROOTS = ("siblings", "rollouts", "both")
HORIZON_VALUES = ("zero", "group")
DEDUPE = ("state", "history", "none")


@dataclass(frozen=True)
class Vine:
    """The block `multiturn.vine`, and what continuations need of the rest of a run.

    Attributes:
        rollouts: K, continuations of a state.
        splitter: what a step is: a "turn", a part of an utterance ("line", "math", "sentence",
            "fixed_tokens", see `verl_multiturn.steps`), or the whole episode ("none").
        fixed_tokens: tokens of a step, where the splitter is "fixed_tokens".
        root: V(s_0) from the other trajectories of the group ("siblings", no continuations), from
            "rollouts", or from "both": siblings, and as many continuations as they lack to K.
        max_states: M: the steps behind s_M get none and share the credit of the last known one; None:
            all do.
        every: every so many steps a state gets some; the steps between two share their credit.
        dedupe: states are equal whose prompt, budgets and state key are ("state"), whose history of
            observations and actions is, too ("history"), or never ("none").
        horizon: H: continuations end after so many turns; None: they are played to their end.
        horizon_value: what would follow counts 0 ("zero"), or what it brought the others of the "group" on
            average, from the same turn on (`with_horizon`).
        select: "all" states, or "bisect": states between two get none where all returns of both say the
            same. Those steps then share their credit.
        agreeing_groups: "skip" them: without continuations where a group's returns are all equal.
        adaptive: k_0 continuations first; those decide where their Wilson interval (of returns in [0, 1])
            is no wider than `adaptive_width`, else K new ones do. None: K everywhere.
        adaptive_width: see there.
        split_samples: whether K new ones decide alone; else those before are added.
        max_inflight: continuations that a rollout worker plays at the same time.
        gamma: γ, from turn to turn.
        penalty: what a turn without a valid action costs in training.
        tail: of `multiturn.vineppo`.
        group: n, trajectories of a prompt.
    """

    rollouts: int = 9
    splitter: str = "turn"
    fixed_tokens: int = 64
    root: str = "siblings"
    max_states: int | None = None
    every: int = 1
    dedupe: str = "state"
    horizon: int | None = None
    horizon_value: str = "zero"
    select: str = "all"
    agreeing_groups: str = "keep"
    adaptive: int | None = None
    adaptive_width: float = 0.6
    split_samples: bool = True
    max_inflight: int = 256
    gamma: float = 1.0
    penalty: float = 0.0
    tail: str = "merge"
    group: int = 8

    def __post_init__(self) -> None:
        if self.splitter not in SPLITTERS:
            raise unknown("value of multiturn.vine.splitter", self.splitter, SPLITTERS)
        for name, valid in (
            ("root", ROOTS),
            ("horizon_value", HORIZON_VALUES),
            ("dedupe", DEDUPE),
            ("select", ("all", "bisect")),
            ("agreeing_groups", ("keep", "skip")),
        ):
            if (value := getattr(self, name)) not in valid:
                raise unknown(f"value of multiturn.vine.{name}", value, valid)
        if self.gamma != 1 and self.splitter in WITHIN:
            raise ValueError(
                f"multiturn.vineppo.gamma={self.gamma:g} discounts from turn to turn, and "
                f"multiturn.vine.splitter={self.splitter} gives credit to steps inside a turn: use gamma=1, "
                "the paper's, or splitter=turn"
            )
        if self.adaptive is not None and self.root == "both":
            raise ValueError(
                "multiturn.vine.root=both weighs K rollouts with the siblings, and multiturn.vine.adaptive "
                "lets their number differ: use root=siblings or root=rollouts"
            )
        if self.horizon_value == "group" and (self.horizon is None or self.splitter != "turn"):
            raise ValueError(
                "multiturn.vine.horizon_value=group is of a multiturn.vine.horizon over whole turns: set it, "
                "and splitter=turn, or leave horizon_value out"
            )
        if self.tail == "zero" and self.max_states is None:
            raise ValueError(
                "multiturn.vineppo.tail=zero gives no credit to steps behind multiturn.vine.max_states=null: "
                "set it (the authors: 25 on GSM8K), or leave tail out"
            )
        self._check_states()

    def _check_states(self) -> None:
        if self.rollouts == 0 and self.root == "rollouts":
            raise ValueError(
                "multiturn.vine.rollouts=0 leaves multiturn.vine.root=rollouts without a value: use 1 or "
                "more (the paper: 9), or root=siblings"
            )
        if self.rollouts == 0 and self.max_states is not None:
            raise ValueError(
                f"multiturn.vine.max_states={self.max_states} caps the states with rollouts, and "
                "multiturn.vine.rollouts=0 gives none: leave it out"
            )
        if self.max_states is not None and self.max_states < self.every and not self.at(0):
            raise ValueError(
                f"multiturn.vine.max_states={self.max_states}, every={self.every} and root={self.root} leave "
                "no state with rollouts: set multiturn.vine.rollouts=0, or root=rollouts"
            )
        if self.group == 1 and not self.at(0):
            raise ValueError(
                f"multiturn.vine.root={self.root} takes the value of a start from the others of its group, "
                "and actor_rollout_ref.rollout.n=1 leaves none: use root=rollouts, or n=2 or more"
            )

    @classmethod
    def of(cls, settings: Mapping[str, Any], group: int) -> Self:
        """Of a run: its group `multiturn`, and its `rollout.n`."""
        own = settings["vineppo"]
        more = {"gamma": own["gamma"], "tail": own["tail"], "penalty": settings["format_penalty"]}
        return cls(**settings["vine"], **more, group=group)

    @property
    def within(self) -> bool:
        """Whether utterances are cut into steps."""
        return self.splitter in WITHIN

    @property
    def later(self) -> bool:
        """Whether it is known only after a trajectory which states get continuations."""
        return self.select == "bisect" or self.agreeing_groups == "skip"

    @property
    def biased(self) -> list[str]:
        """What saves continuations at the price of a bias, a key and what it does each; logged."""
        behind = "0" if self.horizon_value == "zero" else "what they were to the others of the group"
        found = {
            f"horizon={self.horizon}": f"rewards behind the horizon count {behind}" if self.horizon else "",
            "select=bisect": "states between two that agree get no value" if self.select == "bisect" else "",
            "agreeing_groups=skip": "groups whose returns agree get none"
            if self.agreeing_groups == "skip"
            else "",
            f"adaptive={self.adaptive}": "values of few rollouts are kept where those agree"
            if self.adaptive
            else "",
        }
        said = [f"multiturn.vine.{key} is biased: {why}" for key, why in found.items() if why]
        tail = "multiturn.vineppo.tail=zero is biased: steps behind max_states are not trained"
        return [*said, tail] if self.tail == "zero" else said

    def sure(self, returns: Sequence[float]) -> bool:
        """Whether these returns, in [0, 1], have a Wilson interval no wider than `adaptive_width`."""
        if not returns or min(returns) < 0 or max(returns) > 1:
            return False
        interval = wilson(sum(returns), len(returns))
        return interval.high - interval.low <= self.adaptive_width

    def at(self, step: int) -> int:
        """How many continuations the state before a step gets; steps are counted through all turns."""
        if step > 0:
            capped = self.max_states is not None and step > self.max_states
            return 0 if capped or step % self.every or self.splitter == "none" else self.rollouts
        return {"siblings": 0, "rollouts": self.rollouts, "both": max(0, self.rollouts - self.group + 1)}[
            self.root
        ]

    @property
    def pooled(self) -> int | None:
        """How many continuations V(s_0) averages together with the siblings; None: it stands alone."""
        return self.at(0) if self.root == "both" else None
