"""Rollouts of VinePPO against a scripted server: what is asked, shared, kept apart, and how it all ends."""

import asyncio
import copy
import gc
import random
import re
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import verl_multiturn as vm
from verl_multiturn import configure, doctor_budget, doctor_dead, doctor_recipe
from verl_multiturn.compose import compose
from verl_multiturn.exact import exact_values
from verl_multiturn.methods import keywords, list_trainable
from verl_multiturn.rollout import continuations as module
from verl_multiturn.rollout.episode import Episode
from verl_multiturn.rollout.parsing import ActionFormat
from verl_multiturn.rollout.pool import EnvironmentFailure
from verl_multiturn.rollout.prompts import Templates
from verl_multiturn.rollout.rows import to_outputs
from verl_multiturn.rollout.vine import VineEpisode
from verl_multiturn.rollout.vine_config import Vine
from verl_multiturn.vine_metrics import of_values, of_vine

HERE = Path(__file__).parent
ODD, OURS = HERE / "odd_environments.py", HERE / "vine_environments.py"
STEADY = f"{ODD}:Steady"
pytestmark = pytest.mark.usefixtures("beside")
both = pytest.mark.parametrize("row", ["turn", "trajectory"])


def always(word):
    return lambda call, text: word


def values(trajectory):
    return [turn.value for turn in trajectory.turns]


def rewards(trajectory):
    return [turn.reward for turn in trajectory.turns]


# ------------------------------------------------------------------ what is asked, and what is shared


@both
@pytest.mark.parametrize("n", [1, 3])
def test_equal_trajectories_share_all_rollouts(world, row, n):
    """Six turns: K rollouts of 5, 4, ... 1 turns in all, however many go this way."""
    here = world(always("1"), row=row, rollouts=4, group=3)
    found = here.play(n)
    primaries = [call for call in here.calls if call.primary]
    assert len(primaries) == 6 * n and len(here.rolled()) == 4 * (5 + 4 + 3 + 2 + 1)
    for trajectory in found:
        assert values(trajectory)[1:] == [5, 4, 3, 2, 1] and np.isnan(values(trajectory)[0])
        assert rewards(trajectory) == [1] * 6
    counts = [trajectory.info["vine"] for trajectory in found]
    assert [one["states"] for one in counts] == [5] * n
    assert all(one["returns"] == {str(6 - k): [k] * 4 for k in range(5, 0, -1)} for one in counts)
    total = Counter(
        {name: sum(one[name] for one in counts) for name in ("unique_states", "rollouts", "turns")}
    )
    assert total == {"unique_states": 5, "rollouts": 20, "turns": 60}
    said = len(here.tokens.encode("<answer>1</answer>", add_special_tokens=False)) + 1
    assert sum(one["tokens"] for one in counts) == 60 * said
    assert sum(one["truncated"] for one in counts) == 20


def test_other_states_have_their_own(world):
    here = world(lambda call, text: str(call.sample) if call.primary else "7", group=3)
    found = here.play(3)
    assert len(here.rolled()) == 3 * 3 * 15
    assert all(values(trajectory)[1:] == [35, 28, 21, 14, 7] for trajectory in found)
    assert [trajectory.info["vine"]["unique_states"] for trajectory in found] == [5, 5, 5]


@both
def test_one_place_for_a_trajectory_and_its_rollouts(world, row):
    """All of a state's rollouts go where one of the trajectories that came through it went."""
    here = world(lambda call, text: str(call.sample) if call.primary else "7", row=row, group=3)
    here.play(3)
    assert {call.request for call in here.rolled()} == {"r0", "r1", "r2"}
    places = defaultdict(set)
    for call in here.calls:
        places[tuple(call.prompt)].add(call.request)
    told = [ids for ids in places if any(c.primary and c.turn and c.prompt == list(ids) for c in here.calls)]
    assert len(told) == 15 and all(len(places[ids]) == 1 for ids in told)


@both
def test_rollouts_begin_with_the_very_prefix(world, row):
    """Each first request of a rollout repeats the ids that the trajectory reads in this turn."""
    here = world(lambda call, text: "1" if call.primary else "2", row=row, rollouts=5)
    here.play()
    at = {call.turn: call.prompt for call in here.calls if call.primary}
    asked = Counter(tuple(call.prompt) for call in here.rolled())
    assert [asked[tuple(at[t])] for t in range(6)] == [0, 5, 5, 5, 5, 5]
    if row == "trajectory":
        for call in here.rolled():
            assert any(call.prompt[: len(at[t])] == at[t] for t in range(1, 6))


def test_sampling_seeds_are_distinct_and_again_the_same(world):
    here, again = (world(always("1"), rollouts=4) for _ in range(2))
    for one in (here, again):
        one.play()
    seeds = [call.seed for call in here.calls]
    assert len(set(seeds)) == len(seeds) and set(seeds) == {call.seed for call in again.calls}


def test_an_unseeded_run_leaves_sampling_to_the_engine(world):
    here = world(always("1"))
    episode = here.episode(0)
    object.__setattr__(episode.task, "sampling_seed", None)
    asyncio.run(episode.play())
    assert {call.seed for call in here.calls} == {None} and len(here.calls) == 6 + 3 * 15


