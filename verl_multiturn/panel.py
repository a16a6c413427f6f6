"""Panels: named lists of tasks, known by their content, so that splits cannot overlap or drift.

A panel is a JSON file, one task a line. A task is a seed of the environment; its hash covers what
the seed leads to, so a changed environment is noticed and the same task under two seeds is found.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Self

from verl_multiturn.env import Env, Seed, make
from verl_multiturn.errors import unknown
from verl_multiturn.load import environment_folders

FIRST_ID = {"test": 0, "val": 500_000, "train": 1_000_000}  # where each split's seeds start
ALSO = "val/"  # how the splits of multiturn.also begin: validated beside "val", each under its own name
PATIENCE = 5_000  # seeds in a row that bring nothing new before `build` stops looking


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        id: the seed.
        hash: of its content, see `content_hash`.
        type: as the environment names it.
    """

    id: Seed
    hash: str
    type: str


@dataclass(frozen=True)
class Panel:
    """Tasks of one environment.

    Attributes:
        env: a name for `make`.
        kwargs: its keywords.
        split: "train", "val", "test" or another name.
        tasks: in order.
    """

    env: str
    kwargs: Mapping[str, Any]
    split: str
    tasks: tuple[Task, ...]

    @classmethod
    def build(
        cls,
        env: str,
        kwargs: Mapping[str, Any],
        ids: Iterable[Seed] | str,
        split: str,
        exclude: Set[str] = frozenset(),
        n: int | None = None,
        fewer: bool = False,
    ) -> Self:
        """Take the tasks of `ids`, in order, that are neither excluded nor already taken, up to `n`.

        The search ends with `ids`, or after 5,000 seeds in a row without a new task, so `ids` may be
        endless.

        Args:
            env: a name for `make`.
            kwargs: its keywords.
            ids: task ids; a text is the name of a list of the environment's own (`Env.tasks`).
            split: of the panel.
            exclude: content hashes to leave out.
            n: how many at most; None: all.
            fewer: whether fewer will do.

        Raises:
            ValueError: fewer than `n` distinct tasks, unless `fewer` (but one at least) will do; no
                such list.
        """
        one = make(env, **kwargs)
        try:
            listed = isinstance(ids, str)
            chosen = one.tasks(ids) if isinstance(ids, str) else ids
            tasks = _distinct(one, chosen, exclude, n, math.inf if listed else PATIENCE)
        finally:
            one.close()
        if len(tasks) < (1 if fewer else n or 0):
            raise ValueError(
                f"{env} with {dict(kwargs)} has only {len(tasks)} distinct tasks for split {split!r}, "
                f"not {n or 'one'}."
            )
        return cls(env, dict(kwargs), split, tuple(tasks.values()))

    @property
    def name(self) -> str:
        """Environment and split: "frozen_lake-test"."""
        return f"{self.env}-{self.split}"

    @property
    def hashes(self) -> frozenset[str]:
        """The content hashes, e.g. to exclude them from another split."""
        return frozenset(task.hash for task in self.tasks)

    @property
    def fingerprint(self) -> str:
        """One hash of environment, keywords, split and tasks: two equal fingerprints are the same panel."""
        tasks = [[task.id, task.hash, task.type] for task in self.tasks]
        return _hash(json.dumps([self.env, dict(self.kwargs), self.split, tasks], sort_keys=True))

    def make(self) -> Env:
        """A new environment for these tasks."""
        return make(self.env, **self.kwargs)

    def save(self, path: str | Path) -> None:
        """Write the panel as JSON, whole or not at all."""
        head = {"env": self.env, "kwargs": dict(self.kwargs), "split": self.split}
        head["fingerprint"] = self.fingerprint
        lines = [json.dumps({"id": t.id, "hash": t.hash, "type": t.type}) for t in self.tasks]
        text = json.dumps(head)[:-1] + ', "tasks": [\n' + ",\n".join(lines) + "\n]}\n"
        draft = Path(f"{path}.{os.getpid()}.part")
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a panel.

        Raises:
            ValueError: no such file, not a panel, or changed since it was saved.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            tasks = tuple(Task(task["id"], task["hash"], task["type"]) for task in data["tasks"])
            panel = cls(data["env"], data["kwargs"], data["split"], tasks)
            fingerprint = data["fingerprint"]
        except OSError as error:
            raise ValueError(f"no panel at {path}: {error.strerror}.") from None
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}.") from None
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a panel: {error} (write it with Panel.save).") from None
        if panel.fingerprint != fingerprint:
            raise ValueError(
                f"{path} was changed after it was saved: its fingerprint does not match its tasks."
            )
        return panel

    def verify(self, limit: int | None = None) -> None:
        """Compare the first `limit` tasks (default: all) with what the environment makes of them now.

        Raises:
            ValueError: some differ; says how many and which.
        """
        env = self.make()
        tasks = self.tasks[:limit]
        wrong = [task.id for task in tasks if _task(env, task.id) != task]
        env.close()
        if wrong:
            first = ", ".join(map(str, wrong[:5]))
            raise ValueError(
                f"{len(wrong)} of {len(tasks)} tasks of panel {self.name} are no longer what environment "
                f"{self.env} with {dict(self.kwargs)} makes of them; first: {first}."
            )


def check_disjoint(*panels: Panel) -> None:
    """Raise ValueError, naming the pair, if two panels share a task by content."""
    for a, b in combinations(panels, 2):
        if shared := a.hashes & b.hashes:
            first = next(task.id for task in a.tasks if task.hash in shared)
            raise ValueError(
                f"panels {a.name} and {b.name} share {len(shared)} tasks by content; "
                f"the first is task {first} of {a.name}."
            )


def load_panel(name: str) -> Panel:
    """A panel by its name ("frozen_lake-test") in an `environments/panels` folder, else by path.

    Raises:
        ValueError: neither; lists the names.
    """
    shipped = {
        path.stem: path
        for folder in reversed(environment_folders())
        for path in sorted((folder / "panels").glob("*.json"))
    }
    if name in shipped or not (Path(name).suffix or Path(name).is_file()):
        if name not in shipped:
            raise unknown("panel", name, shipped, "A panel may also be given as a path to a .json file.")
        return Panel.load(shipped[name])
    return Panel.load(name)


def content_hash(env: Env, observation: str) -> str:
    """Of a task after `reset`: of its `Env.content`."""
    return _hash(env.content(observation))


def _task(env: Env, seed: Seed) -> Task:
    if (known := env.peek(seed)) is not None:
        content, task_type = known
        return Task(seed, _hash(content), task_type)
    observation, info = env.reset(seed)
    return Task(seed, content_hash(env, observation), info["task_type"])


def _distinct(
    env: Env, ids: Iterable[Seed], exclude: Set[str], n: int | None, patience: float
) -> dict[str, Task]:
    """New tasks by content hash; ends with `ids`, at `n`, or after `patience` ids without a new one."""
    tasks: dict[str, Task] = {}
    barren = 0
    for seed in ids:
        if len(tasks) == n or barren >= patience:
            break
        task, barren = _task(env, seed), barren + 1
        if task.hash not in tasks and task.hash not in exclude:
            tasks[task.hash], barren = task, 0
    return tasks


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
