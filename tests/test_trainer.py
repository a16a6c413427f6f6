"""MultiTurnMixin without a cluster: verl's own constructor and hooks, over an in-memory TransferQueue."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils

from verl_multiturn import configure, heartbeat, trainer_guard
from verl_multiturn.algorithms import advantages
from verl_multiturn.compose import compose
from verl_multiturn.errors import RunStopped
from verl_multiturn.filtering import GroupFilter
from verl_multiturn.rollout.rows import Rows
from verl_multiturn.runs import Run, RunWriter, to_turns
from verl_multiturn.trainer import MARGINAL_STD, MultiTurnTrainer


@pytest.fixture(scope="module")
def composed():
    return configure.prepare(compose("gigpo_frozenlake", ["hardware=cpu"]))


class Notes:
    """A progress line that keeps what it is told."""

    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)

    def step(self, step, metrics):
        self.lines.append((step, dict(metrics)))

    def validation(self, step, metrics, seconds):
        self.lines.append((step, dict(metrics)))


@pytest.fixture
def trainer(composed, tmp_path, queue):
    config = composed.copy()
    config.multiturn.run = str(tmp_path / "run")
    config.multiturn.failures.min_share = 0.5
    config.multiturn.failures.refills = 1
    config.multiturn.seeded = True
    config.actor_rollout_ref.rollout.n = 2
    made = MultiTurnTrainer(config)
    made.global_steps = 5
    made.progress = Notes()
    made.submitted = []
    made._add_prompts_to_generate = made.submitted.append
    made.actor_rollout_wg = SimpleNamespace(update_actor=None)
    return made


def jagged(*lists, dtype=torch.float32):
    return torch.nested.as_nested_tensor([torch.tensor(v, dtype=dtype) for v in lists], layout=torch.jagged)


def turn(index, reward, span, anchor, glue=0, valid=True, value=math.nan):
    return {
        "index": index,
        "span": list(span),
        "glue": glue,
        "anchor": anchor,
        "reward": reward,
        "value": value,
        "valid": valid,
        "text": "a",
        "observation": f"o{index}",
        "prompt": "p",
        "actions": ["a"],
        "dropped_turns": 0,
        "dropped_actions": 0,
        "generate_seconds": 0.5,
        "env_seconds": 0.25,
    }


def trajectory(ret, success=True, terminated=True):
    return {
        "return": ret,
        "success": success,
        "terminated": terminated,
        "truncated": not terminated,
        "truncation": None if terminated else "turns",
        "task": "t",
        "task_type": "easy",
        "seconds": 2.0,
    }


def extra(turns, whole):
    scores = {"success": float(whole["success"]), "turns": 1.0, "valid": 1.0, "truncated": 0.0}
    return {"turns": turns, "trajectory": whole, "reward_extra_info": scores, "min_global_steps": 5}


def put(queue, rows, partition="train"):
    """Rows {key: (response length, mask, extra_fields)} as the rollout writes them."""
    fields = {
        "prompts": jagged(*([100, 101 + i] for i in range(len(rows))), dtype=torch.int64),
        "responses": jagged(
            *(range(10 * i, 10 * i + n) for i, (n, _, _) in enumerate(rows.values())), dtype=torch.int64
        ),
        "response_mask": jagged(*(mask for _, mask, _ in rows.values()), dtype=torch.int64),
        "rollout_log_probs": jagged(*([-0.5] * n for n, _, _ in rows.values())),
        "rm_scores": jagged(*([0.0] * (n - 1) + [e["trajectory"]["return"]] for n, _, e in rows.values())),
        "extra_fields": NonTensorStack(*(e for _, _, e in rows.values())),
        "uid": NonTensorStack(*(key.rsplit("_", 2)[0] for key in rows)),
    }
    tags = [{"status": "success", "seq_len": 2 + n} for n, _, _ in rows.values()]
    return queue.kv_batch_put(list(rows), partition, TensorDict(fields, batch_size=len(rows)), tags)


def padded(queue, batch, multiple):
    """With verl's own padding rows at its end, then at its front: no position is safe."""
    batch = upsample_batch_to_divisible_size(batch, multiple, eos_token_id=9)
    batch.reorder([len(batch) - 1, *range(len(batch) - 1)])
    assert batch.tags[0]["is_padding"]
    return batch


# ------------------------------------------------------------------------------- credit, per turn

# Group g: session 0 visits states s, t and returns 1; session 1 visits s only and returns 0.
TURN_ROWS = {
    "g_0_0": (3, [1, 1, 0], extra([turn(0, 0.0, (0, 2), "s")], trajectory(1.0))),
    "g_0_1": (2, [1, 1], extra([turn(1, 1.0, (0, 2), "t")], trajectory(1.0))),
    "g_1_0": (2, [1, 1], extra([turn(0, 0.0, (0, 2), "s")], trajectory(0.0, success=False))),
}


def advantages_of(trainer, queue, name, rows, multiple=4):
    trainer.settings.algorithm = name
    batch = padded(queue, put(queue, rows), multiple)
    metrics = {}
    back = trainer._turn_advantages(name, trainer._rows(batch), batch, metrics)
    assert back.keys == batch.keys
    assert [tag.get("is_padding", False) for tag in back.tags] == [True, *[False] * (len(batch) - 1)]
    return batch, metrics


def approx(rows):
    return {key: pytest.approx(row, abs=1e-5) for key, row in rows.items()}


def test_rloo_writes_the_leave_one_out_baseline(trainer, queue):
    """A = R_i − R_j for two of a group: 1 − 0 and 0 − 1, on the utterance's tokens only."""
    batch, metrics = advantages_of(trainer, queue, "rloo", TURN_ROWS)
    expected = {
        batch.keys[0]: [0.0],
        "g_0_0": [1.0, 1.0, 0.0],
        "g_0_1": [1.0, 1.0],
        "g_1_0": [-1.0, -1.0],
    }
    assert queue.column(batch, "advantages") == expected
    assert queue.column(batch, "returns") == expected
    assert metrics["multiturn/advantage_std/mean"] == pytest.approx(np.std([1, 1, -1]))
    assert metrics["multiturn/zero_advantage/mean"] == 0.0


def test_gigpo_adds_the_step_advantage(trainer, queue):
    """γ = 0.5: G = 0.5 and 0 from s (0.25 about their mean), t is alone; ± 0.5 by episode. No std."""
    trainer.settings.gigpo.gamma = 0.5
    trainer.settings.gigpo.by_std = False
    batch, metrics = advantages_of(trainer, queue, "gigpo", TURN_ROWS)
    assert queue.column(batch, "advantages") == approx(
        {
            batch.keys[0]: [0.0],
            "g_0_0": [0.75, 0.75, 0.0],
            "g_0_1": [0.5, 0.5],
            "g_1_0": [-0.75, -0.75],
        }
    )
    assert metrics["multiturn/anchor_singleton_share/mean"] == pytest.approx(1 / 3)


