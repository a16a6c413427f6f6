"""README's own code works as printed."""

import re
from pathlib import Path

import pytest

import verl_multiturn as vm

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def block(words: str) -> str:
    (found,) = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if words in code]
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


@pytest.mark.parametrize("name", sorted(vm.list_recipes()))
def test_every_recipe_has_its_script(name):
    assert (Path(__file__).parents[1] / "recipes" / f"{name}.sh").is_file()
