"""The papers' tables: data files, cells from recorded runs, paired differences, forms."""

import csv
import json
import math
from dataclasses import replace
from io import StringIO

import pytest
from typer.testing import CliRunner

from verl_multiturn.cli import app
from verl_multiturn.panel import Panel
from verl_multiturn.runs import RunWriter
from verl_multiturn.stats import mean_interval
from verl_multiturn.tables.cells import cells, differences, grouped
from verl_multiturn.tables.pairs import paired
from verl_multiturn.tables.published import FOLDER, Value, list_tables, load_table
from verl_multiturn.tables.recorded import read_runs
from verl_multiturn.tables.render import FORMATS, grids, render

CURVE = {0: [0, 0, 0, 0], 10: [1, 1, 1, 1], 20: [1, 0, 0, 0], 30: [1, 1, 0, 0]}


def made(table, folder, **more):
    chosen = load_table(table)
    groups = grouped(chosen, read_runs([folder]))
    return chosen, groups, cells(chosen, groups, **more)


def ours(frame):
    """Our cells, without the row of the start model, which every training run fills, too."""
    return frame[(frame["runs"] != "") & ~frame["method"].isin(["start", "SFT start"])].to_dict("records")


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_every_table_is_whole(name):
    table = load_table(name)
    assert table.title and table.source and table.evidence
    chosen, _, frame = table, [], cells(table, [])
    assert len(frame) == len(table.published) and (frame["runs"] == "").all()
    for form in FORMATS:
        text = render(chosen, frame, form=form)
        if table.published:
            assert next(iter(table.published.values())).text.partition("±")[0].lstrip("≈<> ") in text


def test_published_numbers():
    table = load_table("gigpo-main")
    value = table.published["Qwen2.5-1.5B-Instruct", "GiGPO w/o std", "Pick"]
    assert (value.mean, value.mark) == (96.0, "?") and "recalled" in table.marks["?"]
    assert table.published["Qwen2.5-7B-Instruct", "GiGPO w/ std", "All"] == Value("90.8±1.3", 90.8, "")
    search = load_table("gigpo-search").published  # the average is the mean of the seven
    sets = ("NQ", "TriviaQA", "PopQA", "Hotpot", "2Wiki", "MuSiQue", "Bamboogle")
    for model, method in {key[:2] for key in search if key[2] == "avg"}:
        mean = sum(search[model, method, one].mean for one in sets) / 7
        assert search[model, method, "avg"].mean == pytest.approx(
            mean, abs=0.2
        )  # Search-R1 at 7B is printed 0.14 above it
    assert Value.of("< 1000").mark == "<" and Value.of("≈0.19").mark == "≈" and Value.of(-14.1).mean == -14.1
    with pytest.raises(ValueError, match="'high' is not a published value"):
        Value.of("high")


def test_files_are_checked(tmp_path):
    def refused(text, match):
        (tmp_path / "mine.yaml").write_text(f"title: t\nsource: s\nevidence: e\n{text}")
        with pytest.raises(ValueError, match=match):
            load_table(str(tmp_path / "mine.yaml"))

    refused("coloms: []", r"unknown key in mine.yaml: 'coloms'.*Did you mean 'columns'")
    refused("columns: [{name: a, metrik: b}]", "unknown key in mine.yaml: columns 'metrik'.*'metric'")
    refused("columns: [{name: a, metric: sucess}]", "unknown metric of column 'a'.*'success'")
    body = "columns: [{name: a}]\nmethods: [{name: m}]\nmodels: {x: null}\n"
    refused(body + "published: {x: {m: [1, 2]}}", "x, m has 2 values, the table 1 columns")
    refused(body + "published: {y: {m: [1]}}", "unknown model in mine.yaml 'y'")
    refused(body + "published: {x: {n: [1]}}", "unknown method in mine.yaml 'n'")
    refused(body + "why: {mm: no}", "unknown name of why in mine.yaml 'mm'; valid: m, a, x")
    refused(body + "why: {m: {b: no}}", "unknown column of why 'm' in mine.yaml 'b'; valid: a")
    method = "columns: [{name: a}]\nmethods: [{name: m, %s}]\nmodels: {x: null}\n"
    refused(method % "recipes: {b: r}", "unknown name of recipes of method 'm' in mine.yaml 'b'; valid: a")
    refused(method % "models: [y]", "unknown name of models of method 'm' in mine.yaml 'y'; valid: x")
    refused(method % "by: n", "unknown name of by of method 'm' in mine.yaml 'n'; valid: m")
    refused(method % "statistic: peak", "unknown statistic in mine.yaml 'peak'; valid: best")
    refused(body + "published: {x: {m: [1 *]}}", r"unknown mark of x, m, a in mine.yaml '\*'")
    with pytest.raises(ValueError, match=r"unknown table 'gigpo'.*Did you mean 'gigpo-"):
        load_table("gigpo")


