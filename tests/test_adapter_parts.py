"""What the adapters share, and that each can be imported without its library and finds the real one."""

import json
import random
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from environments.adapter_parts.chance import drawing_from
from environments.adapter_parts.objects import Rows, find, split_prompt
from environments.adapter_parts.state import digest
from environments.adapter_parts.tool_calls import Call, parse_call, random_call

ROOT = Path(__file__).parents[1]
LIBRARY = {
    "gymnasium": "gymnasium",
    "gem": "gem",
    "textarena": "textarena",
    "skyrl_gym": "skyrl_gym",
    "reasoning_gym": "reasoning_gym",
    "tau2": "tau2",
    "verl_tools": "verl",
}


def python(code, folder=ROOT):
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_an_adapter_imports_without_its_library():
    code = f"""if True:
        import importlib, sys
        for library in {list(LIBRARY.values())}:
            sys.modules[library] = None  # import now fails
        for name in {list(LIBRARY)}:
            print(importlib.import_module(f"environments.{{name}}").__all__[0])"""
    assert python(code).split() == [
        "Gymnasium", "Gem", "TextArena", "SkyRLGym", "ReasoningGym", "Tau2", "VerlTools",
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["gymnasium", str(ROOT / "environments" / "gymnasium.py")])
def test_a_file_named_like_its_library_finds_the_library(how):
    pytest.importorskip("gymnasium", reason="needs gymnasium")
    code = f"""if True:
        from verl_multiturn.env import make
        import sys
        env = make({how!r}, keywords={{"is_slippery": False}})
        env.reset(0)
        print(env.step("down")[4]["valid"], sys.modules["gymnasium"].__file__)"""
    valid, file = python(code).split()
    # .venv may stand in the checkout: what counts is that it is not the file of ours.
    assert valid == "True" and Path(file).parent.name == "gymnasium"
    assert ROOT / "environments" not in Path(file).parents


def test_the_global_generators_are_lent_and_put_back():
    def draw(source):
        with drawing_from(source):
            return random.random(), float(np.random.random())

    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()
    one, other = random.Random(1), random.Random(1)
    first = [draw(one) for _ in range(3)]
    random.seed(6)  # what was drawn outside does not matter
    random.setstate(before[0])
    assert first == [draw(other) for _ in range(3)] and len(set(first)) == 3
    with pytest.raises(ZeroDivisionError), drawing_from(one):
        raise ZeroDivisionError
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


class Thing:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def test_a_digest_is_of_the_content():
    def build(turn, words):
        inner = Thing(grid=np.eye(2), turn=turn, rng=random.Random(turn), kind=str, line=deque([1, 2]))
        outer = Thing(inner=inner, words=set(words), table={"a": 1, "turn": turn, 3: None})
        inner.outer = outer  # a cycle
        return outer

    one, same = build(1, ["x", "y", "z"]), build(2, ["z", "x", "y"])
    assert digest(one, {"turn"}) == digest(same, {"turn"}) != digest(one)
    same.inner.grid[0, 1] = 3
    assert digest(one, {"turn"}) != digest(same, {"turn"})
    code = (
        "from environments.adapter_parts.state import digest; print(digest({'a': {'x', 'y', 'z'}, 'b': 2.5}))"
    )
    assert python(code).strip() == digest({"b": 2.5, "a": {"z", "y", "x"}})  # another PYTHONHASHSEED


