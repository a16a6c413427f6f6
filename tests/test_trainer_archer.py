"""ArCHer's part of a training step: in-memory TransferQueue, critic without Ray, scripted policy."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import agg_loss, compute_value_loss
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.utils import MetricsAggregator

from verl_multiturn import configure, trainer_archer
from verl_multiturn.compose import compose
from verl_multiturn.critic.actor import FILE, CriticActor
from verl_multiturn.critic.config import archer_config, critic_config
from verl_multiturn.errors import RunStopped
from verl_multiturn.trainer import MultiTurnTrainer

VECTORS = json.loads((Path(__file__).parent / "data" / "archer_vectors.json").read_text())
SMALL = [
    "hardware=cpu", "multiturn.critic.min_size=2", "multiturn.critic.batch=8", "multiturn.archer.updates=2",
    "multiturn.seeded=true", "multiturn.critic.hidden=8", "multiturn.archer.normalize=none",
]  # fmt: skip


@pytest.fixture(scope="module")
def composed():
    return configure.prepare(compose("archer_frozenlake", SMALL))


class Client:
    """verl's LLM client: an utterance is one token, 50 plus the number of calls so far."""

    def __init__(self):
        self.calls = []

    async def generate(self, request_id, prompt_ids, sampling_params):
        self.calls.append((list(prompt_ids), dict(sampling_params)))
        ids = [50 + len(self.calls), 0]
        return SimpleNamespace(token_ids=ids, log_probs=[-0.5, -0.1], extra_fields={})


class Tokens:
    """A tokenizer whose text is the numbers; 0 is the stop token."""

    eos_token_id = 0

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(one) for one in ids if one or not skip_special_tokens)


@pytest.fixture
def trainer(composed, tmp_path, queue):
    config = composed.copy()
    config.multiturn.run = str(tmp_path / "run")
    config.trainer.default_local_dir = str(tmp_path / "run" / "checkpoints")
    config.trainer.critic_warmup = 6
    made = MultiTurnTrainer(config)
    made.global_steps, made.writer, made.tokenizer = 5, Writer(), Tokens()
    made.client = Client()
    made.get_llm_client = lambda: made.client
    made.archer = archer_config(dict(config.multiturn.archer))
    made.critic_settings = critic_config(dict(config.multiturn.critic))
    made.actor = CriticActor(made.critic_settings, made.archer)
    made.utterance_critic = lambda name, *arguments: getattr(made.actor, name)(*arguments)
    return made


def jagged(*lists, dtype=torch.float32):
    return torch.nested.as_nested_tensor([torch.tensor(v, dtype=dtype) for v in lists], layout=torch.jagged)


def fields(ret, index, reward, text, terminated=True):
    """extra_fields of a turn row."""
    record = {
        "index": index, "span": [0, 2], "glue": 0, "anchor": "s", "reward": reward, "penalty": 0.0,
        "value": math.nan, "valid": True, "text": text, "observation": f"o{index}", "prompt": "p",
        "actions": ["a"], "dropped_turns": 0, "dropped_actions": 0,
        "generate_seconds": 0.5, "env_seconds": 0.25,
    }  # fmt: skip
    whole = {
        "return": ret, "success": bool(ret), "terminated": terminated, "truncated": not terminated,
        "task": "t", "task_type": "easy", "seconds": 2.0, "instruction": "i",
    }  # fmt: skip
    scores = {"success": ret, "turns": 1.0, "valid": 1.0, "truncated": float(not terminated)}
    return {"turns": [record], "trajectory": whole, "reward_extra_info": scores, "min_global_steps": 5}


class Writer:
    """Keeps what the trainer records."""

    def __init__(self):
        self.written = []

    def trajectories(self, split, step, rows):
        self.written.append((split, step, rows))

    def flush(self):
        pass


def rollout(queue, step=5):
    """Session 0 has two turns, a row each; session 1 has one."""
    rows = {
        f"{step:06d}-g_1_0": ([1, 1], fields(0.0, 0, 0.0, "c", terminated=False)),
        f"{step:06d}-g_0_1": ([1, 1], fields(1.0, 1, 1.0, "b")),
        f"{step:06d}-g_0_0": ([1, 1, 0], fields(1.0, 0, 0.0, "a")),
    }
    return queue.put_rows(rows)


def listened(trainer, queue, step=5):
    trainer.global_steps, metrics = step, {}
    return trainer._listen(rollout(queue, step), metrics), metrics


