"""What a step measured, on disk so that a kill at any instant leaves neither a gap nor a double.

A mixin of `MultiTurnMixin`. verl marks a checkpoint as the one to resume from, then transfers weights and
validates, and only then counts its metrics. So here a step with a checkpoint is recorded twice: what is known
of it before the mark, and afterwards only what was not known then. Who resumes at the mark finds all but a
few timings; a validation that is missing is done first.
"""

import copy
import time
from pathlib import Path
from typing import Any

from verl_multiturn import run_files
from verl_multiturn.collapse import Detector
from verl_multiturn.errors import RunStopped
from verl_multiturn.progress import Progress
from verl_multiturn.runs import Run, RunWriter


class RecordedSteps:
    """Attributes of the trainer that it is mixed into are declared here, for the reader."""

    config: Any
    settings: Any
    global_steps: int
    total_training_steps: int
    steps_per_epoch: int
    timing_raw: dict[str, float]
    writer: RunWriter
    progress: Progress
    detectors: list[Detector]
    _rollout_moe_lb_metrics_accumulator: Any
    _keep_good: Any

    _taken: tuple[Any, dict[str, Any], float] | None = None  # batch, metrics and beginning of this step
    _so_far: dict[str, Any] = {}  # recorded of this step already

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        """verl's; what it measured is kept for the checkpoint."""
        began, self._so_far = time.perf_counter(), {}
        batch = super().step(metrics, timing_raw)  # type: ignore[misc]
        self._taken = batch, metrics, began
        return batch

    def _save_checkpoint(self) -> None:
        """verl's, which ends with the mark: what the step recorded is on disk before.

        Raises:
            RunStopped: it could not be recorded; the checkpoint before stays the one to resume from.
        """
        if self._taken is not None:
            batch, metrics, began = self._taken
            known, metrics = self._rollout_moe_lb_metrics_accumulator, dict(metrics)
            # verl counts into it, and will once more at the end of the step.
            self._rollout_moe_lb_metrics_accumulator = copy.deepcopy(known)
            timing = {**self.timing_raw, "step": time.perf_counter() - began}
            epoch = (self.global_steps - 1) // self.steps_per_epoch
            self._so_far = self._measured(batch, metrics, timing, self.global_steps, epoch)
            self._rollout_moe_lb_metrics_accumulator = known
            self.writer.metrics(self.global_steps, self._so_far)
        self.writer.flush()
        super()._save_checkpoint()  # type: ignore[misc]

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        numbers = self._measured(batch, metrics, timing_raw, global_steps, epoch)
        before, self._taken, self._so_far = self._so_far, None, {}
        new = {name: x for name, x in numbers.items() if name not in before or before[name] != x}
        self.writer.metrics(global_steps, new)
        self.progress.step(global_steps, numbers)
        for detector in self.detectors:
            reason = detector.update(global_steps, numbers)
            last = self._keep_good(detector)
            if reason:
                raise RunStopped(f"{reason} {last}")
            if lacking := detector.missing:
                rule, names = f"multiturn.collapse.{detector.name}", ", ".join(lacking)
                self.progress.note(f"{rule} has nothing to go by: no {names} came")

    def _measured(
        self, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> dict[str, Any]:
        """verl's metrics, added to `metrics`; returns those that are numbers."""
        if batch.keys:
            super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)  # type: ignore[misc]
        else:  # the filter kept nothing: verl would fail on an empty batch
            metrics |= {"training/global_step": global_steps, "training/epoch": epoch}
            metrics |= {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
        # verl counts refilled groups by their reward in a dict, for a table of its own.
        return {name: value for name, value in metrics.items() if not isinstance(value, dict)}

    def _recorded_metrics(self) -> list[tuple[int, dict[str, float]]]:
        """What a resumed run measured before its checkpoint."""
        averages = self.settings.information.ema is not None
        if not (self.detectors or averages) or not self.global_steps:
            return []
        table = Run(self.settings.run).metrics
        return [(int(step), row.dropna().to_dict()) for step, row in table.iterrows()]

    def _complete_validation(self) -> None:
        """Of the step that is resumed from: validate first where it is missing, and not again where not."""
        trainer, step = self.config.trainer, self.global_steps
        if not step or trainer.val_only:
            return
        lines = run_files.lines(Path(self.settings.run) / "metrics.jsonl")
        done = any(line["step"] == step and "val/success" in line["metrics"] for line in lines)
        last = step >= self.total_training_steps
        due = trainer.test_freq > 0 and (last or step % trainer.test_freq == 0)
        if done and trainer.val_before_train:
            self.progress.note(f"the validation at step {step} is recorded, it is not repeated")
        trainer.val_before_train = not done and (due or bool(trainer.val_before_train))
