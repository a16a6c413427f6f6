"""Where a run was made: commit, machine and model of each start, one line of about.jsonl.

    {"step": the step it continued from, "time": unix seconds, "version": of this package,
     "commit": of the checkout, or "unknown", "hardware": in words, "model": name or "small"}

A run that was resumed elsewhere has several lines; runs of older versions have none.
"""

import os
import platform
import re
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_multiturn import __version__

ABOUT = "about.jsonl"
UNKNOWN = "unknown"
ROOT = Path(__file__).parents[1]


def about(config: Any, step: int = 0) -> dict[str, Any]:
    """The line of a start.

    Args:
        config: the run's (nested dict or OmegaConf).
        step: of the checkpoint it continues from.
    """
    config = OmegaConf.create(config)
    device = OmegaConf.select(config, "trainer.device") or "cpu"
    return {
        "step": step,
        "time": time.time(),
        "version": __version__,
        "commit": commit(),
        "hardware": machine() if device == "cpu" else gpus() or machine(),
        "model": model_name(config),
    }


def commit(root: Path = ROOT) -> str:
    """Of the checkout in `root`, and whether its files differ from it; "unknown" outside of one."""
    if not (root / ".git").exists():  # an installed package may lie inside another project's checkout
        return UNKNOWN
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True)
    except FileNotFoundError:
        return UNKNOWN
    return head.stdout.strip() + (" with changes" if changed.stdout.strip() else "") or UNKNOWN


def machine() -> str:
    """This machine in words, without its name."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    memory = ""
    with suppress(ValueError, OSError):
        memory = f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    return f"{os.cpu_count()} CPUs ({cpu}){memory}, {platform.system()}, Python {platform.python_version()}"


def gpus() -> str:
    """What nvidia-smi lists, such as "2 x NVIDIA A100 80GB"; "" where there is none."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    names = answer.stdout.strip().splitlines()
    return ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))


def model_name(config: Any) -> str:
    """The run's model, without where it lies; "small" for the one that hardware=cpu builds."""
    path = OmegaConf.select(OmegaConf.create(config), "actor_rollout_ref.model.path")
    name = str(path).rstrip("/").rpartition("/")[2] if path else UNKNOWN
    # What `small_model.build` calls its folders: environment and hash.
    return "small" if re.fullmatch(r".+-[0-9a-f]{16}", name) else name
