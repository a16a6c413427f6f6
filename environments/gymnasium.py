"""Any environment of Gymnasium, in text.

Description:
    Wraps `gymnasium.make(id, **keywords)`: toy text, MiniGrid, your own. See examples/minigrid.py.
Actions:
    The names of a discrete space (any case): those of `actions`, else of the environment's own
    Enum, else the usual ones of toy text, else numbers. In a text space any text that it contains;
    in other spaces JSON, such as [0.5, -1].
Observation:
    What `render` makes of it; else a text observation as it is, else the library's "ansi" picture (a
    coloured cell becomes [colour:cell]), else the observation as JSON.
Start:
    Gymnasium's `reset(seed)`, with a number that follows from the task. What happens later is drawn
    from the dynamics seed, put into `unwrapped.np_random`; an environment with a generator
    elsewhere keeps the one of its task.
Rewards:
    Gymnasium's; `invalid_reward` for an invalid turn.
Episode end:
    Gymnasium's. Truncated after `max_turns` turns too.
Information:
    `success`: what the library's info says in "success" or "is_success", else terminated with a last
    reward above `success_above`. `task_type`: the id.
State key:
    The observation as the policy reads it; it leaves out what that does not show.

Arguments:
    id: "FrozenLake-v1", "minigrid:MiniGrid-Empty-5x5-v0" (imports the package first), or a class as
        "pkg.module:Class" or "path/to/file.py:Class".
    keywords: of `gymnasium.make`, or of the class.
    render: "pkg.module:function" or "path/to/file.py:function", called with the unwrapped
        environment and the observation; returns the text.
    actions: names of the discrete actions, in order.
    instruction: the task in words; by default how the environment's documentation begins.
    max_turns: turns in an episode; by default the library's limit, else 100.
    success_above: see `success`.
    invalid_reward: at least what a step costs, or silence would pay.
"""

import inspect
import json
import re
from enum import EnumMeta
from typing import Any

from environments.adapter_parts.objects import find
from verl_multiturn.env import Env, Info, Seed
from verl_multiturn.needs import Needs

__all__ = ["Gymnasium"]

NAMES = {
    "FrozenLake": ["left", "down", "right", "up"],
    "CliffWalking": ["up", "right", "down", "left"],
    "Taxi": ["south", "north", "east", "west", "pickup", "dropoff"],
    "Blackjack": ["stick", "hit"],
}
COLOURS = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"]


