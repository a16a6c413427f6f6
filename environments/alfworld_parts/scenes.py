"""The rooms that the alfworld package describes: which receptacles and objects each of the 120 scenes has.

Its layout files list the classes of every scene, and names and viewpoints of most receptacles. For the few
classes without a recorded place (such as stove burners), and for all objects, coordinates are drawn here;
they are names only, since the text engine knows no distances.
"""

import json
from collections.abc import Container
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from random import Random

from alfworld.gen import constants

from environments.alfworld_parts.library import TASK_TYPES

TASKS = TASK_TYPES
# What a task does to its object: the property it needs, and the class of receptacle that does it.
TREATMENTS = {
    "pick_clean_then_place_in_recep": ("clean", "Cleanable", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("heat", "Heatable", "Microwave"),
    "pick_cool_then_place_in_recep": ("cool", "Coolable", "Fridge"),
}
LAMP = "DeskLamp"
LAMP_HOMES = frozenset({"Desk", "SideTable", "Dresser", "DiningTable", "CoffeeTable", "Shelf"})
# How many a scene gets of a class whose places the layout files leave out; any other class: one.
COUNTS = {"CounterTop": (1, 3), "StoveBurner": (4, 4), "Shelf": (1, 3), "SideTable": (1, 2)}
CLASSES: frozenset[str] = frozenset(
    set(constants.RECEPTACLES) - constants.MOVABLE_RECEPTACLES_SET - {"PaintingHanger"}
)
SPLITS: dict[str, list[int]] = {
    "train": constants.TRAIN_SCENE_NUMBERS,
    "valid_seen": constants.TRAIN_SCENE_NUMBERS,
    "valid_unseen": constants.TEST_SCENE_NUMBERS,
}


@dataclass(frozen=True)
class Receptacle:
    """One receptacle: its name in the layout files, its class, and where the agent stands to use it."""

    id: str
    kind: str
    location: str

    @property
    def openable(self) -> bool:
        """Whether it has a door."""
        return self.kind in constants.OPENABLE_CLASS_SET


@dataclass(frozen=True)
class Scene:
    """What a scene has.

    Attributes:
        placed: receptacles with a recorded place.
        loose: classes of receptacles without one.
        objects: classes of things that can lie in or on one of its receptacles.
        lamp: whether it has a desk lamp and a place for it.
    """

    number: int
    room: str
    placed: tuple[Receptacle, ...]
    loose: tuple[str, ...]
    objects: tuple[str, ...]
    lamp: bool

    @property
    def kinds(self) -> list[str]:
        """Classes of its receptacles, sorted."""
        return sorted({receptacle.kind for receptacle in self.placed} | set(self.loose))

    def receptacles(self, rng: Random) -> list[Receptacle]:
        """All its receptacles: the placed ones, and the loose ones at places drawn from `rng`."""
        found, taken = list(self.placed), {receptacle.location for receptacle in self.placed}
        for kind in self.loose:
            for _ in range(rng.randint(*COUNTS.get(kind, (1, 1)))):
                # The engine recognises a basin by the last part of its name.
                name = (
                    f"{kind[:-5]}|{point(rng)}|{kind}" if kind.endswith("Basin") else f"{kind}|{point(rng)}"
                )
                location = viewpoint(rng, taken)
                taken.add(location)
                found.append(Receptacle(name, kind, location))
        return found


def holds(kind: str) -> frozenset[str]:
    """Classes of objects that a receptacle of class `kind` can hold."""
    return frozenset(constants.VAL_RECEPTACLE_OBJECTS.get(kind, ()))


def point(rng: Random) -> str:
    """Coordinates in the layout files' form, in metres."""
    return "|".join(f"{rng.uniform(-4, 4):+06.2f}" for _ in range(3))


def viewpoint(rng: Random, taken: Container[str]) -> str:
    """A place to stand that is not taken: grid cell, rotation and tilt."""
    while True:
        place = f"loc|{rng.randint(-12, 12)}|{rng.randint(-12, 12)}|{rng.randint(0, 3)}|45"
        if place not in taken:
            return place


@cache
def scene(number: int) -> Scene:
    """Read scene `number` (1-30 kitchens, 201-230 living rooms, 301-330 bedrooms, 401-430 bathrooms)."""
    layouts = files("alfworld.gen") / "layouts"
    classes = json.loads((layouts / f"FloorPlan{number}-objects.json").read_text())
    points = json.loads((layouts / f"FloorPlan{number}-openable.json").read_text())
    placed = []
    for name, (x, z, rotation, tilt) in sorted(points.items()):
        parts = name.split("|")
        kind = parts[-1] if len(parts) == 5 else parts[0]
        if kind in CLASSES:
            place = f"loc|{round(x / 0.25)}|{round(z / 0.25)}|{int(rotation // 90) % 4}|{int(tilt)}"
            placed.append(Receptacle(name, kind, place))
    found = {receptacle.kind for receptacle in placed}
    kinds = found | (set(classes) & CLASSES)
    portable = set().union(*map(holds, kinds)) & set(classes) - CLASSES
    return Scene(
        number,
        next(room for room, numbers in constants.SCENE_TYPE.items() if number in numbers),
        tuple(placed),
        tuple(sorted(kinds - found)),
        tuple(sorted(portable)),
        LAMP in classes and bool(LAMP_HOMES & kinds),
    )


@cache
def goals(number: int, task: str) -> tuple[tuple[str, str], ...]:
    """The goals of type `task` that scene `number` admits: (class of object, class of receptacle).

    The object has a home other than the goal receptacle, so no game starts solved. The receptacle
    is "" for look_at_obj_in_light.
    """
    here = scene(number)
    if here.room not in constants.GOALS_VALID[task]:
        return ()
    if task == "look_at_obj_in_light":
        return tuple((thing, "") for thing in here.objects) if here.lamp else ()
    _, able, device = TREATMENTS.get(task, ("", "", ""))
    if device and device not in here.kinds:
        return ()
    return tuple(
        (thing, goal)
        for thing in here.objects
        if not able or thing in constants.VAL_ACTION_OBJECTS[able]
        for goal in here.kinds
        if goal != device and thing in holds(goal)
        if any(thing in holds(home) for home in here.kinds if home != goal)
    )
