"""Evaluation with a choice among several answers: equal samples, costs, records, the command."""

import asyncio
import random
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from verl_multiturn.cli import app
from verl_multiturn.endpoint import TextChat
from verl_multiturn.panel import load_panel
from verl_multiturn.rollout.episode import Sample
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
    from dataclasses import replace

    from verl_multiturn.evaluate import Evaluation
    from verl_multiturn.play_settings import settings

    plain = [
        *(f"multiturn.prompt.{name}='{{observation}}'" for name in ("first", "turn", "next")),
        *("multiturn.action.tag=answer", "multiturn.action.think=false"),
    ]
    panel = load_panel("frozen_lake-test")

    def run(temperature, folder):
        run.models.append(Walker(greedy=temperature == 0))
        config = settings("frozen_lake", overrides=plain)
        return Evaluation(
            config, replace(panel, tasks=panel.tasks[:24]), run.models[-1], folder, concurrency=8
        )

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
