"""What we rely on in verl 0.9.1: each of its traps, every name and signature that we override or call.

A new version of verl should fail here, by the name of what it changed, before it fails in a run.
"""

import ast
import asyncio
import importlib
import importlib.metadata
import inspect
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import numpy as np
import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import ray
import torch
import verl
from ray.actor import ActorClassInheritanceException
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopMetrics,
    AgentLoopOutput,
    AgentLoopWorker,
)
from verl.trainer import main_ppo
from verl.trainer.ppo import core_algos, metric_utils, padding_utils
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.trainer.ppo.v1.utils import MetricsAggregator, compute_advantage_for_multi_trajectories
from verl.utils import distributed, model, tensordict_utils
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer
from verl.workers.utils.padding import response_from_nested

import verl_multiturn
from verl_multiturn import configure, metrics
from verl_multiturn.compose import compose
from verl_multiturn.rollout import rows
from verl_multiturn.rollout.loop import MultiTurnLoop
from verl_multiturn.trainer import MultiTurnColocateAsyncTrainer, MultiTurnMixin, MultiTurnTrainer
from verl_multiturn.trainer_archer import ArCHerSteps
from verl_multiturn.trainer_guard import BEGINS, PHASES, GuardedRun
from verl_multiturn.trainer_q import QSteps
from verl_multiturn.trainer_record import RecordedSteps
from verl_multiturn.trainer_starpo import StarPOSteps
from verl_multiturn.turns import Trajectory, Turn, TurnBatch
from verl_multiturn.vine_metrics import of_vine

PACKAGE = Path(verl_multiturn.__file__).parent
ROOT = PACKAGE.parent
Worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class
Runner = main_ppo.TaskRunnerV1.__ray_metadata__.modified_class


@pytest.fixture(scope="module")
def composed():
    return configure.prepare(compose("gigpo_frozenlake", ["hardware=cpu"]))


@pytest.fixture
def config(composed):
    return composed.copy()


def nested(*lists, dtype=torch.float32):
    tensors = [torch.tensor(values, dtype=dtype) for values in lists]
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def output(score, extra=None, length=2):
    return AgentLoopOutput(
        prompt_ids=[1, 2, 3],
        response_ids=list(range(4, 4 + length)),
        response_mask=[1] * length,
        response_logprobs=[-0.5] * length,
        reward_score=score,
        num_turns=2,
        metrics=AgentLoopMetrics(),
        extra_fields={"min_global_steps": 0, "max_global_steps": 0} | (extra or {}),
    )


def worker(n=2):
    """verl's rollout worker without its constructor, which wants a model and a cluster."""
    made = Worker.__new__(Worker)
    made.reward_loop_worker_handles = None
    made.distillation_enabled = False
    made.processor = None
    made.hf_model_type = "qwen2"
    rollout = SimpleNamespace(n=n, val_kwargs=SimpleNamespace(n=1))
    made.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    return made


def store(outputs, uid="u", session=0):
    """verl's own way from an agent loop's rows into TransferQueue."""
    fields = {"uid": uid, "session_id": session, "global_steps": 1, "raw_prompt": "p"}
    asyncio.run(worker()._agent_loop_postprocess(outputs, False, **fields))


# ------------------------------------------------------------------------------- the version


def test_verl_is_the_pinned_version():
    assert importlib.metadata.version("verl") == verl.__version__ == "0.9.1"
    assert set(re.findall(r"verl(?:\[\w+\])?==([\d.]+)", (ROOT / "setup.py").read_text())) == {"0.9.1"}


# ------------------------------------------------------------------------------- trap 1


def test_registered_name_must_not_change_mode(config, monkeypatch):
    monkeypatch.setattr(trainer_base, "TRAINER_REGISTRY", dict(trainer_base.TRAINER_REGISTRY))

    @register_trainer("by_another_name")
    class Renamed(PPOTrainerSync):
        pass

    config.trainer.v1.trainer_mode = "by_another_name"
    trapped = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
    assert type(trapped.replay_buffer) is ReplayBufferAsync, "verl no longer keys the mode on the name"

    for name, cls, mode, buffer in (
        ("multiturn_sync", MultiTurnTrainer, "sync", ReplayBuffer),
        ("multiturn_colocate_async", MultiTurnColocateAsyncTrainer, "colocate_async", ReplayBufferAsync),
    ):
        assert get_trainer_cls(name) is cls
        config.trainer.v1.trainer_mode = name
        trainer = cls(config)
        assert type(trainer.replay_buffer) is buffer
        assert trainer.trainer_mode == config.trainer.v1.trainer_mode == mode
        assert trainer.replay_buffer.trainer_mode == mode


