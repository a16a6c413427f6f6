"""Evaluation with a choice among several answers: equal samples, costs, records, the command."""

import asyncio
import json
import random
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from shutil import copytree, rmtree

import pandas as pd
import pytest
from typer.testing import CliRunner

from verl_multiturn.cli import app
from verl_multiturn.endpoint import TextChat
from verl_multiturn.eval_folder import EPISODES, Episodes
from verl_multiturn.panel import load_panel
from verl_multiturn.rollout.episode import Sample
from verl_multiturn.rollout.prompts import PromptTooLong
from verl_multiturn.runs import Run
from verl_multiturn.search.compare import compare, print_costs
from verl_multiturn.search.guided import Guide
from verl_multiturn.search.rules import Rules

pytest.importorskip("verl")

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


class Walker:
    """A policy that walks at random, by the seed of each request; at temperature 0 always down."""

    token_ids, eos = False, 0

    def __init__(self, greedy=False):
        self.greedy, self.text, self.players, self.asked = greedy, TextChat(), 0, []

    def chat(self, **kwargs):
        return self.text

    def decode(self, ids):
        return self.text.decode(ids)

    @contextmanager
    def player(self):
        self.players += 1
        yield
        self.players -= 1

    async def __call__(self, prompt_ids, max_tokens, seed):
        await asyncio.sleep(0)
        self.asked.append(seed)
        move = "down" if self.greedy else random.Random(seed).choice([*MOVES, "nowhere"])
        return Sample([*self.text.encode(f"<answer>{move}</answer>"), 0])

    async def close(self):
        pass


def nearer(prompt, answers):
    """How much nearer to the goal each answer leads, read off the last line of the prompt."""
    _, row, column, _, *goal = prompt[-1]["content"].split("\n")[-1].split()
    found = []
    for answer in answers:
        down, right = MOVES.get(answer.removeprefix("<answer>").removesuffix("</answer>"), (9, 9))
        found.append(-abs(int(row) + down - int(goal[0])) - abs(int(column) + right - int(goal[1])))
    return found


@pytest.fixture
def prepare():
    """`prepare(temperature, folder)`: an evaluation on 24 maps; `prepare.models` are those it used."""
    from verl_multiturn.evaluate import Evaluation
    from verl_multiturn.play_settings import settings

    plain = [
        *(f"multiturn.prompt.{name}='{{observation}}'" for name in ("first", "turn", "next")),
        *("multiturn.action.tag=answer", "multiturn.action.think=false"),
    ]
    panel = load_panel("frozen_lake-test")

    def run(temperature, folder, *overrides, reuse=False):
        run.models.append(Walker(greedy=temperature == 0))
        config = settings("frozen_lake", overrides=[*plain, *overrides])
        tasks = replace(panel, tasks=panel.tasks[:24])
        return Evaluation(config, tasks, run.models[-1], folder, concurrency=8, reuse=reuse)

    run.models = []
    return run


@pytest.fixture
def found(prepare, tmp_path, monkeypatch):
    """Every rule on the same tasks, and the folder of its records."""
    monkeypatch.setattr(Rules, "score", lambda self: nearer)
    rules = Rules(["greedy", "random", "majority", "argmax", "softmax", "oracle"], 5, "q", tau=0.1)
    return compare(rules, prepare, 1.0, tmp_path / "out"), tmp_path / "out", prepare.models


def records(folder):
    return Run(folder).trajectories("eval", 0)


def test_every_rule_at_equal_budget(found, capsys):
    table, _, models = found
    success = table["success"]
    assert success["oracle of 5"] >= success["Q-guided best of 5"] > success["random of 5"]
    assert success["oracle of 5"] > 0.9 and success["softmax of 5"] > success["random of 5"]
    assert (table["n"] == 24).all()
    for name, row in table.iterrows():
        answers = 1 if name == "greedy" else 5
        assert row["calls"] == pytest.approx(answers * row["turns"])
        assert (row["scored"] > 0) == (name in ("Q-guided best of 5", "softmax of 5", "oracle of 5"))
        assert row["tokens"] > row["calls"]
    assert [len(model.asked) for model in models] == [round(24 * calls) for calls in table["calls"]]
    assert all(model.players == 0 for model in models)
    print_costs(table)
    shown = capsys.readouterr().out
    assert "Q-guided best of 5" in shown and "calls" in shown


