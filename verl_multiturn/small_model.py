"""The small default model: a Qwen2 of a few hundred thousand parameters with its own tokenizer.

Built for one environment and warm-started there by imitating the scripted expert with noise, so that
training starts from a policy that knows the form of an answer and succeeds now and then. Built once,
then found in a cache under a hash of everything that went into it.
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_multiturn.env import Env, derive_seed, make
from verl_multiturn.load import load_class
from verl_multiturn.rollout.parsing import ActionFormat
from verl_multiturn.rollout.prompts import Messages, PromptPolicy, Templates, View, load_policy

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_SEED = 2_000_000_000  # demonstrations come from tasks no panel uses


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that the model depends on."""

    env: str
    env_kwargs: dict[str, Any]
    row: str
    templates: Templates
    policy: str | None
    form: ActionFormat
    max_tokens: int  # of a prompt, or of a whole conversation
    width: int
    layers: int
    steps: int
    noise: float
    batch: int
    lr: float
    seed: int

    @classmethod
    def of(cls, config: DictConfig) -> "Plan":
        """From a run's configuration."""
        settings: dict[str, Any] = OmegaConf.to_container(config.multiturn, resolve=True)  # type: ignore[assignment]
        prompt = dict(settings["prompt"])
        policy = prompt.pop("policy")
        sizes = {name: value for name, value in settings["small_model"].items() if name != "cache"}
        return cls(
            env=settings["env"],
            env_kwargs=settings["env_kwargs"],
            row=settings["row"],
            templates=Templates(**prompt),
            policy=policy,
            form=ActionFormat(**settings["action"]),
            max_tokens=config.data.max_prompt_length + config.data.max_response_length,
            seed=settings["seed"],
            **sizes,
        )

    def digest(self) -> str:
        """Of the plan, of this file and of the environment's file."""
        module = sys.modules[load_class(self.env, Env).__module__]
        sources = [Path(__file__).read_text(), Path(str(module.__file__)).read_text()]
        parts = [json.dumps(dataclasses.asdict(self), sort_keys=True, default=str), *sources]
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def build(config: DictConfig) -> Path:
    """Folder of the warm-started model for a run; trained now if the cache has none.

    Raises:
        ValueError: an environment without expert and without listed actions cannot be imitated.
    """
    plan = Plan.of(config)
    cache = config.multiturn.small_model.cache or "~/.cache/verl_multiturn"
    folder = Path(cache).expanduser() / f"{Path(plan.env.partition(':')[0]).stem}-{plan.digest()}"
    if (folder / "model.safetensors").exists():
        _say(f"small model: {folder} (built before)")
        return folder
    draft = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    _train(plan, draft)
    draft.replace(folder)
    return folder


def demonstrations(plan: Plan, noise: float, first: int = FIRST_SEED) -> Iterator[list[tuple[Messages, str]]]:
    """Endless episodes of the expert, with a share `noise` of random actions.

    Yields:
        Per episode, a list of (messages the policy reads at a turn, its answer). With trajectory rows
        the messages of a turn contain those of the turns before.
    """
    env, policy = make(plan.env, **plan.env_kwargs), load_policy(plan.policy)(plan.templates)
    rng = random.Random(derive_seed("demonstrations", plan.seed, first))
    seed = first
    while True:
        yield _episode(env, policy, plan, noise, rng, seed)
        seed += 1


def _episode(
    env: Env, policy: PromptPolicy, plan: Plan, noise: float, rng: random.Random, seed: int
) -> list[tuple[Messages, str]]:
    observation, _ = env.reset(seed)
    view, chat = View(env.instruction, observation), list[dict[str, str]]()
    turns, over = [], False
    while not over:
        view.observation, view.admissible = observation, env.admissible()
        action = env.random_action(rng) if rng.random() < noise else _expert(env, rng)
        answer = f"<{plan.form.tag}>{action}</{plan.form.tag}>" if plan.form.tag else action
        if plan.form.think:
            answer = f"<think></think>{answer}"
        if plan.row == "trajectory" and chat:
            chat = [*chat, policy.follow_up(view)]
        else:
            chat = policy.messages(view, min(plan.templates.history, len(view.past)), view.admissible)
        turns.append((chat, answer))
        view.past.append((observation, action))
        chat = [*chat, {"role": "assistant", "content": answer}]
        observation, _, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
    return turns


def _expert(env: Env, rng: random.Random) -> str:
    try:
        return env.expert()
    except NotImplementedError:
        return env.random_action(rng)


