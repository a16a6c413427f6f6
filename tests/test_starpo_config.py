"""What a run's settings of StarPO come to, and what is refused before anything starts."""

import pytest

from verl_multiturn.compose import compose
from verl_multiturn.configure import prepare

REFILL = "multiturn.filter={strategy: top_p, value: 1.0, place: refill, include_zero: false}"


def prepared(recipe, *overrides):
    return prepare(compose(recipe, ["hardware=cpu", *overrides]))


def test_one_switch_turns_starpo_into_starpo_s():
    plain, s, switched = (
        prepared(*given)
        for given in (["starpo_sokoban"], ["starpo_s_sokoban"], ["starpo_sokoban", "credit=starpo_s"])
    )
    assert switched.multiturn.filter == s.multiturn.filter and s.multiturn.filter.strategy == "top_k"
    assert plain.multiturn.filter.strategy is None
    actors = [one.actor_rollout_ref.actor for one in (plain, s, switched)]
    assert [a.use_kl_loss for a in actors] == [True, False, False]
    assert [(a.clip_ratio_low, a.clip_ratio_high) for a in actors] == [(0.2, 0.2), (0.2, 0.28), (0.2, 0.28)]
    assert all(one.critic.enable and one.algorithm.adv_estimator == "bilevel_gae" for one in (plain, s))


@pytest.mark.parametrize(("returns", "metric"), [("task", "return"), ("trained", "reward")])
def test_refill_is_verls_own(returns, metric):
    """Its metric is the task's return, or the row's score with penalties; preparing twice changes nothing."""
    config = prepared("starpo_s_sokoban", REFILL, f"multiturn.filter.returns={returns}")
    assert config.algorithm.filter_groups == {"enable": True, "metric": metric}
    assert prepare(config).algorithm.filter_groups.metric == metric


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["multiturn.filter.strateg=top_p"], "Did you mean 'strategy'"),
        (["multiturn.filter.strategy=top_q"], "Did you mean 'top_p'"),
        (["multiturn.filter.value=a"], r"multiturn\.filter\.value='a' must be a number"),
        (["multiturn.filter.reweight=true"], "reweight is instead of dropping"),
        (
            ["multiturn.filter.strategy=null", "multiturn.filter.scale=sqrt"],
            "needs multiturn.filter.strategy",
        ),
        (["multiturn.algorithm=grpo"], "turn_rewards=false has no effect on grpo"),
        (["multiturn.turn_rewards=true", "multiturn.normalize.by=group"], "turn_rewards=false"),
        (
            ["multiturn.turn_rewards=false", "multiturn.normalize.by=group", "actor_rollout_ref.rollout.n=1"],
            "rollout.n=1 leaves none, so that every return would be 0",
        ),
        (["multiturn.normalize.by=stat"], "unknown value of multiturn.normalize.by"),
        (["multiturn.bilevel_gae.gamma_turn=2"], r"gamma_turn=2 must be a number in \[0, 1\]"),
        (["multiturn.bilevel_gae.whiten=1"], "whiten=1 must be true or false"),
        (["multiturn.collapse.no_success={shar: 0.1}"], "Did you mean 'share'"),
        (["+multiturn.collapse.nosuccess={}"], "Did you mean 'no_success'"),
        (["multiturn.information.rule=first"], "unknown value of multiturn.information.rule"),
        (["multiturn.format_penalty=-1"], "of at least 0"),
        (["critic.enable=false"], "needs a critic"),
    ],
)
def test_refused_in_one_sentence(overrides, words):
    with pytest.raises(ValueError, match=words):
        prepared("starpo_s_sokoban", *overrides)


def test_a_turn_is_punished_once():
    with pytest.raises(ValueError, match="punish a turn twice"):
        prepared("gigpo_sokoban", "multiturn.format_penalty=0.1")
