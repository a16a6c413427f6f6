"""GiGPO against the reference numbers in data/gigpo_vectors.json and against hand-made ones.

Vectors 01-03, 04, 05, 11 and 20 concern returns.py and are met in test_returns.py; 17 and 19
(filtering groups, spreading over tokens) are not this file's business.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from verl_multiturn import advantages
from verl_multiturn.algorithms.gigpo import GiGPOConfig, scores, step_groups
from verl_multiturn.algorithms.metrics import diagnostics
from verl_multiturn.algorithms.similarity import alike, leaders
from verl_multiturn.returns import relative, returns_to_go
from verl_multiturn.turns import TurnBatch

VECTORS = json.loads((Path(__file__).parent / "data" / "gigpo_vectors.json").read_text())


def vector(name):
    return VECTORS[name]["out"]


def batch(r, traj, anchor=None, group=None, **more):
    seen = {}
    index = [seen[x] for x in traj if seen.update({x: seen.get(x, -1) + 1}) is None]
    return TurnBatch.from_lists(
        group=group or ["g"] * len(r), trajectory=traj, index=index, reward=r, anchor=anchor, **more
    )


@pytest.fixture
def seven():
    """Vector 07: a and c succeed, b fails; S is seen four times, I1 twice."""
    given = VECTORS["07_returns"]["in"]
    return batch(given["r"], given["traj"], given["obs"])


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-8)


def test_literal_numbers():
    turns = batch([0, 1, 0, 0, 0], list("aabbb"), ["s0", "s1", "s0", "s2", "s1"])
    close(advantages("gigpo", turns, gamma=0.9, by_std=False), [0.95, 1, -0.95, -0.5, -1])


def same_partition(codes, expected):
    pairs = set(zip(codes, expected, strict=True))
    return len(pairs) == len(set(codes)) == len(set(expected))


@pytest.mark.parametrize("name", ["06_anchor_ids", "06b_anchor_ids_two_tasks"])
def test_anchor_groups(name):
    given = VECTORS[name]["in"]
    n = len(given["obs"])
    turns = TurnBatch.from_lists(given["uid"], list(range(n)), [0] * n, [0] * n, given["obs"])
    assert same_partition(turns.anchor_code.tolist(), vector(name))


def test_step_term(seven):
    close(returns_to_go(seven, 0.95), vector("07_returns"))
    G, code = returns_to_go(seven, 0.95), step_groups(seven)
    close(relative(G, code), vector("07b_step_mean"))
    close(relative(G, code, by_std=True), vector("08_step_std"))


def test_episode_term(seven):
    close(advantages("gigpo", seven, step_weight=0, by_std=False), vector("07c_episode_mean_traj"))
    close(advantages("gigpo", seven, step_weight=0), vector("08b_episode_std_traj"))


def test_sum_of_both_terms(seven):
    close(advantages("gigpo", seven, by_std=False), vector("07d_joint_mean_omega1"))
    for omega, expected in zip([0, 0.5, 1], vector("08c_joint_std_omega_0_half_1"), strict=True):
        close(advantages("gigpo", seven, step_weight=omega), expected)


def test_row_voting(seven):
    A = advantages("gigpo", seven, by_std=False, episode_unit="row")
    close(A, vector("09_joint_mean_unit_row"))


@pytest.mark.parametrize("by_std", [False, True])
def test_singletons(by_std):
    turns = batch([0, 0, 10], list("aaa"))
    zero, raw = vector("10b_single_rollout_group")
    close(advantages("gigpo", turns, by_std=by_std), zero)
    close(advantages("gigpo", turns, by_std=by_std, singleton="raw"), raw)
    # verl-agent counts rows: three rows of one trajectory are a constant group, one row is alone
    close(advantages("gigpo", turns, by_std=by_std, compat="verl_agent"), zero)
    one = batch([10.0], ["a"])
    close(advantages("gigpo", one, by_std=by_std, compat="verl_agent"), [10])
    close(advantages("gigpo", one, by_std=by_std), [0])


def test_constant_groups_are_exactly_zero():
    n = 23
    r = [0, 0, 0, 10] * n
    turns = batch(r, np.repeat(np.arange(n), 4).tolist(), ["s", "t", "u", "v"] * n)
    assert not advantages("gigpo", turns).any()
    assert not advantages("gigpo", turns, compat="verl_agent").any()


def test_distinct_states_degrade_to_grpo():
    given = VECTORS["12_all_states_distinct_degrades_to_grpo"]["in"]
    turns = batch(given["r"], given["traj"], given["obs"])
    close(advantages("gigpo", turns), vector("12_all_states_distinct_degrades_to_grpo"))
    assert (advantages("gigpo", turns) == advantages("grpo", turns)).all()
    without = batch(given["r"], given["traj"])
    assert (advantages("gigpo", without) == advantages("grpo", without)).all()


def test_a_loop_in_one_trajectory_votes_each_time():
    given = VECTORS["13_loop_in_one_rollout"]["in"]
    turns = batch(given["r"], given["traj"], given["obs"])
    step, both = vector("13_loop_in_one_rollout")
    close(relative(returns_to_go(turns, 0.95), step_groups(turns)), step)
    close(advantages("gigpo", turns, by_std=False), both)


def test_penalty_for_an_invalid_turn():
    turns = batch([0, 0, 10], list("aaa"), valid=[True, False, True])
    late, inside = vector("14_penalty_after_vs_inside_returns")
    per_row, summed = vector("14b_penalty_episode_score")

    def both(**keywords):
        return scores(turns, GiGPOConfig(invalid_penalty=0.1, **keywords))

    R, G = both(episode_unit="row")
    close(G, late), close(R, per_row)
    R, G = both()
    close(G, late), close(R, [10, 10, 10])  # late and by trajectory: out of the return
    R, G = both(penalty="propagated")
    close(G, inside), close(R, summed)
    R, G = both(compat="verl_agent")
    close(G, late), close(R, per_row)


def test_a_copied_row_would_bias_the_baseline():
    with_copy, without = vector("18_duplicated_row_biases_baseline")
    close(relative(np.array([10.0, 0, 10]), np.zeros(3, int))[:2], with_copy)
    close(relative(np.array([10.0, 0]), np.zeros(2, int)), without)


def test_leader_clustering_in_a_given_order():
    given = VECTORS["15_leader_order_dependence"]["in"]
    for texts, expected in zip(given["orders"], vector("15_leader_order_dependence"), strict=True):
        leader = leaders(texts, given["thresh"])
        assert same_partition([leader[text] for text in texts], expected)


def test_similarity_does_not_depend_on_the_order_of_rows():
    """Deviation from verl-agent: texts are taken sorted, so every order gives the same groups."""
    texts = VECTORS["15_leader_order_dependence"]["in"]["orders"][2]
    for order in itertools.permutations(range(3)):
        shuffled = np.array([texts[i] for i in order], object)
        codes = alike(shuffled, np.zeros(3, int), 0.85)
        assert same_partition(codes.tolist(), [[0, 0, 1][i] for i in order])


def test_similarity_ignores_no_character():
    """Deviation from verl-agent: difflib's autojunk takes this ratio from 0.9975 to 0.1."""
    text = "abcdefghij" * 40
    pair = np.array([text, text[:40] + "z" + text[41:]], object)
    ratio = vector("16_autojunk_breaks_long_text")[1]
    assert len(set(alike(pair, np.zeros(2, int), ratio - 1e-4))) == 1
    assert len(set(alike(pair, np.zeros(2, int), ratio + 1e-4))) == 2


