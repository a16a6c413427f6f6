"""Goals: made from what the files say of each product, given a price limit, shuffled once, split.

A goal's price limit follows from the goal itself and its split from its place in the one shuffled list,
never from a worker, a process or the order of a folder.
"""

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from environments.webshop_parts.records import NO_LIMIT, Goal, Product
from verl_multiturn.base_env import derive_seed

Kind = Literal["synthetic", "human"]
SPLITS = ("test", "val", "train")
TEST, VAL = 500, 1000  # goals of the convention: positions 0-499 are test, 500-1499 val, the rest train
SHUFFLE = 233  # the original's seed: with its files, positions are the original's
LIMITS = [10.0 * step for step in range(1, 100)]  # dollars


def make_goals(
    products: Iterable[Product], kind: Kind, made: Mapping[str, Any], human: Mapping[str, Any]
) -> list[Goal]:
    """All goals in the original's order: products as listed, then instructions or option choices.

    Args:
        products: of the catalogue.
        kind: which of the two files to use.
        made: items_ins_v2: asin -> {instruction, instruction_attributes}.
        human: items_human_ins: asin -> list of {instruction, instruction_attributes,
            instruction_options}.
    """
    from_product = _synthetic if kind == "synthetic" else _human
    file = made if kind == "synthetic" else human
    return [
        goal
        for number, product in enumerate(products)
        if product.asin in file
        for goal in from_product(number, product, file[product.asin])
    ]


def _human(number: int, product: Product, written: Sequence[Mapping[str, Any]]) -> Iterator[Goal]:
    for one in written:
        asked = one.get("instruction_options") or []
        options = list(asked.values()) if isinstance(asked, Mapping) else list(asked)
        if attributes := list(one.get("instruction_attributes") or ()):
            text = one["instruction"].strip(".")
            clause, limit = _price_limit(product, text)
            yield Goal(number, text + clause, attributes, options, limit)


def _synthetic(number: int, product: Product, made: Mapping[str, Any]) -> Iterator[Goal]:
    attributes = list(made.get("instruction_attributes") or ())
    if not attributes or not made.get("instruction"):
        return
    names, (clause, limit) = sorted(product.options), _price_limit(product, made["instruction"])
    for values in itertools.product(*(product.options[name] for name in names)):
        chosen = ", and ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
        text = made["instruction"] + (f" with {chosen}" if chosen else "")
        yield Goal(number, text + clause, attributes, list(values), limit)


def _price_limit(product: Product, instruction: str) -> tuple[str, float]:
    """The higher of two of the next four multiples of ten dollars above the price, and how it is told."""
    above = [limit for limit in LIMITS if limit > product.price][:4]
    if len(above) < 2:
        return "", NO_LIMIT
    limit = max(random.Random(derive_seed("price limit", product.asin, instruction)).sample(above, 2))
    return f", and price lower than {limit:.2f} dollars", limit


def arrange(goals: Sequence[Goal]) -> tuple[list[Goal], npt.NDArray[np.int8]]:
    """Shuffle the goals and split them: up to 500 test, 1000 val, the rest train.

    Fewer than 3,000 goals are split in proportion: a sixth test, a third val. A goal whose text stands
    earlier in the list belongs to no split (-1): what a split shows, no other split shows.

    Returns:
        The shuffled list, and for each goal the number of its split in SPLITS, or -1.
    """
    order = list(goals)
    random.Random(SHUFFLE).shuffle(order)
    test = min(TEST, len(order) // 6)
    val = test + min(VAL, len(order) // 3)
    marks = np.full(len(order), 2, np.int8)
    marks[:test], marks[test:val] = 0, 1
    seen = set()
    for position, goal in enumerate(order):
        if goal.text in seen:
            marks[position] = -1
        seen.add(goal.text)
    return order, marks
