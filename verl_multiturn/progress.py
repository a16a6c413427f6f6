"""One line per training step and per validation: what it did, how fast, how long still."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TextIO


class Progress:
    """Writes to a stream; the estimate uses the median of the last steps, so a slow first one is forgotten.

    Args:
        total: steps of the run.
        done: steps done before this process started.
    """

    def __init__(self, total: int, done: int = 0, stream: TextIO | None = None) -> None:
        self.total, self.done, self.stream = total, done, stream or sys.stdout
        self._last, self._recent = time.perf_counter(), list[float]()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A training step has ended."""
        now = time.perf_counter()
        since, self._last = now - self._last, now
        # verl reports a step after its validation, which restarts the clock.
        self._recent = [*self._recent[-8:], float(metrics.get("timing_s/step", since))]
        pace = sorted(self._recent)[len(self._recent) // 2]
        left = timedelta(seconds=round(pace * (self.total - step)))

        def of(name: str) -> float:
            return float(metrics.get(f"multiturn/{name}/mean", float("nan")))

        seconds = float(metrics.get("timing_s/step", self._recent[-1]))
        rate = of("turns") * of("trajectories") / seconds
        failed = f"  failed {of('failed_trajectories'):.0f}" if of("failed_trajectories") > 0 else ""
        self._write(
            f"step {step}/{self.total}  success {of('success'):.3f}  return {of('return'):.3f}  "
            f"turns {of('turns'):.1f}  valid {of('valid'):.2f}  {rate:.0f} turns/s  {seconds:.1f} s  "
            f"ETA {left}{failed}"
        )

    def validation(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """A validation has ended."""
        if "val/success" not in metrics:
            self._write(f"validation at step {step}: no episode survived")
            return
        parts = [name.split("/") for name in metrics]
        also = [one[1] for one in parts if one[0] == "val" and one[2:] == ["success"] and one[1] != "success"]
        more = "".join(f", {name} {metrics[f'val/{name}/success']:.3f}" for name in also)
        self._write(
            f"validation at step {step}: success {metrics['val/success']:.3f} "
            f"[{metrics['val/success_low']:.3f}, {metrics['val/success_high']:.3f}] "
            f"on {metrics['val/episodes']:.0f} episodes{more}  {seconds:.1f} s"
        )
        self._last = time.perf_counter()

    def note(self, text: str) -> None:
        """Anything else worth a line."""
        self._write(text)

    def _write(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()
