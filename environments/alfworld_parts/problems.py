"""One ALFWorld problem from a seed: a scene, a placement of objects, a goal, and a plan that reaches it."""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

from alfworld.gen import constants
from alfworld.gen.goal_library import gdict

from environments.alfworld_parts.layouts import Goal, Layout, content, lay_out
from environments.alfworld_parts.plans import mangle, plan
from environments.alfworld_parts.scenes import LAMP, TREATMENTS, goals, holds, viewpoint

# Fewest receptacles and objects with which every goal of a type can be laid out.
LEAST = {task: (3, 1) for task in TREATMENTS} | {
    "pick_and_place_simple": (2, 1),
    "look_at_obj_in_light": (2, 2),
    "pick_two_obj_and_place": (2, 2),
}
PROPERTIES = ("Cleanable", "Heatable", "Coolable", "Sliceable")
# Constants of the domain's actions: declared in every problem, or the engine cannot read it.
NAMED_OBJECTS, NAMED_RECEPTACLES = {"Knife", "ButterKnife"}, {"SinkBasin", "Microwave", "Fridge"}


@dataclass(frozen=True)
class Problem:
    """One game before it is written.

    Attributes:
        goal: what to do.
        sentence: the task in words.
        pddl: text of initial_state.pddl.
        plan: commands that win, in the engine's words.
        content: digest of goal and placement (layouts.content).
    """

    goal: Goal
    sentence: str
    pddl: str
    plan: tuple[str, ...]
    content: str

    @property
    def trial(self) -> str:
        """Name of the trial's folder; it follows from the content."""
        digits = str(int(self.content, 16))[-14:]
        return f"trial_T{digits[:8]}_{digits[8:]}"

    @property
    def folder(self) -> str:
        """Folder of the game below its split, in ALFRED's form."""
        goal = self.goal
        return f"{goal.task}-{goal.thing}-None-{goal.place or goal.lamp}-{goal.scene}/{self.trial}"

    @property
    def trajectory(self) -> dict[str, Any]:
        """Contents of traj_data.json."""
        return {
            "task_type": self.goal.task,
            "task_id": self.trial,
            "pddl_params": {
                "mrecep_target": "",
                "object_sliced": False,
                "object_target": self.goal.thing,
                "parent_target": self.goal.place,
                "toggle_target": self.goal.lamp,
            },
            "scene": {"floor_plan": f"FloorPlan{self.goal.scene}", "scene_num": self.goal.scene},
            "turk_annotations": {"anns": []},
        }


def draw(
    task: str, scenes: Iterable[int], rng: Random, receptacles: int | None = None, objects: int | None = None
) -> Problem:
    """Draw a problem of type `task`.

    Args:
        task: one of scenes.TASKS.
        scenes: numbers of the scenes to draw from; one at least must admit the task.
        rng: the only source of chance.
        receptacles: keep at most so many (at least LEAST[task][0]); None: all.
        objects: lay out at most so many (at least LEAST[task][1]); None: one or two of each class.
    """
    number = rng.choice([number for number in scenes if goals(number, task)])
    goal = Goal(task, *rng.choice(goals(number, task)), number)
    layout = lay_out(goal, rng, receptacles, objects)
    sentence = rng.choice(gdict[task]["templates"]).format(**_words(goal, str.lower))
    start = viewpoint(rng, {place.location for place in layout.receptacles})
    digest = content(goal, layout)
    pddl = _pddl(goal, layout, start, f"plan_{digest[:16]}")
    return Problem(goal, sentence, pddl, plan(goal, layout), digest)


def _words(goal: Goal, form: Any = str) -> dict[str, str]:
    """What upstream's templates call the parts of a goal."""
    words = {"obj": goal.thing, "recep": goal.place, "toggle": goal.lamp, "mrecep": ""}
    return {key: form(word) for key, word in words.items()}


def _pddl(goal: Goal, layout: Layout, start: str, name: str) -> str:
    places, things = layout.receptacles, layout.objects
    thing_kinds = sorted({kind for kind, _ in things.values()} | NAMED_OBJECTS)
    place_kinds = sorted({place.kind for place in places})
    declared = [("agent1", "agent")]
    declared += [(f"{kind}Type", "otype") for kind in thing_kinds]
    declared += [(f"{kind}Type", "rtype") for kind in sorted({*place_kinds, *NAMED_RECEPTACLES})]
    declared += [(thing, "object") for thing in things]
    declared += [(place.id, "receptacle") for place in places]
    declared += [(spot, "location") for spot in sorted({place.location for place in places} | {start})]
    lines = [
        f"(define (problem {name})",
        "    (:domain alfred)",
        "    (:objects",
        *(f"        {mangle(item)} - {kind}" for item, kind in declared),
        "    )",
        "    (:init",
        "        (= (total-cost) 0)",
        *(f"        ({mangle(fact)})" for fact in _facts(layout, start, thing_kinds, place_kinds)),
        "    )",
        # The template closes the problem too.
        gdict[goal.task]["pddl"].format(**_words(goal)).replace("#", "-").strip("\n").rstrip(),
    ]
    return "\n".join(lines) + "\n"


def _facts(layout: Layout, start: str, thing_kinds: list[str], place_kinds: list[str]) -> list[str]:
    facts = [f"atLocation agent1 {start}"]
    for place in layout.receptacles:
        facts += [f"receptacleType {place.id} {place.kind}Type"]
        facts += [f"receptacleAtLocation {place.id} {place.location}"]
        facts += [f"openable {place.id}"] if place.openable else []
    for kind in place_kinds:
        facts += [f"canContain {kind}Type {thing}Type" for thing in thing_kinds if thing in holds(kind)]
    for thing, (kind, place) in layout.objects.items():
        facts += [f"objectType {thing} {kind}Type", f"inReceptacle {thing} {place.id}"]
        facts += [f"objectAtLocation {thing} {place.location}"]
        facts += [f"toggleable {thing}" if kind == LAMP else f"pickupable {thing}"]
        facts += [f"isReceptacleObject {thing}"] if kind in constants.MOVABLE_RECEPTACLES_SET else []
        able = [name for name in PROPERTIES if kind in constants.VAL_ACTION_OBJECTS[name]]
        facts += [f"{name.lower()} {thing}" for name in able]
    return facts