@pytest.mark.parametrize(("dedupe", "sets"), [("state", 5), ("history", 10), ("none", 10)])
def test_what_makes_states_equal(world, dedupe, sets):
    """Two ways to what the environment calls the same: only `history` tells them apart, and what they pay."""

    def say(call, text):
        return str(call.sample) if call.primary and call.turn == 0 else "count"

    here = world(say, f"{OURS}:Forgetful", dedupe=dedupe, rollouts=2)
    found = here.play(2)
    assert len(here.rolled()) == 2 * 15 * sets / 5
    if dedupe == "state":
        assert values(found[0])[1:] == values(found[1])[1:]
    else:
        assert [values(one)[1:] for one in found] == [[0] * 5, [5, 4, 3, 2, 1]]


def test_the_prompts_window_belongs_to_the_state(world):
    """A past turn that a later prompt shows tells states apart, though this prompt does not show it."""

    def say(call, text):
        return str(call.sample) if call.primary and call.turn == 0 else "count"

    hidden = Templates(first="{observation}", turn="{observation}", next="", history=1)
    here = world(say, f"{OURS}:Forgetful", templates=hidden, rollouts=2)
    found = here.play(2)
    # After the first turn they differ; from the second on both have said "count" last.
    assert len(here.rolled()) == 2 * (2 * 5 + 4 + 3 + 2 + 1)
    assert values(found[0])[1] == 0 and values(found[1])[1] == 5


def test_budgets_belong_to_the_state(world):
    """In one place for ever, but with other numbers of turns and actions left, of 4 and 5."""
    first, form = ("1", "1 || 1", "1 || 1 || 1"), ActionFormat("answer", False, max_actions=3)

    def say(call, text):
        return first[call.sample] if call.primary and call.turn == 0 else "1"

    here = world(say, f"{OURS}:Still", form=form, max_turns=4, max_actions=5, rollouts=1, group=3)
    found = here.play(3)
    assert [values(one)[1:] for one in found] == [[3, 2, 1], [3, 2, 1], [2, 1]]
    assert [one.info["vine"]["unique_states"] for one in found] == [3, 3, 2]


def test_the_environments_state_belongs_to_the_state(world):
    """Nothing that the policy reads tells two states apart, but their key does."""

    def say(call, text):
        return str(call.sample) if call.primary and call.turn == 0 else "count"

    found = world(say, f"{OURS}:Secretive").play(2)
    assert [values(one)[1:] for one in found] == [[0] * 5, [5, 4, 3, 2, 1]]


def test_every_rollout_has_a_past_of_its_own(world):
    """What a prompt says of the past is what was played: as many turns as the environment was told things."""
    templates = Templates(first="told 0", turn="{turn} is {observation}: {history}", next="", history=9)
    here, read = world(always("1"), f"{OURS}:Forgetful", templates=templates), []
    say, here.say = here.say, lambda call, text: read.append(text) or say(call, text)
    here.play()
    later = [text for text in read if " is told " in text]
    assert len(read) == 6 + 45 and len(later) == 5 + 45
    for text in later:
        turn, told = re.search(r"(\d) is told (\d)", text).groups()
        assert turn == told and text.count("[action]") == int(turn)


# ------------------------------------------------------------------ which states


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 9, 9, 9, 9, 9, 9]),
        ({"root": "rollouts"}, [9] * 7),
        ({"root": "both"}, [2, 9, 9, 9, 9, 9, 9]),
        ({"root": "both", "group": 20}, [0, 9, 9, 9, 9, 9, 9]),
        ({"root": "both", "group": 1}, [9] * 7),
        ({"max_states": 2}, [0, 9, 9, 0, 0, 0, 0]),
        ({"max_states": 0, "root": "rollouts"}, [9, 0, 0, 0, 0, 0, 0]),
        ({"every": 3}, [0, 0, 0, 9, 0, 0, 9]),
        ({"rollouts": 0}, [0] * 7),
    ],
)
def test_how_many_rollouts_a_state_gets(settings, expected):
    assert [Vine(**({"group": 8} | settings)).at(t) for t in range(7)] == expected


def test_states_that_are_not_selected_are_holes(world):
    here = world(always("1"), root="rollouts", max_states=4, every=2)
    (trajectory,) = here.play()
    np.testing.assert_equal(values(trajectory), [6, np.nan, 4, np.nan, 2, np.nan])
    assert len(here.rolled()) == 3 * (6 + 4 + 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"root": "sibling"}, "unknown value of multiturn.vine.root 'sibling'; .* Did you mean 'siblings'"),
        ({"dedupe": "states"}, "unknown value of multiturn.vine.dedupe 'states'; .* Did you mean 'state'"),
        (
            {"rollouts": 0, "root": "rollouts"},
            "rollouts=0 leaves multiturn.vine.root=rollouts without a value",
        ),
        ({"rollouts": 0, "max_states": 3}, "max_states=3 caps .* leave it out"),
        ({"max_states": 0}, "max_states=0, every=1 and root=siblings leave no state with rollouts"),
        ({"max_states": 4, "every": 5}, "max_states=4, every=5 and root=siblings leave no state"),
        ({"group": 1}, "rollout.n=1 leaves none: use root=rollouts, or n=2 or more"),
    ],
)
def test_contradictory_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        Vine(**({"group": 8} | settings))


# ------------------------------------------------------------------ the same turns, under the same budgets