def test_three_statistics_over_seeds(tmp_path, panel, write):
    write(tmp_path / "a", panel, CURVE, seed=1)
    write(tmp_path / "b", panel, CURVE | {30: [1, 1, 1, 1]}, seed=2)
    write(tmp_path / "c", panel, CURVE | {30: [0, 0, 0, 0]}, seed=2)  # the same seed again: one vote for both
    write(tmp_path / "d", panel, CURVE, algorithm="rloo")  # no RLOO run of FrozenLake is called for
    _, groups, frame = made("vineppo-main", tmp_path, last=2)
    (row,) = [one for one in ours(frame) if one["method"] == "VinePPO"]
    assert (row["model"], row["column"], row["paper"]) == ("small", "FrozenLake", "")
    assert (row["best"], row["last"], row["n"], row["steps"]) == (100, 50, 2, "30")
    assert row["mean"] == pytest.approx(((25 + 50) / 2 + (62.5 + 12.5) / 2) / 2)
    assert row["last_high"] == pytest.approx(mean_interval([50, 50]).high)
    assert math.isnan(row["test"]) and row["n_test"] == 0
    assert row["panel"] == panel.fingerprint[:12]
    assert row["runs"] == "; ".join(str(tmp_path / name) for name in "abc")
    assert row["commit"] and "CPUs" in row["hardware"]
    assert sum(len(group.runs) for group in groups if group.method != "SFT start") == 4


def test_a_test_stands_beside_its_training(tmp_path, panel, write):
    other = Panel.build("frozen_lake", {}, range(5000, 6000), "test", n=4)
    for seed in (1, 2):
        write(tmp_path / f"s{seed}", panel, CURVE, seed=seed)
        write(tmp_path / f"s{seed}_test", other, {30: [1, 1, 1, 0]}, seed=seed, evaluated="runs/s1")
    _, groups, frame = made("vineppo-main", tmp_path)
    (row,) = ours(frame)
    assert (row["last"], row["test"], row["n"], row["n_test"]) == (50, 75, 2, 2)
    assert row["panel"] != row["test_panel"] and row["runs"].count(";") == 3
    assert [(group.method, group.evaluated) for group in groups] == [
        ("SFT start", False), ("VinePPO", False), ("VinePPO", True)
    ]  # fmt: skip


def test_panels_and_models_never_share_a_cell(tmp_path, panel, write):
    other = Panel.build("frozen_lake", {}, range(5000, 6000), "val", n=4)
    write(tmp_path / "a", panel, CURVE)
    write(tmp_path / "b", other, CURVE)
    write(tmp_path / "c", panel, CURVE, model="Qwen/Qwen2.5-0.5B-Instruct")
    _, _, frame = made("vineppo-main", tmp_path)
    assert [(row["model"], row["n"]) for row in ours(frame)] == [
        ("Qwen2.5-0.5B-Instruct", 1), ("small", 1), ("small", 1)
    ]  # fmt: skip


