"""`verl-multiturn doctor RUN`: is this run alive, and if not, what ended it, when, and what is left.

It reads the run folder only, so it works beside a training that hangs and after one that was killed.
"""

import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from verl_multiturn import heartbeat
from verl_multiturn.checkpoints import LATEST, check_mark
from verl_multiturn.doctor_report import Line
from verl_multiturn.doctor_setup import GB, existing
from verl_multiturn.errors import intact
from verl_multiturn.heartbeat import INTERVAL, born
from verl_multiturn.run_files import lines as json_lines
from verl_multiturn.run_files import step_of, trajectory_files

PART = "run"
STALE = 15 * INTERVAL  # seconds without a beat after which a run does not count as alive
SLOW = 5.0  # times its median that a phase may take before it is remarked
TIMERS = {"rollout": "gen", "log-probabilities": "old_log_prob", "values": "values", "advantages": "adv",
          "critic update": "update_critic", "actor update": "update_actor", "checkpoint": "save_checkpoint",
          "weight transfer": "update_weights", "validation": "testing"}  # fmt: skip


def is_run(folder: Path) -> bool:
    """Whether a folder was trained in."""
    return any((folder / name).exists() for name in (heartbeat.NAME, "metrics.jsonl", "trajectories"))


def lines(folder: Path, now: float | None = None) -> list[Line]:
    """What the folder tells, the state of the run first.

    Args:
        folder: of a run.
        now: unix seconds; None: this moment.
    """
    now = time.time() if now is None else now
    try:
        beat = heartbeat.read(folder)
    except ValueError as error:
        return [Line(PART, "FAIL", "heartbeat", f"{error}: remove it; the records do not depend on it")]
    found = [_state(folder, beat, now)]
    if beat is not None and beat["ending"] is None:
        found += _processes(beat)
        found += _read(folder / "metrics.jsonl", "pace", lambda path: _pace(path, beat, now))
    found += _records(folder)
    return [*found, *_read(folder / "failures.jsonl", "failures", _failures)]


def _read(path: Path, name: str, look: Callable[[Path], list[Line]]) -> list[Line]:
    """What a file tells; one that is damaged is a finding, and not the end of the others."""
    try:
        with intact(path, "delete the damaged line"):
            return look(path)
    except ValueError as error:
        return [Line(PART, "FAIL", name, str(error))]


def _state(folder: Path, beat: dict[str, Any] | None, now: float) -> Line:
    if beat is None:
        text = f"{folder} has no {heartbeat.NAME}: no training has begun in it (since version 0.1)"
        return Line(PART, "warn", "state", text)
    where = f"phase {beat['phase']!r} of step {beat['step']}"
    ago, ending = _span(now - beat["time"]), beat["ending"]
    if ending == "done":
        return Line(PART, "ok", "state", f"ended in order {ago} ago, at step {beat['step']}")
    if ending is not None:
        why = f": {beat['reason']}" if beat["reason"] else ""
        status = "FAIL" if ending == "stopped" else "warn"
        return Line(PART, status, "state", f"{ending} {ago} ago in {where}{why}")  # type: ignore[arg-type]
    since = _span(max(0.0, now - beat["since"]))
    if beat["host"] != socket.gethostname():
        fresh = now - beat["time"] < STALE
        text = f"{where} since {since}; last sign of life {ago} ago on {beat['host']}"
        more = "" if fresh else ": look there, its processes cannot be seen from here"
        return Line(PART, "ok" if fresh else "FAIL", "state", text + more)
    if born(beat["pid"]) != beat["born"]:
        text = (
            f"the driver (process {beat['pid']}) is gone without a word: killed, or out of memory (see "
            f"dmesg), in {where}; its last sign of life was {ago} ago, the phase had lasted "
            f"{_span(max(0.0, beat['time'] - beat['since']))}"
        )
        return Line(PART, "FAIL", "state", text)
    if now - beat["time"] > STALE:
        text = (
            f"the driver (process {beat['pid']}) is there but has given no sign of life for {ago}, in "
            f"{where}: it is stopped (SIGSTOP, a suspended machine) or cannot write to the run folder"
        )
        return Line(PART, "FAIL", "state", text)
    return Line(PART, "ok", "state", f"alive: {where} since {since}")