def test_turn_gae_reads_the_value_before_the_turn(trainer, queue):
    """λ = γ = 1: A = G − V(s), the critic learns G; V is the value at the utterance's first token."""
    trainer.use_critic, trainer.settings.algorithm = True, "turn_gae"
    trainer.settings.turn_gae.gamma = trainer.settings.turn_gae.lam = 1.0
    batch = put(queue, TURN_ROWS)
    values = jagged([0.25, 9.0, 9.0], [0.5, 9.0], [-0.25, 9.0])
    queue.kv_batch_put(batch.keys, "train", TensorDict({"values": values}, batch_size=3))
    batch = padded(queue, batch, 4)
    trainer._turn_advantages("turn_gae", trainer._rows(batch), batch, {})
    assert queue.column(batch, "advantages") == approx(
        {batch.keys[0]: [0.0], "g_0_0": [0.75, 0.75, 0.0], "g_0_1": [0.5, 0.5], "g_1_0": [0.25, 0.25]}
    )
    assert queue.column(batch, "returns") == approx(
        {batch.keys[0]: [0.0], "g_0_0": [1.0, 1.0, 0.0], "g_0_1": [1.0, 1.0], "g_1_0": [0.0, 0.0]}
    )


# One row per trajectory: two utterances with two glue tokens between, and a single utterance.
TRAJECTORY_ROWS = {
    "g_0_0": (
        6,
        [1, 1, 0, 0, 1, 1],
        extra([turn(0, 0.0, (0, 2), "s"), turn(1, 1.0, (4, 6), "t", glue=2)], trajectory(1.0)),
    ),
    "g_1_0": (2, [1, 1], extra([turn(0, 0.0, (0, 2), "s")], trajectory(0.0, False))),
}


def test_vineppo_reads_recorded_values_and_fills_the_roots(trainer, queue):
    """V(s_0) is the sibling's return; t has a rollout's 0.75: A = 0.75 − 0, 1 − 0.75, and 0 − 1."""
    vine = dict.fromkeys(
        ("states", "holes", "unique_states", "rollouts", "failed", "mismatches", "turns", "tokens"), 2
    )
    vine |= {"skipped_states": 0, "outside": 0, "naive_tokens": 8, "read": 4, "cached": 1, "ended": 0.0}
    vine |= {"truncated": 0, "return_std": 0.5, "tail_seconds": 0.0}
    won, lost = (trajectory(ret, success=bool(ret)) | {"vine": vine} for ret in (1.0, 0.0))
    rows = {
        "g_0_0": (3, [1, 1, 0], extra([turn(0, 0.0, (0, 2), "s")], won)),
        "g_0_1": (2, [1, 1], extra([turn(1, 1.0, (0, 2), "t", value=0.75)], won)),
        "g_1_0": (2, [1, 1], extra([turn(0, 0.0, (0, 2), "s")], lost)),
    }
    trainer.writer, trainer.settings.algorithm, trainer.settings.vineppo.whiten = Writer(), "vineppo", False
    batch, metrics = padded(queue, put(queue, rows), 4), {}
    trainer._compute_advantage(batch, metrics)
    expected = {"g_0_0": [0.75, 0.75, 0.0], "g_0_1": [0.25, 0.25], "g_1_0": [-1.0, -1.0]}
    assert queue.column(batch, "advantages") == approx({batch.keys[0]: [0.0]} | expected)
    assert metrics["multiturn/vine_rollouts/mean"] == 2
    ((_, _, records),) = trainer.writer.written
    assert [[one["value"] for one in record["turns"]] for record in records] == [[0.0, 0.75], [1.0]]
    again = advantages("vineppo", to_turns(records))  # as `rescore` does
    assert again.tolist() == [0.75, 0.25, -1.0]


def vine_rows():
    """Two trajectories of one turn each in two turn rows, with values of rollouts."""
    names = ("states", "holes", "unique_states", "rollouts", "failed", "mismatches", "turns", "tokens")
    names += ("skipped_states", "outside", "naive_tokens", "read", "ended", "truncated", "return_std")
    vine = dict.fromkeys((*names, "tail_seconds", "cached"), 0)
    ends = [trajectory(ret, success=bool(ret)) | {"vine": vine} for ret in (1.0, 0.0)]
    return {
        f"g_{m}_{t}": (2, [1, 1], extra([turn(t, end["return"] * t, (0, 2), f"s{t}", value=value)], end))
        for m, end in enumerate(ends)
        for t, value in enumerate((0.5, 0.25 + m / 2))
    }


def test_vineppo_whitens_each_update_apart(trainer, queue):
    """Two devices with two rows each, two updates: the first rows of both, then the second ones."""
    trainer.writer, trainer.settings.algorithm = Writer(), "vineppo"
    trainer.settings.vineppo.scope = "minibatch"
    trainer._dp_size, trainer._mini_batches = 2, {"actor": 2}
    batch = put(queue, vine_rows())
    assert batch.keys == ["g_0_0", "g_0_1", "g_1_0", "g_1_1"]
    trainer._compute_advantage(batch, {})
    found = queue.column(batch, "advantages")
    raw = {"g_0_0": -0.25, "g_0_1": 0.75, "g_1_0": 0.25, "g_1_1": -0.75}
    for update in (("g_0_0", "g_1_0"), ("g_0_1", "g_1_1")):
        together = np.array([raw[key] for key in update for _ in range(2)])
        white = (together - together.mean()) / np.sqrt(together.var(ddof=1) + 1e-8)
        assert [x for key in update for x in found[key]] == pytest.approx(white.tolist())
    rows = trainer._rows(batch)
    trainer._dp_size, trainer._mini_batches = 1, {"actor": 2}
    assert trainer._updates_of(rows, batch) == [0, 0, 1, 1]
    trainer._mini_batches = {}  # the actor waits for its critic
    assert trainer._updates_of(rows, batch) == [0, 0, 0, 0]


def test_a_horizon_is_bridged_by_the_group(trainer, queue):
    """The rollouts from s_0 were all cut after a turn: the other one's return from turn 1 on is added."""
    trainer.writer, trainer.settings.algorithm = Writer(), "vineppo"
    trainer.settings.vineppo.whiten = False
    trainer.settings.vine.horizon, trainer.settings.vine.horizon_value = 1, "group"
    rows = vine_rows()
    for key in ("g_0_0", "g_1_0"):
        rows[key][2]["turns"][0]["cut"] = 1.0
    batch, metrics = put(queue, rows), {}
    trainer._compute_advantage(batch, metrics)
    found = queue.column(batch, "advantages")
    # V(s_0) is 0.5 + 0 of the first one, 0.5 + 1 of the second
    assert found["g_0_0"] == [-0.25] * 2 and found["g_1_0"] == [-0.75] * 2
    assert metrics["multiturn/vine_value/mean"] == pytest.approx((0.5 + 0.25 + 1.5 + 0.75) / 4)


