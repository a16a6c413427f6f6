"""Three ways to a winning list of commands; each one is checked on the engine's own transitions."""

import json
import random
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from environments.alfworld_parts.problems import Problem

SOLVERS = ("plan", "expert", "planner")
MOST_STEPS = 200
_TEMPLATE = re.compile(r'action (\w+) \{\s*template :: "([^"]*)"')


def domain() -> str:
    """The PDDL domain that the alfworld package ships."""
    return (files("alfworld") / "data" / "alfred.pddl").read_text()


def grammar(sentence: str | None = None) -> str:
    """The grammar that the alfworld package ships; with a sentence, its task is filled in."""
    text = (files("alfworld") / "data" / "alfred.twl2").read_text()
    return text if sentence is None else text.replace("UNKNOWN GOAL", sentence)


def game_file(problem: Problem, walkthrough: Sequence[str] | None = None) -> dict[str, Any]:
    """Contents of game.tw-pddl, with the keys that alfworld-generate writes."""
    return {
        "pddl_domain": domain(),
        "grammar": grammar(problem.sentence),
        "pddl_problem": problem.pddl,
        "solvable": None if walkthrough is None else True,
        "walkthrough": None if walkthrough is None else list(walkthrough),
    }


class Engine:
    """Fast Downward's transitions behind TextWorld, without the grammar: commands in, won or not out.

    States, applicable actions, goal test and names are those of a game played through TextWorld; only
    the text of observations is left out, which makes it about ten times as fast.
    """

    def __init__(self) -> None:
        import fast_downward

        from environments.alfworld_parts.engine import translated

        # Kept on disk: whoever plays the game later finds it there.
        self._translate = translated
        self._downward: Any = fast_downward
        self._lib = fast_downward.load_lib()
        self._domain = domain()
        templates = {name.lower(): text for name, text in _TEMPLATE.findall(grammar())}
        # The one query in a template: it stands for the name of the receptacle itself.
        self._templates = templates | {"gotolocation": "go to {r}"}

    def load(self, pddl: str, planner: bool = False) -> None:
        """Start `pddl`; `planner`: also prepare `plan`."""
        from alfworld.agents.utils.misc import Demangler
        from textworld.generator.game import EntityInfo

        task, sas = self._translate(self._domain, pddl)
        self._lib.load_sas(sas.encode())
        if planner:
            _, sas = self._downward.pddl2sas(self._domain, pddl, optimize=True)
            self._lib.load_sas_replan(sas.encode())
        infos = {item.name: EntityInfo(item.name, item.type_name) for item in task.objects}
        demangler = Demangler(game_infos=infos)
        self._names = {name: demangler.demangle_alfred_name(name) for name in infos}
        self._parameters = {
            action.name: [item.name.strip("?") for item in action.parameters] for action in task.actions
        }

    def commands(self) -> dict[str, int]:
        """What can be typed now -> id of the engine's operator."""
        found = (self._downward.Operator * self._lib.get_applicable_operators_count())()
        self._lib.get_applicable_operators(found)
        self._effects = {operator.id: operator.nb_effect_atoms for operator in found}
        return {self._text(operator.name): operator.id for operator in reversed(found)}

    def wins(self, commands: Sequence[str]) -> bool:
        """Whether all `commands` can be typed in turn, and the last one wins, no earlier one."""
        for command in commands:
            operator = self.commands().get(command)
            if operator is None or self._lib.check_goal():
                return False
            self._lib.apply_operator(operator, (self._downward.Atom * self._effects[operator])())
        return bool(self._lib.check_goal())

    def plan(self) -> list[str]:
        """The planner's commands from here to the goal; it has no limit of its own."""
        if not self._lib.replan(False):
            return []
        found = (self._downward.Operator * self._lib.get_last_plan_length())()
        self._lib.get_last_plan(found)
        return [self._text(operator.name) for operator in found]

    def _text(self, operator: str) -> str:
        name, *arguments = operator.split()
        # "examine" comes in two shapes of one name, and the shorter one lacks the last parameters.
        words = zip(self._parameters[name], arguments, strict=False)
        return str(self._templates[name].format(**{key: self._names[item] for key, item in words}))


class Expert:
    """Alfworld's handcoded expert, which explores instead of knowing where things are."""

    def __init__(self) -> None:
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld import EnvInfos

        from environments.alfworld_parts.engine import FastPddlEnv

        self._env = AlfredDemangler(FastPddlEnv(EnvInfos(admissible_commands=True, facts=True)))

    def play(self, problem: Problem) -> list[str]:
        """Its commands, up to its end or MOST_STEPS."""
        from alfworld.agents.expert import HandCodedAgentTimeout, HandCodedTWAgent
        from alfworld.agents.expert.handcoded_expert import HandCodedAgentFailed

        random.seed(problem.content)  # the expert draws from the global one; this is a process of its own
        agent = HandCodedTWAgent(max_steps=MOST_STEPS)
        with TemporaryDirectory() as folder:
            (Path(folder) / "traj_data.json").write_text(json.dumps(problem.trajectory))
            agent.reset(str(Path(folder) / "game.tw-pddl"))
        self._env.load(game_file(problem))
        state, done = self._env.reset(), False
        agent.observe(state["feedback"])
        command, commands = "look", list[str]()
        while not done:
            commands.append(command)
            state, _, done = self._env.step(command)
            state["facts"].sort(key=str)  # they come from sets, whose order changes with the process
            try:
                # Since 0.4 the engine says "move X to Y", but the expert empties its hands at a "put" only.
                command = agent.act(state, 0, done, re.sub("^move ", "put ", command))
            except (HandCodedAgentTimeout, HandCodedAgentFailed):
                break
            command = command if command in state["admissible_commands"] else "look"
        return commands


def solver(name: str) -> Callable[[Problem], list[str] | None]:
    """The function that solves a problem: "plan", "expert" or "planner"; None: not solved."""
    engine = Engine()
    expert = Expert() if name == "expert" else None

    def solve(problem: Problem) -> list[str] | None:
        engine.load(problem.pddl, planner=name == "planner")
        if expert:
            commands = expert.play(problem)
        else:
            commands = engine.plan() if name == "planner" else list(problem.plan)
        return commands if engine.wins(commands) else None

    return solve
