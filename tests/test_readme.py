"""README's own code works as printed."""

import re
from pathlib import Path

import pytest

import verl_multiturn as vm
from verl_multiturn import main
from verl_multiturn.compose import compose

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def block(words: str, language: str = "python") -> str:
    (found,) = [code for code in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if words in code]
    return found


def test_the_environment_keeps_the_contract(tmp_path):
    (tmp_path / "my_env.py").write_text(block("class Count"))
    report = vm.check_env(f"{tmp_path}/my_env.py:Count")
    assert report.ok, str(report)


def test_the_advantages_are_computed():
    names: dict = {}
    exec(block("TurnBatch.from_lists"), names)
    tb = names["tb"]
    assert vm.advantages("gigpo", tb, gamma=0.95, by_std=False) == pytest.approx([0.975, 0.5, -0.975])


def test_the_recipe_passes_every_check(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_env.py").write_text(block("class Count"))
    text = block("recipe:", "yaml")
    path = tmp_path / text.splitlines()[0].removeprefix("# ")
    path.parent.mkdir()
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_MULTITURN_RECIPES", path.parent.name)
    assert f"VERL_MULTITURN_RECIPES={path.parent.name} bash recipes/run.sh {path.stem}" in README
    assert main.main(["--config-name", path.stem, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"ok: rloo on {tmp_path}/my_env.py:Count (64 val, 512 train tasks), turn rows, 8 x 8" in said
    # A part of ours is found beside it.
    parts = "defaults: [alfworld, credit: rloo, _self_, hardware: cpu, optional on: alfworld_cpu]"
    path.write_text(re.sub("defaults: .*", parts, text).partition("multiturn:\n")[0])
    assert compose(path.stem, []).multiturn.env_kwargs.data == "tiny"


@pytest.mark.parametrize("name", sorted(vm.list_recipes()))
def test_every_recipe_has_its_script(name):
    assert (Path(__file__).parents[1] / "recipes" / f"{name}.sh").is_file()
