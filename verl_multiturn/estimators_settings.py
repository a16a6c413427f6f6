"""The settings of the estimator report: four sweeps over tasks whose values are known.

| sweep | task | what varies |
| --- | --- | --- |
| group size | a lake of 3 x 3, slippery, 8 turns | trajectories of a group |
| horizon | chain_sum, right with 0.8 | numbers to sum |
| pay interval | chain_sum of 8 numbers | right totals from pay to pay; 8: at the end only |
| stopping | six pulls of a bandit, and the action "stop" | chance to stop at each turn |

All returns lie in about [0, 1]. The last sweep is the variable-turn-count test of verl's RFC 7244: pay
at every turn, and a policy that decides itself how many turns there are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.env import make
from verl_multiturn.estimators_world import World
from verl_multiturn.exact import Model

STOP = "stop"
RIGHT = 0.8  # chance of the right total
WALK = {"right": 0.4, "down": 0.3, "left": 0.15, "up": 0.15}
LAKE = {"map": ["SFF", "FHF", "FFG"], "slip": 0.2, "max_turns": 8}
GROUP = 8
SWEEPS: Mapping[str, Sequence[float]] = {
    "group size": (2, 4, 8, 16),
    "horizon": (2, 4, 8, 12),
    "pay interval": (1, 2, 4, 8),
    "stopping": (0, 0.1, 0.3, 0.5),
}


@dataclass(frozen=True)
class Setting:
    """One value of one sweep; `group`: trajectories from the same start."""

    sweep: str
    value: float
    group: int
    world: World


@dataclass(frozen=True)
class Stoppable:
    """A model whose policy may end the episode, for nothing."""

    model: Model

    @property
    def max_turns(self) -> int:
        """As in the model."""
        return self.model.max_turns

    @property
    def actions(self) -> list[str]:
        """The model's, and to stop."""
        return [*self.model.actions, STOP]

    def start_state(self) -> Any:
        """As in the model."""
        return self.model.start_state()

    def transitions(self, state: Any, action: str) -> list[tuple[float, Any, float, bool]]:
        """As in the model; stopping pays 0 and terminates."""
        return [(1.0, state, 0.0, True)] if action == STOP else self.model.transitions(state, action)


@dataclass(frozen=True)
class PaidChain:
    """chain_sum that pays `every` / length at each `every`-th right total, 1 in all."""

    model: Any
    every: int

    @property
    def max_turns(self) -> int:
        """As in the model."""
        return int(self.model.max_turns)

    @property
    def actions(self) -> list[str]:
        """As in the model."""
        return list(self.model.actions)

    def start_state(self) -> int:
        """Nothing summed."""
        return 0

    def transitions(self, state: int, action: str) -> list[tuple[float, int, float, bool]]:
        """As in the model, paid otherwise."""
        ((_, after, _, end),) = self.model.transitions(state, action)
        due = after > state and after % self.every == 0
        return [(1.0, after, self.every / self.max_turns if due else 0.0, end)]


def setting(sweep: str, value: float) -> Setting:
    """The setting of a value of a sweep."""
    if sweep == "group size":
        return Setting(sweep, value, int(value), lake())
    if sweep == "horizon":
        return Setting(sweep, value, GROUP, chain(int(value), int(value)))
    if sweep == "pay interval":
        return Setting(sweep, value, GROUP, chain(8, int(value)))
    return Setting(sweep, value, GROUP, bandit(6, value))


def lake() -> World:
    """A lake with a hole in the middle; the policy walks the same way everywhere."""
    env: Any = make("frozen_lake", **LAKE)
    env.reset(seed=0)
    return World.of(env, lambda state: WALK)


def chain(length: int, every: int, right: float = RIGHT) -> World:
    """chain_sum under a policy that is right with chance `right`, and always wrong in the same way."""
    env: Any = make("chain_sum", length=length)
    env.reset(seed=0)

    def policy(position: int) -> dict[str, float]:
        total = str(sum(env.numbers[: position + 1]))
        return {total: right, "1" if total != "1" else "2": 1 - right}

    return World.of(PaidChain(env, every), policy)


def bandit(turns: int, stop: float) -> World:
    """Pulls of two arms, equally likely, unless the policy stops."""
    env: Any = make("bandit", turns=turns)
    env.reset(seed=0)
    table = {env.high: (1 - stop) / 2, env.low: (1 - stop) / 2, STOP: stop}
    return World.of(Stoppable(env), lambda state: table)