class Gymnasium(Env):
    """See the module's docstring."""

    needs = Needs(extra="gym", packages=("gymnasium",), licence="MIT")

    def __init__(
        self,
        id: str = "FrozenLake-v1",
        keywords: dict[str, Any] | None = None,
        render: str | None = None,
        actions: list[str] | None = None,
        instruction: str | None = None,
        max_turns: int | None = None,
        success_above: float = 0.0,
        invalid_reward: float = 0.0,
    ) -> None:
        self.id, self.render = id, render
        self.success_above, self.invalid_reward = success_above, invalid_reward
        if render:
            find(render, "render function")
        self.env = _make(id, keywords or {}, text=render is None)
        self.max_turns = max_turns or getattr(self.env.spec, "max_episode_steps", None) or 100
        self.names, self.mask = self._names(actions), None
        listed = f" Actions: {', '.join(self.names)}." if self.names else ""
        self.instruction = (instruction or _summary(self.env.unwrapped)) + listed

    def _names(self, given: list[str] | None) -> list[str]:
        from gymnasium.spaces import Discrete

        space, own = self.env.action_space, getattr(self.env.unwrapped, "actions", None)
        if not isinstance(space, Discrete):
            return []
        if given is None and isinstance(own, EnumMeta):
            given = list(own.__members__)
        usual = next((names for start, names in NAMES.items() if self.id.startswith(start)), None)
        names = given or usual or [str(space.start + number) for number in range(int(space.n))]
        if len({name.lower() for name in names}) != space.n:
            raise ValueError(f"{self.id} has {space.n} actions; each needs a name of its own, not {names}.")
        return names

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        observation, info = self.env.reset(seed=self.rng.getrandbits(31))
        self._use_noise()
        self.mask = info.get("action_mask")
        return self._text(observation), {"task_type": self.id}

    def _reseed(self, seed: int) -> None:
        super()._reseed(seed)
        self._use_noise()

    def _use_noise(self) -> None:
        import numpy as np

        self.env.unwrapped.np_random = np.random.default_rng(self.noise.getrandbits(63))

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        try:
            chosen = self._parse(action)
        except ValueError:
            return self._observation, self.invalid_reward, False, {"valid": False}
        observation, reward, terminated, truncated, info = self.env.step(chosen)
        self.mask = info.get("action_mask")
        won = info.get("success", info.get("is_success", terminated and reward > self.success_above))
        more = {"success": bool(won), "truncated": bool(truncated), "valid": bool(info.get("valid", True))}
        return self._text(observation), float(reward), bool(terminated), more

    def _parse(self, action: str) -> Any:
        """What the action space accepts; ValueError where `action` is no such thing."""
        import numpy as np
        from gymnasium.spaces import Text

        space = self.env.action_space
        if self.names:
            spelt = " ".join(action.split()).lower()
            return int(space.start) + [name.lower() for name in self.names].index(spelt)
        value = action if isinstance(space, Text) else json.loads(action)
        chosen = np.asarray(value, space.dtype) if isinstance(value, list) else value
        if not space.contains(chosen):
            raise ValueError(f"{action!r} is not in {space}")
        return chosen

    def _text(self, observation: Any) -> str:
        if self.render:
            return str(find(self.render, "render function")(self.env.unwrapped, observation))
        if isinstance(observation, str):
            return observation
        if self.env.render_mode == "ansi":
            return _uncoloured(self.env.render())
        return json.dumps(observation, default=lambda thing: thing.tolist())  # NumPy's arrays and scalars

    def admissible(self) -> list[str] | None:
        """The names; where the library masks actions, those that change something."""
        if self.mask is None:
            return list(self.names) or None
        return [name for name, useful in zip(self.names, self.mask, strict=True) if useful]

    def close(self) -> None:
        """Close the library's environment."""
        self.env.close()


def _make(id: str, keywords: dict[str, Any], text: bool) -> Any:
    import gymnasium

    if ":" in id and not re.search(r"-v\d+$", id):
        return find(id, "Gymnasium environment")(**keywords)
    try:
        made = gymnasium.make(id, disable_env_checker=True, **keywords)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ValueError(f"Gymnasium cannot make {id!r}: {error}") from error
    if text and "render_mode" not in keywords and "ansi" in (made.metadata.get("render_modes") or ()):
        made.close()
        return gymnasium.make(id, disable_env_checker=True, render_mode="ansi", **keywords)
    return made


def _uncoloured(picture: str) -> str:
    """Terminal colours as words: a colour may be all that tells where the player is."""

    def word(match: re.Match[str]) -> str:
        codes = [int(code) for code in match[1].split(";") if code]
        colour = next((COLOURS[code % 10] for code in codes if code // 10 in (3, 4)), "marked")
        return f"[{colour}:{match[2]}]"

    named = re.sub(r"\x1b\[([\d;]*)m(.*?)\x1b\[0m", word, picture)
    # Toy text adds the last action, "  (Right)": no part of the state, and the policy knows it.
    return re.sub(r"^ *\(\w+\)$", "", named, flags=re.MULTILINE).strip("\n")


def _summary(env: Any) -> str:
    """The first paragraph of its documentation that is no heading."""
    for paragraph in inspect.cleandoc(type(env).__doc__ or "").split("\n\n"):
        lines = [line.strip() for line in paragraph.splitlines() if line and not line.startswith("#")]
        if lines:
            return " ".join(lines)
    return f"Play {type(env).__name__}."
