"""A Q model as the prior of a search: which rule uses it, and its values. See `SearchConfig.prior`."""

from collections.abc import Mapping
from typing import Any

from verl_multiturn.search.config import configured
from verl_multiturn.search.q_model import load_q_model, read_spec
from verl_multiturn.search.step_value import ModelValue


def prior_rule(search: Mapping[str, Any], q_model: str | None, option: str) -> str | None:
    """What `multiturn.search.prior` is: as given, else puct where there is a Q model.

    Args:
        search: the block.
        q_model: its folder; None: there is none.
        option: how one is named, for the message.

    Raises:
        ValueError: a prior without a Q model, a Q model that has no effect, or a folder without one.
    """
    given, rule = search.get("prior"), configured(search).prior
    if q_model is None:
        if rule != "none":
            raise ValueError(f"multiturn.search.prior={rule} needs the values of a Q model: give {option}")
        return given
    read_spec(q_model)
    if given == "none":
        raise ValueError(
            f"multiturn.search.prior=none leaves {option.partition('FOLDER')[0]}{q_model} without effect: "
            "leave one of them out, or use puct or visits"
        )
    return rule if rule != "none" else "puct"


def prior_value(q_model: str | None) -> ModelValue | None:
    """The values of the Q model in a folder; None of None."""
    return None if q_model is None else ModelValue(load_q_model(q_model))
