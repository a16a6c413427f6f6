"""Measure one environment in this process: python -m verl_multiturn.measure_one FILE, a `Job` on stdin.

FILE is rewritten after each part, with the part that is under way, so that whoever waits knows what an
environment that hangs was doing and what it had shown before.
"""

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from verl_multiturn.check import check_env
from verl_multiturn.env import Env, Seed, derive_seed, make
from verl_multiturn.load import load_class
from verl_multiturn.panel_index import SPLITS
from verl_multiturn.policies import Policy, expert_policy, random_policy
from verl_multiturn.rollout.observed import reset, step
from verl_multiturn.stats import wilson

LISTS = ("test", "valid_unseen", *SPLITS)  # the first of the environment's lists that is there is played
DEPTH = 5  # steps before a snapshot is restored
AGAIN = 20  # tasks that are started again, for times of reset, snapshot and restore
COPIES, MOST_MIB = 32, 512  # instances whose memory is compared, until they have that much
CHECKED = 3  # episodes of check_env


@dataclass
class Subject:
    """The environment under measurement, and what was found.

    Attributes:
        env: the instance.
        tasks: what is played, in order.
        episodes, seconds: a policy plays until either is used up.
        steps: seconds spent, one each.
        played: how many of the tasks were played.
    """

    env: Env
    tasks: list[Seed]
    episodes: int
    seconds: float
    steps: list[float] = field(default_factory=list)
    played: int = 0

    @property
    def pace(self) -> float | None:
        """Steps a second so far."""
        return len(self.steps) / sum(self.steps) if self.steps else None

    def play(self, policy: Policy, task: Seed, sample: int = 0) -> tuple[bool, int]:
        """One episode; whether it succeeded, and its turns.

        Steps are timed as a rollout pays for them: with state key and admissible actions.
        """
        seen, turns = reset(self.env, task, derive_seed(task, sample)), 0
        while not (seen.terminated or seen.truncated):
            action = policy(self.env, seen.observation)
            seen, spent = _timed(step, self.env, action)
            self.steps.append(spent)
            turns += 1
        return bool(seen.info.get("success")), turns

    def row(self, policy: Policy) -> dict[str, Any] | None:
        """Success with its Wilson interval, turns and n; None: it has no such policy."""
        end, wins, turns, n = time.perf_counter() + self.seconds, 0, 0, 0
        for task in self.tasks:
            try:
                won, took = self.play(policy, task)
            except NotImplementedError:
                return None
            wins, turns, n = wins + won, turns + took, n + 1
            if time.perf_counter() >= end:
                break
        self.played = max(self.played, n)
        rate = wilson(wins, n)
        return {"success": rate.mean, "low": rate.low, "high": rate.high, "n": n, "turns": turns / n}


