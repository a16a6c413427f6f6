"""The shop's pages as text, with their buttons: each leads to the state whose page comes next.

Page by page the visible strings of the original's text mode, in its order: search page, results (10 of up
to 50), item page, its three sub pages, the page after buying.
"""

from dataclasses import dataclass, replace
from typing import Literal

from environments.webshop_parts.catalogue import Shop
from environments.webshop_parts.records import Product

PER_PAGE = 10
SEPARATOR = " [SEP] "
SUB_PAGES = ("Description", "Features", "Reviews")
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"


@dataclass(frozen=True)
class State:
    """Where a shopper is.

    Attributes:
        page: kind of page.
        words: of the last search.
        number: of the results page, from 1.
        product: the opened one's number.
        sub: which sub page.
        options: (name, value) chosen so far for the opened product.
    """

    page: Literal["search", "results", "item", "sub", "done"] = "search"
    words: str = ""
    number: int = 1
    product: int = -1
    sub: str = ""
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Page:
    """What a state shows.

    Attributes:
        parts: the visible strings, instruction left out.
        buttons: what can be clicked, lower case -> the state it leads to.
    """

    parts: tuple[str, ...]
    buttons: dict[str, State]


def page_of(shop: Shop, state: State) -> Page:
    """The page of a state."""
    if state.page == "search":
        return Page(("WebShop", "Search"), {})
    if state.page == "done":
        return Page(("Thank you for shopping with us!",), {})
    product = shop.products.get(state.product) if state.product >= 0 else None
    if product is None:
        return _results(shop, state)
    return _item(product, state) if state.page == "item" else _sub(product, state)


def _results(shop: Shop, state: State) -> Page:
    found = shop.search.find(state.words)
    first = (state.number - 1) * PER_PAGE
    labels = {BACK: State()}
    if state.number > 1:
        labels[PREVIOUS] = replace(state, number=state.number - 1)
    if first + PER_PAGE < len(found):
        labels[NEXT] = replace(state, number=state.number + 1)
    parts = [BACK, f"Page {state.number} (Total results: {len(found)})", *list(labels)[1:]]
    for number in found[first : first + PER_PAGE]:
        product = shop.products.get(number)
        parts += [product.asin, product.title, product.price_tag]
        labels[product.asin] = replace(state, page="item", product=number, options=())
    return Page(tuple(parts), {label.lower(): after for label, after in labels.items()})


def _item(product: Product, state: State) -> Page:
    labels = {BACK: State(), PREVIOUS: State("results", state.words, state.number)}
    labels |= {sub: replace(state, page="sub", sub=sub) for sub in SUB_PAGES}
    labels[BUY] = replace(state, page="done")
    buttons = {label.lower(): after for label, after in labels.items()}
    fixed, parts = frozenset(buttons), [BACK, PREVIOUS]
    for name, values in product.options.items():
        parts += [name, *values]
        for value in values:
            if (
                value not in fixed
            ):  # of two options with the same value the last is clicked, as in the original
                chosen = dict(state.options) | {name: value}
                buttons[value] = replace(state, options=tuple(sorted(chosen.items())))
    parts += [product.title, f"Price: {product.price_tag}", "Rating: N.A.", *SUB_PAGES, BUY]
    return Page(tuple(parts), buttons)


def _sub(product: Product, state: State) -> Page:
    texts = {
        "Description": [product.description or "No Description"],
        "Features": list(product.features) or ["No Features"],
        "Reviews": ["No reviews found"],  # the original's files come without reviews
    }
    buttons = {BACK.lower(): State(), PREVIOUS.lower(): replace(state, page="item", sub="")}
    return Page((BACK, PREVIOUS, *texts[state.sub]), buttons)