def test_only_the_papers_tasks_stand_in_its_cells(tmp_path, panel, write):
    """GiGPO's ALFWorld column is of the benchmark's games, whatever the model."""
    games = Panel("alfworld", {}, "val", panel.tasks)
    model, types = "Qwen/Qwen2.5-1.5B-Instruct", {"env": "alfworld", "gigpo": {"by_std": True}}
    for data in ("benchmark", "small"):
        settings = types | {"env_kwargs": {"data": data}}
        write(tmp_path / data, games, CURVE, algorithm="gigpo", model=model, **settings)
    _, _, frame = made("gigpo-main", tmp_path)
    (real, foreign) = [row for row in ours(frame) if row["column"] == "All"]
    assert (real["model"], real["paper"], real["last"]) == ("Qwen2.5-1.5B-Instruct", "86.7±1.7", 50)
    assert (foreign["model"], foreign["paper"]) == ("Qwen2.5-1.5B-Instruct, not the paper's tasks", "")


def test_a_model_has_several_names(tmp_path, panel, write):
    problems = Panel("arithmetic", {}, "val", panel.tasks)
    for name, more in (("a", {"file": "data/math"}), ("generated", {"file": None})):
        settings = {"env": "arithmetic", "env_kwargs": {"grade": "math"} | more}
        write(tmp_path / name, problems, CURVE, model="realtreetune/rho-1b-sft-MATH", **settings)
    _, _, frame = made("vineppo-main", tmp_path)
    row, foreign = ours(frame)
    assert foreign["model"] == "Rho-1.1B, not the paper's tasks" and foreign["paper"] == ""
    assert (row["model"], row["column"], row["paper"], row["last"]) == ("Rho-1.1B", "MATH", "23.0", 50)


def test_old_and_empty_runs(tmp_path, panel, write):
    run = write(tmp_path / "old", panel, CURVE)
    (run / "about.jsonl").unlink()
    (run / "panels/val.json").unlink()
    RunWriter(tmp_path / "empty", {"multiturn": {"algorithm": "vineppo", "env": "frozen_lake"}}).close()
    table, _, frame = made("vineppo-main", tmp_path)
    (row,) = ours(frame)
    assert (row["panel"], row["commit"], row["hardware"]) == ("", "", "")
    assert "commit" in render(table, frame)  # the column is there, and empty
    with pytest.raises(ValueError, match=r"no folder .*/nowhere"):
        read_runs([tmp_path / "nowhere"])


def test_trajectories_until_a_return(tmp_path, panel, write, trajectory):
    for seed, last in ((1, [-17, -17, -17, -17]), (2, [-18, -18, -18, -18])):
        folder = write(tmp_path / f"s{seed}", panel, {0: [0] * 4, 10: [0] * 4, 20: [0] * 4}, "archer", seed)
        with RunWriter(folder, None, resume_step=10) as writer:
            for step, value in ((10, -19), (20, last[0])):
                rows = [trajectory(task.id, False, **{"return": value}) for task in panel.tasks]
                writer.trajectories("val", step, rows)
            writer.metrics(20, {"multiturn/trajectories/mean": 7, "multiturn/turns/mean": 3})
        text = (folder / "config.yaml").read_text().replace("frozen_lake\n", "twenty_questions\n")
        (folder / "config.yaml").write_text(text)
    chosen = load_table("archer-online")
    one = cells(chosen, grouped(chosen, read_runs([tmp_path / "s1"])))
    rows = {row["column"]: row for row in ours(one)}
    assert rows["trajectories to -17"]["last"] == 12 and rows["return"]["last"] == -17
    run = grouped(chosen, read_runs([tmp_path / "s1"]))[0].runs[0]
    assert run.spent_until(replace(chosen.columns[0], metric="turns_to")) == 5 * 2 + 7 * 3
    both = cells(chosen, grouped(chosen, read_runs([tmp_path])))
    assert "not reached" in render(chosen, both)


def test_a_paired_difference():
    a = {"x": [1, 1], "y": [1], "z": [0], "only a": [0]}
    b = {"x": [0], "y": [1, 0], "z": [0, 0, 0], "only b": [1]}
    found = paired(a, b, resamples=2000)
    assert found.tasks == 3 and found.difference == pytest.approx((1 + 0.5 + 0) / 3)
    assert found.low <= found.difference <= found.high
    assert paired(b, a, resamples=2000).difference == -found.difference
    assert paired(a, dict(reversed(a.items())), resamples=100)[:3] == (0, 0, 0)
    with pytest.raises(ValueError, match="no task was played by both: 1 and 1 tasks, the first are p, q"):
        paired({"p": [1]}, {"q": [1]})


