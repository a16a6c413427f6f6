"""Tool calls in text: {"name": ..., "arguments": {...}}, alone or in <tool_call> tags."""

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_multiturn.errors import unknown

GRAMMAR = 'Call a tool with JSON: {"name": "<tool>", "arguments": {"<argument>": <value>}}.'
KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return json.dumps({"name": self.name, "arguments": self.arguments})


def parse_call(text: str, tools: Mapping[str, Mapping[str, Any]]) -> Call | None:
    """The call that `text` is; None where it is no call but plain text.

    Args:
        text: what the policy wrote.
        tools: name -> JSON schema of the arguments.

    Raises:
        ValueError: it is meant as a call and cannot be one; says why.
    """
    tagged = re.search(r"<tool_call>(.*?)(</tool_call>|$)", text, re.DOTALL)
    body = (tagged.group(1) if tagged else text).strip()
    if not tagged and not body.startswith("{"):
        return None
    try:
        call = json.loads(body)
        arguments = call.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (json.JSONDecodeError, AttributeError, RecursionError) as error:
        raise ValueError(f"This is not a tool call: {error}. {GRAMMAR}") from None
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        raise ValueError(f"A tool call has a name, a text, and arguments, an object. {GRAMMAR}")
    if call["name"] not in tools:
        raise unknown("tool", call["name"], tools)
    _fit(call["name"], arguments, tools[call["name"]])
    return Call(call["name"], arguments)


def _fit(tool: str, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    known = schema.get("properties", {})
    for name, value in arguments.items():
        if name not in known:
            raise unknown(f"argument of {tool}", name, known)
        kinds = _kinds(known[name])
        accepted = tuple(kind for name_of_kind in kinds for kind in KINDS.get(name_of_kind, (object,)))
        stray_bool = isinstance(value, bool) and bool not in accepted and object not in accepted
        if kinds and (not isinstance(value, accepted) or stray_bool):
            raise ValueError(f"Argument {name} of {tool} is {value!r:.80}, must be {' or '.join(kinds)}.")
        if choices := known[name].get("enum"):
            if value not in choices:
                raise unknown(f"value of {tool}'s argument {name}", value, choices)
    if missing := [name for name in schema.get("required", ()) if name not in arguments]:
        raise ValueError(f"{tool} needs {', '.join(missing)}.")


def _kinds(property_schema: Mapping[str, Any]) -> list[str]:
    """The JSON types that a property may have; empty: any."""
    if options := property_schema.get("anyOf"):
        nested = [_kinds(option) for option in options]
        return [kind for kinds in nested for kind in kinds] if all(nested) else []
    kind = property_schema.get("type", [])
    return [kind] if isinstance(kind, str) else list(kind)


def random_call(tools: Mapping[str, Mapping[str, Any]], words: list[str], rng: random.Random) -> Call:
    """A call that fits the schema: any tool, with values of the right types, texts out of `words`."""
    name = rng.choice(sorted(tools))
    schema = tools[name]
    chosen = {key: schema["properties"][key] for key in schema.get("required", ())}
    return Call(name, {key: _random_value(prop, words, rng) for key, prop in chosen.items()})


def _random_value(prop: Mapping[str, Any], words: list[str], rng: random.Random) -> Any:
    if choices := prop.get("enum"):
        return rng.choice(choices)
    kind = next(iter(_kinds(prop)), "string")
    if kind in ("integer", "number"):
        return rng.randint(0, 20)
    if kind == "boolean":
        return rng.random() < 0.5
    empty: dict[str, Any] = {"array": [], "object": {}, "null": None}
    return empty[kind] if kind in empty else rng.choice(words)


def describe(tools: Mapping[str, Mapping[str, Any]], texts: Mapping[str, str]) -> str:
    """The tools for a prompt: one JSON line each, with description and parameters."""
    lines = [
        json.dumps({"name": name, "description": texts.get(name, ""), "parameters": schema})
        for name, schema in tools.items()
    ]
    return "\n".join(lines)
