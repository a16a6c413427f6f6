"""The search: the known trace of data/qvalue_vectors.json, defects of the original (B1 … B21), budgets."""

import json
import random
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest

import verl_multiturn as vm
from verl_multiturn.base_env import Env, ReplayEnv
from verl_multiturn.exact import exact_values
from verl_multiturn.search.mcts import PRESETS, SearchConfig, canonical, preset, search
from verl_multiturn.search.tree import Node, Tree
from verl_multiturn.stats import paired_bootstrap

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "qvalue_vectors.json").read_text())
MOVES = ["up", "down", "left", "right"]


def some_moves(observation, history, n, rng):
    return [rng.choice(MOVES) for _ in range(n)]


def all_moves(observation, history, n, rng):
    return rng.sample(MOVES, n)


def always(*actions):
    return lambda observation, history, n, rng: list(actions[:n])


def lake(seed=0, **keywords):
    env = vm.make("frozen_lake", **keywords)
    return env, env.reset(seed)[0]


class Scripted(Env):
    """Actions are letters; the path so far decides. `ENDS` maps a path to (reward, success)."""

    ENDS = {}
    max_turns = 20
    steps = 0  # of all instances

    def _reset(self, seed):
        self.path = ""
        return "at:", {}

    def _step(self, action):
        type(self).steps += 1
        if action == "?":
            return self._observation, 0.0, False, {"valid": False}
        self.path += action
        reward, success = self.ENDS.get(self.path, (0.0, False))
        return f"at:{self.path}", reward, self.path in self.ENDS, {"success": success}


def scripted(ends, base=Scripted, **attributes):
    env = type("Case", (base,), {"ENDS": ends, "steps": 0} | attributes)()
    return env, env.reset(0)[0]


def by_path(tree):
    return {"".join(str(n.action) for n in node.path[1:]): node for node in tree.nodes()}


def test_v12_trace(monkeypatch):
    """8 iterations; the tree is two turns deep and the rollout plays "s", which ends with a known value."""
    expected, trace, backup = VECTORS["V12_search_trace"], [], Node.backup

    def spy(node, G, gamma=1.0):
        trace.append([[int(n.action) for n in node.path[1:]], G])
        backup(node, G, gamma)

    monkeypatch.setattr(Node, "backup", spy)
    ends = {
        "0s": (0.0, False),
        "00s": (0.0, False),
        "1s": (0.5, False),
        "10s": (0.0, False),
        "11s": (1.0, True),
    }
    config = SearchConfig(iterations=8, width=2, max_depth=2, rollout_depth=3)
    tree = search(*scripted(ends), always("0", "1"), always("s"), config)
    assert trace == expected["trace"]
    visited = {str(tuple(map(int, path))): node for path, node in by_path(tree).items() if node.N}
    assert {key: node.N for key, node in visited.items()} == expected["n"]
    assert {key: node.Q for key, node in visited.items()} == expected["q"]
    assert tree.stopped == "iterations" and tree.rollout_successes == 4


def test_v12_with_ends_in_the_tree_needs_plain_uct():
    """Closed nodes are skipped by default; `revisit_closed` lets a known return count again, for free."""
    ends = {"0s": (0.0, False), "00": (0.0, False), "1s": (0.5, False), "10": (0.0, False), "11": (1.0, True)}
    config = SearchConfig(iterations=8, width=2, max_depth=3, revisit_closed=True)
    tree = search(*scripted(ends), always("0", "1"), always("s"), config)
    expected = VECTORS["V12_search_trace"]
    assert (tree.root.Q, by_path(tree)["11"].N) == (expected["q"]["()"], 4)
    assert by_path(tree)["11"].env_steps == 1
    skipping = search(*scripted(ends), always("0", "1"), always("s"), replace(config, revisit_closed=False))
    assert by_path(skipping)["11"].N == 1 and by_path(skipping)["1"].closed


def test_v3_backup_keeps_sum_and_count():
    given = VECTORS["V3_backup_mean"]
    root = Node(None, None, 0, 0)
    nodes = [root, Node("a", root, 1, 0)]
    nodes.append(Node("b", nodes[1], 2, 0))
    for node, n, q in zip(nodes, given["start_n"], given["start_q"], strict=True):
        node.N, node.W = n, n * q
    for after in ("1", "2"):
        nodes[-1].backup(given[f"ret{after}"])
        assert [node.N for node in nodes] == given[f"after{after}_n"]
        np.testing.assert_allclose([node.Q for node in nodes], given[f"after{after}_q"], atol=1e-9)
    assert nodes[-1].best == 1 and nodes[-1].W2 == 1.25


