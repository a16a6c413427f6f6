"""The audit of values against a scripted server: which states, from where, in what units, how it all ends."""

import asyncio
import copy
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import verl_multiturn as vm
from verl_multiturn import configure, doctor_dead, doctor_recipe
from verl_multiturn.audit_metrics import Audited, of_audit
from verl_multiturn.compose import compose
from verl_multiturn.exact import exact_values
from verl_multiturn.rollout.audit import AuditedEpisode, AuditedVineEpisode
from verl_multiturn.rollout.audit_config import Audit
from verl_multiturn.rollout.episode import Episode
from verl_multiturn.rollout.vine import VineEpisode

ODD = Path(__file__).parent / "odd_environments.py"
both = pytest.mark.parametrize("row", ["turn", "trajectory"])


def always(word):
    return lambda call, text: word


def audited(trajectory):
    """By turn, the returns that followed."""
    return {int(t): returns for t, returns in trajectory.info["audit"]["returns"].items()}


# ------------------------------------------------------------------ which states, from where


@both
def test_continuations_begin_with_the_very_prefix(world, row):
    """Three of six states, five continuations of each: their first prompt is what the trajectory read."""
    here = world(lambda call, text: "1" if call.primary else "2", row=row, audit=Audit(rollouts=5), audited=3)
    (trajectory,) = here.play(kind=AuditedEpisode)
    found = audited(trajectory)
    assert len(found) == 3 and all(found[t] == [2 * (6 - t)] * 5 for t in found)
    assert len(here.rolled()) == 5 * sum(6 - t for t in found)
    at = {call.turn: call.prompt for call in here.calls if call.primary}
    asked = Counter(tuple(call.prompt) for call in here.rolled())
    assert [asked[tuple(at[t])] for t in range(6)] == [5 if t in found else 0 for t in range(6)]
    assert {call.request for call in here.calls} == {"r0"}
    counts = trajectory.info["audit"]
    assert (counts["rollouts"], counts["failed"], counts["error"]) == (15, 0, None)
    said = len(here.tokens.encode("<answer>2</answer>", add_special_tokens=False)) + 1
    assert counts["tokens"] == said * len(here.rolled())
    assert np.isnan([turn.value for turn in trajectory.turns]).all()


def test_a_groups_states_are_audited_once(world):
    """Three equal trajectories of six states each want two."""
    here = world(always("1"), audit=Audit(rollouts=2), audited=2)
    found = [t for trajectory in here.play(3, AuditedEpisode) for t in audited(trajectory)]
    assert sorted(found) == [0, 1, 2, 3, 4, 5] and len(here.rolled()) == 2 * 21
    more = world(always("1"), audit=Audit(rollouts=2), audited=9)
    found = [sorted(audited(trajectory)) for trajectory in more.play(2, AuditedEpisode)]
    assert sorted(found, key=len) == [[], [0, 1, 2, 3, 4, 5]]


def test_states_are_drawn_evenly(world):
    drawn = Counter()
    for step in range(30):
        here = world(always("1"), audit=Audit(rollouts=2), audited=2, max_turns=3)
        here.step = step
        drawn.update(list(audited(here.play(kind=AuditedEpisode)[0])))
    assert sum(drawn.values()) == 60 and all(12 <= drawn[t] <= 28 for t in range(3))  # 20 ± 3 σ


def test_only_states_with_a_value_are_audited(world):
    """VinePPO gives the second and the fourth state none of their own."""
    vine = {"rollouts": 2, "every": 2, "group": 1, "root": "rollouts"}
    here = world(always("1"), audit=Audit(rollouts=4), audited=9, **vine)
    (trajectory,) = here.play(kind=AuditedVineEpisode)
    assert sorted(audited(trajectory)) == [0, 2, 4]
    assert len(here.rolled()) == (2 + 4) * (6 + 4 + 2)
    here = world(always("1"), audit=Audit(rollouts=4), audited=9, rollouts=0, root="siblings")
    assert [sorted(audited(one)) for one in here.play(2, AuditedVineEpisode)] in ([[0], []], [[], [0]])


