"""From a recipe and GPUs to memory, fit, what to change, seconds and hours."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from verl_multiturn.errors import unknown
from verl_multiturn.planning import formulas as of
from verl_multiturn.planning.archer import Archer
from verl_multiturn.planning.formulas import Gpu, Rates, Shape

DATA = Path(__file__).parent / "data"
GB = 1e9
SPARE = 0.92  # share of a GPU that is left beside CUDA's context, fragments and communication
CPU = "hardware=cpu needs no plan: its model is a few hundred thousand parameters"
FILL = 0.5  # of turns, prompts and utterances, where nothing was recorded
ENGINE_OVERHEAD = 2 * GB  # vLLM's graphs and activations


@cache
def data(name: str) -> Any:
    """One of the data files: models, gpus, published."""
    return yaml.safe_load((DATA / f"{name}.yaml").read_text(encoding="utf-8"))


def shape(model: str) -> Shape:
    """A model's shape: from a local config.json, else by name.

    Raises:
        ValueError: neither; or a config.json without the sizes of a decoder.
    """
    path = Path(model).expanduser() / "config.json"
    if path.is_file():
        try:
            return _configured(json.loads(path.read_text(encoding="utf-8")))
        except KeyError as error:
            raise ValueError(f"{path} is not of a model that can be planned: it lacks {error}") from None
    name = model.rstrip("/").rpartition("/")[2]
    if name not in data("models"):
        raise unknown("model", name, data("models"), "A local folder with config.json will do as well.")
    return Shape(**data("models")[name])


GPT2 = {"n_layer": "num_hidden_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads"}
PLAIN = {"gpt2": 2, "phi": 1, "bert": 2, "roberta": 2}  # model_type -> norms of a layer


def _configured(given: dict[str, Any]) -> Shape:
    """The shape in a config.json; GPT-2's has names of its own."""
    kind = given.get("model_type", "")
    given = {GPT2.get(name, name): value for name, value in given.items()}
    layers, hidden = given["num_hidden_layers"], given["hidden_size"]
    if kind == "gpt2":
        given |= {"intermediate_size": given.get("n_inner") or 4 * hidden}
        given.setdefault("tie_word_embeddings", True)
        given["max_position_embeddings"] = given["n_positions"]
    learnt = kind in PLAIN and kind != "phi"
    heads = given["num_attention_heads"]
    return Shape(
        layers, hidden, given["intermediate_size"], heads, given.get("num_key_value_heads") or heads,
        given["vocab_size"], bool(given.get("tie_word_embeddings", kind in ("bert", "roberta"))),
        bool(given.get("attention_bias", kind == "qwen2")), given.get("head_dim"),
        kind in PLAIN, PLAIN.get(kind, 2), given["max_position_embeddings"] if learnt else 0,
    )  # fmt: skip


def gpus(text: str) -> tuple[int, Gpu]:
    """Number and kind in 4xA100-80G; the memory may be left out.

    Raises:
        ValueError: it does not read so, or the GPU is unknown.
    """
    found = re.fullmatch(r"(\d+)\s*x\s*([A-Za-z0-9]+)(?:-(\d+)GB?)?", text.strip())
    if found is None or int(found[1]) < 1:
        raise ValueError(f"--gpus {text!r} is not a number of GPUs, such as 4xA100-80G")
    known = {name.upper(): name for name in data("gpus")}
    if (name := known.get(found[2].upper(), "")) not in data("gpus"):
        raise unknown("GPU", found[2], data("gpus"))
    sheet = data("gpus")[name]
    memory = int(found[3]) if found[3] else sheet["memory"][0]
    if memory not in sheet["memory"]:
        raise unknown(f"memory of {name}", memory, sheet["memory"])
    return int(found[1]), Gpu(
        f"{name}-{memory}G", memory * GB, sheet["tflops"] * 1e12, sheet["bandwidth"] * GB
    )


@dataclass(frozen=True)
class Setup:
    """What a run asks of its GPUs; tokens are means over a step.

    Attributes:
        model, gpu, gpus: what runs where.
        micro_tokens: tokens of a micro-batch on one GPU.
        trajectories, turns, rows, row_tokens, utterance: of a step: how many, turns of each, training
            rows, tokens of a row, tokens written in a turn.
        max_tokens: of the longest sequence.
        rollouts: K of VinePPO; 0: none.
        archer: what ArCHer asks beside the actor; None: another algorithm.
        steps: of the run.
    """

    model: Shape
    gpu: Gpu
    gpus: int
    trajectories: int
    turns: float
    rows: float
    row_tokens: float
    utterance: float
    tensor_parallel: int = 1
    micro_tokens: int = 16384
    max_tokens: int = 4096
    max_seqs: int = 1024
    utilization: float = 0.5
    critic: bool = False
    reference: bool = False
    checkpointing: bool = True
    param_offload: bool = False
    optimizer_offload: bool = False
    reference_offload: bool = False
    cpu_states: bool = False
    free_engine: bool = True
    lora_rank: int = 0
    epochs: int = 1
    rollouts: float = 0
    archer: Archer | None = None
    steps: int = 1


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU, by what they are for; `update` and `rollout` are the two peaks."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    gathered: float
    activations: float
    logits: float
    engine_weights: float
    kv_cache: float
    kv_tokens: float
    utterance_critic: float
    update: float
    rollout: float


