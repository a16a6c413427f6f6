"""verl's tools as an environment: real BaseTools and function tools, a user's reward, replayed snapshots."""

import json

import pytest

from verl_multiturn.check import check_env
from verl_multiturn.env import make

pytest.importorskip("verl.tools.base_tool", reason="needs verl")

FILE = '''
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import function_tool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

SCHEMA = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Write a line down; shows all lines.",
        "parameters": {
            "type": "object",
            "properties": {"line": {"type": "string", "description": "The line."}},
            "required": ["line"],
        },
    },
}


@function_tool
def multiply(a: int, b: int) -> str:
    """Multiply two whole numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a * b)


@function_tool
async def divide(a: int, b: int) -> str:
    """Divide two whole numbers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a / b)


class Notes(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.notes = {}

    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate(SCHEMA)

    async def create(self, instance_id=None, create_kwargs=None, **kwargs):
        instance_id, response = await super().create(instance_id)
        self.notes[instance_id] = [*(create_kwargs or {}).get("lines", ())]
        return instance_id, response

    async def execute(self, instance_id, parameters, **kwargs):
        self.notes[instance_id].append(parameters["line"])
        return ToolResponse(text="; ".join(self.notes[instance_id])), self.config.get("pay", 0.0), {}

    async def calc_reward(self, instance_id, scale=0.0, **kwargs):
        return scale * len(self.notes[instance_id])

    async def release(self, instance_id, **kwargs):
        del self.notes[instance_id]


def exact(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str.strip() == ground_truth), "source": data_source}
'''
YAML = """
tools:
  - class_name: my_tools_of_this_test.Notes
    config: {type: native, pay: 0.5}
"""


@pytest.fixture
def kwargs(tmp_path):
    (tmp_path / "my_tools_of_this_test.py").write_text(FILE)
    (tmp_path / "tools.yaml").write_text(YAML)
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {n} times 7?"}],
            "reward_model": {"style": "rule", "ground_truth": str(7 * n)},
            "extra_info": {"tools_kwargs": {"note": {"create_kwargs": {"lines": [f"n = {n}"]}}}},
        }
        for n in range(3, 9)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = f"{tmp_path}/my_tools_of_this_test.py"
    return {
        "rows": f"{tmp_path}/rows.jsonl",
        "functions": file,
        "tools": {f"{file}:Notes": {"pay": 0.01}},
        "reward": f"{file}:exact",
    }


@pytest.fixture(autouse=True)
def forget():
    """verl registers function tools for the whole process; each test writes its file anew."""
    from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY

    before = dict(FUNCTION_TOOL_REGISTRY)
    yield
    FUNCTION_TOOL_REGISTRY.clear()
    FUNCTION_TOOL_REGISTRY.update(before)


def call(name, **arguments):
    return json.dumps({"name": name, "arguments": arguments})


def test_contract(kwargs):
    report = check_env("verl_tools", episodes=6, **kwargs)
    assert report.ok, str(report)


def test_an_episode_with_both_kinds_of_tools(kwargs, capsys):
    env = make("verl_tools", **kwargs)
    start, info = env.reset(0)
    assert (start, info["task_type"]) == ("What is 3 times 7?", "openai/gsm8k")
    assert '"name": "multiply"' in env.instruction and "Multiply two whole numbers." in env.instruction
    assert env.step(call("multiply", a=3, b=7))[:2] == ("21", 0.0)
    assert env.step(f"So: <tool_call>{call('note', line='21')}</tool_call>")[:2] == ("n = 3; 21", 0.01)
    assert env.step(call("divide", a=21, b=7))[0] == "3.0"
    assert env.step("21")[1:] == (1.0, True, False, {"valid": True, "success": True})
    env.reset(0)
    assert env.step("22")[1:] == (0.0, True, False, {"valid": True, "success": False})
    env.close()
    assert capsys.readouterr().out == ""


def test_what_does_not_fit_is_answered_with_a_sentence(kwargs):
    env = make("verl_tools", **kwargs)
    env.reset(1)
    key = env.state_key()
    for action, says in (
        (call("multipli", a=1, b=2), "Did you mean 'multiply'"),
        (call("multiply", a=1), "multiply needs b."),
        (call("multiply", a=1, b="x"), "must be integer"),
        (call("divide", a=1, b=0), "divide failed: division by zero"),
        ("<tool_call>multiply</tool_call>", "not a tool call"),
        ("", "must not be empty"),
    ):
        text, reward, terminated, _, info = env.step(action)
        assert says in text and (reward, terminated, info["valid"]) == (0.0, False, False)
        assert env.state_key() == key


def test_verls_config_and_verls_rewards(kwargs, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    env = make("verl_tools", rows=kwargs["rows"], config=f"{tmp_path}/tools.yaml")
    env.reset(2)
    assert env.step(call("note", line="x"))[:2] == ("n = 5; x", 0.5)
    assert env.step("It is #### 35")[1:4] == (1.0, True, False)  # verl's scorer of gsm8k


def test_the_rewards_of_the_tools_are_added(kwargs):
    pay = {"note": {"calc_reward_kwargs": {"scale": 0.25}}}
    rows = [{"prompt": "Take notes.", "extra_info": {"tools_kwargs": pay}}]
    env = make("verl_tools", rows=rows, tools=kwargs["tools"])
    env.reset(0)
    for line in "ab":
        env.step(call("note", line=line))
    assert env.step("done")[1] == pytest.approx(0.5)


def test_each_episode_has_its_own_instances_and_a_fork_its_own_tools(kwargs):
    env = make("verl_tools", **kwargs)
    env.reset(0)
    env.step(call("note", line="a"))
    child = env.fork()
    assert child.step(call("note", line="b"))[0] == "n = 3; a; b"
    assert env.step(call("note", line="c"))[0] == "n = 3; a; c"
    env.reset(0)
    assert env.step(call("note", line="d"))[0] == "n = 3; d"
    assert [len(tool.notes) for name, tool in env.tools.items() if name == "note"] == [1]


def test_wrong_arguments_are_named(kwargs, tmp_path):
    with pytest.raises(FileNotFoundError, match="neither tasks nor tools"):
        make("verl_tools", rows=kwargs["rows"])
    for change, says in (
        ({"rows": "none.jsonl"}, "no file of rows"),
        ({"functions": "none.py"}, "functions: no file"),
        ({"config": "none.yaml"}, "no tool config"),
        ({"reward": kwargs["reward"].replace("exact", "exac")}, "Did you mean 'exact'"),
        ({"tools": {"json:dump": {}}, "functions": None}, "cannot be made"),
    ):
        with pytest.raises(ValueError, match=says):
            make("verl_tools", **(kwargs | change))
