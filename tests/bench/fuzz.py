"""Model outputs that nobody would write, for every place that reads one: for tests and reliability.py."""

import itertools
import json
import random
import time

from environments import countdown, hotpotqa, search_qa, webshop
from environments.adapter_parts.model_text import formula, literal
from environments.adapter_parts.tool_calls import parse_call
from environments.arithmetic_parts.answers import algebra, boxed, marked, normal
from environments.textworld_parts.frotz import command_of
from verl_multiturn.algorithms.splitting import split_steps
from verl_multiturn.env import make
from verl_multiturn.rollout.parsing import ActionFormat, parse

PIECES = (
    "<think>", "</think>", "<action>", "</action>", "<answer>", "</answer>", "<search>", "</search>",
    "<tool_call>", "</tool_call>", "<", ">", "</", "||", "search[", "click[", "]", "[", "(", ")", "{", "}",
    '{"name": "add", "arguments": {"a": 1}}', '{"name":', '"arguments": [', "null", "NaN", "-0", "1e999",
    "9" * 5000, "1/0", "2**9", "//", "(1+", "1_0", "0x", "place 3 at row 1 col 2", "clear row 9 col 9",
    "up", "left", "right || up", "R U R'", "<<1>>", "\n#### ", "\n\n", " ", "\t", "\r", "\0", "\u2028", "é",
    "日本", "\U0001f600", "\ud800", "$", "$$", "\\(", "\\)", "\\[", "\\]", "\\begin{a}", "\\end{a}",
    "\\begin{tabular}", "[asy]", "[/asy]", ". A", "? B", "e.g. C", ",", " and ", "%s", "{0}", "\\boxed{",
    "\\frac12", "\\frac{1}{2}", "\\sqrt{", "\\text{", "#### 7", "lookup[", "finish[", "Is it an animal?",
    "Is it a dog", "save", "take lamp", "[[1],",
    "__import__('os')", "'; DROP TABLE x; --", "\x1b[31m", "<script>alert(1)</script>",
)  # fmt: skip
TOOLS = {"add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": [1, 2]}},
                 "required": ["a"]}}  # fmt: skip
FORMS = (
    ActionFormat(), ActionFormat(tag=None, think=False),
    ActionFormat(tag="answer", think=False, max_actions=3),
    ActionFormat(tag="a.*(b", max_actions=2, separator="|"),
)  # fmt: skip
# Texts that drive a regular expression back to each of its starts: one opening after another, no end.
HOSTILE = (
    "<think>", "<action>", "<answer>", "</think>", "<tool_call>", "<search>", "search[", "click [ ",
    "] ", "\\begin{", "\\begin{a}", "\\begin{tabular}", "[asy]", "$ ", "$$", "$a$", "\\(", "\\[", ". ",
    ".  A", "\n", " ", "a, ", "((", "1+", "{", "\\boxed{", "\\frac{", "\\frac{1}{2}", "\\sqrt{", "\\text{",
    "1,000,", "lookup [ ", "Is it ",
)  # fmt: skip
ENVIRONMENTS = (
    "frozen_lake",
    "sokoban",
    "bandit",
    "chain_sum",
    "countdown",
    "sudoku",
    "rubiks_cube",
    "game_2048",
    "arithmetic",
    "hotpotqa",
    "twenty_questions",
    "guess_my_city",
)
# Else hardly any text would be an action.
WRAPPED = {"hotpotqa": ("{}", "search[{}]", "lookup[{}]", "finish[{}]"), "arithmetic": ("{}", "#### {}")}


def outputs(count, seed=0):
    """Texts out of the pieces, random characters between them now and then."""
    rng = random.Random(seed)
    for _ in range(count):
        parts = rng.choices(PIECES, k=rng.choice((0, 1, 2, 3, 5, 8, 13)))
        if rng.random() < 0.3:
            parts.append("".join(chr(rng.randrange(1, 0x2FFF)) for _ in range(rng.randrange(30))))
        rng.shuffle(parts)
        yield "".join(parts)


def call(text):
    """A tool call, or its own refusal, which is shown to the model."""
    try:
        return parse_call(text, TOOLS)
    except ValueError as error:
        return len(str(error))