def test_poll_interval_is_out_of_the_configurations_reach(config):
    assert inspect.signature(ReplayBuffer).parameters["poll_interval"].default == 2.0
    assert "poll_interval" not in inspect.getsource(PPOTrainer._build_replay_buffer)
    config.multiturn.poll_interval = 0.125
    trainer = MultiTurnTrainer(config)
    assert trainer.replay_buffer.poll_interval == 0.125
    slept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.trainer.ppo.v1.replay_buffer.time.sleep", slept.append)
        trainer.replay_buffer._wait_for_next_poll("train", float("inf"))
    assert slept == [0.125]


# ------------------------------------------------------------------------------- trap 2


@pytest.mark.parametrize("actor", [AgentLoopWorkerTQ, main_ppo.TaskRunnerV1], ids=["worker", "runner"])
def test_ray_actor_classes_cannot_be_subclassed(actor):
    with pytest.raises(ActorClassInheritanceException):

        class Refused(actor):
            pass

    class Mine(actor.__ray_metadata__.modified_class):
        pass

    assert callable(ray.remote(Mine).remote)


def test_manager_overwrites_worker_class(monkeypatch):
    monkeypatch.setattr(AgentLoopManager, "__init__", lambda self: None)

    class Before(AgentLoopManagerTQ):
        def __init__(self):
            self.agent_loop_workers_class = "mine"
            super().__init__()

    class After(AgentLoopManagerTQ):
        def __init__(self):
            super().__init__()
            self.agent_loop_workers_class = "mine"

    assert Before().agent_loop_workers_class is AgentLoopWorkerTQ
    assert After().agent_loop_workers_class == "mine"
    # Workers are made later, so that `After` is in time.
    assert "agent_loop_workers_class" in inspect.getsource(AgentLoopManager._init_agent_loop_workers)
    create = inspect.getsource(AgentLoopManagerTQ.create)
    assert create.index("cls(") < create.index("_init_agent_loop_workers")


# ------------------------------------------------------------------------------- trap 3


def test_plugin_entry_points_swallow_errors(monkeypatch, caplog):
    loaded = []

    class Broken:
        name = "broken"

        def load(self):
            loaded.append(self.name)
            raise ImportError("nobody sees this")

    monkeypatch.delenv("VERL_USE_EXTERNAL_PLUGINS", raising=False)
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Broken()])
    with caplog.at_level(logging.INFO):
        importlib.reload(verl)
    assert loaded == ["broken"]
    assert "nobody sees this" not in caplog.text


def test_we_register_no_plugin():
    assert "verl.plugins" not in (ROOT / "setup.py").read_text()


def test_external_modules_are_loaded_loudly(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "no_such_module_of_ours")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_ours"):
        importlib.reload(verl)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "")
    importlib.reload(verl)


# ------------------------------------------------------------------------------- trap 4


def test_registered_advantage_function_sees_no_turns(monkeypatch):
    from verl.protocol import DataProto

    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", dict(core_algos.ADV_ESTIMATOR_REGISTRY))
    seen = {}

    @core_algos.register_adv_est("looks_around")
    def looks_around(**given):
        seen.update(given)
        return given["response_mask"].float(), given["response_mask"].float()

    data = DataProto.from_dict(
        tensors={
            "token_level_rewards": torch.zeros(2, 3),
            "response_mask": torch.ones(2, 3),
            "values": torch.zeros(2, 3),
        },
        non_tensors={"uid": np.array(["a", "b"], object), "extra_fields": np.array([{}, {}], object)},
    )
    compute_advantage_for_multi_trajectories(data, ["a_0_0", "b_0_0"], "looks_around", config={})
    assert set(seen) == {"token_level_rewards", "response_mask", "config", "index"}


# ------------------------------------------------------------------------------- trap 5


def test_last_rows_score_overwrites_others(queue):
    store(
        [output(0.1, {"reward_extra_info": {"success": 0.0}}), output(1.0, {"reward_extra_info": {"x": 1}})]
    )
    data = queue.kv_batch_get(["u_0_0", "u_0_1"], "train")
    assert [row.tolist() for row in data["rm_scores"].unbind()] == [[0.0, 1.0], [0.0, 1.0]]
    assert [extra["reward_extra_info"] for extra in data["extra_fields"]] == [{"x": 1}] * 2


def test_reward_extra_info_must_exist(queue):
    with pytest.raises(KeyError, match="reward_extra_info"):
        store([output(0.1), output(1.0)])


