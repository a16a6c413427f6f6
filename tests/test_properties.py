"""What must hold for every algorithm: invariances, and an unbiased gradient by enumeration."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verl_multiturn as vm
from verl_multiturn.algorithms import registered
from verl_multiturn.turns import TurnBatch

VARIANTS = [
    *((name, {}) for name in registered()),
    ("grpo", {"by_std": False}),
    ("reinforce", {"baseline": "none"}),
    ("turn_gae", {"gamma": 0.9, "lam": 0.5}),
    ("vineppo", {"gamma": 0.9, "lam": 0.5}),
    ("vineppo", {"whiten": True}),
    ("gigpo", {"by_std": False}),
    ("gigpo", {"compat": "verl_agent", "invalid_penalty": 0.1}),
    ("gigpo", {"invalid_penalty": 0.1, "penalty": "propagated"}),
    ("gigpo", {"similarity": 0.8}),
]
every = pytest.mark.parametrize(
    ("name", "keywords"), VARIANTS, ids=[f"{n}-{k}" if k else n for n, k in VARIANTS]
)
quick = settings(max_examples=25, deadline=None)


@st.composite
def batches(draw):
    """Columns of a batch: 1-3 groups, 1-4 trajectories each, 1-5 turns each, repeated states."""
    rows = [
        (g, m, t)
        for g in range(draw(st.integers(1, 3)))
        for m in range(draw(st.integers(1, 4)))
        for t in range(draw(st.integers(1, 5)))
    ]
    n = len(rows)
    group, trajectory, index = map(list, zip(*rows, strict=True))
    rewards = st.sampled_from([0.0, 1.0, -0.1, 10.0, 0.3])
    last = [i + 1 == n or rows[i + 1][2] == 0 for i in range(n)]
    cut = [end and draw(st.booleans()) for end in last]

    def column(elements):
        return draw(st.lists(elements, min_size=n, max_size=n))

    state = column(st.sampled_from(["kitchen", "kitchens", "garden", "cellar"]))
    return dict(
        group=group, trajectory=trajectory, index=index, reward=column(rewards), anchor=state,
        anchor_text=state, value=column(rewards), next_value=column(rewards), truncated=cut,
        tokens=column(st.integers(0, 9)), valid=column(st.booleans()),
    )  # fmt: skip


def compute(name, keywords, columns):
    return vm.advantages(name, TurnBatch.from_lists(**columns), **keywords)


@every
@quick
@given(columns=batches(), data=st.data())
def test_permuting_rows_changes_nothing(name, keywords, columns, data):
    A = compute(name, keywords, columns)
    order = data.draw(st.permutations(range(len(A))))
    permuted = compute(name, keywords, {k: [v[i] for i in order] for k, v in columns.items()})
    assert (permuted == A[order]).all()  # to the last bit


@every
@quick
@given(columns=batches(), shift=st.integers(1, 5))
def test_relabelling_changes_nothing(name, keywords, columns, shift):
    relabelled = {
        **columns,
        "group": [("uid", -g * shift) for g in columns["group"]],
        "trajectory": [f"sample {7 - t * shift}" for t in columns["trajectory"]],
        "anchor": [hash(a) for a in columns["anchor"]],
    }
    assert (compute(name, keywords, columns) == compute(name, keywords, relabelled)).all()


@every
@quick
@given(columns=batches(), more=st.integers(1, 1000))
def test_inserted_observation_tokens_change_nothing(name, keywords, columns, more):
    if "whiten" in keywords:
        pytest.skip("it weighs turns by their trained tokens, by definition")
    longer = {**columns, "tokens": [t + more for t in columns["tokens"]]}
    assert (compute(name, keywords, columns) == compute(name, keywords, longer)).all()


@every
@quick
@given(columns=batches(), other=batches())
def test_an_unrelated_group_changes_nothing(name, keywords, columns, other):
    if name == "reinforce" and not keywords:
        pytest.skip("its baseline is the mean of the whole batch, by definition")
    if "whiten" in keywords:
        pytest.skip("its scale is that of the whole batch, by definition")
    other = {**other, "group": [f"other {g}" for g in other["group"]]}
    A = compute(name, keywords, columns)
    together = compute(name, keywords, {k: columns[k] + other[k] for k in columns})
    assert (together[: len(A)] == A).all()


# --- A two-turn MDP with random stopping, small enough to enumerate every group of trajectories ---
#
# At s0 the policy picks a ∈ {0, 1}, P(1) = p0. r = a − 0.25; the episode goes on with probability
# 0.3 (a = 0) or 0.8 (a = 1), to s1, where it picks b with P(1) = p1 and gets 2b − 0.5.

P0, P1 = 0.4, 0.7
GO_ON = (0.3, 0.8)
V1 = 2 * P1 - 0.5
V0 = P0 * (0.75 + GO_ON[1] * V1) + (1 - P0) * (-0.25 + GO_ON[0] * V1)


def episodes():
    """(probability, actions, rewards) of the six trajectories."""
    for a in (0, 1):
        p = P0 if a else 1 - P0
        yield p * (1 - GO_ON[a]), (a,), (a - 0.25,)
        for b in (0, 1):
            yield p * GO_ON[a] * (P1 if b else 1 - P1), (a, b), (a - 0.25, 2 * b - 0.5)


def score(actions):
    """∂ log π / ∂ (θ0, θ1) of each turn, for P(1) = sigmoid(θ). -> (turns, 2)."""
    return np.diag([actions[0] - P0, ((*actions, 0))[1] - P1])[: len(actions)]


EPISODES = list(episodes())
TRUE_GRADIENT = sum(p * sum(r) * score(a).sum(0) for p, a, r in EPISODES)


def expected_gradient(name, n, V=(0.0, 0.0), **keywords):
    """E[(1/n) Σ_i Σ_t A_t ∇ log π(a_t|s_t)] over all groups of n trajectories."""
    gradient = np.zeros(2)
    for group in itertools.product(EPISODES, repeat=n):
        rows = [(i, t, r) for i, (_, _, rewards) in enumerate(group) for t, r in enumerate(rewards)]
        who, index, reward = map(list, zip(*rows, strict=True))
        turns = TurnBatch.from_lists(
            ["g"] * len(rows), who, index, reward, anchor=index, value=[V[t] for t in index]
        )
        A = vm.advantages(name, turns, **keywords)
        weight = np.prod([p for p, _, _ in group]) / n
        gradient += weight * (A @ np.concatenate([score(actions) for _, actions, _ in group]))
    return gradient


@pytest.mark.parametrize(
    ("name", "n", "scale", "keywords"),
    [
        ("reinforce", 2, 1, {"baseline": "none"}),
        ("reinforce", 3, 2 / 3, {"baseline": "mean"}),  # (n−1)/n: the own return is in the mean
        ("rloo", 3, 1, {}),
        ("grpo", 3, 2 / 3, {"by_std": False}),
        ("gigpo", 3, 2 / 3, {"by_std": False, "step_weight": 0}),
        ("turn_gae", 2, 1, {"V": (0.3, -0.7)}),  # λ = 1: any value is a fair baseline
        ("turn_gae", 2, 1, {"V": (V0, V1), "lam": 0.0}),  # λ < 1 is fair with the true value
        ("vineppo", 2, 1, {"V": (V0, V1)}),
        ("vineppo", 2, 1, {"V": (0.3, -0.7), "lam": 1.0}),
    ],
)
def test_variable_turn_counts_stay_unbiased(name, n, scale, keywords):
    gradient = expected_gradient(name, n, **keywords)
    np.testing.assert_allclose(gradient, scale * TRUE_GRADIENT, atol=1e-12)


def test_row_voting_is_biased_where_lengths_vary():
    """Why "trajectory" is the default: rows that vote make the gradient depend on lengths."""
    gradient = expected_gradient("gigpo", 3, by_std=False, step_weight=0, episode_unit="row", gamma=1.0)
    ratio = gradient / TRUE_GRADIENT
    assert abs(ratio[0] - ratio[1]) > 0.01


def test_the_step_term_points_uphill():
    gradient = expected_gradient("gigpo", 3, by_std=False, gamma=1.0)
    episode_only = expected_gradient("gigpo", 3, by_std=False, step_weight=0)
    assert ((gradient - episode_only) * TRUE_GRADIENT > 0).all()