def test_similarity_stays_inside_a_group_and_leaves_none_alone():
    texts = np.array(["same text", "same text", None, None, "same text"], object)
    codes = alike(texts, np.array([0, 1, 0, 0, 0]), 0.9).tolist()
    assert same_partition(codes, [0, 1, 2, 3, 0])


def test_similarity_needs_text():
    turns = batch([0, 1], list("ab"), [1, 2])
    with pytest.raises(ValueError, match="anchor_text is missing"):
        advantages("gigpo", turns, similarity=0.9)
    texts = batch([0, 1], list("ab"), [1, 2], anchor_text=["room one, a", "room one, b"])
    close(advantages("gigpo", texts, similarity=0.9, by_std=False), [-1, 1])
    close(advantages("gigpo", texts, by_std=False), [-0.5, 0.5])


def test_similarity_without_rapidfuzz_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rapidfuzz.distance", None)
    with pytest.raises(ImportError, match=r"pip install verl-multiturn\[similarity\]"):
        advantages("gigpo", batch([0, 1], list("ab"), ["x", "y"]), similarity=0.9)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"compat": "verl_agent", "episode_unit": "trajectory"}, "means episode_unit='row'"),
        ({"compat": "verl_agent", "singleton": "zero"}, "means singleton='raw'"),
        ({"compat": "verl_agent", "penalty": "propagated"}, "means penalty='late'"),
        ({"compat": "verlagent"}, "Did you mean 'verl_agent'"),
        ({"episode_unit": "rows"}, "Did you mean 'row'"),
        ({"similarity": 1.0}, r"must lie in \(0, 1\)"),
        ({"similarity": 0}, r"must lie in \(0, 1\)"),
        ({"gamma": "0.95"}, "GiGPOConfig.gamma must be a number, not '0.95'"),
        ({"gamma": True}, "must be a number"),
        ({"gamma": 1.1}, r"must be in \[0, 1\]"),
        ({"gamma": float("nan")}, "must be a number"),
        ({"by_std": "false"}, "must be true or false"),
        ({"step_weight": -1}, "at least 0"),
        ({"omega": 1}, "unknown gigpo keyword 'omega'; valid: gamma"),
    ],
)
def test_bad_keywords(keywords, words):
    with pytest.raises(ValueError, match=words):
        advantages("gigpo", batch([0, 1], list("ab")), **keywords)


def test_defaults_are_the_contract():
    config = GiGPOConfig()
    assert (config.gamma, config.step_weight, config.by_std) == (0.95, 1.0, True)
    assert (config.episode_unit, config.singleton, config.penalty) == ("trajectory", "zero", "late")
    assert (config.similarity, config.compat, config.invalid_penalty) == (None, None, 0.0)


def test_compat_equals_its_parts(seven):
    parts = dict(episode_unit="row", singleton="raw", penalty="late")
    expected = advantages("gigpo", seven, **parts)
    assert (advantages("gigpo", seven, compat="verl_agent") == expected).all()
    assert (advantages("gigpo", seven, compat="verl_agent", **parts) == expected).all()


def test_diagnostics(seven):
    numbers = diagnostics(seven)
    # anchor groups: S ×4, I2, I1 ×2, P2; both returns at I1 are equal, so A^S is 0 there too
    assert numbers == {
        "anchor_group_size": 2.0,
        "anchor_singleton_share": 0.25,
        "step_advantage_zero_share": 0.5,
        "anchor_within_trajectory_share": 0.0,
        "constant_group_share": 0.0,
    }
    loop = diagnostics(batch([0, 0, 0], list("aab"), ["s", "s", "t"]))
    assert loop["anchor_within_trajectory_share"] == loop["constant_group_share"] == 1.0
    empty = TurnBatch.from_lists(group=[], trajectory=[], index=[], reward=[])
    assert set(diagnostics(empty).values()) == {0.0}