def played(turns=3, group="u", sample=0, reward=(0.25, 0.5, 1.0)):
    """A trajectory as our episode hands it over."""
    details = [
        {
            "observation": f"o{t}",
            "prompt": f"p{t}",
            "actions": ["left"],
            "thinks": True,
            "dropped_turns": 0,
            "dropped_actions": 0,
            "generate_seconds": 0.5,
            "env_seconds": 0.25,
            "extra": {"min_global_steps": 3 + t, "max_global_steps": 4 + t},
        }
        for t in range(turns)
    ]
    return Trajectory(
        group=group,
        trajectory=sample,
        turns=[Turn([1, 2 + t], [7, 8], [-0.5, -0.25], f"s{t}", reward[t]) for t in range(turns)],
        terminated=True,
        success=True,
        info={"details": details, "task_type": "a", "seconds": 1.0},
    )


def test_our_rows_survive_the_postprocessing(queue):
    """The episode return in every row, the rewards of the turns in `extra_fields`."""
    store(rows.to_outputs(played(), "turn"))
    data = queue.kv_batch_get(["u_0_0", "u_0_1", "u_0_2"], "train")
    assert data["rm_scores"].to_padded_tensor(0).sum(1).tolist() == [1.75] * 3
    extra = list(data["extra_fields"])
    assert [row["turns"][0]["reward"] for row in extra] == [0.25, 0.5, 1.0]
    assert all(row["reward_extra_info"]["success"] == 1.0 for row in extra)


# ------------------------------------------------------------------------------- trap 6


def test_min_global_steps_needed(queue):
    without = output(1.0, {"reward_extra_info": {}})
    without.extra_fields.pop("min_global_steps")
    store([without])
    assert queue.tags["train", "u_0_0"]["min_global_steps"] is None
    source = inspect.getsource(PPOTrainer._compute_metrics)
    for name in ("min_global_steps", "max_global_steps"):
        assert f'{name} = np.array([tag["{name}"] for tag in batch.tags], dtype=int)' in source
    with pytest.raises(TypeError):
        np.array([None], dtype=int)


def test_our_rows_carry_the_weight_versions(queue):
    store(rows.to_outputs(played(), "turn"))
    for key in ("u_0_0", "u_0_1", "u_0_2"):
        tag = queue.tags["train", key]
        assert (tag["min_global_steps"], tag["max_global_steps"]) == (3, 6)
    nameless = played()
    for detail in nameless.info["details"]:
        detail["extra"] = {"min_global_steps": None}
    store(rows.to_outputs(nameless, "trajectory"), uid="v")
    assert queue.tags["train", "v_0_0"]["min_global_steps"] == 0


def test_the_server_client_names_the_weight_versions():
    generated = TokenOutput(token_ids=[5], extra_fields={"global_steps": 7})
    client, _ = server_client([generated])
    out = asyncio.run(client.generate("r", prompt_ids=[1], sampling_params={}))
    assert (out.extra_fields["min_global_steps"], out.extra_fields["max_global_steps"]) == (7, 7)


# ------------------------------------------------------------------------------- trap 7


def test_padding_rows_are_clones(queue):
    store(rows.to_outputs(played(), "turn"))
    keys = ["u_0_0", "u_0_1", "u_0_2"]
    padded = padding_utils.upsample_batch_to_divisible_size(queue.meta(keys, "train"), 4, eos_token_id=9)
    assert padded.keys[:3] == keys
    (pad,) = padded.keys[3:]
    assert pad.startswith("pad")
    assert [tag.get("is_padding", False) for tag in padded.tags] == [False] * 3 + [True]
    data = queue.kv_batch_get([pad, "u_0_0"], "train")
    assert data["extra_fields"][0] == data["extra_fields"][1], "our records, cloned"
    assert data["response_mask"].unbind()[0].tolist() == [0]
    assert data["rm_scores"].unbind()[0].tolist() == [0]

    fetched = queue.kv_batch_get(padded.keys, "train", ["extra_fields"])
    ours = rows.Rows.read(padded.keys, padded.tags, list(fetched["extra_fields"]))
    assert len(ours.turns()) == 3
    assert set(ours.turns().group) == {"u"}


# ------------------------------------------------------------------------------- trap 8


@pytest.mark.parametrize(("critic", "step", "expected"), [(False, 1, 8), (True, 1, 24), (True, 0, 12)])
def test_mini_batches_count_rows(critic, step, expected):
    """In rows, `ppo_mini_batch_size * rollout.n`, whatever the number of trajectories."""
    actor = SimpleNamespace(ppo_mini_batch_size=4)
    rollout = SimpleNamespace(n=2)
    trainer = SimpleNamespace(
        use_critic=critic,
        global_steps=step,
        config=SimpleNamespace(
            critic=SimpleNamespace(ppo_mini_batch_size=6),
            trainer=SimpleNamespace(critic_warmup=1),
            actor_rollout_ref=SimpleNamespace(actor=actor, rollout=rollout),
        ),
    )
    assert PPOTrainer._get_required_batch_multiple(trainer, dp_size=2) == expected
    source = inspect.getsource(PPOTrainer._update_actor)
    assert "ppo_mini_batch_size = ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n" in source


