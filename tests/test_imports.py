"""Which way dependencies point: importing the package is cheap, algorithms stay NumPy only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import verl_multiturn as vm

PACKAGE = Path(vm.__file__).parent
HEAVY = ["numpy", "torch", "verl", "ray", "vllm", "transformers", "pandas", "rapidfuzz"]


def loaded_after(code):
    """Which heavy packages a fresh interpreter has loaded after running the code."""
    show = f"import sys; print(*[m for m in {HEAVY} if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\n{show}"],
        capture_output=True, text=True, check=True, cwd=PACKAGE.parent,
    )  # fmt: skip
    return run.stdout.split()


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_after("import verl_multiturn; dir(verl_multiturn)") == []


def test_using_an_algorithm_loads_numpy_only():
    code = (
        "import verl_multiturn as vm\n"
        "tb = vm.TurnBatch.from_lists(['g'], [0], [0], [1.0], anchor=['s'])\n"
        "vm.advantages('gigpo', tb)"
    )
    assert loaded_after(code) == ["numpy"]


def test_public_names():
    assert vm.__version__ == "0.1.0"
    assert {"advantages", "list_algorithms", "TurnBatch", "make", "check_env"} <= set(dir(vm))
    assert vm.advantages is vm.advantages
    with pytest.raises(AttributeError, match="Did you mean 'advantages'"):
        _ = vm.advantage


ALLOWED = {"turns", "returns", "columns", "errors", "algorithms"}


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("algorithms/*.py")), ids=lambda p: p.stem)
def test_algorithms_import_the_data_model_and_numpy_only(path):
    tree = ast.parse(path.read_text())
    top_level = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules = [node.module]
        else:
            continue
        for module in modules:
            root, _, inner = module.partition(".")
            if root == "verl_multiturn":
                assert inner.split(".")[0] in ALLOWED, module
            elif root == "rapidfuzz":
                assert node not in top_level, "rapidfuzz is optional: import it where it is used"
            else:
                assert root == "numpy" or root in sys.stdlib_module_names, module
