"""WebShop's score, every number derived by hand."""

from importlib.util import find_spec

import pytest

from environments.webshop_parts.nouns import MODELS, title_nouns
from environments.webshop_parts.records import Goal, Product
from environments.webshop_parts.score import colour, score, similar, title_share, type_factor

for package in ("bm25s", "Stemmer", "thefuzz"):
    pytest.importorskip(package, reason="WebShop's packages are not installed")

SHIRT = Product(
    asin="B000000001",
    title="Norvale Shirt",  # nouns: norvale, shirt
    description="A shirt with a spread collar.",
    features=["WRINKLE FREE fabric"],
    category="fashion",
    query="men's dress shirts",
    path="Fashion › Men › Shirts",
    price=25.0,
    price_tag="$25.0",
    options={"color": ["navy blue", "white"], "size": ["small", "large"]},
    attributes=["slim fit", "long sleeves"],
)


def other(**changes):
    return Product(**{**vars(SHIRT), **changes})


def goal(attributes=("slim fit", "long sleeve"), options=("blue", "large"), limit=30.0):
    return Goal(0, "find me a shirt", list(attributes), list(options), limit)


@pytest.mark.parametrize(
    ("product", "chosen", "asked", "value"),
    [
        # all of it: 1 * (2 attributes + 2 options + 1 price) / (2 + 2 + 1)
        (SHIRT, ["navy blue", "large"], goal(), 1.0),
        # "white" is not blue: (2 + 1 + 1) / 5
        (SHIRT, ["white", "large"], goal(), 4 / 5),
        # nothing chosen: (2 + 0 + 1) / 5
        (SHIRT, [], goal(), 3 / 5),
        # too dear as well: (2 + 0 + 0) / 5
        (SHIRT, [], goal(limit=20.0), 2 / 5),
        # the limit itself is kept: (2 + 2 + 1) / 5
        (SHIRT, ["navy blue", "large"], goal(limit=25.0), 1.0),
        # an attribute may stand in the texts: (2 + 1) / (2 + 0 + 1)
        (SHIRT, [], goal(["wrinkle free", "spread collar"], []), 1.0),
        # neither in list nor in texts: (0 + 1) / (1 + 0 + 1)
        (SHIRT, [], goal(["machine wash"], []), 1 / 2),
        # more chosen than asked for counts once: (1 + 1 + 1) / (1 + 1 + 1)
        (SHIRT, ["large", "navy blue"], goal(["slim fit"], ["large"]), 1.0),
        # another kind by title alone (no noun shared), although query and place agree: 0 * ...
        (other(title="Velor Trousers"), ["navy blue", "large"], goal(), 0.0),
    ],
)
def test_score_by_hand(product, chosen, asked, value):
    assert score(product, chosen, asked, SHIRT, "lexicon").value == pytest.approx(value)


EIGHT = "Norvale Cotton Shirt Collar Button Pocket Summer Office"  # eight nouns
ELEVEN = f"{EIGHT} Wedding Party Travel"


@pytest.mark.parametrize(
    ("title", "wanted", "changes", "factor"),
    [
        (EIGHT, EIGHT, {}, 1.0),  # 8 of 8 nouns
        ("Quinto Shirt", EIGHT, {}, 1.0),  # 1 of 8 = 0.125, same query
        ("Quinto Shirt", EIGHT, {"query": "polo"}, 1.0),  # another query, but three shared places
        ("Quinto Shirt", EIGHT, {"query": "polo", "path": "Fashion › Sale › Polo"}, 0.5),  # one shared place
        ("Quinto Cotton Shirt", EIGHT, {"query": "polo", "path": "Polo"}, 1.0),  # 2 of 8 = 0.25 > 0.2
        ("Quinto Shirt", ELEVEN, {}, 0.1),  # 1 of 11 = 0.09 < 0.1, whatever else agrees
        ("Quinto Trousers", EIGHT, {}, 0.0),  # 0 of 8
        ("Quinto Trousers", "The 42", {}, 1.0),  # no noun asked for counts as 0.2: same query
        ("Quinto Trousers", "The 42", {"query": "polo", "path": "Polo"}, 0.5),  # and 0.2 is not above 0.2
    ],
)
def test_type_factor_by_hand(title, wanted, changes, factor):
    assert type_factor(other(title=title, **changes), other(title=wanted), "lexicon") == factor


def test_phrases_match_above_85():
    # equal words but for an s: 2 * 13 / (13 + 14) = 96
    assert similar("essential oil", "essential oils")
    # only "tea" is shared: at best "tea" against "tea bag", 2 * 3 / (3 + 7) = 60
    assert not similar("tea tree", "tea bag")
    # all words of one are in the other: 100
    assert similar("free gluten", "certified gluten free")
    assert colour("matte navy blue") == "blue" and colour("x-large") == "x-large"


def test_lexicon_nouns():
    title = "Adelo 2 Pack Easy Clean Wrapped Shelf for the very small kitchen table"
    # a number, "wrapped", function words and the lower-case adjective "small" are none
    assert title_nouns(title, "lexicon") == ("adelo", "pack", "easy", "clean", "shelf", "kitchen", "table")


def test_spacy_tags_titles():
    pytest.importorskip("spacy", reason="nouns='spacy' is optional")
    if not any(map(find_spec, MODELS)):
        pytest.skip("no model of spaCy's is installed")
    assert title_nouns("Norvale Oak Table for the Kitchen", "spacy") == ("norvale", "oak", "table", "kitchen")
    # 5 of the 6 nouns are shared by both ways
    wanted, title = "Adeo Basketball Shoe Men Leather Lace", "Adeo Indoor Shoe Men Leather Lace"
    for nouns in ("spacy", "lexicon"):
        assert title_share(title, wanted, nouns) == pytest.approx(5 / 6)