# ------------------------------------------------------------------------------- trap 9


def test_value_before_token():
    """Of prompt + response, `values[t]` stands before response token t; the one after the last is lost."""
    whole = nested([10, 11, 12, 13, 14], [20, 21, 22])  # prompts of 3 and 1 tokens
    mask = nested([1, 1], [1, 1])
    assert [row.tolist() for row in response_from_nested(whole, mask).unbind()] == [[12, 13], [20, 21]]


# ------------------------------------------------------------------------------- trap 10


def test_loss_and_response_mask_are_separate(queue):
    """Both are stored; the losses read the one, the normaliser of the loss the other."""
    store([output(1.0, {"reward_extra_info": {}})])
    changed = TensorDict({"response_mask": nested([1, 0])}, batch_size=1)
    queue.kv_batch_put(["u_0_0"], "train", changed)
    data = queue.kv_batch_get(["u_0_0"], "train")
    assert data["response_mask"].values().tolist() == [1, 0]
    assert data["loss_mask"].values().tolist() == [1, 1]
    workers = Path(verl.__file__).parent / "workers"
    assert 'data["loss_mask"].sum()' in (workers / "engine/fsdp/transformer_impl.py").read_text()
    losses = (workers / "utils/losses.py").read_text()
    ppo_loss, value_loss = (
        losses.split(f"def {name}(")[1].split("\ndef ")[0] for name in ("ppo_loss", "value_loss")
    )
    for loss in (ppo_loss, value_loss):
        assert 'data["response_mask"]' in loss
        assert "loss_mask=" not in loss.replace("loss_mask=response_mask", "")


# ------------------------------------------------------------------------------- trap 11


def our_metric_names():
    """Those that a training step can produce, from the functions themselves and the trainer's source."""
    trajectory = played()
    session = trajectory.info | {"return": 1.0, "scores": rows.scores(trajectory)}
    turns = TurnBatch.from_trajectories([trajectory])
    made = metrics.of_sessions([session]) | metrics.of_turns(turns, np.zeros(len(turns))) | of_vine([])
    written = re.findall(r'"(multiturn/[^"{}]+)"', (PACKAGE / "trainer.py").read_text())
    assert len(written) >= 6
    assert len(made) >= 12
    return sorted({*made, *written})


def test_metric_names_choose_reduction():
    aggregator = MetricsAggregator()
    assert aggregator._get_aggregation_type("multiturn/terminated/mean") == "min", "the trap: a substring"
    assert aggregator._get_aggregation_type("multiturn/total_return/mean") == "sum"
    wrong = {name: aggregator._get_aggregation_type(name) for name in our_metric_names()}
    assert {name for name, kind in wrong.items() if kind != "weighted_avg"} == set()
    assert all(name.startswith("multiturn/") and name.endswith("/mean") for name in wrong)


def test_metrics_are_weighted_by_rows():
    aggregator = MetricsAggregator()
    aggregator.add_step_metrics({"multiturn/success/mean": 1.0}, sample_count=3)
    aggregator.add_step_metrics({"multiturn/success/mean": 0.0}, sample_count=1)
    assert aggregator.get_aggregated_metrics() == {"multiturn/success/mean": 0.75}


# ------------------------------------------------------------------------------- trap 12


def test_servers_sleep_right_after_sampling():
    slept = []
    manager = SimpleNamespace(sleep_replicas=lambda: slept.append(True))
    PPOTrainerSync.on_sample_end(SimpleNamespace(checkpoint_manager=manager, curr_step_profile=False))
    assert slept == [True]
    step = inspect.getsource(PPOTrainer._step_once)
    order = ["replay_buffer.sample(", "on_sample_end()", "_balance_batch(", "_compute_advantage("]
    assert sorted(order, key=step.index) == order


def test_sessions_of_a_prompt_share_a_worker(queue):
    """One worker runs all n sessions of a prompt, so they can share what it holds."""
    here, seen = worker(n=3), []

    async def session(sampling_params, *, trajectory, trace, session_id, **prompt):
        seen.append((session_id, prompt["uid"]))

    here._run_agent_loop = session
    asyncio.run(here._run_prompt({"uid": "u"}, {}, {"validate": False}))
    assert sorted(seen) == [(0, "u"), (1, "u"), (2, "u")]
    assert queue.tags["train", "u"]["status"] == "finished"


# ------------------------------------------------------------------------------- trap 13


