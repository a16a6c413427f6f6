"""The registry, identities between algorithms, and verl-agent's estimator written out slowly."""

from dataclasses import dataclass

import numpy as np
import pytest

import verl_multiturn as vm
from verl_multiturn.algorithms import Config, find, register, registered
from verl_multiturn.algorithms.registry import _ALGORITHMS
from verl_multiturn.returns import returns_to_go
from verl_multiturn.turns import TurnBatch


def random_lists(seed, groups=4, members=5, turns=6, states=4):
    """Columns of a batch with repeated states, invalid turns and trajectories of all lengths."""
    rng = np.random.default_rng(seed)
    rows = [
        (g, m, t)
        for g in range(groups)
        for m in range(rng.integers(1, members + 1))
        for t in range(rng.integers(1, turns + 1))
    ]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    n = len(rows)
    group, trajectory, index = map(list, zip(*rows, strict=True))
    return dict(
        group=[f"uid{g}" for g in group],
        trajectory=trajectory,
        index=index,
        reward=rng.choice([0.0, 0.0, -0.1, 1.0, 10.0], n).tolist(),
        anchor=[f"state {s}" for s in rng.integers(0, states, n)],
        value=rng.normal(size=n).tolist(),
        valid=(rng.random(n) < 0.8).tolist(),
    )


def random_batch(seed, **sizes):
    return TurnBatch.from_lists(**random_lists(seed, **sizes))


def verl_agent(group, trajectory, index, reward, anchor, valid, value, gamma, omega, by_std, coef):
    """The estimator of verl-agent, row by row, in float64, a constant group being 0."""
    n = len(group)
    own = [[j for j in range(n) if (group[j], trajectory[j]) == (group[i], trajectory[i])]
           for i in range(n)]  # fmt: skip
    step = [sum(gamma ** (index[j] - index[i]) * reward[j] for j in own[i] if index[j] >= index[i])
            for i in range(n)]  # fmt: skip
    score = [sum(reward[j] for j in own[i]) for i in range(n)]
    for i in range(n):
        if not valid[i]:
            step[i] -= coef
            score[i] -= coef

    def normalise(x, key, single):
        out = []
        for i in range(n):
            members = [x[j] for j in range(n) if key[j] == key[i]]
            if len(members) == 1:
                out.append(x[i] if single == "raw" else 0.0)
            elif np.ptp(members) < 1e-12:
                out.append(0.0)
            else:
                scale = np.std(members, ddof=1) + 1e-6 if by_std else 1.0
                out.append((x[i] - np.mean(members)) / scale)
        return np.array(out)

    A_episode = normalise(score, group, "raw")
    return A_episode + omega * normalise(step, list(zip(group, anchor, strict=True)), "zero")


