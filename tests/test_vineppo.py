"""VinePPO against data/vineppo_vectors.json, and on an exactly solvable chain.

Vector 1 is met in test_splitting.py; 13 to 16 (KL, clipping, budgets, ranking) concern verl's loss
and the rollout.
"""

import itertools
import json
from math import comb
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verl_multiturn as vm
from verl_multiturn.algorithms.vineppo import (
    VinePPOConfig,
    kl_coefficient,
    sibling_root,
    whiten,
    with_horizon,
    with_sibling_roots,
)
from verl_multiturn.columns import factorise, keys
from verl_multiturn.exact import exact_values
from verl_multiturn.stats import wilson
from verl_multiturn.turns import TurnBatch

VECTORS = json.loads((Path(__file__).parent / "data" / "vineppo_vectors.json").read_text())
nan = float("nan")
quick = settings(max_examples=50, deadline=None)


def vector(start):
    return next(numbers for name, numbers in VECTORS.items() if name.startswith(start))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


# --- The coefficient of the KL ---


def test_vector_13_the_papers_kl_with_verls_aggregation():
    """1e-4 on sums over responses is 1e-4 times their mean length on verl's mean over tokens."""
    torch = pytest.importorskip("torch")
    from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

    k3 = vector("V13")["k3"]
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0]])
    x = torch.tensor([[root(one) for one in row] for row in k3], dtype=torch.float64)
    kl = kl_penalty(torch.zeros_like(x), x, "low_var_kl")
    assert kl.flatten().tolist() == pytest.approx(np.ravel(k3).tolist(), abs=1e-9)
    mean = agg_loss(kl, mask.double(), "token-mean")
    assert float(mean) == pytest.approx(vector("V13")["token_mean"])
    found = kl_coefficient(1e-4, mask.sum(1).int().tolist())
    assert found == pytest.approx(1e-4 * vector("V13")["ratio_is_mean_len"])
    assert found * float(mean) == pytest.approx(vector("V13")["loss"])
    assert float((kl * mask).sum(1).mean()) == pytest.approx(vector("V13")["seq_sum_then_mean"])


def root(k):
    """x >= 0 with e^x - x - 1 = k."""
    low, high = 0.0, 10.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.exp(middle) - middle - 1 < k else (low, middle)
    return low


def test_a_coefficient_needs_lengths():
    for lengths in ([], [3, -1]):
        with pytest.raises(ValueError, match="lengths must be of one response"):
            kl_coefficient(1e-4, lengths)


# --- Advantages of one trajectory ---


@pytest.mark.parametrize(
    ("name", "rewards", "values"),
    [
        ("V2", [0, 0, 0, 1], [0.5, 0.75, 0.25, 1.0]),
        ("V3", [0, 0, 0], [0.5, 0.75, 0.25]),
        ("V5 one step, V(s0)=5/9, R=1", [1], [5 / 9]),
        ("V5 one step, V(s0)=5/9, R=0", [0], [5 / 9]),
        ("V8", [0, 0.1, 1], [0.6, 0.2, 0.8]),
    ],
)
def test_vectors_of_steps(name, rewards, values):
    close(vm.vine_advantages(rewards, values), vector(name)["step_adv"])


def test_vectors_2_3_and_8_on_tokens():
    close(np.repeat([0.25, -0.5, 0.75, 0], [2, 3, 1, 3]), vector("V2")["token_adv"])
    close(np.repeat([0.25, -0.5, -0.25], [2, 1, 2]), vector("V3")["token_adv"])
    A = vm.vine_advantages([0, 0.1, 1], [0.6, 0.2, 0.8])
    mask = np.array([1, 1, 0, 0, 0, 1, 0, 1, 1])
    tokens = np.where(mask, A[[0, 0, 0, 0, 0, 1, 1, 2, 2]], 0)
    close(tokens, vector("V8")["token_adv"])
    close(whiten(tokens, weights=mask), vector("V8")["whitened"])