def parsers():
    """{name: function of a text} of everything that reads what a model wrote."""
    found = {
        f"action {number}": lambda text, form=form: parse(text, form) for number, form in enumerate(FORMS)
    }
    for rule in ("line", "math", "sentence", "none"):
        found[f"split {rule}"] = lambda text, rule=rule: split_steps(text, rule)
    found["search_qa"] = search_qa._parse
    found["webshop"] = webshop.ACTION.fullmatch
    found["countdown"] = lambda text: countdown.parse(text, "+-*/")
    found["tool call"] = call
    found["hotpotqa"] = hotpotqa._parse
    found["arithmetic marked"], found["arithmetic boxed"] = marked, boxed
    found["arithmetic normal form"], found["arithmetic algebra"] = normal, lambda text: algebra(normal(text))
    # What the text games (textworld, jericho, detective) read before their engine does.
    found["command"], found["command wide"] = command_of, lambda text: command_of(text, wide=True)
    found["formula"], found["literal"] = formula, literal
    return found


def stepper(name, seed=0):
    """A function that gives a text to an environment as an action; a new episode when one ends."""
    env, number, wrap = make(name), seed, itertools.cycle(WRAPPED.get(name, ("{}",)))
    env.reset(number)

    def act(text):
        nonlocal number
        _, reward, terminated, truncated, _ = env.step(next(wrap).format(text))
        assert isinstance(reward, int | float)
        if terminated or truncated:
            number += 1
            env.reset(number)

    return act


def run(count, seed=0):
    """{reader: (texts, exceptions)}; the first three exceptions, in words."""
    readers = parsers() | {f"environment {name}": stepper(name) for name in ENVIRONMENTS}
    texts = list(outputs(count, seed))
    found, raised = {}, []
    for name, read in readers.items():
        bad = 0
        for text in texts:
            try:
                read(text)
            except Exception as error:  # whatever it is, it is what is looked for
                bad += 1
                raised.append(f"{name}: {type(error).__name__}: {error} on {text[:100]!r}")
        found[name] = (len(texts), bad)
    return found, raised[:3]


def growth(read, piece, length):
    """How many times longer a text of four times the length takes; 4 is linear, 16 quadratic."""

    def seconds(size):
        text, best = (piece * (size // len(piece) + 1))[:size], float("inf")
        for _ in range(3):
            began = time.process_time()  # of this process: other work does not count
            read(text)
            best = min(best, time.process_time() - began)
        return best

    # Below a few milliseconds the clock's own noise would be measured.
    small = seconds(length)
    return (seconds(4 * length) / small if small > 2e-4 else 0.0), small


def worst(length):
    """The largest growth of every parser over all hostile texts: {parser: (growth, text)}."""
    found = {}
    for name, read in parsers().items():
        for piece in HOSTILE:
            times, _ = growth(read, piece, length)
            if times > found.get(name, (0.0, ""))[0]:
                found[name] = (times, piece)
        found.setdefault(name, (0.0, ""))
    return found


def damaged(data, rng, flips=12):
    """A file's bytes: cut off, bits flipped, replaced, empty, or somebody else's."""
    yield b""
    yield data[: len(data) // 2]
    yield from (data[: rng.randrange(len(data))] for _ in range(4))
    for _ in range(flips):
        flipped = bytearray(data)
        for _ in range(3):
            flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        yield bytes(flipped)
    yield from (b"[]", b"null", b"{}", b'"x"', b"\xff\xfe\x00", b'{"tasks": 3}', b"[" * 50_000)


def changed(text, rng, count):
    """JSON in which one thing at a time is missing, or something else."""
    for _ in range(count):
        root = [json.loads(text)]
        holders, some = [], [root]
        while some:
            holder = some.pop()
            if isinstance(holder, dict | list) and holder:
                holders.append(holder)
                some += holder.values() if isinstance(holder, dict) else holder
        holder = rng.choice(holders)
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        if isinstance(holder, dict) and rng.random() < 0.5:
            del holder[key]
        else:
            holder[key] = rng.choice((None, 7, -1.5, [], {}, "", "x", [None], {"a": 1}, True))
        yield json.dumps(root[0]).encode()


def jsonable(found):
    """For a report."""
    return json.loads(json.dumps(found))
