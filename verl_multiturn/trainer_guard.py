"""What keeps a run honest about its end: heartbeat, lost processes, a rollout that stands still, a full disk.

`GuardedRun` is a mixin of `MultiTurnMixin`: it overrides `init` and `_save_checkpoint`, and offers the rest
to `fit` and to main.py. `ResumedRun` stands next to verl's trainer, behind the mixins that load parts of
their own.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_multiturn import checkpoints, heartbeat
from verl_multiturn import metrics as run_metrics
from verl_multiturn.checkpoints import EARLIER
from verl_multiturn.collapse import Detector
from verl_multiturn.errors import RunStopped, cause_of
from verl_multiturn.heartbeat import RESUMES, Heartbeat
from verl_multiturn.progress import Progress
from verl_multiturn.watch import RayWatch

# Methods of verl's trainer, and how the phase is called from there on, and while they run.
BEGINS = {"on_step_begin": "rollout", "_compute_metrics": "metrics"}
PHASES = {
    "_compute_old_log_prob": "log-probabilities",
    "_compute_ref_log_prob": "log-probabilities of the reference",
    "_compute_values": "values",
    "_compute_advantage": "advantages",
    "_update_critic": "critic update",
    "_update_actor": "actor update",
    "_save_checkpoint": "checkpoint",
    "on_step_end": "weight transfer",
    "_validate": "validation",
}
MARGIN = 60.0  # seconds: an episode that reaches its time-out needs some to be given up


class GuardedRun:
    """Attributes of the trainer that it is mixed into are declared here, for the reader."""

    config: Any
    settings: Any
    replay_buffer: Any
    use_critic: bool
    global_steps: int
    progress: Progress
    heart: Heartbeat
    _unequal_said = False

    def init(self) -> None:
        """verl's `init`, with signs of life from its beginning."""
        self._before = self._last_words()
        self.heart.start()
        try:
            super().init()  # type: ignore[misc]
        except BaseException as error:
            self.close(error)
            raise

    def close(self, error: BaseException) -> None:
        """The heartbeat's last word, where nothing else has had it: what ended the run, whenever that was."""
        cause = cause_of(error)
        if isinstance(cause, RunStopped):
            self.heart.close("stopped", str(cause))
        elif isinstance(cause, Exception):
            self.heart.close("stopped", f"{type(cause).__name__}: {cause}"[:1000])
        else:
            self.heart.close("interrupted")

    def _last_words(self) -> str | None:
        """What a process that trained here before did not say itself."""
        try:
            beat = heartbeat.read(self.settings.run)
        except ValueError as error:
            return str(error)
        if beat is None or beat["ending"] is not None:
            return None
        return (
            f"the process {beat['pid']} that trained here before ended without a word in phase "
            f"{beat['phase']!r} of step {beat['step']}"
        )

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Signs of life and the watch over processes for the time of the training."""
        import ray

        if self._before is not None:
            self.progress.note(self._before)
        for name, phase in PHASES.items():
            setattr(self, name, self.heart.during(phase, self._step, getattr(self, name)))
        for name, phase in BEGINS.items():
            setattr(self, name, self.heart.begins(phase, self._step, getattr(self, name)))
        buffer = self.replay_buffer
        buffer._wait_for_next_poll = self._impatient(buffer._wait_for_next_poll)
        try:
            if ray.is_initialized():
                self.heart.watch(RayWatch())
            yield
        except BaseException as error:
            # A call to a process that has died fails with Ray's own story; this is the cause.
            failed = isinstance(error, Exception) and not isinstance(error, RunStopped)
            if failed and (problem := self.heart.explain()):
                self.heart.close("stopped", problem)
                raise self.heart.stopped() from error
            self.close(error)
            raise
        self.heart.close("done")

    def _save_checkpoint(self) -> None:
        """verl's, if there is room for it."""
        folder = Path(self.config.trainer.default_local_dir)
        checkpoints.check_room(folder, self.config.actor_rollout_ref.model.path, 1 + self.use_critic)
        checkpoints.clear(folder, self.global_steps)
        super()._save_checkpoint()  # type: ignore[misc]

    def _keep_best(self, metrics: dict[str, Any]) -> None:
        """After a validation: verl has saved this step before."""
        success = metrics.get("val/success")
        folder = Path(self.config.trainer.default_local_dir)
        if success is not None and checkpoints.keep_best(folder, self.global_steps, float(success)):
            self.progress.note(f"best so far: success {success:.3f}, kept in {folder / checkpoints.BEST}")

    def _keep_good(self, detector: Detector) -> str:
        """Keep the last checkpoint from before a collapse as soon as it shows; says which one it is."""
        folder = Path(self.config.trainer.default_local_dir)
        if (kept := checkpoints.keep_good(folder, detector.name, detector.since)) is not None:
            self.progress.note(
                f"multiturn.collapse.{detector.name} holds since step {detector.since}: kept {kept}"
            )
        return checkpoints.last_good(folder, detector.name, detector.since)

    def _check_groups(self, rows: Any, members: dict[str, list[Any]], metrics: dict[str, Any]) -> None:
        """Groups that lost members, and those whose members did not start alike."""
        starts, n = rows.starts(), self.config.actor_rollout_ref.rollout.n
        sizes, counts = [len(one) for one in members.values()], [len(one) for one in starts.values()]
        metrics |= run_metrics.of_integrity(sizes, n, counts)
        unequal = [uid for uid, shown in starts.items() if len(shown) > 1]
        if unequal and not self._unequal_said:
            self._unequal_said = True
            self.progress.note(
                f"step {self.global_steps}: the members of {len(unequal)} of {len(starts)} groups (first: "
                f"{unequal[0]}) began with different observations: {self.settings.env} does not reset by its "
                "seed alone, and comparing them is unfair (verl-multiturn check-env says more)"
            )

    def _step(self) -> int:
        return self.global_steps

    def _impatient(self, wait: Callable[[str, float], float]) -> Callable[[str, float], float]:
        """verl's sampler waits for ever; here it looks at the processes, and at whether anything ends."""
        longest = self.settings.episode_timeout + MARGIN
        seen, since = -1, time.monotonic()

        def waiting(partition_id: str, last_debug_time: float) -> float:
            nonlocal seen, since
            self.heart.check()
            buffer = self.replay_buffer
            ended = [buffer.partitions, buffer.finished_keys, buffer.failure_keys]
            count = sum(len(one[partition_id]) for one in ended)
            if count != seen:
                seen, since = count, time.monotonic()
            if time.monotonic() - since > longest:
                raise RunStopped(
                    f"step {self.global_steps}: no trajectory has ended for {longest:.0f} s, longer than "
                    f"multiturn.episode_timeout={self.settings.episode_timeout:g} allows: a rollout worker "
                    f"or the LLM server stands still; {RESUMES}"
                )
            return wait(partition_id, last_debug_time)

        return waiting


class ResumedRun:
    """Reads verl's part of a checkpoint."""

    config: Any
    global_steps: int

    def _load_checkpoint(self) -> None:
        """verl's; a checkpoint that it cannot read is named, with what to do."""
        try:
            super()._load_checkpoint()  # type: ignore[misc]
        # verl and torch raise whatever a damaged file makes their parts raise, some of it in other processes.
        except Exception as error:
            if not self.global_steps:  # nothing was to be read
                raise
            why = (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
            raise RunStopped(f"the checkpoint {self._resumed()} cannot be read ({why}): {EARLIER}") from error

    def _checkpoint(self, step: int | str) -> Path:
        return Path(self.config.trainer.default_local_dir) / f"global_step_{step}"

    def _resumed(self) -> Path:
        """What this run goes on from."""
        given, mode = self.config.trainer.resume_from_path, self.config.trainer.resume_mode
        return Path(given) if mode == "resume_path" else self._checkpoint(self.global_steps)
