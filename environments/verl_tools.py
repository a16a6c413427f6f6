"""Tools written for verl's `verl.tools`, as an environment: call tools, then answer.

Description:
    What verl's "tool_agent" loop plays: BaseTool classes (as in verl's tool config) and functions
    with verl's `@function_tool`, on rows of a data set in verl's form ("prompt", "data_source",
    "reward_model": {"ground_truth": ...}, "extra_info": {"tools_kwargs": ...}). Unlike there, a tool
    has one instance for a whole episode, so that it may keep state between calls.
Actions:
    A tool call, {"name": ..., "arguments": {...}}, alone or in <tool_call> tags. Any other text is the
    answer.
Observation:
    The tool's text; for an unknown tool or arguments that do not fit, a sentence that says what would.
Start:
    The prompt without its system message, which becomes the instruction, with the tools.
Rewards:
    The reward that a tool's `execute` gives; for the answer, the reward function's score and the sum
    of the tools' `calc_reward`.
Episode end:
    Terminated by an answer. Truncated after `max_turns` turns.
Information:
    `valid`: an answer, or a call that fits a tool and did not raise. `success`: the answer was paid
    `success_reward` or more. `task_type`: the row's "data_source".
State key:
    The prompt and a hash of the calls so far with what they returned; it leaves out invalid turns.

Snapshots are replays: what a tool keeps cannot be copied. A tool whose answers depend on anything but
the calls of its episode (a clock, the network) cannot be replayed.

Arguments:
    rows: a .jsonl, .json or .parquet file, or the rows. Task number i is row i modulo their count.
    config: verl's tool config, a YAML file (verl's `tool_config_path`).
    functions: a Python file (verl's `function_tool_path`) or "pkg.module" that defines `@function_tool`s.
    tools: further BaseTool classes, "pkg.module:Class" or "path/to/file.py:Class" -> their config;
        these give their schema themselves.
    reward: "pkg.module:function" or "path/to/file.py:function" of data_source, solution_str,
        ground_truth and extra_info; by default verl's own for the row's data_source, where the row has
        a ground truth. Those of codecontests, apps, codeforces, taco, numina_* and geometry3k run or
        evaluate the answer: refused. What your tools do with their arguments is up to you.
    max_turns: turns in an episode.
    success_reward: see `success`.
    dangerously_run_model_text: use the reward functions of verl that are refused otherwise.
"""

import asyncio
import contextlib
import io
import threading
from collections.abc import Hashable, Mapping
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from environments.adapter_parts.model_text import refuse
from environments.adapter_parts.objects import Row, Rows, find, load, split_prompt
from environments.adapter_parts.state import digest
from environments.adapter_parts.tool_calls import GRAMMAR, Call, describe, parse_call, random_call
from verl_multiturn.env import Info, ReplayEnv, Seed
from verl_multiturn.errors import unknown
from verl_multiturn.needs import Needs

__all__ = ["VerlTools"]

_LOCK = threading.Lock()
# Whose reward functions in verl 0.9.1 compare texts, and whose run or evaluate the answer.
COMPARED = frozenset({
    "openai/gsm8k", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500",
    "math_dapo", "math", "math_dapo_reasoning", "searchR1_nq", "searchR1_triviaqa", "searchR1_popqa",
    "searchR1_hotpotqa", "searchR1_2wikimultihopqa", "searchR1_musique", "searchR1_bamboogle",
})  # fmt: skip
RUN = frozenset({
    "codecontests", "apps", "codeforces", "taco", "hiyouga/geometry3k", "numina_aops_forum",
    "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc", "numina_cn_k12", "numina_olympiads",
})  # fmt: skip


