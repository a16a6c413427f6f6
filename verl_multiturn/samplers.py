"""Samples from a Hugging Face model, many episodes at once; satisfies `rollout.episode.Generate`.

The requests of all players are collected and generated as one left-padded batch. Each request draws
with a generator of its own, so that what an episode says depends on its seeds, not on its company.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from verl_multiturn.rollout.episode import Sample

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass
class _Request:
    prompt_ids: list[int]
    max_tokens: int
    seed: int | None
    answer: "asyncio.Future[Sample]"


class Sampler:
    """A model of transformers.

    A batch starts when every player waits for an utterance: batches are then as large as they can
    be, and the same from run to run, so that rounding is the same as well.

    Args:
        folder: of the model and its tokenizer, or a name that transformers resolves.
        sampling: do_sample, temperature, top_p, top_k, as verl's `val_kwargs`.
        chat_template: replaces the tokenizer's own.

    Raises:
        ValueError: no model, no tokenizer, no chat template, or parts that do not fit together.
    """

    token_ids = True  # what it reads and says are tokens of a real tokenizer

    def __init__(self, folder: str, sampling: dict[str, Any], chat_template: str | None = None) -> None:
        self.tokenizer = load_tokenizer(folder, chat_template)
        self.model, self.stops = load_model(folder, self.tokenizer)
        self.sampling = sampling
        self.eos: int | None = self.tokenizer.eos_token_id
        self._players = 0
        self._waiting: list[_Request] = []
        self._running: set[asyncio.Task[None]] = set()

    def chat(self, **template_kwargs: Any) -> Any:
        """verl's own builder of token streams for this model, as training uses it."""
        from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

        kind = self.model.config.model_type
        return create_continuous_token_builder(
            self.tokenizer, hf_model_type=kind, chat_template_kwargs=template_kwargs
        )

    def decode(self, ids: list[int]) -> str:
        """The text of an utterance."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    @contextmanager
    def player(self) -> Iterator[None]:
        """A batch waits for those inside to ask; without any, each request is generated at once."""
        self._players += 1
        try:
            yield
        finally:
            self._players -= 1
            self._start_if_all_wait()

    async def __call__(self, prompt_ids: list[int], max_tokens: int, seed: int | None) -> Sample:
        """Sample one utterance."""
        answer: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(prompt_ids, max_tokens, seed, answer))
        self._start_if_all_wait()
        return await answer

    async def close(self) -> None:
        """See `evaluate.Model`; nothing is open."""

    def _start_if_all_wait(self) -> None:
        # An episode that was cut off by its time limit waits no longer.
        self._waiting = [request for request in self._waiting if not request.answer.done()]
        if self._waiting and len(self._waiting) >= self._players:
            batch, self._waiting = self._waiting, []
            # In the order of completion rounding would differ from run to run.
            batch.sort(key=lambda request: (request.seed or 0, request.prompt_ids))
            task = asyncio.get_running_loop().create_task(self._answer(batch))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _answer(self, batch: list[_Request]) -> None:
        answers: list[Any]
        try:
            answers = list(await asyncio.to_thread(self.generate, batch))
        except Exception as error:  # whatever it is, it belongs to those who asked
            answers = [error] * len(batch)
        for request, answer in zip(batch, answers, strict=True):
            if not request.answer.done():
                failed = isinstance(answer, Exception)
                (request.answer.set_exception if failed else request.answer.set_result)(answer)

    def generate(self, batch: list[_Request]) -> list[Sample]:
        """Sample one utterance for each request."""
        import torch

        width = max(len(request.prompt_ids) for request in batch)
        ids = torch.full((len(batch), width), self.model.generation_config.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            start = width - len(request.prompt_ids)
            ids[row, start:] = torch.tensor(request.prompt_ids)
            mask[row, start:] = 1
        draw = Draw([request.seed for request in batch], self.sampling)
        device = self.model.device
        try:
            with torch.inference_mode():
                whole = self.model.generate(
                    input_ids=ids.to(device),
                    attention_mask=mask.to(device),
                    max_new_tokens=max(request.max_tokens for request in batch),
                    do_sample=False,  # `draw` leaves one token to choose
                    logits_processor=[draw],
                )
        except torch.OutOfMemoryError:
            raise ValueError(
                f"not enough memory for {len(batch)} prompts of up to {width} tokens at once: "
                "lower --concurrency"
            ) from None
        log_probs = torch.stack(draw.log_probs, 1).tolist()
        return [
            self._cut(said, scores, request.max_tokens)
            for said, scores, request in zip(whole[:, width:].tolist(), log_probs, batch, strict=True)
        ]

    def _cut(self, ids: list[int], log_probs: list[float], limit: int) -> Sample:
        """Without what generate puts behind the stop token."""
        length = next((n for n, token in enumerate(ids, 1) if token in self.stops), len(ids))
        return Sample(ids[: min(length, limit)], log_probs[: min(length, limit)])


class Draw:
    """A logits processor of transformers that samples each row with a generator of its own.

    `log_probs` gets one (rows,) tensor a step: of the drawn tokens, after temperature, top_k and
    top_p, as vLLM reports them to verl.
    """

    def __init__(self, seeds: list[int | None], sampling: dict[str, Any]) -> None:
        self.generators = [Random(seed) for seed in seeds]
        temperature = sampling.get("temperature", 1.0)
        self.greedy = not sampling.get("do_sample", True) or temperature == 0
        self.temperature = 1.0 if self.greedy else temperature
        self.top_p = 1.0 if self.greedy else sampling.get("top_p", 1.0)
        self.top_k = 0 if self.greedy else max(0, sampling.get("top_k", -1))  # vLLM's -1: all
        self.log_probs: list[Any] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Replace the scores of a step by ones that allow the drawn tokens alone."""
        import torch

        log_probs = self._log_probs(scores)
        if self.greedy:
            drawn = log_probs.argmax(-1, keepdim=True)
        else:
            # The first token whose cumulated probability exceeds u; in double precision, since a
            # vocabulary of 150,000 would round small probabilities away.
            sums = log_probs.double().exp().cumsum(-1)
            u = torch.tensor([[one.random()] for one in self.generators], dtype=sums.dtype).to(sums.device)
            drawn = torch.searchsorted(sums, u * sums[:, -1:], right=True).clamp(max=sums.shape[-1] - 1)
        self.log_probs.append(log_probs.gather(1, drawn)[:, 0].cpu())
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)

    def _log_probs(self, scores: Any) -> Any:
        import torch

        logits = scores.float() / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[:, -1:], -torch.inf)
        if self.top_p < 1:
            best, order = logits.sort(descending=True)
            share = best.softmax(-1)
            # A token stays where those before it have not yet reached top_p: the best always does.
            dropped = share.cumsum(-1) - share >= self.top_p
            logits = logits.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), -torch.inf)
        return logits.log_softmax(-1)