def test_v4_the_whole_path_books_the_same_return():
    """The original's HotPotQA books -1 for a wrong answer itself and 0 for what led to it."""
    tree = search(*scripted({"aa": (0.0, False)}), always("a"), config=preset("paper_hotpotqa"))
    assert [node.Q for node in tree.nodes()] == [0, 0, 0] and tree.stopped == "closed"
    assert VECTORS["V4_repo_hotpot_asymmetry"]["leaf_wrong"] == -1
    timed = search(*scripted({}), always("a"), config=preset("paper_hotpotqa"))
    assert {node.Q for node in timed.nodes()} == {
        VECTORS["V4_repo_hotpot_asymmetry"]["everybody_depth_limit"]
    }
    shop = VECTORS["V4_repo_hotpot_asymmetry"]["webshop"]
    config = preset("paper_webshop")
    assert (config.timeout_return, config.invalid_return) == (
        shop["depth_limit_return"],
        shop["invalid_action_value"],
    )


def test_v9_equal_candidates_are_merged_and_counted():
    given = VECTORS["V9_best_of_n"]
    tree = search(*scripted({}), always(*given["raw"]), always("s"), SearchConfig(iterations=1))
    children = tree.root.children
    assert [canonical(child.action) for child in children] == given["canonical_unique"]
    assert {canonical(child.action): child.votes for child in children} == given["votes"]
    assert children[0].action == "Search[x]"  # the first spelling is what the environment gets
    exact = search(*scripted({}), always(*given["raw"]), always("s"), SearchConfig(iterations=1), same=str)
    assert len(exact.root.children) == 4


def test_b1_double_division_is_an_option_only():
    assert preset("repo_compat").divide_twice
    assert not any(config.divide_twice for name, config in PRESETS.items() if name != "repo_compat")
    ends = {path + end: (float(path == "a"), False) for path in "ab" for end in "xy"}
    config = SearchConfig(iterations=40, width=2, c=0.1, revisit_closed=True)

    def propose(observation, history, n, rng):
        return ["x", "y"] if history else ["a", "b"]

    visits = [
        by_path(search(*scripted(ends), propose, config=replace(config, divide_twice=twice)))["b"].N
        for twice in (False, True)
    ]
    assert visits[0] < visits[1]  # the original spends more on the arm that never pays


class Pages(Scripted):
    """Opens pages and looks up on the open one; an answer is judged when it is given."""

    def _step(self, action):
        verb, _, what = action.partition(" ")
        if verb == "open":
            self.page = what
        if verb == "answer":
            return "over", float(what == "right"), True, {"success": what == "right"}
        return f"page {self.page}", 0.0, False, {}

    page = "none"


def pages(observation, history, n, rng):
    return ["open a", "open b", "look", "answer right", "answer wrong"][:n]


def test_b2_each_branch_acts_on_its_own_page():
    env, observation = scripted({}, Pages)
    tree = search(env, observation, pages, config=SearchConfig(iterations=200, max_depth=3))
    looked = 0
    for node in tree.nodes():
        if node.executed and node.action == "look":
            opened = [n.action[5:] for n in node.path[1:] if n.action.startswith("open")]
            assert node.observation == f"page {opened[-1] if opened else 'none'}"
            looked += 1
    assert looked > 10
    assert env.page == "none" and env.turn == 0  # and the caller's environment was not touched


def test_b2_no_reward_leaks_after_a_success_elsewhere():
    tree = search(*scripted({}, Pages), pages, config=SearchConfig(iterations=200, max_depth=3))
    answers = [node for node in tree.nodes() if node.terminal]
    assert {(node.action, node.reward, node.success) for node in answers} == {
        ("answer right", 1.0, True),
        ("answer wrong", 0.0, False),
    }


def test_b3_the_success_that_ends_the_search_is_booked():
    ends = {"ab": (1.0, True), "aa": (0.0, False)}
    config = SearchConfig(stop_on_success=True, width=2)
    tree = search(*scripted(ends), always("a", "b"), always("c"), config)
    leaf = by_path(tree)["ab"]
    assert tree.stopped == "success" and tree.success and (leaf.N, leaf.W) == (1, 1.0)
    assert tree.root.W == 1.0
    pairs = vm.preference_pairs(tree.to_dict(), win="argmax")
    assert [(p["path"], p["win"], p["lose"]) for p in pairs][-1] == (["a"], "b", "a")


