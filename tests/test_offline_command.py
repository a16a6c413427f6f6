"""`verl-multiturn offline`: what is read, weighed and learnt, and the critic that chooses utterances."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("verl")

import torch

from verl_multiturn import small_model
from verl_multiturn.cli import app
from verl_multiturn.cli_eval import _learnt_offline
from verl_multiturn.critic.imitation import ActorConfig, Renderer, Row, learn, rows_of
from verl_multiturn.critic.offline import read, records
from verl_multiturn.critic.rerank import load_critic
from verl_multiturn.critic.utterance import UtteranceCritic
from verl_multiturn.demonstrations import Plan, demonstrations
from verl_multiturn.env import make
from verl_multiturn.model_policy import Chat
from verl_multiturn.rollout.parsing import ActionFormat
from verl_multiturn.rollout.prompts import PromptPolicy, Templates
from verl_multiturn.runs import Run
from verl_multiturn.tables.cells import grouped
from verl_multiturn.tables.published import load_table
from verl_multiturn.tables.recorded import read_runs

KWARGS = {"words": ["dog", "pen", "car"], "questions": "listed", "full": False, "max_turns": 6}
TEMPLATES = Templates(
    first="{observation}", turn="{history}\n{observation}", next="{observation}", history=6,
    history_item="{observation}\n{action}", format="",
)  # fmt: skip
FORM = ActionFormat(tag=None, think=False)
PROMPTS = (
    "multiturn.prompt.first='{observation}'", "multiturn.prompt.turn='{history}\n{observation}'",
    "multiturn.prompt.next='{observation}'", "multiturn.prompt.history_item='{observation}\n{action}'",
    "multiturn.prompt.history=6", "multiturn.prompt.format=''", "multiturn.action.tag=null",
    "multiturn.action.think=false", "multiturn.max_action_tokens=8",
)  # fmt: skip
CRITIC = (
    "critic.encoder=ngrams",
    "critic.hidden=16",
    "critic.lr=3e-3",
    "critic.batch=32",
    "weights.epochs=4",
)


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def plan(row="turn"):
    return Plan(
        env="twenty_questions", env_kwargs=KWARGS, row=row, templates=TEMPLATES, policy=None, form=FORM,
        max_tokens=512, vocabulary=384, width=32, layers=1, steps=2, noise=0.5, mistakes=0.0,
        imitate="played", prompt_weight=0.0, episodes=None, batch=4, mixed=1, lr=1e-3, seed=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A chat model of 20 thousand parameters that has hardly been trained."""
    made = tmp_path_factory.mktemp("model")
    small_model._train(plan(), made)
    return made


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Twelve games, half of them the expert's."""
    env, rng, path = make("twenty_questions", **KWARGS), random.Random(0), tmp_path_factory.mktemp("log")
    lines = []
    for n in range(12):
        observation, _ = env.reset(n)
        turns, over = [], False
        while not over:
            action = env.expert() if n % 2 else env.random_action(rng)
            turn = {"observation": observation, "action": action}
            observation, reward, terminated, truncated, _ = env.step(action)
            turns.append(turn | {"reward": reward})
            over = terminated or truncated
        lines.append(json.dumps({"turns": turns}))
    (path / "log.jsonl").write_text("\n".join(lines) + "\n")
    return path / "log.jsonl"


@pytest.mark.parametrize("row", ["turn", "trajectory"])
def test_prompts_are_those_of_a_run(row):
    """Demonstrations render as training does; what a dialogue holds of them is rendered alike."""
    episode = next(demonstrations(plan(row), noise=0.5))
    turns = []
    for chat, answer in episode:
        seen = chat[-1]["content"].split("\n")[-1] if row == "turn" else chat[-1]["content"]
        turns.append({"observation": seen, "action": answer})
    render = Renderer(PromptPolicy(TEMPLATES), FORM, row)
    assert render({"turns": turns}) == [chat for chat, _ in episode]
    for turn in turns:
        turn["prompt"] = turn["observation"].upper()
    last = render({"turns": turns})[-1]
    assert last[-1] == {"role": "user", "content": turns[-1]["prompt"]}
    assert len(last) == (1 if row == "turn" else 2 * len(turns) - 1)


def test_the_loss_is_the_weighted_likelihood(folder):
    """By hand, one row at a time: neither padding nor micro-batches count."""
    from transformers import AutoModelForCausalLM

    rows = [Row([5, 6, 7, 8], 2, 0.5), Row([9, 4, 3, 2, 1, 7], 1, 2.0), Row([3, 3, 3], 1, 1.0)]
    model = AutoModelForCausalLM.from_pretrained(folder)
    by_hand = []
    for row in rows:
        with torch.no_grad():
            scores = model(torch.tensor([row.ids])).logits[0].log_softmax(-1)
        log_pi = sum(float(scores[j - 1, row.ids[j]]) for j in range(row.start, len(row.ids)))
        by_hand.append(-row.weight * log_pi)
    weights = []
    for micro_batch in (1, 3):
        learner = AutoModelForCausalLM.from_pretrained(folder)
        config = ActorConfig(lr=1e-3, epochs=2, batch=3, micro_batch=micro_batch)
        losses = learn(learner, rows, config)
        assert losses[0] == pytest.approx(sum(by_hand) / 3, rel=1e-4) and losses[1] < losses[0]
        weights.append(learner.model.embed_tokens.weight.detach())
    torch.testing.assert_close(*weights, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="no recorded turn has a weight"):
        learn(model, [], ActorConfig())


