"""What must hold of each estimator, by enumerating every group that can occur; then the sampled report."""

import csv
from itertools import product

import numpy as np
import pytest
from typer.testing import CliRunner

from verl_multiturn.algorithms import advantages
from verl_multiturn.cli import app
from verl_multiturn.estimators import METRICS, Plan, measure
from verl_multiturn.estimators_methods import METHODS, Errors, Sample, _q_model, turn_index
from verl_multiturn.estimators_settings import Setting, bandit, chain, lake, setting
from verl_multiturn.estimators_world import END, Episodes, World
from verl_multiturn.turns import TurnBatch

RLOO, NO_STD = METHODS["rloo"], METHODS["grpo, no std"]


def episodes(world, x=None):
    """Every episode as (probability, [(place, action, reward, after)])."""
    x = world.start if x is None else x
    for a, k in product(*map(range, world.chance.shape[1:])):
        p = world.policy[world.state[x], a] * world.chance[x, a, k]
        turn = (x, a, world.reward[x, a, k], world.after[x, a, k])
        if p > 0 and turn[3] == END:
            yield p, [turn]
        elif p > 0:
            yield from ((p * q, [turn, *rest]) for q, rest in episodes(world, turn[3]))


def enumerated(world, n, errors=None):
    """Every group of n episodes, as one sample, and the probability of each turn's group."""
    groups = list(product(list(episodes(world)), repeat=n))
    rows = [
        (g, i, t, *turn, np.prod([p for p, _ in group]))
        for g, group in enumerate(groups)
        for i, (_, turns) in enumerate(group)
        for t, turn in enumerate(turns)
    ]
    g, i, t, x, a, r, after, p = (np.array(column) for column in zip(*rows, strict=True))
    turns = TurnBatch.from_lists(group=g, trajectory=i, index=t, reward=r, anchor=world.state[x])
    return Sample(world, Episodes(g * n + i, t, x, a, r, after), turns, errors, np.random.default_rng(0)), p


def expected(world, n, method, errors=None):
    """E[Â | x, a], nan where it cannot occur, and E g of one trajectory: exact."""
    sample, p = enumerated(world, n, errors)
    A, cell = method(sample), sample.episodes.place * world.Q.shape[1] + sample.episodes.action
    total, mass = (
        np.bincount(cell, weights=w, minlength=world.Q.size).reshape(world.Q.shape) for w in (p * A, p)
    )
    with np.errstate(invalid="ignore"):
        return total / mass, world.gradient_of(total) / n


def places(world):
    """From the start on, where there is one place for each turn."""
    x = world.start
    while x != END:
        yield x
        x = world.after[x].max()


def cosine(a, b):
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


WORLDS = {"chain": chain(3, 1), "late": chain(3, 3), "arms": bandit(2, 0.3)}


@pytest.fixture(params=WORLDS)
def world(request):
    return WORLDS[request.param]


def test_worlds_are_exact(world):
    every = list(episodes(world))
    assert sum(p for p, _ in every) == pytest.approx(1)
    assert world.V[world.start] == pytest.approx(sum(p * sum(turn[2] for turn in t) for p, t in every))
    assert world.visits.sum() == pytest.approx(sum(p * len(t) for p, t in every))
    pi = world.policy[world.state]
    assert (pi * world.advantage).sum(axis=1) == pytest.approx(0, abs=1e-12)


def test_the_gradient_is_the_derivative_of_the_value():
    def J(step):
        moved = chain(3, 1, right=1 / (1 + np.exp(-(np.log(4) + step))))  # θ of "right" in all states
        return moved.V[moved.start]

    world, d = chain(3, 1), 1e-5
    right = [int(np.argmax(world.policy[0]))] * 3
    assert world.gradient[[0, 1, 2], right].sum() == pytest.approx((J(d) - J(-d)) / (2 * d), rel=1e-6)


