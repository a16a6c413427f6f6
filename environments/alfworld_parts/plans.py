"""Commands that win a generated ALFWorld game, written from the knowledge of where everything is."""

from collections.abc import Iterable
from itertools import permutations, product

from environments.alfworld_parts.layouts import Goal, Layout
from environments.alfworld_parts.scenes import LAMP, TREATMENTS, Receptacle

MANGLED = {"|": "_bar_", "-": "_minus_", "+": "_plus_", ".": "_dot_", ",": "_comma_"}


def mangle(text: str) -> str:
    """A name in the form that PDDL can read."""
    for sign, word in MANGLED.items():
        text = text.replace(sign, word)
    return text


def names(ids: Iterable[str]) -> dict[str, str]:
    """The engine's names ("apple 2"): instances of a class are numbered down along their sorted ids."""
    numbers: dict[str, int] = {}
    found = {}
    for name in sorted(ids, key=lambda name: mangle(name).lower(), reverse=True):
        first, *_, last = name.lower().split("|")
        kind = last if last.endswith("basin") else first
        numbers[kind] = numbers.get(kind, 0) + 1
        found[name] = f"{kind} {numbers[kind]}"
    return found


def plan(goal: Goal, layout: Layout) -> tuple[str, ...]:
    """The shortest of the plans that fetch the goal's objects one by one and bring each to one place."""
    called = names([*(place.id for place in layout.receptacles), *layout.objects])
    things = [name for name, (kind, _) in layout.objects.items() if kind == goal.thing]
    if goal.lamp:
        ends = [(name, place) for name, (kind, place) in layout.objects.items() if kind == LAMP]
    else:
        ends = [("", place) for place in layout.receptacles if place.kind == goal.place]
    verb, _, device = TREATMENTS.get(goal.task, ("", "", ""))
    tools: list[Receptacle | None] = [place for place in layout.receptacles if place.kind == device]
    plans = []
    for chosen, (lamp, end), tool in product(permutations(things, goal.count), ends, tools or [None]):
        walk = _Walk(called)
        for thing in chosen:
            walk.take(thing, layout.objects[thing][1])
            if tool:
                walk.go(tool)
                walk.do(verb, thing, "with", tool.id)
            walk.go(end)
            if lamp:
                walk.do("use", lamp)
            else:
                walk.open(end)
                walk.do("move", thing, "to", end.id)
        plans.append(tuple(walk.commands))
    return min(plans, key=lambda commands: (len(commands), commands))


class _Walk:
    """Commands so far, where they lead to and what they open."""

    def __init__(self, called: dict[str, str]) -> None:
        self._called = called
        self.commands: list[str] = []
        self._at = ""
        self._opened: set[Receptacle] = set()

    def do(self, *words: str) -> None:
        self.commands.append(" ".join(self._called.get(word, word) for word in words))

    def go(self, place: Receptacle) -> None:
        if self._at != place.location:  # going where one stands is no action
            self.do("go to", place.id)
            self._at = place.location

    def open(self, place: Receptacle) -> None:
        if place.openable and place not in self._opened:
            self.do("open", place.id)
            self._opened.add(place)

    def take(self, thing: str, home: Receptacle) -> None:
        self.go(home)
        self.open(home)
        self.do("take", thing, "from", home.id)