@both
@pytest.mark.parametrize("kinds", [(Episode, AuditedEpisode), (VineEpisode, AuditedVineEpisode)])
def test_training_is_as_without_an_audit(world, row, kinds):
    """Noise, sampling, values: nothing of a trajectory changes, and no seed is used twice."""

    def say(call, text):
        return random.Random(call.seed).choice(["up", "down", "left", "right"])

    given = {"env": "frozen_lake", "row": row, "env_kwargs": {"slip": 0.5, "hole_prob": 0.1}}
    worlds = [world(say, **given, audit=Audit(rollouts=3), audited=2) for _ in kinds]
    found = [one.play(3, kind) for one, kind in zip(worlds, kinds, strict=True)]
    for plain, other in zip(*found, strict=True):
        assert [turn.reward for turn in plain.turns] == [turn.reward for turn in other.turns]
        np.testing.assert_equal([turn.value for turn in plain.turns], [turn.value for turn in other.turns])
        for name in ("observation", "prompt", "actions"):
            assert [one[name] for one in plain.info["details"]] == [
                one[name] for one in other.info["details"]
            ]
        assert "audit" in other.info and "audit" not in plain.info
    seeds = [call.seed for call in worlds[1].calls]
    assert len(set(seeds)) == len(seeds) > len(worlds[0].calls)
    assert {call.seed for call in worlds[0].calls} <= set(seeds)


# ------------------------------------------------------------------ what a value should have said


def total(text):
    """(numbers summed, the next total) from what chain_sum shows."""
    lines = text[text.rindex("Numbers:") :].splitlines()
    k = int(lines[1].split(":")[0].split()[-1])
    return k, sum(int(word) for word in lines[0].split()[1 : k + 2])


def test_means_are_within_their_error_of_the_exact_values(world):
    """A table policy on chain_sum, right at position k with P[k]; 300 continuations of each state."""
    P, K = [0.9, 0.8, 0.85, 0.7], 300

    def say(call, text):
        k, right = total(text)
        return str(right if call.primary or random.Random(call.seed).random() < P[k] else right + 1)

    audit = Audit(rollouts=K, max_inflight=64)
    here = world(say, "chain_sum", env_kwargs={"length": 4}, audit=audit, audited=4)
    (trajectory,) = here.play(kind=AuditedEpisode)
    env = vm.make("chain_sum", length=4)
    env.reset(3)

    def policy(k):
        right = sum(env.numbers[: k + 1])
        return {str(right): P[k], str(right + 1): 1 - P[k]}

    exact = [exact_values(env, policy).V[k, 4 - k] for k in range(4)]
    found = audited(trajectory)
    error = np.array([(v * (1 - v) / K) ** 0.5 for v in exact])
    assert np.all(np.abs([np.mean(found[k]) - exact[k] for k in range(4)]) < 3 * error)
    assert here.pool.made <= 1 + 64
    states = [Audited("g", exact[k], found[k]) for k in range(4)]
    numbers = of_audit(states, [{"audit": trajectory.info["audit"]}])
    assert numbers["multiturn/audit/ranking/mean"] == 1 and numbers["multiturn/audit/error/mean"] < 0.05
    assert numbers["multiturn/audit/standard_error/mean"] == pytest.approx(error.mean(), rel=0.1)


@pytest.mark.parametrize(
    ("meaning", "worth"),
    [
        ({}, lambda t: 6 - t),
        ({"gamma": 0.5}, lambda t: sum(0.5**j for j in range(6 - t))),
        ({"penalty": 0.25}, lambda t: -0.25 * (6 - t)),
        ({"scale": 2.0}, lambda t: 2 * (6 - t)),
        ({"whole": True}, lambda t: 6),
        ({"whole": True, "gamma": 0.5}, lambda t: 0.5 ** (5 - t) * 6),
        ({"whole": True, "penalty": 0.25}, lambda t: -0.25 * 6),
    ],
)
def test_worth_is_in_the_units_of_the_value(world, meaning, worth):
    """Each turn pays 1; where that has a cost, it is said in another form, is not heard, and pays nothing."""
    form = {"wrap": "1"} if "penalty" in meaning else {}
    here = world(always("1"), audit=Audit(rollouts=2, **meaning), audited=6, **form)
    (trajectory,) = here.play(kind=AuditedEpisode)
    assert {t: np.mean(returns) for t, returns in audited(trajectory).items()} == pytest.approx(
        {t: worth(t) for t in range(6)}
    )


