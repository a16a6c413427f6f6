"""All stages of a Q model in one run: what each leaves, what is not done twice, what is refused."""

import json
from shutil import rmtree

import pandas as pd
import pytest
from omegaconf import OmegaConf

from verl_multiturn.play_settings import settings
from verl_multiturn.rollout.pool import EnvironmentFailure
from verl_multiturn.runs import Run
from verl_multiturn.search.branches import Branches
from verl_multiturn.search.pipeline import Pipeline

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("verl")

MOVES = ("up", "down", "left", "right")
SMALL = (
    *(f"multiturn.prompt.{name}='{{observation}}'" for name in ("first", "turn", "next")),
    *("multiturn.prompt.history=0", "multiturn.prompt.format=''", "multiturn.row=turn"),
    *("multiturn.action.tag=null", "multiturn.action.think=false", "multiturn.max_action_tokens=1"),
    *("multiturn.algorithm=qvalue", "multiturn.val=null", "multiturn.test={first_seed: 0, size: 6}"),
    "multiturn.train={first_seed: 1000000, size: 64}",
    *("multiturn.search.iterations=16", "multiturn.search.width=4", "multiturn.pairs.held_out=0.4"),
    *(
        "multiturn.fit.lr=1e-3",
        "multiturn.fit.epochs=4",
        "multiturn.fit.batch=8",
        "multiturn.fit.evaluations=2",
    ),
    *("multiturn.qvalue.tasks=12", "multiturn.qvalue.n=3"),
)