def test_vector_4_a_cap():
    r, V = [0, 0, 0, 0, 1], [0.5, 0.75, 0.25, 0.9, 0.1]
    close(vm.vine_advantages(r, V, cap=2, tail="zero"), vector("V4")["step_adv"])
    close(vm.vine_advantages(r, V, cap=2), [0.25, -0.5, 0.75, 0.75, 0.75])
    close(vm.vine_advantages(r, [*V[:3], nan, nan]), [0.25, -0.5, 0.75, 0.75, 0.75])
    close(vm.vine_advantages(r, V, cap=4), vm.vine_advantages(r, V))
    close(vm.vine_advantages(r, V, cap=99, tail="zero"), vm.vine_advantages(r, V))
    A = vm.vine_advantages([0, 0.3, 0.1, 0.7], [0.5, 0.2, 0, 0], gamma=0.9, lam=0.5, cap=1, tail="zero")
    assert (A[2:] == 0).all()


def test_vector_6_discount_and_lambda():
    expected, r, V = vector("V6"), [0.1, 0, 1], [0.4, 0.55, 0.3]
    for lam, name in ((0, "lam0"), (0.5, "lam05"), (1, "lam1")):
        close(vm.vine_advantages(r, V, gamma=0.9, lam=lam), expected[name])
    close(np.array(expected["returns"]) - V, expected["lam1"])


def test_vector_7_whitening():
    expected = vector("V7")
    close(whiten(vector("V2")["token_adv"]), expected["whitened"])
    close(whiten(vector("V2")["step_adv"]), expected["step_whitened"])
    close(
        whiten(vector("V2")["step_adv"], weights=[2, 3, 1, 3]), np.array(expected["whitened"])[[0, 2, 5, 6]]
    )


def test_vector_9_equal_states_share_a_value():
    expected = vector("V9")
    codes = factorise("state", keys("state", expected["states"]))
    assert codes.tolist() == expected["index"] and codes.max() + 1 == len(expected["unique"])


def test_vector_10_widths_of_intervals():
    for successes, n, _, width in vector("V10")["table"]:
        interval = wilson(int(successes), int(n))
        assert interval.high - interval.low == pytest.approx(width, abs=1e-9)


def test_vector_11_the_root_from_siblings():
    expected, returns, extra = vector("V11"), [1, 0, 0, 1, 1, 0, 1, 0], [1, 0]
    root = sibling_root(returns, extra)
    close(root, expected["loo"])
    own = np.mean([*returns, *extra])
    close(own, expected["plain"])
    close((returns - own) / (returns - root), expected["ratio"])
    assert np.isnan(sibling_root([1.0])).all() and sibling_root([]).shape == (0,)
    assert sibling_root([1.0], [0.5]).tolist() == [0.5]
    with pytest.raises(ValueError, match="must be finite"):
        sibling_root([1, nan])


def test_vector_12_noise_of_an_advantage():
    """Var A = (p(1−p) + p'(1−p')) / K, by enumerating the counts of successes."""
    expected, K = vector("V12"), 9
    first, second = coins(K, 0.5), coins(K, 0.8)
    pairs = [(p * q, vm.vine_advantages([0, 1], [a, b])[0]) for p, a in first for q, b in second]
    mean = sum(w * x for w, x in pairs)
    assert mean == pytest.approx(0.3)
    assert sum(w * (x - mean) ** 2 for w, x in pairs) ** 0.5 == pytest.approx(expected["sd"])
    last = [(p, vm.vine_advantages([1], [a])[0]) for p, a in first]
    assert sum(p * (x - 0.5) ** 2 for p, x in last) ** 0.5 == pytest.approx(expected["sd_terminal"])
    assert (expected["sd"] / 0.1) ** 2 * K == pytest.approx(expected["K_for_sd_0p1"])


def coins(K, p):
    """(probability, mean) of K coins that show 1 with probability p."""
    return [(comb(K, k) * p**k * (1 - p) ** (K - k), k / K) for k in range(K + 1)]


