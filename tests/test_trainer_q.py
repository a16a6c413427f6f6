"""A Q model's part of a training step: in-memory TransferQueue, a real small Q model, scripted policy."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.utils import MetricsAggregator

from verl_multiturn import configure
from verl_multiturn.compose import compose
from verl_multiturn.errors import RunStopped
from verl_multiturn.search.q_model import load_q_model
from verl_multiturn.trainer import MultiTurnTrainer
from verl_multiturn.trainer_q import agreement
from verl_multiturn.turns import TurnBatch


@pytest.fixture(scope="module")
def composed(q_folder):
    own = ["multiturn.algorithm=q_advantage", f"multiturn.q_advantage.q_model={q_folder}"]
    more = ["multiturn.q_advantage.candidates=2", "multiturn.seeded=true", "multiturn.prompt.system=start"]
    return configure.prepare(compose("gigpo_frozenlake", ["hardware=cpu", *own, *more]))


class Client:
    """verl's LLM client: what it says follows from the prompt and the seed alone."""

    def __init__(self):
        self.calls = []

    async def generate(self, request_id, prompt_ids, sampling_params):
        self.calls.append((list(prompt_ids), dict(sampling_params)))
        ids = [51 + (sum(prompt_ids) + sampling_params["seed"]) % 9, 0]
        return SimpleNamespace(token_ids=ids, log_probs=[-0.5, -0.1], extra_fields={})


class Tokens:
    """A tokenizer whose text is the numbers; 0 is the stop token."""

    eos_token_id = 0

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(one) for one in ids if one or not skip_special_tokens)


class Writer:
    """Keeps what the trainer records."""

    def __init__(self):
        self.written = []

    def trajectories(self, split, step, rows):
        self.written.append((split, step, rows))


@pytest.fixture
def trainer(composed, tmp_path, queue, monkeypatch):
    config = composed.copy()
    config.multiturn.run = str(tmp_path / "run")
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", lambda self: None)
    made = MultiTurnTrainer(config)
    made.global_steps, made.writer, made.tokenizer, made.client = 5, Writer(), Tokens(), Client()
    made.get_llm_client = lambda: made.client
    made._load_checkpoint()
    return made


def fields(ret, *turns):
    """extra_fields of a row; a turn is (index, span, reward, text, prompt)."""
    records = [
        {
            "index": index, "span": list(span), "glue": 0, "anchor": "s", "reward": reward, "penalty": 0.0,
            "value": math.nan, "valid": True, "text": text, "observation": f"o{index}", "prompt": prompt,
            "actions": ["a"], "dropped_turns": 0, "dropped_actions": 0,
            "generate_seconds": 0.5, "env_seconds": 0.25,
        }
        for index, span, reward, text, prompt in turns
    ]  # fmt: skip
    whole = {
        "return": ret, "success": bool(ret), "terminated": True, "truncated": False,
        "task": "t", "task_type": "easy", "seconds": 2.0, "instruction": "i",
    }  # fmt: skip
    scores = {"success": ret, "turns": 1.0, "valid": 1.0, "truncated": 0.0}
    return {"turns": records, "trajectory": whole, "reward_extra_info": scores, "min_global_steps": 5}


TURNS = {  # session 0 has two turns, a row each; session 1 has one
    "g_1_0": ([1, 1], fields(0.0, (0, (0, 2), 0.0, "down", "goal 51"))),
    "g_0_1": ([1, 1], fields(1.0, (1, (0, 2), 1.0, "left", "goal 52"))),
    "g_0_0": ([1, 1, 0], fields(1.0, (0, (0, 2), 0.0, "up", "goal 51"))),
}
CHAT = {  # the same as rows of whole trajectories
    "g_1_0": TURNS["g_1_0"],
    "g_0_0": (
        [1, 1, 0, 1, 1],
        fields(1.0, (0, (0, 2), 0.0, "up", "goal 51"), (1, (3, 5), 1.0, "left", "52")),
    ),
}