@pytest.mark.parametrize("by_std", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_compat_equals_verl_agent(seed, by_std):
    lists = random_lists(seed, members=1 + seed % 4)
    A = vm.advantages(
        "gigpo", TurnBatch.from_lists(**lists), gamma=0.9, step_weight=0.7, by_std=by_std,
        invalid_penalty=0.1, compat="verl_agent",
    )  # fmt: skip
    expected = verl_agent(**lists, gamma=0.9, omega=0.7, by_std=by_std, coef=0.1)
    np.testing.assert_allclose(A, expected, atol=1e-7)


@pytest.mark.parametrize("by_std", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_gigpo_without_step_term_is_grpo(seed, by_std):
    turns = random_batch(seed)
    A = vm.advantages("gigpo", turns, step_weight=0, by_std=by_std)
    assert (A == vm.advantages("grpo", turns, by_std=by_std)).all()


@pytest.mark.parametrize("seed", range(3))
def test_gigpo_with_distinct_anchors_is_grpo(seed):
    lists = random_lists(seed)
    lists["anchor"] = list(range(len(lists["group"])))
    turns = TurnBatch.from_lists(**lists)
    assert (vm.advantages("gigpo", turns) == vm.advantages("grpo", turns)).all()


@pytest.mark.parametrize("seed", range(3))
def test_rloo_is_scaled_mean_norm(seed):
    """RLOO = n/(n−1) · (R − mean), n the trajectories of the group."""
    turns = random_batch(seed)
    n = np.bincount(turns.group_code, weights=turns.index == 0)[turns.group_code]
    scale = np.where(n > 1, n / np.maximum(n - 1, 1), 0)
    A = scale * vm.advantages("grpo", turns, by_std=False)
    np.testing.assert_allclose(vm.advantages("rloo", turns), A, atol=1e-12)


def test_turn_gae_limits():
    turns = random_batch(0)
    A = vm.advantages("turn_gae", turns, gamma=0.9)
    np.testing.assert_allclose(A, returns_to_go(turns, 0.9) - turns.value)
    td = vm.advantages("turn_gae", turns, gamma=0.9, lam=0)
    last = turns.last
    np.testing.assert_allclose(td[last], (turns.reward - turns.value)[last])


def test_reinforce():
    turns = TurnBatch.from_lists(
        group=["g", "g", "h"], trajectory=[0, 0, 0], index=[0, 1, 0], reward=[1, 2, 1]
    )
    assert vm.advantages("reinforce", turns, baseline="none").tolist() == [3, 3, 1]
    # two trajectories, across groups, whatever their length
    assert vm.advantages("reinforce", turns).tolist() == [1, 1, -1]


def test_grpo_on_groups_of_one_and_constant_groups():
    turns = TurnBatch.from_lists(
        group=list("ghh"), trajectory=[0, 0, 1], index=[0, 0, 0], reward=[5, 0.1, 0.1]
    )
    assert vm.advantages("grpo", turns).tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", registered())
def test_float64_in_the_rows_own_order_and_empty(name):
    turns = random_batch(1)
    A = vm.advantages(name, turns)
    assert A.dtype == np.float64 and A.shape == (len(turns),) and np.isfinite(A).all()
    empty = TurnBatch.from_lists(group=[], trajectory=[], index=[], reward=[])
    assert vm.advantages(name, empty).shape == (0,)


def test_list_algorithms():
    lines = vm.list_algorithms()
    assert {"grpo", "rloo", "reinforce", "gigpo", "turn_gae"} <= set(lines)
    assert all(line and "\n" not in line for line in lines.values())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gigp", "valid: gigpo, grpo.*Did you mean 'gigpo'"),
        ("no_such_module.x:mine", "unknown algorithm 'no_such_module.x:mine'; valid: gigpo"),
        ("starpo", "bilevel_gae"),
        ("archer", "critic_advantage"),
    ],
)
def test_names_that_are_no_algorithm(name, words):
    with pytest.raises(ValueError, match=words):
        vm.advantages(name, random_batch(0))


@pytest.mark.parametrize("name", registered())
def test_unknown_keyword(name):
    with pytest.raises(ValueError, match=rf"unknown {name} keyword 'bystd'"):
        vm.advantages(name, random_batch(0), bystd=True)


def test_a_missing_value_is_named():
    lists = random_lists(0)
    del lists["value"]
    with pytest.raises(ValueError, match=r"^value is missing"):
        vm.advantages("turn_gae", TurnBatch.from_lists(**lists))


def test_something_else_than_a_batch():
    with pytest.raises(ValueError, match=r"needs a TurnBatch"):
        vm.advantages("grpo", [1, 2])


def test_a_config_comes_from_a_plain_mapping():
    config = find("gigpo").configure({"gamma": 1, "by_std": False, "similarity": None})
    assert config.gamma == 1 and config.by_std is False
    with pytest.raises(AttributeError):
        config.gamma = 0.5


@dataclass(frozen=True)
class ShiftConfig(Config):
    shift: float = 1.0
    times: int = 1


def shifted(turns, config):
    """The reward plus a shift."""
    return turns.reward + config.shift * config.times


def test_an_algorithm_of_ones_own():
    try:
        register("shifted", ShiftConfig)(shifted)
        turns = random_batch(0)
        assert (vm.advantages("shifted", turns, shift=2) == turns.reward + 2).all()
        assert vm.list_algorithms()["shifted"] == "The reward plus a shift."
        with pytest.raises(ValueError, match=r"times must be a whole number, not 1.5"):
            vm.advantages("shifted", turns, times=1.5)
        register("shifted", ShiftConfig)(lambda turns, config: turns.reward[:1])
        with pytest.raises(ValueError, match=r"shifted returned shape \(1,\)"):
            vm.advantages("shifted", turns)
        with pytest.raises(ValueError, match=r"already verl_multiturn.algorithms.gigpo's"):
            register("gigpo", ShiftConfig)(shifted)
    finally:
        _ALGORITHMS.pop("shifted", None)


def test_an_algorithm_by_module_name(tmp_path, monkeypatch):
    (tmp_path / "my_algorithms.py").write_text(
        "from verl_multiturn.algorithms import Config, register\n"
        "@register('mine', Config)\n"
        "def mine(turns, config):\n"
        "    'Mine.'\n"
        "    return turns.reward\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        turns = random_batch(0)
        assert (vm.advantages("my_algorithms:mine", turns) == turns.reward).all()
    finally:
        _ALGORITHMS.pop("mine", None)
