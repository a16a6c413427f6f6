"""The original's files: products, what was made of them, and what people wrote.

items_shuffle.json or items_shuffle_1000.json (a list of products), items_ins_v2.json or
items_ins_v2_1000.json (asin -> attributes and a made instruction), items_human_ins.json (asin -> written
instructions), in one folder.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from environments.webshop_parts.records import Product
from verl_multiturn.base_env import derive_seed
from verl_multiturn.errors import intact

SMALL = 1000
PRODUCTS = ("items_shuffle_1000.json", "items_shuffle.json")
MADE = ("items_ins_v2_1000.json", "items_ins_v2.json")
HUMAN = "items_human_ins.json"
TEXTS = ("asin", "title", "description", "category", "query", "path")
NEEDED = ("asin", "name", "category", "query", "product_category")
AGAIN = "download the original's file again"
PRICE = re.compile(r"[^\d.]")


def find_files(data: str, products: int | None) -> tuple[Path, Path, Path]:
    """The three files for that many products: the small ones up to 1,000, if they are there.

    Args:
        data: the folder, or the products' file in it.
        products: how many; None: all.

    Raises:
        ValueError: one of them is missing; says which.
    """
    given = Path(data).expanduser()
    folder = given.parent if given.is_file() else given
    small = products is not None and products <= SMALL
    wanted = given if given.is_file() else _first(folder, PRODUCTS if small else PRODUCTS[::-1])
    made = _first(folder, MADE if "_1000" in wanted.stem else MADE[::-1])
    return wanted, made, _first(folder, (HUMAN,))


def _first(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(
        f"WebShop data {folder} has no {' or '.join(names)}: data (or $WEBSHOP_DATA) must be the folder of "
        "the original's files."
    )


def read_products(path: Path, most: int | None) -> Iterator[dict[str, Any]]:
    """The first `most` entries of a JSON list, one at a time: the full file's objects fill no memory.

    Raises:
        ValueError: not a JSON list, or fewer entries than asked for.
    """
    with intact(path, AGAIN):
        text = path.read_text(encoding="utf-8")
    decoder = json.JSONDecoder()
    space = re.compile(r"[\s,]*")
    start, count = space.match(text).end(), 0  # type: ignore[union-attr]  # it matches nothing, too
    if text[start : start + 1] != "[":
        raise ValueError(f"{path} is not a JSON list of products.")
    at = start + 1
    while most is None or count < most:
        at = space.match(text, at).end()  # type: ignore[union-attr]
        if text[at : at + 1] == "]":
            break
        try:
            product, at = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}; {AGAIN}.") from None
        yield product
        count += 1
    if most is not None and count < most:
        raise ValueError(f"{path} has {count} products, not {most}: set products={count} or less.")


def read_object(path: Path, kind: type = dict) -> dict[str, Any]:
    """A JSON object; `kind` of its entries: a dict of what was made, or a list of what people wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; {AGAIN}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be a JSON object, asin -> entry, not a {type(found).__name__}.")
    for asin, entry in found.items():
        some = entry if isinstance(entry, list) else [entry]
        if not isinstance(entry, kind) or not all(map(_is_instruction, some)):
            raise ValueError(f"{path}: the entry of {asin} is damaged; {AGAIN}.")
    return found


def _is_instruction(one: Any) -> bool:
    if not isinstance(one, Mapping):
        return False
    options = one.get("instruction_options") or []
    lists = [one.get(name) or [] for name in ("attributes", "instruction_attributes")]
    lists.append(list(options.values()) if isinstance(options, Mapping) else options)
    wanted = isinstance(one.get("instruction", ""), str | None) and (one.get("instruction") or not lists[1])
    return bool(wanted) and all(
        isinstance(some, list) and all(isinstance(x, str) for x in some) for some in lists
    )


def clean(raw: Iterator[Mapping[str, Any]], made: Mapping[str, Any], where: str) -> Iterator[Product]:
    """Entries as products; those without a usable asin and repeated ones are left out, as the original does.

    Raises:
        ValueError: an entry lacks a field; says which.
    """
    seen: set[str] = set()
    for number, entry in enumerate(raw):
        if not isinstance(entry, Mapping):
            raise ValueError(f"product {number} of {where} is a {type(entry).__name__}; {AGAIN}.")
        if lacking := [name for name in NEEDED if name not in entry]:
            raise ValueError(f"product {number} of {where} has no {', '.join(lacking)}.")
        with intact(f"product {number} of {where}", AGAIN):
            asin = entry["asin"]
            if asin == "nan" or len(asin) > 10 or asin in seen:
                continue
            seen.add(asin)
            product = _product(entry, made.get(asin, {}).get("attributes") or [])
            if wrong := [name for name in TEXTS if not isinstance(getattr(product, name), str)]:
                raise TypeError(f"{', '.join(wrong)} must be text")
        yield product


def _product(entry: Mapping[str, Any], attributes: list[str]) -> Product:
    features = entry.get("small_description") or []
    price, tag = price_of(entry["asin"], entry.get("pricing"))
    return Product(
        asin=entry["asin"],
        title=entry["name"] or "",
        description=entry.get("full_description") or "",
        features=[str(one) for one in (features if isinstance(features, list) else [features]) if one],
        category=entry["category"],
        query=entry["query"].lower().strip(),
        path=entry["product_category"],
        price=price,
        price_tag=tag,
        options=_options(entry.get("customization_options") or {}),
        attributes=attributes,
    )


def _options(raw: Mapping[str, Any]) -> dict[str, list[str]]:
    return {
        # Spaces as an action's are read; the original leaves two where there were some around the slash.
        name.lower(): [" ".join(choice["value"].replace("/", " | ").lower().split()) for choice in choices]
        for name, choices in raw.items()
        if choices
    }


def price_of(asin: str, pricing: str | None) -> tuple[float, str]:
    """Price in dollars and the tag that shows it: "$9.5", or "$9.5 to $12.0" for a range.

    No price counts as 100 dollars. Within a range the product's own price is drawn from its asin.
    """
    found = [float(number) for part in (pricing or "").split("$")[1:] if (number := PRICE.sub("", part))]
    if not found:
        return 100.0, "$100.0"
    if len(found) == 1:
        return found[0], f"${found[0]}"
    share = derive_seed("price", asin) / 2**63
    return found[0] + share * (found[1] - found[0]), f"${found[0]} to ${found[1]}"
