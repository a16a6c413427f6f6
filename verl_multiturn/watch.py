"""The processes of a run as Ray knows them, on every node: actors that must live as long as it does."""

import os
from pathlib import Path
from typing import Any

from verl_multiturn.heartbeat import born

DAEMONS = ("raylet", "gcs_server")  # Ray's own, as the kernel names them


class RayWatch:
    """Actors that live now, and Ray's own processes beside this one.

    A rollout worker that dies leaves its prompts "running" for ever, and verl's sampler would wait for
    them as long: nothing else in the driver hears of it.
    """

    def __init__(self) -> None:
        # Those that are still being made have no process id yet: `lost` learns it.
        self._actors = {name: actor for name, actor in _actors().items() if actor["State"] != "DEAD"}
        self._daemons = daemons()

    @property
    def processes(self) -> dict[str, list[int]]:
        """Process ids by the class of the actor, or the name of Ray's own."""
        found: dict[str, list[int]] = {}
        for actor in self._actors.values():
            found.setdefault(actor["ActorClassName"], []).append(actor["Pid"])
        for pid, (name, _) in self._daemons.items():
            found.setdefault(name, []).append(pid)
        return found

    def lost(self) -> str | None:
        """The first one that is gone."""
        # Ray's own first: without them the question for its actors would wait.
        for pid, (name, since) in self._daemons.items():
            if born(pid) != since:
                return f"Ray's {name} (process {pid}) is gone"
        now = _actors()
        for name, actor in self._actors.items():
            if name not in now or now[name]["State"] == "DEAD":
                where = actor["Address"]["IPAddress"]
                return f"the process of {actor['ActorClassName']} (process {actor['Pid']} on {where}) is gone"
        self._actors = {name: now[name] for name in self._actors}
        return None


def _actors() -> dict[str, dict[str, Any]]:
    # Ray's public list of actors needs its dashboard, which a run does without.
    import ray
    from ray._private import state

    # A cluster may serve other jobs, too.
    found: dict[str, dict[str, Any]] = state.actors(job_id=ray.get_runtime_context().job_id)
    return found


def daemons() -> dict[int, tuple[str, int | None]]:
    """Ray's own processes that this one started, or was started by: {pid: (name, when it began)}."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text(encoding="utf-8")
        except OSError:  # it has ended meanwhile
            continue
        pid, name = int(folder.name), text.partition("(")[2].rpartition(")")[0]
        parent = int(text.rpartition(")")[2].split()[1])
        if name in DAEMONS and (parent == os.getpid() or pid == os.getppid()):
            found[pid] = name, born(pid)
    return found