def test_sampling_follows_the_policy():
    world, rng = lake(), np.random.default_rng(0)
    sampled = world.sample(20_000, rng)
    R = np.bincount(sampled.episode, weights=sampled.reward)
    assert R.mean() == pytest.approx(world.V[world.start], abs=4 * R.std() / 20_000**0.5)
    places = sampled.place[:3000]
    rest = world.returns_from(places, 4, rng) - world.V[places][:, None]
    assert rest.mean() == pytest.approx(0, abs=4 * rest.std() / 12_000**0.5)
    first = sampled.after != END
    assert (sampled.place[1:][first[:-1]] == sampled.after[:-1][first[:-1]]).all()
    assert (sampled.index[1:][~first[:-1]] == 0).all()


@pytest.mark.parametrize("n", [2, 3])
def test_rloo_is_unbiased_and_grpo_without_std_shrinks(world, n):
    """Whenever the policy stops: the gradient of RFC 7244's test is exact with one vote per trajectory."""
    _, g = expected(world, n, RLOO)
    assert g == pytest.approx(world.gradient, abs=1e-12)
    _, g = expected(world, n, NO_STD)
    assert g == pytest.approx((1 - 1 / n) * world.gradient, abs=1e-12)


def test_dividing_by_the_std_weighs_tasks_by_their_success_rate():
    """One turn, right with p, n = 4: E[Â | right] / (1 − p) = (3 (1−p)² + 3√3 p (1−p) + 3 p²) / 2."""
    for p in (0.5, 0.9):
        world = chain(1, 1, right=p)
        A, _ = expected(world, 4, METHODS["grpo"])
        scale = (3 * (1 - p) ** 2 + 27**0.5 * p * (1 - p) + 3 * p**2) / 2
        assert A / world.advantage == pytest.approx(np.full((1, 2), scale), rel=1e-5)
    assert scale == pytest.approx(1.463827, rel=1e-5)  # at p = 1/2 it is 1.399519
    world = WORLDS["arms"]
    assert cosine(expected(world, 3, METHODS["grpo"])[1], world.gradient) < 0.995


@pytest.mark.parametrize("n", [2, 3])
def test_gigpo_shrinks_a_state_that_nobody_meets_twice(n):
    """E[A^S | x, a] = E[1 − 1/m] A(x, a), m the turns of the group from this state."""
    world = chain(2, 2)

    def step_level(sample):
        whole = advantages("gigpo", sample.turns, gamma=1.0, by_std=False)
        return whole - advantages("gigpo", sample.turns, gamma=1.0, by_std=False, step_weight=0.0)

    A, _ = expected(world, n, step_level)
    others = {2: {0: 0.2, 1: 0.8}, 3: {0: 0.04, 1: 0.32, 2: 0.64}}[n]  # who come to the second number
    share = sum(p * (1 - 1 / (1 + k)) for k, p in others.items())
    first, second = places(world)
    assert A[first] == pytest.approx((1 - 1 / n) * world.advantage[first])
    assert A[second] == pytest.approx(share * world.advantage[second])


class Wait:
    """Waiting pays 0.1 and changes nothing; going pays 1 and ends."""

    max_turns = 2
    actions = ("wait", "go")

    def start_state(self):
        return "here"

    def transitions(self, state, action):
        return [(1.0, "here", 0.1, False) if action == "wait" else (1.0, "here", 1.0, True)]


def test_gigpo_praises_waiting_where_a_trajectory_meets_a_state_twice():
    """The earlier turn's return holds the later one's: compared with itself, waiting always wins."""
    world = World.of(Wait(), lambda state: {"wait": 0.5, "go": 0.5})
    assert world.advantage[world.start] == pytest.approx([-0.175, 0.175])
    A, _ = expected(world, 1, METHODS["gigpo, no std, γ 1"])
    assert A[world.start] == pytest.approx(
        [0.05, 0]
    )  # (1.1 − 1) / 2 before going, (0.2 − 0.1) / 2 before not
    A, _ = expected(world, 1, RLOO)
    assert A[world.start] == pytest.approx([0, 0])


