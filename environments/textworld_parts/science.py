"""ScienceWorld's simulator in a Java machine of its own, and its list of tasks.

The Java machine runs with a constant identity hash (-XX:hashCode=2): the simulator keeps objects in hash
sets, and with Java's random hashes the same task shows its objects in another order each time. One machine
holds one simulator: two would share counters and change each other's texts.
"""

import weakref
from functools import cache
from typing import Any

from verl_multiturn.env import derive_seed
from verl_multiturn.errors import unknown

# Variations of each task for training, development and test (scienceworld 1.2.3): in this order, numbered
# from 0 through all three.
TASKS: dict[str, tuple[int, int, int]] = {
    "boil": (14, 7, 9),
    "melt": (14, 7, 9),
    "freeze": (14, 7, 9),
    "change-the-state-of-matter-of": (14, 7, 9),
    "use-thermometer": (270, 135, 135),
    "measure-melting-point-known-substance": (218, 109, 109),
    "measure-melting-point-unknown-substance": (150, 75, 75),
    "power-component": (10, 5, 5),
    "power-component-renewable-vs-nonrenewable-energy": (10, 5, 5),
    "test-conductivity": (450, 225, 225),
    "test-conductivity-of-unknown-substances": (300, 150, 150),
    "find-living-thing": (150, 75, 75),
    "find-non-living-thing": (150, 75, 75),
    "find-plant": (150, 75, 75),
    "find-animal": (150, 75, 75),
    "grow-plant": (62, 31, 33),
    "grow-fruit": (62, 31, 33),
    "chemistry-mix": (16, 8, 8),
    "chemistry-mix-paint-secondary-color": (18, 9, 9),
    "chemistry-mix-paint-tertiary-color": (18, 9, 9),
    "lifespan-longest-lived": (62, 31, 32),
    "lifespan-shortest-lived": (62, 31, 32),
    "lifespan-longest-lived-then-shortest-lived": (62, 31, 32),
    "identify-life-stages-1": (6, 3, 5),
    "identify-life-stages-2": (4, 2, 4),
    "inclined-plane-determine-angle": (84, 42, 42),
    "inclined-plane-friction-named-surfaces": (692, 346, 348),
    "inclined-plane-friction-unnamed-surfaces": (80, 40, 42),
    "mendelian-genetics-known-plant": (60, 30, 30),
    "mendelian-genetics-unknown-plant": (240, 120, 120),
}
SPLITS = {"train": 0, "dev": 1, "val": 1, "test": 2}
SIMPLIFICATIONS = (
    "easy",
    "noElectricalAction",
    "openContainers",
    "openDoors",
    "selfWateringFlowerPots",
    "teleportAction",
)
IDLE = 2  # Java machines kept for the next environment of this process: each start takes 2 s
JAVA = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2"]
SCRAMBLED = 0x5DEECE66D  # java.util.Random.setSeed keeps seed ^ this


@cache
def ids(split: str, tasks: tuple[str, ...]) -> list[str]:
    """The ids "<task>/<variation>" of a split, the tasks mixed in an order that never changes.

    Raises:
        ValueError: no such split.
    """
    if split not in SPLITS:
        raise unknown("split of scienceworld", split, SPLITS)
    place = SPLITS[split]
    found = []
    for task in tasks:
        first = sum(TASKS[task][:place])
        found += [f"{task}/{number}" for number in range(first, first + TASKS[task][place])]
    return sorted(found, key=lambda id: derive_seed("scienceworld", id))


def check_tasks(tasks: tuple[str, ...], simplifications: tuple[str, ...]) -> None:
    """Raise ValueError for an unknown task or simplification, or two that exclude each other."""
    for task in tasks:
        if task not in TASKS:
            raise unknown("task of scienceworld", task, TASKS)
    for name in simplifications:
        if name not in SIMPLIFICATIONS:
            raise unknown("simplification of scienceworld", name, SIMPLIFICATIONS)
    electric = [task for task in tasks if "power-component" in task or "conductivity" in task]
    if electric and "noElectricalAction" in simplifications:
        raise ValueError(f"noElectricalAction makes {', '.join(electric)} impossible: name other tasks")


