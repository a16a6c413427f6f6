"""ALFWorld's engine (textworld's `PddlEnv`), unchanged in what it says, with caches and cheap snapshots.

Profiled, nine tenths of a stock step go into deriving the text of every legal command from the grammar
again (parsing it, copying its context), and a reset translates PDDL to SAS twice.
tests/test_alfworld_engine.py compares every observation, command, reward and ending with the stock engine.
"""

import copy
import functools
import hashlib
import pickle
import string
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fast_downward
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from textworld.core import EnvInfos, GameState
from textworld.envs.pddl import logic, pddl, textgen
from textworld.logic import Rule

from verl_multiturn.cache import built, cache_folder
from verl_multiturn.errors import intact

# What an operator leaves behind besides changing the world: neither a precondition nor part of a goal.
TRACES = frozenset({"checked", "examined", "wasinreceptacle"})
Snapshot = tuple[tuple[int, ...], str, int]  # operators applied, last text, moves


class FastPddlEnv(pddl.PddlEnv):  # type: ignore[misc]
    """`PddlEnv` with caches; one game at a time, any number of games one after the other."""

    def load(self, filename_or_data: Any) -> None:
        """Load a game (path of a .tw-pddl file, or its content)."""
        self._commands: dict[tuple[str, ...], str] = {}
        with _cached():
            super().load(filename_or_data)

    def reset(self) -> GameState:
        """Start the loaded game."""
        self._operators: list[int] = []
        with _cached():
            return super().reset()

    def step(self, command: str) -> tuple[GameState, float, bool]:
        """Act; an unknown command changes nothing."""
        with _cached():
            result: tuple[GameState, float, bool] = super().step(command)
        if self._last_action is not None:
            self._operators.append(self._last_action.id)
        return result

    def snapshot(self) -> Snapshot:
        """The way to the present state, a few hundred bytes."""
        return tuple(self._operators), self.state.feedback, self._moves

    def restore(self, snapshot: Snapshot) -> GameState:
        """Go back to a snapshot of the loaded game: its operators again, without any text."""
        operators, text, self._moves = snapshot
        with _cached():
            self._pddl_state = state = logic.PddlState(
                self.downward_lib, self._game_data["pddl_problem"], self._logic
            )
        for number in operators:
            # The effects of an operator can be asked for only while it is applicable.
            applicable = (fast_downward.Operator * self.downward_lib.get_applicable_operators_count())()
            self.downward_lib.get_applicable_operators(applicable)
            state._operators = {operator.id: operator for operator in applicable}
            state.apply(state._operators[number])
        self._operators, self._last_action = list(operators), None
        self.state = GameState()
        self.state.feedback = self.state.raw = text
        self._gather_infos()
        return self.state

    def _gather_infos(self) -> None:
        """As in `PddlEnv`, but a command's text is derived once.

        In ALFRED's grammar it depends only on the template and on the names in it: its one query uses
        where receptacles stand, which no operator changes.
        """
        state, seen = self.state, self._pddl_state
        state["command_templates"] = sorted({action.template for action in self._logic.actions.values()})
        state["won"], state["lost"] = seen.check_goal(), False
        state["_entity_infos"] = dict(self._entity_infos)
        state["_facts"] = facts = list(seen.facts)
        if self.request_infos.facts:
            state["facts"] = list(map(self._get_human_readable_fact, facts))
        state["last_action"], state["_last_action"] = None, self._last_action
        state["_valid_actions"] = list(seen.all_applicable_actions())
        state["_valid_commands"] = [self._command(action, facts) for action in state["_valid_actions"]]
        state["admissible_commands"] = sorted(set(state["_valid_commands"]))
        if self.request_infos.moves:
            state["moves"] = self._moves
        if self.request_infos.policy_commands:
            state["policy_commands"] = seen.replan(self._entity_infos)

    def _command(self, action: Any, facts: list[Any]) -> str:
        template = action.command_template
        names = {placeholder.name: variable.name for placeholder, variable in action.mapping.items()}
        key = (template, *(names[word] for word in _words(template) if word in names))
        if key not in self._commands:
            context = {
                "state": self._pddl_state,
                "facts": facts,
                "variables": {p.name: self._entity_infos[v.name] for p, v in action.mapping.items()},
                "mapping": action.mapping,
                "entity_infos": self._entity_infos,
            }
            action.command_template = self._logic.grammar.derive(template, context)
            mapping = {name: info.name for name, info in self._entity_infos.items()}
            self._commands[key] = action.format_command(mapping)
        return self._commands[key]


