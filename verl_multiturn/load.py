"""From a name to an environment class, and which names there are.

`environments` is a namespace package (PEP 420): every folder of that name on `sys.path` takes part,
so a user's own ./environments/my_env.py stands beside the shipped ones. Nothing is registered; a
file is found by its name.
"""

import ast
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_multiturn.errors import unknown

_running: dict[str, threading.RLock] = {}  # by file: no thread may see one that is half run
_caches = threading.Lock()
_HOW = "An environment is a file environments/<name>.py, pkg.module:Class or path/to/file.py:Class."


def load_class(name: str, base: type) -> Any:
    """The environment class that `name` means (see `env.make`); `base` is `Env`.

    Raises:
        ValueError: nothing of that name, or not exactly one class to choose from.
    """
    _see_cwd()
    target, _, class_name = name.partition(":")
    if target.endswith(".py") or "/" in target or os.sep in target:
        module = _import_file(target)
    elif "." in target or class_name:
        module = _import_module(target)
    elif target in _modules():
        module = importlib.import_module(f"environments.{target}")
    else:
        raise unknown("environment", name, list_envs(), _HOW)
    return _named(module, target, class_name, base) if class_name else _only(module, target, base)


def classes(file: str, base: type) -> dict[str, Any]:
    """Names for `make` -> environment classes of a file in an environments folder (its bare name).

    Raises:
        ValueError: there is none in it.
        Exception: whatever importing the file raises.
    """
    module = importlib.import_module(f"environments.{file}")
    found = _candidates(module, base)
    if len(found) > 1:
        return {f"{file}:{name}": cls for name, cls in found.items()}
    return {file: _only(module, file, base)}


def list_envs() -> dict[str, str]:
    """Every environment found: name -> first line of its docstring. Files are read, not imported."""
    _see_cwd()
    found = {}
    for name, path in sorted(_modules().items()):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError) as error:
            found[name] = f"cannot be read: {error}"  # one broken file must not hide the others
            continue
        if any(map(_is_env, tree.body)):
            found[name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def environment_folders() -> list[Path]:
    """The folders that make up the `environments` package, in the order of `sys.path`.

    Raises:
        ValueError: a regular package hides them.
    """
    _see_cwd()
    spec = importlib.util.find_spec("environments")
    if spec is None:
        return []
    if spec.origin is not None:
        raise ValueError(
            f"{spec.origin} hides the environments folder of verl_multiturn: delete this file "
            "(environments is a namespace package) or address yours as path/to/file.py:Class."
        )
    return [Path(folder) for folder in spec.submodule_search_locations or ()]


def _see_cwd() -> None:
    # Two threads in invalidate_caches delete the same entry of a dict: KeyError.
    with _caches:
        # At the end: a file in the working directory must not hide an installed module.
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        importlib.invalidate_caches()


def _modules() -> dict[str, Path]:
    """Name -> file of every public module in the environments folders; the first folder wins."""
    found: dict[str, Path] = {}
    for folder in environment_folders():
        for path in [*folder.glob("*.py"), *folder.glob("*/__init__.py")]:
            name = path.parent.name if path.name == "__init__.py" else path.stem
            if name.isidentifier() and not name.startswith("_"):
                found.setdefault(name, path)
    return found


def _is_env(node: ast.stmt) -> bool:
    """What tells an environment's file from a helper's: `__all__`, or a class that steps."""
    if isinstance(node, ast.Assign):
        return any(isinstance(name, ast.Name) and name.id == "__all__" for name in node.targets)
    methods = node.body if isinstance(node, ast.ClassDef) else []
    return any(isinstance(m, ast.FunctionDef) and m.name in ("step", "_step") for m in methods)


def _import_module(target: str) -> ModuleType:
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name and (target == error.name or target.startswith(error.name + ".")):
            raise ValueError(
                f"no module {target!r} on sys.path (the working directory is {os.getcwd()}). {_HOW}"
            ) from None
        raise  # a dependency of the module: its own sentence says more


def _import_file(target: str) -> ModuleType:
    path = Path(target).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"no environment file {target!r} (the working directory is {os.getcwd()}).")
    return run_file(path, target)


def run_file(path: Path, shown: str) -> ModuleType:
    """The module that a Python file makes; it is run once in a process. `shown`: its name in an error.

    Raises:
        ValueError: it is no Python.
        Exception: whatever running it raises; the next one tries again.
    """
    # A name that follows from the path: what the file defines pickles, and a second run finds the same.
    name = f"environment_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    # A lock for each: one that hangs must not hold up the others.
    with _running.setdefault(name, threading.RLock()):
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{shown!r} is not a Python file: its name must end in .py.")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except SyntaxError as error:
            del sys.modules[name]
            raise ValueError(f"{shown} is not valid Python, line {error.lineno}: {error.msg}") from error
        except BaseException:
            del sys.modules[name]
            raise
        return module


def python_files(settings: Any) -> list[str]:
    """The Python files (file.py, file.py:Class) that texts in `settings`, lists and dicts, name."""
    if isinstance(settings, Mapping):
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        return list(dict.fromkeys(file for one in settings for file in python_files(one)))
    found = re.fullmatch(r"(\S.*\.py)(:\w+)?", settings) if isinstance(settings, str) else None
    return [found[1]] if found else []


def import_path() -> str:
    """`sys.path` as PYTHONPATH, for a process that is to import what this one can."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


def _acts(thing: object) -> bool:
    """A class with `reset` and `step` will do, whatever it inherits from."""
    return isinstance(thing, type) and all(callable(getattr(thing, m, None)) for m in ("reset", "step"))


def _named(module: ModuleType, target: str, class_name: str, base: type) -> Any:
    if class_name not in vars(module):
        raise unknown(f"class of {target}", class_name, _candidates(module, base))
    thing = vars(module)[class_name]
    if not _acts(thing):
        raise ValueError(
            f"{target}:{class_name} is not an environment: subclass verl_multiturn.env.Env, "
            "or give the class reset and step."
        )
    return thing


def _candidates(module: ModuleType, base: type) -> dict[str, Any]:
    """The environment classes a module offers (those of `__all__`, else those it defines).

    Where some inherit from `base`, only these; a class that merely looks like one is then a helper.
    """
    exported = vars(module).get("__all__")
    offered = {
        name: thing
        for name, thing in vars(module).items()
        if _acts(thing) and (thing.__module__ == module.__name__ if exported is None else name in exported)
    }
    return {name: c for name, c in offered.items() if issubclass(c, base)} or offered


def _only(module: ModuleType, target: str, base: type) -> Any:
    found = _candidates(module, base)
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        one = next(iter(found))
        raise ValueError(
            f"{target} has {len(found)} environment classes ({', '.join(found)}): "
            f'write __all__ = ["{one}"] in it, or name one as {target}:{one}.'
        )
    raise ValueError(
        f"{target} has no environment class: write `class MyEnv(Env)` in it and, "
        'if it has an __all__, list it there: __all__ = ["MyEnv"].'
    )
