"""The small default model: a Qwen2 of a few hundred thousand parameters with its own tokenizer.

Built for one environment and warm-started there by imitating the scripted expert with noise, so that
training starts from a policy that knows the form of an answer and succeeds now and then. Built once,
then found in a cache under a hash of everything that went into it.
"""

import json
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_multiturn.demonstrations import (
    Demonstration,
    Encoder,
    Plan,
    demonstrations,
    repeated,
    small_folder,
)
from verl_multiturn.env import derive_seed

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def build(config: DictConfig) -> Path:
    """Folder of the warm-started model for a run; trained now if the cache has none.

    Raises:
        ValueError: an environment without expert and without listed actions cannot be imitated.
    """
    plan, folder = Plan.of(config), small_folder(config)
    if (folder / "model.safetensors").exists():
        _say(f"small model: {folder} (built before)")
        return folder
    draft = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        _train(plan, draft)
        if not (folder / "model.safetensors").exists():  # else another run was faster
            draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def tokenizer(plan: Plan, episodes: int = 300) -> Any:
    """Byte-level BPE over demonstrations, with Qwen2's own pre-tokenizer.

    transformers replaces the pre-tokenizer of any folder of model type qwen2 when it loads it: one
    trained with another would be read differently from how it was trained.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    bpe.decoder = decoders.ByteLevel()
    demos = demonstrations(plan, noise=1.0)
    texts = [m["content"] for _ in range(episodes) for messages, _ in next(demos) for m in messages[-1:]]
    texts += [answer for _ in range(episodes) for _, answer in next(demos)]
    # By lines and between tags, as the model will meet them: no merge may join a cell of a grid with
    # the end of its line, or an action with its tag, or equal cells would get different tokens.
    pieces = [piece for text in texts for piece in re.split(r"\n|</?\w+>", text) if piece]
    bpe.train_from_iterator(
        [*pieces, *["user", "assistant", "system"] * 50],
        trainers.BpeTrainer(
            vocab_size=plan.vocabulary,
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
    batches = _batches(plan, repeated(plan), Encoder(tokens))
    started = time.perf_counter()
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * min(1.0, (step + 1) / 30) * (1 - 0.95 * step / plan.steps)
        ids, labels = next(batches)
        logits = model(ids).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)
        learnt = loss.item()
        if plan.prompt_weight:
            prompts = ids[:, 1:].masked_fill(labels[:, 1:] != -100, tokens.pad_token_id).flatten()
            read = torch.nn.functional.cross_entropy(logits, prompts, ignore_index=tokens.pad_token_id)
            loss = loss + plan.prompt_weight * read
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 24 or step + 1 == plan.steps:
            pace = (time.perf_counter() - started) / (step + 1)
            left = pace * (plan.steps - step - 1)
            _say(f"warm start {step + 1}/{plan.steps}  loss {learnt:.3f}  {pace:.2f} s  ETA {left:.0f} s")
    model.save_pretrained(folder)
    generation = {"eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def _batches(plan: Plan, demos: Iterator[Demonstration], encoder: Encoder) -> Iterator[Any]:
    """Padded ids and labels. Turn rows: single turns. Trajectory rows: whole conversations."""
    rng = random.Random(derive_seed("order of batches", plan.seed))
    while True:
        rows: list[tuple[list[int], list[bool], int]] = []  # with the number of turns
        while sum(turns for *_, turns in rows) < plan.mixed * plan.batch:
            episode = next(demos)
            chosen, turns = (episode, 1) if plan.row == "turn" else (episode[-1:], len(episode))
            rows += [(*encoder(messages, answer), turns) for messages, answer in chosen]
        rows.sort(key=lambda row: len(row[0]))
        batches, filled = [], plan.batch
        for row in rows:
            # The last one takes what is over: a few rows would be a step of noise.
            if filled >= plan.batch and len(batches) < plan.mixed:
                batches.append([])
                filled = 0
            batches[-1].append(row)
            filled += row[2]
        rng.shuffle(batches)
        yield from (_padded(batch, plan.max_tokens, encoder.tokens.pad_token_id) for batch in batches)


def _padded(rows: list[tuple[list[int], list[bool], int]], limit: int, pad: int) -> Any:
    import torch

    longest = min(limit, max(len(ids) for ids, *_ in rows))
    ids = torch.full((len(rows), longest), pad)
    labels = torch.full((len(rows), longest), -100)
    for k, (row, mask, _) in enumerate(rows):
        tokens = torch.tensor(row[:longest])
        ids[k, : len(tokens)] = tokens
        labels[k, : len(tokens)] = torch.where(torch.tensor(mask[:longest]), tokens, -100)
    return ids, labels


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
