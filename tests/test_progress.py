"""The progress lines: rate, estimate, and what they say where numbers are absent."""

import io

import pytest

from verl_multiturn import progress
from verl_multiturn.progress import Progress

NUMBERS = {
    f"multiturn/{name}/mean": value
    for name, value in {
        "success": 0.5, "return": 0.25, "turns": 4.0, "valid": 0.875, "trajectories": 64.0,
    }.items()
}  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(progress.time, "perf_counter", lambda: Clock.now)
    return Clock


def test_a_step(clock):
    out = io.StringIO()
    line = Progress(10, stream=out)
    clock.now += 4
    line.step(1, NUMBERS | {"timing_s/step": 2.0})
    assert out.getvalue() == (
        "step 1/10  success 0.500  return 0.250  turns 4.0  valid 0.88  128 turns/s  2.0 s  ETA 0:00:18\n"
    )


def test_the_estimate_forgets_a_slow_first_step_and_does_not_count_validation(clock):
    out = io.StringIO()
    line = Progress(20, done=10, stream=out)
    for step, seconds in zip(range(11, 16), (100, 2, 2, 2, 2), strict=True):
        clock.now += seconds
        line.step(step, NUMBERS)
    clock.now += 500
    line.validation(15, {"val/success": 0.5, "val/success_low": 0.4, "val/success_high": 0.6,
                         "val/episodes": 64.0}, 500.0)  # fmt: skip
    clock.now += 2
    line.step(16, NUMBERS)
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("ETA 0:15:00")
    assert lines[-1].endswith("2.0 s  ETA 0:00:08")
    assert lines[-2] == "validation at step 15: success 0.500 [0.400, 0.600] on 64 episodes  500.0 s"


def test_failed_trajectories_and_missing_numbers(clock):
    out = io.StringIO()
    line = Progress(3, stream=out)
    clock.now += 1
    line.step(1, NUMBERS | {"multiturn/failed_trajectories/mean": 3.0})
    line.step(2, {"timing_s/step": 1.0})
    line.validation(2, {"val/episodes": 0.0}, 1.0)
    line.note("saved")
    first, second, *rest = out.getvalue().splitlines()
    assert first.endswith("failed 3") and "success nan" in second and "failed" not in second
    assert rest == ["validation at step 2: no episode survived", "saved"]


def test_more_panels_are_named_after_the_own_one():
    """`multiturn.also`: their success; a task type of the run's own panel is no panel."""
    out = io.StringIO()
    own = {"val/success": 0.5, "val/success_low": 0.4, "val/success_high": 0.6, "val/episodes": 64.0}
    types = {"val/success/success": 1.0, "val/success/near": 1.0, "val-core/lake/reward": 0.1, "step": 2.0}
    more = {"val/train/success": 0.75, "val/train/success/near": 1.0, "val/unseen/success": 0.25}
    Progress(3, stream=out).validation(2, own | types | more, 1.0)
    assert "[0.400, 0.600] on 64 episodes, train 0.750, unseen 0.250  1.0 s" in out.getvalue()