def memory(s: Setup) -> Memory:
    """Peak memory of one GPU while it updates and while it rolls out; actor and critic together.

    ArCHer's critic stands on one GPU, which bounds the run; it trains while verl's workers rest.
    """
    p = of.parameters(s.model)
    trained = of.lora_parameters(s.model, s.lora_rank) if s.lora_rank else p
    roles = 2 if s.critic else 1
    weights, gradients, optimizer = (
        0.0 if s.cpu_states else roles * one for one in of.state_bytes(p, trained, s.gpus)
    )
    reference = of.FP32 * p / s.gpus if s.reference and not s.reference_offload and not s.lora_rank else 0.0
    gathered = of.gathered_bytes(s.model)
    activations = of.activation_bytes(s.model, s.micro_tokens, s.checkpointing)
    logits = of.logit_bytes(s.model, s.micro_tokens)
    engine = s.utilization * s.gpu.memory
    engine_weights = of.BF16 * p / s.tensor_parallel
    cache_ = max(0.0, engine - engine_weights - ENGINE_OVERHEAD)
    # What is offloaded comes back for its own update only: one role of two.
    own = 1 / roles
    held = weights * (own if s.param_offload else 1) + gradients * own
    moments = optimizer * (own if s.optimizer_offload else 1)
    passing = 0.0 if s.optimizer_offload else moments  # during forward and backward
    asleep = 0.0 if s.free_engine else engine
    peak = max(held + passing + gathered + activations + logits, held + moments)
    resting = (0 if s.param_offload else weights) + (0 if s.optimizer_offload else optimizer) + reference
    kv_tokens = cache_ / (of.kv_bytes_per_token(s.model) / s.tensor_parallel)
    beside, judging = (s.archer.held(), s.archer.activations()) if s.archer else (0.0, 0.0)
    update = max(peak + reference, resting + judging) + asleep + beside
    return Memory(
        weights, gradients, optimizer, reference, gathered, activations, logits, engine_weights, cache_,
        kv_tokens, beside + judging, update=update, rollout=resting + engine + beside,
    )  # fmt: skip


def lacking(s: Setup) -> dict[str, float]:
    """What does not fit and by how much: bytes of "update" and "rollout", tokens of "cache"."""
    m, room = memory(s), SPARE * s.gpu.memory
    over = {"update": m.update - room, "rollout": m.rollout - room, "cache": s.max_tokens - m.kv_tokens}
    return {what: much for what, much in over.items() if much > 0}


def problems(s: Setup) -> list[str]:
    """Why it does not fit, in words; [] where it fits."""
    m, room = memory(s), SPARE * s.gpu.memory
    words = {
        "update": f"the update needs {m.update / GB:.0f} GB of {room / GB:.0f}",
        "rollout": f"the rollout needs {m.rollout / GB:.0f} GB of {room / GB:.0f}",
        "cache": f"the KV cache holds {m.kv_tokens:,.0f} tokens, one sequence has {s.max_tokens:,}",
    }
    return [words[what] for what in lacking(s)]


CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("actor_rollout_ref.model.enable_gradient_checkpointing=true", {"checkpointing": True}),
    ("actor_rollout_ref.ref.fsdp_config.param_offload=true", {"reference_offload": True}),
    ("actor_rollout_ref.actor.fsdp_config.optimizer_offload=true (critic: too)", {"optimizer_offload": True}),
    ("actor_rollout_ref.actor.fsdp_config.param_offload=true (critic: too)", {"param_offload": True}),
    ("actor_rollout_ref.rollout.gpu_memory_utilization=0.4", {"utilization": 0.4}),
    ("actor_rollout_ref.actor.fsdp_config.offload_policy=true (fsdp2)", {"cpu_states": True}),
    ("actor_rollout_ref.model.lora_rank=64", {"lora_rank": 64}),
    ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu: the longest row", {"micro_tokens": None}),
    ("actor_rollout_ref.rollout.gpu_memory_utilization=0.85", {"utilization": 0.85}),
)  # fmt: skip


