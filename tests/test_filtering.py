"""StarPO-S's settings: which groups stay, and what their advantages are multiplied by."""

import math

import pytest

from verl_multiturn.filtering import GroupFilter, Member, group_filter


def groups(*returns, penalties=None):
    return [
        [Member(r, r - (penalties or {}).get((g, i), 0.0)) for i, r in enumerate(group)]
        for g, group in enumerate(returns)
    ]


# Vector 1 of starpo.json: task returns, and the penalties that RAGEN adds to the last group.
FOUR = groups(
    [0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 1], [0, 0, 0, 0], penalties={(3, 0): 0.1, (3, 1): 0.2, (3, 3): 0.1}
)


def test_without_a_strategy_everything_stays():
    assert GroupFilter().kept(FOUR) == [0, 1, 2, 3] and not GroupFilter().shrinks


def test_penalties_are_off_the_score():
    """A group that only failed has penalties that differ: no signal of the task (spec 6.2)."""
    rule = {"strategy": "top_k_abs", "value": 9}
    assert GroupFilter(**rule).kept(FOUR) == [2, 1]
    assert GroupFilter(**rule, returns="trained").kept(FOUR) == [2, 1, 3]


def test_the_papers_rules():
    assert GroupFilter(strategy="top_k", value=0.25, include_zero=True).kept(FOUR) == [2]
    assert GroupFilter(strategy="top_p", value=0.9).kept(FOUR) == [2, 1]
    assert GroupFilter(strategy="top_p", value=0.9).kept(groups([0, 0], [1, 1])) == []


def test_scores_of_the_tokens():
    """Entropy: mean over the members of their surprise; its variance: their std; length: tokens."""
    two = [[Member(0, 0, 1.0, 10), Member(1, 1, 3.0, 10)], [Member(0, 0, 2.5, 5), Member(0, 0, 2.5, 7)]]
    take = {"strategy": "top_k_abs", "value": 1}
    assert GroupFilter(**take, score="entropy").kept(two) == [1]
    assert GroupFilter(**take, score="entropy_variance").kept(two) == [0]
    assert GroupFilter(**take, score="length").kept(two) == [0]
    assert GroupFilter(**take, score="length", largest=False).kept(two) == [1]
    assert [GroupFilter(strategy="top_p", score=s).reads_tokens for s in ("entropy", "length")] == [
        True,
        False,
    ]


def test_soft_weights():
    """Vector 10: std .5, 0 and 1 over the largest; 3 of 8 kept: .375 or its root."""
    three = groups([0, math.sqrt(0.5)], [2, 2], [0, math.sqrt(2)])
    assert GroupFilter(reweight=True).weights(three, 1.0) == pytest.approx([0.4999995, 0.0, 0.999999])
    assert GroupFilter(strategy="top_p", scale="linear").weights(three, 3 / 8) == [0.375] * 3
    assert GroupFilter(strategy="top_p", scale="sqrt").weights(three, 3 / 8) == pytest.approx(
        [0.61237244] * 3
    )
    assert GroupFilter().weights(three, 1.0) == [1.0] * 3


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"strategie": "top_p"}, "Did you mean 'strategy'"),
        ({"strategy": "topp"}, "Did you mean 'top_p'"),
        ({"strategy": "top_p", "score": "stdev"}, "Did you mean 'std'"),
        ({"place": "shrunk"}, "Did you mean 'shrink'"),
        ({"strategy": "top_p", "value": 0}, "above 0"),
        ({"strategy": "top_k", "value": 2}, "top_k_abs"),
        ({"strategy": "top_p", "largest": False, "include_zero": True}, "zeros come first"),
        ({"strategy": "top_p", "place": "refill", "score": "mean"}, "score=std, largest=true"),
        ({"strategy": "top_k", "place": "refill", "value": 0.5}, "whatever strategy and value say: it needs"),
        ({"strategy": "top_p", "value": 1, "place": "refill", "mass": "softmax"}, "whatever mass say"),
        ({"strategy": "top_p", "value": 1, "place": "refill", "eps": 0.1}, "whatever eps say"),
        ({"strategy": "top_p", "value": 1, "place": "refill", "scale": "sqrt"}, "scale=none"),
        ({"strategy": "top_p", "value": 1, "place": "refill", "stop_after": 3}, "stop_after=null"),
        ({"reweight": True, "score": "variance"}, "reads no score=variance: use score=std"),
    ],
)
def test_impossible_settings(block, words):
    with pytest.raises(ValueError, match=words):
        group_filter(block)


def test_what_refill_and_reweighting_take():
    assert not group_filter({"strategy": "top_p", "value": 1.0, "place": "refill"}).shrinks
    assert group_filter({"reweight": True, "returns": "trained"}).score == "std"


@pytest.mark.parametrize(
    ("rule", "returns", "words"),
    [
        (GroupFilter(strategy="top_p"), [[0.0, math.nan]], "must be finite"),
        (GroupFilter(strategy="top_p", score="mean"), [[-1.0, 0.0], [1.0, 1.0]], "mass='softmax'"),
    ],
)
def test_returns_that_a_rule_cannot_rank(rule, returns, words):
    with pytest.raises(ValueError, match=words):
        rule.kept(groups(*returns))


def test_a_group_of_one_has_nothing_to_disagree_about():
    assert GroupFilter(strategy="top_p").kept(groups([1.0], [0.0, 1.0])) == [1]