def test_vineppo_is_unbiased_with_one_continuation():
    """Over every episode and every outcome of the one continuation of each of its places."""
    world = chain(2, 1)
    total, mass = np.zeros_like(world.Q), np.zeros_like(world.Q)
    for p, turns in episodes(world):
        rollouts = [[(q, sum(t[2] for t in rest)) for q, rest in episodes(world, turn[0])] for turn in turns]
        for drawn in product(*rollouts):
            weight = p * np.prod([q for q, _ in drawn])
            batch = TurnBatch.from_lists(
                group=[0] * len(turns), trajectory=[0] * len(turns), index=range(len(turns)),
                reward=[turn[2] for turn in turns], value=[V for _, V in drawn],
            )  # fmt: skip
            for (x, a, *_), A in zip(turns, advantages("vineppo", batch), strict=True):
                total[x, a] += weight * A
                mass[x, a] += weight
    assert total / mass == pytest.approx(world.advantage, abs=1e-12)


def test_values_true_and_wrong(world):
    errors = Errors.draw(world, np.random.default_rng(1))
    off = errors.V[0]
    A, g = expected(world, 1, METHODS["turn_gae λ 0"])
    assert np.nan_to_num(A) == pytest.approx(world.advantage, abs=1e-12)
    assert g == pytest.approx(world.gradient, abs=1e-12)
    A, g = expected(world, 1, METHODS["turn_gae λ 1, wrong V"], errors)  # a wrong V is only a baseline
    bias = np.where(np.isnan(A), 0, A - world.advantage + off[:, None])
    assert bias == pytest.approx(0, abs=1e-12) and g == pytest.approx(world.gradient, abs=1e-12)
    A, g = expected(world, 1, METHODS["turn_gae λ 0, wrong V"], errors)
    later = (world.chance * np.where(world.after == END, 0, off[world.after])).sum(axis=2)
    bias = np.where(np.isnan(A), 0, A - world.advantage - later + off[:, None])
    assert bias == pytest.approx(0, abs=1e-12)
    assert np.abs(g - world.gradient).max() > 1e-3


def test_a_q_model_may_be_off_by_any_number_in_a_state():
    """The mean over fresh actions takes it off; nobody else's draws are changed by drawing them."""
    world, rng = lake(), np.random.default_rng(1)
    off = np.repeat(rng.normal(size=(2, len(world.V), 1)), world.Q.shape[1], axis=2)
    sample = Sample.draw(world, 64, 8, Errors(np.zeros((2, len(world.V))), off), rng)
    before = sample.rng.bit_generator.state
    found = _q_model(4000, wrong=True)(sample)
    assert sample.rng.bit_generator.state == before
    true = world.advantage[sample.episodes.place, sample.episodes.action]
    assert np.abs(found - true).max() < 0.05 < true.std()
    assert 0.02 < (METHODS["q_advantage"](sample) - true).std() < 0.5


def test_deterministic_turns_have_no_variance_with_exact_values():
    sample, _ = enumerated(chain(3, 1), 1)
    true = sample.world.advantage[sample.episodes.place, sample.episodes.action]
    for name in ("turn_gae λ 0", "archer"):
        method = METHODS[name]
        errors = Errors(np.zeros((2, *sample.world.V.shape)), np.zeros((2, *sample.world.Q.shape)))
        sample = Sample(sample.world, sample.episodes, sample.turns, errors, sample.rng)
        assert method(sample) == pytest.approx(true, abs=1e-12)


def test_archer_takes_each_minimum_by_itself():
    world = WORLDS["arms"]
    errors = Errors.draw(world, np.random.default_rng(2))
    A, _ = expected(world, 1, METHODS["archer, wrong Q, V"], errors)
    wanted = errors.Q.min(axis=0) - errors.V.min(axis=0)[:, None]
    seen = ~np.isnan(A)
    assert (A - world.advantage)[seen] == pytest.approx(wanted[seen], abs=1e-12)


