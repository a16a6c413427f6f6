import random

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from verl_multiturn import advantages
from verl_multiturn.cli import app
from verl_multiturn.env import make
from verl_multiturn.rescore import rescore
from verl_multiturn.rollout.episode import anchor_of
from verl_multiturn.rollout.pool import reset, step
from verl_multiturn.runs import Run, RunWriter, to_turns
from verl_multiturn.steps import numbered

GIGPO = {"gamma": 0.9, "step_weight": 0.7, "invalid_penalty": 0.1}
OWN = """
from dataclasses import dataclass
from verl_multiturn.algorithms import Config, register

@dataclass(frozen=True)
class FlatConfig(Config):
    level: float = 1.0

@register("flat", FlatConfig)
def flat(turns, config):
    return turns.reward * 0 + config.level
"""


def played(env, group, task, sample, number, rng, value=None):
    """An episode of a careless expert, as a record."""
    seen, turns = reset(env, task, 10 * number + sample), []
    while not (seen.terminated or seen.truncated):
        action = (
            "fly" if rng.random() < 0.1 else env.random_action(rng) if rng.random() < 0.5 else env.expert()
        )
        before, seen = seen, step(env, action)
        turns.append(
            {
                "index": len(turns), "observation": before.observation, "actions": [action],
                "anchor": anchor_of("state", before), "reward": seen.reward, "action_ids": [1, 2],
                "valid": bool(seen.info["valid"]), "value": value, "advantage": None,
            }
        )  # fmt: skip
    return {
        "group": group, "trajectory": sample, "turns": turns, "success": seen.info["success"],
        "terminated": seen.terminated, "truncated": seen.truncated, "step": number,
    }  # fmt: skip


