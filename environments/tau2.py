"""tau2-bench (arXiv 2506.07982) in solo mode: solve a support ticket with the domain's tools, without a user.

Description:
    Plays the library's own environment, tools, policy and evaluator, without its orchestrator and its
    threads. Solo mode exists for the domains telecom (114 tasks) and mock; airline and retail need a
    simulated user, a language model, which this environment does not bring.
Actions:
    A tool call, {"name": ..., "arguments": {...}}, alone or in <tool_call> tags, of the agent's or the
    user's tools; `done` ends the episode.
Observation:
    What the tool returned ("Error: ..." where it refused).
Start:
    The ticket. Policy and tools stand in the instruction (about 40,000 characters for telecom).
Rewards:
    At the end the library's evaluation of the whole episode, in [0, 1]; else 0.
Episode end:
    Terminated by `done`, or with reward 0 after `max_errors` calls that a tool refused, as in the
    library. Unlike there, text that is no tool call does not end it. Truncated after `max_turns` turns.
Information:
    `valid`: a call of a known tool with arguments of the right types. `success`: a reward of 1.
    `task_type`: the text in brackets at the front of the task's id, else the domain. `task`: its id.
State key:
    Hashes of the agent's and the user's database, with the last observation; it leaves out what was
    seen before.

Arguments:
    domain: "telecom", "mock", or one that you registered.
    register: "pkg.module:function" or "path/to/file.py:function" that registers a domain of yours,
        called with tau2's registry.
    split: the library's list of tasks that numbers refer to ("base", "train", "test", ...).
    max_turns: turns in an episode.
    max_errors: see above.
"""

import os
import pickle
from collections.abc import Hashable
from functools import lru_cache
from random import Random
from typing import Any, Literal

from environments.adapter_parts.objects import find
from environments.adapter_parts.tool_calls import GRAMMAR, Call, describe, parse_call, random_call
from verl_multiturn.env import Env, Info, Seed
from verl_multiturn.errors import unknown
from verl_multiturn.needs import Needs

__all__ = ["Tau2"]

DONE = {"type": "object", "properties": {}, "required": []}