def test_a_hole_joins_the_step_before_it():
    r, V = [0, 0.5, 0, 1], [0.5, nan, 0.25, 1.0]
    first = 0.5 + 0.25 - 0.5
    close(vm.vine_advantages(r, V), [first, first, 0.75, 0])
    first = 0.9 * 0.5 + 0.81 * 0.25 - 0.5
    second = 0.9 * 1.0 - 0.25
    close(vm.vine_advantages(r, V, gamma=0.9), [first, first, second, 0])
    mixed = first + 0.81 * 0.5 * second
    close(vm.vine_advantages(r, V, gamma=0.9, lam=0.5), [mixed, mixed, second, 0])


@quick
@given(data=st.data(), n=st.integers(1, 12), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_telescoping_and_limits(data, n, gamma, lam):
    numbers = st.lists(st.floats(-2, 2), min_size=n, max_size=n)
    r, V = data.draw(numbers), data.draw(numbers)
    hole = [False, *data.draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1))]
    known = np.where(hole, nan, V)
    assert vm.vine_advantages(r, V).sum() == pytest.approx(sum(r) - V[0], abs=1e-9)
    A = vm.vine_advantages(r, known)
    assert A[~np.array(hole)].sum() == pytest.approx(sum(r) - V[0], abs=1e-9)  # one a segment
    assert (A == A[np.maximum.accumulate(np.where(hole, 0, range(n)))]).all()
    assert np.isfinite(vm.vine_advantages(r, known, gamma, lam, cap=n // 2)).all()
    one = [0] * n
    turns = TurnBatch.from_lists(one, one, range(n), r, value=V)
    expected = vm.advantages("turn_gae", turns, gamma=gamma, lam=lam)
    np.testing.assert_allclose(vm.vine_advantages(r, V, gamma, lam), expected, atol=1e-9)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(values=[nan, 0.5]), "value is missing .nan. at turn 0"),
        (dict(values=[0.5]), "values has 1 entries, but rewards has 2"),
        (dict(values=[0.5, float("inf")]), "value must be finite"),
        (dict(rewards=[0, nan]), "reward must be finite"),
        (dict(gamma=1.5), "gamma must be in"),
        (dict(lam=-0.1), "lam must be in"),
        (dict(cap=-1), "cap must be a whole number"),
        (dict(cap=1.0), "cap must be a whole number"),
        (dict(tail="merged"), "unknown tail 'merged'; valid: merge, zero. Did you mean 'merge'"),
    ],
)
def test_malformed_trajectories(arguments, words):
    with pytest.raises(ValueError, match=words):
        vm.vine_advantages(**{**dict(rewards=[0, 1], values=[0.5, 0.5]), **arguments})


def test_an_empty_trajectory():
    assert vm.vine_advantages([], []).shape == (0,)


# --- Whitening ---


def test_whitening_has_the_scope_it_is_given():
    rng = np.random.default_rng(0)
    x, w, scope = rng.normal(size=40), rng.integers(0, 3, 40), rng.integers(0, 3, 40)
    out = whiten(x, weights=w, scope=scope)
    for s in range(3):
        tokens = np.repeat(x[scope == s], w[scope == s])
        expected = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
        close(np.repeat(out[scope == s], w[scope == s]), expected)
    assert not out[w == 0].any()


@pytest.mark.parametrize("x", [[], [3.0], [0.1] * 7, [0.1] * 3 + [5.0]])
def test_equal_or_single_entries_whiten_to_zero(x):
    assert not whiten(x, weights=[0 if v == 5 else 1 for v in x]).any()


def test_whitening_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="have 2, 1 and 2 entries"):
        whiten([1, 2], weights=[1])
    with pytest.raises(ValueError, match="must not be negative"):
        whiten([1, 2], weights=[1, -1])


# --- The registered algorithm ---


def test_a_batch_is_its_trajectories():
    turns = TurnBatch.from_lists(
        list("ababa"), [0, 0, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0.5, 0, 0], value=[nan, 0.3, 0.2, 0.6, 0.5],
        tokens=[1, 2, 3, 4, 0],
    )  # fmt: skip
    A = vm.advantages("vineppo", turns)
    close(A, [0.5, 0.3, 0.3, -0.6, 0.5])
    white = vm.advantages("vineppo", turns, whiten=True)
    close(white, whiten(A, weights=[1, 2, 3, 4, 0]))
    with pytest.raises(AttributeError):
        VinePPOConfig().lam = 1


