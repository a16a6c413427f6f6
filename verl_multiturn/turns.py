"""The data model: one turn, one trajectory, and a flat batch of turns. NumPy only.

`Turn` and `Trajectory` are what an agent loop produces; `TurnBatch` is what an algorithm reads.
Ids are turned into integer codes once, when a batch is built; everything after that is arithmetic
on integers, so the length of an anchor or of a uid does not matter.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import nan
from typing import Any

import numpy as np

from verl_multiturn import columns
from verl_multiturn.columns import Bools, Column, Floats, Ints, Objects, factorise, joint


@dataclass(frozen=True, slots=True)
class Turn:
    """One utterance of the policy and the environment's reply to it."""

    prompt_ids: list[int]  # tokens the policy saw
    action_ids: list[int]  # tokens the policy wrote
    log_probs: list[float] | None  # of action_ids, under the policy that wrote them
    anchor: Hashable  # key of the environment state the turn started from; None: not comparable
    reward: float  # r_t
    value: float = nan  # V(s_t), where something estimated it
    action_text: str = ""  # what was sent to the environment
    valid: bool = True  # the utterance had the required format


@dataclass(slots=True)
class Trajectory:
    """The turns of one episode under one policy."""

    group: Hashable  # which start state: verl's uid
    trajectory: Hashable  # which sample, unique within its group
    turns: list[Turn] = field(default_factory=list)
    terminated: bool = False  # the environment ended the episode
    truncated: bool = False  # a limit ended it
    success: bool | None = None  # info["success"] of the last step, if the environment says
    next_value: float = nan  # V of the state after a truncated last turn
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def episode_return(self) -> float:
        """R = Σ_t r_t, undiscounted."""
        return float(sum(turn.reward for turn in self.turns))


