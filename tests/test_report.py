import math
from io import StringIO

import matplotlib.image
import pytest
from rich.console import Console

from verl_multiturn.audit_plot import audited_points, draw_audit
from verl_multiturn.panel import Panel
from verl_multiturn.report import compare, learning_curve, print_table, success, success_table
from verl_multiturn.runs import Run, RunWriter

# Wilson, z = 1.96, worked by hand: z² = 3.8416, n = 4
LOW_4_OF_4 = 4 / 7.8416  # 0.5101; by symmetry 0 of 4 ends at 1 - 0.5101
LOW_2_OF_4 = 0.5 - 1.96 * math.sqrt(0.25 / 4 + 3.8416 / 64) / (1 + 3.8416 / 4)  # 0.1500
HALF_RETURN = 3.1824 * math.sqrt(1 / 3) / 2  # Student, 3 degrees of freedom, returns 0 0 1 1


@pytest.fixture(scope="module")
def panel():
    return Panel.build("frozen_lake", {}, range(1000), "val", n=4)


def validation(panel, successes, turns=3):
    return [
        {
            "group": f"g{n}", "trajectory": 0, "env": panel.env, "task": str(task.id),
            "task_type": "odd" if n % 2 else "even", "return": float(bool(solved)),
            "success": solved, "turns": [{}] * (turns + n),
        }
        for n, (task, solved) in enumerate(zip(panel.tasks, successes, strict=False))
    ]  # fmt: skip


@pytest.fixture
def run(tmp_path, panel):
    config = {"multiturn": {"algorithm": "gigpo", "seed": 3}}
    with RunWriter(tmp_path / "run", config) as writer:
        writer.trajectories("val", 0, validation(panel, [False] * 4))
        writer.trajectories("val", 10, validation(panel, [True, True, None, False]))
        writer.trajectories("val", 20, validation(panel, [True] * 4))
        for step in range(1, 21):
            writer.metrics(step, {"multiturn/success/mean": step / 20})
    return Run(tmp_path / "run")


def test_the_table(run, panel):
    table = success_table(run, panel)
    assert table.index.tolist() == ["random", "expert", "warm start", "trained"]
    assert table.loc["expert", "success"] == 1
    assert table.loc["random", "success"] < 1
    assert table["n"].tolist() == [4] * 4
    warm, trained = table.loc["warm start"], table.loc["trained"]
    assert (warm.success, warm.success_low) == (0, 0)
    assert warm.success_high == pytest.approx(1 - LOW_4_OF_4)
    assert trained.success_low == pytest.approx(LOW_4_OF_4)
    assert (trained["return"], trained.return_low, trained.return_high) == (1, 1, 1)
    assert trained.turns == (3 + 4 + 5 + 6) / 4
    assert compare(table, "trained", "warm start") == (100, True)
    assert compare(table, "trained", "expert") == (0, False)


def test_half_solved_and_task_types(tmp_path, panel):
    with RunWriter(tmp_path) as writer:
        writer.trajectories("val", 5, validation(panel, [True, True, None, False]))
    table = success_table(Run(tmp_path), task_types=True)
    assert table.index.tolist() == ["trained"]
    row = table.loc["trained"]
    assert (row.success, row["return"]) == (0.5, 0.5)
    assert row.success_low == pytest.approx(LOW_2_OF_4)
    assert row.return_high == pytest.approx(0.5 + HALF_RETURN)
    assert (row["even/success"], row["even/n"], row["odd/success"]) == (0.5, 2, 0.5)
    output = StringIO()
    print_table(table, Console(file=output, width=200))
    assert "50.0" in output.getvalue() and "15.0 to 85.0" in output.getvalue()
    assert "50.0 (2)" in output.getvalue()


def test_success_by_task_type(panel):
    rates = success(validation(panel, [True, False, True, False]))
    assert {kind: rate.mean for kind, rate in rates.items()} == {"all": 0.5, "even": 1, "odd": 0}
    assert rates["all"].low == pytest.approx(LOW_2_OF_4)
    assert math.isnan(success(validation(panel, [None] * 4))["all"].mean)


def test_scripted_policies_play_the_recorded_tasks_only(tmp_path, panel):
    with RunWriter(tmp_path) as writer:
        writer.trajectories("val", 0, validation(panel, [True] * 2))
    assert success_table(Run(tmp_path), panel)["n"].tolist() == [2, 2, 2]
    assert success_table(Run(tmp_path), panel, panel_policies=False)["n"].tolist() == [2]


