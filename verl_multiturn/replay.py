"""Play recorded trajectories again and compare: the same actions must show the same episode.

The environment is built from the run's configuration and reset with the recorded task and noise;
the recorded actions are applied as `rollout.episode` applied them, and go on after a difference as
long as the environment does. A difference means that the environment, its data or one of its
dependencies has changed, or that it is not deterministic.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from verl_multiturn.env import Env, make
from verl_multiturn.errors import unknown
from verl_multiturn.rollout.pool import Observed, reset, step
from verl_multiturn.run_files import SUFFIX, Record
from verl_multiturn.runs import Run

KINDS = ("observations", "rewards", "valid", "ends", "errors")  # what may differ
# What a record must have to be played again; older runs do not have the rest.
_NEEDED = {
    name: object
    for name in ("split", "step", "group", "trajectory", "task", "seed", "dynamics_seed", "instruction",
                 "terminated", "truncation", "success")
} | {"return": int | float, "turns": list}  # fmt: skip
_NEEDED_OF_TURN = {"observation": str, "actions": list, "reward": int | float, "valid": bool}
Place = tuple[str, int]  # split and step


@dataclass(frozen=True)
class Difference:
    """One thing that is not as recorded; turn None: before the first turn."""

    trajectory: str
    turn: int | None
    kind: str  # of KINDS
    what: str
    recorded: Any
    now: Any

    def __str__(self) -> str:
        where = "at reset" if self.turn is None else f"at turn {self.turn}"
        return f"{self.trajectory} differs {where}: {self.what} recorded {self.recorded!r}, now {self.now!r}"


@dataclass(frozen=True)
class Replay:
    """A trajectory played again, to its end or to where the environment does not go on."""

    record: Record
    turns: int  # played again, and compared
    steps: int  # of the environment
    differences: tuple[Difference, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything was as recorded."""
        return not self.differences

    @property
    def lost(self) -> int:
        """Recorded turns that could not be compared."""
        return len(self.record["turns"]) - self.turns

    @property
    def differing(self) -> list[int]:
        """The turns with a difference, in order."""
        return sorted({one.turn for one in self.differences if one.turn is not None})


@dataclass(frozen=True)
class Unreadable:
    """A record, or what is left of a file, that cannot be played; `why` names it."""

    why: str


def name_of(record: Record) -> str:
    """How a trajectory is called: group/trajectory."""
    return f"{record['group']}/{record['trajectory']}"


