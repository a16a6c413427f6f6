"""WebShop's catalogue: the original's file format, goals and splits, the search index, the cache."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from environments.webshop_parts import catalogue, search
from environments.webshop_parts.catalogue import Source, open_shop
from environments.webshop_parts.generate import generate, write_catalogue
from environments.webshop_parts.goals import arrange, make_goals
from environments.webshop_parts.records import NO_LIMIT, Goal
from environments.webshop_parts.upstream import clean, find_files, price_of, read_products

for package in ("bm25s", "Stemmer", "thefuzz"):
    pytest.importorskip(package, reason="WebShop's packages are not installed")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_MULTITURN_CACHE", str(tmp_path / "cache"))
    catalogue._open.cache_clear()
    yield tmp_path / "cache" / "webshop"
    catalogue._open.cache_clear()


PRODUCTS = [
    {
        "asin": "B00000000A",
        "name": "Norvale Slim Shirt",
        "category": "fashion",
        "query": " Men's Dress Shirts",
        "product_category": "Fashion › Men › Shirts",
        "full_description": "A shirt.",
        "small_description": ["one", "", "two"],
        "pricing": "$17.05",
        "customization_options": {
            "Color": [{"value": " Navy / White ", "image": None}, {"value": "Red", "image": "x.jpg"}],
            "Size": None,
        },
        "images": ["x.jpg"],
        "brand": "not read",
    },
    {
        "asin": "B00000000B",
        "name": "Velor Lamp",
        "category": "garden",
        "query": "lamps",
        "product_category": "Garden › Lamps",
        "full_description": None,
        "small_description": "just one",
        "pricing": "",
        "customization_options": "",
        "images": [],
    },
]
MADE = {"B00000000A": {"attributes": ["slim fit"], "instruction": "Find me slim fit shirts",
                       "instruction_attributes": ["slim fit"]}}  # fmt: skip
HUMAN = {
    "B00000000A": [
        {"instruction": "i need a shirt.", "instruction_attributes": ["slim fit"],
         "instruction_options": ["red"]},
        {"instruction": "no attributes: skipped", "instruction_attributes": [], "instruction_options": []},
    ],
    "B00000000B": [
        {"instruction": "a lamp", "instruction_attributes": ["tall"],
         "instruction_options": {"color": "red"}},
    ],
}  # fmt: skip


def write(folder, products=PRODUCTS, names=("items_shuffle.json", "items_ins_v2.json")):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip((*names, "items_human_ins.json"), (products, MADE, HUMAN), strict=True):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_products_of_the_original_format():
    shirt, lamp = clean(iter(PRODUCTS), MADE, "here")
    assert shirt.options == {"color": ["navy | white", "red"]} and shirt.attributes == ["slim fit"]
    assert (shirt.query, shirt.features, shirt.price, shirt.price_tag) == (
        "men's dress shirts",
        ["one", "two"],
        17.05,
        "$17.05",
    )
    assert (lamp.options, lamp.attributes, lamp.features, lamp.description) == ({}, [], ["just one"], "")
    assert (lamp.price, lamp.price_tag) == (100.0, "$100.0")


def test_unusable_and_repeated_products_are_left_out():
    raw = [{**PRODUCTS[0], "asin": asin} for asin in ("nan", "B0123456789", "B1", "B1")]
    assert [product.asin for product in clean(iter(raw), {}, "here")] == ["B1"]
    with pytest.raises(ValueError, match="product 0 of here has no query"):
        list(clean(iter([{k: v for k, v in PRODUCTS[0].items() if k != "query"}]), {}, "here"))


def test_prices():
    assert price_of("B1", "$1,299.00") == (1299.0, "$1299.0")
    price, tag = price_of("B1", "$9.50 $12.00")
    assert 9.5 <= price <= 12 and tag == "$9.5 to $12.0"
    assert price_of("B1", "$9.50 $12.00")[0] == price != price_of("B2", "$9.50 $12.00")[0]


def test_goals_of_both_kinds():
    products = list(clean(iter(PRODUCTS), MADE, "here"))
    first, second = make_goals(products, "synthetic", MADE, HUMAN)
    assert first.options == ["navy | white"] and second.options == ["red"]
    clause = f", and price lower than {first.price_limit:.2f} dollars"
    assert first.text == f"Find me slim fit shirts with color: navy | white{clause}"
    # price 17.05: of 20, 30, 40, 50 two are drawn, the higher one counts
    assert first.price_limit == second.price_limit and first.price_limit in (30, 40, 50)
    shirt, lamp = make_goals(products, "human", MADE, HUMAN)
    assert shirt.text.startswith("i need a shirt, and price lower than ") and shirt.options == ["red"]
    assert (lamp.product, lamp.options) == (1, ["red"])


def test_no_limit_fits_above_the_last():
    dear = replace(next(clean(iter(PRODUCTS), MADE, "here")), price=985.0)  # only 990 is above
    (one,) = make_goals([dear], "human", {}, {"B00000000A": HUMAN["B00000000A"][:1]})
    assert one.text == "i need a shirt" and one.price_limit == NO_LIMIT


def test_split_by_position_and_text():
    goals = [Goal(0, f"text {n % 3500}", [], [], 1.0) for n in range(4000)]
    order, marks = arrange(goals)
    random.Random(233).shuffle(goals)
    assert order == goals  # the original's order
    assert set(marks[:500]) <= {0, -1} and set(marks[500:1500]) <= {1, -1} and set(marks[1500:]) <= {2, -1}
    texts = [{g.text for g, mark in zip(order, marks, strict=True) if mark == split} for split in range(3)]
    assert sum(map(len, texts)) == len(set().union(*texts)) == 3500
    few = arrange([Goal(0, f"text {n}", [], [], 1.0) for n in range(600)])[1]
    assert [sum(few == split) for split in range(3)] == [100, 200, 300]


def test_files_are_found_by_number(tmp_path):
    small = ("items_shuffle_1000.json", "items_ins_v2_1000.json")
    write(tmp_path)
    assert find_files(str(tmp_path), 2)[0].name == "items_shuffle.json"
    write(tmp_path, names=small)
    assert [path.name for path in find_files(str(tmp_path), 1000)] == [*small, "items_human_ins.json"]
    assert find_files(str(tmp_path), None)[1].name == "items_ins_v2.json"
    assert find_files(str(tmp_path / small[0]), None)[1].name == small[1]
    (tmp_path / "items_human_ins.json").unlink()
    with pytest.raises(ValueError, match=r"has no items_human_ins\.json"):
        find_files(str(tmp_path), None)


def test_malformed_files_are_named(tmp_path):
    path = tmp_path / "items_shuffle.json"
    path.write_text(json.dumps(PRODUCTS), encoding="utf-8")
    assert list(read_products(path, None)) == PRODUCTS and len(list(read_products(path, 1))) == 1
    with pytest.raises(ValueError, match="has 2 products, not 3"):
        list(read_products(path, 3))
    for text, sentence in (("{}", "not a JSON list"), ("[{", "is not JSON"), ("", "not a JSON list")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=sentence):
            list(read_products(path, None))


def test_a_catalogue_is_found_by_its_content_not_its_place(cache, tmp_path):
    one = write_catalogue(tmp_path / "one", 60, seed=4)
    two = tmp_path / "two"
    two.mkdir()
    for path in sorted(one.iterdir(), reverse=True):  # written in another order
        (two / path.name).write_bytes(path.read_bytes())
    shops = [open_shop(Source(str(folder), None, 0), "human") for folder in (one, two)]
    generated = open_shop(Source(None, 60, 4), "human")
    for shop in shops:
        assert shop.digest == generated.digest and list(shop.goals) == list(generated.goals)
        assert [shop.split(name) for name in ("test", "val")] == [generated.split(n) for n in ("test", "val")]
    assert len(list(cache.glob("*/meta.json"))) == 2  # one and two are the same


def test_generated_catalogues_repeat_and_vary():
    first, second = generate(50, 7), generate(50, 7)
    assert first == second and generate(50, 8) != first
    assert generate(20, 7)[0] == first[0][:20]
    assert len({item["asin"] for item in first[0]}) == 50
    with pytest.raises(ValueError, match="at least 1 product"):
        generate(0, 0)


def test_an_index_of_other_products_is_refused(cache):
    shop = open_shop(Source(None, 40, 0), "human")
    (folder,) = (path.parent for path in cache.glob("*/meta.json"))
    documents = [search.document(product) for product in shop.products]
    search.build(documents[:30], folder / "index")
    catalogue._open.cache_clear()
    with pytest.raises(ValueError, match="holds 30 documents, the catalogue 40 products"):
        open_shop(Source(None, 40, 0), "human")
    with pytest.raises(ValueError, match="needs products with words"):
        search.build([], folder / "empty")


def test_search_ranks_by_the_formula(tmp_path):
    search.build(["red lamp", "red red shirt", "blue lamp of the lamps shirt's"], tmp_path / "index")
    found = search.Search(tmp_path / "index", 3)
    assert found.find("lamps") == (2, 0)  # twice among four words beats once among two
    assert found.find("a red SHIRT") == (1, 0, 2)
    assert found.find("nothing here") == () == found.find("the")
    assert found.find("s") == () and found.find("lamps s") == (2, 0)  # Porter leaves nothing of "s"
    scores = found.index.get_scores_from_ids(found.index.get_tokens_ids(["red"]))
    # in two of three documents: idf = ln(1 + 1.5 / 2.5); lengths 2, 3, 4, mean 3; k1 0.9, b 0.4:
    # 1 / (1 + 0.9 (0.6 + 0.4 * 2/3)) = 1 / 1.78 and 2 / (2 + 0.9 (0.6 + 0.4 * 3/3)) = 2 / 2.9
    assert scores.tolist() == pytest.approx([0.4700036 / 1.78, 0.4700036 * 2 / 2.9, 0.0], rel=1e-5)


def test_processes_that_build_at_once_leave_one_catalogue(cache):
    code = (
        "from environments.webshop_parts.catalogue import Source, open_shop\n"
        "shop = open_shop(Source(None, 80, 3), 'human'); print(shop.digest, len(shop.products))"
    )
    command = [sys.executable, "-c", code]
    where = {"cwd": Path(__file__).parents[1], "stdout": subprocess.PIPE, "text": True}
    builders = [subprocess.Popen(command, **where) for _ in range(3)]
    said = {builder.communicate(timeout=120)[0] for builder in builders}
    assert {builder.returncode for builder in builders} == {0} and len(said) == 1
    assert len(list(cache.glob("*/meta.json"))) == 1 and not list(cache.glob("*.part"))
    assert said == {f"{open_shop(Source(None, 80, 3), 'human').digest} 80\n"}  # and here the same
