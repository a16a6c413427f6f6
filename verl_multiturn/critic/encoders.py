"""Text encoders for critics: texts in, one vector each out.

| name                     | what                                                        | a token is |
| ------------------------ | ----------------------------------------------------------- | ---------- |
| a name or folder         | a Hugging Face encoder, trained on; default roberta-base    | its own    |
| small                    | a BERT of 0.1 M parameters, random, without any download    | a byte     |
| ngrams                   | hashed n-grams of bytes, fixed: for tests and small tasks   | a byte     |
| lines                    | hashed lines and pairs of them, fixed: for told games       | a byte     |

The vector is the last layer's at the CLS token: RoBERTa ships without a trained pooler, so the one
in ArCHer's code (arXiv:2402.19446) is random; its offline code and the paper take CLS. Of a text that
is too long the end is kept, as a dialogue ends with what matters. Encoders stay in evaluation mode:
no dropout, as in the authors' code.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
import torch

from verl_multiturn.columns import Floats
from verl_multiturn.critic.config import check_encoder

_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
Tokenize = Callable[[Sequence[str]], dict[str, torch.Tensor]]


class Encoder(torch.nn.Module):
    """Base: `encode`, and the width of what it gives."""

    width: int

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        """Vectors of N >= 1 texts. -> (N, D) float32."""
        raise NotImplementedError


class Hashed(Encoder):
    """Base of encoders without weights: `vector` of each text.

    Args:
        width: D, buckets; what stands in a text adds +1 or -1 to one of them.
        max_tokens: bytes that are read, from the text's end.
    """

    def __init__(self, width: int = 512, max_tokens: int = 512) -> None:
        super().__init__()
        self.width, self.max_tokens = width, max_tokens

    def vector(self, text: str) -> Floats:
        """What a text is. -> (D,)."""
        raise NotImplementedError

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        """See Encoder."""
        return torch.from_numpy(np.stack([self.vector(text) for text in texts])).float()


class NGrams(Hashed):
    """Hashed n-grams of bytes, n = 1 … 4, of unit length; nothing is learnt."""

    def vector(self, text: str) -> Floats:
        """See Hashed."""
        return _grams(text, self.width, self.max_tokens)


class Lines(Hashed):
    """Hashed lines, and pairs of neighbouring lines, such as a question and its answer; nothing is learnt.

    A line or pair counts once, however often it stands there.
    """

    def vector(self, text: str) -> Floats:
        """See Hashed."""
        return _lines(text, self.width, self.max_tokens)


class Transformer(Encoder):
    """A transformers model and what makes its input of texts."""

    def __init__(self, model: Any, tokenize: Tokenize) -> None:
        super().__init__()
        self.model, self.tokenize = model, tokenize
        self.width = int(model.config.hidden_size)
        self.eval()

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        """See Encoder."""
        batch = {name: x.to(self.model.device) for name, x in self.tokenize(texts).items()}
        hidden: torch.Tensor = self.model(**batch).last_hidden_state
        return hidden[:, 0].float()


class Bytes:
    """Byte-level tokens: 0 pads, 1 is CLS, byte b is b + 2."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def __call__(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Ids and mask of the texts' ends, padded on the right. -> (N, L) each."""
        rows = [text.encode("utf-8", "replace")[1 - self.max_tokens :] for text in texts]
        ids = torch.zeros((len(rows), 1 + max(map(len, rows))), dtype=torch.long)
        for k, row in enumerate(rows):
            ids[k, : 1 + len(row)] = torch.tensor([1, *(byte + 2 for byte in row)])
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def make_encoder(name: str = "roberta-base", max_tokens: int = 512) -> Encoder:
    """The encoder of a name, on the CPU; random weights come from torch's global generator.

    Args:
        name: see the module's table.
        max_tokens: read of a text, the CLS token included; at least 2.

    Raises:
        ValueError: an unknown name, a model that cannot be loaded, has no CLS token, or takes fewer
            tokens.
    """
    if max_tokens < 2:
        raise ValueError(f"max_tokens must be at least 2, not {max_tokens}.")
    if name == "ngrams":
        return NGrams(max_tokens=max_tokens)
    if name == "lines":
        return Lines(max_tokens=max_tokens)
    if name == "small":
        return _small(max_tokens)
    check_encoder(name)
    return _pretrained(name, max_tokens)


