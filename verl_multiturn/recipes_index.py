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


def recipe_folders() -> list[Path]:
    """Where recipes and their parts are looked for, in this order: $VERL_MULTITURN_RECIPES, then ours.

    Ours is the checkout's folder, else the installed one.

    Raises:
        FileNotFoundError: there is none, or not the one that the variable names; the places are named.
    """
    ours = (Path(__file__).parents[1] / "recipes", Path(sys.prefix) / "share" / "verl_multiturn" / "recipes")
    found = [place for place in ours if place.is_dir()][:1]
    if own := os.environ.get(FOLDER_VARIABLE):
        if not Path(own).is_dir():
            raise FileNotFoundError(f"{FOLDER_VARIABLE} names {Path(own).resolve()}, which is no folder")
        return [Path(own).resolve(), *found]
    if not found:
        raise FileNotFoundError(
            f"no recipes folder: {', '.join(map(str, ours))} do not exist; set {FOLDER_VARIABLE} to the "
            "folder of your recipes."
        )
    return found


def recipe_folder(name: str) -> Path:
    """The first of `recipe_folders` that has a YAML file of this name.

    Raises:
        ValueError: none has.
    """
    for folder in recipe_folders():
        if (folder / f"{name}.yaml").is_file():
            return folder
    raise unknown("recipe", name, list_recipes())


def list_recipes() -> dict[str, dict[str, Any]]:
    """Recipe name -> algorithm, environment, paper, table, needs, runnable_here, why.

    Raises:
        ValueError: a file is not YAML, a recipe block lacks a key or has one too many.
    """
    recipes: dict[str, dict[str, Any]] = {}
    files = {path.stem: path for place in reversed(recipe_folders()) for path in place.glob("*.yaml")}
    for name, path in sorted(files.items()):
        try:
            content = OmegaConf.to_container(OmegaConf.load(path))
        except YAMLError as error:
            raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
        block = content.get("recipe") if isinstance(content, dict) else None
        if block is not None:
            recipes[name] = _described(path.name, block)
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
