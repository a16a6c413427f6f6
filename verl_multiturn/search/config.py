"""Limits, penalties and budgets of a search, and the numbers of the Q-value paper's runs.

The paper (arXiv:2409.09345) names the iterations m and the width n without numbers; the presets hold
those of the authors' scripts: WebShop (30 iterations, 5 candidates, 10 turns, a time-out counts
-0.5, an invalid action -1) and HotPotQA (7 turns, -1, 0). Both stop at the first success.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from verl_multiturn.algorithms.registry import Config
from verl_multiturn.errors import unknown


@dataclass(frozen=True)
class SearchConfig(Config):
    """Keywords of a search; `preset` has the paper's."""

    iterations: int = 30  # m, returns to book; the paper's runs use 30 (later 20; Phi-3 HotPotQA 70)
    width: int = 5  # n, candidates asked for at a leaf; later runs use 3
    max_depth: int = 10  # turns from the root to the deepest node
    rollout_depth: int | None = None  # turns from the root after which a rollout stops; None: max_depth
    c: float = 2**0.5  # exploration, Eq. 4
    gamma: float = 1.0  # discount of a turn
    timeout_return: float = 0.0  # what follows where a limit ended the episode
    invalid_return: float = 0.0  # what follows an action the environment does not know, or no candidate
    stop_on_success: bool = False  # end at the first solved node, after its return is booked
    stop_on_rollout_success: bool = False  # likewise after a rollout that solved the task
    revisit_closed: bool = False  # plain UCT: a closed node may be selected again, which costs nothing
    divide_twice: bool = False  # UCT on W / N² as in the authors' code
    parallel: int = 1  # k, visits of a tree under way at the same time, in waves
    virtual_loss: float = 1.0  # taken off W for each visit under way, which counts in N as well
    prior: Literal["none", "visits", "puct"] = "none"  # how values known beforehand guide the selection
    prior_visits: int = 1  # prior=visits: a value counts as so many visits; they are never booked
    prior_temperature: float = 1.0  # prior=puct: shares are the softmax of the values over this
    max_proposals: int | None = None  # answers of the policy, never exceeded
    max_env_steps: int | None = None  # steps of the environment, never exceeded

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("iterations", "width", "max_depth", "parallel", "prior_visits"):
            self.check_range(key, 1)
        for key in ("rollout_depth", "max_proposals", "max_env_steps"):
            if getattr(self, key) is not None:
                self.check_range(key, self.max_depth if key == "rollout_depth" else 1)
        for key in ("c", "virtual_loss"):
            self.check_range(key, 0)
        self.check_range("prior_temperature", 1e-6)
        self.check_range("gamma", 0, 1)


_WEBSHOP = SearchConfig(timeout_return=-0.5, invalid_return=-1.0, stop_on_success=True)
PRESETS = {
    "default": SearchConfig(),
    "paper_webshop": _WEBSHOP,
    "paper_hotpotqa": SearchConfig(max_depth=7, timeout_return=-1.0, stop_on_success=True),
    "repo_compat": replace(_WEBSHOP, divide_twice=True),
}


def preset(name: str) -> SearchConfig:
    """A config of `PRESETS`; change it with `dataclasses.replace`."""
    if name not in PRESETS:
        raise unknown("search preset", name, PRESETS)
    return PRESETS[name]


def configured(settings: Mapping[str, Any]) -> SearchConfig:
    """The config of a group of keys: `preset`, and fields of `SearchConfig`; null leaves the preset's.

    Raises:
        ValueError: an unknown preset or key, or a value that does not fit.
    """
    base = preset(settings.get("preset") or "default")
    given = {key: value for key, value in settings.items() if key != "preset" and value is not None}
    valid = [field.name for field in fields(SearchConfig)]
    for key in given:
        if key not in valid:
            raise unknown("key of a search", key, ["preset", *valid])
    return replace(base, **given)
