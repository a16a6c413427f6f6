"""Where the things of a generated ALFWorld game are: receptacles of a scene, and the objects in them."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from environments.alfworld_parts.scenes import (
    LAMP,
    LAMP_HOMES,
    TREATMENTS,
    Receptacle,
    holds,
    point,
    scene,
)


@dataclass(frozen=True)
class Goal:
    """What to do: type of task, class of object, class of receptacle ("" for a look), scene."""

    task: str
    thing: str
    place: str
    scene: int

    @property
    def lamp(self) -> str:
        """Class of the lamp to use, or ""."""
        return "" if self.place else LAMP

    @property
    def count(self) -> int:
        """How many objects it is about."""
        return 2 if self.task == "pick_two_obj_and_place" else 1


@dataclass
class Layout:
    """Receptacles, and objects with their class and where they lie."""

    receptacles: list[Receptacle]
    objects: dict[str, tuple[str, Receptacle]] = field(default_factory=dict)

    def put(self, kind: str, homes: Iterable[Receptacle], rng: Random) -> None:
        """Lay a new object of class `kind` into one of `homes`; nothing happens if there is none."""
        name = f"{kind}|{point(rng)}"
        while name in self.objects:
            name = f"{kind}|{point(rng)}"
        if choice := list(homes):
            self.objects[name] = (kind, rng.choice(choice))

    def homes(self, kind: str, avoid: str = "") -> list[Receptacle]:
        """The receptacles that can hold an object of class `kind`, except those of class `avoid`."""
        return [place for place in self.receptacles if place.kind != avoid and kind in holds(place.kind)]


def lay_out(goal: Goal, rng: Random, receptacles: int | None, objects: int | None) -> Layout:
    """Draw a layout in which the goal can be reached and is not reached yet.

    Args:
        goal: what to do.
        rng: the only source of chance.
        receptacles: at most so many; None: all.
        objects: at most so many; None: one or two of each class.
    """
    here = scene(goal.scene)
    homes = [kind for kind in here.kinds if kind != goal.place and goal.thing in holds(kind)]
    needed = {rng.choice(homes)} | ({goal.place} if goal.place else set())
    if goal.task in TREATMENTS:
        needed.add(TREATMENTS[goal.task][2])
    if goal.lamp:
        needed.add(rng.choice(sorted(LAMP_HOMES & set(here.kinds))))
    layout = Layout(_keep(here.receptacles(rng), needed, receptacles, rng))
    if goal.lamp:
        layout.put(LAMP, [place for place in layout.receptacles if place.kind in LAMP_HOMES], rng)
    most = 10**6 if objects is None else objects
    for _ in range(min(goal.count + rng.randint(0, 1), most - len(layout.objects))):
        layout.put(goal.thing, layout.homes(goal.thing, goal.place), rng)
    others = [kind for kind in here.objects if kind != goal.thing]
    rng.shuffle(others)
    for kind in others:
        for _ in range(min(rng.randint(1, 2), most - len(layout.objects))):
            layout.put(kind, layout.homes(kind), rng)
    return layout


def _keep(found: list[Receptacle], needed: set[str], most: int | None, rng: Random) -> list[Receptacle]:
    """At most `most`: one of each needed class, then of each class in turn, so that classes stay many."""
    if most is None or len(found) <= most:
        return found
    piles: dict[str, list[Receptacle]] = {}
    for place in rng.sample(found, len(found)):
        piles.setdefault(place.kind, []).append(place)
    kept = {piles[kind].pop() for kind in sorted(needed)}
    while len(kept) < most:
        for kind in [kind for kind in piles if piles[kind]][: most - len(kept)]:
            kept.add(piles[kind].pop())
    return [place for place in found if place in kept]


def content(goal: Goal, layout: Layout) -> str:
    """Digest of goal and placement; coordinates, numbers of things and the scene's number do not count."""
    inside: dict[Receptacle, list[str]] = {place: [] for place in layout.receptacles}
    for kind, place in layout.objects.values():
        inside[place].append(kind)
    rows = sorted([place.kind, *sorted(kinds)] for place, kinds in inside.items())
    text = json.dumps([goal.task, goal.thing, goal.place, goal.lamp, rows])
    return hashlib.sha256(text.encode()).hexdigest()
