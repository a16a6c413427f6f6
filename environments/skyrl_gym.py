"""Any BaseTextEnv of SkyRL-gym: its verifiers (gsm8k, aime, text2sql, ...) or your own.

Description:
    Wraps `skyrl_gym.make(id, env_config=config, extras=row)`. The tasks are rows of a table, as
    SkyRL's data sets have them: each has a "prompt", and what its environment asks for beside it
    ("reward_spec": {"ground_truth": ...} for gsm8k). SkyRL-gym brings no rows.
Actions:
    Text, as the prompt asks for. An empty one is not passed on.
Observation:
    The messages of SkyRL-gym's answer, joined.
Start:
    The prompt without its system message, which becomes the instruction.
Rewards:
    SkyRL-gym's; 0 for an empty action.
Episode end:
    Terminated when SkyRL-gym says done. Truncated after `max_turns` turns.
Information:
    `success`: a reward of `success_reward` or more, when done. `task_type`: the row's "data_source",
    else the id. `metadata`: SkyRL-gym's.
State key:
    A hash of the prompt and of the attributes of SkyRL-gym's object; it leaves out its count of turns.

A BaseTextEnv knows no seed: one that draws from a global generator breaks the contract, and check-env
says so.

Arguments:
    rows: a .jsonl, .json or .parquet file, or the rows. Task number i is row i modulo their count.
    id: a registered name, or a class of yours as "pkg.module:Class" or "path/to/file.py:Class". lcb,
        searchcode and rlm run the model's programs, text2sql its statements (SQLite writes files): refused.
    config: passed as `env_config`.
    max_turns: turns in an episode; by default SkyRL-gym's.
    success_reward: see `success`.
    dangerously_run_model_text: play what is refused otherwise.
"""

from collections.abc import Hashable
from typing import Any

from environments.adapter_parts.model_text import refuse
from environments.adapter_parts.objects import Row, Rows, find, split_prompt
from environments.adapter_parts.state import digest
from verl_multiturn.env import Env, Info, Seed
from verl_multiturn.errors import unknown
from verl_multiturn.needs import Needs

__all__ = ["SkyRLGym"]

RUN_THE_TEXT = tuple(f"skyrl_gym.envs.{name}." for name in ("lcb", "searchcode", "rlm", "sql"))


class SkyRLGym(Env):
    """See the module's docstring."""

    needs = Needs(
        extra="skyrl",
        packages=("skyrl_gym",),
        data="rows of a data set in SkyRL's form, named by the keyword rows",
    )

    def __init__(
        self,
        rows: str | list[Row] | None = None,
        id: str = "gsm8k",
        config: dict[str, Any] | None = None,
        max_turns: int | None = None,
        success_reward: float = 1.0,
        dangerously_run_model_text: bool = False,
    ) -> None:
        if rows is None:
            raise FileNotFoundError(
                "skyrl_gym brings no tasks: name a .jsonl, .json or .parquet file with the keyword rows."
            )
        self.id, self.config, self.limit, self.success_reward = id, config or {}, max_turns, success_reward
        self.dangerous, self.rows = dangerously_run_model_text, Rows(rows)
        self.inner = self._make(self.rows.all[0])
        self.max_turns = max_turns or self.inner.max_turns

    def _make(self, row: Row) -> Any:
        import skyrl_gym
        from skyrl_gym.envs.registration import registry

        extras = {"extra_info": {}} | {key: value for key, value in row.items() if key != "prompt"}
        given = {"env_config": self.config, "extras": extras}
        if ":" not in self.id and self.id not in registry:
            raise unknown("SkyRL-gym environment", self.id, registry)
        target = self.id if ":" in self.id else registry[self.id].entry_point
        if str(target).startswith(RUN_THE_TEXT):
            refuse(f"SkyRL-gym's {self.id}", self.dangerous)
        make = find(self.id, "SkyRL-gym environment") if ":" in self.id else skyrl_gym.make
        try:
            return make(**given) if ":" in self.id else make(self.id, **given)
        except (AssertionError, KeyError) as error:
            raise ValueError(f"a row does not suit {self.id}: {error}") from error

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        row = self.rows.of(seed)
        self.inner = self._make(row)
        prompt = row.get("prompt", "")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages, _ = self.inner.init(messages)
        self.instruction, start = split_prompt(messages)
        self.instruction = self.instruction or "Do what the text asks."
        self.max_turns, self.prompt = self.limit or self.inner.max_turns, start
        return start, {"task_type": str(row.get("data_source", self.id))}

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        if not action.strip():
            return self._observation, 0.0, False, {"valid": False}
        result = self.inner.step(action)
        reward, done = float(result["reward"]), bool(result["done"])
        metadata = result.get("metadata") or {}
        info = {"success": done and reward >= self.success_reward, "metadata": metadata}
        return "\n\n".join(m["content"] for m in result["observations"]), reward, done, info

    def state_key(self) -> Hashable:
        """See the module's docstring."""
        return digest((self.prompt, vars(self.inner)), frozenset({"turns"}))

    def close(self) -> None:
        """Close SkyRL-gym's environment."""
        self.inner.close()