@both
@pytest.mark.parametrize(
    "budget",
    [
        {"max_turns": 4},
        {"max_actions": 5, "form": ActionFormat("answer", False, max_actions=2)},
        {"max_response_tokens": 150},
        {"gamma": 0.5},
        {"penalty": 0.25},
    ],
    ids=["turns", "actions", "tokens", "discount", "penalty"],
)
def test_without_chance_a_value_is_the_return_that_follows(world, row, budget):
    """An environment and a policy without chance: every rollout does what the trajectory does."""

    def say(call, text):
        told = text[text.rindex("told") :].count("'") // 2 if "told" in text else 0
        return "" if told == 3 else "2 || 3" if "form" in budget else "3"

    here = world(say, row=row, **budget)
    (trajectory,) = here.play()
    assert len(trajectory.turns) < 6 or not {"max_turns", "max_actions"} & set(budget)
    gamma, penalty = budget.get("gamma", 1.0), budget.get("penalty", 0.0)
    paid = [turn.reward - (0 if turn.valid else penalty) for turn in trajectory.turns]
    G = [sum(gamma**j * r for j, r in enumerate(paid[t:])) for t in range(len(paid))]
    assert values(trajectory)[1:] == pytest.approx(G[1:])
    assert trajectory.info["vine"]["return_std"] == 0
    if "penalty" in budget:
        assert not all(turn.valid for turn in trajectory.turns)


def test_a_finished_episode_has_no_more_rollouts(world):
    here = world(lambda call, text: "win" if call.primary and call.turn == 2 else "1")
    (trajectory,) = here.play()
    assert len(trajectory.turns) == 3 and trajectory.terminated
    assert len(here.rolled()) == 3 * (5 + 4)


# ------------------------------------------------------------------ chances of their own


@pytest.mark.parametrize(
    ("env", "kwargs"),
    [("frozen_lake", {"slip": 0.5, "hole_prob": 0.1}), ("chain_sum", {"length": 5}), (f"{OURS}:Chancy", {})],
)
@both
def test_trajectories_are_as_without_rollouts(world, row, env, kwargs):
    """Snapshots and restored siblings change nothing in the trajectories themselves, noise included."""

    def say(call, text):
        if env == "chain_sum":
            return str(total(text)[2]) if random.Random(call.seed).random() < 0.9 else "1000"
        return random.Random(call.seed).choice(["up", "down", "left", "right"])

    found = [world(say, env, row, kwargs, rollouts=3).play(4, kind) for kind in (Episode, VineEpisode)]
    for plain, vine in zip(*found, strict=True):
        assert rewards(plain) == rewards(vine)
        for name in ("observation", "prompt", "actions"):
            assert [one[name] for one in plain.info["details"]] == [one[name] for one in vine.info["details"]]
        assert plain.success == vine.success and "vine" not in plain.info


def test_every_rollout_has_chances_of_its_own(world, monkeypatch):
    """No seed restores two snapshots, and no rollout draws what the trajectory draws."""
    seeds, restore = [], module.restore
    monkeypatch.setattr(
        module, "restore", lambda env, taken, seed: seeds.append(seed) or restore(env, taken, seed)
    )
    here = world(always("1"), f"{OURS}:Chancy", rollouts=6)
    (trajectory,) = here.play()
    assert len(seeds) == len(set(seeds)) == 5 * 6
    assert trajectory.info["vine"]["return_std"] > 0.1  # siblings differ
    G = np.cumsum(rewards(trajectory)[::-1])[::-1]
    assert all(abs(values(trajectory)[1:] - G[1:]) > 1e-6)
    (again,) = world(always("1"), f"{OURS}:Chancy", rollouts=6).play()
    assert values(again)[1:] == pytest.approx(values(trajectory)[1:], abs=1e-12)
    later = world(always("1"), f"{OURS}:Chancy", rollouts=6)
    later.step = 2
    assert abs(values(later.play()[0])[5] - values(trajectory)[5]) > 1e-6


def total(text):
    """(numbers, how many are summed, the next total) from what chain_sum shows."""
    lines = text[text.rindex("Numbers:") :].splitlines()
    numbers = [int(word) for word in lines[0].split()[1:]]
    k = int(lines[1].split(":")[0].split()[-1])
    return numbers, k, sum(numbers[: k + 1])


@both
def test_values_are_within_their_error_of_the_exact_ones(world, row):
    """A table policy on chain_sum: position k is right with P[k]; 400 rollouts a state."""
    P, K = [0.9, 0.8, 0.85, 0.7], 400

    def say(call, text):
        _, k, right = total(text)
        sure = call.primary or random.Random(call.seed).random() < P[k]
        return str(right if sure else right + 1)

    here = world(say, "chain_sum", row, {"length": 4}, rollouts=K, root="rollouts")
    (trajectory,) = here.play()
    env = vm.make("chain_sum", length=4)
    env.reset(3)

    def policy(k):
        right = sum(env.numbers[: k + 1])
        return {str(right): P[k], str(right + 1): 1 - P[k]}

    exact = [exact_values(env, policy).V[k, 4 - k] for k in range(4)]
    assert exact == pytest.approx(np.cumprod(P[::-1])[::-1])
    error = np.array([(v * (1 - v) / K) ** 0.5 for v in exact])
    assert np.all(np.abs(np.array(values(trajectory)) - exact) < 3 * error)
    assert trajectory.info["vine"]["rollouts"] == 4 * K and here.pool.made <= 1 + Vine().max_inflight


# ------------------------------------------------------------------ what goes wrong


def first_of(n):
    """True for the first n calls that it is asked about."""
    seen = []
    return lambda: len(seen) < n and not seen.append(1)


