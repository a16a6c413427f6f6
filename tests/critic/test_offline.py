"""Offline: reading recorded dialogues, IQL and AWR on them, filtered imitation, re-ranking."""

import json
import random
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pytest

from verl_multiturn.algorithms.archer import awr_weights, expectile
from verl_multiturn.critic.config import PRESETS
from verl_multiturn.critic.encoders import NGrams
from verl_multiturn.critic.offline import OfflineConfig, filtered, fit, imitate, read, rerank
from verl_multiturn.critic.utterance import UtteranceCritic
from verl_multiturn.env import make
from verl_multiturn.runs import RunWriter

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "archer_vectors.json").read_text())
SMALL = replace(
    PRESETS["offline"],
    encoder="ngrams",
    max_tokens=64,
    hidden=32,
    lr=3e-3,
    gamma=0.9,
    batch=64,
    micro_batch=64,
)


SMALL_POLICY = replace(SMALL, v_target="policy")


def dialogue(actions, rewards, **more):
    turns = [
        {"observation": f"o{t}", "action": action, "reward": reward}
        for t, (action, reward) in enumerate(zip(actions, rewards, strict=True))
    ]
    return {"turns": turns} | more


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def recorded(number=0, step=1, **more):
    turns = [
        {
            "index": t, "observation": f"o{t}", "prompt": "<chat>", "text": f"<act>{t}</act>",
            "actions": [str(t)], "prompt_ids": [1], "action_ids": [2], "reward": float(t), "penalty": 0.25,
            "anchor": None, "value": None,
        }
        for t in range(2)
    ]  # fmt: skip
    record = {
        "split": "train", "step": step, "group": "g", "trajectory": number, "instruction": "go",
        "terminated": True, "truncated": False, "return": 1.0, "turns": turns,
    }  # fmt: skip
    return record | more


def test_a_runs_folder(tmp_path):
    with RunWriter(tmp_path, {"a": 1}) as writer:
        writer.metrics(1, {"loss": 1.0})
        writer.trajectories("train", 2, [recorded(0, 2), recorded(1, 2)])
        writer.trajectories("train", 1, [recorded(0, 1, terminated=False)])
        writer.trajectories("val", 1, [recorded(5)])
    dialogues = read(tmp_path, replace(SMALL, gamma=0.5))
    assert [[row.id for row in one] for one in dialogues] == [
        [f"train/{where}:{t}" for t in range(2)] for where in ("1/g/0", "2/g/0", "2/g/1")
    ]
    first, second = dialogues[0]
    assert (first.state, first.action) == ("go\no0", "<act>0</act>")
    assert second.state == first.next_state == "go\no0\n<act>0</act>\no1"
    assert (first.reward, second.reward) == (-0.25, 0.75)  # the penalty is off
    assert (first.mc_return, second.done, second.version) == (0.125, True, 1)
    assert len(read(tmp_path, split="val")) == 1
    with pytest.raises(ValueError, match=r"unknown split 'vl'; valid: train, val"):
        read(tmp_path, split="vl")
    with pytest.raises(ValueError, match="cut by a limit: bootstrapping needs the state after its end"):
        read(tmp_path, replace(SMALL, bootstrap_on_truncation=True))
    with pytest.raises(ValueError, match="is not a recorded run"):
        read(tmp_path / "nowhere")


def test_a_run_with_a_reward_that_was_not_finite(tmp_path):
    broken = recorded()
    broken["turns"][1]["reward"] = nan
    with RunWriter(tmp_path) as writer:
        writer.metrics(1, {})
        writer.trajectories("train", 1, [broken])
    with pytest.raises(ValueError, match=r"'train/1/g/0:1': its reward must be a finite number, not None"):
        read(tmp_path)