def load_tokenizer(
    folder: str,
    chat_template: str | None = None,
    key: str = "actor_rollout_ref.model.custom_chat_template",
) -> Any:
    """The tokenizer of a model that can chat.

    Args:
        folder: of the model, or a name that transformers resolves.
        chat_template: replaces the tokenizer's own.
        key: where the caller is given one, for what is said if there is none.

    Raises:
        ValueError: there is none, or it has no chat template.
    """
    from transformers import AutoTokenizer

    if (path := Path(folder)).is_dir() and not any((path / name).exists() for name in TOKENIZER_FILES):
        raise ValueError(f"{folder} has no tokenizer: copy the tokenizer files of the model there")
    tokenizer = _load(AutoTokenizer.from_pretrained, "tokenizer", folder)
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {folder} has no chat template: use an instruction-tuned model, or give one in "
            f"{key}"
        )
    return tokenizer


def load_model(folder: str, tokenizer: Any, dtype: str | None = None) -> tuple[Any, frozenset[int]]:
    """The model and the tokens that end an utterance, in vLLM's way: the tokenizer's and the model's.

    Args:
        folder: of the model, or a name that transformers resolves.
        tokenizer: the model's.
        dtype: of the weights; None: that of the folder on a GPU, float32 on a CPU.

    Raises:
        ValueError: weights that do not fit the configuration, or a tokenizer of another model.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call,unused-ignore]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Half precision is slow and coarse on most CPUs.
    dtype = dtype or ("auto" if device == "cuda" else "float32")
    options = {"dtype": dtype, "output_loading_info": True}
    model, info = _load(AutoModelForCausalLM.from_pretrained, "model", folder, **options)
    if lost := sorted(info["missing_keys"]):
        raise ValueError(f"{folder} is not the whole model: {len(lost)} weights are missing, first {lost[0]}")
    if len(tokenizer) > (size := model.config.get_text_config().vocab_size):
        raise ValueError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens, the model {size}: they are of two models"
        )
    own = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stops, default=0)
    # Nothing else of the folder's: verl, too, samples with the run's settings alone.
    made: Any = GenerationConfig  # untyped
    model.generation_config = made(eos_token_id=sorted(stops), pad_token_id=pad)
    return model.to(device).eval(), frozenset(stops)


def _load(load: Callable[..., Any], what: str, folder: str, **options: Any) -> Any:
    try:
        return load(folder, **options)
    except Exception as error:  # for broken files transformers raises whatever its parts raise
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"cannot load the {what} in {folder}: {why}") from error
