"""One protocol for values of turns: where they come from, and advantages, shaping, priors made of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verl_multiturn as vm
from verl_multiturn.algorithms import advantages
from verl_multiturn.returns import returns_to_go
from verl_multiturn.search.mcts import SearchConfig, search
from verl_multiturn.search.step_value import (
    GroupValue,
    ModelValue,
    StateValue,
    Step,
    TreeValue,
    Values,
    shaped_rewards,
    turn_advantages,
)

TREE = {
    "N": 4, "W": 2.0,
    "children": [
        {"action": "a", "N": 3, "W": 2.5, "reward": 0.5, "children": [{"action": "b", "N": 2, "W": 1.0}]},
        {"action": "c", "N": 1, "W": -0.5},
    ],
}  # fmt: skip


def batch(**keywords):
    """Two trajectories of group g, 2 turns and 1 turn."""
    columns = {"group": ["g"] * 3, "trajectory": [0, 0, 1], "index": [0, 1, 0], "reward": [0.5, 1.0, 0.0]}
    return vm.TurnBatch.from_lists(**columns | {"anchor": ["s", "t", "s"]} | keywords)


STEPS = [Step(0, "a", group="g"), Step(1, "b", ("a",), group="g"), Step(0, "c", group="g", trajectory=1)]


def test_a_tree():
    found = TreeValue({"g": TREE}).values([*STEPS, Step(0, "z", group="g"), Step(0, "a", group="h")])
    assert found.Q == pytest.approx([2.5 / 3, 0.5, -0.5, np.nan, np.nan], nan_ok=True)
    assert found.V == pytest.approx([0.5, 2.5 / 3 - 0.5, 0.5, 0.5, np.nan], nan_ok=True)
    few = TreeValue({"g": TREE}, min_visits=2).values(STEPS)
    assert np.isnan(few.Q).tolist() == [False, False, True]
    discounted = TreeValue({"g": TREE}, gamma=0.5).values(STEPS)
    assert discounted.V[1] == pytest.approx((2.5 / 3 - 0.5) / 0.5)


def test_the_value_of_a_trees_state_is_the_mean_of_its_actions():
    env = vm.make("frozen_lake", size=3)
    observation, _ = env.reset(1)
    moves = ["up", "down", "left", "right"]
    tree = search(env, observation, lambda o, h, n, rng: rng.sample(moves, min(n, 4)), config=SearchConfig())
    children = [child for child in tree.root.children if child.N]
    found = TreeValue({"": tree.to_dict()}).values([Step(0, child.action) for child in children])
    mean = np.average(found.Q, weights=[child.N for child in children])
    assert found.V == pytest.approx(np.full(len(children), mean))
    A = turn_advantages(found)
    assert np.average(A, weights=[child.N for child in children]) == pytest.approx(0)


def test_vine_or_critic_values_are_one_step_advantages():
    turns = batch(value=[0.2, 0.6, 0.1], terminated=[False, True, False], truncated=[False, False, True],
                  next_value=[np.nan, np.nan, 0.7])  # fmt: skip
    found = StateValue(turns, gamma=0.9).values(STEPS)
    assert found.Q == pytest.approx([0.5 + 0.9 * 0.6, 1.0, 0.9 * 0.7])
    expected = advantages("turn_gae", turns, gamma=0.9, lam=0.0)
    assert turn_advantages(found) == pytest.approx(expected)


def test_group_values_are_gigpos_step_baseline():
    turns = batch()
    found = GroupValue(turns, gamma=0.9).values(STEPS)
    assert found.Q == pytest.approx(returns_to_go(turns, 0.9))
    assert found.V == pytest.approx([(1.4 + 0.0) / 2, 1.0, (1.4 + 0.0) / 2])
    gigpo = advantages("gigpo", turns, gamma=0.9, by_std=False) - advantages("grpo", turns, by_std=False)
    assert turn_advantages(found) == pytest.approx(gigpo)
    alone = GroupValue(batch(anchor=None)).values(STEPS)
    assert turn_advantages(alone) == pytest.approx([0, 0, 0])


def prompt(text):
    return [{"role": "user", "content": text}]


def test_a_model_is_asked_once_a_state():
    asked = []

    def score(messages, answers):
        asked.append((messages[0]["content"], answers))
        return [float(len(answer)) for answer in answers]

    steps = [
        Step(0, "x", prompt=prompt("s"), text="ab", others=("a", "abc")),
        Step(0, "y", prompt=prompt("s"), text="abcd"),
        Step(1, "zz", prompt=prompt("t")),
    ]
    found = ModelValue(score).values(steps)
    assert asked == [("s", ["ab", "a", "abc", "abcd"]), ("t", ["zz"])]
    assert found.Q.tolist() == [2, 4, 2] and found.V.tolist() == [2.5, 2.5, 2]
    soft = ModelValue(score, baseline="logmeanexp").values(steps)
    assert soft.V[0] == pytest.approx(np.log(np.mean(np.exp([1, 2, 3, 4]))))
    assert (soft.V >= found.V - 1e-12).all()  # Jensen


def test_leaving_the_own_answer_out():
    """(2 + 2 + 8) / 3 beside 4; the answer said twice is one of the others of its twin."""

    def score(messages, answers):
        return [float(2 ** len(answer)) for answer in answers]

    steps = [
        Step(0, "ab", prompt=prompt("s"), others=("a", "abc")),
        Step(0, "a", prompt=prompt("s")),
        Step(1, "a", prompt=prompt("t")),
    ]
    found = ModelValue(score, baseline="leave_one_out").values(steps)
    assert found.Q.tolist() == [4, 2, 2]
    assert found.V[:2] == pytest.approx([(2 + 2 + 8) / 3, (2 + 4 + 8) / 3]) and np.isnan(found.V[2])


def test_the_left_out_mean_does_not_depend_on_the_answer():
    """E[(Q(a) − V) ∇log π(a)] over all draws is the gradient of E Q; with the mean of different ones not."""
    p, q = np.array([0.5, 0.3, 0.2]), {"a": 1.0, "b": -2.0, "c": 4.0}
    exact = p * (np.array([*q.values()]) - p @ np.array([*q.values()]))
    for baseline, unbiased in (("leave_one_out", True), ("mean", False)):
        value, gradient = ModelValue(lambda _, some: [q[one] for one in some], baseline), np.zeros(3)
        for i, j, k in np.ndindex(3, 3, 3):
            others = ("abc"[j], "abc"[k])
            A = turn_advantages(value.values([Step(0, "abc"[i], prompt=prompt("s"), others=others)]))[0]
            gradient += p[i] * p[j] * p[k] * A * (np.eye(3)[i] - p)
        assert np.allclose(gradient, exact) is unbiased


def test_every_value_knows_only_its_own_turns():
    stranger = [Step(0, "a", group="elsewhere")]
    for value in (StateValue(batch(value=[0, 0, 0])), GroupValue(batch()), TreeValue({"g": TREE})):
        found = value.values(stranger)
        assert np.isnan(found.Q).all() and len(value.values([]).Q) == 0
        with pytest.raises(ValueError, match="1 of 1 turns have no Q or no V, the first is number 0"):
            turn_advantages(found)
        assert turn_advantages(found, unknown_is=0.0).tolist() == [0.0]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=6),
    st.floats(0, 1),
    st.randoms(),
)
def test_shaping_moves_the_return_by_the_value_of_the_start(rows, gamma, rng):
    order = list(range(len(rows)))
    rng.shuffle(order)
    n = len(rows)
    turns = vm.TurnBatch.from_lists(
        group=["g"] * n, trajectory=[0] * n, index=order, reward=[rows[t][0] for t in order]
    )
    V = np.array([rows[t][1] for t in order])
    shaped = shaped_rewards(turns, Values(V, V), gamma)
    first = order.index(0)
    plain = returns_to_go(turns, gamma)[first]
    assert returns_to_go(turns, gamma, shaped)[first] == pytest.approx(plain - V[first], abs=1e-9)


def test_shaping_with_exact_values_pays_at_once():
    """With V of the policy the shaped reward of a turn is its advantage."""
    turns = batch(value=[0.2, 0.6, 0.1])
    values = StateValue(turns).values(STEPS)
    assert shaped_rewards(turns, values) == pytest.approx(turn_advantages(values))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: shaped_rewards(batch(), Values(np.zeros(2), np.zeros(2))),
            "has shape \\(2,\\), the batch 3",
        ),
        (
            lambda: shaped_rewards(batch(), Values(np.zeros(3), np.full(3, np.nan))),
            "unknown \\(nan\\) at turn 0",
        ),
        (lambda: shaped_rewards(batch(), Values(np.zeros(3), np.zeros(3)), 2.0), "gamma must lie in"),
        (lambda: ModelValue(lambda p, a: a, baseline="max"), "unknown baseline of ModelValue 'max'"),
        (lambda: ModelValue(lambda p, a: [1.0] * len(a)).values(STEPS), "needs the prompt of every step"),
        (
            lambda: ModelValue(lambda p, a: []).values([Step(0, "a", prompt=prompt("s"))]),
            "one finite number for each of 1 answers",
        ),
        (lambda: TreeValue({}, gamma=0.0), "gamma must lie in"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()