def test_the_std_of_a_z_score_is_averaged_over_steps_and_starts(trainer):
    trainer.settings.information.ema = 0.9
    assert trainer._averaged(1.0) == 1.0 and trainer._averaged(2.0) == pytest.approx(1.1)
    with RunWriter(trainer.settings.run, {}) as writer:
        writer.metrics(1, {MARGINAL_STD: 1.0})
        writer.metrics(2, {"multiturn/return/mean": 1.0})
    recorded = trainer._recorded_metrics()
    assert recorded == [(1, {MARGINAL_STD: 1.0}), (2, {"multiturn/return/mean": 1.0})]
    trainer.settings.information.ema = None
    assert trainer._recorded_metrics() == []


@pytest.mark.parametrize("name", ["turn_gae", "bilevel_gae", "ppo"])
@pytest.mark.parametrize("layout", ["turn", "trajectory"])
def test_the_critics_values_are_audited_where_they_were_given(trainer, queue, name, layout):
    """V before the utterance's first token, of whatever row; |0.5 − 0.75| at t = 1, |−0.25 − 0| at t = 0."""
    if name == "ppo" and layout == "turn":
        pytest.skip("refused at the start of a run")
    trainer.writer, trainer.use_critic, trainer.settings.algorithm = Writer(), True, name
    trainer.config.algorithm.adv_estimator, trainer.settings.turn_rewards = "gae", name == "bilevel_gae"
    counts = {"rollouts": 4, "failed": 0, "tokens": 20, "seconds": 1.5}
    won, lost = (
        trajectory(ret, success=bool(ret)) | {"audit": counts | {"returns": returns}}
        for ret, returns in ((1.0, {"1": [1.0, 0.5]}), (0.0, {"0": [0.0, 0.0]}))
    )
    if layout == "turn":
        rows = {
            "g_0_0": (3, [1, 1, 0], extra([turn(0, 0.0, (0, 2), "s")], won)),
            "g_0_1": (2, [1, 1], extra([turn(1, 1.0, (0, 2), "t")], won)),
            "g_1_0": (2, [1, 1], extra([turn(0, 0.0, (0, 2), "s")], lost)),
        }
        values = jagged([0.25, 9.0, 9.0], [0.5, 9.0], [-0.25, 9.0])
    else:
        rows = {
            "g_0_0": (6, [1, 1, 0, 0, 1, 1], extra(TRAJECTORY_ROWS["g_0_0"][2]["turns"], won)),
            "g_1_0": (2, [1, 1], extra(TRAJECTORY_ROWS["g_1_0"][2]["turns"], lost)),
        }
        values = jagged([0.25, 9.0, 9.0, 9.0, 0.5, 9.0], [-0.25, 9.0])
    batch, metrics = put(queue, rows), {}
    queue.kv_batch_put(batch.keys, "train", TensorDict({"values": values}, batch_size=len(rows)))
    old = {"old_log_probs": queue.kv_batch_get(batch.keys, "train")["rollout_log_probs"]}
    queue.kv_batch_put(batch.keys, "train", TensorDict(old, batch_size=len(rows)))
    trainer._compute_advantage(padded(queue, batch, 4), metrics)
    found = {name.split("/")[2]: value for name, value in metrics.items() if "/audit/" in name}
    assert (found["states"], found["rollouts"], found["tokens"], found["seconds"]) == (2, 8, 40, 1.5)
    assert (found["error"], found["bias"], found["ranking"]) == (0.25, -0.25, 1.0)
    ((_, _, records),) = trainer.writer.written
    assert [[one["value"] for one in record["turns"]] for record in records] == [[0.25, 0.5], [-0.25]]
    assert [record["audit"]["returns"] for record in records] == [{"1": [1.0, 0.5]}, {"0": [0.0, 0.0]}]


def test_vineppos_values_are_audited_with_the_siblings_roots(trainer, queue):
    """The first states have 0 and 1 from each other, and a worth of 0.5 each."""
    vine = dict.fromkeys(
        ("states", "holes", "unique_states", "rollouts", "failed", "mismatches", "turns", "tokens"), 0
    )
    vine |= {"skipped_states": 0, "outside": 0, "naive_tokens": 8, "read": 0, "cached": 0, "ended": 0.0}
    vine |= {"truncated": 0, "return_std": 0.0, "tail_seconds": 0.0}
    audit = {"rollouts": 2, "failed": 0, "tokens": 9, "seconds": 1.0, "returns": {"0": [0.0, 1.0]}}
    rows = {
        f"g_{m}_0": (
            2,
            [1, 1],
            extra([turn(0, ret, (0, 2), "s")], trajectory(ret) | {"vine": vine, "audit": audit}),
        )
        for m, ret in enumerate((1.0, 0.0))
    }
    trainer.writer, trainer.settings.algorithm, metrics = Writer(), "vineppo", {}
    trainer._compute_advantage(put(queue, rows), metrics)
    assert metrics["multiturn/audit/error/mean"] == 0.5 and metrics["multiturn/audit/bias/mean"] == 0
    assert metrics["multiturn/audit/states/mean"] == 2 and math.isnan(metrics["multiturn/audit/ranking/mean"])


def test_trajectory_rows_get_a_number_per_utterance(trainer, queue):
    """λ = 0, γ = 1: δ_0 = V(s_1) − V(s_0) = 0.25, δ_1 = 1 − 0.5; nothing between the utterances."""
    trainer.use_critic, trainer.settings.algorithm = True, "turn_gae"
    trainer.settings.turn_gae.lam = 0.0
    batch = put(queue, TRAJECTORY_ROWS)
    values = jagged([0.25, 9.0, 9.0, 9.0, 0.5, 9.0], [-0.25, 9.0])
    queue.kv_batch_put(batch.keys, "train", TensorDict({"values": values}, batch_size=2))
    batch = padded(queue, batch, 3)
    trainer._turn_advantages("turn_gae", trainer._rows(batch), batch, {})
    assert queue.column(batch, "advantages") == approx(
        {batch.keys[0]: [0.0], "g_0_0": [0.25, 0.25, 0, 0, 0.5, 0.5], "g_1_0": [0.25, 0.25]}
    )
    assert queue.column(batch, "returns") == approx(
        {batch.keys[0]: [0.0], "g_0_0": [0.5, 0.5, 0, 0, 1.0, 1.0], "g_1_0": [0.0, 0.0]}
    )


class Writer:
    """Keeps what the trainer records."""

    def __init__(self):
        self.written = []

    def trajectories(self, split, step, rows):
        self.written.append((split, step, rows))

    def metrics(self, step, metrics):
        self.written.append(("metrics", step, dict(metrics)))

    def flush(self):
        self.written.append(("flush",))


