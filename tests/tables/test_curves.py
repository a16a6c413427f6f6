"""Metrics of several runs side by side, against numbers worked by hand."""

import matplotlib.image
import pytest
from typer.testing import CliRunner

from verl_multiturn.cli import app
from verl_multiturn.curves import curves, draw, summary
from verl_multiturn.runs import RunWriter
from verl_multiturn.tables.recorded import read_runs

SUCCESS, STD = "multiturn/success/mean", "multiturn/group_std/mean"


@pytest.fixture
def root(tmp_path, trajectory):
    """Two seeds of a method, one of another algorithm of that name; a step has 4 trajectories of 2 turns."""
    for algorithm, seed, level in (("ppo", 1, 0.0), ("ppo", 2, 0.2), ("grpo", 1, 0.5)):
        config = {
            "multiturn": {"algorithm": algorithm, "seed": seed, "env": "frozen_lake"},
            "trainer": {"experiment_name": "lake", "total_training_steps": 3},
        }
        with RunWriter(tmp_path / f"{algorithm}_{seed}", config) as writer:
            for step in (1, 2, 3):
                writer.trajectories("train", step, [trajectory(n, False) for n in range(4)])
                writer.metrics(step, {SUCCESS: level + step / 10, STD: 0.25})
    return tmp_path


def test_values_with_what_they_cost(root):
    found = curves(read_runs([root]), ["success"])
    assert sorted(set(found["method"])) == ["lake (grpo)", "lake (ppo)"]
    one = found[(found["method"] == "lake (ppo)") & (found["seed"] == 2)]
    assert one["value"].tolist() == pytest.approx([0.3, 0.4, 0.5]) and set(one["metric"]) == {SUCCESS}
    assert one["env_steps"].tolist() == [8, 16, 24] and one["tokens"].tolist() == [24, 48, 72]


def test_seeds_are_the_samples(root):
    table = summary(curves(read_runs([root]), ["success", STD]), k=2).set_index(["metric", "method", "when"])
    first, last = (table.loc[(SUCCESS, "lake (ppo)", when)] for when in ("first", "last"))
    half = 12.7062 * 0.1  # t of one degree of freedom x s/√2 of two values 0.2 apart
    assert (first["mean"], first["n"]) == (pytest.approx(0.25), 2)
    assert (last["low"], last["high"]) == (
        pytest.approx(0.35 - half, abs=1e-4),
        pytest.approx(0.35 + half, abs=1e-4),
    )
    assert table.loc[(STD, "lake (grpo)", "last")]["mean"] == 0.25


def test_the_command(root, tmp_path):
    png, csv = tmp_path / "curves.png", tmp_path / "curves.csv"
    given = ["curves", str(root), "--metric", "success", "--metric", STD, "--x", "tokens"]
    result = CliRunner().invoke(app, [*given, "--png", str(png), "--out", str(csv)])
    assert result.exit_code == 0 and "lake (ppo)" in result.stdout
    assert matplotlib.image.imread(png).shape[0] > 500
    assert len(csv.read_text().splitlines()) == 1 + 3 * 3 * 2


def test_what_cannot_be_drawn(root, tmp_path):
    runs = read_runs([root])
    with pytest.raises(ValueError, match="unknown metric 'sucess'; valid: "):
        curves(runs, ["sucess"])
    with pytest.raises(ValueError, match="unknown axis 'turns'"):
        draw(curves(runs, ["success"]), tmp_path / "x.png", "turns")
    with pytest.raises(ValueError, match="no training run"):
        curves([])
    with pytest.raises(ValueError, match=r"lake \(grpo\) has several runs of seed 1"):
        curves([*runs, *runs], ["success"])