@pytest.mark.parametrize("n", [2, 3])
def test_a_baseline_for_each_turn_index_forgets_the_future(n):
    """RFC 7244: E[Â | t, a] = E[1 − 1/m] (r̄(a) − r̄), m still there: going on brings nothing."""
    world = bandit(5 - n, 0.3)
    A, g = expected(world, n, turn_index)
    mean = (world.chance * world.reward).sum(axis=2)[0]
    direct = mean - world.policy[0] @ mean
    for t, x in enumerate(places(world)):
        there = 0.7**t
        counts = {2: (1 - there, there), 3: ((1 - there) ** 2, 2 * there * (1 - there), there**2)}[n]
        share = sum(p * (1 - 1 / (1 + k)) for k, p in enumerate(counts))
        assert A[x] == pytest.approx(share * direct, abs=1e-12)
    here, stop = world.state[world.start], int(np.argmin(mean))
    true = world.gradient[here]
    assert g[here, stop] / np.abs(g[here]).sum() > true[stop] / np.abs(true).sum()  # too little against it


def test_the_sampled_report_agrees_with_enumeration():
    world, n = WORLDS["arms"], 2
    rows = measure(
        Setting("test", 0, n, world), Plan(batches=30, trajectories=512), METHODS | {"index": turn_index}
    )
    for name in ("grpo", "rloo", "gigpo, no std, γ 1", "index"):
        A, g = expected(world, n, METHODS.get(name, turn_index))
        pi, visits = world.policy[world.state], world.visits / world.visits.sum()
        b = np.where(np.isnan(A), 0, A - world.advantage)
        c = b - (pi * b).sum(axis=1, keepdims=True)
        J = world.gradient
        wanted = {
            "mean_error": (visits[:, None] * pi * b).sum(),
            "bias": (visits[:, None] * pi * b**2).sum() ** 0.5,
            "action_bias": (visits[:, None] * pi * c**2).sum() ** 0.5,
            "gradient_bias": ((g - J) ** 2).sum() ** 0.5 / (J**2).sum() ** 0.5,
            "gradient_length": (g * J).sum() / (J**2).sum(),
            "gradient_cosine": cosine(g, J),
        }
        for metric, value in wanted.items():
            assert rows[name][metric] == pytest.approx(value, abs=4.5 * rows[name][f"{metric}_se"] + 1e-9), (
                name,
                metric,
            )


def test_variances_fall_with_the_continuations():
    rows = measure(setting("group size", 4), Plan(batches=10, trajectories=128))
    one, three, nine = (rows[f"vineppo K {K}"] for K in (1, 3, 9))
    assert one["variance"] > 2 * three["variance"] > 4 * nine["variance"]
    assert one["trajectories_needed"] > nine["trajectories_needed"]
    for row in rows.values():
        assert row["mse"] == pytest.approx(row["variance"] + row["bias"] ** 2, abs=0.02)
        assert {*row} == {name for metric in METRICS for name in (metric, f"{metric}_se")}


def call(*arguments, code=0):
    result = CliRunner().invoke(app, ["estimators", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command(tmp_path):
    options = ("--quick", "--sweeps", "stopping", "--batches", 4)
    output = call(*options, "--out", tmp_path / "a")
    assert "2/2  stopping 0.1" in output and "ETA 0:00:00" in output
    call(*options, "--out", tmp_path / "b")
    call(*options, "--out", tmp_path / "c", "--seed", 2)
    a, b, c = ((tmp_path / name / "estimators.csv").read_text() for name in "abc")
    assert a == b != c
    rows = list(csv.DictReader(a.splitlines()))
    assert [row["estimator"] for row in rows] == [*METHODS] * 2
    page = (tmp_path / "a" / "estimators.md").read_text()
    assert "seed 1, n = 256 trajectories" in page and "4 batches of 64" in page and "| vineppo K 9 |" in page
    assert (tmp_path / "a" / "estimators.png").read_bytes().startswith(b"\x89PNG")
    assert "Did you mean 'horizon'" in call("--quick", "--sweeps", "horizons", code=2)
    assert "batches >= 3" in call("--batches", 1, code=2)
