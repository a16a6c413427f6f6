"""The block `multiturn.vine`: which states get continuations, how many, and what is shared."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from verl_multiturn.errors import unknown
from verl_multiturn.steps import SPLITTERS, WITHIN

ROOTS = ("siblings", "rollouts", "both")
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
        max_inflight: continuations that a rollout worker plays at the same time.
        gamma: γ, from turn to turn.
        penalty: what a turn without a valid action costs in training.
        group: n, trajectories of a prompt.
    """

    rollouts: int = 9
    splitter: str = "turn"
    fixed_tokens: int = 64
    root: str = "siblings"
    max_states: int | None = None
    every: int = 1
    dedupe: str = "state"
    max_inflight: int = 256
    gamma: float = 1.0
    penalty: float = 0.0
    group: int = 8

    def __post_init__(self) -> None:
        if self.splitter not in SPLITTERS:
            raise unknown("value of multiturn.vine.splitter", self.splitter, SPLITTERS)
        if self.root not in ROOTS:
            raise unknown("value of multiturn.vine.root", self.root, ROOTS)
        if self.dedupe not in DEDUPE:
            raise unknown("value of multiturn.vine.dedupe", self.dedupe, DEDUPE)
        if self.gamma != 1 and self.splitter in WITHIN:
            raise ValueError(
                f"multiturn.vineppo.gamma={self.gamma:g} discounts from turn to turn, and "
                f"multiturn.vine.splitter={self.splitter} gives credit to steps inside a turn: use gamma=1, "
                "the paper's, or splitter=turn"
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
        more = {"gamma": settings["vineppo"]["gamma"], "penalty": settings["format_penalty"]}
        return cls(**settings["vine"], **more, group=group)

    @property
    def within(self) -> bool:
        """Whether utterances are cut into steps."""
        return self.splitter in WITHIN

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
