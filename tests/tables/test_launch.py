"""The runs that a table lacks, and the same runs at equal cost."""

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import pytest
import yaml
from typer.testing import CliRunner

from verl_multiturn.cli import app
from verl_multiturn.recipes_index import list_recipes
from verl_multiturn.runs import Run, RunWriter
from verl_multiturn.search.tree_files import TreeFolder
from verl_multiturn.tables import wanted as wanted_runs
from verl_multiturn.tables.budget import draw, equal, outside, spent
from verl_multiturn.tables.cells import grouped
from verl_multiturn.tables.lacking import lacking
from verl_multiturn.tables.launch import launch, plan
from verl_multiturn.tables.published import FOLDER, load_table
from verl_multiturn.tables.recorded import read_runs
from verl_multiturn.tables.wanted import Job, Wanted, finished, jobs, models, slots

ROOT = Path(__file__).parents[2]
CURVE = {0: [0, 0, 0, 0], 10: [1, 0, 0, 0], 20: [1, 1, 0, 0]}
TABLE = """
title: t
source: s
evidence: e
columns: [{name: FrozenLake, env: frozen_lake}]
methods:
  - {name: VinePPO, where: {multiturn.algorithm: vineppo}, recipes: {frozen_lake: vineppo_frozenlake}}
  - {name: New, where: {multiturn.algorithm: new}, recipes: {frozen_lake: new_frozenlake}}
suite: {common: [hardware=cpu, trainer.total_training_steps=20], test: {frozen_lake: frozen_lake-test},
        start: 10, after: 5, step: {frozen_lake: {VinePPO: 3}}}
"""


@pytest.fixture
def table(tmp_path):
    (tmp_path / "mine.yaml").write_text(TABLE)
    return load_table(str(tmp_path / "mine.yaml"))


def test_what_is_recorded_is_not_run_again(tmp_path, panel, write, table):
    root = tmp_path / "runs"
    write(root / "one", panel, CURVE, seed=1)
    write(root / "one_test", panel, {20: [1, 1, 1, 0]}, seed=1, evaluated="runs/one")
    write(root / "half", panel, CURVE, seed=2)
    config = yaml.safe_load((root / "half/config.yaml").read_text())
    config["trainer"]["total_training_steps"] = 30  # another run than the one wanted
    (root / "half/config.yaml").write_text(yaml.safe_dump(config))
    runs = read_runs([root])
    assert [finished(run) for run in runs] == [False, True, False]
    found = jobs(table, runs, Wanted(root, [1, 2]))
    state = {job.name: (job.done, bool(job.command)) for job in found}
    assert state == {
        "VinePPO, frozen_lake, seed 1, small": (True, True),
        "VinePPO, frozen_lake, seed 1, small, test": (True, True),
        "New, frozen_lake, seed 1, small": (False, False),
        "VinePPO, frozen_lake, seed 2, small": (False, True),
        "VinePPO, frozen_lake, seed 2, small, test": (False, True),
        "New, frozen_lake, seed 2, small": (False, False),
    }
    lines = plan(found)
    assert lines[0] == "# 2 of 6 are recorded"
    assert any("no recipe new_frozenlake in this checkout" in line for line in lines)
    (train,) = [line for line in lines if line.startswith("bash")]
    words = shlex.split(train)
    assert Path(words[1]) == ROOT / "recipes/vineppo_frozenlake.sh" and "hardware=cpu" in words
    assert words[-2:] == ["multiturn.seed=2", f"multiturn.run={root}/small/frozen-lake_vineppo_seed2"]
    # 10 s to start and 20 steps of 2 s, as recorded (the file says 3), and 5 s of test.
    assert lines[-1] == "# missing: 2 commands, about 0.0 hours"
    assert [job.seconds for job in found if not job.done and job.command] == [10 + 20 * 2, 5]
    assert [job.seconds for job in jobs(table, [], Wanted(root, [1]))] == [10 + 20 * 3, 5, None]


