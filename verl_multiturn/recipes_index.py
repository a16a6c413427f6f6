"""Which recipes there are, which table of which paper each rebuilds, and whether it runs here.

A recipe is a YAML file in the recipes folder with a top-level block

    recipe: {algorithm: gigpo, environment: alfworld, paper: arXiv 2505.10978, table: Table 1,
             needs: 2 GPUs of 80 GB, cpu: true}

`cpu: true` says that `hardware=cpu` runs it without an accelerator. YAML files without the block
are parts of other recipes and are not listed.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from verl_multiturn.errors import unknown

KEYS = ("algorithm", "environment", "paper", "table", "needs", "cpu")
FOLDER_VARIABLE = "VERL_MULTITURN_RECIPES"


def recipes_dir() -> Path:
    """The recipes folder: $VERL_MULTITURN_RECIPES, the checkout's, or the installed one.

    Raises:
        FileNotFoundError: there is none; the places are named.
    """
    places = [
        Path(__file__).parents[1] / "recipes",
        Path(sys.prefix) / "share" / "verl_multiturn" / "recipes",
    ]
    if own := os.environ.get(FOLDER_VARIABLE):
        places = [Path(own).resolve()]
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"no recipes folder: {', '.join(map(str, places))} do not exist; "
        f"set {FOLDER_VARIABLE} to the folder of your recipes."
    )


def list_recipes() -> dict[str, dict[str, Any]]:
    """Recipe name -> algorithm, environment, paper, table, needs, runnable_here, why.

    Raises:
        ValueError: a file is not YAML, a recipe block lacks a key or has one too many.
    """
    recipes = {}
    for path in sorted(recipes_dir().glob("*.yaml")):
        try:
            content = OmegaConf.to_container(OmegaConf.load(path))
        except YAMLError as error:
            raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
        block = content.get("recipe") if isinstance(content, dict) else None
        if block is not None:
            recipes[path.stem] = _described(path.name, block)
    return recipes


def _described(file: str, block: Any) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise ValueError(f"{file}: `recipe` must be a mapping with the keys {', '.join(KEYS)}")
    for key in block:
        if key not in KEYS:
            raise unknown(f"key in the recipe block of {file}", key, KEYS)
    if absent := [key for key in KEYS if key not in block]:
        raise ValueError(f"{file}: the recipe block lacks {', '.join(absent)}")
    runnable, why = runnable_here(cpu=bool(block["cpu"]))
    shown = {str(key): value for key, value in block.items() if key != "cpu"}
    return shown | {"runnable_here": runnable, "why": why}


def has_cuda() -> bool:
    """Whether a GPU of NVIDIA's is there; asking torch would import it."""
    return Path("/dev/nvidiactl").exists()


def runnable_here(cpu: bool) -> tuple[bool, str]:
    """Whether a recipe runs on this machine, and why; `cpu`: it supports hardware=cpu."""
    absent = [name for name in ("verl", "vllm") if importlib.util.find_spec(name) is None]
    if absent:
        return False, f"not installed: {', '.join(absent)}"
    if has_cuda():
        return True, "a GPU is present"
    return (True, "with hardware=cpu") if cpu else (False, "needs a GPU")