def test_b4_a_finished_subtree_keeps_its_success():
    ends = {"aa": (1.0, True), "ab": (0.0, False), "b": (0.0, False)}
    tree = search(*scripted(ends), always("a", "b"), config=SearchConfig(width=2))
    assert tree.stopped == "closed" and by_path(tree)["aa"].success
    assert all(node.closed and node.snapshot is None for node in tree.nodes())
    pairs = vm.preference_pairs(tree.to_dict())
    assert [(p["path"], p["win"], p["lose"]) for p in pairs] == [([], "a", "b"), (["a"], "a", "b")]


def test_b5_a_root_with_terminal_children_only_ends_the_search():
    ends = dict.fromkeys("abc", (0.0, False))
    tree = search(*scripted(ends), always("a", "b", "c"), config=SearchConfig(iterations=1000))
    assert (tree.stopped, tree.iterations, tree.env_steps) == ("closed", 3, 3)


def test_no_candidate_ends_the_branch_not_in_a_loop():
    """The original asks again for ever (andyz245/LanguageAgentTreeSearch#13)."""
    tree = search(*scripted({}), always(), config=SearchConfig(invalid_return=-1.0))
    assert (tree.stopped, tree.root.Q, tree.root.children, tree.best_action()) == ("closed", -1.0, [], None)
    config = SearchConfig(invalid_return=-1.0)
    once = search(*scripted({}), lambda o, h, n, rng: [] if h else ["a"], always("s"), config)
    assert (once.stopped, once.iterations, once.root.Q) == ("closed", 2, -0.5)


def test_b13_an_error_of_the_environment_is_raised():
    class Broken(Scripted):
        def _step(self, action):
            if self.turn == 3:
                raise OSError("the shop is closed")
            return super()._step(action)

    with pytest.raises(OSError, match="the shop is closed"):
        search(*scripted({}, Broken), always("a"))


def test_b15_a_depth_limit_truncates():
    config = SearchConfig(iterations=50, width=1, max_depth=3, timeout_return=-0.5)
    tree = search(*scripted({}), always("a"), config=config)
    deepest = by_path(tree)["aaa"]
    assert deepest.truncated and not deepest.terminal and deepest.closed and deepest.Q == -0.5
    assert max(node.depth for node in tree.nodes()) == 3 and tree.stopped == "closed"
    short = search(*scripted({}, max_turns=2), always("a"), config=config)  # the environment's own limit
    assert by_path(short)["aa"].truncated and by_path(short)["aa"].Q == -0.5


def test_b16_no_candidate_is_carried_out_before_it_is_selected():
    env, observation = scripted({})
    tree = search(env, observation, always(*"aabbc"), always("s"), SearchConfig(iterations=1, max_depth=4))
    assert [(child.action, child.executed) for child in tree.root.children] == [
        ("a", True),
        ("b", False),
        ("c", False),
    ]
    assert type(env).steps == tree.env_steps == 4  # one action and three turns of rollout


def test_an_invalid_action_closes_its_node_and_costs_its_return():
    tree = search(
        *scripted({}), always("?", "a"), always("s"), SearchConfig(iterations=2, invalid_return=-1.0)
    )
    invalid = by_path(tree)["?"]
    assert (invalid.Q, invalid.closed, invalid.valid, invalid.terminal) == (-1.0, True, False, False)
    ends = {"aa": (1.0, True)}
    script = {0: "a", 1: "?", 2: "a"}  # in a rollout it only costs its turn
    tree = search(
        *scripted(ends), always("a"), lambda o, h, n, rng: [script[len(h)]], SearchConfig(iterations=1)
    )
    assert tree.root.Q == 1.0 and tree.rollout_successes == 1


def test_b21_same_seed_same_tree():
    env, observation = lake(3, slip=0.2)
    trees = [
        json.dumps(
            search(env, observation, some_moves, config=SearchConfig(iterations=60), seed=seed).to_dict()
        )
        for seed in (5, 5, 6)
    ]
    assert trees[0] == trees[1] != trees[2]