def test_a_rollout_fills_the_replay_and_the_policy_is_asked(trainer, queue):
    batch, metrics = listened(trainer, queue)
    assert batch.keys == ["000005-g_1_0", "000005-g_0_1", "000005-g_0_0"]
    replayed = {
        row.id: (row.state, row.action, row.reward, row.done) for row in trainer.actor.critic.replay.rows
    }
    assert replayed == {
        "5:000005-g_0:0": ("i\no0", "a", 0.0, False),
        "5:000005-g_0:1": ("i\no0\na\no1", "b", 1.0, True),
        "5:000005-g_1:0": ("i\no0", "c", 0.0, True),
    }
    asked = sorted(prompt for prompt, _ in trainer.client.calls)
    assert asked == sorted(trainer.actor.prompts.values()) == [[100, 101], [100, 102]]
    (params,) = {tuple(sorted(one)) for _, one in trainer.client.calls}
    assert params == ("logprobs", "max_tokens", "repetition_penalty", "seed", "temperature", "top_k", "top_p")
    assert set(trainer.actor.fresh) == {"i\no0", "i\no0\na\no1"}
    assert {text for said in trainer.actor.fresh.values() for text in said} == {"51", "52"}
    assert metrics["multiturn/archer/fresh_share/mean"] == 1 and metrics["multiturn/archer/asked/mean"] == 2
    assert metrics["multiturn/archer/asked_tokens/mean"] == 4  # two each, with the stop token


def test_the_same_policy_is_not_asked_twice(trainer, queue):
    """Warm-up ends with step 6, so steps 5 and 6 are rolled out by one policy, step 7 by the next."""
    listened(trainer, queue)
    _, metrics = listened(trainer, queue, step=6)
    assert len(trainer.client.calls) == 2
    assert metrics["multiturn/archer/cached_share/mean"] == 1
    assert metrics["multiturn/archer/asked_tokens/mean"] == 0
    assert {row.version for row in trainer.actor.critic.replay.rows} == {0}
    listened(trainer, queue, step=7)
    assert len(trainer.client.calls) == 4
    assert max(row.version for row in trainer.actor.critic.replay.rows) == 1


def test_the_gate_is_verls(trainer):
    """`_version` counts the updates that verl's gate has let through."""
    import inspect

    assert "if self.config.trainer.critic_warmup <= self.global_steps:" in inspect.getsource(
        PPOTrainer._step_once
    )
    for warmup in (0, 1, 2, 5):
        trainer.config.trainer.critic_warmup, updates = warmup, 0
        for step in range(1, 9):
            trainer.global_steps = step
            assert trainer._version == updates
            assert trainer._updates_actor is (warmup <= step)
            updates += warmup <= step


def test_advantages_are_the_critics(trainer, queue):
    batch, _ = listened(trainer, queue)
    batch = upsample_batch_to_divisible_size(batch, 4, eos_token_id=9)
    metrics = {}
    trainer._compute_advantage(batch, metrics)
    states, actions = ["i\no0", "i\no0\na\no1", "i\no0"], ["a", "b", "c"]
    A, V = trainer.actor.judge(states, actions)
    first, second, other = (pytest.approx(x, abs=1e-6) for x in A)
    found = queue.column(batch, "advantages")
    assert found["000005-g_0_0"][:2] == [first, first] and found["000005-g_0_0"][2] == 0
    assert found["000005-g_0_1"] == [second] * 2 and found["000005-g_1_0"] == [other] * 2
    assert found[batch.keys[-1]] == [0.0] and batch.tags[-1]["is_padding"]
    Q = queue.column(batch, "returns")
    assert Q["000005-g_0_1"] == pytest.approx([A[1] + V[1]] * 2, abs=1e-6)
    ((_, _, records),) = trainer.writer.written
    assert [[one["value"] for one in record["turns"]] for record in records] == [
        pytest.approx(list(V[:2])), pytest.approx([V[2]])
    ]  # fmt: skip
    assert metrics["multiturn/archer/steps/mean"] == 2 and metrics["multiturn/return/mean"] == 0.5
    aggregator = MetricsAggregator()
    for name in (one for one in metrics if one.startswith("multiturn/archer/")):
        assert aggregator._get_aggregation_type(name) == "weighted_avg", name
    for name in ("td_error", "target_lag", "age", "value_error_turn_0", "advantage_turn_1", "fresh"):
        assert np.isfinite(metrics[f"multiturn/archer/{name}/mean"]), name