def split_id(id: str) -> tuple[str, int]:
    """Task and variation of an id.

    Raises:
        ValueError: it names none.
    """
    task, _, number = id.partition("/")
    if task not in TASKS:
        raise unknown("task of scienceworld", task, TASKS, 'An id is "<task>/<variation>".')
    if not number.isdecimal() or int(number) >= sum(TASKS[task]):
        raise ValueError(f"no variation {number!r} of {task}: 0 to {sum(TASKS[task]) - 1}")
    return task, int(number)


_idle: list["Simulator"] = []


def borrow() -> "Simulator":
    """A simulator that another environment has left, else a new one."""
    return _idle.pop() if _idle else Simulator()


def leave(simulator: "Simulator") -> None:
    """Keep a simulator for the next `borrow`; end it if enough are kept."""
    if len(_idle) < IDLE:
        _idle.append(simulator)
    else:
        simulator.close()


class Simulator:
    """One simulator in a Java machine, which ends with this object or this process.

    Raises:
        RuntimeError: Java does not start.
    """

    def __init__(self) -> None:
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
        from scienceworld.constants import BASEPATH, JAR_PATH

        try:
            port, process = launch_gateway(
                classpath=JAR_PATH, die_on_exit=True, cwd=BASEPATH, javaopts=JAVA, return_proc=True
            )
        except Exception as error:  # py4j lets through whatever the start of a process raises
            raise RuntimeError(
                f"Java did not start ScienceWorld (it needs Java 11 or newer, see java -version): {error}"
            ) from error
        parameters = GatewayParameters(port=port, auto_field=True)
        gateway = JavaGateway(gateway_parameters=parameters, java_process=process)
        self.pid: int = process.pid
        self._api: Any = gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
        self.close = weakref.finalize(self, _stop, gateway, process)
        self._io: Any = gateway.jvm.java.io
        self._random: Any = getattr(getattr(gateway.jvm.scala.util, "Random$"), "MODULE$")

    def load(self, task: str, variation: int, simplifications: str, plan: bool = False) -> None:
        """Begin a variation; `plan` works out a solution, too, which takes up to half a minute."""
        self._api.load(task, variation, simplifications, plan)

    def plan(self) -> tuple[str, ...]:
        """The solution, after `load` with `plan`."""
        return tuple(self._api.getGoldActionSequence())

    def do(self, action: str) -> str:
        """Act; return the answer."""
        answer: str = self._api.step(action)
        return answer

    @property
    def score(self) -> int:
        """Points so far, up to 100; -100: failed."""
        return round(100 * float(self._api.getScore()))

    @property
    def over(self) -> bool:
        """Whether the task is done or failed."""
        return bool(self._api.getCompleted()) or self.score < 0

    def valid(self) -> list[str]:
        """Every action that is possible now, some hundreds: 20 to 100 ms."""
        dice = self.dice()
        found = sorted(set(self._api.getValidActionObjectCombinations()))
        # The simulator tries the actions out, which rolls dice: without this, asking would change what
        # bees and flowers do next, and an episode could not be replayed.
        self._random.setSeed(dice ^ SCRAMBLED)
        return found

    def dice(self) -> int:
        """The state of the simulator's chance: the seed in the serialized form of its java.util.Random."""
        data = self._io.ByteArrayOutputStream()
        stream = self._io.ObjectOutputStream(data)
        stream.writeObject(self._random.self())
        stream.flush()
        return int.from_bytes(data.toByteArray()[-9:-1], "big")

    def verbs(self) -> list[str]:
        """The forms of actions, such as "move OBJ to OBJ"."""
        return list(self._api.getPossibleActions())

    def task(self) -> str:
        """The task in words."""
        text: str = self._api.getTaskDescription()
        return text

    def look(self) -> tuple[str, str]:
        """The room and what is carried; costs no turn."""
        return self._api.freeActionLook().strip(), self._api.freeActionInventory().strip()


def _stop(gateway: Any, process: Any) -> None:
    """End the Java machine: it watches its standard input."""
    gateway.shutdown()
    process.stdin.close()
    process.wait(timeout=10)
