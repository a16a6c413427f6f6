"""A made-up catalogue in the original's file format: enough of it that a shopper must search and compare.

The products are invented; scores on them say nothing about scores on WebShop's own 1,000 or 1.18 million.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from environments.webshop_parts.words import (
    OPTIONS,
    PURPOSES,
    SYLLABLES,
    ProductKind,
    listed,
    product_kinds,
)
from verl_multiturn.base_env import derive_seed

DIGITS = "0123456789ABCDEFGHJKLMNPQRSTUVWXYZ"
OPENINGS = (
    "i am looking for a {what}",
    "i need a {what}",
    "find me a {what}",
    "i want to buy a {what}",
    "looking for {what}",
    "can you help me find a {what}",
    "i would like a {what}",
    "please get me {what}",
)
FILLERS = (
    "A thoughtful choice for every home.",
    "Made to be used, day after day.",
    "Our team answers every question within a day.",
    "If it does not suit you, send it back within 30 days.",
    "Tested by people who know what they want.",
    "Packed with care and ready to be given away.",
)


def generate(products: int, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Draw a catalogue.

    Args:
        products: how many.
        seed: of all chance in it.

    Returns:
        What the original has as items_shuffle.json, items_ins_v2.json and items_human_ins.json.

    Raises:
        ValueError: fewer than one product.
    """
    if products < 1:
        raise ValueError(f"a catalogue needs at least 1 product, not {products}.")
    kinds, asins = product_kinds(), _asins(random.Random(derive_seed("asin", seed)))
    items, made, human = [], {}, {}
    for number in range(products):
        rng = random.Random(derive_seed("product", seed, number))
        kind = rng.choice(kinds)
        attributes = rng.sample(kind.attributes, rng.randint(4, 6))
        item = _item(next(asins), kind, attributes, rng)
        asked = attributes[: rng.randint(1, 3)]
        made[item["asin"]] = {
            "attributes": sorted(attributes),
            "instruction": f"Find me {', '.join(asked)} {kind.query}",
            "instruction_attributes": asked,
        }
        human[item["asin"]] = [_written(kind, rng.sample(attributes, rng.randint(1, 2)), item, rng)]
        items.append(item)
    return items, made, human


def write_catalogue(folder: str | Path, products: int = 1000, seed: int = 0) -> Path:
    """Write a generated catalogue as the three files of the original; `data=folder` plays it.

    Args:
        folder: made if need be.
        products: how many.
        seed: of all chance in it.

    Returns:
        The folder.
    """
    where = Path(folder).expanduser()
    where.mkdir(parents=True, exist_ok=True)
    names = ("items_shuffle.json", "items_ins_v2.json", "items_human_ins.json")
    for name, content in zip(names, generate(products, seed), strict=True):
        (where / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return where


def _asins(rng: random.Random) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        asin = "B0" + "".join(rng.choices(DIGITS, k=8))
        if asin not in seen:
            seen.add(asin)
            yield asin


def _item(asin: str, kind: ProductKind, attributes: list[str], rng: random.Random) -> dict[str, Any]:
    brand = "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3))).capitalize()
    # A title tells one or two attributes; the rest stand among the features: to be sure, look.
    shown = [attribute.title() for attribute in rng.sample(attributes, rng.choice((1, 1, 2)))]
    purpose = rng.choice(listed(PURPOSES[kind.category]))
    name = ", ".join([f"{brand} {shown[0]} {kind.noun} for {purpose}", *shown[1:]])
    bullets = [f"{attribute.upper()}: {rng.choice(FILLERS)}" for attribute in attributes]
    rng.shuffle(bullets)
    more = " ".join(rng.sample(FILLERS, 2))
    return {
        "asin": asin,
        "name": name,
        "category": kind.category,
        "query": kind.query,
        "product_category": f"{kind.category.capitalize()} › {kind.place}",
        "full_description": f"This {kind.noun.lower()} by {brand} is {rng.choice(attributes)}. {more}",
        "small_description": bullets,
        "pricing": _pricing(kind, rng),
        "customization_options": {name: _choices(name, rng) for name in _option_names(kind, rng)},
        "images": [],
    }


def _pricing(kind: ProductKind, rng: random.Random) -> str:
    """Mostly one price, sometimes a range, now and then none, as in the original."""
    price = round(rng.uniform(kind.cheapest, kind.dearest), 2)
    draw = rng.random()
    if draw < 0.03:
        return ""
    return f"${price:.2f}" if draw < 0.85 else f"${price:.2f} ${price * rng.uniform(1.1, 1.8):.2f}"


def _option_names(kind: ProductKind, rng: random.Random) -> list[str]:
    most = len(kind.options)
    return rng.sample(kind.options, rng.choice((most, most, most, 1, 0)))


def _choices(name: str, rng: random.Random) -> list[dict[str, Any]]:
    pool = listed(OPTIONS[name])
    taken = sorted(rng.sample(range(len(pool)), min(len(pool), rng.randint(2, 4))))
    return [{"value": pool[at], "image": None} for at in taken]


def _written(kind: ProductKind, asked: list[str], item: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """An instruction as a person would put it, which names some of the options."""
    options = [rng.choice(choices)["value"] for choices in item["customization_options"].values()]
    options = rng.sample(options, rng.randint(min(1, len(options)), len(options)))
    text = rng.choice(OPENINGS).format(what=kind.noun.lower()) + f" that is {' and '.join(asked)}"
    if options:
        text += f", in {' and '.join(options)}"
    return {"instruction": f"{text}.", "instruction_attributes": asked, "instruction_options": options}