@pytest.mark.parametrize(("env", "word"), [("Odd", "raise"), ("Odd", "nan"), ("Apart", "kill")])
def test_a_rollout_that_fails_is_left_out_of_the_mean(world, env, word):
    """One of three at the last state says what its environment does not survive; the others earn 4 and 6."""
    fails, low = first_of(1), first_of(1)

    def say(call, text):
        if call.primary:
            return "1"
        return word if fails() else "4" if low() else "6"

    here = world(say, f"{ODD}:{env}", max_turns=2)
    (trajectory,) = here.play()
    assert values(trajectory)[1] == 5 and len(here.rolled()) == 3
    counts = trajectory.info["vine"]
    assert (counts["rollouts"], counts["failed"], counts["mismatches"], counts["holes"]) == (3, 1, 0, 0)
    assert f"step('{word}') at turn 1" in counts["error"] and "a rollout" in counts["error"]
    assert here.pool.given_up == 1 and here.pool.idle == here.pool.made - 1
    here.pool.close()


def test_where_all_rollouts_fail_turns_are_merged(world):
    """Before the second turn none survives: a hole, whose turn shares the credit of the first."""

    def say(call, text):
        return "1" if call.primary or text.count("'") > 2 else "raise"

    here = world(say, f"{ODD}:Odd", root="rollouts", max_turns=4)
    with pytest.raises(ValueError, match="value is missing"):  # the first state's failed as well
        vm.vine_advantages([1] * 4, values(here.play()[0]))
    (trajectory,) = world(say, f"{ODD}:Odd", max_turns=4).play()
    np.testing.assert_equal(values(trajectory), [np.nan, np.nan, 2, 1])
    counts = trajectory.info["vine"]
    assert (counts["states"], counts["holes"], counts["failed"], counts["rollouts"]) == (3, 1, 3, 9)
    A = vm.vine_advantages(rewards(trajectory), [3.5, *values(trajectory)[1:]])
    assert A == pytest.approx([0.5, 0.5, 0, 0])


def test_replays_that_go_astray_are_counted(world):
    here = world(always("1"), f"{OURS}:Wandering", rollouts=2)
    (trajectory,) = here.play()
    counts = trajectory.info["vine"]
    assert (counts["failed"], counts["mismatches"], counts["holes"]) == (4, 4, 2) and np.isnan(
        values(trajectory)
    ).all()
    assert "cannot be replayed: at step 0" in counts["error"] and here.rolled() == []


def test_an_environment_that_cannot_be_snapshotted_fails_its_trajectory(world):
    with pytest.raises(
        EnvironmentFailure, match="BadSnapshot, task 3: snapshot at turn 1 raised ValueError: no p"
    ):
        world(always("1"), f"{OURS}:BadSnapshot").play()


def test_a_trajectory_that_fails_takes_its_rollouts_with_it(world):
    """They wait for the server for ever; nobody else waits for them."""
    here = world(lambda call, text: "raise" if call.turn == 2 else "1", f"{ODD}:Odd")

    async def gate(call):
        if not call.primary:
            await asyncio.Event().wait()
        if call.turn == 2:
            await until(lambda: len(here.rolled()) == 6)  # those of two states have begun

    here.after = gate
    with pytest.raises(EnvironmentFailure, match="turn 2 raised KeyError"):
        here.play()
    assert len(here.calls) == 3 + 6
    assert here.pool.idle == 0 and here.pool.given_up == here.pool.made == 1 + 6


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


def test_what_a_failed_trajectory_shared_is_kept_for_the_others(world):
    """Both come through the first state; one fails in the next turn, the other has its value from there."""

    async def slowly(call):
        await asyncio.sleep(0.05 if call.primary else 0.1)

    def say(call, text):
        return "raise" if call.primary and call.turn == 1 and call.sample == 0 else "1"

    here = world(say, f"{ODD}:Odd", max_turns=3)
    here.after = slowly
    failed, trajectory = asyncio.run(here.go(2))
    assert isinstance(failed, EnvironmentFailure)
    assert values(trajectory)[1:] == [2, 1] and trajectory.info["vine"]["rollouts"] == 6


def test_a_cancelled_trajectory_ends_everything(world):
    here = world(always("1"), root="rollouts")
    here.after = lambda call: asyncio.Event().wait()

    async def go():
        playing = asyncio.create_task(here.episode(0).play())
        await until(lambda: len(here.calls) == 1 + 3)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert here.vines.groups == {} and len(asyncio.all_tasks()) == 1

    asyncio.run(go())
    assert len(here.calls) == 4 and here.pool.idle == 0 and here.pool.given_up == here.pool.made == 4


def test_a_trajectory_that_is_cancelled_while_it_waits_leaves_the_others_alone(world):
    """It has ended and waits for rollouts that its sibling waits for, too."""
    here, open_ = world(always("1"), max_turns=2), asyncio.Event()

    async def gate(call):
        await (asyncio.sleep(0) if call.primary else open_.wait())

    here.after = gate

    async def go():
        one, two = (asyncio.create_task(here.episode(m).play()) for m in range(2))
        await until(lambda: here.pool.idle == 2 and len(here.rolled()) == 3)
        one.cancel()
        await asyncio.wait([one])
        open_.set()
        return one.cancelled(), await two

    cancelled, trajectory = asyncio.run(go())
    assert cancelled and values(trajectory)[1] == 1 and here.pool.given_up == 0


# ------------------------------------------------------------------ places, memory, order


@pytest.mark.parametrize("env", [STEADY, f"{ODD}:Apart"])
def test_environments_are_all_given_back(world, env):
    here = world(lambda call, text: str(call.sample), env, max_inflight=5)
    found = here.play(2)
    assert all(
        values(trajectory)[1:] == [5 * m, 4 * m, 3 * m, 2 * m, m] for m, trajectory in enumerate(found)
    )
    assert here.pool.idle == here.pool.made <= 2 + 5 and here.pool.given_up == 0
    here.pool.close()