def test_the_share_of_a_prompt():
    """64 states of 16 prompts are 4 each; of 48, 1 and sometimes 2; whoever plays them changes."""
    audit = Audit(prompts=16, group=8)
    shares = np.array([[audit.share(seed, m) for m in range(8)] for seed in range(200)])
    assert (shares.sum(axis=1) == 4).all() and shares.max() == 1
    assert np.all(np.abs(shares.sum(axis=0) - 100) < 3.5 * 50**0.5)
    some = np.array([[Audit(prompts=48, group=8).share(s, m) for m in range(8)] for s in range(600)])
    assert set(some.sum(axis=1)) == {1, 2} and abs(some.sum() - 800) < 3.5 * (600 * 2 / 9) ** 0.5
    many = [Audit(prompts=2, group=8).share(5, m) for m in range(8)]
    assert many == [4] * 8


@pytest.mark.parametrize(("every", "due"), [(None, []), (1, [1, 2, 3, 4, 5, 6]), (3, [1, 3, 6])])
def test_when_it_is_due(every, due):
    assert [step for step in range(1, 7) if Audit(every).due(step)] == due


# ------------------------------------------------------------------ what goes wrong


def test_a_continuation_that_fails_is_left_out(world):
    failed = []

    def say(call, text):
        if call.primary or failed:
            return "1"
        failed.append(call)
        return "raise"

    here = world(say, f"{ODD}:Odd", audit=Audit(rollouts=3), audited=1, max_turns=2)
    (trajectory,) = here.play(kind=AuditedEpisode)
    counts = trajectory.info["audit"]
    assert (counts["rollouts"], counts["failed"]) == (3, 1) and "step('raise')" in counts["error"]
    assert [len(returns) for returns in audited(trajectory).values()] == [2]


def test_a_cancelled_trajectory_ends_its_audit(world):
    here = world(always("1"), audit=Audit(rollouts=3), audited=2, max_turns=2)
    here.after = lambda call: asyncio.sleep(0) if call.primary else asyncio.Event().wait()

    async def go():
        playing = asyncio.create_task(here.episode(0, AuditedEpisode).play())
        while len(here.rolled()) < 6:
            await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert here.audits.groups == {} and len(asyncio.all_tasks()) == 1

    asyncio.run(go())
    assert here.pool.given_up == here.pool.made == 6 and here.pool.idle == 0


# ------------------------------------------------------------------ as verl calls it


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """`composed(*overrides)`: a CPU recipe on `Steady` that is audited at every other step, prepared."""
    run = tmp_path_factory.mktemp("run")
    audit = ["multiturn.audit.every=2", "multiturn.audit.states=32", "multiturn.audit.rollouts=2"]
    more = ["hardware=cpu", f"multiturn.run={run}", f"multiturn.env={ODD}:Steady", "data.train_batch_size=16"]
    whole = compose("vineppo_frozenlake", [*more, *audit])

    def change(*overrides):
        config = copy.deepcopy(whole)
        config.merge_with_dotlist(list(overrides))
        return configure.prepare(config)

    return change


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"gamma": 1.0, "whole": False, "group": 8, "every": 2}),
        (["multiturn.vineppo.gamma=0.9", "multiturn.format_penalty=0.5"], {"gamma": 0.9, "penalty": 0.5}),
        (["multiturn.algorithm=turn_gae", "multiturn.turn_gae.gamma=0.8"], {"gamma": 0.8, "whole": False}),
        (["multiturn.algorithm=bilevel_gae"], {"gamma": 0.95, "whole": False}),
        (["multiturn.algorithm=bilevel_gae", "multiturn.turn_rewards=false"], {"gamma": 0.95, "whole": True}),
        (["multiturn.algorithm=ppo", "multiturn.row=trajectory"], {"gamma": 1.0, "whole": True}),
        (["multiturn.algorithm=archer", "multiturn.critic.reward_scale=3"], {"scale": 3.0, "whole": False}),
    ],
)
def test_what_a_value_is(composed, overrides, expected):
    audit = Audit.of(composed(*overrides))
    assert {name: getattr(audit, name) for name in expected} == expected


