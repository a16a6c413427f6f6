"""Log-probabilities of several answers to one prompt, token by token: by transformers or by vLLM.

Both take token ids and give the numbers of the same ids: text is never tokenized again at the border of
prompt and answer. transformers reads the prompt once and the answers behind its cache. vLLM reads
prompt and answer whole each time it is asked for prompt log-probabilities; its prefix cache is off,
because with it these numbers depend on what was asked before.
"""

from collections.abc import Sequence
from typing import Any, Protocol

Ids = Sequence[int]


class LogProbs(Protocol):
    """A model as a scorer; see the two classes below."""

    def __call__(self, prompt: Ids, answers: Sequence[Ids]) -> list[list[float]]:
        """log p of each token of each answer, given the prompt and the tokens before it."""
        ...


class TransformersLogProbs:
    """A causal model of transformers.

    Args:
        model: in evaluation mode.
        adapter: of a PEFT model, False: read it without its adapter.
    """

    def __init__(self, model: Any, adapter: bool = True) -> None:
        self.model, self.adapter = model, adapter

    def __call__(self, prompt: Ids, answers: Sequence[Ids]) -> list[list[float]]:
        """See LogProbs."""
        if not answers:
            return []
        if self.adapter:
            return self._scored(prompt, answers)
        with self.model.disable_adapter():
            return self._scored(prompt, answers)

    def _scored(self, prompt: Ids, answers: Sequence[Ids]) -> list[list[float]]:
        import torch

        device = self.model.device
        with torch.inference_mode():
            read = self.model(torch.tensor([list(prompt)], device=device), use_cache=True)
            first = read.logits[0, -1:].float().log_softmax(-1).expand(len(answers), 1, -1)
            width = max(map(len, answers)) - 1
            if not width:
                found = first
            else:
                ids = torch.zeros((len(answers), width), dtype=torch.long)
                mask = torch.zeros((len(answers), len(prompt) + width), dtype=torch.long)
                mask[:, : len(prompt)] = 1
                for row, answer in enumerate(answers):
                    ids[row, : len(answer) - 1] = torch.tensor(answer[:-1], dtype=torch.long)
                    mask[row, len(prompt) : len(prompt) + len(answer) - 1] = 1
                read.past_key_values.batch_repeat_interleave(len(answers))
                places = torch.arange(len(prompt), len(prompt) + width, device=device)
                logits = self.model(
                    ids.to(device),
                    attention_mask=mask.to(device),
                    position_ids=places.expand(len(answers), -1),
                    past_key_values=read.past_key_values,
                ).logits
                found = torch.cat([first, logits.float().log_softmax(-1)], 1)
            return [
                found[row, range(len(answer)), list(answer)].tolist() for row, answer in enumerate(answers)
            ]


class VLLMLogProbs:
    """An engine of vLLM in this process.

    Args:
        folder: of the model.
        engine: further arguments of `vllm.LLM`, such as gpu_memory_utilization, max_model_len.

    Raises:
        ImportError: vLLM is not installed.
    """

    def __init__(self, folder: str, **engine: Any) -> None:
        try:
            from vllm import LLM
        except ImportError:
            raise ImportError("the scorer vllm needs vllm: pip install vllm, or use engine") from None

        self.engine: Any = LLM(model=folder, **{**engine, "enable_prefix_caching": False})

    def __call__(self, prompt: Ids, answers: Sequence[Ids]) -> list[list[float]]:
        """See LogProbs."""
        from vllm import SamplingParams

        asked = [{"prompt_token_ids": [*prompt, *answer]} for answer in answers]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        outputs = self.engine.generate(asked, params, use_tqdm=False) if asked else []
        return [
            [float(at[token].logprob) for token, at in zip(answer, tail, strict=True)]
            for answer, output in zip(answers, outputs, strict=True)
            for tail in [output.prompt_logprobs[len(prompt) :]]
        ]