def test_advantages_may_be_scaled_and_clipped(trainer, queue):
    trainer.archer = replace(trainer.archer, normalize="std", clip=0.5)
    batch, _ = listened(trainer, queue)
    trainer._compute_advantage(batch, {})
    A, _ = trainer.actor.judge(["i\no0", "i\no0\na\no1", "i\no0"], ["a", "b", "c"])
    A = np.clip(A / A.std(), -0.5, 0.5)
    found = queue.column(batch, "advantages")
    seen = [found[key][0] for key in ("000005-g_0_0", "000005-g_0_1", "000005-g_1_0")]
    assert seen == pytest.approx(list(A), abs=1e-6)


def test_an_actor_is_not_trained_on_what_the_critic_does_not_know(trainer, queue):
    """min_size is not reached: in warm-up that is fine, at the first update it ends the run."""
    settings = replace(trainer.critic_settings, min_size=1000)
    trainer.critic_settings, trainer.actor = settings, CriticActor(settings, trainer.archer)
    batch, metrics = listened(trainer, queue)
    trainer._compute_advantage(batch, metrics)
    assert metrics["multiturn/archer/all_steps/mean"] == 0
    batch, metrics = listened(trainer, queue, step=6)
    with pytest.raises(RunStopped, match=r"critic has learnt nothing: the replay has 6 of .*min_size=1000"):
        trainer._compute_advantage(batch, metrics)


# ------------------------------------------------------------------------------- baseline of each token


def with_baseline(trainer, queue, batch, values):
    """As after verl's `_compute_values`: a value before each token, padding rows included."""
    queue.kv_batch_put(
        batch.keys, "train", TensorDict({"values": jagged(*values)}, batch_size=len(batch.keys))
    )
    trainer.archer = replace(trainer.archer, token_baseline=True)
    return batch


def test_a8_the_baseline_and_what_verl_learns_of_it(trainer, queue):
    """The vector's numbers with verl's own losses; the second utterance is a token shorter."""
    expected = VECTORS["A8 token baseline"]
    mask = [[1, 1, 1], [1, 1, 0]]
    batch = queue.put_rows(
        {"u_0_0": (mask[0], fields(0.0, 0, 0.0, "a")), "u_1_0": (mask[1], fields(0.0, 0, 0.0, "b"))}
    )
    b = [[0.3, 0.35, 0.38], [-0.1, -0.15, 7.0]]
    credit, metrics = jagged([0.4] * 3, [-0.2, -0.2, 0.0]), {}
    trainer._put_credit(with_baseline(trainer, queue, batch, b), metrics, credit, jagged(*b))
    found = queue.column(batch, "advantages")
    residual = [row[:3] for row in expected["residual"]]
    np.testing.assert_allclose([found["u_0_0"], found["u_1_0"]], residual, atol=1e-6)
    assert found["u_1_0"][2] == 0, "outside of utterances there is no credit"
    returns = queue.column(batch, "returns")
    assert returns["u_0_0"] == pytest.approx([0.4] * 3) and returns["u_1_0"] == pytest.approx([-0.2, -0.2, 0])
    A, learnt, was, on = (torch.tensor(list(x)) for x in (found.values(), returns.values(), b, mask))
    loss, _ = compute_value_loss(was, learnt, was, on.bool(), 0.5)
    assert 2 * loss.item() == pytest.approx(expected["value_loss_masked_mean"]), "verl's has a half before it"
    log_probs = torch.tensor([[-0.1, -0.2, -0.3], [-0.5, -0.5, 0.0]])
    loss = agg_loss(-A * log_probs, on.bool(), "seq-mean-token-sum")
    assert loss.item() == pytest.approx(expected["pg_loss"])
    whole = 3 * 0.4**2 + 2 * 0.2**2
    share = 1 - 5 * expected["value_loss_masked_mean"] / whole
    assert metrics == {"multiturn/archer/baseline_share/mean": pytest.approx(share)}