def test_another_panel_is_refused(run, panel):
    other = Panel.build("frozen_lake", {}, range(5000, 6000), "val", n=4)
    with pytest.raises(ValueError, match="4 of 4 validated tasks are not in panel frozen_lake-val"):
        success_table(run, other)
    other = Panel.build("bandit", {}, range(1), "val")
    with pytest.raises(ValueError, match="the run played frozen_lake, panel bandit-val does not"):
        success_table(run, other)
    with pytest.raises(ValueError, match="unknown row of the table 'expert'; valid: warm start, "):
        compare(success_table(run), "trained", "expert")


def test_without_validation(tmp_path):
    RunWriter(tmp_path).close()
    with pytest.raises(ValueError, match="unknown split 'val'; valid: none"):
        success_table(Run(tmp_path))
    with pytest.raises(ValueError, match="neither multiturn/success/mean nor"):
        learning_curve(Run(tmp_path), tmp_path / "curve.png")


def test_learning_curve(run, tmp_path):
    learning_curve(run, tmp_path / "curve.png")
    image = matplotlib.image.imread(tmp_path / "curve.png")[..., :3]
    assert image.shape == (675, 1200, 3)
    coloured = (image.max(axis=2) - image.min(axis=2)) > 0.3
    blue = coloured & (image[..., 2] > image[..., 0])
    assert blue.sum() > 1000 and (coloured & ~blue).sum() > 1000
    columns = blue.any(axis=0).nonzero()[0]
    assert columns.max() - columns.min() > 800  # the curve spans the picture


def test_the_audited_values_are_drawn(run, tmp_path):
    with pytest.raises(ValueError, match=r"no audited values: record some with multiturn\.audit\.every=N"):
        draw_audit(run, tmp_path / "values.png")
    turns = [{"index": 0, "value": 0.25}, {"index": 1, "value": None}, {"index": 2, "value": 1.0}]
    audit = {"returns": {"0": [0.0, 1.0], "1": [1.0, 1.0], "2": [0.5, 1.0]}}
    with RunWriter(tmp_path / "run") as writer:
        for step in (1, 5):
            record = {"env": "bandit", "audit": audit, "turns": turns}
            writer.trajectories("train", step, [record, {"env": "bandit", "turns": turns}])
    assert audited_points(run) == {step: [(0.5, 0.25), (0.75, 1.0)] for step in (1, 5)}
    draw_audit(run, tmp_path / "values.png")
    image = matplotlib.image.imread(tmp_path / "values.png")[..., :3]
    assert image.shape == (750, 900, 3)
    assert ((image.max(axis=2) - image.min(axis=2)) > 0.3).sum() > 200


def test_more_panels_have_rows_and_curves_of_their_own(tmp_path, panel):
    """They touch neither the run's own rows nor the panel's check."""
    of = {"val": {"split": "val", "panel": "val"}, "unseen": {"split": "val", "panel": "unseen"}}
    with RunWriter(tmp_path / "run", {}) as writer:
        for step, own, other in (
            (0, [False] * 4, [False, True]),
            (8, [True, True, False, False], [True] * 2),
        ):
            records = [one | of["val"] for one in validation(panel, own)]
            records += [
                one | of["unseen"] | {"task": f"far {n}"} for n, one in enumerate(validation(panel, other))
            ]
            writer.trajectories("val", step, records)
        for step in range(9):
            writer.metrics(step, {"multiturn/success/mean": 0.5})
    run = Run(tmp_path / "run")
    table = success_table(run, panel)
    assert table.index.tolist() == [
        "random", "expert", "warm start", "trained", "warm start, unseen", "trained, unseen"
    ]  # fmt: skip
    assert table.loc["trained", ["success", "n"]].tolist() == [0.5, 4]
    assert table.loc["warm start, unseen", ["success", "n"]].tolist() == [0.5, 2]
    assert table.loc["trained, unseen", "success"] == 1
    learning_curve(run, tmp_path / "curve.png")
    with RunWriter(tmp_path / "own") as writer:
        writer.trajectories("val", 8, [one | of["val"] for one in validation(panel, [True] * 4)])
    learning_curve(Run(tmp_path / "own"), tmp_path / "own.png")
    assert (tmp_path / "curve.png").read_bytes() != (tmp_path / "own.png").read_bytes()
