"""Recorded turns as steps: the chats are those that the policy read, so that a Q model judges any run."""

import random

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from verl_multiturn.cli import app
from verl_multiturn.endpoint import END, TextChat
from verl_multiturn.panel import load_panel
from verl_multiturn.play_settings import settings
from verl_multiturn.rescore import JUDGED, rescore
from verl_multiturn.rollout.episode import Sample
from verl_multiturn.rollout.prompts import PromptPolicy
from verl_multiturn.runs import Run
from verl_multiturn.search.guided import Guide
from verl_multiturn.search.q_model import load_q_model
from verl_multiturn.search.recorded import chats, steps_of
from verl_multiturn.search.scripted import Scripted
from verl_multiturn.search.step_value import ModelValue

pytest.importorskip("verl")

SAID = [f"<think></think><action>{move}</action>" for move in ("up", "down", "left", "right")] + ["what?"]


class Shown(PromptPolicy):
    """Begins with a worked example, and with the number of turns in it."""

    def messages(self, view, shown, actions):
        example = [
            {"role": "user", "content": f"after {len(view.past)} turns of {view.past[-shown:]}"},
            {"role": "assistant", "content": "SAMPLE"},
        ]
        return [*example, *super().messages(view, shown, actions)]


class Walker:
    """Walks at random, and keeps the chats it read."""

    token_ids, eos = False, END
    player, close = Scripted.player, Scripted.close

    def __init__(self):
        self.texts, self.read = TextChat(), []

    def chat(self, **keywords):
        return self.texts

    def decode(self, ids):
        return self.texts.decode(ids)

    async def __call__(self, prompt_ids, max_tokens, seed):
        self.read.append(self.texts.messages(prompt_ids))
        return Sample([*self.texts.encode(random.Random(seed).choice(SAID)), END])


def played(folder, *overrides, guide=None, tasks=3):
    """Records of an evaluation, as they are read from its folder, and what its model read."""
    from dataclasses import replace

    from verl_multiturn.evaluate import Evaluation

    panel, model = load_panel("frozen_lake-test"), Walker()
    config = settings("frozen_lake", overrides=["multiturn.prompt.system='Walk.'", *overrides])
    evaluation = Evaluation(config, replace(panel, tasks=panel.tasks[:tasks]), model, folder, guide=guide)
    evaluation.run()
    return Run(folder).trajectories("eval", 0), Run(folder).config["multiturn"], model.read


@pytest.mark.parametrize(
    "overrides",
    [
        ("multiturn.row=turn",),
        ("multiturn.row=turn", "multiturn.prompt.history=0"),
        ("multiturn.row=trajectory",),
        ("multiturn.row=turn", f"multiturn.prompt.policy={__name__}:Shown"),
        ("multiturn.row=trajectory", f"multiturn.prompt.policy={__name__}:Shown"),
    ],
)
def test_the_chats_are_those_that_the_policy_read(tmp_path, overrides):
    records, block, read = played(tmp_path / "run", *overrides)
    assert sum(len(record["turns"]) for record in records) == len(read) > 9
    found = [chat for record in records for chat in chats(record, block)]
    assert sorted(map(str, found)) == sorted(map(str, read))
    assert any(turn["text"] == "what?" for record in records for turn in record["turns"])


def test_turns_that_were_left_out_are_left_out(tmp_path):
    own = f"multiturn.prompt.policy={__name__}:Shown"
    _, _, read = played(tmp_path / "whole", own, tasks=1)
    longest = max(len(TextChat().build_initial_tokens(chat)) for chat in read)
    records, block, read = played(tmp_path / "cut", own, f"data.max_prompt_length={longest - 1}", tasks=1)
    assert max(turn["dropped_turns"] for turn in records[0]["turns"]) > 0
    assert sorted(map(str, chats(records[0], block))) == sorted(map(str, read))


def test_a_step_has_what_a_value_may_ask_for():
    turns = [
        {"index": 0, "actions": ["up"], "observation": "o0", "text": "<a>up</a>"},
        {"index": 1, "actions": [], "observation": "o1", "text": "hm", "others": ["x", "hm"]},
        {"index": 2, "actions": ["left", "up"], "observation": "o2", "text": "<a>left||up</a>"},
    ]
    turns[2]["candidates"] = [{"text": "<a>left||up</a>", "votes": 2}, {"text": "y", "votes": 3}]
    steps = steps_of([{"group": "g", "trajectory": 3, "turns": turns}])
    assert [step.key for step in steps] == [("g", 3, 0), ("g", 3, 1), ("g", 3, 2)]
    assert [step.action for step in steps] == ["up", "", "left || up"]
    assert steps[2].path == ("up", "") and steps[2].text == "<a>left||up</a>" and steps[2].state == "o2"
    others = [sorted(step.others) for step in steps]
    assert others == [[], ["hm", "x"], ["<a>left||up</a>", "y", "y", "y"]]


@pytest.fixture(scope="module")
def guided(tmp_path_factory):
    """An evaluation whose turns were chosen among three answers."""
    folder = tmp_path_factory.mktemp("runs") / "guided"
    return folder, *played(folder, guide=Guide("random", 3))[:2]


def test_a_q_model_judges_a_recorded_run(guided, q_folder):
    folder, records, block = guided
    score = load_q_model(q_folder)
    steps = steps_of(records, block)
    found = ModelValue(score, "leave_one_out").values(steps)
    step = next(one for one in steps if len(set(one.others)) > 1)
    place = steps.index(step)
    assert found.Q[place] == pytest.approx(score(step.prompt, [step.text])[0], abs=1e-4)
    alone = [one for one in steps if one.prompt == step.prompt] == [step]
    assert alone and found.V[place] == pytest.approx(np.mean(score(step.prompt, step.others)), abs=1e-4)
    table = rescore(Run(folder), ["rloo"], split="eval", value=ModelValue(score, "leave_one_out"))
    assert table.turns[JUDGED].tolist() == pytest.approx((found.Q - found.V).tolist(), abs=1e-6)
    assert JUDGED in table.names and JUDGED not in table.impossible


def test_rescore_says_what_a_q_model_cannot_judge(guided, q_folder, tmp_path):
    folder, _, _ = guided
    call = ["rescore", str(folder), "--split", "eval", "--algorithms", "rloo", "--q-model"]
    result = CliRunner().invoke(app, [*call, str(q_folder), "--out", str(tmp_path / "a.csv")])
    assert result.exit_code == 0, result.output
    assert JUDGED in pd.read_csv(tmp_path / "a.csv").columns
    played(tmp_path / "plain", tasks=1)
    result = CliRunner().invoke(app, [*call[:1], str(tmp_path / "plain"), *call[2:], str(q_folder)])
    assert "q_advantage is not possible: no turn is recorded whole, with another answer" in result.output
    result = CliRunner().invoke(app, [*call, str(tmp_path)])
    assert result.exit_code == 2 and "holds no Q model: fit one with verl-multiturn fit-q" in result.output