def test_dense_rewards_and_discount():
    """Q of an action is its own reward and what follows, from that action on."""
    ends = {"ab": (2.0, False)}

    class Paying(Scripted):
        def _step(self, action):
            observation, reward, terminated, info = super()._step(action)
            return observation, reward or float(action == "a"), terminated, info

    def propose(observation, history, n, rng):
        return ["b"] if history else ["a"]

    tree = search(*scripted(ends, Paying), propose, config=SearchConfig(gamma=0.5, iterations=2))
    nodes = by_path(tree)
    assert (nodes["ab"].Q, nodes["a"].Q, tree.root.Q) == (2.0, 2.0, 2.0)  # 1 + 0.5 · 2


@pytest.mark.parametrize("limit", [1, 7, 40])
def test_budgets_are_never_exceeded(limit):
    env, observation = scripted({"ccc": (1.0, True)})
    steps = search(env, observation, always(*"abc"), config=SearchConfig(iterations=999, max_env_steps=limit))
    assert steps.stopped == "budget" and type(env).steps == steps.env_steps <= limit
    asked = search(env, observation, always(*"abc"), config=SearchConfig(iterations=999, max_proposals=limit))
    assert asked.stopped == "budget" and asked.proposals <= limit
    for tree in (steps, asked):
        assert sum(node.env_steps for node in tree.nodes()) == tree.env_steps
        assert sum(node.proposals for node in tree.nodes()) == tree.proposals
        assert tree.root.N == tree.iterations


def test_replayed_restores_are_charged():
    class Replayed(Scripted, ReplayEnv):
        pass

    env, _ = scripted({}, Replayed)
    env.step("z")
    before = type(env).steps
    tree = search(env, "at:z", always("a", "b"), config=SearchConfig(iterations=20, max_depth=3, width=2))
    fork = 1  # the search's own copy is replayed once
    assert type(env).steps - before == tree.env_steps + fork
    plain, _ = scripted({})
    plain.step("z")
    cheap = search(plain, "at:z", always("a", "b"), config=SearchConfig(iterations=20, max_depth=3, width=2))
    assert [n.observation for n in cheap.nodes()] == [n.observation for n in tree.nodes()]
    assert cheap.env_steps < tree.env_steps


def test_what_the_policy_sees():
    seen = []

    def propose(observation, history, n, rng):
        seen.append((observation, history, n))
        return ["a", "b", "c"]

    tree = search(*scripted({}), propose, config=SearchConfig(iterations=2, width=2, max_depth=2))
    assert seen[0] == ("at:", (), 2)
    assert seen[1] == ("at:a", (("at:", "a"),), 1)  # the rollout asks for one
    assert [child.action for child in tree.root.children] == ["a", "b"]  # more than n are not looked at


def test_the_tree_is_plain_data():
    env, observation = lake(1)
    tree = search(env, observation, some_moves)
    record = json.loads(json.dumps(tree.to_dict()))
    assert {"action", "N", "W", "reward", "terminal", "children"} <= set(record)
    assert record["N"] == tree.iterations and len(record["children"]) == len(tree.root.children)


def test_a_deep_tree_needs_no_recursion():
    node = root = Node(None, None, 0, 0)
    for depth in range(1, 5001):
        node.children = [Node("a", node, depth, 0)]
        node = node.children[0]
    node.backup(1.0), node.close()
    tree = Tree(root)
    assert root.W == 1 and root.closed and len(node.history()) == 5000 and len(list(tree.nodes())) == 5001
    top, depth = tree.to_dict(), 0
    while top["children"]:
        top, depth = top["children"][0], depth + 1
    assert depth == 5000


@pytest.mark.parametrize("revisit", [False, True])
def test_the_best_first_action_is_the_exact_one(revisit):
    """Every map: skipping closed nodes the best trajectory starts right; with plain UCT the mean does too."""
    for seed in range(12):
        env, observation = lake(seed, size=3, max_turns=4)
        Q = exact_values(env, "optimal", gamma=0.9).Q[env.start_state(), env.max_turns]
        best = {action for action, q in Q.items() if q > max(Q.values()) - 1e-9}
        config = SearchConfig(iterations=400 if revisit else 150, max_depth=4, width=4, gamma=0.9)
        tree = search(
            env, observation, some_or_all, config=replace(config, revisit_closed=revisit), seed=seed
        )
        assert tree.best_action("mean" if revisit else "best") in best, seed