def test_the_limit_is_on_rollouts_only(world):
    """All places for rollouts are taken, for ever as it seems: trajectories play on to their end."""
    here, open_, most, ended = world(always("1"), max_inflight=2), asyncio.Event(), [0], []

    async def gate(call):
        if call.primary:
            ended.append((call.sample, call.turn))
            if len(ended) == 6 * 4:
                open_.set()
            return
        most[0] = max(most[0], here.pool.made - here.pool.idle)
        await open_.wait()

    here.after = gate
    found = here.play(4)
    assert len(ended) == 24 and all(values(one)[1:] == [5, 4, 3, 2, 1] for one in found)
    assert most[0] <= 4 + 2


def test_snapshots_are_freed_once_the_last_rollout_has_begun(world):
    from verl_multiturn.load import load_class

    here, open_, left = world(always("1"), f"{OURS}:Watched", max_turns=3), asyncio.Event(), []
    alive = load_class(f"{OURS}:Watched", object).alive

    async def gate(call):
        if not call.primary:
            if len(here.rolled()) == 2 * 3:  # all of both states have begun
                await asyncio.sleep(0.1)
                gc.collect()
                left.append(len(alive))
                open_.set()
            await open_.wait()

    here.after = gate
    here.play()
    assert left == [0]


# ------------------------------------------------------------------ steps inside an utterance

FREE = ActionFormat(None, False)
three = ("1\n2\n1", "1\n1\n3")  # what two trajectories say in each of their turns


def by_line(world, say, row="turn", n=2, **more):
    """A group on `Lines`, whose utterances are cut into lines."""
    here = world(say, f"{OURS}:Lines", row=row, wrap="{}", form=FREE, **{"splitter": "line"} | more)
    return here, here.play(n)


def rest(call, text):
    """A trajectory says its three lines, a rollout goes on with a line "1" and stops, wherever it is."""
    return three[call.sample] if call.primary else "\n1"


def steps_of(trajectory):
    return [detail["steps"] for detail in trajectory.info["details"]]


@both
def test_a_rollout_goes_on_with_the_very_tokens(world, row):
    here, found = by_line(world, rest, row)
    ids = {call.turn: call.prompt for call in here.calls if call.primary and call.sample == 0}
    newline = here.tokens.encode("\n", add_special_tokens=False)
    said = found[0].turns[0].action_ids
    cuts = [i for i, one in enumerate(said) if [one] == newline]
    assert [one["span"] for one in steps_of(found[0])[0]] == [
        [0, cuts[0]],
        [cuts[0], cuts[1]],
        [cuts[1], len(said)],
    ]
    first = Counter(tuple(call.prompt) for call in here.rolled())
    for t, turn in enumerate(found[0].turns):
        for cut in cuts:
            assert first[tuple(ids[t] + turn.action_ids[:cut])] >= 3


@both
def test_states_inside_an_utterance_are_shared_too(world, row):
    """Both begin with "1": one state behind it; behind the second line they differ."""
    here, found = by_line(world, rest, row, n=2, max_turns=1)
    counts = [one.info["vine"] for one in found]
    assert sum(one["unique_states"] for one in counts) == 3 and [one["states"] for one in counts] == [2, 2]
    assert len(here.rolled()) == 3 * 3
    assert steps_of(found[0])[0][1]["value"] == steps_of(found[1])[0][1]["value"]


def test_the_environment_has_not_heard_what_is_being_said(world):
    """A rollout's action is the whole line it went on from, and what it pays is all that is counted."""
    here, (trajectory, _) = by_line(world, rest, rollouts=200, max_turns=1)
    a, b = (step["value"] for step in steps_of(trajectory)[0][1:])
    noise = 3 * 10 * (0.25 / 200) ** 0.5
    assert a == pytest.approx(2 + 5, abs=noise) and b == pytest.approx(2 + 5, abs=noise)  # 1,1 and 1,2,1
    assert {turn.action_text for turn in trajectory.turns} == {"1\n2\n1"}
    assert trajectory.info["vine"]["return_std"] > 4 and here.pool.idle == here.pool.made


@both
def test_turns_behind_an_utterance_are_played_on(world, row):
    """From inside the first turn of two a rollout has both turns' rewards before it."""
    _, (trajectory, _) = by_line(world, rest, row, rollouts=100)
    (_, inner, last), (start, _, _) = steps_of(trajectory)
    noise = 3 * 10 * (0.5 / 100) ** 0.5
    assert inner["value"] == pytest.approx(2 + 5 + 1 + 5, abs=noise)
    assert last["value"] == pytest.approx(2 + 5 + 1 + 5, abs=noise)
    assert start["value"] == pytest.approx(1 + 5, abs=noise) and start["value"] == trajectory.turns[1].value


def test_the_utterances_budget_is_the_rest_of_it(world):
    """Whoever may write 8 tokens has 8 less those said; the limit is in the key."""
    here = world(lambda call, text: "1\n" * 20, f"{OURS}:Lines", wrap="{}", form=FREE, splitter="line",
                 max_action_tokens=8, max_turns=1)  # fmt: skip
    (trajectory,) = here.play()
    assert len(trajectory.turns[0].action_ids) == 8 and steps_of(trajectory)[0][-1]["span"][1] == 8
    for key in ("states", "tokens"):
        assert trajectory.info["vine"][key] > 0
    spans = [step["span"] for step in steps_of(trajectory)[0][1:]]
    assert trajectory.info["vine"]["tokens"] == 3 * sum(8 - start for start, _ in spans)