def test_a_recipe_that_evaluates_is_done_when_it_did(tmp_path, panel, write):
    more = {"algorithm": "qvalue", "evaluated": "small", "seed": 3}
    guided = write(tmp_path / "eval/argmax", panel, {0: [1, 1, 1, 0]}, **more)
    plain = write(tmp_path / "eval/greedy", panel, {0: [1, 0, 0, 0]}, **more)
    for folder, rule in ((guided, "argmax"), (plain, "greedy")):
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["eval"]["select"] = rule
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    method = {"name": "Q-guided", "trained": False, "recipes": {"frozen_lake": "grpo_frozenlake"}}
    method["where"] = {"multiturn.algorithm": "qvalue", "eval.select": "argmax"}
    file = yaml.safe_load(TABLE) | {"methods": [method]}
    (tmp_path / "q.yaml").write_text(yaml.safe_dump(file | {"suite": {"common": ["hardware=cpu"]}}))
    table, runs = load_table(str(tmp_path / "q.yaml")), read_runs([tmp_path / "eval"])
    (group,) = grouped(table, runs)
    assert [run.id for run in group.runs] == [str(guided)]
    assert [job.done for job in jobs(table, runs, Wanted(tmp_path, [3, 4]))] == [True, False]


def test_commands_run_one_after_another(tmp_path):
    def job(name, code, seconds=1.0, done=False):
        command = (sys.executable, "-c", f"open({str(tmp_path / name)!r}, 'x'); raise SystemExit({code})")
        return Job(name, command, tmp_path / name, done, seconds, "")

    told = []
    found = [job("a", 0), job("b", 3), job("c", 0), job("d", 0, done=True), job("e", 0, seconds=9e9)]
    lost = launch(found, told.append, hours=1)
    assert [one.name for one in lost] == ["b", "e"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a", "b", "c"]
    assert told[2] == "b failed with exit code 3" and told[-1].startswith("no time for e: ")


def test_an_unknown_length_never_counts_as_nothing(tmp_path):
    def job(name, seconds):
        command = (sys.executable, "-c", f"open({str(tmp_path / name)!r}, 'x')")
        return Job(name, command, tmp_path / name, False, seconds, "file")

    some, none = [job("a", 1800.0), job("b", None)], [job("c", None)]
    assert plan(some)[-1] == (
        "# missing: 2 commands, about 1.0 hours, 1 of unknown length counted as the longest, 1800 s"
    )
    assert plan(none)[-1] == "# missing: 1 commands, hours unknown: none of them was timed"
    told = []
    assert [one.name for one in launch(some, told.append, hours=0.4)] == ["a", "b"]
    assert [one.name for one in launch(none, told.append, hours=9)] == ["c"]
    assert told[1].endswith("it takes about 1800 s") and told[2].endswith("how long it takes is not known")
    assert launch(none, told.append) == [] and (tmp_path / "c").exists()


def test_a_killed_test_is_put_aside(tmp_path):
    folder = tmp_path / "run_test"
    folder.mkdir()
    command = ("verl-multiturn", "eval", str(tmp_path / "nowhere"), "--out", str(folder))
    (lost,) = launch([Job("t", command, folder, False, None, "")], lambda line: None)
    assert lost.name == "t" and not folder.exists() and (tmp_path / "run_test.stopped1").is_dir()


def test_the_command_prints_commands(tmp_path):
    result = CliRunner().invoke(
        app, ["table", "gigpo-main", "--launch", "--root", str(tmp_path), "--seeds", "7"]
    )
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    commands = [shlex.split(line) for line in lines if not line.startswith("#")]
    assert len(commands) == 2 * 2 * 5  # models, environments, methods with a recipe
    assert all(words[0] == "bash" and Path(words[1]).is_file() for words in commands)
    assert sum("actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct" in words for words in commands) == 10
    for words, match in (
        (["--launch=now"], "unknown value of --launch 'now'"),
        (["--launch", "--seeds", "a"], "--seeds 'a' is not a list of numbers"),
    ):
        result = CliRunner().invoke(app, ["table", "gigpo-main", *words])
        assert result.exit_code == 2 and match in result.output


@pytest.fixture(scope="module")
def known():
    return list_recipes()


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_recipes_that_tables_name_are_of_their_environment(name, known):
    table = load_table(name)
    envs = {column.name: column.env for column in table.columns}
    for method in table.methods:
        for place, recipe in method.recipes.items():
            assert known[recipe]["environment"] == envs.get(place, place), recipe


@pytest.mark.parametrize("hardware", [None, "cpu"])
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_every_empty_cell_has_a_command_or_a_reason(name, hardware, known, monkeypatch):
    monkeypatch.setattr(wanted_runs, "list_recipes", lambda: known)  # read once: it takes a second
    table, wanted = load_table(name), Wanted(seeds=[1], hardware=hardware)
    reasons = [line.partition(": ")[0] for line in lacking(table, [], wanted)]
    made = {slot.method.name for model in models(table, wanted) for slot in slots(table, model, wanted)}
    for method in table.methods:
        if not method.start and method.by not in made:
            assert method.name in made or method.name in reasons, method.name
    folders = [job.folder for job in jobs(table, [], wanted)]
    assert len(set(folders)) == len(folders)  # no two runs are recorded in one place


def test_columns_are_launched_with_their_own_settings(tmp_path):
    """Columns of one environment with other settings are other runs; what one run fills is launched once."""
    found = {job.name: job.command for job in jobs(load_table("starpo-main"), [], Wanted(tmp_path, [1]))}
    larger = found["StarPO-S, Larger, seed 1, Qwen2.5-0.5B-Instruct"]
    assert {"multiturn.env_kwargs.size=8", "multiturn.env_kwargs.boxes=2", "multiturn.test=null"} <= {*larger}
    assert "multiturn.env_kwargs.misleading=true" in found["StarPO, BanditRev, seed 1, Qwen2.5-0.5B-Instruct"]
    assert not any("env_kwargs" in word for word in found["StarPO, Sokoban, seed 1, Qwen2.5-0.5B-Instruct"])
    found = {job.name: job.command for job in jobs(load_table("vineppo-main"), [], Wanted(tmp_path, [1]))}
    rho, deep = (found[f"PPO, MATH, seed 1, {model}"] for model in ("Rho-1.1B", "DeepSeekMath-7B"))
    assert Path(rho[1]).stem == "ppo_math" and not any(
        "model.path" in word for word in rho
    )  # the recipe's own
    assert "actor_rollout_ref.model.path=realtreetune/deepseekmath-7b-sft-MATH-v2" in deep
    assert "VinePPO, frozen_lake, seed 1, the recipe's own model" in found
    assert "RLOO, GSM8K, seed 1, Rho-1.1B" in found and "PPO, frozen_lake, seed 1, Rho-1.1B" not in found


def test_rows_of_one_block_differ_in_what_they_name():
    """RAGEN-2's rows are one recipe, with the filter or without; so are the shares kept of version 1."""
    table = load_table("starpo-filter")
    by_name = {method.name: method for method in table.methods}
    nucleus = ("strategy=top_p", "value=0.9", "mass=softmax", "include_zero=true")
    for name in ("PPO", "GRPO", "Dr.GRPO"):
        plain, filtered = by_name[name], by_name[f"{name}, filter"]
        assert plain.recipes == filtered.recipes == by_name["PPO"].recipes
        assert filtered.set == (*plain.set, *(f"multiturn.filter.{one}" for one in nucleus))
    shares = {
        one.name: {*one.set} for one in load_table("starpo-keep").methods if one.name.startswith("keep")
    }
    assert shares.pop("keep 100 %") == set()
    assert {len(one ^ other) for one in shares.values() for other in shares.values()} == {0, 2}


def test_the_block_of_ragen2_is_as_the_paper_has_it():
    pytest.importorskip("verl")
    from verl_multiturn.compose import compose
    from verl_multiturn.configure import prepare
    from verl_multiturn.tables.recorded import Recorded, fits

    table = load_table("starpo-filter")
    method = next(one for one in table.methods if one.name == "GRPO, filter")
    config = prepare(compose("starpo_sokoban", list(method.set)))
    assert config.multiturn.filter.mass == "softmax" and config.multiturn.filter.include_zero
    assert config.multiturn.action.max_actions == 2 and config.trainer.total_training_steps == 400
    actor = config.actor_rollout_ref.actor
    assert (actor.use_kl_loss, actor.clip_ratio_low, actor.clip_ratio_high) == (False, 0.2, 0.28)

    run = Recorded("made", SimpleNamespace(config=config))  # what a run of this command records
    assert fits(run, method.where)
    others = [one.name for one in table.methods if one.trained and one.where and fits(run, one.where)]
    assert others == ["GRPO, filter"]


def test_the_suite_starts_every_method_from_one_model():
    """Same demonstrations, prompts and sizes: the warm start of a seed-free plan is one folder."""
    pytest.importorskip("verl")
    from verl_multiturn.compose import compose
    from verl_multiturn.configure import prepare
    from verl_multiturn.demonstrations import Plan

    found = jobs(load_table("compare"), [], Wanted(Path("runs"), [3]))
    families = ("GRPO", "StarPO-S", "VinePPO")  # each on another base of recipes
    chosen = [job for job in found if job.name.startswith(tuple(f"{one}, sokoban" for one in families))]
    chosen = [job for job in chosen if job.command[0] == "bash"]
    assert len(chosen) == 3
    plans = []
    for job in chosen:
        config = prepare(compose(Path(job.command[1]).stem, list(job.command[2:])))
        plans.append(Plan.of(config))
        assert config.data.train_batch_size == 8 and config.multiturn.max_turns == 10
        assert config.multiturn.val == "sokoban-val"  # the test panel is kept for the end
    assert all(one == plans[0] for one in plans[1:])


def test_what_a_run_spent(tmp_path, panel, write):
    folder = write(tmp_path / "a", panel, CURVE)
    with RunWriter(folder, None, resume_step=20) as writer:
        writer.metrics(20, {"multiturn/vine_turns/mean": 4.0, "multiturn/vine_tokens/mean": 10.0})
    costs = spent(Run(folder))
    assert costs.index.tolist() == [0, 10, 20]
    # 5 trajectories of 2 turns with 3 tokens a step; at step 20 continuations of 5 x 4 turns as well
    assert costs["env_steps"].tolist() == [0, 10, 20 + 20]
    assert costs["tokens"].tolist() == [0, 30, 60 + 50]
    with RunWriter(folder, None, resume_step=20) as writer:
        writer.metrics(20, {"multiturn/archer/asked_tokens/mean": 7.0})
    assert spent(Run(folder))["tokens"].tolist() == [0, 30, 60 + 50 + 7]


def test_methods_at_equal_cost(tmp_path, panel, write):
    write(tmp_path / "grpo", panel, CURVE, algorithm="grpo")
    vine = write(tmp_path / "vine", panel, CURVE, algorithm="vineppo")
    with RunWriter(vine, None, resume_step=20) as writer:
        for step in (10, 20):
            writer.metrics(step, {"multiturn/vine_turns/mean": 1.0, "multiturn/vine_tokens/mean": 60.0})
    groups = grouped(load_table("vineppo-main"), read_runs([tmp_path]))
    rows = equal(groups).set_index(["by", "method"])
    steps, tokens = "environment steps", "generated tokens"
    assert rows.loc[(steps, "GRPO"), "budget"] == 20 and rows.loc[(tokens, "GRPO"), "budget"] == 60
    assert rows.loc[(steps, "GRPO"), "value"] == rows.loc[(tokens, "GRPO"), "value"] == 50
    assert rows.loc[(steps, "VinePPO"), "value"] == 25  # 15 steps at its first validation, 30 at the second
    assert rows.loc[(tokens, "VinePPO"), "value"] == 0  # 330 tokens at the first
    draw(groups, tmp_path / "curves.png")
    image = matplotlib.image.imread(tmp_path / "curves.png")[..., :3]
    assert ((image.max(axis=2) - image.min(axis=2)) > 0.3).sum() > 1000
    with pytest.raises(ValueError, match="no training run of this table was recorded"):
        draw([], tmp_path / "none.png")


def test_what_has_no_place_at_equal_cost_is_said(tmp_path, panel, write, trajectory):
    settings = {"row": "trajectory", "max_turns": 10, "small_model": {"seed": 1}}
    write(tmp_path / "grpo", panel, CURVE, algorithm="grpo", **settings)
    guided = write(
        tmp_path / "q/eval/argmax", panel, {0: [1, 1, 1, 0]}, "qvalue", evaluated="small", **settings
    )
    config = yaml.safe_load((guided / "config.yaml").read_text())
    config["eval"] |= {"select": "argmax", "q_model": "runs/elsewhere/q/q_model"}
    (guided / "config.yaml").write_text(yaml.safe_dump(config))
    with RunWriter(guided, None, resume_step=0) as writer:
        rows = [trajectory(task.id, True, cost={"tokens": 58}) for task in panel.tasks]
        writer.trajectories("eval", 0, rows)
    with TreeFolder(tmp_path / "q/trees", {}, {}) as trees:
        for task in range(2):
            trees.append({"task": task, "env_steps": 700, "tokens": 2000})
    table, runs = load_table("compare"), read_runs([tmp_path])
    groups = grouped(table, runs)
    assert set(equal(groups)["method"]) == {"GRPO"}
    (line,) = outside(groups)
    assert line.startswith("Not at equal cost: Q-guided, FrozenLake, small: it is evaluated once")
    assert "trees took 1,400 environment steps and 4,000 generated tokens (mean of 1 runs)" in line
    assert line.endswith("an episode of the evaluation 58 generated tokens.")
    words = ["table", "compare", str(tmp_path), "--equal"]
    assert line in " ".join(CliRunner().invoke(app, words).output.split())
