"""One scripted episode through the rollout and verl's rows: what is read, what is trained, what is glue.

The policy is the environment's expert (or random), speaking in the form that the run demands; all else
is the code and the tokenizer of a run.
"""

import asyncio
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_multiturn.compose import plain
from verl_multiturn.demonstrations import Plan
from verl_multiturn.doctor_recipe import tokenizer_folder
from verl_multiturn.doctor_report import Line, Played, Report
from verl_multiturn.env import Env, derive_seed
from verl_multiturn.panel import Panel
from verl_multiturn.rollout.episode import Episode, Sample, Task
from verl_multiturn.rollout.layouts import LAYOUTS
from verl_multiturn.rollout.parsing import ActionFormat
from verl_multiturn.rollout.prompts import View
from verl_multiturn.turns import Trajectory

PART = "one sample"
TASKS = 16  # whose first prompts are measured
UNBOUNDED = 10**6


def lines(config: DictConfig, panel: Panel, report: Report) -> list[Line]:
    """Play the first training task; the rows go to `report.sample`."""
    from verl_multiturn.rollout.loop import Rollout

    tokens, model_type, stand_in = _tokenizer(config)
    rollout = Rollout.of(config)
    limits = rollout.limits
    if stand_in:  # its lengths are not the model's: nothing is judged by them
        budgets = ("max_prompt_tokens", "max_response_tokens", "max_action_tokens")
        rollout = dataclasses.replace(
            rollout, limits=dataclasses.replace(limits, **dict.fromkeys(budgets, UNBOUNDED))
        )
    first = Line(PART, "ok", "prompts", "measured by the run itself, once the model is there")
    if not stand_in:
        first = _first_prompts(config, panel, rollout, tokens)
    said, who = _script(panel, rollout.form)
    trajectory, rows, spoken = _play(config, panel, rollout, tokens, model_type, said)
    report.sample = Played(rows, tokens, stand_in)
    return [
        first,
        _outcome(panel, trajectory, who),
        *_utterances(spoken, limits, stand_in),
        _mask(rows, spoken),
    ]


def _tokenizer(config: DictConfig) -> tuple[Any, str, bool]:
    """Tokenizer, model type, and whether it only stands in for the model's."""
    folder = tokenizer_folder(config)
    if folder is None:
        from verl_multiturn import small_model

        stand_in = config.actor_rollout_ref.model.path != "small"
        plan = Plan.of(config)  # the small model's tokenizer follows from its plan alone
        return small_model.tokenizer(plan, 50 if stand_in else 300), "qwen2", stand_in
    from transformers import AutoTokenizer

    config_file = Path(folder) / "config.json"
    model_type = json.loads(config_file.read_text()).get("model_type", "") if config_file.exists() else ""
    tokens = AutoTokenizer.from_pretrained(str(folder))
    if custom := config.actor_rollout_ref.model.get("custom_chat_template"):
        tokens.chat_template = custom
    if tokens.chat_template is None:
        raise ValueError(f"the tokenizer in {folder} has no chat template: use an instruct model")
    return tokens, model_type, False


def _first_prompts(config: DictConfig, panel: Panel, rollout: Any, tokens: Any) -> Line:
    """The longest first prompt of some tasks against its budget."""
    env, longest = panel.make(), 0

    def encode(messages: Any) -> list[int]:
        more = plain(config.data.apply_chat_template_kwargs)
        return list(
            tokens.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **more)
        )

    for task in panel.tasks[:TASKS]:
        observation, _ = env.reset(task.id)
        view = View(env.instruction, observation, env.admissible())
        longest = max(longest, len(rollout.policy.fit(view, encode, UNBOUNDED).ids))
    env.close()
    budget = rollout.limits.max_prompt_tokens
    text = f"first prompts have up to {longest} tokens, data.max_prompt_length is {budget}"
    if longest <= budget:
        return Line(PART, "ok", "prompts", text)
    return Line(PART, "FAIL", "prompts", f"{text}: raise it, or shorten the prompt or the list of actions")