def test_a_record_says_what_was_chosen_from(found):
    _, folder, _ = found
    for record in records(folder / "argmax"):
        assert record["cost"]["calls"] == 5 * len(record["turns"])
        for turn in record["turns"]:
            assert sum(one["votes"] for one in turn["candidates"]) == 5
            best = max(turn["candidates"], key=lambda one: (one["score"] or 0.0, one["votes"]))
            assert turn["text"] == best["text"]
            moves = [one["action"] for one in turn["candidates"]]
            assert len(set(moves)) == len(moves)
    about = Run(folder / "argmax").config["eval"]
    assert (about["select"], about["n"], about["q_model"]) == ("argmax", 5, "q")


def test_one_answer_is_what_the_policy_says_alone(prepare, tmp_path):
    plain = prepare(1.0, tmp_path / "plain")
    plain.run()
    guided = prepare(1.0, tmp_path / "guided")
    guided.guide = Guide("random", 1)
    guided.run()
    alone, chosen = records(tmp_path / "plain"), records(tmp_path / "guided")
    texts = [[[turn["text"] for turn in one["turns"]] for one in some] for some in (alone, chosen)]
    assert texts[0] == texts[1]
    assert "cost" not in alone[0] and chosen[0]["cost"]["calls"] == len(chosen[0]["turns"])


# ------------------------------------------------------------------ going on


def killed(prepare, folder, left, guide=None):
    """An evaluation whose folder is copied to `left` in its middle: what SIGKILL would have left there."""
    evaluation = prepare(1.0, folder)
    evaluation.guide = guide

    def tell(progress):
        if progress.done == 10 and not left.exists():
            copytree(folder, left)
            with (left / EPISODES).open("ab") as file:
                file.write(b'{"hash":"cut o')

    evaluation.tell = tell
    evaluation.run()
    return evaluation


def plain(evaluation_or_records):
    """Records without their times."""
    found = json.loads(json.dumps(evaluation_or_records))
    for record in found:
        del record["seconds"]
        for turn in record["turns"]:
            turn |= {"generate_seconds": 0, "env_seconds": 0}
    return found


@pytest.mark.parametrize("guided", [False, True])
def test_a_killed_evaluation_goes_on(prepare, tmp_path, guided):
    def guide():
        return Guide("argmax", 3, nearer) if guided else None

    whole = killed(prepare, tmp_path / "a", tmp_path / "b", guide())
    assert not (tmp_path / "a" / EPISODES).exists()
    assert not (tmp_path / "b" / "trajectories" / "eval").exists()  # nothing but the episodes was recorded
    rest = prepare(1.0, tmp_path / "b")
    rest.guide = guide()
    rest.run()
    assert rest.progress.before == 10 and rest.progress.done == 24
    assert 0 < len(prepare.models[1].asked) < len(prepare.models[0].asked)
    assert plain(rest.records) == plain(whole.records) == plain(records(tmp_path / "b"))
    assert rest.progress.wins == whole.progress.wins
    metrics = [Run(tmp_path / name).metrics.loc[0].to_dict() for name in "ab"]
    assert metrics[0] == metrics[1] and metrics[0]["eval/episodes"] == 24
    assert sorted(one.name for one in (tmp_path / "b").iterdir() if one.name != "discarded") == sorted(
        one.name for one in (tmp_path / "a").iterdir()
    )


def test_an_error_leaves_what_was_played_to_go_on_with(prepare, tmp_path):
    evaluation = prepare(1.0, tmp_path / "a")

    def stop(progress):
        if progress.done == 5:
            raise OSError("gone")

    evaluation.tell = stop
    with pytest.raises(OSError, match="gone"):
        evaluation.run()
    played = len(records(tmp_path / "a"))
    assert 5 <= played < 24
    again = prepare(1.0, tmp_path / "a")
    again.run()
    assert again.progress.before == played and len(records(tmp_path / "a")) == 24