def test_compute_advantage_records_the_step(trainer, queue):
    trainer.writer = Writer()
    trainer.settings.algorithm = "rloo"
    batch, metrics = padded(queue, put(queue, TURN_ROWS), 4), {}
    trainer._compute_advantage(batch, metrics)
    assert metrics["multiturn/trajectories/mean"] == 2.0
    assert metrics["multiturn/return/mean"] == 0.5
    assert metrics["multiturn/success/mean"] == 0.5
    ((split, step, records),) = trainer.writer.written
    assert (split, step) == ("train", 5)
    assert [(r["group"], r["trajectory"], len(r["turns"])) for r in records] == [("g", 0, 2), ("g", 1, 1)]
    assert [t["advantage"] for r in records for t in r["turns"]] == [1.0, 1.0, -1.0]
    first, second = records[0]["turns"]
    assert (first["prompt_ids"], first["action_ids"], first["row"]) == ([100, 101], [0, 1], 0)
    assert (second["prompt_ids"], second["action_ids"], second["row"]) == ([100, 102], [10, 11], 1)


@pytest.mark.parametrize("name", ["grpo", "verl"])
def test_verls_own_estimator_goes_through_verl(trainer, queue, name):
    """multiturn.algorithm=grpo: verl's own outcome advantage, (R − mean) / (std + ε) over the group."""
    trainer.writer = Writer()
    trainer.settings.algorithm = name
    trainer.config.algorithm.adv_estimator = "grpo"
    batch = padded(queue, put(queue, TURN_ROWS), 4)
    old = {"old_log_probs": queue.kv_batch_get(batch.keys, "train")["rollout_log_probs"]}
    queue.kv_batch_put(batch.keys, "train", TensorDict(old, batch_size=4))
    trainer._compute_advantage(batch, {})
    scale = 0.5 / (np.std([1.0, 0.0], ddof=1) + 1e-6)
    assert queue.column(batch, "advantages") == approx(
        {
            batch.keys[0]: [0.0],
            "g_0_0": [scale, scale, 0.0],
            "g_0_1": [scale, scale],
            "g_1_0": [-scale, -scale],
        }
    )


# ------------------------------------------------------------------------------- sampling


def sessions(queue, step, count, first=0):
    """A batch of that many trajectories of one row each."""
    keys = [f"{step:06d}-{i // 2:06d}_{i % 2}_0" for i in range(first, first + count)]
    rows = {key: (2, [1, 1], extra([turn(0, 1.0, (0, 2), "s")], trajectory(1.0))) for key in keys}
    return put(queue, rows) if rows else KVBatchMeta(partition_id="train", keys=[], tags=[])


def sampler(*batches):
    """verl's `sample`, bound: hands out the batches, raises the exceptions."""
    given = iter(batches)

    def sample(global_steps, partition_id, batch_size):
        batch = next(given)
        if isinstance(batch, Exception):
            raise batch
        return batch, {"of_verl": 1.0}

    return sample


def test_enough_survivors_pass(trainer, queue):
    batch = sessions(queue, 5, 3)
    found, metrics = trainer._sample(sampler(batch), global_steps=5, partition_id="train", batch_size=2)
    assert found is batch
    assert metrics == {
        "of_verl": 1.0,
        "multiturn/failed_trajectories/mean": 1,
        "multiturn/dropped_groups/mean": 0,
        "multiturn/refills/mean": 0,
    }
    assert trainer.submitted == trainer.progress.lines == queue.cleared == []


def test_rows_of_one_trajectory_count_once(trainer, queue):
    batch = put(queue, {key: TURN_ROWS["g_0_0"] for key in ("g_0_0", "g_0_1", "g_0_2")})
    enough = sessions(queue, 6, 2)
    found, metrics = trainer._sample(sampler(batch, enough), 5, "train", 2)
    assert found is enough, "one of four is less than half, however many rows it has"
    assert metrics["multiturn/refills/mean"] == 1


def test_too_few_survivors_are_rolled_out_again(trainer, queue):
    few, enough = sessions(queue, 5, 1), sessions(queue, 6, 4)
    found, metrics = trainer._sample(sampler(few, enough), 5, "train", 2)
    assert found is enough
    assert metrics["multiturn/failed_trajectories/mean"] == 0
    assert metrics["multiturn/refills/mean"] == 1
    assert trainer.submitted == [2]
    assert queue.cleared == [("train", key) for key in few.keys], "what is not trained on leaks otherwise"
    assert trainer.progress.lines == ["step 5: 1 of 4 trajectories survived (see failures.jsonl)"]


def test_a_step_without_enough_survivors_is_refused(trainer, queue):
    batches = sessions(queue, 5, 1), sessions(queue, 6, 1)
    with pytest.raises(
        RuntimeError, match=r"step 5 has 1 of 4 trajectories after 1 refills.*min_share=0.5.*failures"
    ):
        trainer._sample(sampler(*batches), 5, "train", 2)
    assert trainer.submitted == [2]
    assert not queue.tags, "nothing is left behind"


def test_no_survivor_at_all_is_rolled_out_again(trainer, queue):
    """verl raises there and leaves its prompt markers; any other error of its passes through."""
    markers = [{"is_prompt": True, "status": status, "global_steps": 5} for status in ("failure", "finished")]
    queue.kv_batch_put(["000005-000000", "000005-000001"], "train", tags=markers)
    trainer.replay_buffer._sync_metadata_from_transfer_queue()
    nothing = RuntimeError("Sync replay buffer selected terminal groups with no materializable trajectories.")
    enough = sessions(queue, 6, 4)
    found, metrics = trainer._sample(sampler(nothing, enough), 5, "train", 2)
    assert found is enough
    assert metrics["multiturn/refills/mean"] == 1
    assert {key for _, key in queue.cleared} == {"000005-000000", "000005-000001"}
    with pytest.raises(RuntimeError, match="another matter"):
        trainer._sample(sampler(RuntimeError("another matter")), 5, "train", 2)


def test_the_real_buffer_with_no_survivor(trainer, queue):
    """The same through verl's own ReplayBuffer, as the trainer's step calls it."""
    trainer.replay_buffer.poll_interval = 0.0

    def roll_out(count):
        trainer.submitted.append(count)
        sessions(queue, 5, 2 * count, first=2)
        for i in range(1, 1 + count):
            queue.kv_batch_put(
                [f"000005-{i:06d}"],
                "train",
                tags=[{"is_prompt": True, "status": "finished", "global_steps": 5}],
            )

    trainer._add_prompts_to_generate = roll_out
    queue.kv_batch_put(
        ["000005-000000"], "train", tags=[{"is_prompt": True, "status": "failure", "global_steps": 5}]
    )
    batch, metrics = trainer.replay_buffer.sample(global_steps=5, partition_id="train", batch_size=1)
    assert batch.keys == ["000005-000001_0_0", "000005-000001_1_0"]
    assert metrics["multiturn/refills/mean"] == 1
    assert not any(tag.get("is_prompt") for tag in queue.tags.values())


