"""Preference pairs and the step-level DPO loss: data/qvalue_vectors.json, defects of the original, laws."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verl_multiturn as vm

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "qvalue_vectors.json").read_text())
V6 = VECTORS["V6_dpo"]
quick = settings(max_examples=60, deadline=None)


def node(action, Q=0.0, N=1, children=(), reward=0.0, terminal=False):
    return dict(action=action, N=N, W=Q * N, reward=reward, terminal=terminal, children=list(children))


@pytest.fixture
def tree():
    """V5: the best trajectory is A, A1, though B looks better than A from the root."""
    leaves = [node("A0", 0.0, terminal=True), node("A1", 1.0, terminal=True, reward=1.0)]
    return node(None, 0.3, 9, [node("A", 0.4, 4, leaves), node("B", 0.55, 3), node("C", -0.5, 2)])


def short(pairs):
    return [[len(p["path"]), p["win"], p["lose"], pytest.approx(p["gap"])] for p in pairs]


def test_v5_both_win_rules(tree):
    expected = VECTORS["V5_pairs"]
    assert expected["paper_rule"] == short(vm.preference_pairs(tree))
    assert expected["argmax_rule"] == short(vm.preference_pairs(tree, win="argmax"))
    assert expected["paper_rule_gap_0p95"] == short(vm.preference_pairs(tree, min_gap=0.95))


def test_v5_the_path_is_the_best_trajectory_whoever_wins(tree):
    for win in ("best_path", "argmax"):
        assert [p["path"] for p in vm.preference_pairs(tree, win=win)] == [[], ["A"]]


def test_v5_ties_and_failed_trees_give_nothing(tree):
    tied = node(None, children=[node("a"), node("b", terminal=True, reward=1.0), node("c")])
    assert vm.preference_pairs(tied) == VECTORS["V5_pairs"]["all_tied"]
    failed = node(None, children=[node("a", 0.3), node("b", -0.5, reward=-1.0)])
    assert vm.preference_pairs(failed) == VECTORS["V5_pairs"]["failed_tree"]
    assert vm.preference_pairs(node(None)) == []


def test_a_tie_does_not_stop_the_walk():
    """All equal at the root: no pair there, the prefix grows."""
    deeper = [node("x", 1.0, reward=1.0, terminal=True), node("y")]
    top = node(None, children=[node("a", 0.5, 2, deeper), node("b", 0.5)])
    assert vm.preference_pairs(top) == [{"path": ["a"], "win": "x", "lose": "y", "gap": 1.0}]


def test_first_of_equals():
    leaves = [
        node("bad", 0.0),
        node("good", 1.0, reward=1.0),
        node("bad2", 0.0),
        node("good2", 1.0, reward=1.0),
    ]
    for win in ("best_path", "argmax"):
        (pair,) = vm.preference_pairs(node(None, children=leaves), win=win)
        assert (pair["win"], pair["lose"]) == ("good", "bad")


def test_every_worse_sibling(tree):
    def losers(**keywords):
        return [p["lose"] for p in vm.preference_pairs(tree, lose="all_below_gap", **keywords)]

    assert losers() == ["C", "A0"]  # B is better than A
    assert losers(win="argmax") == ["A", "C", "A0"]
    assert losers(win="argmax", min_gap=0.5) == ["C", "A0"]


def test_a_gap_equal_to_the_threshold_counts():
    top = node(None, children=[node("a", 0.5, reward=0.5), node("b", 0.25)])
    assert len(vm.preference_pairs(top, min_gap=0.25)) == 1
    assert vm.preference_pairs(top, min_gap=0.26) == []


def test_min_visits_holds_for_both_sides():
    children = [node("a", 0.9, 3, reward=0.9), node("b", 0.5, 2), node("c", N=0)]
    top = node(None, children=children)

    def pairs(n):
        return [(p["win"], p["lose"]) for p in vm.preference_pairs(top, min_visits=n)]

    assert [pairs(n) for n in (0, 1, 2, 3, 4)] == [[("a", "c")], [("a", "b")], [("a", "b")], [], []]


def test_b3_a_first_success_that_was_never_booked_does_not_lose():
    """The original saves such a tree at its early stop and then prefers a wrong answer."""
    answers = [
        node("finish[wrong]", 0.0, terminal=True),
        node("finish[right]", N=0, reward=1.0, terminal=True),
    ]
    top = node(None, children=answers)
    for win in ("best_path", "argmax"):
        (pair,) = vm.preference_pairs(top, win=win)
        assert (pair["win"], pair["lose"], pair["gap"]) == ("finish[right]", "finish[wrong]", 1.0)


def test_b12_actions_are_not_cut():
    children = [node("click[size: 9: wide]", 1.0, reward=1.0), node("click[size: 9: slim]")]
    (pair,) = vm.preference_pairs(node(None, children=children))
    assert (pair["win"], pair["lose"]) == ("click[size: 9: wide]", "click[size: 9: slim]")


def test_an_action_does_not_lose_against_itself():
    top = node(None, children=[node("a", 1.0, reward=1.0), node("a", 0.0), node("b", 0.5)])
    assert short(vm.preference_pairs(top)) == [[0, "a", "b", 0.5]]


def test_a_deep_tree_needs_no_recursion():
    top = node("end", 1.0, reward=1.0, terminal=True)
    for depth in range(5000):
        top = node(f"a{depth}", 1.0, 1, [top, node("other")])
    pairs = vm.preference_pairs(top)
    assert len(pairs) == 5000 and pairs[-1]["win"] == "end" and len(pairs[-1]["path"]) == 4999


trees = st.recursive(
    st.builds(
        node,
        st.sampled_from("abcdef"),
        st.floats(-1, 1),
        st.integers(0, 3),
        reward=st.sampled_from([0.0, 0.5, 1]),
    ),
    lambda children: st.builds(
        node, st.sampled_from("abcdef"), st.floats(-1, 1), st.integers(0, 3), st.lists(children, max_size=3)
    ),
    max_leaves=12,
)


def nodes(tree):
    return [tree, *(n for child in tree["children"] for n in nodes(child))]


@quick
@given(trees, st.sampled_from(["best_path", "argmax"]), st.floats(0, 1), st.integers(0, 2))
def test_laws(tree, win, min_gap, min_visits):
    def pairs(**keywords):
        return vm.preference_pairs(tree, win=win, **keywords)

    everything = pairs(lose="all_below_gap")
    depths = [len(p["path"]) for p in pairs()]
    assert depths == sorted(set(depths))
    assert all(p in everything for p in pairs())
    assert all(p["gap"] > 0 and p["win"] != p["lose"] for p in everything)
    assert pairs(lose="all_below_gap", min_gap=min_gap) == [p for p in everything if p["gap"] >= min_gap]
    visits = {id(n): n["N"] for n in nodes(tree)}
    if all(n >= min_visits for n in visits.values()):
        assert pairs(min_visits=min_visits) == pairs()
    assert len(pairs(min_visits=min_visits)) <= len(everything)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"win": "argmin"}, "unknown win rule 'argmin'; valid: best_path, argmax. Did you mean 'argmax'"),
        ({"lose": "all"}, "unknown lose rule 'all'; valid: worst, all_below_gap"),
        ({"min_gap": -1}, "min_gap must lie"),
        ({"min_gap": float("nan")}, "min_gap must lie"),
        ({"min_visits": -1}, "min_visits must lie"),
        ({"tree": [1]}, "a node must be a dict"),
        ({"tree": {"W": 0}}, "the root has no 'N'"),
        ({"tree": node(None, children=[{"N": 1, "W": 0}])}, "node None has no 'action'"),
        ({"tree": node(None, children=[node("a", float("nan"))])}, "W of node 'a' must be a finite number"),
        ({"tree": node(None, children=[node("a", 0, -1)])}, "N of node 'a' must be a whole number of visits"),
        ({"tree": node(None) | {"children": {}}}, "children of the root must be a list"),
    ],
)
def test_refusals(tree, keywords, words):
    with pytest.raises(ValueError, match=words):
        vm.preference_pairs(**({"tree": tree} | keywords))


def test_leaves_may_leave_out_what_is_empty():
    top = {
        "N": 2,
        "W": 1,
        "children": [{"action": "a", "N": 1, "W": 1, "reward": 1}, {"action": "b", "N": 1, "W": 0}],
    }
    assert short(vm.preference_pairs(top)) == [[0, "a", "b", 1.0]]


def test_v6_dpo():
    w, lost, rw, rl = V6["logps"]
    assert vm.dpo_loss([w], [lost], [rw], [rl], 0.1) == pytest.approx(V6["loss_beta0p1"], abs=1e-9)
    assert vm.dpo_loss(w, lost, rw, rl, 0.05) == pytest.approx(V6["loss_beta0p05"], abs=1e-9)
    two = vm.dpo_loss([w, -3], [lost, 0], [rw, 0], [rl, 0], 0.1)  # Δ = 1.5 and -3
    assert two == pytest.approx(V6["batch_mean"], abs=1e-9) == np.mean(V6["batch_losses"])
    assert vm.dpo_loss([w], [lost], [w], [lost], 0.1) == pytest.approx(V6["zero_margin_loss"], abs=1e-9)


@pytest.mark.parametrize(("beta", "name"), [(0.1, "dloss_dlogp_win"), (0.05, "dloss_dlogp_win_beta0p05")])
def test_v6_gradient(beta, name):
    (w, lost, rw, rl), h = V6["logps"], 1e-5
    slope = (vm.dpo_loss(w + h, lost, rw, rl, beta) - vm.dpo_loss(w - h, lost, rw, rl, beta)) / (2 * h)
    assert slope == pytest.approx(V6[name], abs=1e-8)


def test_dpo_is_stable():
    assert vm.dpo_loss([0], [-1e6], [0], [0], 1.0) == 0
    assert vm.dpo_loss([-1e6], [0], [0], [0], 1.0) == 1e6


@quick
@given(
    st.lists(st.tuples(*[st.floats(-50, 0)] * 4), min_size=1, max_size=5),
    st.floats(0.01, 2),
    st.floats(-9, 9),
)
def test_dpo_laws(rows, beta, shift):
    w, lost, rw, rl = np.array(rows).T
    loss = vm.dpo_loss(w, lost, rw, rl, beta)
    delta = (w - lost) - (rw - rl)
    assert loss - vm.dpo_loss(lost, w, rl, rw, beta) == pytest.approx(-beta * delta.mean(), abs=1e-7)
    assert vm.dpo_loss(w + shift, lost + shift, rw, rl, beta) == pytest.approx(loss, abs=1e-7)
    assert loss == pytest.approx(np.mean(-np.log(1 / (1 + np.exp(-beta * delta)))), abs=1e-7)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1], [1, 2], [1], [1], 0.1), "logp_l has 2 entries, but logp_w has 1"),
        (([1], [1], [np.nan], [1], 0.1), "ref_w must be finite"),
        (([-np.inf], [1], [1], [1], 0.1), "logp_w must be finite"),
        (([], [], [], [], 0.1), "logp_w is empty"),
        (([1], [1], [1], [1], 0), "beta must lie in"),
    ],
)
def test_dpo_refusals(arguments, words):
    with pytest.raises(ValueError, match=words):
        vm.dpo_loss(*arguments)
