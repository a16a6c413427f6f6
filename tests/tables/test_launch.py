"""The runs that a table lacks, and the same runs at equal cost."""

import shlex
import sys
from pathlib import Path

import matplotlib.image
import pytest
import yaml
from typer.testing import CliRunner

from verl_multiturn.cli import app
from verl_multiturn.recipes_index import list_recipes
from verl_multiturn.runs import Run, RunWriter
from verl_multiturn.tables.budget import draw, equal, spent
from verl_multiturn.tables.cells import grouped
from verl_multiturn.tables.launch import Job, Wanted, finished, jobs, launch, plan
from verl_multiturn.tables.published import FOLDER, load_table
from verl_multiturn.tables.recorded import read_runs

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


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_recipes_that_tables_name_are_of_their_environment(name):
    known = list_recipes()
    for method in load_table(name).methods:
        for env, recipe in method.recipes.items():
            if recipe in known:
                assert known[recipe]["environment"] == env, recipe


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
