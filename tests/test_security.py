"""What models write and users hand over is data: read, shown and stored, never run; secrets stay out."""

import ast
import re
from pathlib import Path

import pytest

from verl_multiturn.run_files import HIDDEN, without_secrets
from verl_multiturn.runs import Run, RunWriter

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "verl_multiturn").rglob("*.py"), *(ROOT / "environments").rglob("*.py")])
# Snapshots and caches of our own making, in this process or its cache folder; never a user's file.
MAY_UNPICKLE = {
    "verl_multiturn/base_env.py", "verl_multiturn/laws.py", "environments/alfworld.py",
    "environments/alfworld_parts/engine.py", "environments/jericho.py", "environments/tau2.py",
    "environments/textworld.py",
}  # fmt: skip


def calls(path):
    """(name called, the call) of every call in a file, dotted names whole."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def users(pattern):
    """The files that call something of this name."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if any(re.fullmatch(pattern, name) for name, _ in calls(path))
    }


def test_nothing_that_is_read_is_run():
    assert users(r"eval|exec|compile|os\.system|os\.popen|yaml\.load|yaml\.unsafe_load") == set()
    assert users(r"(pickle|cPickle|dill|joblib|cloudpickle)\.loads?|pd\.read_pickle") <= MAY_UNPICKLE


def test_no_shell_and_no_pickled_arrays():
    for path in SOURCES:
        for name, call in calls(path):
            words = {word.arg: ast.unparse(word.value) for word in call.keywords}
            assert words.get("shell") != "True", path
            assert words.get("allow_pickle") != "True" and words.get("trust_remote_code") != "True", path
            if name == "torch.load":
                assert words.get("weights_only") == "True", path


def test_nothing_listens():
    """Pages are files, the rollout's servers are verl's and Ray's; a preset asks for no dashboard."""
    assert users(r".*(HTTPServer|TCPServer|create_server|start_server|uvicorn\.run|\.listen)") == set()
    assert "include_dashboard: false" in (ROOT / "verl_multiturn/config/hardware/cpu.yaml").read_text()


@pytest.mark.parametrize(
    "config",
    [
        {"env_kwargs": {"api_key": "hunter2"}},
        {
            "ray_kwargs": {
                "ray_init": {"runtime_env": {"env_vars": {"WANDB_API_KEY": "hunter2", "B": "hunter2"}}}
            }
        },
        {"a": [{"Password": "hunter2"}, {"access_token": "hunter2"}]},
        {"env_kwargs": {"urls": ["https://me:hunter2@host:8000/retrieve"]}},
        {"client_secret": {"id": "hunter2"}},
        {"env_kwargs": {"hf_token": "hunter2", "token": "hunter2", "private_key": "hunter2"}},
        {"headers": {"Authorization": "Bearer hunter2"}, "cache": "redis://:hunter2@host:6379"},
    ],
)
def test_secrets_are_not_recorded(tmp_path, config):
    RunWriter(tmp_path, {"multiturn": config}).close()
    text = (tmp_path / "config.yaml").read_text()
    assert "hunter2" not in text and HIDDEN in text


def test_what_is_no_secret_is_recorded_as_it_is(tmp_path):
    config = {
        "max_action_tokens": 5,
        "api_key": None,
        "tokenizer": "x",
        "token_baseline": True,
        "url": "http://host/a@b:c",
        "n": [1, {"a": 2.5}],
    }
    assert without_secrets(config) == config
    RunWriter(tmp_path, config).close()
    assert Run(tmp_path).config == config


def test_names_in_files_do_not_leave_the_run(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        writer.metrics(1, {"a": 1})
        writer.trajectories("train", 1, [])
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "1.jsonl.zst").write_bytes(
        (tmp_path / "run/trajectories/train/1.jsonl.zst").read_bytes()
    )
    with pytest.raises(ValueError, match="unknown split"):
        Run(tmp_path / "run").trajectories("../../outside", 1)