@dataclass(frozen=True, eq=False, repr=False)
class TurnBatch:
    """All turns of a training batch, flat: every array is (N,), in the rows' own order.

    Build it with `from_lists` or `from_trajectories`, which fill in the defaults and the codes.
    """

    group: Objects  # which start state: verl's uid
    trajectory: Objects  # which sample, unique within its group
    index: Ints  # t, from 0 without gaps
    reward: Floats  # r_t
    anchor: Objects | None  # state key; None, whole or for one turn: equal to no other
    value: Floats  # V(s_t), nan where unknown
    next_value: Floats  # V of the state after a truncated last turn, nan elsewhere
    terminated: Bools  # true only on a trajectory's last turn
    truncated: Bools  # true only on a trajectory's last turn
    tokens: Ints  # trained tokens of the row; default 1
    valid: Bools  # the utterance had the required format; default true
    anchor_text: Objects | None  # what similarity compares; default: string anchors
    group_code: Ints  # 0 … groups-1
    trajectory_code: Ints  # 0 … trajectories-1, distinct across groups
    anchor_code: Ints  # 0 … anchor groups-1: equal where group and anchor are equal

    @classmethod
    def from_lists(
        cls,
        group: Column,
        trajectory: Column,
        index: Column,
        reward: Column,
        anchor: Column | None = None,
        value: Column | None = None,
        next_value: Column | None = None,
        terminated: Column | None = None,
        truncated: Column | None = None,
        tokens: Column | None = None,
        valid: Column | None = None,
        anchor_text: Column | None = None,
    ) -> TurnBatch:
        """Build a batch from one list or array per field, all of one length, rows in any order.

        A malformed batch raises ValueError with the field and the trajectory. Of `terminated` and
        `truncated`, one alone implies the other on last turns; neither: all of those are terminal.
        """
        n = len(groups := columns.keys("group", group))
        turn = columns.ints("index", index, n)
        samples = columns.keys("trajectory", trajectory, n)
        anchors = None if anchor is None else columns.keys("anchor", anchor, n)
        group_code = factorise("group", groups)
        code = joint(group_code, factorise("trajectory", samples))
        ended, cut = columns.ends(turn, code, terminated, truncated)
        return cls(
            group=groups,
            trajectory=samples,
            index=turn,
            reward=columns.floats("reward", reward, n),
            anchor=anchors,
            value=columns.floats("value", value, n),
            next_value=columns.floats("next_value", next_value, n),
            terminated=ended,
            truncated=cut,
            tokens=columns.ints("tokens", [1] * n if tokens is None else tokens, n),
            valid=columns.flags("valid", [True] * n if valid is None else valid, n),
            anchor_text=columns.texts(anchors, anchor_text, n),
            group_code=group_code,
            trajectory_code=code,
            anchor_code=columns.anchor_codes(group_code, anchors),
        )

    @classmethod
    def from_trajectories(cls, trajectories: Iterable[Trajectory]) -> TurnBatch:
        """One row per turn, trajectory after trajectory, t ascending."""
        rows = []
        for episode in trajectories:
            if not episode.turns:
                raise ValueError(
                    f"turns: trajectory {episode.trajectory!r} of group {episode.group!r} has none."
                )
            for t, turn in enumerate(episode.turns):
                last = t == len(episode.turns) - 1
                rows.append((episode, turn, t, last))
        return cls.from_lists(
            group=[e.group for e, _, _, _ in rows],
            trajectory=[e.trajectory for e, _, _, _ in rows],
            index=[t for _, _, t, _ in rows],
            reward=[turn.reward for _, turn, _, _ in rows],
            anchor=[turn.anchor for _, turn, _, _ in rows],
            value=[turn.value for _, turn, _, _ in rows],
            next_value=[e.next_value if last else nan for e, _, _, last in rows],
            terminated=[last and e.terminated for e, _, _, last in rows],
            truncated=[last and e.truncated for e, _, _, last in rows],
            tokens=[len(turn.action_ids) for _, turn, _, _ in rows],
            valid=[turn.valid for _, turn, _, _ in rows],
        )

    def __post_init__(self) -> None:
        self._check_turns()
        self._refuse("reward", ~np.isfinite(self.reward), "must be finite")
        self._refuse("value", np.isinf(self.value), "must be finite, or nan where unknown")
        self._refuse("next_value", np.isinf(self.next_value), "must be finite or nan")
        self._refuse("tokens", self.tokens < 0, "must not be negative")
        self._refuse("terminated", self.terminated & ~self.last, "may be true on a last turn only")
        self._refuse("truncated", self.truncated & ~self.last, "may be true on a last turn only")
        for column in vars(self).values():
            if isinstance(column, np.ndarray):
                column.setflags(write=False)  # the codes and the caches stay true

    def __len__(self) -> int:
        return len(self.group)

    def __repr__(self) -> str:
        groups = int(self.group_code.max()) + 1 if len(self) else 0
        return f"TurnBatch({len(self)} turns, {len(self.starts)} trajectories, {groups} groups)"

    @cached_property
    def order(self) -> Ints:
        """Rows sorted by trajectory, then t. (N,)."""
        order: Ints = np.lexsort((self.index, self.trajectory_code))
        return order

    @cached_property
    def lengths(self) -> Ints:
        """Turns of each trajectory. (M,)."""
        return np.bincount(self.trajectory_code)

    @cached_property
    def starts(self) -> Ints:
        """Where each trajectory begins in `order`. (M,)."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def last(self) -> Bools:
        """Whether a row is its trajectory's last turn. (N,)."""
        last: Bools = self.index == self.lengths[self.trajectory_code] - 1
        return last

    @cached_property
    def by_time(self) -> list[Ints]:
        """Rows of turn t, for t = 0 … T-1, longest trajectory first.

        The trajectories still alive at t+1 are therefore the first ones of those alive at t.
        """
        starts = self.starts[np.argsort(-self.lengths, kind="stable")]
        times = np.arange(self.lengths.max() if len(self) else 0)
        alive = len(starts) - np.searchsorted(np.sort(self.lengths), times, side="right")
        return [self.order[starts[:n] + t] for t, n in enumerate(alive)]

    def whose(self, row: int) -> str:
        """Words for a row, for messages."""
        return f"turn {self.index[row]} of trajectory {self.trajectory[row]!r} of group {self.group[row]!r}"

    def _refuse(self, name: str, bad: Bools, rule: str) -> None:
        for row in np.flatnonzero(bad)[:1]:
            given = vars(self)[name][row]
            raise ValueError(f"{name} {rule}: {self.whose(row)} has {given}.")

    def _check_turns(self) -> None:
        """In each trajectory, index must be 0, 1, 2, …, each once."""
        index = self.index[self.order]
        expected = np.arange(len(self)) - np.repeat(self.starts, self.lengths)
        for j in np.flatnonzero(index != expected)[:1]:
            row, t = self.order[j], expected[j]
            whose = f"trajectory {self.trajectory[row]!r} of group {self.group[row]!r}"
            if index[j] > t:
                raise ValueError(f"index: {whose} has a gap, turn {t} is missing.")
            if index[j] < 0:
                raise ValueError(f"index: {whose} has the negative turn {index[j]}.")
            raise ValueError(f"index: {whose} has turn {index[j]} twice.")