def some_or_all(observation, history, n, rng):
    return rng.sample(MOVES, min(n, 4))


def found_by_search(seed, budget, **keywords):
    env, observation = lake(seed, **keywords)
    config = SearchConfig(
        iterations=10**6, max_env_steps=budget, stop_on_success=True, stop_on_rollout_success=True
    )
    tree = search(env, observation, some_moves, config=config, seed=seed)
    return tree.success or tree.rollout_successes > 0


def found_by_play(seed, budget, **keywords):
    env, rng = lake(seed, **keywords)[0], random.Random(seed)
    start, over = env.snapshot(), False
    for _ in range(budget):
        if over:
            env.restore(start)
        _, _, terminated, truncated, info = env.step(env.random_action(rng))
        over = terminated or truncated
        if info["success"]:
            return True
    return False


def test_search_finds_the_goal_more_often_than_random_play_at_equal_steps():
    """Maps with many holes, where going back to a safe state pays; the policy is random in both."""
    maps = dict(size=4, max_turns=10, min_distance=5, hole_prob=0.5)
    searched = [found_by_search(seed, 300, **maps) for seed in range(100)]
    played = [found_by_play(seed, 300, **maps) for seed in range(100)]
    difference = paired_bootstrap(np.array(searched, float), np.array(played, float), n=2000)
    assert difference.low > 0.05, difference


def arms(observation, history, n, rng):
    return observation.removeprefix("Arms: ").split(".")[0].split(", ")[:n]


def test_bandit():
    env = vm.make("bandit")
    observation, _ = env.reset(0)
    paid = []
    for seed in range(300):
        tree = search(env, observation, arms, seed=seed)
        assert (tree.stopped, tree.iterations, tree.env_steps) == ("closed", 2, 2)
        Q = {child.action: child.Q for child in tree.root.children}
        assert Q[env.low] == 0.1
        paid.append(Q[env.high])
    # the noise is the search's own: over seeds the risky arm pays with probability 1/4 (± 3.5 sd)
    assert abs(np.mean(paid) - 0.25) < 3.5 * np.sqrt(0.25 * 0.75 / 300)


def test_one_lucky_pull_moves_the_mean_less_than_the_best():
    root = Node(None, None, 0, 0)
    root.children = [Node("sure", root, 1, 0), Node("risky", root, 1, 0), Node("new", root, 1, 0)]
    for G in (0.1, 0.1):
        root.children[0].backup(G)
    for G in (1.0, -1.0):
        root.children[1].backup(G)
    tree = Tree(root)
    assert (tree.best_action(), tree.best_action("mean")) == ("risky", "sure")
    with pytest.raises(ValueError, match="unknown rule for the best action"):
        tree.best_action("median")


def test_presets_hold_the_numbers_of_the_scripts():
    def numbers(name):
        p = preset(name)
        return p.iterations, p.width, p.max_depth, p.timeout_return, p.invalid_return, p.stop_on_success

    assert numbers("default") == (30, 5, 10, 0.0, 0.0, False)
    assert numbers("paper_webshop") == numbers("repo_compat") == (30, 5, 10, -0.5, -1.0, True)
    assert numbers("paper_hotpotqa") == (30, 5, 7, -1.0, 0.0, True)
    with pytest.raises(FrozenInstanceError):
        preset("default").width = 3
    with pytest.raises(ValueError, match="Did you mean 'paper_webshop'"):
        preset("webshop")


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"iterations": 0}, "SearchConfig.iterations must be at least 1"),
        ({"width": 2.5}, "width must be a whole number"),
        ({"rollout_depth": 3}, "rollout_depth must be at least 10"),
        ({"max_env_steps": 0}, "max_env_steps must be at least 1"),
        ({"gamma": 2}, r"gamma must be in \[0, 1\]"),
        ({"c": -1}, "c must be at least 0"),
        ({"timeout_return": float("nan")}, "timeout_return must be a number"),
    ],
)
def test_bad_configs(keywords, words):
    with pytest.raises(ValueError, match=words):
        SearchConfig(**keywords)


def test_what_a_search_needs():
    env, observation = scripted({}, snapshots="none")
    with pytest.raises(ValueError, match="Case has no snapshots"):
        search(env, observation, always("a"))
    env, observation = scripted({})
    with pytest.raises(ValueError, match="must return a list of actions, not 'left'"):
        search(env, observation, lambda o, h, n, rng: "left")