def test_which_steps_get_rollouts(world):
    """`every` and `max_states` count steps through all turns."""
    _, (trajectory, _) = by_line(world, rest, every=2, max_states=4)
    known = [[np.isfinite(step["value"]) for step in steps] for steps in steps_of(trajectory)]
    assert known == [[False, False, True], [False, True, False]]
    _, (whole, _) = by_line(world, rest, splitter="none")
    assert np.isnan(values(whole)).all() and "steps" not in whole.info["details"][0]
    assert whole.info["vine"]["states"] == 0


def test_fixed_tokens(world):
    _, (trajectory, _) = by_line(world, rest, splitter="fixed_tokens", fixed_tokens=2, max_turns=1)
    assert [step["span"] for step in steps_of(trajectory)[0]] == [[0, 2], [2, 4], [4, 6]]


@both
def test_values_inside_an_utterance_are_within_their_error_of_the_exact_ones(world, row):
    """Each of 4 lines is "1" with its probability, all of them pay 1; what was said so far is all "1"."""
    P, K = [0.9, 0.8, 0.85, 0.7], 400

    def say(call, text):
        said = text.rsplit("assistant\n", 1)[-1].split("\n") if "assistant\n" in text else [""]
        done = sum(line == "1" for line in said)
        rng = random.Random(call.seed)
        lines = ["1" if call.primary or rng.random() < p else "0" for p in P[done:]]
        return ("\n" if done else "") + "\n".join(lines)

    here = world(say, f"{OURS}:AllLines", row, wrap="{}", form=FREE, splitter="line", rollouts=K,
                 root="rollouts")  # fmt: skip
    (trajectory,) = here.play()
    exact = np.cumprod(P[::-1])[::-1]
    found = np.array([step["value"] for step in steps_of(trajectory)[0]])
    assert len(found) == 4 and np.all(np.abs(found - exact) < 3 * np.sqrt(exact * (1 - exact) / K))
    A = vm.vine_advantages([0, 0, 0, 1], found)
    assert A.sum() == pytest.approx(1 - found[0])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"splitter": "lines"}, "unknown value of multiturn.vine.splitter 'lines'; .* Did you mean 'line'"),
        ({"splitter": "line", "gamma": 0.9}, "gamma=0.9 discounts from turn to turn, and .*splitter=line"),
    ],
)
def test_contradictory_splitters(settings, words):
    with pytest.raises(ValueError, match=words):
        Vine(**settings)


# ------------------------------------------------------------------ savers that are biased


def test_a_horizon_ends_rollouts(world):
    """Two turns of the six: their rewards are all that counts."""
    here = world(always("1"), horizon=2)
    (trajectory,) = here.play()
    assert values(trajectory)[1:] == [2, 2, 2, 2, 1] and len(here.rolled()) == 3 * (2 + 2 + 2 + 2 + 1)
    _, (inner, _) = by_line(world, rest, horizon=1, max_turns=2, rollouts=100)
    assert steps_of(inner)[0][1]["value"] == pytest.approx(2 + 5, abs=3 * 10 * (0.25 / 100) ** 0.5)


def test_what_a_horizon_cuts_is_counted(world):
    """Six turns: from s_4 on they are over before the horizon is."""
    here = world(always("1"), horizon=2, horizon_value="group", group=2)
    found = here.play(2)
    for trajectory in found:
        assert values(trajectory)[1:] == [2, 2, 2, 2, 1]
        cuts = [detail["cut"] for detail in trajectory.info["details"]]
        assert cuts == [0, 1, 1, 1, 0, 0]
        (row,) = to_outputs(trajectory, "trajectory")
        assert [turn["cut"] for turn in row.extra_fields["turns"]] == cuts
    ends = world(lambda call, text: "1" if call.primary else "stop", horizon=2, horizon_value="group")
    (trajectory,) = ends.play()
    assert [detail["cut"] for detail in trajectory.info["details"]] == [0] * 6  # the environment ended them
    plain = world(always("1"), horizon=2, group=2).play(2)
    assert all("cut" not in detail for one in plain for detail in one.info["details"])


def test_states_between_two_that_agree_are_left_out(world):
    """No chance anywhere: what is paid between the ends is all that their values differ by."""
    here = world(always("1"), select="bisect")
    (trajectory,) = here.play()
    np.testing.assert_equal(values(trajectory), [np.nan, 5, np.nan, np.nan, np.nan, 1])
    assert len(here.rolled()) == 3 * (5 + 1)
    counts = trajectory.info["vine"]
    assert (counts["skipped_states"], counts["states"], counts["holes"]) == (3, 2, 0)
    A = vm.vine_advantages(rewards(trajectory), [6, *values(trajectory)[1:]])
    assert A == pytest.approx([0] * 6)


def test_states_around_a_change_are_found(world):
    """Rollouts pay 1 in the last two turns, the trajectory never does."""

    def say(call, text):
        told = text.count("'") // 2 if "told" in text else 0
        return "1" if not call.primary and told >= 4 else "0"

    (trajectory,) = world(say, select="bisect").play()
    np.testing.assert_equal(values(trajectory), [np.nan, 2, np.nan, 2, 2, 1])


@both
def test_groups_that_agree_are_skipped(world, row):
    for words, rolled in ((("1", "1"), 0), (("1", "2"), 3 * 15 * 2)):
        here = world(
            lambda call, text, words=words: words[call.sample] if call.primary else "7",
            row=row,
            agreeing_groups="skip",
        )
        found = here.play(2)
        assert len(here.rolled()) == rolled
        assert sum(one.info["vine"]["skipped_states"] for one in found) == (0 if rolled else 10)
        assert np.isnan(values(found[0])[1:]).all() == (not rolled)


