"""verl_multiturn: multi-turn agent training on stock verl, with credit given to turns.

Nothing heavy is imported before it is used: `import verl_multiturn` loads neither torch nor verl
nor ray nor NumPy. The first use of a name below imports the module it lives in.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "advantages": "algorithms",
    "list_algorithms": "algorithms",
    "make": "env",
    "list_envs": "env",
    "check_env": "check",
    "list_recipes": "recipes_index",
    "Turn": "turns",
    "Trajectory": "turns",
    "TurnBatch": "turns",
    "keep_groups": "algorithms.starpo",
    "bilevel_gae": "algorithms.starpo",
    "vine_advantages": "algorithms.vineppo",
    "split_steps": "algorithms.splitting",
    "q_targets": "algorithms.archer",
    "critic_advantage": "algorithms.archer",
    "expectile_loss": "algorithms.archer",
    "uct": "search.uct",
    "preference_pairs": "search.pairs",
    "dpo_loss": "search.pairs",
    "Panel": "panel",
    "load_panel": "panel",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOME:
        from verl_multiturn.errors import unknown

        raise AttributeError(str(unknown("attribute of verl_multiturn", name, __all__)))
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # the next use does not come here again
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