TOOLS = {
    "add": {
        "properties": {"a": {"type": "integer"}, "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
        "required": ["a"],
    },
    "colour": {"properties": {"name": {"type": "string", "enum": ["red", "blue"]}}, "required": ["name"]},
}


def test_tool_calls_that_fit():
    call = Call("add", {"a": 1, "b": None})
    for text in (
        str(call),
        f"Let me see.\n<tool_call>\n{call}\n</tool_call> done",
        '{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": null}"}',
    ):
        assert parse_call(text, TOOLS) == call
    assert parse_call("The answer is 4.", TOOLS) is None
    rng = random.Random(0)
    for _ in range(50):
        drawn = random_call(TOOLS, ["word"], rng)
        assert parse_call(str(drawn), TOOLS) == drawn


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"name": "ad", "arguments": {}}', "unknown tool 'ad'; valid: add, colour. Did you mean 'add'?"),
        ('{"name": "add", "arguments": {}}', "add needs a."),
        ('{"name": "add", "arguments": {"a": "1"}}', "Argument a of add is '1', must be integer."),
        ('{"name": "add", "arguments": {"a": true}}', "is True, must be integer"),
        ('{"name": "add", "arguments": {"c": 1}}', "unknown argument of add 'c'"),
        ('{"name": "colour", "arguments": {"name": "rot"}}', "valid: red, blue"),
        ('{"name": 3}', "A tool call has a name"),
        ('{"name": "add", "arguments": [1]}', "A tool call has a name"),
        ("<tool_call>add(1)</tool_call>", "This is not a tool call"),
        ("<tool_call>[1]</tool_call>", "This is not a tool call"),
        ("{" * 3000, "This is not a tool call"),
    ],
)
def test_tool_calls_that_do_not_fit_say_why(text, says):
    with pytest.raises(ValueError, match=r".") as caught:
        parse_call(text, TOOLS)
    assert says in str(caught.value)


def test_rows_come_from_every_kind_of_file(tmp_path):
    pd = pytest.importorskip("pandas", reason="needs pandas")
    rows = [{"id": "a", "prompt": [{"role": "user", "content": "1?"}], "n": 1}, {"id": "b", "n": 2}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "t.json").write_text(json.dumps(rows))
    sources = [rows, str(tmp_path / "t.jsonl"), str(tmp_path / "t.json")]
    if pytest.importorskip("pyarrow", reason="parquet needs pyarrow"):
        pd.DataFrame(rows).to_parquet(tmp_path / "t.parquet")
        sources.append(str(tmp_path / "t.parquet"))
    for source in sources:
        table = Rows(source)
        assert len(table) == 2 and table.of(3)["n"] == 2 and table.of("a")["prompt"][0]["content"] == "1?"
        with pytest.raises(ValueError, match="unknown id of a row 'c'; valid: a, b"):
            table.of("c")
    (tmp_path / "t.csv").write_text("n\n1\n")
    (tmp_path / "bad.json").write_text("[")
    (tmp_path / "empty.jsonl").write_text("")
    for name, says in (
        ("t.csv", "unknown kind of file"),
        ("bad.json", "is not JSON"),
        ("empty.jsonl", "no rows"),
        ("none.json", "no file of rows"),
    ):
        with pytest.raises(ValueError, match=says):
            Rows(str(tmp_path / name))


def test_objects_are_found_by_path(tmp_path):
    (tmp_path / "mine.py").write_text("import os\n\n\ndef act():\n    return 3\n")
    path = f"{tmp_path}/mine.py"
    assert find(f"{path}:act", "function")() == 3
    assert find(f"{path}:act", "function") is find(f"{path}:act", "function")
    assert find("json:dumps", "function") is json.dumps
    for wrong, says in (
        (f"{path}:atc", "unknown function of .*mine.py 'atc'; valid: act. Did you mean 'act'"),
        (f"{tmp_path}/no.py:act", "no file"),
        ("no_such_module:x", "no module 'no_such_module'"),
        ("act", "must be given as"),
    ):
        with pytest.raises(ValueError, match=says):
            find(wrong, "function")


def test_a_file_is_run_once_and_whole_for_all_threads(tmp_path):
    runs = tmp_path / "runs"
    code = f"import time\nopen({str(runs)!r}, 'a').write('x')\ntime.sleep(0.2)\n\ndef act():\n    return 3\n"
    (tmp_path / "slow.py").write_text(code)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: find(f"{tmp_path}/slow.py:act", "function"), range(4)))
    assert len(set(found)) == 1 and runs.read_text() == "x"


def test_prompts_are_split():
    messages = [{"role": "system", "content": "s"}, *({"role": "user", "content": c} for c in "ab")]
    assert split_prompt(messages) == ("s", "a\n\nb") and split_prompt("a") == ("", "a")