def test_only_the_same_evaluation_goes_on(prepare, tmp_path):
    killed(prepare, tmp_path / "a", tmp_path / "b")
    evaluation = prepare(1.0, tmp_path / "b")
    evaluation.samples = 2
    with pytest.raises(
        ValueError, match=r"nothing is overwritten, choose another --out; .*eval.samples=1, .*2"
    ):
        evaluation.run()
    evaluation = prepare(1.0, tmp_path / "b")
    evaluation.config.multiturn.max_action_tokens = 7
    with pytest.raises(ValueError, match=r"with multiturn.max_action_tokens=512, this one has 7"):
        evaluation.run()
    with pytest.raises(ValueError, match="nothing is overwritten"):  # it is done
        prepare(1.0, tmp_path / "a")
    with (
        Episodes(tmp_path / "c", {"eval": {}}),
        pytest.raises(ValueError, match="another process is writing"),
    ):
        prepare(1.0, tmp_path / "c").run()
    lines = (tmp_path / "b" / EPISODES).read_bytes().splitlines(keepends=True)
    (tmp_path / "b" / EPISODES).write_bytes(
        b"".join([lines[0], lines[1].replace(b"down", b"left"), *lines[2:]])
    )
    with pytest.raises(ValueError, match="line 2 is damaged: its content does not match its hash"):
        prepare(1.0, tmp_path / "b").run()


def test_a_comparison_goes_on_with_the_rule_it_was_at(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(Rules, "score", lambda self: nearer)

    rerun = partial(prepare, reuse=True)
    rules, said = Rules(["greedy", "argmax", "random"], 3, str(tmp_path / "q")), []
    first = compare(rules, rerun, 1.0, tmp_path / "out")
    rmtree(tmp_path / "out" / "random")
    again = compare(rules, rerun, 1.0, tmp_path / "out", said.append)
    pd.testing.assert_frame_equal(first, again)
    assert [line.split(" episodes, ")[1].split(" /")[0] for line in said] == [
        "reading",
        "reading",
        "recording to",
    ]
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "q_model.json").write_text("{}")  # fitted anew
    with pytest.raises(ValueError, match=r"of an evaluation with eval\.q_model_hash="):
        compare(rules, rerun, 1.0, tmp_path / "out")


class Reader:
    """Scores prompts that it can read, lists of lines, and writes down those."""

    def __init__(self, can):
        self.can, self.read = can, []

    def __call__(self, prompt, answers):
        lines = prompt[-1]["content"].split("\n")
        if not self.can(lines):
            raise PromptTooLong(f"{len(lines)} lines are too many")
        self.read.append(lines)
        return [0.0] * len(answers)


def test_a_long_prompt_is_scored_with_less_history(prepare, tmp_path):
    def played(name, can):
        turn = "multiturn.prompt.turn='{history}\n{observation}'"
        item = "multiturn.prompt.history_item='{index} {action}'"
        evaluation = prepare(1.0, tmp_path / name, turn, item, "multiturn.prompt.history=3")
        evaluation.guide = Guide("argmax", 5, Reader(can))
        evaluation.run()
        return evaluation

    free, bound = played("a", lambda lines: True), played("b", lambda lines: len(lines) <= 6)
    read = [{len(lines) for lines in one.guide.score.read} for one in (free, bound)]
    assert max(read[0]) > 6 and read[1] == {5, 6}  # a map of 4 rows, a line of numbers, the turns before
    assert plain(free.records) == plain(bound.records)
    some = played("c", lambda lines: not lines[-1].split()[1] == "3")  # not in the last row
    assert some.progress.failed > 0 and some.progress.done > 0
    assert some.progress.failed + some.progress.done == 24
    assert "lines are too many" in Run(tmp_path / "c").failures[0]["error"]
    assert Run(tmp_path / "c").metrics.loc[0, "eval/failed"] == some.progress.failed


def test_refusals():
    for arguments, said in (
        (("argmx", 5), "unknown rule to select a candidate 'argmx'"),
        (("argmax", 5), "select=argmax needs a Q model: give --q-model FOLDER"),
        (("random", 0), "best of n needs n >= 1, not 0"),
    ):
        with pytest.raises(ValueError, match=said):
            Guide(*arguments)
    call = ["eval", "small", "--recipe", "gigpo_frozenlake", "--select"]
    for rules, said in (("argmax", "needs a Q model"), ("best", "unknown rule of --select 'best'")):
        result = CliRunner().invoke(app, [*call, rules])
        assert result.exit_code == 2 and said in result.output