def test_rows(folder, log):
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)
    kept = [record for _, record in records(log)]
    turns = sum(len(one["turns"]) for one in kept)
    weights = np.ones(turns)
    weights[0] = 0
    render, encode = Renderer(PromptPolicy(TEMPLATES), FORM, "turn"), Chat(tokens).build_initial_tokens
    rows, long = rows_of(kept, weights, render, encode, tokens, ActorConfig())
    assert (len(rows), long) == (turns - 1, 0)
    last = kept[-1]["turns"][-1]
    assert tokens.decode(rows[-1].ids[rows[-1].start :]) == f"{last['action']}<|im_end|>"
    assert tokens.decode(rows[-1].ids[: rows[-1].start]).endswith(
        f"{last['observation']}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rows_of(kept, weights, render, encode, tokens, ActorConfig(max_tokens=5))[1] == turns - 1
    with pytest.raises(ValueError, match=f"there are {turns} turns, but 1 weights"):
        rows_of(kept, weights[:1], render, encode, tokens, ActorConfig())


def test_awr_then_reranked_play(folder, log, tmp_path, monkeypatch):
    out, played = tmp_path / "out", tmp_path / "played"
    said = call(
        "offline", log, *CRITIC, *PROMPTS, "actor.epochs=2", "actor.lr=1e-3", "--model", folder, "--out", out
    )
    turns = sum(map(len, read(log)))
    assert f"12 dialogues, {turns} turns, mean return" in said and f"awr: {turns} turns to imitate" in said
    about = json.loads((out / "offline.json").read_text())
    assert about["losses"][1] < about["losses"][0] and about["critic"]["q_loss"] > 0
    critic, limit = load_critic(out)
    assert critic.config.encoder == "ngrams" and limit is None and len(critic.replay) == turns
    asked, values = [], UtteranceCritic.q_values

    def remember(self, states, actions, target=False):
        asked.append((states[0], list(actions), values(self, states, actions, target)))
        assert target and len(set(states)) == 1
        return asked[-1][2]

    monkeypatch.setattr(UtteranceCritic, "q_values", remember)
    words = f"multiturn.env_kwargs={json.dumps(KWARGS)}".replace('"', "'")
    call(
        *("eval", out, "--env", "twenty_questions", "--limit", 2, "--concurrency", 1, "--out", played),
        *("--critic", out, "--candidates", 3, words, *PROMPTS),
    )
    rows = [row for one in read(played, split="eval") for row in one]
    instruction = Run(played).trajectories("eval", 0)[0]["instruction"]
    assert len(asked) == len(rows) > 0 and all(len(actions) == 3 for _, actions, _ in asked)
    for (state, actions, Q), row in zip(asked, rows, strict=True):
        assert state == row.state and state.startswith(instruction)
        assert actions[int(Q.min(0).argmax())] == row.action
    config = Run(played).config["eval"]
    assert config["candidates"] == 3 and config["critic"] == str(out)
    assert config["offline"] == {"actor": "awr", "v_target": "expectile", "model": str(folder)}
    (group,) = grouped(load_table("archer-offline"), read_runs([played]))
    assert group.method == "IQL + AWR" and group.column.name == "return"
    (out / "offline.json").write_text("{")
    with pytest.raises(ValueError, match=f"{out}/offline.json cannot be used"):
        _learnt_offline(out)


@pytest.mark.parametrize("actor", ["bc", "filtered_bc"])
def test_imitation_without_a_critic(folder, log, tmp_path, actor):
    out = tmp_path / actor
    call(
        "offline", log, *PROMPTS, "--actor", actor, "actor.epochs=1", "weights.quantile=0.5",
        "--model", folder, "--out", out,
    )  # fmt: skip
    about = json.loads((out / "offline.json").read_text())
    assert not (out / "critic.json").exists() and "critic" not in about
    assert (about["imitated"] == about["turns"]) == (actor == "bc") and about["imitated"] > 0
    with pytest.raises(ValueError, match="no critic in"):
        load_critic(out)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--actor", "reinforce"], "actor=reinforce is refused"),
        (["--actor", "arw"], "Did you mean 'awr'"),
        (["critic.lrr=1"], "unknown key of critic 'lrr'"),
        (["actor.epoch=1"], "Did you mean 'epochs'"),
        (["weights.bta=1"], "Did you mean 'beta'"),
        (["actor.epochs=0"], "ActorConfig.epochs must be at least 1"),
        (["--preset", "ofline"], "Did you mean 'offline'"),
        (["critic.v_target=policy"], "offline there is no policy to ask"),
        (["multiturn.promt.first=x"], "promt"),
    ],
)
def test_mistakes_are_one_sentence(folder, log, tmp_path, words, sentence):
    said = " ".join(
        call("offline", log, "--model", folder, "--out", tmp_path / "out", *words, code=2).split()
    )
    assert sentence in said and "Traceback" not in said


def test_a_run_brings_its_prompts(folder, tmp_path):
    played, out = tmp_path / "played", tmp_path / "out"
    words = f"multiturn.env_kwargs={json.dumps(KWARGS)}".replace('"', "'")
    call(
        *("eval", folder, "--env", "twenty_questions", "--limit", 2, "--out", played, words, *PROMPTS),
    )
    said = call(
        "offline", played, "--split", "eval", "--actor", "bc", "--model", folder, "--out", out,
        "actor.epochs=1",
    )  # fmt: skip
    assert "2 dialogues" in said and (out / "model.safetensors").exists()
    recorded = Run(played).trajectories("eval", 0)[0]
    (_, first), *_ = records(played, "eval")
    assert first["turns"][0]["prompt"] == recorded["turns"][0]["prompt"]
    render = Renderer(PromptPolicy(replace(TEMPLATES, first="?")), FORM, "turn")
    assert render(first)[0] == [{"role": "user", "content": recorded["turns"][0]["prompt"]}]