class Tau2(Env):
    """See the module's docstring."""

    needs = Needs(extra="tau2", packages=("tau2",), licence="MIT; packaged under Apache-2.0")
    runs_in: Literal["thread", "process"] = "process"

    def __init__(
        self,
        domain: str = "telecom",
        register: str | None = None,
        split: str | None = None,
        max_turns: int = 50,
        max_errors: int = 10,
    ) -> None:
        self.domain, self.split = domain, split
        self.max_turns, self.max_errors = max_turns, max_errors
        registry = _registry()
        if register and domain not in registry.get_domains():
            find(register, "function that registers a domain")(registry)
        if domain not in registry.get_domains():
            raise unknown("tau2 domain", domain, registry.get_domains())
        self._tasks(split)
        world = pickle.loads(_world(domain))
        tools = [tool.openai_schema["function"] for tool in _tools(world)]
        self.schemas = {tool["name"]: tool["parameters"] for tool in tools} | {"done": DONE}
        texts = {tool["name"]: tool["description"] for tool in tools} | {"done": "Call it when you are done."}
        listed = describe(self.schemas, texts)
        self.instruction = (
            f"Solve the ticket by calling tools, according to the policy. Call done at the end. {GRAMMAR}\n\n"
            f"{world.get_policy()}\n\nTools:\n{listed}"
        )

    @classmethod
    def preload(cls) -> None:
        """See `Env.preload`: with litellm, tau2 takes seconds to import."""
        _registry()

    def tasks(self, split: str) -> list[Seed]:
        """The ids of the library's split that can be played without a user."""
        return list(self._tasks(split))

    def _tasks(self, split: str | None) -> dict[str, Any]:
        return _load(self.domain, split)

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        tasks = self._tasks(self.split)
        if isinstance(seed, str) and seed not in tasks:
            tasks = self._tasks(None)
            if seed not in tasks:
                raise unknown(f"task of {self.domain}", seed, tasks)
        name = seed if isinstance(seed, str) else list(tasks)[seed % len(tasks)]
        self.task, self.world, self.errors = tasks[name], pickle.loads(_world(self.domain)), 0
        start = self.task.initial_state
        self.messages = list(start.message_history or []) if start else []
        data, calls = (start.initialization_data, start.initialization_actions) if start else (None, None)
        self.world.set_state(data, calls, self.messages)
        self.plan = [Call(a.name, a.arguments) for a in self.task.evaluation_criteria.actions or []]
        self.shown = str(self.task.ticket)
        kind = name[1:].partition("]")[0] if name.startswith("[") else self.domain
        return self.shown, {"task_type": kind, "task": name}

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        try:
            call = parse_call(action, self.schemas)
        except ValueError as error:
            return str(error), 0.0, False, {"valid": False}
        if call is None:
            return f"Only tool calls count. {GRAMMAR}", 0.0, False, {"valid": False}
        if call.name == "done":
            reward = self._evaluate()
            return "", reward, True, {"success": reward >= 1}
        self.shown = self._call(call)
        return self.shown, 0.0, self.errors >= self.max_errors, {}

    def _call(self, call: Call) -> str:
        from tau2.data_model.message import AssistantMessage, ToolCall

        made = ToolCall(id=str(len(self.messages)), name=call.name, arguments=call.arguments)
        answer = self.world.get_response(made)
        self.messages += [AssistantMessage(role="assistant", tool_calls=[made]), answer]
        self.errors += bool(answer.error)
        if self.plan and call == self.plan[0]:
            self.plan = self.plan[1:]
        return str(answer.content)

    def _evaluate(self) -> float:
        from tau2.data_model.simulation import SimulationRun, TerminationReason
        from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation

        simulation = SimulationRun(
            id="", task_id=self.task.id, start_time="", end_time="", duration=0.0,
            termination_reason=TerminationReason.AGENT_STOP, messages=self.messages,
        )  # fmt: skip
        try:
            found = evaluate_simulation(simulation, self.task, EvaluationType.ALL, True, self.domain)
        except ValueError:  # mock's assertions raise where the thing they ask for does not exist
            return 0.0
        return float(found.reward)

    def state_key(self) -> Hashable:
        """See the module's docstring."""
        return self.world.get_db_hash(), self.world.get_user_db_hash(), self.shown

    def expert(self) -> str:
        """The next of the task's reference actions, then `done`."""
        return str(self.plan[0] if self.plan else Call("done", {}))

    def random_action(self, rng: Random) -> str:
        """A random call that fits a tool's schema, with words of the last observation."""
        return str(random_call(self.schemas, self.shown.split() or ["."], rng))


def _registry() -> Any:
    # Else litellm, which only simulated users need, asks the network for prices when imported.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    from loguru import logger

    logger.disable("tau2")  # it logs every message of every episode
    from tau2.registry import registry

    return registry


@lru_cache(maxsize=16)
def _world(domain: str) -> bytes:
    """A domain's environment before any task, pickled: to build it reads files for 80 ms."""
    try:
        return pickle.dumps(_registry().get_env_constructor(domain)(solo_mode=True))
    except (ValueError, TypeError) as error:
        raise ValueError(f"domain {domain} cannot be played without a user: {error}") from None


def _tools(world: Any) -> list[Any]:
    return [*world.get_tools(), *(world.get_user_tools() if world.user_tools is not None else [])]


@lru_cache(maxsize=16)
def _load(domain: str, split: str | None) -> dict[str, Any]:
    """The tasks of a split (None: the library's default) that can be played without a user, by id."""
    from tau2.agent.llm_agent import LLMSoloAgent

    registry = _registry()
    if split is not None:
        known = registry.get_task_splits_loader(domain)
        splits = known() if known else {}
        if split not in splits:
            raise unknown(f"split of {domain}", split, splits)
    load = registry.get_tasks_loader(domain)
    found = load() if split is None else load(split)
    return {task.id: task for task in found if task.ticket and LLMSoloAgent.check_valid_task(task)}
