"""Words to search a goal by, and a scripted shopper who knows the goal's product."""

import re

from environments.webshop_parts.catalogue import Shop
from environments.webshop_parts.pages import PER_PAGE, State
from environments.webshop_parts.records import Goal, Product
from environments.webshop_parts.score import colour, similar

LIMIT = re.compile(r",? and price lower than [\d.]+ dollars$")
WORD = re.compile(r"[\w.'’-]*\w")
FILLERS = frozenset(
    "a am an and any are buy can find for get give have help i i'd i'm im in is it like looking me my need "
    "of please shop shopping some that the to want wants which will with would you".split()
)
MOST_WORDS = 24


def search_words(goal: Goal) -> str:
    """The instruction's telling words, in order, each once; the price limit left out."""
    words = WORD.findall(LIMIT.sub("", goal.text).lower())
    telling = dict.fromkeys(word for word in words if word not in FILLERS)
    return " ".join(list(telling)[:MOST_WORDS]) or "product"


def next_action(shop: Shop, goal: Goal, state: State) -> str:
    """What a shopper does who knows which product to buy.

    The goal's words are searched first, the product's title where those do not find it. Where the title
    does not find it either, the first result is bought.
    """
    wanted = shop.products.get(goal.product)
    title = wanted.title.lower()
    if state.page == "search":
        words = search_words(goal)
        return f"search[{words if goal.product in shop.search.find(words) else title}]"
    found = shop.search.find(state.words)
    if state.page == "results":
        return _among_results(shop, goal, state, found, lost=state.words == title)
    if state.page == "sub" or (state.product != goal.product and goal.product in found):
        return "click[< prev]"
    if state.product != goal.product and state.words != title:
        return "click[back to search]"
    option = _option_to_choose(goal, shop.products.get(state.product), state)
    return f"click[{option or 'buy now'}]"


def _among_results(shop: Shop, goal: Goal, state: State, found: tuple[int, ...], lost: bool) -> str:
    if goal.product in found:
        page = found.index(goal.product) // PER_PAGE + 1
        if page != state.number:
            return "click[next >]" if page > state.number else "click[< prev]"
        return f"click[{shop.products.get(goal.product).asin.lower()}]"
    if lost and found:
        return f"click[{shop.products.get(found[(state.number - 1) * PER_PAGE]).asin.lower()}]"
    return "click[back to search]"


def _option_to_choose(goal: Goal, product: Product, state: State) -> str | None:
    """A value that the goal asks for and that is not chosen, of an option that is still open."""
    chosen = dict(state.options)
    for asked in goal.options:
        if any(similar(colour(value), colour(asked)) for value in chosen.values()):
            continue
        offers = [
            value
            for name, values in product.options.items()
            if name not in chosen
            for value in values
            if similar(colour(value), colour(asked))
        ]
        if offers:
            return asked if asked in offers else offers[0]
    return None