@pytest.fixture(scope="module")
def walker(tmp_path_factory):
    """A model that knows the four moves and reads a map letter by letter; it walks at random."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PhiConfig, PhiForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<end>", "?", *MOVES, *"P_OG0123", "user", "assistant"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <end> ' }}{% endfor %}assistant"
    folder = tmp_path_factory.mktemp("models") / "walker"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", chat_template=template
    ).save_pretrained(folder)
    torch.manual_seed(1)
    config = PhiConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = PhiForCausalLM(config)
    model.lm_head.bias.data[[words.index(move) for move in MOVES]] = 3.0  # 87 % of what it says
    model.save_pretrained(folder)
    return folder


def config_of(walker, run, *more):
    lake = {"size": 3, "min_distance": 1, "max_distance": 2}
    config = settings("frozen_lake", lake, overrides=[*SMALL, f"multiturn.run={run}", *more])
    config.actor_rollout_ref.model.path = str(walker)
    config.data.max_prompt_length = 60
    return config


@pytest.fixture(scope="module")
def done(walker, tmp_path_factory):
    run, said = tmp_path_factory.mktemp("runs") / "whole", []
    table = Pipeline(config_of(walker, run), said.append).run()
    return run, table, said


def test_a_run_leaves_all_it_made(done, walker):
    run, table, said = done
    assert list(table.index) == [
        "greedy",
        "majority of 3",
        "random of 3",
        "Q-guided best of 3",
        "oracle of 3",
    ]
    assert (table["n"] == 6).all() and table.loc["greedy", "calls"] == table.loc["greedy", "turns"]
    assert table.loc["oracle of 3", "success"] == table["success"].max()
    assert pd.read_csv(run / "table.csv", index_col="rule").shape == table.shape
    assert len(Run(run / "eval" / "argmax").trajectories("eval", 0)) == 6
    pairs = [json.loads(line) for line in (run / "pairs.jsonl").read_text().splitlines()]
    assert {pair["split"] for pair in pairs} == {"train", "held_out"}
    spec = json.loads((run / "q_model" / "q_model.json").read_text())
    assert spec["reference"] == str(walker) and spec["beta"] == 0.1
    assert OmegaConf.load(run / "config.yaml").multiturn.qvalue.tasks == 12
    assert [line.partition(":")[0] for line in said if line[:6] in ("search", "pairs:", "fit: f")] == [
        "search", "pairs", "fit",
    ]  # fmt: skip


def test_nothing_is_done_twice(done, walker):
    run, table, _ = done
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name not in ("config.yaml",)}
    said = []
    again = Pipeline(config_of(walker, run), said.append).run()
    rules = ("greedy", "majority", "random", "argmax", "oracle")
    stages = ("search", "pairs", "fit", *(f"eval {rule}" for rule in rules))
    assert said == [f"{stage}: done before" for stage in stages]
    pd.testing.assert_frame_equal(table, again)
    after = {path: path.stat().st_mtime_ns for path in before}
    assert {path.name for path in before if before[path] != after[path]} <= {"table.csv", run.name}


def test_a_stage_that_was_cut_off_is_done_again(done, walker):
    """What is not marked as finished is made anew, or read where only the mark is missing."""
    run, table, _ = done
    marks = json.loads((run / "stages.json").read_text())
    for how in ("reading", "recording to"):
        (run / "stages.json").write_text(json.dumps({k: v for k, v in marks.items() if k != "eval argmax"}))
        if how == "recording to":
            rmtree(run / "eval" / "argmax" / "trajectories")
        said = []
        again = Pipeline(config_of(walker, run), said.append).run()
        assert [line for line in said if "done before" not in line] == [
            f"Q-guided best of 3: 6 episodes, {how} {run}/eval/argmax"
        ]
        pd.testing.assert_frame_equal(table, again)
        assert json.loads((run / "stages.json").read_text()) == marks


def test_trees_that_failed_are_tried_again(walker, tmp_path, monkeypatch):
    """And what was made of the others is made again once there are more; all that is said."""
    start, lost, said = Branches.start, [], []

    async def breaking(self, account):
        lost[:] = lost or [self.task.id]
        if self.task.id == lost[0]:
            raise EnvironmentFailure("lost")
        await start(self, account)

    def run():
        said.clear()
        config = config_of(
            walker, tmp_path / "run", "multiturn.qvalue.select=[random]", "multiturn.qvalue.stop_tasks=3"
        )
        return Pipeline(config, said.append).run()

    monkeypatch.setattr(Branches, "start", breaking)
    assert list(run()["trees_failed"]) == [1] and said[-1].startswith(
        "1 of 12 trees failed, and the Q model is"
    )
    stages = ["pairs", "fit", "eval random"]
    assert list(json.loads((tmp_path / "run" / "stages.json").read_text())) == stages
    metrics = [json.loads(line) for line in (tmp_path / "run" / "q_model" / "metrics.jsonl").open()]
    assert all(one["success"] in (0, 1 / 3, 2 / 3, 1) for one in metrics)
    run()  # it fails again
    assert [line for line in said if "done before" in line] == [f"{stage}: done before" for stage in stages]
    monkeypatch.setattr(Branches, "start", start)
    assert list(run()["trees_failed"]) == [0]
    assert said[1] == "search: 1 more trees, all that follows is done again"
    assert not any("done before" in line for line in said)
    assert list(json.loads((tmp_path / "run" / "stages.json").read_text())) == ["search", *stages]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("multiturn.search.width=3", "the stage search was done with search="),
        ("multiturn.pairs.min_gap=0.5", "the stage pairs was done with min_gap=0.0, this run has 0.5"),
        ("multiturn.fit.lr=1", "the stage fit was done with lr=0.001, this run has 1: name another folder"),
        ("multiturn.qvalue.n=4", "the stage eval greedy was done with n=3, this run has 4"),
    ],
)
def test_other_settings_than_those_of_a_finished_stage_are_refused(done, walker, change, said):
    with pytest.raises(ValueError) as error:
        Pipeline(config_of(walker, done[0], change), lambda line: None).run()
    assert said in str(error.value) and str(done[0]) in str(error.value)


def test_trees_without_a_success_give_no_pairs(walker, tmp_path):
    config = config_of(walker, tmp_path / "run", "multiturn.qvalue.tasks=1", "multiturn.search.iterations=1")
    with pytest.raises(ValueError, match="gives no pair: 1 trees"):
        Pipeline(config, lambda line: None).run()