def test_a_step_with_a_baseline(trainer, queue):
    batch, _ = listened(trainer, queue)
    batch = upsample_batch_to_divisible_size(batch, 4, eos_token_id=9)
    b = {"000005-g_0_0": [0.1, 0.2, 5.0], "000005-g_0_1": [0.3, 0.4], "000005-g_1_0": [0.5, 0.6]}
    with_baseline(trainer, queue, batch, [b.get(key, [5.0]) for key in batch.keys])
    metrics = {}
    trainer._compute_advantage(batch, metrics)
    A, _ = trainer.actor.judge(["i\no0", "i\no0\na\no1", "i\no0"], ["a", "b", "c"])
    found, returns = queue.column(batch, "advantages"), queue.column(batch, "returns")
    for key, credit in zip(sorted(b), A, strict=True):
        assert found[key][:2] == pytest.approx([credit - x for x in b[key][:2]], abs=1e-6)
        assert returns[key][:2] == pytest.approx([credit] * 2, abs=1e-6)
    assert found["000005-g_0_0"][2] == returns["000005-g_0_0"][2] == 0
    assert found[batch.keys[-1]] == returns[batch.keys[-1]] == [0.0] and batch.tags[-1]["is_padding"]
    name = "multiturn/archer/baseline_share/mean"
    left = sum((A[k] - x) ** 2 for k, key in enumerate(sorted(b)) for x in b[key][:2])
    assert metrics[name] == pytest.approx(1 - left / (2 * np.square(A).sum()), rel=1e-4)
    assert MetricsAggregator()._get_aggregation_type(name) == "weighted_avg"


def test_values_come_before_advantages_and_the_baseline_learns_in_the_warm_up():
    import inspect

    step = inspect.getsource(PPOTrainer._step_once)
    places = [step.index(f"self.{name}(batch") for name in ("_compute_values", "_compute_advantage")]
    places += [step.index("self._update_critic(batch"), step.index("critic_warmup <=")]
    assert places == sorted(places)


# ------------------------------------------------------------------------------- in silico


def test_in_silico_rows_stand_in_for_the_rollout(trainer, queue):
    trainer.archer = trainer.actor.archer = replace(trainer.archer, mode="in_silico", states=4)
    batch, _ = listened(trainer, queue)
    assert batch.keys[0] == "000005-g_1_0", "in warm-up there is nothing to train on"
    trainer._compute_advantage(batch, {})
    asked, metrics = len(trainer.client.calls), {}
    batch, _ = listened(trainer, queue, step=6)
    assert batch.keys == [f"000006-silico{k:06d}_0_0" for k in range(4)]
    assert len(trainer.client.calls) - asked == 4, "the critic's own questions are answered"
    batch = upsample_batch_to_divisible_size(batch, 5, eos_token_id=9)
    trainer._compute_advantage(batch, metrics)
    fresh = trainer.in_silico
    assert [list(ids) for ids in fresh.prompt_ids] == [trainer.actor.prompts[state] for state in fresh.states]
    A, V = trainer.actor.judge(fresh.states, fresh.actions)
    found, Q = queue.column(batch, "advantages"), queue.column(batch, "returns")
    for k, key in enumerate(fresh.keys):
        assert found[key] == pytest.approx([A[k]] * 2, abs=1e-6), "the stop token too"
        assert Q[key] == pytest.approx([A[k] + V[k]] * 2, abs=1e-6)
    assert found[batch.keys[-1]] == [0.0]
    split, step, records = trainer.writer.written[-1]
    assert (split, step) == ("train", 6) and [one["trained"] for one in records] == [False, False]
    assert all(one["value"] is not None for record in records for one in record["turns"])
    assert metrics["multiturn/return/mean"] == 0.5
    assert ("train", "000006-g_0_0") in queue.cleared
    batch, _ = listened(trainer, queue, step=7)
    assert trainer.in_silico is not fresh


def test_in_silico_rows_with_a_baseline(trainer, queue):
    trainer.archer = trainer.actor.archer = replace(trainer.archer, mode="in_silico", states=4)
    batch, _ = listened(trainer, queue, step=6)
    batch = upsample_batch_to_divisible_size(batch, 5, eos_token_id=9)
    b = [[0.1 * k, 0.2 * k] for k in range(4)]
    with_baseline(trainer, queue, batch, [*b, [5.0]])
    trainer._compute_advantage(batch, {})
    fresh = trainer.in_silico
    A, _ = trainer.actor.judge(fresh.states, fresh.actions)
    found, returns = queue.column(batch, "advantages"), queue.column(batch, "returns")
    for k, key in enumerate(fresh.keys):
        assert found[key] == pytest.approx([A[k] - x for x in b[k]], abs=1e-6)
        assert returns[key] == pytest.approx([A[k]] * 2, abs=1e-6)
    assert found[batch.keys[-1]] == returns[batch.keys[-1]] == [0.0]