def test_a_group_of_survivors_is_not_waited_for(world):
    """One of two fails: the other has nobody to agree with, and its values."""
    here = world(lambda call, text: "raise" if call.primary and call.sample == 0 else "1", f"{ODD}:Odd",
                 agreeing_groups="skip", max_turns=3)  # fmt: skip
    failed, trajectory = asyncio.run(here.go(2))
    assert isinstance(failed, EnvironmentFailure) and values(trajectory)[1:] == [2, 1]


@pytest.mark.parametrize("split", [True, False])
def test_more_rollouts_where_few_do_not_agree(world, split):
    """The last of two turns: three rollouts agree in one case; else eight new ones decide, or all eleven."""

    def play(paid):
        drawn = iter(paid)
        here = world(lambda call, text: "1" if call.primary else next(drawn), max_turns=2, rollouts=8,
                     adaptive=3, split_samples=split)  # fmt: skip
        (trajectory,) = here.play()
        return values(trajectory)[1], len(here.rolled())

    assert play("111") == (1, 3) and play("000") == (0, 3)
    assert play("011" + "1" * 8) == (1 if split else 10 / 11, 11)
    assert play("222" + "2" * 8) == (2, 11)  # not in [0, 1]: nothing is known of such an interval


def test_returns_that_adaptive_cannot_judge_are_said_once_and_counted(world, caplog):
    here = world(always("2"), rollouts=4, adaptive=2)
    (trajectory,) = here.play()
    assert trajectory.info["vine"]["outside"] == 5
    (said,) = [one.getMessage() for one in caplog.records if "adaptive" in one.getMessage()]
    assert re.search(r"needs returns in \[0, 1\], and one is \d+: such states get all 2 \+ 4 rollouts", said)
    here = world(lambda call, text: "1" if len(text.split("'")) > 10 else "0", rollouts=4, adaptive=2)
    assert here.play()[0].info["vine"]["outside"] == 0


def test_what_is_biased_is_said():
    assert Vine().biased == [] and not Vine().later
    said = " ".join(Vine(horizon=3, select="bisect", agreeing_groups="skip", adaptive=2).biased)
    assert all(f"multiturn.vine.{key} is biased" in said
               for key in ("horizon=3", "select=bisect", "agreeing_groups=skip", "adaptive=2"))  # fmt: skip
    group = " ".join(Vine(horizon=3, horizon_value="group", tail="zero", max_states=5).biased)
    assert "count what they were to the others of the group" in group and "tail=zero is biased" in group
    with pytest.raises(ValueError, match="root=both weighs K rollouts"):
        Vine(adaptive=2, root="both")
    with pytest.raises(ValueError, match=r"unknown value of multiturn\.vine\.select 'bisection'"):
        Vine(select="bisection")


def test_metrics():
    count = {
        "states": 4, "holes": 1, "unique_states": 3, "rollouts": 9, "failed": 3, "mismatches": 2, "turns": 20,
        "tokens": 100, "truncated": 3, "return_std": 0.5, "error": "x", "tail_seconds": 2.0,
        "naive_tokens": 400, "read": 50, "cached": 40, "ended": 10.0,
        "skipped_states": 6, "outside": 2,
    }  # fmt: skip
    nothing = dict.fromkeys(count, 0)
    found = of_vine([{"vine": count}, {"vine": nothing | {"ended": 11.0}}])
    expected = {
        "states": 2, "unique_states": 1.5, "rollouts": 4.5, "failed": 1.5, "mismatches": 1, "turns": 10,
        "tokens": 50, "tail_seconds": 1, "failed_share": 1 / 3, "truncated_share": 0.5, "hole_share": 0.25,
        "return_std": 0.5, "skipped_states": 3, "tokens_share": 0.25, "cached_share": 0.8,
        "last_tail_seconds": 1, "outside": 1, "rollouts_per_state": 3,
    }  # fmt: skip
    assert found == pytest.approx({f"multiturn/vine_{name}/mean": one for name, one in expected.items()})
    empty = of_vine([{"vine": nothing}])
    assert "multiturn/vine_cached_share/mean" not in empty and set(empty.values()) == {0.0}
    assert of_values(np.array([np.nan, 1.0, 0.0])) == {
        "multiturn/vine_value/mean": 0.5,
        "multiturn/vine_value_std/mean": 0.5,
    }
    assert of_values(np.array([np.nan])) == {}


# ------------------------------------------------------------------ as verl calls it


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """`composed(*overrides)`: the CPU recipe on `Steady`, composed once, and prepared."""
    run = tmp_path_factory.mktemp("run")
    more = ["hardware=cpu", f"multiturn.run={run}", f"multiturn.env={STEADY}", "multiturn.format_penalty=0.5"]
    whole = compose("vineppo_frozenlake", more)

    def change(*overrides):
        config = copy.deepcopy(whole)
        config.merge_with_dotlist(list(overrides))
        return configure.prepare(config)

    return change


@pytest.fixture(scope="module")
def config(composed):
    return composed()


