"""Plays a panel with a model, as validation would: the same prompts, parsing, limits and chances.

The outcome is a recorded run with the split "eval", so that whatever reads runs reads it. What was played
before a kill or an error is kept: the same evaluation goes on from there (`verl_multiturn.eval_folder`).
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig

from verl_multiturn import metrics
from verl_multiturn.compose import plain
from verl_multiturn.env import derive_seed
from verl_multiturn.eval_folder import Episodes, check_folder, check_same, state_of
from verl_multiturn.eval_records import SPLIT, to_record
from verl_multiturn.panel import Panel
from verl_multiturn.rollout.episode import Episode, Sample, Task
from verl_multiturn.rollout.layouts import LAYOUTS
from verl_multiturn.run_files import Record
from verl_multiturn.runs import Run, RunWriter
from verl_multiturn.search.guided import Guide, Guided, annotated

VERIFIED = 64  # tasks of a panel that are compared with the environment before anything is played


class Model(Protocol):
    """What plays: `samplers.Sampler` or `endpoint.Endpoint`."""

    token_ids: bool
    eos: int | None

    def chat(self, **template_kwargs: Any) -> Any:
        """A `rollout.layouts.Chat`."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of an utterance."""
        ...

    def player(self) -> AbstractContextManager[None]:
        """Held by a coroutine as long as it plays episodes."""
        ...

    async def __call__(self, prompt_ids: list[int], max_tokens: int, seed: int | None) -> Sample:
        """Sample one utterance."""
        ...

    async def close(self) -> None:
        """Free what was opened."""
        ...


@dataclass
class Progress:
    """How far an evaluation is."""

    total: int
    before: int = 0  # of the done ones, by an earlier process
    done: int = 0  # played to the end
    failed: int = 0
    wins: int = 0
    started: float = field(default_factory=time.perf_counter)

    def __str__(self) -> str:
        """One line: episodes, success so far, rate, time left."""
        over = self.done + self.failed
        now = over - self.before
        rate = now / max(1e-9, time.perf_counter() - self.started)
        left = f"{(self.total - over) / rate:.0f} s" if now else "?"
        won = f"{100 * self.wins / self.done:.1f} %" if self.done else "-"
        lost = f", {self.failed} failed" if self.failed else ""
        return f"{over}/{self.total} episodes{lost}, success {won}, {rate:.1f}/s, ETA {left}"


