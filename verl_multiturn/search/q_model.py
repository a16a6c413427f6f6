"""A Q model: what an action is worth in a state, as a small language model says it (arXiv:2409.09345, 3.4).

    Q(h, a) = β · agg_t (log π(a_t | h, a_<t) − log π_ref(a_t | h, a_<t))

π is the fitted model, π_ref the one it was fitted from, agg the sum over the tokens of one answer (the
paper's objective) or their mean; loss and score use the same. The authors' code scores something else
than it fits: the mean of the log-softmax of the difference of the logits, which ranks differently
(tests/search/test_q_model.py). A model with a scalar head scores by that instead.

A folder of a Q model holds its weights (or the adapter of a LoRA), its tokenizer and `q_model.json`.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from verl_multiturn.algorithms.registry import Config
from verl_multiturn.errors import intact, unknown
from verl_multiturn.rollout.prompts import Messages, PromptTooLong
from verl_multiturn.search.rules import SCORERS
from verl_multiturn.search.scorers import LogProbs, TransformersLogProbs, VLLMLogProbs

ABOUT, HEAD = "q_model.json", "head.safetensors"
AGAIN = "fit it again with verl-multiturn fit-q"
DTYPE = "float32"  # of both models, as the weights are fitted: they differ by less than half precision shows
VLLM = {"dtype": DTYPE, "gpu_memory_utilization": 0.3}  # two engines beside the agent
Loss = Literal["dpo", "bradley_terry", "regression"]


@dataclass(frozen=True)
class QSpec(Config):
    """How a Q model scores."""

    reference: str  # folder or name of the model it was fitted from
    loss: Loss = "dpo"  # the other two have a scalar head
    beta: float = 0.1  # β
    aggregate: Literal["sum", "mean"] = "sum"  # of the tokens' log-probabilities, in loss and score
    max_tokens: int = 4096  # of prompt and answer
    lora: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_range("beta", 1e-9)
        self.check_range("max_tokens", 2)


class Tokens:
    """Prompts and answers as the Q model reads them: by its own chat template, whatever the policy's is."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self.tokenizer, self.max_tokens = tokenizer, max_tokens

    def answer(self, text: str) -> list[int]:
        """An answer and the end of the message."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self.tokenizer.eos_token_id]

    def prompt(self, messages: Messages, room: int) -> list[int]:
        """A chat that leaves `room` tokens for an answer.

        One that is too long loses whole turns from its beginning; system message and last message stay. Where
        the turns stand inside the last message, whoever wrote it has to shorten it: see `readable`.

        Raises:
            PromptTooLong: these two alone are too long.
        """
        budget = self.max_tokens - room
        system = [message for message in messages[:1] if message["role"] == "system"]
        rest = messages[len(system) :]
        while len(ids := self.whole([*system, *rest])) > budget:
            later = [n for n, message in enumerate(rest) if n and message["role"] == "user"]
            if not later:
                raise PromptTooLong(
                    f"a prompt has {len(ids)} tokens without any earlier turn and the answer {room}: more "
                    f"than max_tokens={self.max_tokens}; raise it, or shorten what the policy reads"
                )
            rest = rest[later[0] :]
        return ids

    def readable(self, chats: Sequence[Messages], room: int) -> list[int]:
        """The first of these chats that leaves `room` tokens for an answer.

        Raises:
            PromptTooLong: none does.
        """
        *longer, last = chats
        for messages in longer:
            with suppress(PromptTooLong):
                return self.prompt(messages, room)
        return self.prompt(last, room)

    def whole(self, messages: Messages) -> list[int]:
        """A chat, however long it is."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def aggregated(log_probs: Sequence[float], aggregate: str) -> float:
    """The sum or the mean over the tokens of one answer."""
    total = float(sum(log_probs))
    return total if aggregate == "sum" else total / len(log_probs)


class QModel:
    """Scores answers; call it with a prompt and several answers to it.

    Args:
        spec: how.
        tokens: how they are read.
        policy: π.
        reference: π_ref.
    """

    def __init__(self, spec: QSpec, tokens: Tokens, policy: LogProbs, reference: LogProbs) -> None:
        self.spec, self.tokens, self.policy, self.reference = spec, tokens, policy, reference

    def __call__(self, prompt: Messages, answers: Sequence[str]) -> list[float]:
        """Q of each answer."""
        ids = [self.tokens.answer(answer) for answer in answers]
        read = self.tokens.prompt(prompt, max(map(len, ids), default=0))
        new, old = self.policy(read, ids), self.reference(read, ids)
        beta, how = self.spec.beta, self.spec.aggregate
        return [beta * (aggregated(a, how) - aggregated(b, how)) for a, b in zip(new, old, strict=True)]