def test_a_missing_value_is_named():
    lists = dict(group=["g"] * 2, trajectory=[0, 0], index=[0, 1], reward=[0, 1])
    for value in (None, [nan, 0.5]):
        with pytest.raises(ValueError, match=r"^value is missing \(nan\) at turn 0 of trajectory 0"):
            vm.advantages("vineppo", TurnBatch.from_lists(**lists, value=value))


def test_a_cap_of_a_batch():
    """As of one trajectory; the shorter one has nothing behind the cap."""
    r, V = [0, 0, 0, 0, 1], [0.5, 0.75, 0.25, 0.9, 0.1]
    turns = TurnBatch.from_lists(
        ["a"] * 7, [0] * 5 + [1] * 2, [0, 1, 2, 3, 4, 0, 1], [*r, 0, 1], value=[*V, 0.5, 0.25]
    )
    for tail in ("merge", "zero"):
        A = vm.advantages("vineppo", turns, cap=2, tail=tail)
        close(A[:5], vm.vine_advantages(r, V, cap=2, tail=tail))
        close(A[5:], [-0.25, 0.75])
    with pytest.raises(ValueError, match=r"unknown VinePPOConfig\.tail 'drop'"):
        vm.advantages("vineppo", turns, tail="drop")
    with pytest.raises(ValueError, match="which turns share an update is known in a run only"):
        vm.advantages("vineppo", turns, whiten=True, scope="minibatch")


@quick
@given(data=st.data(), groups=st.integers(1, 3))
def test_no_rollouts_and_a_sibling_root_is_rloo(data, groups):
    rows, value = [], []
    for g in range(groups):
        number = st.sampled_from([0.0, 1.0, -0.1, 0.3])
        rewards = data.draw(st.lists(st.lists(number, min_size=1, max_size=4), min_size=2, max_size=5))
        for m, root in enumerate(sibling_root([sum(r) for r in rewards])):
            rows += [(g, m, t, r) for t, r in enumerate(rewards[m])]
            value += [root, *[nan] * (len(rewards[m]) - 1)]
    turns = TurnBatch.from_lists(*map(list, zip(*rows, strict=True)), value=value)
    close(vm.advantages("vineppo", turns), vm.advantages("rloo", turns))


# --- The value of the start from the others of the group ---


def batch(episodes, values=None, **more):
    """A TurnBatch of [(group, member, rewards), ...]; values likewise, default: none is known."""
    rows = [(g, m, t, r) for g, m, rewards in episodes for t, r in enumerate(rewards)]
    value = [nan] * len(rows) if values is None else [v for one in values for v in one]
    return TurnBatch.from_lists(*map(list, zip(*rows, strict=True)), value=value, **more)


def roots(turns):
    return turns.value[turns.index == 0]


def test_roots_are_the_discounted_returns_of_the_others():
    turns = batch([("a", 0, [0, 4]), ("b", 0, [2]), ("a", 1, [1, 0, 8]), ("a", 2, [0.5])])
    filled = with_sibling_roots(turns, gamma=0.5)
    close(roots(filled), [(3 + 0.5) / 2, 2, (2 + 0.5) / 2, (2 + 3) / 2])  # b is alone
    assert np.isnan(filled.value[filled.index > 0]).all()
    assert np.isnan(turns.value).all()  # the given one is left as it was


