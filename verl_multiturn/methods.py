"""The values of `multiturn.algorithm`, by where their advantages come from."""

from typing import Any

from omegaconf import DictConfig

from verl_multiturn.algorithms import list_algorithms
from verl_multiturn.compose import plain

VERL_ALGORITHMS = {"grpo": "grpo", "ppo": "gae", "verl": None}  # name -> verl's adv_estimator
TOKEN_ALGORITHMS = ("bilevel_gae",)  # ours, with one advantage per token
ACTOR_ALGORITHMS = ("archer", "q_advantage")  # ours, whose advantages a model beside the policy gives
SEARCH = "qvalue"  # trees, pairs and a Q model; verl trains nothing


def turn_rewards(settings: DictConfig) -> bool:
    """Whether token-level estimators see each turn's reward, or the return on the last turn."""
    given = settings.turn_rewards
    return settings.algorithm in TOKEN_ALGORITHMS if given is None else bool(given)


def keywords(settings: DictConfig) -> dict[str, Any]:
    """The keywords of the run's algorithm: its own block, or `multiturn.keywords` for a user's own."""
    block = settings.keywords if ":" in settings.algorithm else settings.get(settings.algorithm)
    return {} if block is None else plain(block)


def list_trainable() -> tuple[str, ...]:
    """Values of `multiturn.algorithm`."""
    return (*sorted((*list_algorithms(), *ACTOR_ALGORITHMS)), *TOKEN_ALGORITHMS, "ppo", SEARCH, "verl")