@dataclass
class Evaluation:
    """Plays and records; `records` are the finished episodes, in the order of panel and sample.

    Args:
        config: whose prompts, formats and limits are used; `multiturn.env` is the panel's.
        panel: the tasks.
        model: what answers.
        folder: where to record: new, empty, or with the same evaluation unfinished, which goes on.
        step: of training, the model's.
        samples: episodes for each task.
        concurrency: episodes at a time.
        guide: how each answer is chosen among several; None: there is one.
        about: goes into the recorded configuration, under `eval`.
        tell: called after every episode.
        episode: builds an episode from what `Episode` takes.
        reuse: the folder may hold the same evaluation done: nothing is played then.

    Raises:
        ValueError: the folder holds something, or the panel no longer fits its environment.
    """

    config: DictConfig
    panel: Panel
    model: Model
    folder: Path
    step: int = 0
    samples: int = 1
    concurrency: int = 64
    guide: Guide | None = None
    about: dict[str, Any] = field(default_factory=dict)
    tell: Callable[[Progress], None] = lambda progress: None
    episode: Callable[..., Episode] = Episode
    reuse: bool = False

    def __post_init__(self) -> None:
        check_folder(self.folder, self.reuse)
        if not self.panel.tasks:
            raise ValueError(f"panel {self.panel.name} has no tasks")
        wanted = (self.config.multiturn.env, plain(self.config.multiturn.env_kwargs))
        if wanted != (self.panel.env, dict(self.panel.kwargs)):
            raise ValueError(
                f"panel {self.panel.name} is of {self.panel.env} with {dict(self.panel.kwargs)}, not of "
                f"{wanted[0]} with {wanted[1]}"
            )
        self.panel.verify(VERIFIED)
        from verl_multiturn.rollout.loop import Rollout  # imports verl, which takes seconds

        self.rollout = Rollout.of(self.config)
        kwargs = plain(self.config.data).get("apply_chat_template_kwargs") or {}
        self.chat = self.model.chat(**kwargs)
        self._played: dict[tuple[int, int], Record] = {}
        self.progress = Progress(len(self.panel.tasks) * self.samples)

    @property
    def records(self) -> list[Record]:
        """Recorded trajectories (schema in `verl_multiturn.runs`)."""
        return [self._played[key] for key in sorted(self._played)]

    def run(self) -> None:
        """Play what is missing; what was played when something stops it is recorded as well.

        Raises:
            ValueError: every episode failed, or the folder holds an evaluation with other settings.
        """
        about = {"samples": self.samples, "tasks": len(self.panel.tasks)}
        self.about |= about | {"panel_fingerprint": self.panel.fingerprint}
        config = plain(self.config) | {"eval": self.about}
        if state_of(self.folder) == "done":
            self._read(config)
            asyncio.run(self._close())
            return
        with Episodes(self.folder, config) as self.episodes:
            self._played |= self.episodes.before
            self._count()
            (self.folder / "panels").mkdir(exist_ok=True)
            self.panel.save(self.folder / "panels" / f"{SPLIT}.json")
            with RunWriter(self.folder, config) as self.writer:
                try:
                    asyncio.run(self._play_all())
                finally:
                    found = metrics.of_validation(self.records, self.progress.done + self.progress.failed)
                    renamed = {name.replace("val/", f"{SPLIT}/", 1): value for name, value in found.items()}
                    self.writer.metrics(self.step, renamed)
                    self.writer.trajectories(SPLIT, self.step, self.records)
            if not self._played:
                failed = f"all {self.progress.failed} episodes failed"
                raise ValueError(f"{failed}: see {self.folder}/failures.jsonl")
            self.episodes.finish()

    def _read(self, config: dict[str, Any]) -> None:
        """Take over what the folder holds."""
        check_same(self.folder, config)
        run = Run(self.folder)
        self._played = {(place, 0): one for place, one in enumerate(run.trajectories(SPLIT, self.step))}
        self._count()
        self.progress.failed = int(run.metrics.loc[self.step, f"{SPLIT}/failed"])

    def _count(self) -> None:
        self.progress.before = self.progress.done = len(self._played)
        self.progress.wins = sum(bool(record["success"]) for record in self._played.values())

    async def _play_all(self) -> None:
        jobs = ((n, sample) for n in range(len(self.panel.tasks)) for sample in range(self.samples))
        jobs = (job for job in jobs if job not in self.episodes.before)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.concurrency, self.progress.total)):
                    group.create_task(self._player(jobs))
        except BaseExceptionGroup as errors:  # one reason is enough: the players share what failed
            raise errors.exceptions[0] from None
        finally:
            await self._close()

    async def _close(self) -> None:
        await self.model.close()
        self.rollout.pool.close()

    async def _player(self, jobs: Iterator[tuple[int, int]]) -> None:
        with ExitStack() as playing:
            for _ in range(self.guide.n if self.guide else 1):  # as many answers are waited for at once
                playing.enter_context(self.model.player())
            for n, sample in jobs:
                await self._play(n, sample)
                self.tell(self.progress)

    async def _play(self, n: int, sample: int) -> None:
        from verl_multiturn.endpoint import Refused
        from verl_multiturn.rollout.pool import EnvironmentFailure
        from verl_multiturn.rollout.prompts import PromptTooLong

        episode = self._episode(n, sample)
        try:
            trajectory = await episode.play()
        # These cost one episode; anything else would fail them all.
        except (EnvironmentFailure, PromptTooLong, Refused) as error:
            self.progress.failed += 1
            self.writer.failure(episode.failure(error) | {"split": SPLIT, "step": self.step})
            return
        record = to_record(trajectory, self.rollout.settings["row"], self.step, self.model.token_ids)
        record = annotated(record, episode.details) if self.guide else record
        self._played[n, sample] = record
        self.episodes.append(n, sample, record)
        self.progress.done += 1
        self.progress.wins += bool(trajectory.success)

    def _episode(self, n: int, sample: int) -> Episode:
        task, shared = self.panel.tasks[n], self.rollout
        settings = shared.settings
        layout = LAYOUTS[settings["row"]]
        kind = self.episode if self.guide is None else partial(Guided, guide=self.guide)
        return kind(
            env_name=settings["env"],
            env_kwargs=settings["env_kwargs"],
            task=Task(
                id=task.id,
                group=str(task.id),
                sample=sample,
                # The chances of a validation of this run.
                dynamics_seed=derive_seed(task.id, sample),
                sampling_seed=derive_seed(settings["seed"], task.id, sample),
                content=task.hash,
                type=task.type,
            ),
            layout=layout(shared.policy, self.chat, shared.limits, self.model.eos),
            form=shared.form,
            limits=shared.limits,
            pool=shared.pool,
            generate=self.model,
            decode=self.model.decode,
            anchor=settings["anchor"],
        )


def check_new(folder: Path) -> None:
    """Refuse a folder that holds something.

    Raises:
        ValueError: it does.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists: nothing is overwritten, choose another --out")