class Rollout:
    """verl's agent loop manager, over verl's own submission and buffer; `lose` says who fails.

    Args:
        lose: called with uid and session.
    """

    def __init__(self, trainer, queue, lose):
        self.queue, self.lose, self.uids = queue, lose, []
        trainer.agent_loop_manager, trainer.train_dataloader_it = self, None
        trainer.train_dataloader = [{"raw_prompt": np.empty(2, object), "index": torch.arange(2)}]
        trainer.config.data.train_batch_size, trainer.replay_buffer.poll_interval = 2, 0.0
        del trainer._add_prompts_to_generate

    def generate_sequences(self, batch):
        """As two workers would: a chunk each."""
        for chunk in batch.chunk(2):
            for uid, index in zip(chunk["uid"], chunk["index"].tolist(), strict=True):
                self.uids.append((uid, index))
                alive = [session for session in range(2) if not self.lose(uid, session)]
                keys = [f"{uid}_{session}_{row}" for session in alive for row in range(2)]
                if keys:
                    put(self.queue, {key: TURN_ROWS["g_0_0"] for key in keys})
                status = "finished" if len(alive) == 2 else "failure"
                self.queue.kv_batch_put([uid], "train", tags=[{"status": status}])


def rolled_out(trainer, queue, group, lose, refills=1, min_share=0.5):
    """A step of two groups of two, two rows each; what is trained on, and the prompts rolled out."""
    trainer.settings.failures.group, trainer.settings.failures.refills = group, refills
    trainer.settings.failures.min_share = min_share
    rollout = Rollout(trainer, queue, lose)
    trainer._add_batch_to_generate()
    batch, metrics = trainer.replay_buffer.sample(global_steps=5, partition_id="train", batch_size=2)
    assert set(queue.tags) == {("train", key) for key in batch.keys}, "nothing else is left behind"
    assert batch.extra_info is not None, "verl writes the temperature there"
    named = {name.split("/")[1]: value for name, value in metrics.items() if name.startswith("multiturn/")}
    return sorted(batch.keys), named, rollout.uids


FIRST, SECOND = "000005-000000", "000005-000001"


def one_lost(uid, session):
    return (uid, session) == (FIRST, 1)


def rows_of(*uids):
    return [f"{uid}_{session}_{row}" for uid in uids for session in range(2) for row in range(2)]


def test_an_incomplete_group_is_kept(trainer, queue):
    keys, metrics, uids = rolled_out(trainer, queue, "keep", one_lost)
    assert keys == [*rows_of(FIRST)[:2], *rows_of(SECOND)]
    assert metrics == {"failed_trajectories": 1, "dropped_groups": 0, "refills": 0}
    assert uids == [(FIRST, 0), (SECOND, 1)]


def test_an_incomplete_group_is_dropped(trainer, queue):
    keys, metrics, _ = rolled_out(trainer, queue, "drop", one_lost)
    assert keys == rows_of(SECOND)
    assert metrics == {"failed_trajectories": 1, "dropped_groups": 1, "refills": 0}
    assert set(rows_of(FIRST)[:2]) <= {key for _, key in queue.cleared}


def test_a_group_that_is_lost_whole_counts_as_dropped(trainer, queue):
    keys, metrics, _ = rolled_out(trainer, queue, "drop", lambda uid, session: uid == FIRST)
    assert keys == rows_of(SECOND)
    assert metrics == {"failed_trajectories": 2, "dropped_groups": 1, "refills": 0}


def test_the_share_is_of_what_is_left_after_dropping(trainer, queue):
    """Three of four survive, two are kept: less than 0.75, so all is rolled out again."""
    keys, metrics, _ = rolled_out(trainer, queue, "drop", one_lost, min_share=0.75)
    assert keys == rows_of("000005-000002", "000005-000003")
    assert metrics == {"failed_trajectories": 0, "dropped_groups": 0, "refills": 1}
    assert trainer.progress.lines == ["step 5: 2 of 4 trajectories survived (see failures.jsonl)"]


def test_an_incomplete_group_is_rolled_out_again(trainer, queue):
    """Its task, under a new uid that sorts where it stood; the complete group is not touched."""
    keys, metrics, uids = rolled_out(trainer, queue, "refill", one_lost)
    assert keys == rows_of(f"{FIRST}.1", SECOND)
    assert metrics == {"failed_trajectories": 1, "dropped_groups": 0, "refills": 1}
    assert uids == [(FIRST, 0), (SECOND, 1), (f"{FIRST}.1", 0)]
    assert trainer.progress.lines == [
        "step 5: 1 of 2 groups lost trajectories and are rolled out again (see failures.jsonl)"
    ]


def test_a_group_that_never_completes_is_dropped(trainer, queue):
    keys, metrics, uids = rolled_out(
        trainer, queue, "refill", lambda uid, session: uid.startswith(SECOND) and session == 0, refills=2
    )
    assert keys == rows_of(FIRST)
    assert metrics == {"failed_trajectories": 3, "dropped_groups": 1, "refills": 2}
    assert uids == [(FIRST, 0), (SECOND, 1), (f"{SECOND}.1", 1), (f"{SECOND}.2", 1)]


def test_nothing_at_first_and_all_of_it_then(trainer, queue):
    """verl raises where nobody survived; the tasks are known all the same."""
    keys, metrics, _ = rolled_out(trainer, queue, "refill", lambda uid, _: "." not in uid)
    assert keys == rows_of(f"{FIRST}.1", f"{SECOND}.1")
    assert metrics == {"failed_trajectories": 4, "dropped_groups": 0, "refills": 1}


@pytest.mark.parametrize("group", ["keep", "drop", "refill"])
def test_refused_where_nobody_ever_survives(trainer, queue, group):
    with pytest.raises(RuntimeError, match="step 5 has 0 of 4 trajectories after 1 refills"):
        rolled_out(trainer, queue, group, lambda uid, session: True)
    assert not queue.tags


def test_validation_batches_are_recorded(trainer, queue):
    """No share is asked of them: what is missing is counted."""
    trainer._val_records, trainer._expected_val = [], 0
    trainer.config.actor_rollout_ref.rollout.val_kwargs.n = 2
    batch = put(queue, TURN_ROWS, partition="val")
    empty = KVBatchMeta(partition_id="val", keys=[], tags=[])
    sample = sampler(batch, empty)
    assert trainer._sample(sample, 5, "val", 1) == (batch, {"of_verl": 1.0})
    with pytest.raises(RunStopped, match="none of 1 tasks was played to its end"):
        trainer._sample(sample, 5, "val", 1)
    assert trainer._expected_val == 2
    assert [(r["split"], r["step"], r["return"]) for r in trainer._val_records] == [
        ("val", 5, 1.0),
        ("val", 5, 0.0),
    ]
    assert {t["advantage"] for r in trainer._val_records for t in r["turns"]} == {None}
    assert trainer.submitted == queue.cleared == []


def test_validation_reports_success_and_failures(trainer, queue, monkeypatch):
    batch = put(queue, TURN_ROWS, partition="val")

    def verls(self):
        self.replay_buffer.sample(global_steps=5, partition_id="val", batch_size=3)
        return {"of_verl": 1.0}

    trainer.replay_buffer.sample.keywords.clear()
    trainer.replay_buffer.sample = lambda **given: trainer._sample(sampler(batch), **given)
    monkeypatch.setattr(PPOTrainer, "_validate", verls)
    trainer.writer = Writer()
    metrics = trainer._validate()
    assert metrics["of_verl"] == 1.0
    assert (metrics["val/episodes"], metrics["val/failed"], metrics["val/success"]) == (2.0, 1.0, 0.5)
    assert [entry[:2] for entry in trainer.writer.written] == [("val", 5), ("flush",), ("metrics", 5)]
    assert trainer.progress.lines == [(5, metrics)]


