"""A recipe's configuration as `plan.Setup`, with what a recorded run knows better, and the printed plan.

How long episodes and rows are, no recipe says. Without a recorded run they are taken as the recipe's
limits times `FILL`, and the plan says so.
"""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from verl_multiturn.compose import plain
from verl_multiturn.critic.config import archer_config, critic_config
from verl_multiturn.env import Env
from verl_multiturn.load import load_class
from verl_multiturn.planning import archer as archers
from verl_multiturn.planning import formulas as of
from verl_multiturn.planning.formulas import Gpu
from verl_multiturn.planning.plan import (
    CPU,
    FILL,
    GB,
    SPARE,
    Setup,
    calibrated,
    changes,
    data,
    errors,
    memory,
    memory_errors,
    problems,
    seconds,
    shape,
)
from verl_multiturn.runs import Run

LOCAL_ENCODERS = ("small", "ngrams", "lines")  # 0.1 million parameters, or none
RATES = {"turns": "multiturn/turns/mean", "prompt": "prompt_length/mean", "response": "response_length/mean"}


def setup(config: DictConfig, count: int, gpu: Gpu, run: Run | None = None) -> Setup:
    """What a composed recipe asks of these GPUs.

    Args:
        config: of `configure.prepare`.
        count: number of GPUs.
        gpu: their kind.
        run: a recorded run of this environment and row layout, whose means replace the assumed ones.

    Raises:
        ValueError: a recipe for the CPU, an unknown model, a run without these means.
    """
    if config.trainer.device == "cpu":
        raise ValueError(CPU)
    actor, rollout, data_ = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.data
    settings, ref = config.multiturn, config.actor_rollout_ref.ref
    turn_rows = settings.row == "turn"
    turns, row, utterance = _lengths(config, run)
    trajectories = data_.train_batch_size * rollout.n
    longest = data_.max_prompt_length + data_.max_response_length
    fixed = actor.ppo_micro_batch_size_per_gpu
    micro = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else (fixed or 1) * longest
    share = settings.filter.value if settings.filter.strategy == "top_k" else 1.0
    rows = trajectories * (turns if turn_rows else 1) * share
    archer = _archer(config, trajectories * turns, row, utterance) if settings.algorithm == "archer" else None
    if archer and settings.archer.mode == "in_silico":
        rows = settings.archer.states
    return Setup(
        model=shape(str(config.actor_rollout_ref.model.path)),
        gpu=gpu,
        gpus=count,
        trajectories=trajectories,
        turns=turns,
        rows=rows,
        row_tokens=row,
        utterance=utterance,
        tensor_parallel=min(rollout.tensor_model_parallel_size, count),
        micro_tokens=micro,
        max_tokens=rollout.max_model_len or longest,
        max_seqs=rollout.max_num_seqs,
        utilization=rollout.gpu_memory_utilization,
        critic=bool(config.critic.enable),
        reference=bool(actor.use_kl_loss or config.algorithm.use_kl_in_reward),
        checkpointing=bool(config.actor_rollout_ref.model.enable_gradient_checkpointing),
        param_offload=bool(actor.fsdp_config.param_offload),
        optimizer_offload=bool(actor.fsdp_config.optimizer_offload),
        reference_offload=bool(ref.fsdp_config.param_offload),
        cpu_states=bool(actor.fsdp_config.offload_policy),
        free_engine=bool(rollout.free_cache_engine),
        lora_rank=int(OmegaConf.select(config, "actor_rollout_ref.model.lora_rank") or 0),
        epochs=actor.ppo_epochs,
        rollouts=settings.vine.rollouts / settings.vine.every if settings.algorithm == "vineppo" else 0,
        archer=archer,
        steps=config.trainer.total_training_steps or 1,
    )


def _archer(config: DictConfig, spoken: float, row: float, utterance: float) -> archers.Archer:
    """ArCHer's critic, and what it asks; `spoken`: utterances of the step."""
    settings = config.multiturn
    archer, critic = archer_config(plain(settings.archer)), critic_config(plain(settings.critic))
    known = settings.critic.gpus > 0 and critic.encoder not in LOCAL_ENCODERS
    in_silico = archer.states if archer.mode == "in_silico" else 0
    return archers.Archer(
        encoder=shape(critic.encoder) if known else None,
        updates=archer.updates,
        batch=critic.batch,
        micro_batch=critic.micro_batch,
        state=min(critic.max_tokens, row - utterance),
        utterance=min(critic.max_tokens, utterance),
        reads=archers.reads(critic.v_target, archer.utterances),
        asked=archers.asked(archer, critic),
        judged=spoken + in_silico,
        inflight=archer.max_inflight,
    )


def _lengths(config: DictConfig, run: Run | None) -> tuple[float, float, float]:
    """Turns of an episode, tokens of a row, tokens of an utterance."""
    data_, turn_rows = config.data, config.multiturn.row == "turn"
    if run is None:
        turns = max(1.0, FILL * _turn_limit(config.multiturn))
        utterance = FILL * config.multiturn.max_action_tokens
        prompt = FILL * data_.max_prompt_length
        response = utterance if turn_rows else min(data_.max_response_length, 1.5 * turns * utterance)
        return turns, prompt + response, utterance
    if absent := [name for name in RATES.values() if name not in run.metrics]:
        raise ValueError(f"{run.folder} has no {' and no '.join(absent)}: give a training run with --rates")
    mean = {what: float(run.metrics[name].mean()) for what, name in RATES.items()}
    row = mean["prompt"] + mean["response"]
    # A trajectory's response holds the observations between its turns as well: an upper bound.
    return mean["turns"], row, mean["response"] / (1 if turn_rows else mean["turns"])


