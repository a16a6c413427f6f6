"""Offline training: recorded dialogues -> critic (IQL) -> weights (AWR) -> a model that imitates by them.

The parts are `critic.offline` and `critic.imitation`; here they meet a folder or file, a model, and the
prompts of a run or recipe.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from verl_multiturn.compose import plain
from verl_multiturn.critic.config import preset
from verl_multiturn.critic.imitation import ActorConfig, Renderer, learn, rows_of, save
from verl_multiturn.critic.offline import OfflineConfig, fit, imitate, read, records
from verl_multiturn.critic.rerank import save_critic
from verl_multiturn.errors import unknown
from verl_multiturn.model_policy import Chat
from verl_multiturn.play_settings import model_folder, settings
from verl_multiturn.rollout.parsing import ActionFormat
from verl_multiturn.rollout.prompts import prompt_policy
from verl_multiturn.samplers import load_model, load_tokenizer

C = TypeVar("C")


@dataclass(frozen=True)
class Job:
    """What is learnt from, by whom and how.

    Attributes:
        source: a run's folder, or a JSONL file of dialogues (`critic.offline`).
        model: folder to start from, or "small"; None: the run's or recipe's.
        out: new folder.
        weights: how much each utterance is imitated.
        critic, actor: keys that differ from the preset and from ActorConfig.
        overrides: key=value of the run's or recipe's configuration, for its prompts and format.
        preset: of the critic.
        recipe: whose prompts are used; None: the run's, else the defaults.
        split: of a run.
        limit: characters of a state that the critic reads.
    """

    source: Path
    model: str | None
    out: Path
    weights: OfflineConfig
    critic: dict[str, Any]
    actor: dict[str, Any]
    overrides: Sequence[str] = ()
    preset: str = "offline"
    recipe: str | None = None
    split: str = "train"
    limit: int | None = None


def run(job: Job, tell: Callable[[str], None]) -> dict[str, Any]:
    """Learn, and write model, critic and `offline.json`; returns what that file holds.

    Raises:
        ValueError: a key, source or model that will not do, or nothing to imitate.
    """
    chosen = changed(preset(job.preset), job.critic, "critic")
    how = changed(ActorConfig(), job.actor, "actor")
    folder = job.source if job.source.is_dir() and job.recipe is None else None
    named = folder or job.recipe or any(word.startswith("multiturn.env=") for word in job.overrides)
    # The environment is not played: without a name only its prompts can be written.
    config = settings(None if named else "recorded", None, job.recipe, folder, list(job.overrides))
    dialogues = read(job.source, chosen, job.split, job.limit)
    returns = [sum(row.reward for row in one) for one in dialogues]
    if not dialogues:
        raise ValueError(f"{job.source} holds no dialogue.")
    about: dict[str, Any] = {"dialogues": len(dialogues), "turns": sum(map(len, dialogues))}
    about["return"] = float(np.mean(returns))
    tell(f"{about['dialogues']} dialogues, {about['turns']} turns, mean return {about['return']:.3f}")
    path = model_folder(config, job.model)
    tokenizer = load_tokenizer(path)
    model, _ = load_model(path, tokenizer)
    job.out.mkdir(parents=True, exist_ok=True)
    if job.weights.actor == "awr":
        critic, metrics = fit(dialogues, chosen, job.weights.epochs)
        tell(f"critic: q_loss {metrics[0]['q_loss']:.4f} to {metrics[-1]['q_loss']:.4f}")
        save_critic(critic, job.limit, job.out)
        about["critic"] = metrics[-1]
    else:
        critic = None
    weights = imitate(critic, dialogues, job.weights)
    block = plain(config.multiturn)
    render = Renderer(prompt_policy(block), ActionFormat(**block["action"]), block["row"])
    kept = [record for _, record in records(job.source, job.split)]
    encode = Chat(tokenizer).build_initial_tokens
    rows, long = rows_of(kept, weights, render, encode, tokenizer, how)
    said = f"{len(rows)} turns to imitate, {long} too long, mean weight {weights.mean():.3f}"
    tell(f"{job.weights.actor}: {said}")
    about["losses"] = learn(model, rows, how, lambda epoch, loss: tell(f"epoch {epoch}: loss {loss:.4f}"))
    save(model, tokenizer, job.out)
    about |= {"actor": job.weights.actor, "imitated": len(rows), "too_long": long, "model": path}
    about |= {"v_target": chosen.v_target} if critic is not None else {}
    (job.out / "offline.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    tell(f"wrote {job.out}")
    return about


def changed(config: C, given: dict[str, Any], name: str) -> C:
    """A config with other values.

    Raises:
        ValueError: an unknown key of `name`, or a value that will not do.
    """
    known = [field.name for field in fields(config)]  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            raise unknown(f"key of {name}", key, known)
    return replace(config, **given)  # type: ignore[type-var]
