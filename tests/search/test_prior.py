"""A Q model as the prior of the next search: from the command, in a collection, in the stages of a run."""

import numpy as np
import pytest
from typer.testing import CliRunner

from verl_multiturn.cli import app
from verl_multiturn.play_settings import settings
from verl_multiturn.search.collect import Collection
from verl_multiturn.search.pipeline import Pipeline
from verl_multiturn.search.prior import prior_rule
from verl_multiturn.search.q_model import load_q_model
from verl_multiturn.search.scripted import Scripted
from verl_multiturn.search.step_value import ModelValue
from verl_multiturn.search.tree_files import about_of, read_trees
from verl_multiturn.tasks import training_tasks

pytest.importorskip("verl")

CALL = ["search", "--env", "frozen_lake", "--model", "random", "--limit", "2"]
SMALL = ["multiturn.search.iterations=8", "multiturn.search.width=3"]


def inner(root):
    """Nodes with candidates."""
    found = [root] if root["children"] else []
    return [*found, *(node for child in root["children"] for node in inner(child))]


def call(*arguments, code=0):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_the_command_takes_a_q_model(q_folder, tmp_path):
    call(
        *CALL,
        *SMALL,
        "multiturn.search.prior_temperature=0.5",
        "--q-model",
        q_folder,
        "--out",
        tmp_path / "a",
    )
    about, score, shares = about_of(tmp_path / "a"), load_q_model(q_folder), []
    assert (about["prior"], about["q_model"]) == ("puct", str(q_folder))
    nodes = [node for tree in read_trees(tmp_path / "a") for node in inner(tree["root"])]
    assert len(nodes) > 3
    for node in nodes:
        Q = np.array(score(node["messages"], [child["text"] for child in node["children"]]))
        share = np.exp(Q / 0.5) / np.exp(Q / 0.5).sum()
        assert [child["prior"] for child in node["children"]] == pytest.approx(share, abs=1e-4)
        shares += share.tolist()
    assert np.std([one for one in shares if one < 1]) > 0.01, "this Q model has an opinion"
    said = call(*CALL, *SMALL, "--out", tmp_path / "a", code=2)
    assert "holds trees of another search: prior was 'puct'" in " ".join(said.split())


def test_the_prior_decides_where_a_search_goes(tmp_path):
    """Nothing but the prior tells moves apart where no rollout can succeed."""

    def likes(move):
        return ModelValue(lambda prompt, answers: [float(move in one) for one in answers])

    keys = ("max_turns=1", "search.prior=puct", "search.prior_temperature=0.1", "search.revisit_closed=true")
    config = settings("frozen_lake", overrides=[*SMALL, *(f"multiturn.{key}" for key in keys)])
    panel, most = training_tasks(config.multiturn, 4), {}
    for move in ("down", "left"):
        folder = tmp_path / move
        Collection(config, panel, Scripted(1.0), "random", folder, seed=3, value=likes(move)).run()
        for tree in read_trees(folder):
            found = {child["action"]: child["N"] for child in tree["root"]["children"]}
            if move in found:
                most[move, tree["task"]] = max(found, key=found.get)
    assert len(most) > 3 and all(best == move for (move, _), best in most.items())


def test_what_contradicts_is_refused_before_a_model_is_loaded(q_folder, tmp_path):
    for arguments, said in (
        (["multiturn.search.prior=puct"], "multiturn.search.prior=puct needs the values of a Q model"),
        (["--q-model", tmp_path], "holds no Q model: fit one with verl-multiturn fit-q"),
        (
            ["multiturn.search.prior=none", "--q-model", q_folder],
            "multiturn.search.prior=none leaves --q-model",
        ),
    ):
        out = " ".join(call(*CALL, "--out", tmp_path / "none", *arguments, code=2).split())
        assert said in out and not (tmp_path / "none").exists()
    assert prior_rule({"prior": None}, None, "x") is None
    assert prior_rule({"prior": "visits"}, str(q_folder), "x") == "visits"


def test_the_stages_of_a_run_take_the_q_model_of_an_earlier_one(q_folder, tmp_path):
    keys = ["multiturn.qvalue.tasks=2", f"multiturn.qvalue.prior={q_folder}", "multiturn.search.prior=puct"]
    config = settings("frozen_lake", overrides=[*SMALL, *keys, f"multiturn.run={tmp_path / 'run'}"])
    config.actor_rollout_ref.model.path = "http://nowhere/v1#agent"
    pipeline = Pipeline(config, lambda line: None)
    pipeline._model = lambda sampling: Scripted(1.0)
    pipeline._search()
    assert about_of(tmp_path / "run" / "trees")["q_model"] == str(q_folder)
    nodes = [node for tree in read_trees(tmp_path / "run" / "trees") for node in inner(tree["root"])]
    assert all(sum(child["prior"] for child in node["children"]) == pytest.approx(1) for node in nodes)
