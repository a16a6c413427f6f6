"""WebShop as an environment: pages, actions, rewards, tasks, and what 128 of them cost."""

import json
import pickle
import random
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from verl_multiturn.check import check_env
from verl_multiturn.env import make
from verl_multiturn.panel import Panel, check_disjoint
from verl_multiturn.policies import expert_policy, play, random_policy

for package in ("bm25s", "Stemmer", "thefuzz"):
    pytest.importorskip(package, reason="WebShop's packages are not installed")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_MULTITURN_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("WEBSHOP_DATA", raising=False)
        yield


@pytest.fixture(scope="module")
def shop(cache):
    return make("webshop")


@pytest.fixture(scope="module")
def small(tmp_path_factory, cache):
    """Twelve lamps that one search finds, in the original's files."""
    folder = tmp_path_factory.mktemp("data")
    lamps = [
        {
            "asin": f"B0LAMP{n:04}",
            "name": f"Norvale Lamp {'Oak ' * (n == 0)}Number {n}",
            "category": "garden",
            "query": "lamps",
            "product_category": "Garden › Lighting › Lamps",
            "full_description": "It shines." if n else "",
            "small_description": ["bright light", "long cord"] if n else [],
            "pricing": f"${n + 11}.50",
            "customization_options": {
                "Color": [{"value": "Red"}, {"value": "Blue"}],
                "Size": [{"value": "L/XL"}],
            },
        }
        for n in range(12)
    ]
    made = {"B0LAMP0000": {"attributes": ["oak wood"]}}
    human = {
        "B0LAMP0000": [
            {
                "instruction": "i need a lamp of oak.",
                "instruction_attributes": ["oak"],
                "instruction_options": ["blue"],
            }
        ]
    }
    for name, content in (("shuffle", lamps), ("ins_v2", made), ("human_ins", human)):
        (folder / f"items_{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return {"data": str(folder), "products": 12, "goals": "human"}


def walk(env, *actions):
    return [env.step(action) for action in actions][-1]


@pytest.mark.parametrize(
    "kwargs", [{}, {"goals": "human", "reward": "score", "key": "state", "products": 50}]
)
def test_contract(kwargs):
    report = check_env("webshop", **kwargs)
    assert report.ok, str(report)


def test_pages_speak_the_original(small):
    env = make("webshop", **small)
    text, info = env.reset(0)
    limit = env.goal.price_limit
    assert info == {"task_type": "products12-garden", "score": 0.0} and text == "WebShop [SEP] Search"
    assert f"i need a lamp of oak, and price lower than {limit:.2f} dollars." in env.instruction
    assert env.admissible() == ["search[lamp oak]"]
    text = walk(env, "search[lamp oak]")[0]
    head = "Back to Search [SEP] Page 1 (Total results: 12) [SEP] Next > [SEP] B0LAMP0000 [SEP] "
    assert text.startswith(head + "Norvale Lamp Oak Number 0 [SEP] $11.5 [SEP] B0LAMP0001 [SEP] ")
    assert text.count("B0LAMP") == 10
    assert env.admissible()[:3] == ["click[back to search]", "click[next >]", "click[b0lamp0000]"]
    text = walk(env, "click[Next >]")[0]
    assert text.startswith("Back to Search [SEP] Page 2 (Total results: 12) [SEP] < Prev [SEP] B0LAMP0010")
    assert walk(env, "click[< Prev]", "Click[ b0lamp0000 ]")[0] == (
        "Back to Search [SEP] < Prev [SEP] color [SEP] red [SEP] blue [SEP] size [SEP] l | xl [SEP] "
        "Norvale Lamp Oak Number 0 [SEP] Price: $11.5 [SEP] Rating: N.A. [SEP] Description [SEP] Features "
        "[SEP] Reviews [SEP] Buy Now"
    )
    assert walk(env, "click[description]")[0] == "Back to Search [SEP] < Prev [SEP] No Description"
    assert walk(env, "click[< prev]", "click[features]")[0].endswith("< Prev [SEP] No Features")
    assert walk(env, "click[< prev]", "click[reviews]")[0].endswith("< Prev [SEP] No reviews found")
    text, reward, terminated, _, info = walk(env, "click[< prev]", "click[blue]", "click[buy now]")
    assert text == "Thank you for shopping with us! [SEP] Your score (min 0.0, max 1.0) [SEP] 1.0"
    assert (reward, terminated, info["success"], info["score"]) == (10.0, True, True, 1.0)


def test_pages_repeat_the_instruction_if_asked_to(small):
    env = make("webshop", instruction_on_page=True, **small)
    text = env.reset(0)[0]
    assert text == f"WebShop [SEP] Instruction: [SEP] {env.goal.text} [SEP] Search"
    text = env.step("search[oak]")[0]
    assert text.startswith(f"Instruction: [SEP] {env.goal.text} [SEP] Back to Search [SEP] Page 1")
    assert env.goal.text not in env.state_key()


def test_what_buttons_lead_to(small):
    env = make("webshop", max_turns=99, **small)
    env.reset(0)
    walk(env, "search[lamp]", "click[next >]", "click[b0lamp0010]", "click[red]", "click[blue]")
    assert dict(env.state.options) == {"color": "blue"}  # one value each
    key = env.state_key()
    walk(env, "click[features]", "click[< prev]")
    assert dict(env.state.options) == {"color": "blue"} and env.state_key() == key
    walk(env, "click[< prev]")
    assert (env.state.page, env.state.number, env.state.options) == ("results", 2, ())
    walk(env, "click[b0lamp0010]")
    assert env.state.options == () and env.state_key() == key  # pages do not show what is chosen
    walk(env, "search[oak]")  # from any page, as in the original
    assert (env.state.page, env.state.words, env.state.number) == ("results", "oak", 1)
    assert env.step("search[zzz]")[0] == "Back to Search [SEP] Page 1 (Total results: 0)"
    assert env.admissible() == ["click[back to search]"]
    assert walk(env, "click[back to search]")[0] == "WebShop [SEP] Search"


@pytest.mark.parametrize(
    "action",
    ["", "search", "search[]", "search[ ]", "click[search]", "click[buy now]", "buy now", "find[oak]"],
)
def test_what_is_no_action_of_the_search_page(small, action):
    env = make("webshop", **small)
    before = env.reset(0)[0]
    text, reward, terminated, truncated, info = env.step(action)
    assert (text, reward, terminated, truncated, info["valid"]) == (before, 0.0, False, False, False)


def test_rewards(small):
    # "oak" met, "blue" not chosen, price kept: (1 + 0 + 1) / (1 + 1 + 1)
    actions = ("search[oak]", "click[b0lamp0000]", "click[buy now]")
    for kwargs, expected in (
        ({}, 0.0),
        ({"reward": "score"}, 2 / 3),
        ({"reward": "score", "scale": 10.0}, 20 / 3),
    ):
        env = make("webshop", **small, **kwargs)
        env.reset(0)
        _, reward, _, _, info = walk(env, *actions)
        assert reward == pytest.approx(expected)
        assert info["score"] == pytest.approx(2 / 3) and info["success"] is False
        assert (info["score_parts"]["attributes"], info["score_parts"]["options"]) == (1, 0)
        env.reset(0)
        assert walk(env, *actions[:2], "click[blue]", "click[buy now]")[1] == env.scale


def test_splits_are_disjoint_by_content(shop):
    ids = {split: shop.tasks(split) for split in ("test", "val", "train")}
    assert len(ids["test"]) <= 500 and len(ids["val"]) <= 1000 < 2 * len(ids["val"])
    panels = [Panel.build("webshop", {}, ids[split], split) for split in ids]
    assert [len(panel.tasks) for panel in panels] == [len(ids[split]) for split in ids]
    check_disjoint(*panels)
    instructions = {}
    for split in ids:
        instructions[split] = {shop.shop.goals.get(shop._position(seed)).text for seed in ids[split]}
    assert not instructions["train"] & (instructions["test"] | instructions["val"])
    with pytest.raises(ValueError, match="Did you mean 'test'"):
        shop.tasks("tset")


def test_a_task_is_its_goal(shop):
    for seed in (0, 7, -1, 500_000, shop.tasks("test")[3]):
        text, info = shop.reset(seed)
        assert shop.peek(seed) == (shop.content(text), info["task_type"])
        assert info["task_type"].startswith("products1000-generated-")
    train = shop.tasks("train")
    shop.reset(len(train) + 5)
    assert shop.goal == shop.shop.goals.get(shop._position(train[5]))
    assert shop.peek(0) != make("webshop", products=999).peek(0)
    for wrong in ("goal-99999999", "5", "goal--1", "goal-x"):
        with pytest.raises(ValueError, match="no task"):
            shop.reset(wrong)


@pytest.mark.parametrize("goals", ["synthetic", "human"])
def test_the_expert_buys_and_chance_does_not(goals):
    env = make("webshop", goals=goals)
    tasks = env.tasks("test")[:150]
    expert = [play(env, expert_policy, task) for task in tasks]
    assert sum(episode.success for episode in expert) >= 0.95 * len(tasks)
    assert not any(episode.invalid for episode in expert)
    chance = random_policy(random.Random(0))
    played = [play(env, chance, task) for task in tasks]
    assert sum(episode.success for episode in played) <= 0.2 * len(tasks)
    assert not any(episode.invalid for episode in played)  # what is listed can be played


def test_search_is_needed_and_options_tell_apart(shop):
    """The first product of the suggested search, bought as it is, is rarely the right one."""

    def hasty(env, observation):
        if env.state.page == "search":
            return env.admissible()[0]
        product = next((a for a in env.admissible() if a.startswith("click[b0")), None)
        return product or "click[buy now]"

    assert sum(play(shop, hasty, task).success for task in shop.tasks("test")) <= 0.1 * 500


def test_snapshots_and_pickles_leave_the_catalogue_at_home(shop):
    shop.reset(1)
    shop.step(shop.expert())
    assert len(shop.snapshot()) < 30_000
    copy = pickle.loads(pickle.dumps(shop))
    assert copy.shop is shop.shop and copy.state == shop.state
    assert shop.fork().step(shop.expert()) == copy.step(shop.expert())


def test_128_instances_share_one_catalogue(shop):
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    envs = [make("webshop") for _ in range(128)]
    for seed, env in enumerate(envs):
        env.reset(seed)
        env.step(env.expert())
    spent = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len({id(env.shop) for env in envs}) == 1
    assert spent < 128 * 64 * 1024  # bytes


def test_threads_may_play_at_once(shop):
    def total(first):
        env = make("webshop")
        return [play(env, expert_policy, seed).turns for seed in range(first, first + 25)]

    shop.shop.search.find.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        at_once = list(pool.map(total, range(0, 200, 25)))
    shop.shop.search.find.cache_clear()
    assert at_once == [total(first) for first in range(0, 200, 25)]


def test_a_thousand_steps_a_second(shop):
    chance = random_policy(random.Random(0))
    start = time.process_time()
    steps = sum(play(shop, chance, seed).turns for seed in range(300))
    assert steps / (time.process_time() - start) > 1000


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"goals": "humans"}, "Did you mean 'human'"),
        ({"reward": "sucess"}, "Did you mean 'success'"),
        ({"nouns": "lexikon"}, "Did you mean 'lexicon'"),
        ({"key": "pages"}, "Did you mean 'page'"),
        ({"products": None}, "needs data"),
        ({"products": 0}, "at least 1 product"),
        ({"data": "/nowhere"}, r"has no items_shuffle_1000\.json or items_shuffle\.json"),
    ],
)
def test_wrong_arguments_are_named(kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        make("webshop", **kwargs)


def test_data_is_found_where_the_variable_points(small, monkeypatch, tmp_path):
    env = type(make("webshop", **small))
    assert env.find_data() is None
    monkeypatch.setenv("WEBSHOP_DATA", small["data"])
    assert env.find_data() == small["data"]
    assert make("webshop", products=None, goals="human").reset(0)[1]["task_type"] == "products12-garden"
    with pytest.raises(ValueError, match="has 12 products, not 1000"):
        make("webshop")
    monkeypatch.setenv("WEBSHOP_DATA", str(tmp_path))
    assert env.find_data() is None