def step(trainer, queue, rows=TURNS):
    """One step's rollout, listened to, padded and credited. -> batch, metrics, recorded trajectories."""
    metrics = {}
    batch = trainer._listen(queue.put_rows(rows), metrics)
    batch = upsample_batch_to_divisible_size(batch, 4, eos_token_id=9)
    trainer._compute_advantage(batch, metrics)
    ((_, _, records),) = trainer.writer.written
    return batch, metrics, records


def system(*messages):
    return [{"role": "system", "content": "start"}, *messages]


def said(role, content):
    return {"role": role, "content": content}


def expected(q_folder, records, layout):
    """(Q, V) of the turns of session 0 and 1, from the Q model asked directly."""
    score, found = load_q_model(q_folder), []
    first = system(said("user", "goal 51"))
    second = (
        system(said("user", "goal 52"))
        if layout == "turn"
        else [*first, said("assistant", "up"), said("user", "52")]
    )
    (a, b), (c,) = (record["turns"] for record in records)
    for prompt, own, others in (
        (first, "up", [*a["others"], "down", *c["others"]]),
        (second, "left", b["others"]),
        (first, "down", [*a["others"], "up", *c["others"]]),
    ):
        found.append((score(prompt, [own])[0], np.mean([score(prompt, [one])[0] for one in others])))
    return np.array(found).T


def test_the_policy_is_asked_for_other_answers(trainer, queue):
    metrics = {}
    batch = trainer._listen(queue.put_rows(TURNS), metrics)
    assert batch.keys == ["g_1_0", "g_0_1", "g_0_0"], "the rollout itself is what is trained on"
    asked = [prompt for prompt, _ in trainer.client.calls]
    assert asked == [[100, 103]] * 2 + [[100, 102]] * 2 + [[100, 101]] * 2
    assert len({params["seed"] for _, params in trainer.client.calls}) == 6
    assert {params["max_tokens"] for _, params in trainer.client.calls} == {
        trainer.settings.max_action_tokens
    }
    assert set(trainer.beside) == {("g_0", 0), ("g_0", 1), ("g_1", 0)}
    assert all(len(some) == 2 for some in trainer.beside.values())
    assert metrics["multiturn/q_advantage/asked_tokens/mean"] == 12


@pytest.mark.parametrize("layout", ["turn", "trajectory"])
def test_advantages_are_the_q_models(trainer, queue, q_folder, layout):
    trainer.settings.row = layout
    trainer.q_settings = replace(trainer.q_settings, normalize="none")
    batch, metrics, records = step(trainer, queue, TURNS if layout == "turn" else CHAT)
    Q, V = expected(q_folder, records, layout)
    first, second, other = (pytest.approx(x, abs=1e-4) for x in Q - V)
    found, returns = queue.column(batch, "advantages"), queue.column(batch, "returns")
    if layout == "turn":
        assert found["g_0_0"] == [first, first, 0] and found["g_0_1"] == [second] * 2
        assert trainer.client.calls[2][0] == [100, 102]
    else:
        assert found["g_0_0"] == [first, first, 0, second, second]
        assert trainer.client.calls[2][0] == [100, 102, 10, 11, 12], "all that the policy had read"
    assert found["g_1_0"] == [other] * 2 and returns["g_1_0"] == pytest.approx([Q[2]] * 2, abs=1e-4)
    assert batch.tags[-1]["is_padding"] and set(found[batch.keys[-1]]) == {0.0}
    assert {one["value"] for record in records for one in record["turns"]} == {None}
    assert np.abs(Q - V).max() > 1e-3, "this Q model has an opinion"
    assert metrics["multiturn/q_advantage/std/mean"] == pytest.approx(float(np.std(Q - V)), abs=1e-4)
    aggregator = MetricsAggregator()
    for name in (one for one in metrics if one.startswith("multiturn/q_advantage/")):
        assert np.isfinite(metrics[name]) and aggregator._get_aggregation_type(name) == "weighted_avg", name