def _turn_limit(settings: DictConfig) -> int:
    """The run's limit, else the environment's, which is not made: its data may be elsewhere."""
    limit = settings.max_turns or settings.env_kwargs.get("max_turns")
    limit = limit or getattr(load_class(settings.env, Env), "max_turns", None)
    if not isinstance(limit, int):
        raise ValueError(f"{settings.env} says only when made how long it plays: give multiturn.max_turns")
    return limit


def print_plan(s: Setup, assumed: bool, console: Console | None = None) -> bool:
    """Print memory, fit, changes, seconds and hours, and what the papers report; returns whether it fits."""
    console = console or Console()
    m = memory(s)
    p = of.parameters(s.model) / GB
    console.print(f"{p:.2f} billion parameters, {s.gpus} x {s.gpu.name}", highlight=False)
    console.print(_memory_table(s))
    why = problems(s)
    for line in why:
        console.print(f"does not fit: {line}", highlight=False)
    if not why:
        console.print(f"fits: {max(m.update, m.rollout) / GB:.0f} GB of {s.gpu.memory / GB:.0f} at the peak")
    else:
        steps, fits = changes(s)
        for step in steps:
            console.print(f"  set {step}", highlight=False, soft_wrap=True)
        more = "then it fits" if fits else f"that is not enough: more than {s.gpus} GPUs, or a smaller model"
        console.print(f"  {more}")
    for line in _time_lines(s, assumed):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_reported())
    return not why


def _memory_table(s: Setup) -> Table:
    m, table = memory(s), Table(box=SIMPLE, pad_edge=False, title="GB on each GPU", title_justify="left")
    table.add_column("what")
    table.add_column("GB", justify="right")
    roles = "actor and critic" if s.critic else "actor"
    for what, size in (
        (f"weights, {roles}, float32, sharded", m.weights),
        ("gradients", m.gradients),
        ("optimizer (Adam)", m.optimizer),
        ("reference model", m.reference),
        ("gathered layers, bfloat16", m.gathered),
        (f"activations of {s.micro_tokens:,} tokens", m.activations),
        ("their logits", m.logits),
        (f"engine: weights, bfloat16, over {s.tensor_parallel}", m.engine_weights),
        (f"engine: KV cache, {m.kv_tokens:,.0f} tokens", m.kv_cache),
        ("critic of utterances and its target, float32, on one GPU", m.utterance_critic),
        ("peak of the update", m.update),
        ("peak of the rollout", m.rollout),
        ("room", SPARE * s.gpu.memory),
    ):
        if s.archer or not what.startswith("critic of utterances"):
            table.add_row(what, f"{size / GB:.1f}")
    return table


def _time_lines(s: Setup, assumed: bool) -> Iterator[str]:
    rates = calibrated()
    time, known = seconds(s, rates), list(errors(rates))
    source = f"assumed: {FILL:.0%} of the recipe's limits" if assumed else "means of the recorded run"
    yield (
        f"a step: {time.step:.0f} s (generation {time.generation:.0f}, log-probs {time.forward:.0f}, updates "
        f"{time.update:.0f}); {s.steps} steps: {s.steps * time.step / 3600:.1f} h"
    )
    if s.archer:
        uncounted = "" if s.archer.encoder else " (a small one, or on the CPU: not counted)"
        yield (
            f"of it {time.utterance_critic:.0f} s for {s.archer.updates} updates of the critic of utterances "
            f"on {s.archer.batch} transitions{uncounted}, {time.asking:.0f} s for {s.archer.asked:,.0f} "
            "utterances asked of the policy (with a full replay)"
        )
    yield (
        f"of {s.trajectories} trajectories of {s.turns:.1f} turns, {s.rows:.0f} rows of {s.row_tokens:.0f} "
        f"tokens, {s.utterance:.0f} tokens a turn ({source})"
    )
    yield (
        f"rates from the first run below: {rates.compute:.0%} of the peak FLOP/s, {rates.turn:.1f} s a turn "
        "beside generation; turns and lengths of all of them are assumed, no source states them"
    )
    for name, published, estimated, mark in known:
        yield (
            f"  {name}: published {mark}{published:g} s a step, estimated {estimated:.0f} "
            f"({estimated / published - 1:+.0%})"
        )
    for name, published, estimated in memory_errors():
        error = estimated / published - 1
        yield f"  {name}: published {published:g} GB, estimated {estimated:.0f} ({error:+.0%})"


def _reported() -> Table:
    title = "What the papers report (? unverified, ≈ read off a plot, ° not the authors')"
    table = Table(box=SIMPLE, pad_edge=False, title=title, title_justify="left")
    names = ("paper", "run", "hardware", "time", "source")
    for name in names:
        table.add_column(name, overflow="fold")
    for row in data("published")["reported"]:
        table.add_row(*(f"{row[name]} {row['mark'] if name == 'time' else ''}".strip() for name in names))
    return table


def as_json(s: Setup) -> dict[str, Any]:
    """Everything that is printed, as numbers."""
    rates = calibrated()
    time = seconds(s, rates)
    gb = {name: value if name == "kv_tokens" else value / GB for name, value in vars(memory(s)).items()}
    steps = {"step": time.step, "hours": s.steps * time.step / 3600} | vars(time)
    return {"memory_gb": gb, "fits": not problems(s), "change": changes(s)[0], "seconds": steps}
