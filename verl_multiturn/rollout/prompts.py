"""What the policy reads at a turn: chat messages from templates, fitted to a token budget. Pure.

Two layouts use it. Turn rows start a fresh chat each turn, with a window of past turns in it
(`first`, then `turn`); trajectory rows append to one chat (`first`, then `next`).
"""

import importlib
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from verl_multiturn.errors import unknown

Messages = list[dict[str, str]]
FIELDS = ("instruction", "observation", "history", "shown", "turn", "number", "admissible", "format")
HISTORY_FIELDS = ("index", "number", "observation", "action")
ALLOWED = {  # what a run allows, the same at every turn -> where it is set
    "max_turns": "multiturn.max_turns",
    "budget": "multiturn.max_actions",
    "max_actions": "multiturn.action.max_actions",
    "separator": "multiturn.action.separator",
}


class PromptTooLong(ValueError):
    """A prompt exceeds its budget even without history and list of actions."""


@dataclass(frozen=True)
class Templates:
    """Prompt templates (`multiturn.prompt`); placeholders are those of `FIELDS`.

    turn counts the turns taken, number is that of this turn: turn + 1. Those of `ALLOWED`, and several, do
    not change in a run: `of` has replaced them.
    """

    system: str | None = None
    first: str = "{instruction}\n\nCurrent observation:\n{observation}\n{admissible}\n{format}"
    turn: str = (
        "{instruction}\n\nTurns taken so far: {turn}. The latest {shown}:\n{history}\n\n"
        "Current observation:\n{observation}\n{admissible}\n{format}"
    )
    next: str = "{observation}\n{admissible}"
    history: int = 2  # past turns shown in turn rows
    history_item: str = "[turn {index}] {observation}\n[action] {action}"
    admissible: str = "Legal actions: {actions}"
    format: str = ""

    def __post_init__(self) -> None:
        known = {"history_item": HISTORY_FIELDS, "admissible": ("actions",)}
        for name in ("first", "turn", "next", "history_item", "admissible"):
            _check(name, getattr(self, name), known.get(name, FIELDS))
        if self.history < 0:
            raise ValueError(f"multiturn.prompt.history is {self.history}, must be >= 0")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Templates that say what a run allows.

        Args:
            settings: the group `multiturn`; a limit left out is none. `prompt.several` is shown where a
                turn may hold several actions.

        Raises:
            ValueError: an unknown placeholder, or one of a limit that is not set.
        """
        prompt = {name: value for name, value in settings["prompt"].items() if name != "policy"}
        action, several = settings["action"], prompt.pop("several", "")
        turns, budget, most = settings.get("max_turns"), settings.get("max_actions"), action["max_actions"]
        most = most if budget is None else min(most, budget)  # a turn holds no more than an episode
        allowed = {
            "max_turns": turns,
            "budget": budget,
            "max_actions": most,
            "separator": action["separator"],
        }
        _check("several", several, tuple(ALLOWED))
        said = _filled("several", several, allowed) if most > 1 else ""
        for name in ("first", "turn", "next"):
            _check(name, prompt[name], (*FIELDS, *ALLOWED, "several"))
            prompt[name] = _filled(name, prompt[name], allowed | {"several": said.format()})
        return cls(**prompt)


@dataclass
class View:
    """All that a prompt may show of an episode so far."""

    instruction: str
    observation: str
    admissible: Sequence[str] | None = None
    past: list[tuple[str, str]] = field(default_factory=list)  # (observation, action) per turn


@dataclass(frozen=True)
class Prompt:
    """A prompt that fits, and what was left out to make it fit."""

    messages: Messages
    ids: list[int]
    dropped_turns: int = 0
    dropped_actions: int = 0


class PromptPolicy:
    """Builds the messages of a turn. Subclass it for another wording (`multiturn.prompt.policy`)."""

    def __init__(self, templates: Templates) -> None:
        self.templates = templates

    def messages(self, view: View, shown: int, actions: Sequence[str] | None) -> Messages:
        """A fresh chat that shows the last `shown` past turns and these legal actions."""
        name = "turn" if view.past and shown else "first"
        return [*self._system(), self._user(name, view, shown, actions)]

    def follow_up(self, view: View) -> dict[str, str]:
        """The message appended to a running chat."""
        return self._user("next", view, 0, view.admissible)

    def fit(self, view: View, encode: Callable[[Messages], list[int]], budget: int) -> Prompt:
        """Build the prompt of a turn within `budget` tokens.

        History goes first, oldest turn first, then the list of legal actions from its end; the
        instruction and the observation are never cut.

        Raises:
            PromptTooLong: what is left still exceeds the budget.
        """
        for messages, dropped_turns, dropped_actions in self.choices(view):
            ids = encode(messages)
            if len(ids) <= budget:
                return Prompt(messages, ids, dropped_turns, dropped_actions)
        raise PromptTooLong(
            f"the prompt of turn {len(view.past)} has {len(ids)} tokens without any history, "
            f"data.max_prompt_length is {budget}: raise it, or shorten the observation"
        )

    def choices(self, view: View) -> Iterator[tuple[Messages, int, int]]:
        """What the policy may read, the whole first: messages, turns and legal actions left out."""
        window = min(self.templates.history, len(view.past))
        for shown in range(window, -1, -1):
            yield self.messages(view, shown, view.admissible), window - shown, 0
        keep = total = len(view.admissible or ())
        while keep:
            keep //= 2
            yield self.messages(view, 0, (view.admissible or ())[:keep]), window, total - keep

    def shorter(self, view: View, read: Messages) -> list[Messages]:
        """What is left to read where `read`, a prompt of this turn, is too long: less and less of it.

        None in a running chat, whose prompts are not built from the view alone.
        """
        found = [messages for messages, _, _ in self.choices(view)]
        return found[found.index(read) + 1 :] if read in found else []

    def _system(self) -> Messages:
        system = self.templates.system
        return [] if system is None else [{"role": "system", "content": system}]

    def _user(self, name: str, view: View, shown: int, actions: Sequence[str] | None) -> dict[str, str]:
        start = len(view.past) - shown
        items = (
            self.templates.history_item.format(index=i, number=i + 1, observation=observation, action=action)
            for i, (observation, action) in enumerate(view.past[start:], start)
        )
        listed = self.templates.admissible.format(actions=", ".join(actions)) if actions else ""
        content = getattr(self.templates, name).format(
            instruction=view.instruction,
            observation=view.observation,
            history="\n".join(items),
            shown=shown,
            turn=len(view.past),
            number=len(view.past) + 1,
            admissible=listed,
            format=self.templates.format,
        )
        return {"role": "user", "content": content.strip("\n")}


def _check(name: str, template: str, known: tuple[str, ...]) -> None:
    for _, placeholder, _, _ in string.Formatter().parse(template):
        if placeholder is not None and placeholder not in known:
            raise unknown(f"placeholder in multiturn.prompt.{name}", placeholder, known)


def _filled(name: str, template: str, values: Mapping[str, Any]) -> str:
    """A template with these placeholders replaced; the others stay, and braces stay braces."""
    parts = list[str]()
    for text, placeholder, spec, conversion in string.Formatter().parse(template):
        parts.append(_literal(text))
        if placeholder is None:
            continue
        if placeholder not in values:
            how = f"{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}"
            parts.append(f"{{{placeholder}{how}}}")
        elif values[placeholder] is None:
            key, shown = ALLOWED[placeholder], f"{{{placeholder}}}"
            raise ValueError(
                f"multiturn.prompt.{name} shows {shown}, and {key} is null: set it, or leave {shown} out"
            )
        else:
            parts.append(_literal(str(values[placeholder])))
    return "".join(parts)


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def prompt_policy(settings: Mapping[str, Any]) -> PromptPolicy:
    """The policy that the group `multiturn` describes; refuses what it cannot be built from."""
    return load_policy(settings["prompt"]["policy"])(Templates.of(settings))


def load_policy(name: str | None) -> type[PromptPolicy]:
    """The class that `multiturn.prompt.policy` names as "pkg.module:Class"; None: `PromptPolicy`."""
    if name is None:
        return PromptPolicy
    module, _, attribute = name.partition(":")
    policy = getattr(importlib.import_module(module), attribute or "PromptPolicy", None)
    if not (isinstance(policy, type) and issubclass(policy, PromptPolicy)):
        raise ValueError(
            f"multiturn.prompt.policy={name!r} is not a subclass of PromptPolicy; write pkg.module:Class"
        )
    return policy