def test_a_file_of_dialogues(tmp_path):
    path = write(
        tmp_path / "log.jsonl",
        dialogue(["a", "b"], [0, 1], instruction="task", version=3),
        dialogue(["c"], [2.5], terminated=False, final_observation="end"),
    )
    one, two = read(path, replace(SMALL, gamma=0.9))
    assert [(row.id, row.state, row.version) for row in one] == [
        ("log.jsonl, line 1:0", "task\no0", 3),
        ("log.jsonl, line 1:1", "task\no0\na\no1", 3),
    ]
    assert one[0].mc_return == pytest.approx(0.9) and two[0].done and two[0].next_state == ""
    (cut,) = read(path, replace(SMALL, bootstrap_on_truncation=True))[1]
    assert not cut.done and cut.next_state == "o0\nc\nend"
    assert read(path, limit=3)[0][1].state == "\no1"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"no": 1}, "log.jsonl, line 1 is no dialogue: it must be an object with a list of turns"),
        ([], "line 1 is no dialogue"),
        ({"turns": [3]}, "line 1: turn 0 has no 'observation'"),
        ({"turns": [{"observation": "o", "action": "a"}]}, "turn 0 has no 'reward'"),
        (
            {"turns": [{"observation": "o", "action": 3, "reward": 0}]},
            "the action of turn 0 must be a text, not 3",
        ),
        (dialogue(["a"], [nan]), "'log.jsonl, line 1:0': its reward must be a finite number, not nan"),
        (dialogue(["a"], ["1"]), "its reward must be a finite number, not '1'"),
    ],
)
def test_a_malformed_dialogue_is_refused_in_one_sentence(tmp_path, record, words):
    with pytest.raises(ValueError, match=words):
        read(write(tmp_path / "log.jsonl", record, {"turns": []}))


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Chain sum with two numbers, played by a policy that is right half of the time."""
    env, rng = make("chain_sum", length=2), random.Random(0)
    records = []
    for _ in range(60):
        observation, _ = env.reset(seed=5)
        turns, over = [], False
        while not over:
            action = env.expert() if rng.random() < 0.5 else rng.choice(["1", "2"])
            turn = {"observation": observation, "action": action}
            observation, reward, terminated, truncated, _ = env.step(action)
            turns.append(turn | {"reward": reward})
            over = terminated or truncated
        records.append({"turns": turns})
    return write(tmp_path_factory.mktemp("log") / "chain.jsonl", *records)


def test_iql_and_awr_prefer_the_right_answers(log):
    dialogues = read(log, SMALL)
    critic, metrics = fit(dialogues, SMALL, epochs=200, encoder=NGrams(256))
    assert critic.config.capacity == max(64, len(critic.replay)) and len(metrics) == 200
    assert metrics[-1]["q_loss"] < metrics[0]["q_loss"] / 20
    rows = [row for one in dialogues for row in one]
    states, actions = [row.state for row in rows], [row.action for row in rows]
    # By hand: the last turn pays 1 if right, V there is an expectile of that, and a right first turn 0.9 V.
    lasting = [row for row in rows if "\n" in row.state.split("first 0: 0")[-1]]
    V2 = expectile([row.reward for row in lasting], 0.9)
    first = [row for row in rows if row not in lasting]
    right = [not row.done for row in first]
    truth = {True: 0.9 * V2, False: 0.0}
    Q = dict(zip([row.id for row in rows], critic.q_values(states, actions).min(0), strict=True))
    np.testing.assert_allclose([Q[row.id] for row in first], [truth[one] for one in right], atol=0.06)
    np.testing.assert_allclose([Q[row.id] for row in lasting], [row.reward for row in lasting], atol=0.06)
    weights = imitate(critic, dialogues)
    np.testing.assert_allclose(weights, awr_weights(critic.advantage(states, actions), 1.0, 20.0))
    good = np.array([row.reward > 0 or not row.done for row in rows])
    assert weights[good].min() > weights[~good].max() + 0.3
    steep = imitate(critic, dialogues, OfflineConfig(beta=30.0, weight_clip=2.0))
    assert steep.max() == 2.0 and steep[~good].max() < 0.1


def test_filtered_imitation_takes_whole_dialogues(log):
    dialogues = read(log, SMALL)
    critic = UtteranceCritic(replace(SMALL, v_target="policy"), encoder=NGrams(8))
    weights = imitate(critic, dialogues, OfflineConfig(actor="filtered_bc"))
    won = [sum(row.reward for row in one) for one in dialogues]
    assert 0 < sum(won) < 60
    assert weights.tolist() == [R for R, one in zip(won, dialogues, strict=True) for _ in one]


def test_reinforce_offline_is_refused_with_the_reason():
    with pytest.raises(
        ValueError, match=r"actor=reinforce is refused: its gradient needs fresh.*use awr, filt"
    ):
        OfflineConfig(actor="reinforce")
    with pytest.raises(ValueError, match=r"unknown OfflineConfig.actor 'arw'.*Did you mean 'awr'"):
        OfflineConfig(actor="arw")
    with pytest.raises(ValueError, match=r"beta must be above 0, not 0\.0"):
        OfflineConfig(beta=0.0)


def test_what_cannot_be_fitted(log):
    with pytest.raises(
        ValueError, match="there is no policy to ask: v_target must be expectile, sarsa or mc"
    ):
        fit(read(log, SMALL), replace(SMALL, v_target="policy"))
    with pytest.raises(ValueError, match="no recorded turn"):
        fit([[]], SMALL)


def test_a17_reranking():
    expected = VECTORS["A17 rerank k=3, 2 states"]
    low = np.array(expected["min_q"]).T
    q1, q2 = np.where([[True, False, True]], low, low + 3), np.where([[True, False, True]], low + 2, low)
    assert rerank(q1, q2).tolist() == expected["picked"]
    assert rerank(q2, q1).tolist() == expected["picked"]
    assert rerank([[1, 2, 2]], [[5, 5, 5]]).tolist() == [1]
    with pytest.raises(
        ValueError, match=r"must be \(N, k\) and not empty, not of shapes \(1, 2\) and \(2, 1\)"
    ):
        rerank([[1, 2]], [[1], [2]])
    with pytest.raises(ValueError, match="nan"):
        rerank([[nan, 1]], [[1, 1]])


def test_reranking_by_a_critics_target_heads():
    critic = UtteranceCritic(SMALL_POLICY, encoder=NGrams(16))
    candidates = ["a", "b", "c", "d"]
    q1, q2 = critic.q_values(["s"] * 4, candidates, target=True).reshape(2, 1, 4)
    assert rerank(q1, q2)[0] == np.minimum(q1, q2).argmax()


def test_filtered_by_a_quantile():
    R = [-20.0, -5, -9, -20, -3, -4, -20, -7, -8, -6]
    assert filtered(R, 0.9).tolist() == filtered(R, 0.9, "archer").tolist() == [4]
    assert filtered(R, 0.5).tolist() == [1, 4, 5, 7, 9]
    assert filtered(R, 0.0).tolist() == list(range(10))
    rare = [0.0] * 18 + [1.0]
    assert filtered(rare).tolist() == [18] and filtered([0.0, 0.0]).tolist() == []
    assert len(filtered(rare, compat="archer")) == 19  # with few successes the authors' rule keeps all
    with pytest.raises(ValueError, match=r"quantile must lie in \[0, 1\], not 1.5"):
        filtered(R, 1.5)
    with pytest.raises(ValueError, match="returns must be finite"):
        filtered([nan])