def environment(run: Run, env: str | None = None) -> Env:
    """The environment of a run, from its configuration.

    Args:
        run: recorded with its configuration.
        env: where the environment is now, for a run that named a file which has moved.

    Raises:
        ValueError: the run names none, or a file that is not there.
    """
    settings = run.config.get("multiturn") or {}
    name = env or settings.get("env")
    if name is None:
        raise ValueError(
            f"{run.folder}/config.yaml names no environment (multiturn.env): give one with --env"
        )
    path = Path(str(name).partition(":")[0])
    if path.is_absolute() and not path.exists():
        raise ValueError(
            f"the run played the environment file {path}, which is not there (any more): put it back, "
            "or say with --env where it is now"
        )
    kwargs = settings.get("env_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise ValueError(f"{run.folder}/config.yaml: multiturn.env_kwargs={kwargs!r:.80} must be a group")
    return make(str(name), **kwargs)


def places(run: Run, splits: Iterable[str], steps: Iterable[int] | None) -> list[Place]:
    """Where to look: these steps of these splits, as far as they were recorded.

    Args:
        run: whose.
        splits: their names.
        steps: their numbers; None: all of them.

    Raises:
        ValueError: no such split, or a step that none of them has.
    """
    recorded = {split: run.steps(split) for split in splits}
    everywhere = sorted(set().union(*recorded.values()))
    chosen = everywhere if steps is None else list(steps)
    for number in chosen:
        if number not in everywhere:
            raise unknown(f"step of split {', '.join(recorded)!r}", number, everywhere)
    return [(split, number) for split, its in recorded.items() for number in its if number in chosen]


def read(run: Run, where: Iterable[Place]) -> Iterator[Record | Unreadable]:
    """The trajectories at `where`, one after another; a damaged file gives what stands before the damage."""
    for split, number in where:
        file = f"{run.folder}/trajectories/{split}/{number}{SUFFIX}"
        try:
            for line, record in enumerate(run.each(split, number), start=1):
                lacks = _missing(record)
                yield Unreadable(f"{file}, line {line} has no (usable) {lacks}") if lacks else record
        except ValueError as error:
            yield Unreadable(str(error))


def find_trajectory(run: Run, name: str, where: list[Place]) -> Record:
    """The trajectory called `name` (group/trajectory, or how it begins) at `where`.

    Raises:
        ValueError: none, or more than one, is called so.
    """
    names, whole, begun, damage = list[str](), list[Record](), list[Record](), list[str]()
    for record in read(run, where):
        if isinstance(record, Unreadable):
            damage.append(record.why)
            continue
        names.append(name_of(record))
        # A whole name first: g/1 is also how g/10 begins.
        if names[-1] == name:
            whole.append(record)
        elif names[-1].startswith(name):
            begun.append(record)
    found = whole or begun
    if not found:
        near = get_close_matches(name, names, n=3, cutoff=0)
        hint = f"(the nearest of {len(names)})" + (f" {damage[0]}" if damage else "")
        splits = ", ".join(dict.fromkeys(split for split, _ in where))
        raise unknown(f"trajectory of split {splits!r}", name, near, hint)
    if len(found) > 1:
        some = ", ".join(f"{name_of(record)} of step {record['step']}" for record in found[:4])
        more = ", ..." if len(found) > 4 else ""
        raise ValueError(f"{name!r} begins the names of {len(found)} trajectories: {some}{more}")
    return found[0]


def replay(env: Env, record: Record) -> Replay:
    """Play one recorded trajectory again in `env`: to its end, or as far as the environment goes on."""
    turns, found, played, steps = record["turns"], list[Difference](), 0, 0

    def differs(turn: int | None, kind: str, what: str, then: Any, now: Any) -> None:
        found.append(Difference(name_of(record), turn, kind, what, then, now))

    try:
        seen = reset(env, record["seed"], record["dynamics_seed"])
    # Whatever a user's environment raises is what is different now.
    except Exception as error:
        differs(None, "errors", "an episode", record["seed"], error)
        return Replay(record, played, steps, tuple(found))
    if seen.instruction != record["instruction"]:
        differs(None, "observations", "instruction", record["instruction"], seen.instruction)
    for t, turn in enumerate(turns):
        if seen.observation != turn["observation"]:
            differs(t, "observations", "observation before it", turn["observation"], seen.observation)
        if seen.terminated or seen.truncated:
            differs(t, "ends", "the episode", "goes on", "has ended")
            break
        try:
            now = _turn(env, turn)
        except Exception as error:
            differs(t, "errors", "a turn", turn["actions"], error)
            break
        seen, steps, played = now.seen, steps + now.steps, t + 1
        if not _equal(turn["reward"], now.reward):
            differs(t, "rewards", "reward", turn["reward"], now.reward)
        if turn["valid"] != now.valid:
            differs(t, "valid", "valid", turn["valid"], now.valid)
    else:
        for kind, what, then, at_end in _ends(record, seen):
            if then != at_end:
                differs(len(turns) - 1, kind, what, then, at_end)
    return Replay(record, played, steps, tuple(found))


class _Turn(NamedTuple):
    seen: Observed  # after it
    reward: float
    valid: bool
    steps: int


def _turn(env: Env, turn: Record) -> _Turn:
    """Apply the actions of a recorded turn."""
    # As in the rollout: no valid action is "", and what stands behind the episode's end is not played.
    actions, reward, done = turn["actions"] or [""], 0.0, 0
    valid = bool(turn["actions"])
    for action in actions:
        seen = step(env, action)
        done, reward = done + 1, reward + seen.reward
        valid = valid and bool(seen.info.get("valid", True))
        if seen.terminated or seen.truncated:
            break
    return _Turn(seen, reward, valid, done)


def _ends(record: Record, seen: Observed) -> Iterator[tuple[str, str, Any, Any]]:
    """What the last turn must agree in; limits of the run itself leave the environment unfinished."""
    yield "ends", "terminated", record["terminated"], seen.terminated
    yield "ends", "truncated by the environment", record["truncation"] == "environment", seen.truncated
    if record["success"] is not None:
        yield "ends", "success", record["success"], bool(seen.info.get("success", False))
    if record.get("final_observation") is not None:
        yield "observations", "observation after it", record["final_observation"], seen.observation


def _missing(record: Any) -> str:
    """What a line lacks to be a trajectory; "": nothing."""
    if lacks := _lacks(record, _NEEDED):
        return lacks
    found = (
        f"{lacks} of turn {t}"
        for t, turn in enumerate(record["turns"])
        if (lacks := _lacks(turn, _NEEDED_OF_TURN))
    )
    return next(found, "")


def _lacks(thing: Any, needed: Mapping[str, Any]) -> str:
    """The keys that are not there, or hold something else."""
    given = thing if isinstance(thing, dict) else {}
    return ", ".join(
        key for key, kind in needed.items() if key not in given or not isinstance(given[key], kind)
    )


def _equal(then: float, now: float) -> bool:
    # Sums of rewards may round differently on another machine.
    return math.isclose(then, now, rel_tol=1e-9, abs_tol=1e-12)