def _small(max_tokens: int) -> Encoder:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=max_tokens,
        pad_token_id=0,
        initializer_range=0.1,  # with the usual 0.02 so narrow a model does not start to learn
    )
    model = BertModel(config, add_pooling_layer=False)  # type: ignore[no-untyped-call]
    return Transformer(model, Bytes(max_tokens))


def _pretrained(name: str, max_tokens: int) -> Encoder:
    from transformers import AutoModel, AutoTokenizer

    try:
        tokens = AutoTokenizer.from_pretrained(name, truncation_side="left")
        try:
            model = AutoModel.from_pretrained(name, dtype=torch.float32, add_pooling_layer=False)
        except TypeError:  # a class without a pooler does not know the word
            model = AutoModel.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ValueError(
            f"cannot load the encoder {name!r} ({reason}): give a folder that holds a Hugging Face "
            "encoder, or one of ngrams, lines, small, which need no files."
        ) from error
    if tokens.cls_token_id is None:
        raise ValueError(f"{name!r} has no CLS token, so it is no encoder as critics need it.")
    longest = torch.full((1, max_tokens), tokens.cls_token_id)
    try:
        with torch.no_grad():
            model.eval()(input_ids=longest, attention_mask=torch.ones_like(longest))
    except (IndexError, RuntimeError) as error:
        raise ValueError(f"the encoder {name!r} takes fewer than max_tokens={max_tokens} tokens.") from error
    return Transformer(model, _Tokens(tokens, max_tokens))


class _Tokens:
    """A Hugging Face tokenizer that truncates on the left and pads."""

    def __init__(self, tokens: Any, max_tokens: int) -> None:
        self.tokens, self.max_tokens = tokens, max_tokens

    def __call__(self, texts: Sequence[str]) -> dict[str, torch.Tensor]:
        limits = {"padding": True, "truncation": True, "max_length": self.max_tokens}
        return dict(self.tokens(list(texts), return_tensors="pt", **limits))


@lru_cache(maxsize=20_000)
def _lines(text: str, width: int, max_tokens: int) -> Floats:
    """±1 in the buckets of all distinct lines and pairs of neighbouring lines of the text's end. -> (D,)."""
    lines = text.encode("utf-8", "replace")[-max_tokens:].split(b"\n")
    sums = np.zeros(width)
    for piece in {*lines, *map(b"\n".join, pairwise(lines))}:
        code = crc32(piece)
        sums[code % width] += 1.0 if code >> 31 else -1.0
    return sums


@lru_cache(maxsize=20_000)
def _grams(text: str, width: int, max_tokens: int) -> Floats:
    """Sum of ±1 over the buckets of all n-grams of the text's end, of unit length. -> (D,)."""
    data = np.frombuffer(text.encode("utf-8", "replace")[-max_tokens:], np.uint8).astype(np.uint64)
    sums = np.zeros(width)
    for n in range(1, 5):
        if len(data) < n:
            break
        code = np.full(len(data) - n + 1, n, np.uint64)
        for j in range(n):
            code = code * np.uint64(257) + data[j : len(data) - n + 1 + j]
        for shift, factor in _MIX:  # SplitMix64's: neighbouring codes must not share a bucket
            code = (code ^ (code >> np.uint64(shift))) * np.uint64(factor)
        sign = np.where(code >> np.uint64(63), 1.0, -1.0)
        bucket = (code >> np.uint64(31)) % np.uint64(width)
        sums += np.bincount(bucket.astype(np.int64), weights=sign, minlength=width)
    return np.asarray(sums / max(float(np.linalg.norm(sums)), 1e-12), np.float64)