def write(folder, config, algorithm=None, value=None, steps=(1, 2, 3), **keywords):
    """A run whose advantages are those of `algorithm`, as float32."""
    env, rng = make("frozen_lake"), random.Random(1)
    with RunWriter(folder, config) as writer:
        writer.metrics(1, {})
        for number in steps:
            rows = [
                played(env, f"{number}-{task}", task, sample, number, rng, value)
                for task in range(6)
                for sample in range(5)
            ]
            if algorithm is not None:
                numbers = iter(advantages(algorithm, to_turns(rows), **keywords).astype(np.float32).tolist())
                for turn in (turn for row in rows for turn in row["turns"]):
                    turn["advantage"] = next(numbers)
            writer.trajectories("train", number, rows)
    return Run(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = {"multiturn": {"algorithm": "gigpo", "gigpo": GIGPO, "reinforce": {"baseline": "mean"}}}
    return write(tmp_path_factory.mktemp("rescore") / "run", config, "gigpo", **GIGPO)


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def test_the_recorded_algorithm_is_reproduced(run):
    found = rescore(run)
    assert found.reproduction.algorithm == "gigpo"
    assert found.reproduction.relative < 1e-6
    assert found.reproduction.turns == len(found.turns) > 300
    assert found.trajectories == 90
    assert list(found.impossible) == ["turn_gae", "vineppo"] and "no critic" in found.impossible["turn_gae"]
    assert found.names == ["recorded", "gigpo", "grpo", "reinforce", "rloo"]


def test_steps_inside_utterances_are_reproduced(tmp_path):
    """Each turn has two steps; what was recorded is of steps, and their values decide it."""
    whole = {"multiturn": {"algorithm": "vineppo", "vineppo": {"whiten": True}}}
    plain = write(tmp_path / "plain", whole, value=0.5, steps=(1,)).trajectories("train", 1)
    rng = random.Random(2)
    for turn in (turn for one in plain for turn in one["turns"]):
        turn |= {"span": [0, 2], "penalty": 0.0, "log_probs": None}
        turn["steps"] = [{"span": [k, k + 1], "value": rng.random()} for k in range(2)]
    parts = [one | {"turns": numbered(one["turns"])} for one in plain]
    numbers = advantages("vineppo", to_turns(parts), whiten=True).astype(np.float32).tolist()
    for part, number in zip((part for one in parts for part in one["turns"]), numbers, strict=True):
        part["step"]["advantage"] = number
    for turn in (turn for one in plain for turn in one["turns"]):
        turn |= {name: turn["steps"][0][name] for name in ("value", "advantage")}
    with RunWriter(tmp_path / "run", whole) as writer:
        writer.metrics(1, {})
        writer.trajectories("train", 1, plain)
    found = rescore(Run(tmp_path / "run"), ["vineppo", "rloo"])
    assert found.reproduction.relative < 1e-6
    assert len(found.turns) == 2 * sum(len(one["turns"]) for one in plain)
    assert found.turns.vineppo.to_numpy() != pytest.approx(found.turns.rloo.to_numpy())


def test_a_wrong_configuration_is_not_a_reproduction(tmp_path):
    config = {"multiturn": {"algorithm": "gigpo", "gigpo": GIGPO | {"gamma": 0.5}}}
    found = rescore(write(tmp_path, config, "gigpo", steps=(1,), **GIGPO), ["gigpo"])
    assert found.reproduction.difference > 0.01


def test_numbers_are_those_of_the_steps_apart(run):
    found = rescore(run, ["rloo", "reinforce"], steps=[2, 3])
    for number in (2, 3):
        turns = to_turns(run.trajectories("train", number))
        rows = found.turns[found.turns.step == number]
        for name in ("rloo", "reinforce"):
            assert rows[name].tolist() == advantages(name, turns).tolist()
        assert rows["index"].tolist() == turns.index.tolist()
    summary = found.summary()
    assert summary.loc["rloo", "mean"] == pytest.approx(found.turns.rloo.mean())
    assert summary.loc["rloo", "variance"] == pytest.approx(np.var(found.turns.rloo, ddof=1))
    assert summary.loc["rloo", "zero"] == pytest.approx((found.turns.rloo == 0).mean())
    expected = np.corrcoef(found.turns.rloo, found.turns.reinforce)[0, 1]
    assert found.correlation().loc["rloo", "reinforce"] == pytest.approx(expected)
    agreement = (np.sign(found.turns.rloo) == np.sign(found.turns.reinforce)).mean()
    assert found.sign_agreement().loc["rloo", "reinforce"] == pytest.approx(agreement)


def test_keywords_change_the_column_but_not_the_reproduction(run):
    found = rescore(run, ["gigpo"], keywords={"gigpo": {"gamma": 0.0, "step_weight": 3.0}})
    turns = to_turns(run.trajectories("train", 1))
    expected = advantages("gigpo", turns, **GIGPO | {"gamma": 0.0, "step_weight": 3.0})
    assert found.turns.gigpo[: len(turns)].tolist() == expected.tolist()
    assert found.reproduction.relative < 1e-6


def test_turn_gae_with_recorded_values(tmp_path):
    config = {"multiturn": {"algorithm": "turn_gae", "turn_gae": {"gamma": 1.0, "lam": 0.5}}}
    run = write(tmp_path, config, "turn_gae", value=0.5, steps=(1,), lam=0.5)
    records = run.trajectories("train", 1)
    assert any(record["truncated"] for record in records)  # V behind a limit counts as 0, as in training
    found = rescore(run)
    assert not found.impossible and found.reproduction.difference < 1e-6


def test_similarity_compares_observations(tmp_path):
    keywords = {"similarity": 0.9}
    config = {"multiturn": {"algorithm": "gigpo", "gigpo": keywords}}
    pytest.importorskip("rapidfuzz")
    found = rescore(write(tmp_path, config, "gigpo", steps=(1,), **keywords), ["gigpo"])
    assert found.reproduction.relative < 1e-6
    turns = to_turns(Run(tmp_path).trajectories("train", 1))
    assert turns.anchor_text[0].count("\n") == 4  # a grid, not a digest


@pytest.mark.parametrize("by_std", [True, False])
def test_grpo_reads_the_key_that_verl_reads(tmp_path, by_std):
    config = {"multiturn": {"algorithm": "grpo"}, "algorithm": {"norm_adv_by_std_in_grpo": by_std}}
    found = rescore(write(tmp_path, config, "grpo", steps=(1,), by_std=by_std), ["grpo"])
    assert found.reproduction.relative < 1e-6


@pytest.mark.parametrize("name", ["ppo", "bilevel_gae"])
def test_nothing_to_reproduce(tmp_path, run, name):
    verl = write(tmp_path / "a", {"multiturn": {"algorithm": name}}, "grpo", steps=(1,))
    assert rescore(verl).reproduction is None
    assert "not one of these" in call("rescore", verl.folder)
    plain = write(tmp_path / "b", None, steps=(1,))
    found = rescore(plain)
    assert found.names == ["gigpo", "grpo", "reinforce", "rloo"] and found.reproduction is None
    assert "recorded no advantages" in call("rescore", plain.folder)


def test_an_utterance_without_tokens_is_left_out(tmp_path, run):
    rows = run.trajectories("train", 1)
    rows[0]["turns"][0]["advantage"] = None
    with RunWriter(tmp_path, run.config) as writer:
        writer.metrics(1, {})
        writer.trajectories("train", 1, rows)
    found = rescore(Run(tmp_path), ["gigpo"])
    assert found.reproduction.turns == len(found.turns) - 1
    assert found.sign_agreement().loc["gigpo", "recorded"] == 1


def test_a_step_without_trajectories(tmp_path, run):
    with RunWriter(tmp_path, run.config) as writer:
        writer.metrics(1, {})
        writer.trajectories("train", 1, [])
        writer.trajectories("train", 2, run.trajectories("train", 2))
    found = rescore(Run(tmp_path), ["gigpo", "turn_gae"])
    assert set(found.turns.step) == {2} and found.reproduction.relative < 1e-6
    assert list(found.impossible) == ["turn_gae"]


def test_an_algorithm_of_ones_own(run, tmp_path, monkeypatch):
    (tmp_path / "my_flat.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("verl_multiturn.algorithms.registry._ALGORITHMS", {**registry()})
    said = call("rescore", run.folder, "--algorithms", "my_flat:flat", "--set", "my_flat:flat.level=2")
    assert "my_flat:flat" in said and "nan" in said  # a constant correlates with nothing
    found = rescore(run, ["my_flat:flat"], keywords={"my_flat:flat": {"level": 2}})
    assert set(found.turns["my_flat:flat"]) == {2}


def registry():
    from verl_multiturn.algorithms import registered

    return registered()


def test_the_command(run, tmp_path):
    said = call(
        "rescore", run.folder, "--algorithms", "gigpo,rloo", "--steps", "1,2-3", "--out", tmp_path / "a.csv"
    )
    assert "90 trajectories" in said and "Pearson correlation" in said and "same sign" in said
    assert "largest absolute difference" in said
    table = pd.read_csv(tmp_path / "a.csv")
    assert list(table) == ["step", "group", "trajectory", "index", "recorded", "gigpo", "rloo"]
    assert table.gigpo.sub(table.recorded).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algorithms", "gigpo,rlo"], "Did you mean 'rloo'?"),
        (["--algorithms", "turn_gae"], "turn_gae is not possible: it needs V(s_t)"),
        (["--algorithms", "starpo"], "verl_multiturn.bilevel_gae"),
        (["--set", "gigpo.gama=0.9"], "Did you mean 'gamma'?"),
        (["--set", "gigp.gamma=0.9"], "Did you mean 'gigpo'?"),
        (["--set", "gamma=0.9"], "'gamma=0.9' is not algorithm.key=value"),
        (["--set", "gigpo.gamma=high"], "GiGPOConfig.gamma must be a number"),
        (["--steps", "7"], "unknown step of split 'train' '7'"),
        (["--steps", "7-9"], "no step from 7 to 9 was recorded"),
        (["--steps", "one"], "'one' does not name steps"),
        (["--split", "vall"], "unknown split 'vall'"),
    ],
)
def test_mistakes_are_one_sentence(run, arguments, message):
    said = call("rescore", run.folder, *arguments, code=2)
    assert message in said and len(said.splitlines()) == 1