def server_client(outputs):
    """verl's client with servers that are no Ray actors; the calls they got."""
    calls, pending = [], iter(outputs)

    async def remote(**given):
        calls.append(given)
        return next(pending)

    server = SimpleNamespace(generate=SimpleNamespace(remote=remote))
    client = LLMServerClient.__new__(LLMServerClient)
    rollout = SimpleNamespace(name="vllm", full_determinism=False)
    client.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))

    async def acquire(request_id, **_):
        calls.append(request_id)
        return "server", server

    client._acquire_server, client._release_server = acquire, lambda *_, **__: None
    return client, calls


def test_generate_is_one_completion():
    client, calls = server_client([TokenOutput(token_ids=[5, 6], log_probs=[-0.5, -0.25])])
    params = {"temperature": 1.0, "max_tokens": 2, "seed": 3}
    out = asyncio.run(client.generate("r", prompt_ids=[1], sampling_params=params))
    routed, sent = calls
    assert routed == "r"
    assert sent["sampling_params"] == params
    assert (out.token_ids, out.log_probs) == ([5, 6], [-0.5, -0.25])
    assert get_type_hints(TokenOutput)["token_ids"] == list[int]
    assert not {"n", "num_samples"} & set(inspect.signature(LLMServerClient.generate).parameters)


def test_routing_id_is_sticky():
    router = GlobalRequestLoadBalancer({"a": "A", "b": "B", "c": "C"})
    first = router.acquire_server("trajectory")
    others = {router.acquire_server(f"other {i}")[0] for i in range(8)}
    assert others == {"a", "b", "c"}
    assert [router.acquire_server("trajectory") for _ in range(5)] == [first] * 5


def test_our_loop_routes_a_trajectory_by_one_id():
    tree = ast.parse((PACKAGE / "rollout" / "loop.py").read_text())
    run = next(node for node in ast.walk(tree) if getattr(node, "name", "") == "run")
    generate = next(node for node in run.body if getattr(node, "name", "") == "generate")
    made = [node for node in ast.walk(run) if getattr(node, "id", "") == "uuid4"]
    assert len(made) == 1
    assert made[0] not in list(ast.walk(generate)), "one id per trajectory, not one per turn"
    sent = {
        word.arg: word.value
        for node in ast.walk(generate)
        if isinstance(node, ast.Call)
        for word in node.keywords
    }
    assert sent["request_id"].id == "request_id"


# ------------------------------------------------------------------------------- trap 14


def buffer(**given):
    defaults = {
        "trainer_mode": "sync",
        "trainer_config": {},
        "max_off_policy_threshold": None,
        "max_off_policy_strategy": "drop",
        "sampler_kwargs": {},
        "poll_interval": 0.0,
    }
    return ReplayBuffer(**defaults | given)


def prompt(queue, uid, status):
    queue.kv_batch_put([uid], "train", tags=[{"is_prompt": True, "status": status, "global_steps": 1}])


def test_failed_session_keeps_group(queue):
    here = worker(n=3)

    async def session(sampling_params, *, trajectory, trace, session_id, **fields):
        if session_id == 1:
            raise RuntimeError("the environment broke")
        fields = {"session_id": session_id, "global_steps": 1, **fields}
        await here._agent_loop_postprocess([output(1.0, {"reward_extra_info": {}})], False, **fields)

    here._run_agent_loop = session
    prompt(queue, "u", "pending")
    asyncio.run(here._run_prompt({"uid": "u"}, {}, {"validate": False}))
    assert queue.tags["train", "u"]["status"] == "failure"
    batch, found = buffer().sample(1, "train", 1)
    assert batch.keys == ["u_0_0", "u_2_0"], "trained on the survivors"
    assert found == {}, "and nothing says so"


def test_no_survivor_raises_what_we_catch(queue):
    prompt(queue, "u", "failure")
    sampler = buffer()
    with pytest.raises(RuntimeError, match="no materializable trajectories"):
        sampler.sample(1, "train", 1)
    assert (sampler.finished_keys["train"], sampler.failure_keys["train"]) == (set(), {"u"})
    assert ("train", "u") in queue.tags, "verl leaves its markers; we clear them"
    source = inspect.getsource(MultiTurnMixin._sample_some)
    assert "no materializable trajectories" in source


def test_no_timeout_around_loop():
    """One environment that hangs would stop a run for ever: our pool has the time-outs."""
    for function in (
        Worker.generate_sequences,
        Worker._run_prompt,
        AgentLoopWorker._run_agent_loop,
        ReplayBuffer.sample,
        ReplayBuffer._wait_for_next_poll,
    ):
        assert not re.search(r"\bwait_for\(|time_?out", inspect.getsource(function), re.I), function


# ------------------------------------------------------------------------------- trap 15


