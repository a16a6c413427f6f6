r"""Any environment of GEM (gem-llm, arXiv 2510.01051): language games, reasoning-gym, your own.

Description:
    Wraps `gem.make(id, **keywords)`. GEM's own question sets ("math:", "qa:", "code:", "eval:") and
    its word games download data when made; the other games and "rg:" (reasoning-gym) do not.
Actions:
    GEM's: \boxed{...}. An action without \boxed is put into it.
Observation:
    What GEM says of the last action and the board that it shows (its `suffix`).
Start:
    The board. GEM's rules of the game become the instruction.
Rewards:
    GEM's; it scales a solved task to 1.
Episode end:
    GEM's: where it says that an episode is both terminated and truncated, it counts as terminated.
    GEM ends an episode at the first action that it cannot parse. Truncated after `max_turns` turns.
Information:
    `valid`: GEM could parse the action (it does not pay its format error). `success`: the episode
    has paid 1. `task_type`: the id.
State key:
    A hash of the attributes of GEM's object; it leaves out its counts of turns and resets.

GEM draws from the global `random`: tasks are drawn from the seed, what happens later from the
dynamics seed, and the global generators are put back after each call. Hence a process of its own.

"code:" runs the model's programs and "math:" evaluates its answers (so do some of "eval:"): both are
refused. So do nine scorers of "rg:"; they get plain formulas and lists only (`adapter_parts.model_text`).

Arguments:
    id: "game:Sokoban-v0-easy", "rg:countdown", or a class of yours (a gem.Env) as "pkg.module:Class"
        or "path/to/file.py:Class".
    keywords: of `gem.make`, or of the class.
    max_turns: turns in an episode; by default GEM's.
    dangerously_run_model_text: play what is refused otherwise.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, ClassVar, Literal

from environments.adapter_parts.chance import drawing_from
from environments.adapter_parts.model_text import refuse, scored
from environments.adapter_parts.objects import find
from environments.adapter_parts.state import digest
from verl_multiturn.env import Env, Info, Seed
from verl_multiturn.errors import unknown
from verl_multiturn.needs import Needs

__all__ = ["Gem"]

# Counts of turns and resets, and where GEM's question sets take the next question from.
NO_STATE = frozenset({"turn_count", "idx", "epoch", "ds", "ds_iter", "dataset", "mp_pool"})
RUN_THE_TEXT = ("gem.envs.code_env:", "gem.envs.math_env:", "gem.envs.math_visual_env:")


@dataclass(frozen=True)
class _GemNeeds(Needs):
    @property
    def install(self) -> str:
        """Without its dependencies, which pin other versions than verl needs."""
        return "pip install --no-deps gem-llm && pip install reasoning-gym"


class Gem(Env):
    """See the module's docstring."""

    needs: ClassVar[Needs] = _GemNeeds(packages=("gem", "reasoning_gym"))
    runs_in: Literal["thread", "process"] = "process"

    def __init__(
        self,
        id: str = "game:GuessTheNumber-v0-easy",
        keywords: dict[str, Any] | None = None,
        max_turns: int | None = None,
        dangerously_run_model_text: bool = False,
    ) -> None:
        self.id, self.limit = id, max_turns
        with drawing_from(Random(0)):  # GEM's games already reset when they are made
            self.env = _make(id, keywords or {}, dangerously_run_model_text)
        self.max_turns = self._turns()

    def _turns(self) -> int:
        return int(self.limit or getattr(self.env, "max_turns", None) or 1)

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        with drawing_from(self.rng):
            rules, info = self.env.reset(seed=self.rng.getrandbits(31))
        self.max_turns, self.paid = self._turns(), 0.0
        board = info.get("suffix", "")
        self.instruction = rules if board else r"Answer the question; write the answer as \boxed{answer}."
        return board or rules, {"task_type": self.id}

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        from gem.utils.constants import LanguageGameReward

        boxed = action if "\\boxed" in action or not action.strip() else f"\\boxed{{{action.strip()}}}"
        with drawing_from(self.noise):
            said, reward, terminated, truncated, info = self.env.step(boxed)
        self.paid += float(reward)
        unparsed = terminated and reward == LanguageGameReward.format_error_reward
        valid = bool(info.get("valid", bool(action.strip()) and not unparsed))
        more = {"valid": valid, "success": self.paid > 1 - 1e-6, "truncated": bool(truncated)}
        return "\n".join(filter(None, (said, info.get("suffix")))), float(reward), bool(terminated), more

    def state_key(self) -> Hashable:
        """See the module's docstring."""
        return digest(vars(self.env), NO_STATE)

    def random_action(self, rng: Random) -> str:
        """GEM's random action, drawn with the caller's `rng`."""
        with drawing_from(rng):
            return str(self.env.sample_random_action())


def _make(id: str, keywords: dict[str, Any], run: bool) -> Any:
    import gem
    from gem.envs.registration import ENV_REGISTRY

    target = ENV_REGISTRY[id].entry_point if id in ENV_REGISTRY else id
    if str(target).startswith(RUN_THE_TEXT):
        refuse(f"GEM's {id}", run)
    if id in ENV_REGISTRY:
        try:
            made = gem.make(id, **keywords)
        except LookupError as error:  # NLTK's, of many lines
            missing = next(line.strip() for line in str(error).splitlines() if line.strip(" *"))
            raise FileNotFoundError(f"{id} needs data of NLTK: {missing}") from None
        if id.startswith("rg:"):
            made.reward_fn = partial(scored, made.ds)
        return made
    if id.partition(":")[0] in {known.partition(":")[0] for known in ENV_REGISTRY}:
        raise unknown("GEM environment", id, ENV_REGISTRY)
    return find(id, "GEM environment")(**keywords)