PPO = ["multiturn.algorithm=ppo", "multiturn.row=trajectory"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["multiturn.algorithm=gigpo"], "every=2 compares values with returns, and .*gigpo has no values"),
        (["multiturn.algorithm=grpo"], "grpo has no values: leave it out, or use vineppo"),
        ([*PPO, "algorithm.gamma=0.9"], "gamma=0.9 discounts from token to token"),
        (["multiturn.algorithm=bilevel_gae", "multiturn.bilevel_gae.gamma=0.9"], "from token to token"),
        ([*PPO, "multiturn.normalize.by=group"], "normalize.by=group has the critic learn relative returns"),
        ([*PPO, "algorithm.use_kl_in_reward=true"], "use_kl_in_reward has the critic learn returns less"),
        (["multiturn.algorithm=turn_gae", "trainer.v1.trainer_mode=colocate_async"], "policy of a state's"),
        (["multiturn.audit.rollouts=1"], "audit.rollouts=1 must be a whole number of at least 2"),
        (["multiturn.audit.every=0"], "audit.every=0 must be a whole number of at least 1 or null"),
    ],
)
def test_refused(composed, overrides, words):
    with pytest.raises(ValueError, match=words):
        composed(*overrides)


def test_snapshots_are_needed(composed, beside):
    ours = f"multiturn.env={ODD.parent / 'vine_environments.py'}:NoSnapshots"
    words = r'NoSnapshots declares snapshots = "none", and multiturn\.audit plays on from snapshots: leave'
    with pytest.raises(ValueError, match=words):
        composed(ours, "multiturn.algorithm=turn_gae")
    assert composed(ours, "multiturn.algorithm=turn_gae", "multiturn.audit.every=null")


def test_what_the_doctor_says(composed):
    base = doctor_recipe.base()
    said = " ".join(line.text for line in doctor_dead.lines(composed("multiturn.audit.every=null"), base))
    assert "multiturn.audit.states, multiturn.audit.rollouts: multiturn.audit.every is null" in said
    assert not any("multiturn.audit" in line.text for line in doctor_dead.lines(composed(), base))


@pytest.fixture
def loop(composed, sessions, server):
    """`loop(split, step, *overrides)` runs the sessions of a prompt as a worker of verl's does."""

    def run(split, step, *overrides):
        fake = server(["<answer>1</answer>"])
        outputs = sessions(composed(*overrides), fake, split, step, 8, "audits")
        wholes = [rows[0].extra_fields["trajectory"] for rows in outputs]
        return SimpleNamespace(audits=[one["audit"] for one in wholes if "audit" in one], calls=fake.calls)

    return run


@pytest.mark.parametrize("algorithm", ["vineppo", "turn_gae"])
def test_at_the_steps_that_are_due_and_never_in_validation(loop, algorithm):
    """16 prompts share 32 states: two of this one's. They have ended when the rows are handed over."""
    chosen = (f"multiturn.algorithm={algorithm}", "multiturn.vine.rollouts=1")
    own = 0 if algorithm == "turn_gae" else 15
    for step in (1, 2):
        played = loop("train", step, *chosen)
        turns = [t for one in played.audits for t in one["returns"]]
        assert len(played.audits) == 2 and len(set(turns)) == 2
        assert len(played.calls) == 8 * 6 + own + sum(2 * (6 - int(t)) for t in turns)
    for split, step in (("train", 3), ("val", 2)):
        played = loop(split, step, *chosen)
        assert played.audits == [] and len(played.calls) == 8 * 6 + (own if split == "train" else 0)