def new_engine() -> Any:
    """An engine without a game, with ALFWorld's names for things ("mug 1"), as upstream builds it."""
    return AlfredDemangler(FastPddlEnv(EnvInfos(won=True, admissible_commands=True)))


def stock_engine() -> Any:
    """The same with textworld's own class: the measure of the fast one."""
    return AlfredDemangler(pddl.PddlEnv(EnvInfos(won=True, admissible_commands=True)))


@functools.lru_cache(512)
def _words(template: str) -> tuple[str, ...]:
    """The identifiers in a template, in order."""
    clean = "".join(c if c in string.ascii_letters + string.digits + "_" else " " for c in template)
    return tuple(clean.split())


def _kept(kind: str, compute: Callable[..., Any], *texts: str) -> Any:
    """`compute(*texts)`, pure and slow (0.03 to 0.4 s): kept on disk for every process and run to come."""
    version = Path(fast_downward.__file__).stat().st_size
    digest = hashlib.blake2b("\0".join([str(version), *texts]).encode(), digest_size=16).hexdigest()

    def keep(path: Path) -> None:
        path.write_bytes(zlib.compress(pickle.dumps(compute(*texts)), 3))

    # The members of a group begin the same game at once: one of them computes.
    path = built(cache_folder("alfworld", kind, digest[:2]) / digest, keep)
    with intact(path, "delete it, it is computed again"):
        return pickle.loads(zlib.decompress(path.read_bytes()))


@functools.lru_cache(32)
def translated(domain: str, problem: str) -> Any:
    """The engine's task and its SAS text."""
    return _kept("sas", _stock["pddl2sas"], domain, problem)


def _pddl2sas(domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> Any:
    """`fast_downward.pddl2sas`; the optimized form feeds the planner only, which nobody asks here."""
    return (None, "") if optimize else translated(domain, problem)


@functools.lru_cache(512)
def _grammar(text: str, rule_name: str) -> Any:
    return _kept("grammar", functools.partial(_stock["grammar"], rule_name=rule_name), text)


@functools.lru_cache(4096)
def _parsed(text: str, rule_name: str) -> Any:
    return _stock["symbols"](text, rule_name=rule_name)


def _symbols(text: str, rule_name: str, **unused: Any) -> Any:
    return _copied(_parsed(text, rule_name))


def _copied(thing: Any) -> Any:
    """A copy for a derivation, which writes its context into symbols and nothing else."""
    if isinstance(thing, dict):
        return dict(thing)
    if isinstance(thing, list):
        return [_copied(symbol) for symbol in thing]
    twin = copy.copy(thing)
    for inner in ("symbol", "expression"):  # of a list and of a condition
        if isinstance(getattr(thing, inner, None), textgen.Symbol):
            setattr(twin, inner, _copied(getattr(thing, inner)))
    return twin


_NAMES: tuple[tuple[Any, str, Any], ...] = (
    (fast_downward, "pddl2sas", _pddl2sas),
    (textgen, "_parse_and_convert", _symbols),
    (textgen, "deepcopy", _copied),
    (logic, "_parse_and_convert", _grammar),
    (Rule, "parse_conjunctive_query", functools.lru_cache(4096)(Rule.parse_conjunctive_query)),
)
_stock: dict[str, Callable[..., Any]] = {
    "pddl2sas": fast_downward.pddl2sas,
    "symbols": textgen._parse_and_convert,
    "grammar": logic._parse_and_convert,
}


@contextmanager
def _cached() -> Iterator[None]:
    """textworld looks these pure functions up by name; while our engine works it finds ours."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _NAMES]
    for owner, name, ours in _NAMES:
        setattr(owner, name, ours)
    try:
        yield
    finally:
        for owner, name, stock in before:
            setattr(owner, name, stock)