def _timed(call: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """What a call returns, and its seconds."""
    start = time.perf_counter()
    result = call(*args)
    return result, time.perf_counter() - start


def tasks_of(env: Env, n: int) -> tuple[list[Seed], str]:
    """Up to `n` tasks, and where they come from."""
    if type(env).tasks is Env.tasks:
        return list(range(n)), f"seeds from 0 to {n - 1}"
    for name in dict.fromkeys(LISTS):
        try:
            listed = env.tasks(name)
        except ValueError:
            continue
        if listed:
            return listed[:n], f"the first of {len(listed)} in {name}" if len(
                listed
            ) > n else f"all of {name}"
    return list(range(n)), f"seeds from 0 to {n - 1}"


def again(subject: Subject, policy: Policy) -> dict[str, float]:
    """Mean milliseconds of starting a task again, of a snapshot and of going back to one after some steps.

    Only tasks that were played before: what an environment builds once for a task is no cost of a reset.
    """
    env, end = subject.env, time.perf_counter() + subject.seconds
    resets, saves, restores = list[float](), list[float](), list[float]()
    for task in subject.tasks[: min(AGAIN, subject.played)]:
        seen, spent = _timed(reset, env, task, derive_seed(task, 0))
        resets.append(spent)
        for _ in range(DEPTH + 1 if env.snapshots != "none" else 0):
            saved, spent = _timed(env.snapshot)
            saves.append(spent)
            seen = step(env, policy(env, seen.observation))
            if seen.terminated or seen.truncated:
                break
        if saves:
            restores.append(_timed(env.restore, saved)[1])
        if time.perf_counter() >= end:
            break
    kept = {"reset_ms": resets, "snapshot_ms": saves, "restore_ms": restores}
    return {name: 1e3 * sum(spent) / len(spent) for name, spent in kept.items() if spent}


def memory(subject: Subject, new: Callable[[], Env], policy: Policy) -> float | None:
    """MiB that one more instance takes, with an episode played; None where the system does not say."""
    gc.collect()
    before, made, end = resident_mib(), list[Env](), time.perf_counter() + subject.seconds
    if before is None:
        return None
    try:
        taken = 0.0
        while len(made) < COPIES and taken < MOST_MIB and (not made or time.perf_counter() < end):
            made.append(new())
            other = Subject(made[-1], subject.tasks, 1, subject.seconds)
            other.play(policy, subject.tasks[len(made) % len(subject.tasks)])
            taken = (resident_mib() or before) - before
        gc.collect()
        return max(0.0, (resident_mib() or before) - before) / len(made)
    finally:
        for one in made:
            one.close()


def resident_mib() -> float | None:
    """Resident memory of this process and of those it started, in MiB; None without /proc."""
    if not Path("/proc/self/statm").exists():
        return None
    return sum(map(_resident, _family(os.getpid()))) / 2**20


def _family(pid: int) -> Iterator[int]:
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            yield from _family(int(child))


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def parts(
    env: str, kwargs: dict[str, Any], episodes: int, seconds: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure; yields the part that comes next and what the one before has found."""
    needs = getattr(load_class(env, Env), "needs", Env.needs)
    installed = {package: _version(package) for package in needs.packages}
    yield "make", {"licence": needs.licence, "packages": installed}
    one, spent = _timed(lambda: make(env, **kwargs))
    tasks, where = tasks_of(one, episodes)
    subject = Subject(one, tasks, episodes, seconds)
    about = {"make_s": spent, "tasks": where, "snapshots": one.snapshots, "runs_in": one.runs_in}
    yield "random policy", about | {"max_turns": one.max_turns}
    rng = random.Random(0)
    by_chance = subject.row(random_policy(rng))
    yield "expert", {"random": by_chance, "steps_per_second": subject.pace}
    expert = subject.row(expert_policy)
    policy = random_policy(rng) if by_chance else expert_policy if expert else _word
    if not (by_chance or expert):
        subject.row(_word)
    found = {"expert": expert} | ({} if by_chance else {"steps_per_second": subject.pace})
    yield "resets and snapshots", found
    saved = again(subject, policy)
    yield "memory", saved
    more = memory(subject, lambda: make(env, **kwargs), policy)
    one.close()
    yield "check_env", {"memory_mib": more}
    report = check_env(env, CHECKED, **kwargs)
    yield "", {"check": {"ok": report.ok, "failures": report.failures}}


def _word(env: Env, observation: str) -> str:
    return "look"


def _version(package: str) -> str:
    """Of the distribution that an import name belongs to."""
    names = packages_distributions().get(package)
    return f"{names[0]} {version(names[0])}" if names else package


def main() -> int:
    """Measure the job on stdin; returns the exit code."""
    path, found = Path(sys.argv[1]), {"doing": "import"}
    _write(path, found)
    try:
        for doing, more in parts(**json.load(sys.stdin)):
            found |= more | {"doing": doing}
            _write(path, found)
    # The environment is a stranger: whatever it raises is what was found.
    except Exception as error:
        found["problem"] = " ".join(f"{type(error).__name__}: {error}".split())
        _write(path, found)
        return 1
    return 0


def _write(path: Path, found: dict[str, Any]) -> None:
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(found), encoding="utf-8")
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main())