def test_the_credit_is_scaled_and_clipped(trainer, queue, q_folder):
    trainer.q_settings = replace(trainer.q_settings, clip=0.75)
    batch, _, records = step(trainer, queue)
    Q, V = expected(q_folder, records, "turn")
    A = np.clip((Q - V) / np.std(Q - V), -0.75, 0.75)
    found = queue.column(batch, "advantages")
    seen = [found[key][0] for key in ("g_0_0", "g_0_1", "g_1_0")]
    assert seen == pytest.approx(list(A), abs=1e-3)


def test_shaping_keeps_the_tasks_return(trainer, queue, q_folder):
    """A = G − V(s), whatever the Q model thinks."""
    trainer.q_settings = replace(trainer.q_settings, credit="shaping", gamma=0.5, normalize="none")
    batch, _, records = step(trainer, queue)
    _, V = expected(q_folder, records, "turn")
    found = queue.column(batch, "advantages")
    seen = [found[key][0] for key in ("g_0_0", "g_0_1", "g_1_0")]
    assert seen == pytest.approx([0.5 - V[0], 1.0 - V[1], 0.0 - V[2]], abs=1e-4)
    values = [one["value"] for record in records for one in record["turns"]]
    assert values == pytest.approx(list(V), abs=1e-4)


def test_the_order_of_the_rows_changes_nothing(trainer, queue):
    batch = queue.put_rows(TURNS)
    trainer._listen(batch, {})
    once = dict(trainer.beside)
    batch.reorder([2, 0, 1])
    trainer._listen(batch, {})
    assert trainer.beside == once and len({tuple(some) for some in once.values()}) > 1


def test_agreement_of_credit_and_return():
    turns = TurnBatch.from_lists(
        group=["g"] * 3, trajectory=[0, 0, 1], index=[0, 1, 0], reward=[0.0, 1.0, 0.0]
    )
    assert agreement(turns, np.array([1.0, 1.0, -1.0])) == pytest.approx(1)
    assert agreement(turns, np.array([-1.0, 0.5, 2.0])) == pytest.approx(-1)
    assert agreement(turns, np.array([0.5, 0.5, 1.0])) == 0.0


def test_a_broken_q_model_ends_the_start(trainer, tmp_path):
    (tmp_path / "q_model.json").write_text("{")
    trainer.settings.q_advantage.q_model = str(tmp_path)
    with pytest.raises(RunStopped, match="fit it again with verl-multiturn fit-q"):
        trainer._load_checkpoint()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"q_model": None},
            "needs multiturn.q_advantage.q_model=FOLDER, a Q model that verl-multiturn fit-q",
        ),
        ({"q_model": "nowhere"}, "nowhere holds no Q model: fit one with verl-multiturn fit-q"),
        ({"candidates": 0}, "multiturn.q_advantage.candidates=0 must be a whole number of at least 1"),
        ({"credit": "shaped"}, "unknown QAdvantageConfig.credit 'shaped'"),
        ({"credit": "shaping"}, "compares V with returns, and the Q model in .* has loss=dpo"),
        ({"baseline": "median"}, "unknown QAdvantageConfig.baseline 'median'"),
        ({"trainer_mode": "colocate_async"}, "q_advantage asks the policy that it trains: use sync"),
        ({"device": "cuda"}, "would put the Q model of q_advantage on the GPU"),
        ({"critic": True}, "critic.enable=True contradicts multiturn.algorithm=q_advantage"),
        ({"every": 1}, "multiturn.algorithm=q_advantage has no values"),
    ],
)
def test_a_run_is_refused(composed, changes, said):
    config, ((key, value),) = composed.copy(), changes.items()
    block = {
        "trainer_mode": config.trainer.v1,
        "device": config.trainer,
        "critic": config.critic,
        "every": config.multiturn.audit,
    }.get(key, config.multiturn.q_advantage)
    block["enable" if key == "critic" else key] = value
    with pytest.raises(ValueError, match=said):
        configure.prepare(config)


def test_other_algorithms_ask_nothing(trainer, queue):
    trainer.settings.algorithm = "gigpo"
    batch = queue.put_rows(TURNS)
    assert trainer._listen(batch, {}) is batch and not trainer.client.calls
