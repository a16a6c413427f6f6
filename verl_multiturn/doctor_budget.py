"""What a step amounts to: trajectories, rows, mini-batches, optimizer steps; token budgets."""

import math

from omegaconf import DictConfig

from verl_multiturn.compose import plain
from verl_multiturn.doctor_report import Line
from verl_multiturn.env import make

BATCH, BUDGET = "batch", "token budgets"


def lines(config: DictConfig) -> list[Line]:
    """Both parts."""
    return [*batch(config), *budgets(config)]


def turn_limit(config: DictConfig) -> int:
    """Turns an episode may have: the run's limit, else the environment's own."""
    settings = config.multiturn
    if settings.max_turns:
        return int(settings.max_turns)
    env = make(settings.env, **plain(settings.env_kwargs))
    env.close()
    return env.max_turns


def batch(config: DictConfig) -> list[Line]:
    """From tasks to optimizer steps; ranges where they depend on how long episodes are."""
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    trajectories, mini = config.data.train_batch_size * n, actor.ppo_mini_batch_size * n
    turn_rows = config.multiturn.row == "turn"
    limit = turn_limit(config)
    low, high = trajectories, trajectories * (limit if turn_rows else 1)
    devices = config.trainer.n_gpus_per_node * config.trainer.nnodes
    ranks = max(1, devices // actor.ulysses_sequence_parallel_size)
    # As `MultiTurnMixin._get_required_batch_multiple`: mini-batches follow the rows.
    steps = [max(1, round(rows / mini)) * actor.ppo_epochs for rows in (low, high)]
    why = f"a row per turn, at most {limit} turns" if turn_rows else "a row per trajectory, exact"
    found = [
        Line(
            BATCH, "ok", "trajectories", f"{config.data.train_batch_size} tasks x {n} = {trajectories} a step"
        ),
        Line(BATCH, "ok", "rows", f"{_range(low, high)} a step ({why})"),
        Line(
            BATCH,
            "ok",
            "mini-batch",
            f"about {mini} rows (ppo_mini_batch_size {actor.ppo_mini_batch_size} x {n}): a step divides "
            "its rows evenly",
        ),
        Line(
            BATCH, "ok", "optimizer steps", f"{_range(*steps)} per training step (epochs: {actor.ppo_epochs})"
        ),
    ]
    return [*found, *_groups(config, n), *_micro(config, mini // math.gcd(mini, ranks))]


def _groups(config: DictConfig, n: int) -> list[Line]:
    """Settings that leave a step without anything to learn from."""
    found = []
    if n == 1 and config.multiturn.algorithm in ("grpo", "rloo", "gigpo"):
        text = f"rollout.n=1: {config.multiturn.algorithm} compares trajectories of one task; use 4 to 16"
        found.append(Line(BATCH, "warn", "group size", text))
    sampling = config.actor_rollout_ref.rollout
    if sampling.top_p < 1 or sampling.top_k > 0:
        text = (
            f"rollout.top_p={sampling.top_p:g}, top_k={sampling.top_k} cut what is sampled, and the loss "
            "does not know: it compares with whole distributions; use top_p=1, top_k=-1"
        )
        found.append(Line(BATCH, "warn", "sampling", text))
    critic = config.critic.enable or config.multiturn.algorithm == "archer"
    if config.trainer.critic_warmup and not critic:
        text = (
            f"trainer.critic_warmup={config.trainer.critic_warmup} without a critic: nothing is trained "
            "before that step; leave it out"
        )
        found.append(Line(BATCH, "warn", "critic_warmup", text))
    return found


def _micro(config: DictConfig, mini_rows: int) -> list[Line]:
    """verl asserts after the first rollout what can be said now."""
    actor = config.actor_rollout_ref.actor
    if actor.use_dynamic_bsz:
        longest = _longest(config)
        capacity = actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size
        if capacity >= longest:
            return []
        text = (
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={actor.ppo_max_token_len_per_gpu} is less "
            f"than one row may have ({longest} tokens): raise it"
        )
        return [Line(BATCH, "FAIL", "micro-batch", text)]
    micro = actor.ppo_micro_batch_size_per_gpu
    if micro and mini_rows % micro:
        text = (
            f"ppo_micro_batch_size_per_gpu={micro} does not divide the {mini_rows} rows of a mini-batch: use "
            "actor_rollout_ref.actor.use_dynamic_bsz=true"
        )
        return [Line(BATCH, "FAIL", "micro-batch", text)]
    return []


def budgets(config: DictConfig) -> list[Line]:
    """Whether prompt, utterance and conversation fit each other and the engine."""
    data, action = config.data, config.multiturn.max_action_tokens
    rollout, turn_rows = config.actor_rollout_ref.rollout, config.multiturn.row == "turn"
    prompt, response = data.max_prompt_length, data.max_response_length
    need = _longest(config)
    limit = rollout.max_model_len or prompt + response
    text = (
        f"{prompt} of a prompt, {action} of an utterance"
        if turn_rows
        else f"{prompt} of the first prompt, {response} of the conversation, {action} of an utterance"
    )
    found = [Line(BUDGET, "ok", "tokens", text)]
    if need > limit:
        # A chat that never grows so long does no harm; one that does is refused by the engine.
        text = (
            f"actor_rollout_ref.rollout.max_model_len={limit} is less than the {need} tokens that the "
            "budgets allow, the engine refuses a longer chat: raise it, or lower the budgets in data"
        )
        found.append(Line(BUDGET, "FAIL" if prompt + action > limit else "warn", "max_model_len", text))
    else:
        found.append(Line(BUDGET, "ok", "max_model_len", f"{limit}, the budgets allow {need}"))
    turns = turn_limit(config)
    if not turn_rows and (fit := response // action) < turns:
        text = (
            f"at {action} tokens an utterance, data.max_response_length={response} holds {fit} of {turns} "
            "turns (observations not counted): longer episodes are cut there"
        )
        found.append(Line(BUDGET, "warn", "conversation", text))
    if turn_rows and response > action:
        text = (
            f"data.max_response_length={response}: a row's response has {action} at most; the rest is unused"
        )
        found.append(Line(BUDGET, "ok", "response", text))
    batched = rollout.max_num_batched_tokens
    if not rollout.enable_chunked_prefill and batched and batched < limit:
        text = f"rollout.max_num_batched_tokens={batched} < max_model_len without chunked prefill: raise it"
        found.append(Line(BUDGET, "FAIL", "batched tokens", text))
    return found


def _longest(config: DictConfig) -> int:
    """Tokens of the longest row."""
    turn_rows = config.multiturn.row == "turn"
    response = config.multiturn.max_action_tokens if turn_rows else config.data.max_response_length
    return int(config.data.max_prompt_length + response)


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"