def test_methods_are_paired_on_one_panel(tmp_path, panel, write):
    write(tmp_path / "vine", panel, CURVE)
    write(tmp_path / "grpo", panel, CURVE | {30: [0, 1, 0, 0]}, algorithm="grpo")
    other = Panel.build("frozen_lake", {}, range(5000, 6000), "val", n=4)
    write(tmp_path / "far", other, CURVE, algorithm="rloo")
    _, groups, _ = made("vineppo-main", tmp_path)
    start, row = differences(groups, "GRPO", resamples=500).to_dict("records")
    assert (start["method"], start["difference"]) == ("SFT start", -25)
    assert (row["method"], row["difference"], row["tasks"]) == ("VinePPO", 25, 4)
    assert row["panel"] == panel.fingerprint[:12]
    with pytest.raises(
        ValueError, match="unknown method with recorded runs 'PPO'; valid: SFT start, GRPO, RLOO, VinePPO"
    ):
        differences(groups, "PPO")


def call(*arguments, code=0):
    result = CliRunner().invoke(app, ["table", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command(tmp_path, panel, write):
    write(tmp_path / "runs/vine", panel, CURVE)
    write(tmp_path / "runs/grpo", panel, CURVE | {30: [0, 1, 0, 0]}, algorithm="grpo")
    assert all(name in call() for name in list_tables())
    text = call("vineppo-main", "--root", tmp_path / "runs", "--runs", "--against", "GRPO")
    assert "ours 50.0" in text and str(tmp_path / "runs/vine") in text and "+25.0" in text
    assert "ours 100.0" in call("vineppo-main", tmp_path / "runs/vine", "--stat", "best")
    rows = list(csv.DictReader(StringIO(call("vineppo-main", tmp_path / "runs", "--format", "csv"))))
    (vine,) = [row for row in rows if row["method"] == "VinePPO" and row["runs"]]
    assert (vine["last"], vine["paper"]) == ("50.0", "")
    assert [row["last"] for row in rows if row["paper"] == "53.4"] == [""]
    out = tmp_path / "table.md"
    call("vineppo-main", tmp_path / "runs", "--format", "markdown", "--out", out)
    assert "| VinePPO" in out.read_text()
    assert r"\toprule" in call("vineppo-main", "--format", "latex")
    assert "unknown format 'html'" in call("vineppo-main", "--format", "html", code=2)
    assert "unknown statistic 'worst'" in call("vineppo-main", "--stat", "worst", code=2)
    assert "unknown table" in call("vine", code=2)


def test_every_cell_can_be_traced(tmp_path, panel, write):
    """What CSV says of a cell leads to run folders whose records give its number."""
    for seed in (1, 2):
        write(tmp_path / f"s{seed}", panel, CURVE, seed=seed)
    rows = csv.DictReader(StringIO(call("vineppo-main", tmp_path, "--format", "csv")))
    start, row = [one for one in rows if one["runs"]]
    assert (start["method"], start["last"], start["steps"]) == ("SFT start", "0.0", "0")
    numbers = []
    for folder in row["runs"].split("; "):
        (run,) = read_runs([folder])
        numbers += [100 * sum(one["success"] for one in run.run.trajectories("val", 30)) / 4]
        about = json.loads((run.run.folder / "about.jsonl").read_text())
        assert about["commit"] == row["commit"]
    assert float(row["last"]) == sum(numbers) / 2


def test_every_table_has_its_baselines(tmp_path, panel, write):
    """Random, expert and start, of records: beside the models that played the same panel."""
    other = Panel.build("frozen_lake", {}, range(5000, 6000), "val", n=4)
    write(tmp_path / "vine", panel, CURVE | {0: [0, 1, 0, 0]})
    write(tmp_path / "far", other, CURVE, model="Qwen/Qwen2.5-0.5B-Instruct")
    for seed, won in ((1, [0, 0, 0, 0]), (2, [1, 1, 0, 0])):
        write(tmp_path / f"random{seed}", panel, {0: won}, seed=seed, evaluated="random")
    write(tmp_path / "expert", panel, {0: [1, 1, 1, 1]}, evaluated="expert")
    table, groups, frame = made("vineppo-main", tmp_path)
    rows = {(row["model"], row["method"]): row for row in frame[frame["runs"] != ""].to_dict("records")}
    assert rows["no model", "random"]["test"] == 25 and rows["no model", "random"]["n_test"] == 2
    assert rows["small", "SFT start"]["last"] == 25 and ("no model", "SFT start") not in rows
    blocks = grids(table, frame, None)
    assert [*blocks["small"].index] == ["random", "expert", "SFT start", "VinePPO"]
    assert blocks["small"]["FrozenLake"].tolist() == [
        "ours 25.0 ± 317.7",
        "ours 100.0",
        "ours 25.0",
        "ours 50.0",
    ]
    assert [*blocks["Qwen2.5-0.5B-Instruct"].index] == ["SFT start", "VinePPO"] and "no model" not in blocks
    against = differences(groups, "random", resamples=100)
    assert not len(against[against["kind"] == "validation"])  # an evaluation is not compared with validations
    alone = frame[frame["model"] == "no model"]
    assert [*grids(table, alone, None)["no model"].index] == ["random", "expert"]


def test_a_row_may_report_another_statistic(tmp_path, panel, write):
    test = Panel.build("frozen_lake", {}, range(5000, 6000), "test", n=4)
    settings = {"row": "trajectory", "max_turns": 10, "small_model": {"seed": 1}}
    write(tmp_path / "a", panel, CURVE, algorithm="grpo", **settings)
    write(tmp_path / "a_test", test, {30: [1, 1, 1, 0]}, algorithm="grpo", evaluated="runs/a", **settings)
    write(tmp_path / "random", test, {0: [0, 0, 1, 0]}, algorithm="grpo", evaluated="random", **settings)
    table, groups, frame = made("compare", tmp_path)
    block = grids(table, frame, None)["small"]["FrozenLake"]
    assert block.to_dict() == {"random": "ours 25.0", "start": "ours 0.0", "GRPO": "ours 75.0"}
    assert "Ours: test (start: last), mean" in render(table, frame)
    found = differences(groups, "random", resamples=100).set_index(["kind", "method"])
    assert found.loc[("test", "GRPO"), "difference"] == 50
    write(tmp_path / "only_test", test, {30: [1, 0, 0, 0]}, algorithm="rloo", evaluated="runs/b")
    table, _, frame = made("vineppo-main", tmp_path)
    assert "ours 25.0 (test)" in grids(table, frame, None)["small"].loc["RLOO"].tolist()


def test_a_generated_world_never_stands_in_the_papers_cell(tmp_path, panel, write):
    questions, model = Panel("hotpotqa", {}, "test", panel.tasks), "microsoft/Phi-3-mini-4k-instruct"
    for data in (None, "hotpot_train_v1.1.json"):
        folder = write(
            tmp_path / str(data), questions, {0: [1, 0, 0, 0]}, "qvalue", model=model, evaluated=model,
            env="hotpotqa", env_kwargs={"data": data},
        )  # fmt: skip
        text = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(text.replace("eval:\n", "eval:\n  select: argmax\n"))
    table, _, frame = made("qvalue-main", tmp_path)
    paper, generated = ours(frame)
    assert (paper["model"], paper["paper"], paper["test"]) == ("Phi-3-mini-4k-instruct", "0.35 ?", 0.25)
    assert generated["model"] == "Phi-3-mini-4k-instruct, not the paper's tasks" and generated["paper"] == ""
    assert (
        grids(table, frame, None)["Phi-3-mini-4k-instruct"].loc["Q-guided", "HotPotQA"] == "0.35 ? | ours 0.2"
    )
