"""Grows a search tree for every task of a panel and records them: many trees at a time."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_multiturn.compose import plain
from verl_multiturn.endpoint import Refused
from verl_multiturn.env import derive_seed
from verl_multiturn.panel import Panel
from verl_multiturn.panel import Task as PanelTask
from verl_multiturn.rollout.episode import MOST_ERROR, Task
from verl_multiturn.rollout.pool import EnvironmentFailure
from verl_multiturn.rollout.prompts import PromptTooLong
from verl_multiturn.run_files import Record
from verl_multiturn.search.branches import Branches, Shared, at_once
from verl_multiturn.search.config import SearchConfig, configured
from verl_multiturn.search.mcts import Growth
from verl_multiturn.search.step_value import StepValue
from verl_multiturn.search.tree import COSTS, Tree
from verl_multiturn.search.tree_files import TreeFolder
from verl_multiturn.search.worlds import Account

# Of `multiturn`: what a tree depends on, beside the search and the model.
PARTS = ("env", "env_kwargs", "row", "action", "prompt", "max_action_tokens", "max_turns", "max_actions")
TOTALS = ("proposals", "env_steps", *COSTS)


@dataclass
class Progress:
    """How far a collection is."""

    total: int
    before: int = 0  # trees that were there already
    done: int = 0
    failed: int = 0
    solved: int = 0
    calls: int = 0
    started: float = field(default_factory=time.perf_counter)

    def __str__(self) -> str:
        """One line: trees, solved so far, rate, time left."""
        now = self.done - self.before + self.failed
        seconds = max(1e-9, time.perf_counter() - self.started)
        left = f"{(self.total - self.done - self.failed) * seconds / now:.0f} s" if now else "?"
        won = f"{100 * self.solved / (self.done - self.before):.1f} %" if self.done > self.before else "-"
        lost = f", {self.failed} failed" if self.failed else ""
        return (
            f"{self.done}/{self.total} trees{lost}, solved {won}, {now / seconds:.2f} trees/s, "
            f"{self.calls / seconds:.0f} calls/s, ETA {left}"
        )


@dataclass
class Collection:
    """Grows and records.

    Args:
        config: whose prompts, formats, limits and `multiturn.search` are used.
        panel: the tasks.
        model: what answers: a `samplers.Sampler`, an `endpoint.Endpoint` or a `scripted.Scripted`.
        name: of the model, for the record.
        folder: where to record, or to go on.
        sampling: of the model, for the record.
        seed: of the searches.
        trees: at a time.
        value: prior of the candidates, see `SearchConfig.prior`.
        q_model: where `value` comes from, for the record.
        tell: called after every tree.

    Raises:
        ValueError: a folder of another collection, or a panel that no longer fits its environment.
    """

    config: DictConfig
    panel: Panel
    model: Any
    name: str
    folder: Path
    sampling: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    trees: int = 64
    value: StepValue | None = None
    q_model: str | None = None
    tell: Callable[[Progress], None] = lambda progress: None

    def __post_init__(self) -> None:
        self.search: SearchConfig = configured(plain(self.config.multiturn.search))
        self.shared = Shared.of(self.config, self.model)
        self.progress = Progress(len(self.panel.tasks))
        self.totals = dict.fromkeys(TOTALS, 0.0)

    @property
    def about(self) -> dict[str, Any]:
        """What the trees depend on."""
        parts = {key: self.shared.settings[key] for key in PARTS}
        search = {key: getattr(self.search, key) for key in self.search.__dataclass_fields__}
        more = {"model": self.name, "sampling": self.sampling, "seed": self.seed, "q_model": self.q_model}
        return parts | search | more

    def run(self) -> None:
        """Grow what is missing; what was finished when something stops it is recorded.

        Raises:
            ValueError: every tree failed.
            EndpointDown: the endpoint does not answer.
        """
        with TreeFolder(self.folder, plain(self.config), self.about) as self.file:
            missing = [task for task in self.panel.tasks if str(task.id) not in self.file.done]
            self.progress.before = self.progress.done = len(self.panel.tasks) - len(missing)
            if missing:
                asyncio.run(self._grow_all(iter(missing), len(missing)))
        if self.progress.failed and not self.progress.done:
            raise ValueError(f"all {self.progress.failed} trees failed: see {self.folder}/failures.jsonl")

    async def _grow_all(self, tasks: Iterator[PanelTask], n: int) -> None:
        try:
            # One reason is enough: the trees share what failed.
            await at_once([self._grower(tasks) for _ in range(min(self.trees, n))])
        finally:
            await self.model.close()
            self.shared.pool.close()

    async def _grower(self, tasks: Iterator[PanelTask]) -> None:
        with self.model.player():
            for task in tasks:
                await self._grow(task)
                self.tell(self.progress)

    async def _grow(self, task: PanelTask) -> None:
        began = time.perf_counter()
        seed = derive_seed(self.seed, task.id)
        play = Task(task.id, task.hash, 0, derive_seed("dynamics", seed), content=task.hash, type=task.type)
        world = Branches(self.shared, play, seed)
        growth = Growth(world.tree, world, self.search, self.value, at_once)
        try:
            await world.start(Account(world.tree, self.search))
            await growth.run()
        # These cost one tree; anything else would fail them all.
        except (EnvironmentFailure, PromptTooLong, Refused) as error:
            self.progress.failed += 1
            self.file.fail({"time": time.time(), "task": task.id, "error": str(error)[:MOST_ERROR]})
            return
        record = self._record(task, world.tree, time.perf_counter() - began)
        self.file.append(record)
        self.progress.done += 1
        self.progress.solved += bool(record["success"])
        self.progress.calls += record["proposals"]
        for key in TOTALS:
            self.totals[key] += record[key]

    def _record(self, task: PanelTask, tree: Tree, seconds: float) -> Record:
        spent = {key: sum(getattr(node, key) for node in tree.nodes()) for key in ("prompt_tokens", "tokens")}
        return {
            "task": task.id,
            "content": task.hash,
            "task_type": task.type,
            "env": self.panel.env,
            "panel": self.panel.name,
            "model": self.name,
            "seed": self.seed,
            "stopped": tree.stopped,
            "iterations": tree.iterations,
            "success": tree.success,
            "rollout_successes": tree.rollout_successes,
            "proposals": tree.proposals,
            "env_steps": tree.env_steps,
            **spent,
            "seconds": seconds,
            "root": tree.to_dict(),
        }
