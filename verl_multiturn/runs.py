"""A recorded run: what a training run did, in a folder that is readable without verl.

    config.yaml      the resolved configuration; config.<n>.yaml where a resumed run changed it
    metrics.jsonl    {"step": int, "time": unix seconds, "metrics": {name: number or null}}
    failures.jsonl   one failed trajectory a line
    about.jsonl      commit, machine and model of each start (see `provenance`)
    trajectories/<split>/<step>.jsonl.zst    one trajectory a line, zstandard
    discarded/<time>/    what a resumed run took back: later than its checkpoint

A trajectory is one JSON object:

    split, step      "train" or "val" (others are free), and the global step it was sampled at
    group            uid of the start state; trajectory: int, which sample of its group
    env, task, task_type, seed, dynamics_seed, instruction    what was played
    sampling_seed    from which each utterance's seed is derived; null: the engine's own
    panel            name of the task's panel in the run: "train", "val", or one of multiturn.also (then
                     split is "val"); null where there is only one
    trained          whether it was trained on; false in validation and where multiturn.filter left it out
    return           sum of rewards; penalty: what training took off; success: bool, the last info["success"]
    terminated, truncated    how it ended; truncation: null, "turns", "tokens" or "environment"
    final_observation    the environment's text after a truncated last turn; null after a terminated one
    seconds          wall time of the whole trajectory
    vine             VinePPO: counts of its continuations; returns: {t: the return of each from turn t}
    audit            where multiturn.audit was due and chose the trajectory: counts of its continuations;
                     returns: {t: what the value of turn t should have said, by each continuation}
    turns            list, in order, of objects with
        index            t, from 0
        observation      the environment's text before the turn
        prompt_ids       the prompt tokens that are new in the turn's row (prompt: their text), so a
                         row's tokens are prompt_ids + action_ids of its turns, one after another
        action_ids       the tokens the policy wrote (text: their text); log_probs: one for each
        actions, valid   the actions parsed from the text, and whether it parsed
        reward, anchor   r_t; hex digest of the state the turn started from, or null
        penalty          what training took off the reward (multiturn.format_penalty)
        value, advantage V(s_t) and A_t, or null
        steps            only where utterances are cut (multiturn.vine.splitter): objects with span, that is
                         [start, stop) in action_ids, value and advantage; the turn has those of its first
        others           multiturn.algorithm=q_advantage: fresh answers to the turn's prompt, not carried out
        candidates       evaluations that choose among answers: text, action, votes, score of each
        row, span        which training row it went to; [start, stop) of action_ids in its response
        generate_seconds, env_seconds
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from io import FileIO
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from omegaconf import OmegaConf

from verl_multiturn import provenance, run_files
from verl_multiturn.errors import RunStopped, intact, unknown
from verl_multiturn.rewards import trained_reward
from verl_multiturn.run_files import SUFFIX, Record
from verl_multiturn.turns import TurnBatch

if TYPE_CHECKING:
    import pandas as pd


class RunWriter:
    """Writes a run's folder; trajectories go through one background thread.

    Args:
        folder: the run's folder, created if need be.
        config: the resolved configuration (nested dict or OmegaConf).
        resume_step: the step of the checkpoint this run continues from; None: from the beginning.
            Later records that the folder already holds move to `discarded/<time>/`.

    Rows handed over must not be changed afterwards. A write that fails is raised at the next call
    or at `close` as a RunStopped that says what is safe.
    """

    def __init__(self, folder: str | Path, config: Any = None, resume_step: int | None = None) -> None:
        self.folder = Path(folder)
        (self.folder / "trajectories").mkdir(parents=True, exist_ok=True)
        run_files.take_back(self.folder, resume_step)
        if config is not None:
            plain = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
            text = OmegaConf.to_yaml(OmegaConf.create(run_files.without_secrets(plain)))
            run_files.write_config(self.folder, text)
            with (self.folder / provenance.ABOUT).open("ab") as file:
                file.write(run_files.json_line(provenance.about(config, resume_step or 0)))
        self._metrics = (self.folder / "metrics.jsonl").open("ab", buffering=0)
        self._failures = (self.folder / "failures.jsonl").open("ab", buffering=0)
        self._problems: list[tuple[int, Path, Exception]] = []
        # Bounded, so that a disk slower than training slows training instead of filling the memory.
        self._jobs: queue.Queue[tuple[Path, int, list[Record]] | None] = queue.Queue(maxsize=2)
        self._thread = threading.Thread(target=self._work, name="run-writer", daemon=True)
        self._thread.start()

    def metrics(self, step: int, metrics: Record) -> None:
        """Append one line of metrics; a number that is not finite becomes null."""
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        line = {"step": int(step), "time": time.time(), "metrics": numbers}
        self._append(self._metrics, step, line)

    def failure(self, record: Record) -> None:
        """Append one failed trajectory (any JSON object with its `step`)."""
        self._append(self._failures, int(record["step"]), record)

    def trajectories(self, split: str, step: int, rows: list[Record]) -> None:
        """Hand over the trajectories of one step; blocks only while two steps are still waiting."""
        self._raise_problem()
        path = self.folder / "trajectories" / split / f"{int(step)}{SUFFIX}"
        self._jobs.put((path, int(step), rows))

    def flush(self) -> None:
        """Wait until everything handed over so far is on disk, lines included.

        Raises:
            RunStopped: a write has failed.
        """
        self._jobs.join()
        self._raise_problem()
        for file in (self._metrics, self._failures):
            os.fsync(file.fileno())

    def close(self) -> None:
        """Wait until everything is on disk."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
        self._metrics.close()
        self._failures.close()
        self._raise_problem()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except RunStopped as problem:
            if error is None:
                raise
            error.add_note(str(problem))  # the first error stays the one that is seen

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is not None:
                path, step, rows = job
                self._try(path, step, partial(_write_rows, path, rows))
            self._jobs.task_done()
            if job is None:
                return

    def _append(self, file: FileIO, step: int, line: Record) -> None:
        self._raise_problem()

        def write() -> None:
            data = run_files.json_line(line)
            while data:  # unbuffered, so that nothing is left to write after an error
                data = data[file.write(data) :]

        self._try(Path(str(file.name)), step, write)
        self._raise_problem()

    def _try(self, path: Path, step: int, write: Callable[[], None]) -> None:
        try:
            write()
        # Any error at all: the thread must live on to empty the queue, or the trainer blocks on it.
        except Exception as error:
            self._problems.append((step, path, error))

    def _raise_problem(self) -> None:
        if not self._problems:
            return
        self._jobs.join()  # what still waits may be of an earlier step, and may fail as well
        step, path, error = min(self._problems, key=lambda problem: problem[0])
        safe = f"steps up to {step - 1} are recorded" if step > 0 else "no step is recorded yet"
        cure = "free space" if isinstance(error, OSError) else "correct the record"
        advice = f"{safe}; {cure} and rerun the same command to resume"
        raise RunStopped(f"could not record {path}: {error}; {advice}") from error