def test_validation_reports_each_panel(trainer, queue, monkeypatch):
    """`multiturn.also`: the run's own numbers leave its tasks out, and each panel's failures are its own."""
    rows = {
        f"{uid}_0_0": (
            2,
            [1, 1],
            extra([turn(0, 0.0, (0, 2), "s")], trajectory(won, success=bool(won)) | {"panel": p}),
        )
        for uid, won, p in (("a", 1.0, "val"), ("b", 0.0, "val"), ("c", 1.0, "unseen"))
    }
    batch = put(queue, rows, partition="val")
    trainer.settings.also = {"unseen": {"split": "valid_unseen"}}
    trainer.val_dataset = SimpleNamespace(sizes={"val": 2, "unseen": 2})

    def verls(self):
        self.replay_buffer.sample(global_steps=5, partition_id="val", batch_size=4)
        return {}

    trainer.replay_buffer.sample = lambda **given: trainer._sample(sampler(batch), **given)
    monkeypatch.setattr(PPOTrainer, "_validate", verls)
    trainer.writer = Writer()
    metrics = trainer._validate()
    assert (metrics["val/success"], metrics["val/episodes"], metrics["val/failed"]) == (0.5, 2, 0)
    assert (metrics["val/unseen/success"], metrics["val/unseen/failed"]) == (1, 1)
    assert metrics["val/unseen/success_low"] < 1
    (written,) = [entry[2] for entry in trainer.writer.written if entry[0] == "val"]
    assert [record["panel"] for record in written] == ["val", "val", "unseen"]


# ------------------------------------------------------------------------------- seeded runs


def prompts(monkeypatch, size):
    """verl's fetch: a batch of the dataloader with random uids."""

    def fetch(self):
        return tensordict_utils.get_tensordict(
            {"uid": np.array([f"random_{i}" for i in range(size)], object), "index": torch.arange(size)}
        )

    monkeypatch.setattr(PPOTrainer, "_fetch_one_gen_batch", fetch)


def test_seeded_uids_count_up(trainer, monkeypatch):
    prompts(monkeypatch, 2)
    uids = [*trainer._fetch_one_gen_batch()["uid"], *trainer._fetch_one_gen_batch()["uid"]]
    trainer.global_steps = 12
    uids += list(trainer._fetch_one_gen_batch()["uid"])
    assert uids == [
        "000005-000000", "000005-000001", "000005-000002", "000005-000003", "000012-000004", "000012-000005",
    ]  # fmt: skip
    assert uids == sorted(set(uids)), "in the order of fetching"
    assert not any("_" in uid for uid in uids), "verl splits its keys there"


def test_unseeded_uids_are_verls(trainer, monkeypatch):
    trainer.settings.seeded = False
    prompts(monkeypatch, 2)
    assert list(trainer._fetch_one_gen_batch()["uid"]) == ["random_0", "random_1"]


def balanced(trainer, queue, monkeypatch, keys, pad=0):
    """What verl's `_balance_batch` is handed, and our metrics after it."""
    seen = []

    def verls(self, batch, metrics, **kwargs):
        seen.append((list(batch.keys), [tag["seq_len"] for tag in batch.tags]))
        return upsample_batch_to_divisible_size(batch, len(batch) + pad, eos_token_id=9) if pad else batch

    monkeypatch.setattr(PPOTrainer, "_balance_batch", verls)
    rows = {key: (1 + i, [1] * (1 + i), TURN_ROWS["g_0_0"][2]) for i, key in enumerate(keys)}
    metrics = {}
    trainer._balance_batch(put(queue, rows), metrics)
    return seen[0], metrics


SHUFFLED = ["000005-000001_0_0", "000005-000000_10_0", "000005-000000_2_10", "000005-000000_2_9"]


def test_seeded_rows_are_sorted_by_uid_session_row(trainer, queue, monkeypatch):
    """As numbers: session 2 before 10, row 9 before 10; each row keeps its tag."""
    (keys, lengths), metrics = balanced(trainer, queue, monkeypatch, SHUFFLED)
    assert keys == ["000005-000000_2_9", "000005-000000_2_10", "000005-000000_10_0", "000005-000001_0_0"]
    assert lengths == [6, 5, 4, 3]
    assert (metrics["multiturn/rows/mean"], metrics["multiturn/padded_rows/mean"]) == (4, 0)


def test_unseeded_rows_keep_the_order_of_completion(trainer, queue, monkeypatch):
    trainer.settings.seeded = False
    (keys, _), metrics = balanced(trainer, queue, monkeypatch, SHUFFLED, pad=2)
    assert keys == SHUFFLED
    assert (metrics["multiturn/rows/mean"], metrics["multiturn/padded_rows/mean"]) == (4, 2)