def _script(panel: Panel, form: ActionFormat) -> tuple[list[str], str]:
    """What an expert says on the first task, in the form of the run, and who it is."""
    env, who = panel.make(), "its expert"
    task, rng, said = panel.tasks[0].id, random.Random(0), list[str]()
    env.reset(task, derive_seed(task, 0))
    over = False
    while not over:
        action, who = _action(env, rng)
        utterance = f"<{form.tag}>{action}</{form.tag}>" if form.tag else action
        said.append(f"<think>as scripted</think>{utterance}" if form.think else utterance)
        _, _, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
    env.close()
    return said, who


def _action(env: Env, rng: random.Random) -> tuple[str, str]:
    try:
        return env.expert(), "its expert"
    except NotImplementedError:
        return env.random_action(rng), "random actions"


def _play(
    config: DictConfig, panel: Panel, rollout: Any, tokens: Any, model_type: str, said: list[str]
) -> tuple[Trajectory, list[Any], list[list[int]]]:
    """The episode as a rollout worker would play it: trajectory, verl's rows, sampled ids."""
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    from verl_multiturn.rollout.rows import to_outputs

    more = plain(config.data.apply_chat_template_kwargs)
    chat = create_continuous_token_builder(tokens, hf_model_type=model_type, chat_template_kwargs=more)
    spoken: list[list[int]] = []

    async def generate(prompt_ids: list[int], max_tokens: int, seed: int | None) -> Sample:
        text = said[min(len(spoken), len(said) - 1)]
        ids = [*tokens.encode(text, add_special_tokens=False), tokens.eos_token_id][:max_tokens]
        spoken.append(ids)
        return Sample(ids, [0.0] * len(ids))

    one, row = panel.tasks[0], config.multiturn.row
    episode = Episode(
        env_name=panel.env,
        env_kwargs=dict(panel.kwargs),
        task=Task(one.id, "doctor", 0, derive_seed(one.id, 0), content=one.hash, type=one.type),
        layout=LAYOUTS[row](rollout.policy, chat, rollout.limits, tokens.eos_token_id),
        form=rollout.form,
        limits=rollout.limits,
        pool=rollout.pool,
        generate=generate,
        decode=lambda ids: str(tokens.decode(ids, skip_special_tokens=True)),
        anchor=config.multiturn.anchor,
    )
    try:
        trajectory = asyncio.run(episode.play())
    finally:
        rollout.pool.close()
    return trajectory, to_outputs(trajectory, row, tokens.eos_token_id), spoken


def _outcome(panel: Panel, trajectory: Trajectory, who: str) -> Line:
    turns, valid = len(trajectory.turns), sum(turn.valid for turn in trajectory.turns)
    text = (
        f"{panel.env}, task {panel.tasks[0].id}: {turns} turns by {who}, {valid} valid, return "
        f"{trajectory.episode_return:g}, success {'yes' if trajectory.success else 'no'}"
    )
    if trajectory.info["truncation"] == "tokens":
        text += "; cut by data.max_response_length: raise it, or lower multiturn.max_action_tokens"
    sound = valid == turns and trajectory.info["truncation"] != "tokens"
    return Line(PART, "ok" if sound else "warn", "environment", text)


def _utterances(spoken: list[list[int]], limits: Any, stand_in: bool) -> list[Line]:
    """Whether an utterance of the right form fits."""
    if stand_in:
        text = (
            "the model's is not on this disk: the lengths below are a small stand-in's, only the mask counts"
        )
        return [Line(PART, "warn", "tokenizer", text)]
    longest = max(map(len, spoken))
    text = f"the scripted ones have up to {longest} tokens, multiturn.max_action_tokens is "
    text += str(limits.max_action_tokens)
    if longest < limits.max_action_tokens:
        return [Line(PART, "ok", "utterances", text)]
    return [Line(PART, "FAIL", "utterances", f"{text}: an action in the right form is cut; raise it")]


def _mask(rows: list[Any], spoken: list[list[int]]) -> Line:
    """The tokens under the mask must be those that were sampled, and no others."""
    trained = [
        token for row in rows for token, mask in zip(row.response_ids, row.response_mask, strict=True) if mask
    ]
    whole = sum(len(row.response_ids) for row in rows)
    text = (
        f"{len(rows)} rows, {len(trained)} trained tokens of {whole} in responses: exactly the sampled ones"
    )
    if trained == [token for ids in spoken for token in ids]:
        return Line(PART, "ok", "mask", text)
    return Line(PART, "FAIL", "mask", "tokens under the mask are not those that were sampled")
