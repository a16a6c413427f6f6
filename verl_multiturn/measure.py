"""What every environment costs and how hard it is, measured here: `verl-multiturn measure-envs`.

Each one is measured in a process of its own, with a time limit: one that hangs or crashes is named, with
what it was doing, and the others go on. The numbers go to a JSON file, which `verl-multiturn envs` reads,
and into a table (`measure_table`).
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from verl_multiturn.env import Env
from verl_multiturn.load import classes, list_envs, load_class
from verl_multiturn.measure_table import markdown
from verl_multiturn.provenance import commit, machine

Row = dict[str, Any]
BUSY = 0.5  # load average before the start above which the times are not to be trusted

SUMS = [  # rows in the form of SkyRL's and of verl's data sets
    {
        "prompt": [{"role": "user", "content": f"What is {7 * n} + {5 * n}? End with #### and the number."}],
        "data_source": "openai/gsm8k",
        "reward_spec": {"ground_truth": str(12 * n)},
        "reward_model": {"ground_truth": str(12 * n)},
    }
    for n in range(64)
]
# Environments with several faces, or that cannot be made without arguments: variant -> keywords. One
# that is not named here is measured as it is made by default.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "alfworld": {"small": {"data": "small"}, "full": {"data": "full"}},
    "gem": {"GuessTheNumber": {}, "Sokoban": {"id": "game:Sokoban-v0-easy"}},
    "gymnasium": {"FrozenLake": {}, "MiniGrid": {"id": "minigrid:MiniGrid-Empty-5x5-v0"}},
    "scienceworld": {"find": {"tasks": "find-non-living-thing", "max_turns": 20}},  # all 30 take many minutes
    "skyrl_gym": {"gsm8k": {"id": "gsm8k", "rows": SUMS}},
    "textarena": {"FrozenLake": {}, "Sokoban": {"id": "Sokoban-v0"}},
    "twenty_questions": {"157 words": {}, "ten words": {"words": 10, "questions": "listed"}},
    "textworld": {kind: {"kind": kind, "games": 8} for kind in ("coin", "treasure", "cooking")},
}


class Variant(NamedTuple):
    """What is measured: a name for `make`, a word for its keywords ("" for none), the keywords."""

    env: str
    variant: str
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.env} ({self.variant})" if self.variant else self.env


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        episodes: of each policy, at most.
        seconds: for each policy, for snapshots and for memory, at most.
        limit: seconds for an environment as a whole; then it is stopped.
    """

    episodes: int = 256
    seconds: float = 20
    limit: float = 300


def chosen(names: Sequence[str]) -> list[Variant]:
    """The variants of these environments; of all that are found, where none is named.

    Raises:
        ValueError: an unknown name.
    """
    for name in names:
        load_class(name, Env)
    return [
        Variant(env, variant, kwargs)
        for name in names or _all()
        for env, (variant, kwargs) in ((name, one) for one in VARIANTS.get(name, {"": {}}).items())
    ]


def _all() -> list[str]:
    found: list[str] = []
    for file in list_envs():
        try:
            found += classes(file, Env)
        # A file that cannot be imported is measured too: as what it raises.
        except (Exception, SystemExit):
            found.append(file)
    return found


def measure(variants: Sequence[Variant], plan: Plan, tell: Callable[[str], None]) -> list[Row]:
    """Measure one after another; `tell` hears a line before and after each."""
    rows, where = [], _where()
    if (load := where["load"]) > BUSY:
        tell(f"other work keeps this machine busy (load {load}): times will be too long")
    for n, one in enumerate(variants, start=1):
        tell(f"[{n}/{len(variants)}] {one} ...")
        start = time.perf_counter()
        row = _measure(one, plan)
        kwargs = {key: _short(value) for key, value in one.kwargs.items()}
        rows.append({"name": one.env, "variant": one.variant, "kwargs": kwargs, **row, **where})
        tell(f"[{n}/{len(variants)}] {one}: {summary(row)} ({time.perf_counter() - start:.0f} s)")
    return rows


def summary(row: Row) -> str:
    """The row in a few words."""
    said = [f"{who} {100 * row[who]['success']:.1f} %" for who in ("random", "expert") if row.get(who)]
    said += [f"{row['steps_per_second']:,.0f} steps/s"] if row.get("steps_per_second") else []
    check = row.get("check")
    said += [f"check_env {'ok' if check['ok'] else '; '.join(check['failures'])}"] if check else []
    return ", ".join([*said, *([row["problem"]] if row.get("problem") else [])])


def save(rows: Sequence[Row], table: Path, speeds: Path, whole: bool = True) -> None:
    """Write the numbers and their table; unless `whole`, rows of other environments that are there stay.

    Raises:
        ValueError: the file of numbers holds something else.
    """
    kept: list[Row] = []
    if not whole and speeds.exists():
        try:
            new = {row["name"] for row in rows}
            kept = [row for row in json.loads(speeds.read_text("utf-8"))["rows"] if row["name"] not in new]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{speeds} does not hold measured rows ({error}): name another file") from None
    found = sorted([*kept, *rows], key=lambda row: (row["name"], row["variant"]))
    for path, text in ((speeds, json.dumps({"rows": found}, indent=1) + "\n"), (table, markdown(found))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _measure(one: Variant, plan: Plan) -> Row:
    job = {"env": one.env, "kwargs": one.kwargs, "episodes": plan.episodes, "seconds": plan.seconds}
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "found.json", Path(folder) / "errors"
        with errors.open("wb") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-m", "verl_multiturn.measure_one", str(out)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            child.communicate(json.dumps(job).encode(), timeout=plan.limit)
            ended = f"ended with code {child.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"took longer than {plan.limit:g} s"
        finally:
            with suppress(ProcessLookupError):  # a simulator it started lives in its group, and ends with it
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        row: Row = json.loads(out.read_text("utf-8")) if out.exists() else {"doing": "start"}
        if (doing := row.pop("doing")) and "problem" not in row:
            said = errors.read_text("utf-8", "replace").strip().splitlines()[-1:]
            row["problem"] = f"{ended}, at: {doing}" + "".join(f" ({line})" for line in said)
        elif "problem" in row:
            row["problem"] += f", at: {doing}"
    return row


def _short(value: Any) -> Any:
    """A keyword as a table shows it."""
    return f"{len(value)} given here" if isinstance(value, list) else value


def _where() -> Row:
    where = {"command": command(), "commit": commit(), "machine": machine()}
    return where | {"load": round(os.getloadavg()[0], 1)}


def command() -> str:
    """What the user typed."""
    return f"verl-multiturn {shlex.join(sys.argv[1:])}"


if __name__ == "__main__":
    from verl_multiturn.cli import app

    sys.argv.insert(1, "measure-envs")  # the command that the rows will name
    app()