class Run:
    """Reads a run's folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if missing := run_files.missing_parts(self.folder):
            near = map(str, run_files.runs_near(self.folder))
            raise ValueError(
                f"{self.folder} is not a recorded run: it has no {' and no '.join(missing)}; "
                f"recorded runs near it: {', '.join(near) or 'none'}"
            )

    @cached_property
    def config(self) -> Record:
        """The configuration the run was started with."""
        path = self.folder / "config.yaml"
        with intact(path, "a later config.<n>.yaml, or the command that started the run, gives it again"):
            found: Any = OmegaConf.to_container(OmegaConf.load(path)) if path.exists() else {}
            if not isinstance(found, dict) or not isinstance(found.get("multiturn", {}), dict):
                raise TypeError("it has no groups")
            return found

    @cached_property
    def metrics(self) -> "pd.DataFrame":
        """One row per step, one column per metric; later lines of a step add to earlier ones."""
        import pandas as pd  # here, because training records runs without it

        steps: dict[int, Record] = {}
        path = self.folder / "metrics.jsonl"
        with intact(path, "delete the line that has no step and metrics"):
            for line in run_files.lines(path):
                steps.setdefault(line["step"], {}).update(line["metrics"])
            table = pd.DataFrame.from_dict(steps, orient="index", dtype=float)
        return table.rename_axis("step").sort_index()

    @cached_property
    def about(self) -> list[Record]:
        """Commit, hardware and model of each start; none in runs of older versions."""
        path = self.folder / provenance.ABOUT
        return list(run_files.lines(path)) if path.exists() else []

    @cached_property
    def failures(self) -> list[Record]:
        """The trajectories that failed, with their errors."""
        path = self.folder / "failures.jsonl"
        return list(run_files.lines(path)) if path.exists() else []

    def splits(self) -> list[str]:
        """Names of the splits with recorded trajectories."""
        return sorted({path.parent.name for path in run_files.trajectory_files(self.folder)})

    def steps(self, split: str) -> list[int]:
        """The steps at which trajectories of `split` were recorded."""
        if split not in self.splits():
            raise unknown("split", split, self.splits())
        return sorted(map(run_files.step_of, run_files.trajectory_files(self.folder, split)))

    def trajectories(self, split: str, step: int) -> list[Record]:
        """The trajectories of one step, in the order they were written.

        Raises:
            ValueError: there is no such step, or its file is damaged.
        """
        return list(self.each(split, step))

    def each(self, split: str, step: int) -> Iterator[Record]:
        """The trajectories of one step, one after another: memory does not grow with their number.

        Raises:
            ValueError: there is no such step, or its file is damaged from there on.
        """
        if step not in (steps := self.steps(split)):
            raise unknown(f"step of split {split!r}", step, steps)
        yield from run_files.records(self.folder / "trajectories" / split / f"{step}{SUFFIX}")


def to_turns(trajectories: list[Record]) -> TurnBatch:
    """The data model of recorded trajectories, one entry per turn, in their order."""
    pairs = [(episode, turn) for episode in trajectories for turn in episode["turns"]]
    last = [turn is episode["turns"][-1] for episode, turn in pairs]
    ends = {
        how: [bool(episode[how]) and end for (episode, _), end in zip(pairs, last, strict=True)]
        for how in ("terminated", "truncated")
    }
    cuts = zip(pairs, ends["truncated"], strict=True)
    return TurnBatch.from_lists(
        group=[episode["group"] for episode, _ in pairs],
        trajectory=[episode["trajectory"] for episode, _ in pairs],
        index=[turn["index"] for _, turn in pairs],
        reward=[trained_reward(turn) for _, turn in pairs],
        anchor=[turn["anchor"] for _, turn in pairs],
        value=[np.nan if turn["value"] is None else turn["value"] for _, turn in pairs],
        # As in training (Rows.turns): the limit that cut an episode is part of its task.
        next_value=[0.0 if cut and t["value"] is not None else np.nan for (_, t), cut in cuts],
        tokens=[len(turn["action_ids"]) for _, turn in pairs],
        valid=[turn["valid"] for _, turn in pairs],
        # Anchors are digests; similarity grouping compares what the policy saw.
        anchor_text=[turn.get("observation", turn["anchor"]) for _, turn in pairs],
        **ends,
    )


def _number(name: str, value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric {name!r} is not a number: {value!r}") from error
    return number if isfinite(number) else None


def _write_rows(path: Path, rows: list[Record]) -> None:
    run_files.write_atomically(path, map(run_files.json_line, rows), compress=True)