@pytest.mark.parametrize(("scores", "dropped"), [((1.0, 1.0), True), ((1.0, 0.9), False)])
def test_group_filter_reads_row_scores(queue, scores, dropped):
    """Equal row scores drop a group, so a penalty inside the score would keep a group without signal."""
    for session, score in enumerate(scores):
        store([output(score, {"reward_extra_info": {}}, length=1 + session)], session=session)
    prompt(queue, "u", "finished")
    sampler = buffer(
        filter_groups_metric="reward", refill_fn=lambda n: n, train_batch_size=1, gen_batch_size=1
    )
    sampler._sync_metadata_from_transfer_queue()
    assert sampler._dapo_filtered_keys("train")[0] == ({"u"} if dropped else set())


# ------------------------------------------------------------------------------- signatures

SIGNATURES = {
    # overridden by MultiTurnMixin
    PPOTrainer.__init__: "self config",
    PPOTrainer.fit: "self agent_loop_manager",
    PPOTrainer._compute_metrics: "self batch metrics timing_raw global_steps epoch",
    PPOTrainer._fetch_one_gen_batch: "self",
    PPOTrainer._submit_batch_to_rollout: "self batch",
    PPOTrainer._balance_batch: "self batch metrics logging_prefix keep_minibatch",
    PPOTrainer._compute_advantage: "self batch metrics",
    PPOTrainer._step_once: "self metrics timing_raw sample_batch_size",
    PPOTrainer._get_required_batch_multiple: "self dp_size",
    PPOTrainer._validate: "self",
    PPOTrainer._setup: "self",
    PPOTrainer._load_checkpoint: "self",
    PPOTrainer._save_checkpoint: "self",
    PPOTrainer.step: "self metrics timing_raw",
    PPOTrainer._init_tokenizer: "self",
    PPOTrainer.init: "self",
    ReplayBuffer.sample: "self global_steps partition_id batch_size",
    ReplayBufferAsync.sample: "self global_steps partition_id batch_size",
    AgentLoopBase.run: "self sampling_params kwargs",
    # wrapped by GuardedRun
    ReplayBuffer._wait_for_next_poll: "self partition_id last_debug_time",
    # called
    PPOTrainer._add_prompts_to_generate: "self num_prompts",
    PPOTrainer.get_llm_client: "self",
    KVBatchMeta.reorder: "self indexes",
    tensordict_utils.assign_non_tensor_stack: "tensor_dict key val",
    LLMServerClient.generate: "self request_id prompt_ids sampling_params image_data video_data audio_data "
    "mm_processor_kwargs kwargs",
    main_ppo.run_ppo: "config task_runner_class",
    Runner.run: "self config",
    register_trainer: "name",
    # patched on a CPU: tests/test_cpu.py
    distributed.initialize_global_process_group_ray: "timeout_second backend",
    model.load_valuehead_model: "local_path torch_dtype model_config trust_remote_code",
    metric_utils.process_validation_metrics: "data_sources sample_uids infos_dict seed expected_acc_counts",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signature(function):
    names = [name for name in inspect.signature(function).parameters if not name.startswith("_ray")]
    assert " ".join(names) == SIGNATURES[function]


@pytest.mark.parametrize("name", ["kv_batch_get", "kv_batch_put", "kv_clear"])
def test_transfer_queue_signature(name):
    import transfer_queue

    expected = {
        "kv_batch_get": ["keys", "partition_id", "select_fields"],
        "kv_batch_put": ["keys", "partition_id", "fields", "tags"],
        "kv_clear": ["keys", "partition_id"],
    }[name]
    assert list(inspect.signature(getattr(transfer_queue, name)).parameters)[: len(expected)] == expected


def test_every_override_exists_in_verl():
    """A hook that verl renames would silently stop being called."""
    ours = {"_sample", "_sample_some", "_clear", "_roll_out_again", "_turn_advantages", "_rows", "_record"}
    ours |= {"_size_mini_batches", "_recorded_metrics", "_keep_good", "_shrink", "_members", "_put", "_vine"}
    ours |= {"_audit", "_measure_information", "_token_advantages", "_rewards", "_place_rewards", "_weigh"}
    ours |= {
        "_listen",
        "_dialogues",
        "_ask",
        "_decode",
        "_speak_in_silico",
        "_critic_advantages",
        "_train_critic",
        "_put_credit",
    }
    ours |= {"_judge_turns", "_in_silico_advantages", "_put_numbers", "_checkpoint", "_resume", "_resumed"}
    ours |= {"_caveats", "_averaged", "_updates_of"}
    ours |= {"_measured", "_complete_validation", "close"}
    ours |= {"_alive", "_last_words", "_step", "_impatient", "_check_groups", "_keep_best"}
    ours |= {"_q_advantages", "_q_values"}
    defined = vars(MultiTurnMixin) | vars(StarPOSteps) | vars(QSteps) | vars(ArCHerSteps) | vars(GuardedRun)
    defined |= vars(RecordedSteps)
    overrides = {name for name, value in defined.items() if inspect.isfunction(value)} - ours
    assert {"fit", "_validate", "_compute_advantage", "_step_once"} <= overrides
    for base in (PPOTrainerSync, PPOTrainerColocateAsync):
        assert overrides == {name for name in overrides if callable(getattr(base, name, None))}
        assert not any(hasattr(base, name) for name in ours), "one of our own names now hides one of verl's"
    for trainer in (MultiTurnTrainer, MultiTurnColocateAsyncTrainer):
        assert trainer.__mro__[1] is MultiTurnMixin


def test_phases_are_methods_that_verl_calls_on_the_trainer():
    """They are wrapped on the instance, so verl must call them through it."""
    source = inspect.getsource(PPOTrainer.fit) + inspect.getsource(PPOTrainer._step_once)
    for name in PHASES | BEGINS:
        assert callable(getattr(PPOTrainer, name)), name
        assert f"self.{name}(" in source, name
    assert "self._wait_for_next_poll(" in inspect.getsource(ReplayBuffer.sample)


def test_rays_list_of_actors_needs_no_dashboard():
    """A private function of Ray: its public one asks the dashboard, which a run does without."""
    from ray._private import state

    assert all(p.default is None for p in inspect.signature(state.actors).parameters.values())
    fields = inspect.getsource(state.GlobalState._gen_actor_info)
    for name in ("ActorID", "ActorClassName", "State", "Address", "IPAddress", "Pid"):
        assert f'"{name}"' in fields, name


def test_overrides_are_called_as_we_declare_them():
    """The call sites: by keyword or position, as our overrides take them."""
    step, validate = (inspect.getsource(f) for f in (PPOTrainer._step_once, PPOTrainer._validate))
    assert re.search(r"sample\(\s*global_steps=.*\s*partition_id=.*\s*batch_size=", step)
    assert re.search(r"sample\(\s*global_steps=.*partition_id=\"val\".*batch_size=", validate, re.S)
    assert "self._balance_batch(batch, metrics=metrics)" in step
    assert "self._compute_advantage(batch, metrics=metrics)" in step
    fit = inspect.getsource(PPOTrainer.fit)
    assert "self._compute_metrics(batch, metrics, self.timing_raw, global_steps=self.global_steps" in fit
    assert "self.step(metrics, self.timing_raw)" in fit
    assert fit.index("self.on_step_begin()") < fit.index("self.step(") < fit.index("self._save_checkpoint()")
    assert fit.index("self._save_checkpoint()") < fit.index("self.on_step_end()")
    assert fit.index("current_epoch = (self.global_steps - 1) // self.steps_per_epoch") > 0
    assert fit.index("self.on_step_end()") < fit.index("self._compute_metrics(") < fit.index("tq.kv_clear(")
    assert "self._fetch_one_gen_batch()" in inspect.getsource(PPOTrainer._next_train_batch)
    for submits in (PPOTrainer._add_prompts_to_generate, PPOTrainer._add_batch_to_generate):
        assert "self._submit_batch_to_rollout(batch)" in inspect.getsource(submits)


def test_the_critic_is_loaded_once_the_step_is_known_and_saved_before_the_mark():
    """verl loads its checkpoint at the end of its setup, with the resource pools there; `_save_checkpoint`
    ends with the note that a checkpoint is complete, and keeps the actor's folders only."""
    setup = inspect.getsource(PPOTrainer._setup)
    assert setup.index("create_resource_pool()") < setup.index("self._load_checkpoint()")
    load = inspect.getsource(PPOTrainer._load_checkpoint)
    for name in ("resume_path", "resume_from_path", "self.global_steps = int("):
        assert name in load
    save = inspect.getsource(PPOTrainer._save_checkpoint)
    assert 'f"global_step_{self.global_steps}"' in save and 'local_global_step_folder, "actor"' in save
    assert save.index("self.actor_rollout_wg.save_checkpoint(") < save.index(
        "latest_checkpointed_iteration.txt"
    )
    assert '"global_pool"' in inspect.getsource(PPOTrainer._init_resource_pool_mgr)


def test_names_our_trainer_reads(config):
    trainer = MultiTurnTrainer(config)
    assert trainer.use_critic is False
    for name in ("finished_keys", "failure_keys"):
        assert getattr(trainer.replay_buffer, name)["train"] == set()
    # Set later than the constructor, by verl's own code.
    whole = inspect.getsource(PPOTrainer)
    for name in ("total_training_steps", "global_steps", "train_dataloader_it"):
        assert re.search(rf"self\.{name} [+]?= ", whole), name


def test_keys_are_uid_session_row(queue):
    """verl splits them at underscores, the uid first: an underscore in a uid would cut it short."""
    store([output(1.0, {"reward_extra_info": {}})] * 1, uid="000001-000002", session=3)
    assert list(queue.tags) == [("train", "000001-000002_3_0")]
    prompt(queue, "a_b", "finished")
    queue.kv_batch_put(["a_b_0_0"], "train", tags=[{"status": "success"}])
    with pytest.raises(RuntimeError, match="no materializable"):
        buffer().sample(1, "train", 1)


def test_extra_fields_survive_the_queue_as_dicts(queue):
    column = NonTensorStack({"turns": [{"span": [0, 2]}]}, {"turns": []})
    queue.kv_batch_put(["a_0_0", "a_0_1"], "train", TensorDict({"extra_fields": column}, batch_size=2))
    fetched = list(queue.kv_batch_get(["a_0_0", "a_0_1"], "train")["extra_fields"])
    ours = rows.Rows.read(["a_0_0", "a_0_1"], [{}, {}], fetched)
    assert ours.fields == [{"turns": [{"span": [0, 2]}]}, {"turns": []}]


def test_run_ppo_needs_two_calls_of_its_runner(config, monkeypatch):
    """`.remote()` and `.run.remote(config)`: what the in-process runner of main.py offers."""
    seen = []

    class Here:
        class run:
            @staticmethod
            def remote(given):
                seen.append(given)
                return "handle"

        @classmethod
        def remote(cls):
            return cls

    monkeypatch.setattr(main_ppo.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(main_ppo.ray, "get", lambda handle: seen.append(handle))
    main_ppo.run_ppo(config, task_runner_class=Here)
    assert seen == [config, "handle"]


def test_runner_registers_the_trainers_and_their_mode(config, monkeypatch):
    """main.py turns the mode into the registered name; verl looks it up, our __init__ turns it back."""
    from verl_multiturn import main

    seen = []
    monkeypatch.setattr(Runner, "run", lambda self, given: seen.append(given.trainer.v1.trainer_mode))
    monkeypatch.setattr(ray, "put", lambda value: value)
    main._runner(in_process=True).remote().run.remote(config)
    assert seen == ["multiturn_sync"]


def test_names_that_main_silences():
    assert callable(main_ppo.pprint)
    assert callable(trainer_base.pprint)


def test_registered_agent_loop():
    from verl.experimental.agent_loop import agent_loop

    target = agent_loop._agent_loop_registry["multiturn"]["_target_"]
    assert target == "verl_multiturn.rollout.loop.MultiTurnLoop"
    assert issubclass(MultiTurnLoop, AgentLoopBase)


def test_config_keys_of_verl_that_we_set(composed):
    """compose() refuses unknown keys only against verl's own YAML, so that is what is asked here."""
    from omegaconf import OmegaConf

    base = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/ppo_trainer.yaml")
    assert base.trainer.v1.trainer_mode == "sync"
    assert "custom_cls" in OmegaConf.load(Path(verl.__file__).parent / "trainer/config/data/legacy_data.yaml")
    assert composed.actor_rollout_ref.model.external_lib == "verl_multiturn.rollout.loop"
    assert composed.actor_rollout_ref.rollout.agent.default_agent_loop == "multiturn"


# ------------------------------------------------------------------------------- who imports what

MAY_IMPORT_VERL = {
    "trainer.py",
    "kl.py",  # the actor's loss, whose KL it scales
    "information_probe.py",  # the padding helpers, to read log-probabilities
    "main.py",
    "rollout/rows.py",
    "rollout/loop.py",
    "cpu/plugin.py",
    "cpu/vllm_worker.py",
    "samplers.py",  # the chat builder, to evaluate with the prompts of training
    "doctor_sample.py",  # likewise, to show one
}


def imported(path):
    """The modules that a file of ours imports, at whatever depth."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def importers(package):
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(name.split(".")[0] == package for name in imported(path))
    }


def test_only_the_named_files_import_verl():
    assert importers("verl") == MAY_IMPORT_VERL
    trainers = {"trainer.py", "trainer_archer.py", "trainer_q.py", "trainer_starpo.py"}
    assert importers("transfer_queue") == trainers


def test_the_package_does_not_import_the_environments():
    assert importers("environments") == set()


def test_cpu_settings_have_no_side_effects():
    code = (
        "import os, sys; before = dict(os.environ)\n"
        "import verl_multiturn.cpu, verl_multiturn.cpu.settings\n"
        "assert dict(os.environ) == before\n"
        "print(*{'torch', 'verl', 'ray', 'vllm', 'numpy'} & set(sys.modules))\n"
        "print('verl_multiturn.cpu.plugin' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=dict(os.environ),
    )
    assert run.stdout.split("\n")[:2] == ["", "False"]