def _processes(beat: dict[str, Any]) -> list[Line]:
    """Which of the processes that it named are gone; those of other machines are not looked for."""
    if beat["host"] != socket.gethostname() or not beat["processes"]:
        return []
    pairs = [(name, pid) for name, pids in beat["processes"].items() for pid in pids if pid]
    gone = [f"{name} ({pid})" for name, pid in pairs if born(pid) is None]
    driver = born(beat["pid"]) == beat["born"]
    left = [f"{name} ({pid})" for name, pid in pairs if born(pid) is not None]
    if driver:
        text = f"gone: {', '.join(gone)}" if gone else f"all {len(pairs)} are there"
        return [Line(PART, "FAIL" if gone else "ok", "processes", text)]
    text = f"left of it: {', '.join(left)}: end them before you resume" if left else "none of it is left"
    return [Line(PART, "warn" if left else "ok", "processes", text)]


def _pace(path: Path, beat: dict[str, Any], now: float) -> list[Line]:
    """Whether the phase lasts longer than such phases did."""
    timer = TIMERS.get(beat["phase"])
    seconds = sorted(
        line["metrics"][f"timing_s/{timer}"]
        for line in (json_lines(path) if path.exists() else ())
        if line["metrics"].get(f"timing_s/{timer}") is not None
    )
    if not seconds:
        return []
    usual, lasts = seconds[len(seconds) // 2], now - beat["since"]
    text = f"{beat['phase']} usually takes {usual:.1f} s, this one {_span(lasts)} so far"
    slow = lasts > max(60.0, SLOW * usual)
    return [Line(PART, "warn" if slow else "ok", "pace", text)]


def _records(folder: Path) -> list[Line]:
    steps = sorted(map(step_of, trajectory_files(folder, "train")))
    tracker, status = folder / "checkpoints" / LATEST, "ok"
    text = f"steps up to {steps[-1]} are recorded" if steps else "no step is recorded"
    if tracker.exists():
        try:
            check_mark(tracker.parent)
            step = tracker.read_text(encoding="utf-8").strip()
            text += f"; the last checkpoint is of step {step}: the same command resumes after it"
        except ValueError as error:
            text, status = f"{text}; {error}", "FAIL"
    else:
        text += "; there is no checkpoint: the same command begins anew, and moves these aside"
    disk = shutil.disk_usage(existing(folder)).free / GB
    return [
        Line(PART, status, "records", text),  # type: ignore[arg-type]
        Line(PART, "ok" if disk >= 1 else "FAIL", "disk", f"{disk:.1f} GB free"),
    ]


def _failures(path: Path) -> list[Line]:
    """How many trajectories were lost, the most frequent error, and the last one that got stuck."""
    if not path.exists() or not path.stat().st_size:
        return [Line(PART, "ok", "failures", "no trajectory was lost")]
    count, kinds, stuck = 0, Counter[str](), None
    for line in json_lines(path):
        count += 1
        kinds[str(line.get("error"))[:200]] += 1
        stuck = line if line.get("waiting") else stuck
    (error, times), *_ = kinds.most_common(1)
    text = f"{count} trajectories were lost, {times} by: {error}"
    if stuck is not None:
        text += (
            f"; the last one that waited: task {stuck['task']}, turn {stuck['turn']}, for the "
            f"{stuck['waiting']}, {stuck['waiting_seconds']:.0f} s of {stuck['seconds']:.0f}"
        )
    return [Line(PART, "warn", "failures", text)]


def _span(seconds: float) -> str:
    """A time in words; long ones with the date they began."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    text = str(timedelta(seconds=round(seconds)))
    if seconds > 86400:
        text += f" (since {datetime.fromtimestamp(time.time() - seconds, UTC):%Y-%m-%d %H:%M} UTC)"
    return text


def folder_of(name: str | None) -> Path | None:
    """The run folder that the argument of `doctor` names; None: it is a recipe's name, or nothing."""
    if name is None:
        return None
    folder = Path(name).expanduser()
    if is_run(folder):
        return folder
    if os.sep in name or folder.is_dir():
        raise ValueError(f"{folder} is no run: it has no {heartbeat.NAME}, metrics.jsonl or trajectories")
    return None