class VerlTools(ReplayEnv):
    """See the module's docstring."""

    needs = Needs(packages=("verl",), data="rows of a data set in verl's form, named by the keyword rows")

    def __init__(
        self,
        rows: str | list[Row] | None = None,
        config: str | None = None,
        functions: str | None = None,
        tools: dict[str, dict[str, Any]] | None = None,
        reward: str | None = None,
        max_turns: int = 10,
        success_reward: float = 1.0,
        dangerously_run_model_text: bool = False,
    ) -> None:
        if rows is None or not (config or functions or tools):
            raise FileNotFoundError(
                "verl_tools brings neither tasks nor tools: name rows, and one of config, functions, tools."
            )
        self.rows, self.max_turns, self.success_reward = Rows(rows), max_turns, success_reward
        self.score = find(reward, "reward function") if reward else None
        if self.score is None:
            _check_sources(self.rows, dangerously_run_model_text)
        self.loop = asyncio.new_event_loop()  # one for all calls: a tool may hold on to it
        self.instances: dict[str, str] = {}
        self.tools = _load(config, functions, tools or {})
        found = {name: tool.tool_schema.function for name, tool in self.tools.items()}
        self.schemas = {
            name: function.parameters.model_dump(exclude_none=True) for name, function in found.items()
        }
        self.listed = describe(self.schemas, {name: f.description for name, f in found.items()})

    def _await(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        self._release()
        self.row = self.rows.of(seed)
        system, self.prompt = split_prompt(self.row["prompt"])
        parts = [system, f"Tools:\n{self.listed}", f"{GRAMMAR} Any other text is your answer."]
        self.instruction = "\n\n".join(filter(None, parts))
        self.given = (self.row.get("extra_info") or {}).get("tools_kwargs") or {}
        self.calls: list[tuple[str, str]] = []
        for name, tool in self.tools.items():
            if hasattr(tool, "create"):  # a function has no life cycle
                start = tool.create(create_kwargs=self._given(name, "create_kwargs"))
                self.instances[name] = self._await(start)[0]
        return self.prompt, {"task_type": str(self.row.get("data_source", "verl_tools"))}

    def _given(self, tool: str, kind: str) -> dict[str, Any]:
        return dict((self.given.get(tool) or {}).get(kind) or {})

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        try:
            call = parse_call(action, self.schemas)
        except ValueError as error:
            return str(error), 0.0, False, {"valid": False}
        if call is not None:
            return self._call(call)
        if not action.strip():
            return f"An answer must not be empty. {GRAMMAR}", 0.0, False, {"valid": False}
        reward = self._score(action)
        for name, instance in self.instances.items():
            paid = self.tools[name].calc_reward(instance, **self._given(name, "calc_reward_kwargs"))
            reward += float(self._await(paid) or 0.0)
        return "", reward, True, {"success": reward >= self.success_reward}

    def _call(self, call: Call) -> tuple[str, float, bool, Info]:
        from verl.tools.function_tool import normalize_function_tool_return

        tool = self.tools[call.name]
        try:
            if call.name in self.instances:
                data = SimpleNamespace(tools_kwargs=self.given, extra_fields={}, messages=[])
                run = tool.execute(self.instances[call.name], call.arguments, agent_data=data)
                response, paid, _ = self._await(run)
            else:
                response, paid, _ = normalize_function_tool_return(self._await(tool.call(call.arguments)))
        except Exception as error:  # as in verl: what a tool raises, the policy reads
            return f"{call.name} failed: {error}", 0.0, False, {"valid": False}
        self.calls.append((str(call), response.text or ""))
        return response.text or "", float(paid or 0.0), False, {}

    def _score(self, answer: str) -> float:
        """The reward function's score of the answer; 0 where there is nothing to score it by."""
        truth, score = _truth(self.row), self.score
        if score is None and truth is not None:
            from verl.utils.reward_score import default_compute_score as score
        if score is None:
            return 0.0
        found = score(
            data_source=self.row.get("data_source", ""),
            solution_str=answer,
            ground_truth=truth,
            extra_info=self.row.get("extra_info") or {},
        )
        return float(found["score"] if isinstance(found, Mapping) else found)

    def state_key(self) -> Hashable:
        """See the module's docstring."""
        return self.prompt, digest(self.calls)

    def random_action(self, rng: Random) -> str:
        """A random call that fits a tool, or (one time in four) a word of the text as the answer."""
        words = f"{self.prompt} {self._observation}".split()
        return rng.choice(words) if rng.random() < 0.25 else str(random_call(self.schemas, words, rng))

    def _release(self) -> None:
        for name, instance in self.instances.items():
            self._await(self.tools[name].release(instance))
        self.instances = {}

    def close(self) -> None:
        """Release the tools and end the event loop."""
        if not self.loop.is_closed():
            self._release()
            self._await(self.loop.shutdown_default_executor())
            self.loop.close()


def _check_sources(rows: Rows, run: bool) -> None:
    """Refuse data sources that verl has no reward function for, or one that runs the model's text."""
    scored = {str(row.get("data_source", "")) for row in rows.all if _truth(row) is not None}
    for source in sorted(scored - COMPARED):
        if source in RUN:
            refuse(f"verl's reward function for data source {source!r}", run, "name your own with reward")
        elif not source.startswith("aime"):
            hint = "Name a reward function of yours with the keyword reward."
            raise unknown("data source of verl's reward functions", source, [*COMPARED, "aime..."], hint)


def _truth(row: Row) -> Any:
    return (row.get("reward_model") or {}).get("ground_truth")


def _load(config: str | None, functions: str | None, tools: dict[str, dict[str, Any]]) -> dict[str, Any]:
    from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY
    from verl.tools.tool_registry import initialize_tools_from_config

    found: list[Any] = []
    # verl's BaseTool prints its schema; and neither that nor verl's import of a class is safe in threads.
    with _LOCK, contextlib.redirect_stdout(io.StringIO()):
        if config:
            if not Path(config).is_file():
                raise ValueError(f"no tool config {config!r}.")
            found += initialize_tools_from_config(config)
        found += [find(path, "tool")(config=given, tool_schema=None) for path, given in tools.items()]
    if functions:
        # Not by verl's loader: it runs the file once more, and refuses to register its tools twice.
        name = load(functions, "functions").__name__
        found += [tool for tool in FUNCTION_TOOL_REGISTRY.values() if tool.fn.__module__ == name]
    names = [tool.name for tool in found]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"there must be a tool, each with a name of its own, not {names}.")
    return {tool.name: tool for tool in found}