def tokenizer(plan: Plan, episodes: int = 300) -> Any:
    """Byte-level BPE over demonstrations, with Qwen2's own pre-tokenizer.

    transformers replaces the pre-tokenizer of any folder of model type qwen2 when it loads it: one
    trained with another would be read differently from how it was trained.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    bpe.decoder = decoders.ByteLevel()
    demos = demonstrations(plan, noise=1.0)
    corpus = [m["content"] for _ in range(episodes) for m in next(demos)[-1][0]]
    corpus += [answer for _ in range(episodes) for _, answer in next(demos)]
    bpe.train_from_iterator(
        [*corpus, *["user", "assistant", "system"] * 50],
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    names = [name for name in ("think", plan.form.tag) if name]
    bpe.add_tokens([AddedToken(f"<{slash}{n}>", normalized=False) for n in names for slash in ("", "/")])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


class Encoder:
    """Token ids and loss mask of a demonstration, by the pieces of the chat template."""

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens
        self.pieces: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        """Ids of a text, remembered: observations and answers repeat."""
        if text not in self.pieces:
            self.pieces[text] = self.tokens.encode(text, add_special_tokens=False)
        return self.pieces[text]

    def __call__(self, messages: Messages, answer: str) -> tuple[list[int], list[bool]]:
        """The chat with the answer; every assistant message is learnt, its end token too."""
        ids: list[int] = []
        mask: list[bool] = []
        for message in [*messages, {"role": "assistant", "content": answer}]:
            head = self.ids(f"<|im_start|>{message['role']}\n")
            body = [*self.ids(message["content"]), self.tokens.eos_token_id]
            end = self.ids("\n")
            learnt = message["role"] == "assistant"
            ids += head + body + end
            mask += [False] * len(head) + [learnt] * len(body) + [False] * len(end)
        return ids, mask


def _train(plan: Plan, folder: Path) -> None:
    """Imitate the demonstrations; saves model and tokenizer into `folder`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(plan.seed)
    torch.set_num_threads(max(1, min(4, len(os.sched_getaffinity(0)))))
    tokens = tokenizer(plan)
    tokens.save_pretrained(folder)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokens),
            hidden_size=plan.width,
            intermediate_size=3 * plan.width,
            num_hidden_layers=plan.layers,
            num_attention_heads=plan.width // 32,
            num_key_value_heads=max(1, plan.width // 64),
            max_position_embeddings=max(2048, plan.max_tokens),
            tie_word_embeddings=True,
            eos_token_id=tokens.eos_token_id,
            pad_token_id=tokens.pad_token_id,
            bos_token_id=None,
            rope_theta=10000.0,
            initializer_range=0.1,  # with the usual 0.02 so narrow a model does not start to learn
        )
    )
    size = sum(parameter.numel() for parameter in model.parameters())
    _say(f"small model: {size:,} parameters, imitating {plan.env} for {plan.steps} steps")
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, weight_decay=0.01, betas=(0.9, 0.98))
    demos, encoder = demonstrations(plan, plan.noise), Encoder(tokens)
    started = time.perf_counter()
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * min(1.0, (step + 1) / 30) * (1 - 0.95 * step / plan.steps)
        ids, labels = _batch(plan, demos, encoder)
        logits = model(ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 24 or step + 1 == plan.steps:
            pace = (time.perf_counter() - started) / (step + 1)
            left = pace * (plan.steps - step - 1)
            _say(f"warm start {step + 1}/{plan.steps}  loss {loss.item():.3f}  {pace:.2f} s/step  ETA {left:.0f} s")
    model.save_pretrained(folder)
    generation = {"eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def _batch(plan: Plan, demos: Iterator[list[tuple[Messages, str]]], encoder: Encoder) -> Any:
    """Padded ids and labels. Turn rows: single turns. Trajectory rows: whole conversations."""
    import torch

    rows: list[tuple[list[int], list[bool]]] = []
    answers = 0
    while answers < plan.batch:
        episode = next(demos)
        chosen = episode if plan.row == "turn" else episode[-1:]
        rows += [encoder(messages, answer) for messages, answer in chosen]
        answers += len(episode)
    longest = min(plan.max_tokens, max(len(ids) for ids, _ in rows))
    ids = torch.full((len(rows), longest), encoder.tokens.pad_token_id)
    labels = torch.full((len(rows), longest), -100)
    for k, (row, mask) in enumerate(rows):
        tokens = torch.tensor(row[:longest])
        ids[k, : len(tokens)] = tokens
        labels[k, : len(tokens)] = torch.where(torch.tensor(mask[:longest]), tokens, -100)
    return ids, labels


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if importlib.util.find_spec("tokenizers") is None:
    raise ImportError("the small default model needs transformers and tokenizers: pip install 'verl-multiturn[cpu]'")
