import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_multiturn.cli import app
from verl_multiturn.recipes_index import list_recipes, recipe_folder, recipe_folders, runnable_here
from verl_multiturn.runs import RunWriter

ROOT = Path(__file__).parents[1]
RECIPE = """
recipe: {algorithm: gigpo, environment: sokoban, paper: arXiv 2505.10978, table: Table 1,
         needs: 2 GPUs, cpu: true}
other: ${recipe.algorithm}
"""
BROKEN = """
from verl_multiturn.env import Env

class Broken(Env):
    instruction = "go"

    def _reset(self, seed):
        return "start", {}

    def _step(self, action):
        raise KeyError("lost")
"""


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def sentence(*arguments):
    """What is said of a mistake: one line, exit code 2."""
    output = call(*arguments, code=2)
    assert "Traceback" not in output and len(output.splitlines()) == 1
    return output


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_MULTITURN_RECIPES", str(tmp_path))
    (tmp_path / "gigpo_sokoban.yaml").write_text(RECIPE)
    (tmp_path / "base.yaml").write_text("lr: 1")
    return tmp_path


def test_lists():
    assert "frozen_lake" in call("envs")
    assert "gigpo" in call("algorithms")


def test_recipes(recipes):
    assert recipe_folders() == [recipes, ROOT / "recipes"]
    assert recipe_folder("gigpo_sokoban") == recipes and recipe_folder("grpo_sokoban") == ROOT / "recipes"
    assert set(list_recipes()) >= {"gigpo_sokoban", "grpo_sokoban"} and "base" not in list_recipes()
    recipe = list_recipes()["gigpo_sokoban"]  # the user's, not ours
    runnable, why = runnable_here(cpu=True)
    assert recipe == {
        "algorithm": "gigpo", "environment": "sokoban", "paper": "arXiv 2505.10978",
        "table": "Table 1", "needs": "2 GPUs", "runnable_here": runnable, "why": why,
    }  # fmt: skip
    assert "gigpo_sokoban" in call("recipes")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("{algorithm: gigpo}", "the recipe block lacks environment, paper, table, needs, cpu"),
        ("{algoritm: gigpo}", "unknown key in the recipe block of bad.yaml 'algoritm'"),
        ("gigpo", "`recipe` must be a mapping"),
    ],
)
def test_a_bad_recipe_is_named(recipes, block, message):
    (recipes / "bad.yaml").write_text(f"recipe: {block}")
    said = sentence("recipes")
    assert message in said and "bad.yaml" in said


def test_no_recipes_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("verl_multiturn.recipes_index.__file__", str(tmp_path / "a" / "b.py"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert "no recipes folder" in sentence("recipes")


def test_check_env(tmp_path):
    assert "frozen_lake: ok" in call("check-env", "frozen_lake", "size=3", "--episodes", "2")
    (tmp_path / "broken.py").write_text(BROKEN)
    assert "FAIL" in call("check-env", tmp_path / "broken.py", code=1)
    assert "Did you mean 'frozen_lake'?" in sentence("check-env", "frozen_lak")
    assert "'size' is not key=value" in sentence("check-env", "frozen_lake", "size")


def test_report(tmp_path):
    record = {"env": "x", "task": "1", "task_type": "a", "return": 1.0, "success": True, "turns": []}
    with RunWriter(tmp_path / "run") as writer:
        writer.trajectories("val", 0, [record | {"success": False}] * 4)
        writer.trajectories("val", 9, [record] * 4)
    output = call("report", tmp_path / "run", "--png", tmp_path / "curve.png", "--task-types")
    assert "+100.0 points; the 95 % intervals are disjoint" in output
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    said = sentence("report", tmp_path / "rum")
    assert "is not a recorded run" in said and said.strip().endswith("run")
    assert "unknown panel 'nix'" in sentence("report", tmp_path / "run", "--panel", "nix")


def test_debug_shows_the_traceback():
    result = CliRunner().invoke(app, ["--debug", "check-env", "frozen_lak"])
    assert isinstance(result.exception, ValueError)


def test_the_command_starts_without_heavy_imports():
    code = (
        "import sys, verl_multiturn.cli;"
        "print({'pandas', 'matplotlib', 'torch', 'verl', 'ray', 'numpy'} & set(sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert printed.strip() == "set()"
