"""StarPO-S in a run (RAGEN, arXiv 2504.20073; RAGEN-2, arXiv 2604.06268): which groups a step trains on.

`algorithms/starpo.py` ranks the groups; here are the run's settings of it (`multiturn.filter`), the
scores that need more than returns, and what is left for the gradient of the groups that stay.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from verl_multiturn.algorithms.starpo import SCORES as FROM_RETURNS
from verl_multiturn.algorithms.starpo import keep_groups, variance
from verl_multiturn.errors import unknown

PLACES = ("shrink", "refill")
RETURNS = ("task", "trained")
# What verl's own refill does; nothing else of a filter is read by it.
REFILL = {
    **{"strategy": "top_p", "value": 1, "score": "std", "largest": True, "include_zero": False},
    **{"mass": "linear", "eps": 0.01, "scale": "none", "stop_after": None},
}
SCALES = ("none", "linear", "sqrt")
FROM_TOKENS = ("entropy", "entropy_variance", "length")
SCORES = (*FROM_RETURNS, *FROM_TOKENS)


class EmptyStep(Exception):
    """The filter kept nothing: the step trains on nothing."""


@dataclass(frozen=True)
class Member:
    """A trajectory, as the filter sees it.

    Attributes:
        task_return: sum of the environment's rewards.
        trained_return: the same with penalties, as the algorithm sees it.
        surprise: mean of −log p over the tokens it sampled: an unbiased estimate of their entropy.
        tokens: that it sampled.
    """

    task_return: float
    trained_return: float
    surprise: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class GroupFilter:
    """The block `multiturn.filter`; `strategy` None keeps everything.

    Attributes:
        strategy, value, mass, largest, include_zero, eps: of `keep_groups`.
        score: of `keep_groups`, or entropy, entropy_variance, length.
        returns: which returns are compared: of the "task", or as "trained", penalties included.
        place: "shrink" (the papers): the step gets smaller before log-probs are computed; "refill":
            groups that agree are replaced by new ones, as in DAPO; the rest is then as in `REFILL`.
        reweight: multiply a group's advantages by std / max std instead (RAGEN's soft reweighting); `score`
            is then std.
        scale: "linear" or "sqrt" of the share kept multiplies all advantages.
        stop_after: steps in a row that keep nothing end the run; None: never.
    """

    strategy: str | None = None
    score: str = "std"
    value: float = 0.9
    mass: str = "linear"
    largest: bool = True
    include_zero: bool = False
    eps: float = 0.01
    returns: str = "task"
    place: str = "shrink"
    reweight: bool = False
    scale: str = "none"
    stop_after: int | None = None

    def __post_init__(self) -> None:
        for key, given, valid in (
            ("score", self.score, SCORES),
            ("returns", self.returns, RETURNS),
            ("place", self.place, PLACES),
            ("scale", self.scale, SCALES),
        ):
            if given not in valid:
                raise unknown(f"value of multiturn.filter.{key}", given, valid)
        if self.reweight and self.score != "std":
            raise ValueError(
                "multiturn.filter.reweight weighs groups by the std of their returns, and reads no "
                f"score={self.score}: use score=std"
            )
        if self.strategy is None:
            return
        ignored = [key for key, value in REFILL.items() if getattr(self, key) != value]
        if self.place == "refill" and ignored:
            read = ", ".join(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in REFILL.items())
            raise ValueError(
                "multiturn.filter.place=refill replaces the groups whose returns are all equal, whatever "
                f"{' and '.join(ignored)} say: it needs {read}"
            )
        try:
            self.kept([[Member(0.0, 0.0), Member(1.0, 1.0)]] * 2)
        except ValueError as error:
            raise ValueError(f"multiturn.filter: {error}") from None

    @property
    def shrinks(self) -> bool:
        """Whether a step loses groups after its rollout."""
        return self.strategy is not None and self.place == "shrink"

    @property
    def refills(self) -> bool:
        """Whether verl replaces groups that agree."""
        return self.strategy is not None and self.place == "refill"

    @property
    def reads_tokens(self) -> bool:
        """Whether members need `surprise`."""
        return self.strategy is not None and self.score in ("entropy", "entropy_variance")

    def compared(self, groups: Sequence[Sequence[Member]]) -> list[list[float]]:
        """The returns that are compared, of each group."""
        name = f"{self.returns}_return"
        return [[getattr(one, name) for one in group] for group in groups]

    def kept(self, groups: Sequence[Sequence[Member]]) -> list[int]:
        """Indices of the groups to train on, best first.

        Raises:
            ValueError: a return that is not finite, or a rule that these scores rule out.
        """
        if self.strategy is None:
            return list(range(len(groups)))
        from_tokens = self.score in FROM_TOKENS
        kept = keep_groups(
            self.compared(groups),
            score="std" if from_tokens else self.score,
            strategy=self.strategy,
            value=self.value,
            mass=self.mass,
            largest=self.largest,
            include_zero=self.include_zero,
            eps=self.eps,
            scores=[self._from_tokens(group) for group in groups] if from_tokens else None,
        )
        return [int(g) for g in kept]

    def _from_tokens(self, group: Sequence[Member]) -> float:
        if self.score == "length":
            return float(np.mean([one.tokens for one in group]))
        surprises = [one.surprise for one in group]
        if self.score == "entropy":
            return float(np.mean(surprises))
        return sqrt(variance(np.asarray(surprises)))

    def weights(self, groups: Sequence[Sequence[Member]], share: float) -> list[float]:
        """What multiplies the advantages of each group that is trained on.

        Args:
            groups: those that are trained on.
            share: of the step's groups that they are.
        """
        factor = {"none": 1.0, "linear": share, "sqrt": share**0.5}[self.scale]
        if not self.reweight:
            return [factor] * len(groups)
        U = [sqrt(variance(np.asarray(R))) for R in self.compared(groups)]
        return [factor * u / (max(U) + 1e-6) for u in U]


def group_filter(block: Mapping[str, Any]) -> GroupFilter:
    """From a run's `multiturn.filter`.

    Raises:
        ValueError: an unknown key or value, or a combination that can keep nothing.
    """
    valid = list(GroupFilter.__dataclass_fields__)
    for key in block:
        if key not in valid:
            raise unknown("key of multiturn.filter", key, valid)
    return GroupFilter(**block)