def changes(s: Setup) -> tuple[list[str], bool]:
    """What to set, one after another, until it fits; and whether it then does.

    A change that helps with nothing that is lacking, or that makes something else lacking, is left out.
    """
    chosen = []
    for text, given in CHANGES:
        before = lacking(s)
        longest: dict[str, Any] = {
            name: s.max_tokens if value is None else value for name, value in given.items()
        }
        changed = replace(s, **longest)
        after = lacking(changed)
        helps = any(after.get(what, 0.0) < much for what, much in before.items())
        if helps and after.keys() <= before.keys():
            chosen.append(text.replace(": the longest row", f"={s.max_tokens}"))
            s = changed
    return chosen, not lacking(s)


@dataclass(frozen=True)
class Seconds:
    """Of one step, by phase."""

    generation: float
    forward: float
    update: float
    asking: float = 0.0
    utterance_critic: float = 0.0

    @property
    def step(self) -> float:
        """All of it."""
        return self.generation + self.forward + self.update + self.asking + self.utterance_critic


def seconds(s: Setup, rates: Rates) -> Seconds:
    """Seconds of a step; `formulas` says where each term comes from."""
    p, engines = of.parameters(s.model), max(1, s.gpus // s.tensor_parallel)
    peak = s.gpus * s.gpu.flops * rates.compute
    more = 1 + of.vine_turns(s.turns, s.rollouts)
    generated = s.trajectories * s.turns * s.utterance * more
    sequences = min(engines * s.max_seqs, s.trajectories * (1 + s.rollouts))
    context = s.row_tokens if s.rows > s.trajectories else s.row_tokens / 2
    decode = of.decode_seconds(
        s.model, s.gpu, rates, generated, context, sequences, engines, s.tensor_parallel
    )
    tokens = s.rows * s.row_tokens
    prefill = of.forward_flops(p, tokens) / peak
    forwards = 1 + s.reference + s.critic
    updates = s.epochs * (1 + s.critic)
    return Seconds(
        decode + prefill + s.turns * rates.turn,
        forwards * of.forward_flops(p, tokens) / peak,
        updates * of.update_flops(p, tokens, s.checkpointing) / peak,
        asking_seconds(s, rates),
        s.archer.seconds(s.gpu, rates) if s.archer else 0.0,
    )


def asking_seconds(s: Setup, rates: Rates) -> float:
    """Seconds of the utterances that ArCHer asks of the policy after a rollout, prefill included."""
    if s.archer is None:
        return 0.0
    engines, asked = max(1, s.gpus // s.tensor_parallel), s.archer.asked
    sequences = min(engines * s.max_seqs, s.archer.inflight, max(1.0, asked))
    written = asked * s.utterance
    decode = of.decode_seconds(
        s.model, s.gpu, rates, written, s.row_tokens, sequences, engines, s.tensor_parallel
    )
    read = of.forward_flops(of.parameters(s.model), asked * (s.row_tokens - s.utterance))
    return decode + read / (s.gpus * s.gpu.flops * rates.compute)


def calibrated() -> Rates:
    """Rates at which the first published run of data/published.yaml comes out as published.

    `compute` from its forward and update seconds, `turn` from its generation; `bandwidth` and `decode`
    stay at their defaults, for which nothing published says enough.
    """
    given = data("published")["calibration"][0]
    run, whole = _published(given), Rates(compute=1.0)
    ideal = seconds(run, whole)
    one = ideal.forward / (1 + run.reference + run.critic)  # the published figure is of one forward pass
    compute = (one + ideal.update) / (given["forward"] + given["update"])
    left = given["generation"] - seconds(run, replace(whole, compute=compute)).generation
    return Rates(compute=compute, turn=max(0.0, left / run.turns))


def errors(rates: Rates) -> Iterator[tuple[str, float, float, str]]:
    """(run, published seconds a step, estimated, mark) of every published run."""
    for given in data("published")["calibration"]:
        yield given["name"], given["step"], seconds(_published(given), rates).step, given["mark"]


def memory_errors() -> Iterator[tuple[str, float, float]]:
    """(what, published GB, estimated) of every published size of training states."""
    for given in data("published")["memory"]:
        p = of.parameters(shape(given["model"]))
        yield given["name"], given["gb"], sum(of.state_bytes(p, p, 1)) / GB


def _published(given: Mapping[str, Any]) -> Setup:
    count, gpu = gpus(given["gpus"])
    names = {one.name for one in fields(Setup)} - {"model", "gpu", "gpus"}
    chosen = {name: value for name, value in given.items() if name in names}
    return Setup(model=shape(given["model"]), gpu=gpu, gpus=count, **chosen)
