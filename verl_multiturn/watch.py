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
    """Ray's own processes of this machine that the run lives by: {pid: (name, when it began)}.

    They were started by this process, or this is an actor: then its raylet, and who was started beside that.
    """
    found: dict[int, tuple[str, int]] = {}  # pid: name, parent
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text(encoding="utf-8")
        except OSError:  # it has ended meanwhile
            continue
        name, rest = text.partition("(")[2].rpartition(")")[0], text.rpartition(")")[2].split()
        found[int(folder.name)] = name, int(rest[1])
    above = os.getppid()
    name, parent = found.get(above, ("", 0))
    # Those of all clusters that were started in the background have process 1 as their parent.
    parents = {os.getpid()} | ({parent} - {1} if name == DAEMONS[0] else set())
    mine = {pid for pid, (_, over) in found.items() if over in parents or pid == above}
    return {pid: (found[pid][0], born(pid)) for pid in mine if found[pid][0] in DAEMONS}