def test_values_come_from_rollouts_not_from_a_critic(config):
    assert config.critic.enable is False and config.algorithm.adv_estimator == "vineppo"
    assert "vineppo" in list_trainable()
    assert config.multiturn.vine.rollouts == 3 and config.actor_rollout_ref.actor.ppo_epochs == 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            [f"multiturn.env={OURS}:NoSnapshots"],
            'NoSnapshots declares snapshots = "none", and vineppo plays on',
        ),
        (["critic.enable=true"], "contradicts multiturn.algorithm=vineppo, which has none"),
        (["multiturn.vine.root=root"], "unknown value of multiturn.vine.root 'root'"),
        (["multiturn.vine.rollouts=0", "multiturn.vine.root=rollouts"], "without a value: use 1 or more"),
        (["multiturn.vine.rollouts=-1"], "multiturn.vine.rollouts=-1 must be a whole number of at least 0"),
        (["multiturn.vine.max_inflight=0"], "max_inflight=0 must be a whole number of at least 1"),
        (["multiturn.vine.every=0"], "every=0 must be a whole number of at least 1"),
        (["multiturn.vine.max_states=1.5"], "max_states=1.5 must be a whole number of at least 0 or null"),
        (["multiturn.vine.max_states=0"], "leave no state with rollouts"),
        (["actor_rollout_ref.rollout.n=1"], "rollout.n=1 leaves none: use root=rollouts"),
        (["multiturn.vineppo.lam=2"], "VinePPOConfig.lam must be in"),
        (["multiturn.vineppo.tail=zero"], "no credit to steps behind multiturn.vine.max_states=null"),
        (["multiturn.vineppo.tail=none"], "unknown VinePPOConfig.tail 'none'"),
        (["multiturn.vineppo.scope=micro"], "unknown VinePPOConfig.scope 'micro'"),
        (
            ["multiturn.vineppo.scope=minibatch", "actor_rollout_ref.actor.shuffle=true"],
            "shuffle=true draws them later",
        ),
        (["multiturn.vine.horizon_value=critic"], "unknown value of multiturn.vine.horizon_value 'critic'"),
        (["multiturn.vine.horizon_value=group"], "of a multiturn.vine.horizon over whole turns: set it"),
        (
            [
                *("multiturn.vine.horizon=2", "multiturn.vine.horizon_value=group"),
                *("multiturn.vine.splitter=line", "multiturn.vineppo.gamma=1"),
            ],
            "and splitter=turn",
        ),
        (["multiturn.kl_aggregation=sum"], "unknown value of multiturn.kl_aggregation 'sum'"),
        (
            ["multiturn.kl_aggregation=sequence_sum", "actor_rollout_ref.actor.use_kl_loss=false"],
            "use_kl_loss=false leaves out",
        ),
        (
            [
                "multiturn.kl_aggregation=sequence_sum",
                "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
            ],
            "verl's KL is that sum already",
        ),
        (["trainer.v1.trainer_mode=colocate_async"], "vineppo needs values of the policy that it trains"),
    ],
)
def test_refused(composed, overrides, words):
    with pytest.raises(ValueError, match=words):
        composed(*overrides)


def test_the_authors_settings_of_a_capped_episode(composed):
    config = composed("multiturn.vine.max_states=25", "multiturn.vineppo.tail=zero")
    given = keywords(config.multiturn)
    assert (given["cap"], given["tail"], given["scope"]) == (25, "zero", "batch")
    assert keywords(composed().multiturn)["cap"] is None


def test_snapshots_are_needed_for_rollouts_only(composed):
    assert composed(f"multiturn.env={OURS}:NoSnapshots", "multiturn.vine.rollouts=0")
    assert composed(f"multiturn.env={OURS}:NoSnapshots", "multiturn.algorithm=rloo")


def test_what_the_doctor_says(composed):
    base = doctor_recipe.base()
    cut = composed("actor_rollout_ref.rollout.top_p=0.9")
    assert any("top_p=0.9" in line.text and line.status == "warn" for line in doctor_budget.batch(cut))
    assert not any(line.status == "warn" for line in doctor_budget.batch(composed()))
    changed = ("multiturn.vine.every=2", "multiturn.vineppo.lam=0.5")
    said = [line.text for line in doctor_dead.lines(composed(*changed), base)]
    assert not any("multiturn.vine" in text for text in said)
    other = composed(*changed, "multiturn.algorithm=rloo")
    dead = " ".join(line.text for line in doctor_dead.lines(other, base))
    assert "multiturn.vine.every" in dead and "multiturn.vineppo.lam" in dead


@pytest.fixture
def loop(config, sessions, server):
    """`loop(split)` runs two sessions of a prompt as a worker of verl's does; (outputs, calls)."""

    def run(split, script=("<answer>1</answer>", "<answer></answer>", "<answer>1</answer>")):
        fake = server(script)
        return SimpleNamespace(outputs=sessions(config, fake, split, 1, 2, "vines"), calls=fake.calls)

    return run


def test_rows_carry_values_and_counts(loop):
    played = loop("train")
    assert len({request for request, _, _ in played.calls}) == 2
    for (output,) in played.outputs:
        record, vine = output.extra_fields["turns"], output.extra_fields["trajectory"]["vine"]
        found = [one["value"] for one in record]
        assert np.isnan(found[0]) and np.isfinite(found[1:]).all() and vine["states"] == 5
        assert output.num_turns == 6 and vine["failed"] == 0
        assert all("max_tokens" in params for _, _, params in played.calls)
    spent = sum(outputs[0].extra_fields["trajectory"]["vine"]["turns"] for outputs in played.outputs)
    assert len(played.calls) == 12 + spent


def test_validation_has_none(loop):
    played = loop("val")
    assert len(played.calls) == 12
    for (output,) in played.outputs:
        assert "vine" not in output.extra_fields["trajectory"]
        assert np.isnan([one["value"] for one in output.extra_fields["turns"]]).all()