def test_values_behind_a_horizon_are_those_of_the_others():
    """H = 2, γ = 0.5: V(s_0) looks at what the other two got from turn 2 on, each without its own."""
    episodes = [("a", 0, [0, 0, 4, 8]), ("a", 1, [1, 0, 2]), ("a", 2, [3]), ("b", 0, [0, 0, 5])]
    turns = batch(episodes, [[1, 1, nan, 1], [1, 1, 1], [1], [1, 1, 1]])
    cut = [1, 0.5, 1, 1, 1, 0, 0, 1, 1, 1, 1]
    found = with_horizon(turns, cut, horizon=2, gamma=0.5).value
    later = 0.25  # γ²
    # G from turn 2: 8 (4 + 0.5 · 8) and 2; from turn 3: 8 of the first one only.
    expected = [1 + later * 2 / 2, 1, nan, 1, 1 + later * 8 / 2, 1, 1, 1 + later * (8 + 2) / 2, 1, 1, 1]
    close(found, expected)
    assert np.isnan(turns.value).sum() == 1  # the given one is left as it was
    close(with_horizon(turns, [0] * 11, 2).value, turns.value)
    close(with_horizon(turns, [1] * 11, 9).value, turns.value)  # nobody came so far
    empty = TurnBatch.from_lists([], [], [], [])
    assert len(with_horizon(empty, [], 2)) == 0


def test_roots_with_rollouts_of_their_own():
    """Left as they are, or pooled with the siblings; a failed one takes the siblings'."""
    episodes = [("a", 0, [1]), ("a", 1, [0]), ("a", 2, [0.5]), ("b", 0, [1])]
    turns = batch(episodes, [[0.2], [0.2], [nan], [0.4]])
    close(roots(with_sibling_roots(turns)), [0.2, 0.2, 0.5, 0.4])
    pooled = roots(with_sibling_roots(turns, rollouts=3))
    close(pooled, [(0.5 + 0.6) / 5, (1.5 + 0.6) / 5, 0.5, 0.4])
    close(pooled[0], sibling_root([1, 0, 0.5], [0.2] * 3)[0])
    close(roots(with_sibling_roots(turns, rollouts=0)), [0.25, 0.75, 0.5, 1])


