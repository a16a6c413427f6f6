"""The shop's score of a purchase (WebShop, arXiv 2207.01206, section 3 and appendix).

r = r_type · (attributes matched + options matched + [price ok]) / (attributes + options + 1)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from environments.webshop_parts.nouns import title_nouns
from environments.webshop_parts.records import Goal, Product

FUZZY = 85  # two phrases match above this token_set_ratio, of 100

# A colour option is compared by the first of these that it contains: "matte navy blue" is "blue".
COLOURS = (
    *("alabaster", "apricot", "aqua", "ash", "azure", "beige", "black", "blue", "blush", "bronze", "brown"),
    *("burgundy", "camel", "camo", "caramel", "champagne", "charcoal", "chestnut", "chocolate", "coffee"),
    *("copper", "coral", "cranberry", "cream", "crystal", "denim", "eggplant", "espresso", "fuchsia", "gold"),
    *("granite", "grape", "graphite", "gray", "green", "grey", "heather", "indigo", "ivory", "khaki"),
    *("lavender", "lemon", "leopard", "lilac", "lime", "magenta", "maroon", "mauve", "midnight", "mint"),
    *("mocha", "multicolor", "mustard", "natural", "navy", "nude", "olive", "orange", "peach", "pewter"),
    *("pink", "plum", "purple", "rainbow", "red", "rose", "royal", "rust", "sand", "sapphire", "silver"),
    *("slate", "steel", "stone", "tan", "taupe", "teal", "turquoise", "violet", "walnut", "wheat", "white"),
    *("wine", "yellow"),
)


@dataclass(frozen=True)
class Score:
    """A purchase's score and what it is made of.

    Attributes:
        value: in [0, 1].
        type: factor for the kind of product: 1, 0.5, 0.1 or 0.
        attributes, options: how many of the goal's are met.
        price: whether the limit is kept.
    """

    value: float
    type: float
    attributes: int
    options: int
    price: bool


def score(product: Product, options: Sequence[str], goal: Goal, wanted: Product, nouns: str) -> Score:
    """Score buying `product` with `options` chosen.

    Args:
        product: what is bought.
        options: the chosen values.
        goal: the task.
        wanted: the goal's own product.
        nouns: how title nouns are found, see `title_nouns`.
    """
    kind = type_factor(product, wanted, nouns)
    attributes = sum(_has(product, attribute) for attribute in goal.attributes)
    chosen = [colour(option) for option in options]
    matched = sum(any(similar(mine, colour(asked)) for mine in chosen) for asked in goal.options)
    price = product.price <= goal.price_limit
    parts = len(goal.attributes) + len(goal.options) + 1
    return Score(kind * (attributes + matched + price) / parts, kind, attributes, matched, price)


def type_factor(product: Product, wanted: Product, nouns: str) -> float:
    """How far the product is of the wanted kind, by query, place in the shop and title nouns."""
    share = title_share(product.title, wanted.title, nouns)
    if share == 0:
        return 0.0
    if share < 0.1:
        return 0.1
    places = [{place.strip() for place in one.path.split("›")} for one in (product, wanted)]
    alike = product.query == wanted.query or len(places[0] & places[1]) >= 2 or share > 0.2
    return 1.0 if alike else 0.5


def title_share(title: str, wanted: str, nouns: str) -> float:
    """Share of the wanted title's nouns that the title has; 0.2 where the wanted title has none."""
    asked = title_nouns(wanted, nouns)
    # As the original: distinct shared nouns over all of the wanted title's, repeats included.
    return len(set(title_nouns(title, nouns)) & set(asked)) / len(asked) if asked else 0.2


def _has(product: Product, attribute: str) -> bool:
    """Listed among the product's attributes, or written in its texts."""
    if any(similar(known, attribute) for known in product.attributes):
        return True
    texts = (product.title, " ".join(product.features), product.description)
    return any(attribute in text.lower() for text in texts)


@lru_cache(maxsize=65_536)
def similar(one: str, other: str) -> bool:
    """Whether two phrases match, word order and repeats aside."""
    from thefuzz import fuzz

    return bool(fuzz.token_set_ratio(one, other) > FUZZY)


@lru_cache(maxsize=16_384)
def colour(option: str) -> str:
    """The first colour word in it, else the option itself."""
    return next((name for name in COLOURS if name in option), option)