# ------------------------------------------------------------------------------- checkpoints


@pytest.fixture
def saved(trainer, monkeypatch):
    """verl's own part of a checkpoint is one folder here; `max_actor_ckpt_to_keep` is 1."""

    def save(self):
        folder = trainer._checkpoint(self.global_steps)
        for other in folder.parent.glob("*/actor"):
            other.rmdir()
        (folder / "actor").mkdir(parents=True)
        (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(self.global_steps))

    def load(self):
        self.global_steps = 5

    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", save)
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", load)
    return trainer


def test_a_checkpoint_has_the_critic_and_old_ones_lose_it(saved, queue):
    listened(saved, queue)
    assert saved._resume().startswith("there is none, so the same command starts anew")
    saved._save_checkpoint()
    assert (saved._checkpoint(5) / FILE).exists()
    saved.global_steps = 6
    saved._save_checkpoint()
    assert not (saved._checkpoint(5) / FILE).exists() and (saved._checkpoint(6) / FILE).exists()
    assert saved._resume() == f"the same command resumes from {saved._checkpoint(6)}"


def test_a_resumed_run_takes_the_critic_up(saved, queue, monkeypatch):
    batch, _ = listened(saved, queue)
    saved._compute_advantage(batch, {})
    saved._save_checkpoint()
    before, started = saved.actor, []

    def start(critic, archer, gpus, cpus, resume, bundles, patience):
        started.append((critic, archer, gpus, cpus, bundles, patience))
        actor = CriticActor(critic, archer)
        saved.actor = actor
        return lambda name, *arguments: getattr(actor, name)(*arguments)

    monkeypatch.setattr(trainer_archer, "start", start)
    saved._load_checkpoint()
    assert started == [(before.config, before.archer, 0, 1, None, 7200)]
    assert saved.actor is not before and saved.actor.critic.steps == 2
    assert saved.actor.prompts == before.prompts and saved.actor.fresh == before.fresh
    assert [row.id for row in saved.actor.critic.replay.rows] == [row.id for row in before.critic.replay.rows]
    (saved._checkpoint(5) / FILE).unlink()
    with pytest.raises(RunStopped, match=f"global_step_5 has no {FILE}"):
        saved._load_checkpoint()


@pytest.mark.parametrize("algorithm", ["archer", "gigpo"])
def test_a_damaged_part_of_verls_is_one_sentence(saved, monkeypatch, tmp_path, algorithm):
    """The state of the data, as verl reads it: cut at several places, none of it, something else."""
    saved.settings.algorithm, file = algorithm, tmp_path / "data.pt"
    torch.save({"_snapshot": {"_snapshot_step": 3}, "samples": list(range(50))}, file)
    good = file.read_bytes()

    def load(self):
        self.global_steps = 5
        torch.load(file, weights_only=False)

    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", load)
    for data in (b"", good[:10], good[: len(good) // 2], good[:-20], b"<html>", b"\x80\x04garbage"):
        file.write_bytes(data)
        with pytest.raises(RunStopped) as caught:
            saved._load_checkpoint()
        said = str(caught.value)
        assert "global_step_5 cannot be read (" in said and "trainer.resume_from_path=FOLDER" in said
        assert "\n" not in said


def test_what_fails_before_a_checkpoint_is_found_keeps_its_words(saved, monkeypatch):
    def load(self):
        self.global_steps = 0
        raise AssertionError("resume ckpt must be str type")

    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", load)
    with pytest.raises(AssertionError, match="must be str type"):
        saved._load_checkpoint()


def test_other_algorithms_start_no_critic(saved, monkeypatch):
    saved.settings.algorithm = "gigpo"
    monkeypatch.setattr(trainer_archer, "start", lambda *_: pytest.fail("a critic was started"))
    saved._load_checkpoint()
    saved._save_checkpoint()
    assert not (saved._checkpoint(5) / FILE).exists() and saved._caveats() == []


def test_a_moved_fixed_point_is_said_at_the_start(trainer):
    assert trainer._caveats() == []
    trainer.critic_settings = replace(trainer.critic_settings, v_target="sarsa")
    assert "V learns the value of the policies that filled the replay" in trainer._caveats()[0]