@pytest.mark.parametrize(
    ("rows", "mini", "critic", "count", "padded"),
    [(350, 128, None, 3, 351), (40, 64, None, 1, 40), (7, 64, None, 1, 7), (1000, 128, None, 8, 1000),
     (100, 32, 64, 3, 102)],
)  # fmt: skip
def test_mini_batches_follow_the_real_rows(trainer, queue, rows, mini, critic, count, padded):
    """As many as verl's size suggests, rounded; a batch is filled up by less than their number."""
    trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size = mini // 2  # x rollout.n of 2
    trainer.config.critic.ppo_mini_batch_size = (critic or 2) // 2
    trainer.use_critic, trainer._real_rows = critic is not None, rows
    multiple = trainer._get_required_batch_multiple(dp_size=1)
    size = math.ceil(rows / multiple) * multiple
    assert size == padded and trainer._mini_batches["actor"] == count
    updated = []
    workers = SimpleNamespace(update_actor=updated.append)
    trainer._size_mini_batches("actor", workers, "update_actor")
    workers.update_actor(
        KVBatchMeta(partition_id="train", keys=[f"k{i}" for i in range(size)], tags=[{}] * size)
    )
    assert updated[0].extra_info == {"global_batch_size": size // count, "mini_batch_size": size // count}


def test_every_rank_has_as_many_rows(trainer):
    trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size = 16
    trainer.use_critic, trainer._real_rows = False, 100
    assert trainer._get_required_batch_multiple(dp_size=4) == 4 * 3


# ------------------------------------------------------------------------------- StarPO-S

# Group g disagrees (1 and 0), group h does not, and group i disagrees by its penalties alone.
FAILED = trajectory(0.0, success=False)
GROUPS = {
    "g_0_0": (2, [1, 1], extra([turn(0, 1.0, (0, 2), "s")], trajectory(1.0))),
    "g_1_0": (2, [1, 1], extra([turn(0, 0.0, (0, 2), "s")], FAILED)),
    "h_0_0": (2, [1, 1], extra([turn(0, 0.0, (0, 2), "t")], FAILED)),
    "h_1_0": (2, [1, 1], extra([turn(0, 0.0, (0, 2), "t")], FAILED)),
    "i_0_0": (
        2,
        [1, 1],
        extra([turn(0, 0.0, (0, 2), "u", valid=False) | {"penalty": 0.1}], FAILED | {"penalty": 0.1}),
    ),
    "i_1_0": (2, [1, 1], extra([turn(0, 0.0, (0, 2), "u")], FAILED)),
}


@pytest.fixture
def filtered(trainer, monkeypatch):
    """A trainer that keeps groups with a std, whose `_balance_batch` is ours alone."""
    trainer.filter = GroupFilter(strategy="top_p", value=1.0)
    trainer.writer = Writer()
    monkeypatch.setattr(PPOTrainer, "_balance_batch", lambda self, batch, metrics, **_: batch)
    return trainer


def test_groups_that_agree_cost_no_forward_pass(filtered, queue):
    """Dropped before log-probs; their rows leave the queue, their trajectories are recorded."""
    filtered.settings.algorithm, metrics = "rloo", {}
    batch = filtered._balance_batch(put(queue, GROUPS), metrics)
    assert batch.keys == ["g_0_0", "g_1_0"]
    assert sorted(key for _, key in queue.cleared) == ["h_0_0", "h_1_0", "i_0_0", "i_1_0"]
    assert metrics["multiturn/rows/mean"] == 2 and metrics["multiturn/trajectories/mean"] == 6
    assert metrics["multiturn/kept_share/mean"] == pytest.approx(1 / 3)
    assert metrics["multiturn/group_std/mean"] == pytest.approx(math.sqrt(0.5) / 3)
    assert metrics["multiturn/group_std_kept/mean"] == pytest.approx(math.sqrt(0.5))
    filtered._compute_advantage(batch, metrics)
    ((_, _, records),) = filtered.writer.written
    assert [(r["group"], r["trained"]) for r in records] == [
        ("g", True), ("g", True), ("h", False), ("h", False), ("i", False), ("i", False)
    ]  # fmt: skip
    assert [r["turns"][0]["advantage"] for r in records] == [1.0, -1.0, None, None, None, None]
    assert metrics["multiturn/success/mean"] == pytest.approx(1 / 6)  # of all that was played


def test_nothing_kept_is_a_step_without_training(filtered, queue, monkeypatch):
    """Counted, noted, recorded; with stop_after the run ends with a sentence."""
    batch = put(queue, {key: row for key, row in GROUPS.items() if key[0] == "h"})
    monkeypatch.setattr(
        PPOTrainer, "_step_once", lambda self, metrics, *_: self._balance_batch(batch, metrics)
    )
    metrics = {}
    assert filtered._step_once(metrics, {}, 1).keys == []
    assert metrics["multiturn/empty_step/mean"] == 1.0
    ((split, step, records),) = filtered.writer.written
    assert (split, step, [r["trained"] for r in records]) == ("train", 5, [False, False])
    assert "kept none of the groups" in filtered.progress.lines[0]
    filtered._compute_metrics(
        KVBatchMeta(partition_id="train", keys=[], tags=[]), metrics, {"step": 2.0}, 5, 0
    )
    assert filtered.writer.written[-1][2]["timing_s/step"] == 2.0
    filtered.filter = GroupFilter(strategy="top_p", value=1.0, stop_after=2)
    batch = put(queue, {key: row for key, row in GROUPS.items() if key[0] == "h"})
    with pytest.raises(RunStopped, match="kept nothing in 2 steps in a row"):
        filtered._step_once({}, {}, 1)


def test_a_return_that_is_not_a_number_stops_the_run(filtered, queue):
    rows = GROUPS | {"g_0_0": (1, [1], extra([turn(0, math.nan, (0, 1), "s")], trajectory(math.nan)))}
    with pytest.raises(RunStopped, match=r"step 5, multiturn\.filter: returns must be finite"):
        filtered._balance_batch(put(queue, rows), {})


def test_groups_may_be_weighed_instead(trainer, queue):
    """Soft reweighting: g has the largest std, h none, so its advantages vanish."""
    trainer.filter, trainer.writer = GroupFilter(reweight=True), Writer()
    trainer.settings.algorithm = "rloo"
    batch = put(queue, GROUPS)
    trainer._compute_advantage(batch, {})
    found = queue.column(batch, "advantages")
    assert found["g_0_0"] == pytest.approx([1.0, 1.0], abs=1e-5) and found["h_0_0"] == [0.0, 0.0]


def test_token_level_rewards_of_verls_estimators(trainer, queue):
    """turn_rewards: each utterance's last token has its own reward, less its penalty."""
    trainer.settings.algorithm, trainer.settings.turn_rewards = "ppo", True
    whole = trajectory(3.0)
    turns = [turn(0, 1.0, (0, 2), "s") | {"penalty": 0.5}, turn(1, 2.0, (4, 6), "t", glue=2)]
    batch = padded(queue, put(queue, {"g_0_0": (6, [1, 1, 0, 0, 1, 1], extra(turns, whole))}), 2)
    trainer._place_rewards(trainer._rows(batch), batch)
    assert queue.column(batch, "rm_scores")["g_0_0"] == [0.0, 0.5, 0.0, 0.0, 0.0, 2.0]


def test_normalised_returns_of_verls_estimators(trainer, queue):
    trainer.settings.algorithm = "ppo"
    trainer.settings.normalize.by, trainer.settings.normalize.method = "group", "mean"
    batch = put(queue, GROUPS)
    trainer._place_rewards(trainer._rows(batch), batch)
    found = queue.column(batch, "rm_scores")
    assert found["g_0_0"] == [0.0, 0.5] and found["g_1_0"] == [0.0, -0.5] and found["h_0_0"] == [0.0, 0.0]
    assert found["i_0_0"] == pytest.approx([0.0, -0.05])


def test_bilevel_gae_reads_verls_critic(trainer, queue):
    """γ = λ = γ_turn = 1: A = R − V of each token, the critic learns R; a turn's record has the first V."""
    trainer.use_critic, trainer.settings.algorithm = True, "bilevel_gae"
    trainer.settings.bilevel_gae.gamma_turn, trainer.settings.bilevel_gae.whiten = 1.0, False
    batch = put(queue, TRAJECTORY_ROWS)
    values = jagged([0.25, 0.5, 9.0, 9.0, 0.5, 0.75], [-0.25, 0.0])
    queue.kv_batch_put(batch.keys, "train", TensorDict({"values": values}, batch_size=2))
    batch, rows = padded(queue, batch, 3), None
    rows = trainer._rows(batch)
    trainer._token_advantages(rows, batch, {})
    assert queue.column(batch, "advantages") == approx(
        {batch.keys[0]: [0.0], "g_0_0": [0.75, 0.5, 0, 0, 0.5, 0.25], "g_1_0": [0.25, 0.0]}
    )
    assert queue.column(batch, "returns") == approx(
        {batch.keys[0]: [0.0], "g_0_0": [1.0, 1.0, 0, 0, 1.0, 1.0], "g_1_0": [0.0, 0.0]}
    )
    assert [record["value"] for _, record, _ in rows.places] == [0.25, 0.5, -0.25]


# ------------------------------------------------------------------------------- the run folder


def test_fit_records_the_run_whatever_ends_it(trainer, monkeypatch):
    trainer.total_training_steps = 9
    trainer.global_steps = 0

    def verls(self, agent_loop_manager):
        assert agent_loop_manager == "manager"
        self.writer.metrics(1, {"x": 1.0})
        raise KeyboardInterrupt

    monkeypatch.setattr(PPOTrainer, "fit", verls)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit("manager")
    run = Run(trainer.settings.run)
    assert run.metrics["x"].tolist() == [1.0]
    assert run.config["multiturn"]["env"] == trainer.settings.env


def test_each_step_is_a_line_of_metrics(trainer, monkeypatch):
    trainer.writer = Writer()
    monkeypatch.setattr(
        PPOTrainer,
        "_compute_metrics",
        lambda self, batch, metrics, *_: metrics.update(of_verl=2.0, table={0.0: 8}),
    )
    trainer._compute_metrics(SimpleNamespace(keys=["k"]), {"a": 1.0}, {}, global_steps=5, epoch=0)
    assert trainer.writer.written == [("metrics", 5, {"a": 1.0, "of_verl": 2.0})]
    assert trainer.progress.lines == [(5, {"a": 1.0, "of_verl": 2.0})]


# ------------------------------------------------------------------------------- how a run ends


def fit_until(trainer, monkeypatch, verls):
    trainer.total_training_steps, trainer.global_steps = 9, 0
    monkeypatch.setattr(PPOTrainer, "fit", verls)
    trainer.fit("manager")


@pytest.mark.parametrize(
    ("error", "ending", "reason"),
    [
        (KeyboardInterrupt(), "interrupted", None),
        (RunStopped("no more tasks"), "stopped", "no more tasks"),
        (KeyError("bug"), "stopped", "KeyError: 'bug'"),
    ],
)
def test_the_heartbeat_says_how_a_run_ended(trainer, monkeypatch, error, ending, reason):
    def verls(self, agent_loop_manager):
        self.global_steps = 4
        self._update_actor("batch", {})

    def update(self, batch, metrics):
        raise error

    monkeypatch.setattr(PPOTrainer, "_update_actor", update)
    with pytest.raises(type(error)):
        fit_until(trainer, monkeypatch, verls)
    beat = heartbeat.read(trainer.settings.run)
    assert (beat["ending"], beat["reason"], beat["phase"], beat["step"]) == (
        ending, reason, "actor update", 4,
    )  # fmt: skip


def test_a_rollout_without_any_end_is_given_up(trainer, queue, monkeypatch):
    """verl's sampler would wait for ever for a prompt whose worker has died."""
    queue.kv_batch_put(["g"], "train", tags=[{"is_prompt": True, "status": "running", "global_steps": 1}])
    trainer.settings.episode_timeout = 0.2
    trainer.settings.poll_interval = trainer.replay_buffer.poll_interval = 0.02
    monkeypatch.setattr(trainer_guard, "MARGIN", 0.1)

    def verls(self, agent_loop_manager):
        self.replay_buffer.sample(1, "train", 1)

    with pytest.raises(RunStopped, match=r"no trajectory has ended for 0 s, longer than multiturn\.episode"):
        fit_until(trainer, monkeypatch, verls)
    assert heartbeat.read(trainer.settings.run)["ending"] == "stopped"


def test_a_lost_process_is_the_cause_of_a_failed_call(trainer, monkeypatch):
    """Ray's own error stands behind it; waiting for a rollout notices it too."""

    class Lost:
        processes = {"WorkerDict": [1]}

        def lost(self):
            return "the process of WorkerDict (process 1 on h) is gone"

    trainer.heart.interval, trainer.heart.grace = 0.02, 600.0

    def verls(self, agent_loop_manager):
        self.heart.start()
        self.heart.watch(Lost())
        raise ConnectionError("actor died")

    with pytest.raises(RunStopped, match="process of WorkerDict") as caught:
        fit_until(trainer, monkeypatch, verls)
    assert isinstance(caught.value.__cause__, ConnectionError)
    with pytest.raises(RunStopped, match="process of WorkerDict"):
        trainer.replay_buffer._wait_for_next_poll("train", 0.0)


def test_the_next_start_says_what_the_last_one_could_not(trainer, monkeypatch, capsys):
    monkeypatch.setattr(PPOTrainer, "init", lambda self: None)
    trainer.heart.interval = 600.0
    trainer.heart.enter("values", 3)
    trainer.init()  # of the process that will be killed
    trainer.init()
    fit_until(trainer, monkeypatch, lambda self, manager: None)
    assert "ended without a word in phase 'values' of step 3\n" in capsys.readouterr().out
    assert heartbeat.read(trainer.settings.run)["ending"] == "done"
    assert trainer._last_words() is None


def test_rows_in_another_order_than_their_keys_are_refused(trainer, queue):
    """Credit would reach the wrong tokens, and nothing else would notice."""
    whole = trajectory(1.0)
    rows = {
        f"g_{n}_0": (1, [1], extra([turn(0, 1.0, (0, 1), "s")], whole) | {"origin": ["g", n]}) for n in (0, 1)
    }
    batch = put(queue, rows)
    assert len(trainer._rows(batch).keys) == 2
    one, two = (queue.rows["train", key] for key in batch.keys)
    one["extra_fields"], two["extra_fields"] = two["extra_fields"], one["extra_fields"]
    with pytest.raises(RunStopped, match="row g_0_0 carries the trajectory 1 of group g"):
        trainer._rows(batch)
    with pytest.raises(RunStopped, match=r"2 keys \(1 of them distinct\)"):
        Rows.read(["g_0_0", "g_0_0"], [{}, {}], [{}, {}])


def test_groups_that_are_incomplete_or_unlike_are_counted(trainer, queue):
    keys = ("a_0_0", "a_1_0", "b_0_0", "c_0_0", "c_1_0")
    rows = {key: (1, [1], extra([turn(0, 1.0, (0, 1), "s")], trajectory(1.0))) for key in keys}
    rows["c_1_0"][2]["turns"][0]["observation"] = "elsewhere"
    found, metrics = trainer._rows(put(queue, rows)), {}
    for _ in range(2):
        trainer._check_groups(found, found.members(), metrics)
    assert metrics["multiturn/complete_groups/mean"] == pytest.approx(2 / 3)
    assert metrics["multiturn/equal_starts/mean"] == pytest.approx(2 / 3)
    (note,) = trainer.progress.lines
    assert "the members of 1 of 3 groups (first: c) began with different observations" in note
