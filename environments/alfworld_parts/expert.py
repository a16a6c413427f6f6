"""A scripted player of ALFWorld for tests and warm starts: it looks for things where one would look.

It reads the facts of the engine but not what a player could not have seen: an object counts as found only
where it is visible. It searches the receptacles in the order in which the commands list them, so that
its next step follows from where it is and what it holds, which a small model can imitate.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Task type -> (what the object must become, the tool, the verb).
CHANGES = {
    "pick_clean_then_place_in_recep": ("isclean", "sinkbasin", "clean"),
    "pick_heat_then_place_in_recep": ("ishot", "microwave", "heat"),
    "pick_cool_then_place_in_recep": ("iscool", "fridge", "cool"),
}


@dataclass(frozen=True)
class Goal:
    """What a game asks for, from its traj_data.json: type of task, of object, of receptacle, of lamp."""

    task: str
    target: str
    parent: str
    lamp: str

    @classmethod
    def of(cls, traj: Mapping[str, Any]) -> "Goal":
        """From the content of traj_data.json."""
        params = traj["pddl_params"]
        names = (params["object_target"], params["parent_target"], params["toggle_target"])
        return cls(traj["task_type"], *(name.lower() for name in names))


@dataclass
class World:
    """The engine's facts by name: where things are and what became of them."""

    here: set[str] = field(default_factory=set)  # receptacles at the agent's place
    receptacles: list[str] = field(default_factory=list)  # as the commands list them
    inside: dict[str, str] = field(default_factory=dict)  # object -> receptacle
    held: str | None = None
    closed: set[str] = field(default_factory=set)
    changed: set[tuple[str, str]] = field(default_factory=set)  # (isclean, "mug 1"), ...

    @classmethod
    def of(cls, facts: Iterable[Any], infos: Mapping[str, Any]) -> "World":
        """From the engine's `_facts` and `_entity_infos`."""
        world, places, agent = cls(), dict[str, str](), ""
        openable, opened = set[str](), set[str]()
        for fact in facts:
            names = [infos[argument.name].name.strip() for argument in fact.arguments]
            if fact.name == "atlocation":
                agent = fact.arguments[1].name
            elif fact.name == "receptacleatlocation":
                places[names[0]] = fact.arguments[1].name
            elif fact.name == "inreceptacle":
                world.inside[names[0]] = names[1]
            elif fact.name == "holds":
                world.held = names[1]
            elif fact.name in ("openable", "opened"):
                (openable if fact.name == "openable" else opened).add(names[0])
            elif fact.name in ("isclean", "ishot", "iscool"):
                world.changed.add((fact.name, names[0]))
        world.receptacles = sorted(places)
        world.here = {name for name, place in places.items() if place == agent}
        world.closed = openable - opened
        return world

    def next_place(self) -> str:
        """The receptacle after the present one; the last leads to the first."""
        order = self.receptacles
        last = max((order.index(name) for name in self.here), default=-1)
        return order[(last + 1) % len(order)]


def next_command(goal: Goal, world: World, admissible: Iterable[str]) -> str:
    """The expert's command in this state."""
    if world.held and kind(world.held) != goal.target:
        return _put_down(world, admissible)
    if goal.task == "look_at_obj_in_light":
        if world.held:
            return _search(world, goal.lamp, set(), "use {o}")
        return _search(world, goal.target, set(), "take {o} from {r}")
    home = _destination(goal, world)
    if not world.held:
        placed = {o for o, r in world.inside.items() if r == home} if "two" in goal.task else set()
        return _search(world, goal.target, placed, "take {o} from {r}")
    change, tool, verb = CHANGES.get(goal.task, ("", "", ""))
    if change and (change, world.held) not in world.changed:
        at = next((r for r in world.receptacles if kind(r) == tool), tool)
        return f"{verb} {world.held} with {at}" if at in world.here else f"go to {at}"
    return _bring(world, home)


def kind(name: str) -> str:
    """Of "mug 1": mug."""
    return name.rpartition(" ")[0]


def _destination(goal: Goal, world: World) -> str:
    """The receptacle of the right type that already holds most of what is wanted there."""
    homes = [r for r in world.receptacles if kind(r) == goal.parent]
    held = [r for o, r in world.inside.items() if kind(o) == goal.target]
    return max(homes, key=held.count) if "two" in goal.task else homes[0]


def _bring(world: World, home: str) -> str:
    if home not in world.here:
        return f"go to {home}"
    return f"open {home}" if home in world.closed else f"move {world.held} to {home}"


def _put_down(world: World, admissible: Iterable[str]) -> str:
    """What is in the hand is not wanted: onto the first thing here that may hold it, else elsewhere."""
    for command in admissible:
        if command.startswith(f"move {world.held} to "):
            return command
    for name in sorted(world.here & world.closed):
        return f"open {name}"
    return f"go to {world.next_place()}"


def _search(world: World, wanted: str, but: set[str], command: str) -> str:
    """Act on the first object of a kind that is visible here; else open what is closed; else go on."""
    for name in sorted(world.inside):
        place = world.inside[name]
        if kind(name) == wanted and name not in but and place in world.here - world.closed:
            return command.format(o=name, r=place)
    for name in sorted(world.here & world.closed):
        return f"open {name}"
    return f"go to {world.next_place()}"