class HeadModel:
    """Scores answers by a scalar head on the last token's hidden state; called as `QModel`."""

    def __init__(self, tokens: Tokens, model: Any, head: Any) -> None:
        self.tokens, self.model, self.head = tokens, model, head

    def __call__(self, prompt: Messages, answers: Sequence[str]) -> list[float]:
        """Q of each answer."""
        import torch

        ids = [self.tokens.answer(answer) for answer in answers]
        read = self.tokens.prompt(prompt, max(map(len, ids), default=0))
        with torch.inference_mode():
            return list(head_scores(self.model, self.head, [(read, one) for one in ids]).tolist())


def head_scores(model: Any, head: Any, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Any:
    """head(h), h the hidden state at the last token of prompt and answer. -> (rows,)."""
    import torch

    ids, mask = padded([[*prompt, *answer] for prompt, answer in rows], model.device)
    hidden = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states[-1]
    last = hidden[torch.arange(len(rows)), mask.sum(1) - 1]
    return head(last.float())[:, 0]


def padded(rows: Sequence[Sequence[int]], device: Any) -> tuple[Any, Any]:
    """Ids and mask, filled up on the right. -> (rows, longest) each."""
    import torch

    ids = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for n, row in enumerate(rows):
        ids[n, : len(row)] = torch.tensor(row)
        mask[n, : len(row)] = 1
    return ids.to(device), mask.to(device)


def read_spec(folder: str | Path) -> QSpec:
    """How the Q model in a folder scores.

    Raises:
        ValueError: there is none.
    """
    path = Path(folder).expanduser() / ABOUT
    if not path.is_file():
        raise ValueError(f"{folder} holds no Q model: fit one with verl-multiturn fit-q PAIRS --out {folder}")
    with intact(path, AGAIN):
        return QSpec(**json.loads(path.read_text()))


def write_spec(folder: Path, spec: QSpec) -> None:
    """Put it where `read_spec` looks for it."""
    (folder / ABOUT).write_text(json.dumps(asdict(spec), indent=1) + "\n")


def load_q_model(folder: str | Path, backend: str = "engine", **engine: Any) -> QModel | HeadModel:
    """A fitted Q model; it and its reference are read in float32.

    Args:
        folder: written by `fit`.
        backend: "engine", a forward pass of transformers, or "vllm" (two engines; not for LoRA or a head).
        **engine: of vLLM, on top of `VLLM`.

    Raises:
        ValueError: no Q model, no reference where it was, or a backend that cannot do it.
    """
    from verl_multiturn.samplers import load_model, load_tokenizer

    spec, name = read_spec(folder), str(Path(folder).expanduser())
    if backend not in SCORERS:
        raise unknown("scorer of a Q model", backend, SCORERS)
    if backend == "vllm" and (spec.loss != "dpo" or spec.lora):
        raise ValueError(
            f"the Q model in {folder} has a head or an adapter, which vllm cannot read: use engine"
        )
    tokenizer = load_tokenizer(name)
    if backend == "vllm":
        engine = VLLM | engine
        policy, reference = VLLMLogProbs(name, **engine), VLLMLogProbs(spec.reference, **engine)
        return QModel(spec, Tokens(tokenizer, spec.max_tokens - 1), policy, reference)  # it writes one more
    tokens = Tokens(tokenizer, spec.max_tokens)
    if spec.loss != "dpo":
        model = _adapted(name, spec, tokenizer) if spec.lora else load_model(name, tokenizer, DTYPE)[0]
        return HeadModel(tokens, model, load_head(Path(name), model))
    if spec.lora:
        model = _adapted(name, spec, tokenizer)
        return QModel(spec, tokens, TransformersLogProbs(model), TransformersLogProbs(model, adapter=False))
    old = load_model(spec.reference, tokenizer, DTYPE)[0]
    new = load_model(name, tokenizer, DTYPE)[0]
    return QModel(spec, tokens, TransformersLogProbs(new), TransformersLogProbs(old))


def _adapted(folder: str, spec: QSpec, tokenizer: Any) -> Any:
    from verl_multiturn.samplers import load_model

    package, model = peft(), load_model(spec.reference, tokenizer, DTYPE)[0]
    with intact(folder, AGAIN):
        return package.PeftModel.from_pretrained(model, folder).eval()


def peft() -> Any:
    """The package peft.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import peft as package
    except ImportError:
        raise ImportError('LoRA needs peft: pip install "verl-multiturn[qvalue]"') from None
    return package


def new_head(model: Any) -> Any:
    """A scalar head that says 0 of everything."""
    import torch

    head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return head.to(model.device)


def load_head(folder: Path, model: Any) -> Any:
    """The head that was saved beside a model."""
    from safetensors.torch import load_file

    head = new_head(model)
    with intact(folder / HEAD, AGAIN):
        head.load_state_dict(load_file(folder / HEAD))
    return head