@quick
@given(data=st.data(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_what_has_nothing_to_compare_with_gets_nothing(data, gamma, lam):
    """Alone in its group: 0 for all turns up to the first known value, the others as ever."""
    n = data.draw(st.integers(1, 6))
    known = data.draw(st.integers(1, n))  # the first turn with a value; n: none
    r, V = (np.array(data.draw(st.lists(st.floats(-2, 2), min_size=n, max_size=n))) for _ in range(2))
    V[:known] = nan
    A = vm.advantages(
        "vineppo", with_sibling_roots(batch([("a", 0, r)], [V]), gamma, lam), gamma=gamma, lam=lam
    )
    assert np.abs(A[:known]).max() < 1e-12
    if known < n:
        close(A[known:], vm.vine_advantages(r[known:], V[known:], gamma, lam))


@quick
@given(data=st.data(), groups=st.integers(1, 3))
def test_without_rollouts_it_is_rloo(data, groups):
    """K = 0: every trajectory is one segment whose start the siblings value. Groups of one get 0."""
    number = st.sampled_from([0.0, 1.0, -0.1, 0.3])
    episodes = [
        (g, m, data.draw(st.lists(number, min_size=1, max_size=4)))
        for g in range(groups)
        for m in range(data.draw(st.integers(1, 5)))
    ]
    turns = batch(episodes)
    filled = with_sibling_roots(turns)
    close(vm.advantages("vineppo", filled), vm.advantages("rloo", turns))
    order = data.draw(st.permutations(range(len(turns))))
    columns = (turns.group, turns.trajectory, turns.index, turns.reward)
    shuffled = with_sibling_roots(TurnBatch.from_lists(*(list(column[order]) for column in columns)))
    close(shuffled.value, filled.value[order])


@quick
@given(data=st.data(), n=st.integers(2, 5), T=st.integers(1, 5))
def test_the_advantages_of_a_trajectory_telescope(data, n, T):
    """Σ_t A_t = R − V(s_0), with roots from siblings and all other values from rollouts."""
    numbers = st.lists(st.floats(-2, 2), min_size=T, max_size=T)
    rewards = np.array([data.draw(numbers) for _ in range(n)])
    values = np.array([[nan, *data.draw(numbers)[1:]] for _ in range(n)])
    turns = with_sibling_roots(batch([("a", m, rewards[m]) for m in range(n)], values))
    A, R = vm.advantages("vineppo", turns).reshape(n, T), rewards.sum(1)
    np.testing.assert_allclose(A.sum(1), R - (R.sum() - R) / (n - 1), atol=1e-9)


# --- A chain whose gradient is known: position k is right with probability sigmoid(θ_k) ---

P = 1 / (1 + np.exp(-np.array([0.3, -0.2, 0.5, 0.1])))
V = np.cumprod(P[::-1])[::-1]  # V(k) = p_k … p_n
TRUE = V[0] * (1 - P)  # ∂V(0) / ∂θ_k


def episodes():
    """(probability, rewards) of the five trajectories of chain_sum, played in the environment."""
    env = vm.make("chain_sum", length=4)
    for wrong in range(5):  # 4: none
        env.reset(seed=1)
        rewards, over = [], False
        while not over:
            right = len(rewards) != wrong
            _, reward, over, _, _ = env.step(env.expert() if right else "1000")
            rewards.append(reward)
        yield np.prod(P[:wrong]) * (1 - P[wrong] if wrong < 4 else 1), rewards


def expected_gradient(**keywords):
    """E[Σ_t A_t ∇ log π(a_t|s_t)] at K = 1, over all episodes and all outcomes of the rollouts."""
    gradient = np.zeros(4)
    for p, rewards in episodes():
        n = len(rewards)
        right = np.arange(n) < (n if rewards[-1] else n - 1)
        for outcome in itertools.product((0.0, 1.0), repeat=n):
            weight = p * np.prod(np.where(outcome, V[:n], 1 - V[:n]))
            gradient[:n] += weight * vm.vine_advantages(rewards, outcome, **keywords) * (right - P[:n])
    return gradient


def test_the_chain_is_the_environment():
    env = vm.make("chain_sum", length=4)
    env.reset(seed=1)

    def policy(k):
        return {str(sum(env.numbers[: k + 1])): P[k], "1000": 1 - P[k]}

    env_values = exact_values(_WithWrong(env), policy)
    close([env_values.V[k, 4 - k] for k in range(4)], V)
    np.testing.assert_allclose(TRUE, [0.03596, 0.04646, 0.03190, 0.04014], atol=5e-6)


class _WithWrong:
    """The environment with one more action, a total that is never right."""

    def __init__(self, env):
        self.env, self.actions, self.max_turns = env, [*env.actions, "1000"], env.max_turns
        self.start_state, self.transitions = env.start_state, env.transitions


@pytest.mark.parametrize("keywords", [{}, {"lam": 0.5}, {"lam": 1.0}, {"cap": 1}, {"cap": 0}])
def test_one_rollout_a_state_is_unbiased(keywords):
    close(expected_gradient(**keywords), TRUE)


def test_the_tail_that_is_zero_is_biased():
    close(expected_gradient(cap=1, tail="zero"), [*TRUE[:2], 0, 0])


@pytest.mark.parametrize("root", ["rollouts", "siblings", "both"])
@pytest.mark.parametrize("K", [1, 9])
def test_sampled_rollouts_are_unbiased(K, root):
    """8,000 groups of four, every state with K rollouts of its own: the mean gradient is the true one."""
    rng, groups, n = np.random.default_rng(K), 8_000, 4
    right = rng.random((groups * n, 4)) < P
    alive = np.cumprod(np.column_stack([np.ones(groups * n), right]), axis=1)[:, :4].astype(bool)
    who, index = np.nonzero(alive)
    reward = (right[who, index] & (index == 3)).astype(float)
    value = rng.binomial(K, V[index]) / K
    if root == "siblings":
        value[index == 0] = nan
    turns = TurnBatch.from_lists(who // n, who % n, index, reward, value=value)
    A = vm.advantages("vineppo", with_sibling_roots(turns, rollouts=K if root == "both" else None))
    score = A * (right[who, index] - P[index])
    for k in range(4):
        per_group = np.bincount(who[index == k] // n, weights=score[index == k], minlength=groups) / n
        error = per_group.std() / groups**0.5
        assert abs(per_group.mean() - TRUE[k]) < 4 * error and error < 0.06 * TRUE[k]
