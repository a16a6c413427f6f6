"""Search on shipped environments, through their snapshots, with the scripted expert and random actions."""

import pytest

from verl_multiturn.play_settings import settings
from verl_multiturn.search.collect import Collection
from verl_multiturn.search.pair_files import Counts, PairConfig, pairs_of
from verl_multiturn.search.scripted import Scripted
from verl_multiturn.search.tree_files import read_trees
from verl_multiturn.tasks import training_tasks

LEAST = ("multiturn.search.iterations=12", "multiturn.search.width=4")


def nodes(root):
    return [root, *(one for child in root["children"] for one in nodes(child))]


def replayed(tree, env):
    """Every carried-out action of a tree, taken again from the start, without a search."""
    env.reset(tree["task"], 0)
    stack = [((), node) for node in tree["root"]["children"]]
    while stack:
        path, node = stack.pop()
        if not node["executed"]:
            continue
        env.reset(tree["task"], 0)
        for action in path:
            env.step(action)
        observation, reward, terminated, _, info = env.step(node["action"])
        assert (observation, reward, terminated) == (node["observation"], node["reward"], node["terminal"])
        assert (bool(info["valid"]), bool(info["success"])) == (node["valid"], node["success"])
        stack += [((*path, node["action"]), child) for child in node["children"]]


def check(env, folder, overrides=(), noise=0.4, size=3):
    """Grow trees; the best return a tree books is one that the environment pays, and siblings do not mix."""
    config = settings(env, overrides=[*LEAST, *overrides])
    panel = training_tasks(config.multiturn, size)
    Collection(config, panel, Scripted(noise), "expert", folder, trees=2).run()
    trees, counts = list(read_trees(folder)), Counts()
    assert len(trees) == size
    env = panel.make()
    try:
        for tree in trees:
            assert tree["root"]["N"] == tree["iterations"] > 0 and tree["env_steps"] > 0
            assert max(len(node["children"]) for node in nodes(tree["root"])) <= 4
            replayed(tree, env)
    finally:
        env.close()
    return [pair for tree in trees for pair in pairs_of(tree, PairConfig(), counts)], trees


def test_chain_sum(tmp_path):
    pairs, trees = check("chain_sum", tmp_path / "a")
    assert pairs and any(tree["success"] for tree in trees)
    for pair in pairs:  # a right total is never the loser
        numbers = [
            int(n) for n in pair["prompt"][-1]["content"].split("Numbers: ")[-1].split("\n")[0].split()
        ]
        assert pair["win_action"] == str(sum(numbers[: pair["index"] + 1])) != pair["lose_action"]


def test_sokoban(tmp_path):
    overrides = (
        "multiturn.env_kwargs.size=6",
        "multiturn.env_kwargs.max_turns=8",
        "multiturn.search.max_depth=8",
    )
    overrides = (*overrides, "multiturn.env_kwargs.max_solution=6")
    pairs, trees = check("sokoban", tmp_path / "a", overrides, noise=0.2)
    assert pairs and any(tree["success"] or tree["rollout_successes"] for tree in trees)


def test_webshop(tmp_path):
    for package in ("bm25s", "Stemmer", "thefuzz"):
        pytest.importorskip(package, reason='needs pip install "verl-multiturn[webshop]"')
    overrides = (
        "multiturn.env_kwargs.products=100",
        "multiturn.env_kwargs.reward=score",
        "multiturn.train.split=train",
    )
    overrides = (*overrides, "multiturn.search.preset=paper_webshop", "multiturn.prompt.admissible=''")
    pairs, trees = check("webshop", tmp_path / "a", overrides, noise=0.3)
    assert pairs and any(tree["success"] or tree["rollout_successes"] for tree in trees)
    assert {pair["win_action"].partition("[")[0] for pair in pairs} <= {"search", "click"}


def test_alfworld(tmp_path, alfworld_games, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(alfworld_games))
    overrides = ("multiturn.env_kwargs.data=benchmark", "multiturn.train={split: train}")
    overrides = (*overrides, "multiturn.env_kwargs.max_turns=12", "multiturn.search.iterations=6")
    _, trees = check("alfworld", tmp_path / "a", overrides, noise=0.2, size=2)
    assert all(tree["env_steps"] > 6 for tree in trees)
