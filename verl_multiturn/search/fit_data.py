"""What a Q model is fitted with and to: settings, and pairs as token ids."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from verl_multiturn.algorithms.registry import Config
from verl_multiturn.errors import unknown
from verl_multiturn.rollout.prompts import PromptTooLong
from verl_multiturn.search.pair_files import read_pairs
from verl_multiturn.search.q_model import Loss, Tokens


@dataclass(frozen=True)
class FitConfig(Config):
    """The block `multiturn.fit`; the paper's WebShop runs, HotPotQA's differ in beta=0.05 and epochs=1."""

    loss: Loss = "dpo"
    beta: float = 0.1  # β
    aggregate: Literal["sum", "mean"] = "sum"  # over the tokens of an answer, in loss and score
    epochs: int = 2
    batch: int = 64  # pairs of an update
    micro: int = 8  # pairs of a forward pass; changes nothing but memory and time
    lr: float = 1e-6  # constant after the warm-up
    warmup: float = 0.1  # share of the updates
    max_grad_norm: float = 1.0
    lora_rank: int = 0  # 0: all weights
    max_tokens: int | None = None  # of prompt and answer; None: 4096, or what the model has
    invalid_weight: float = 1.0  # of pairs whose loser is an invalid action
    evaluations: int = 10  # of the held-out pairs, evenly over the updates
    patience: int | None = 3  # evaluations without a better one that end the fitting; None: never
    chat_template: str | None = None  # where the tokenizer has none
    seed: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("epochs", "batch", "micro", "evaluations"):
            self.check_range(key, 1)
        for key in ("lr", "beta", "max_grad_norm"):
            self.check_range(key, 1e-12)
        for key in ("lora_rank", "invalid_weight"):
            self.check_range(key, 0)
        self.check_range("warmup", 0, 1)
        for key, least in (("patience", 1), ("max_tokens", 2)):
            if getattr(self, key) is not None:
                self.check_range(key, least)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "FitConfig":
        """From a group of keys.

        Raises:
            ValueError: an unknown key or a value that does not fit.
        """
        valid = [field.name for field in fields(cls)]
        for key in settings:
            if key not in valid:
                raise unknown("key of fit-q", key, valid)
        return cls(**settings)


@dataclass(frozen=True)
class Row:
    """A pair as token ids."""

    prompt: list[int]
    win: list[int]
    lose: list[int]
    weight: float
    invalid: bool  # the loser
    q_win: float
    q_lose: float


@dataclass
class Lengths:
    """What became of the pairs that are longer than the model reads."""

    pairs: int = 0  # in all
    shortened: int = 0  # read with less history, or fewer legal actions
    left_out: int = 0  # too long without these as well

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.pairs} pairs; {self.shortened} are read with less history than the policy read, "
            f"{self.left_out} are left out: they are too long without any"
        )


def rows_of(path: str | Path, tokens: Tokens, config: FitConfig, lengths: Lengths) -> dict[str, list[Row]]:
    """The pairs of a file by split, "train" and "held_out"; `lengths` is brought up to date.

    Raises:
        ValueError: no pairs on one of the two sides; says how to get some.
    """
    found: dict[str, list[Row]] = {"train": [], "held_out": []}
    for number, pair in enumerate(read_pairs(path), 1):
        if pair["split"] not in found:
            raise unknown(f"split in {path}, line {number}:", pair["split"], found)
        lengths.pairs += 1
        win, lose = tokens.answer(pair["win"]), tokens.answer(pair["lose"])
        invalid = bool(pair.get("invalid", False))
        weight = float(pair.get("weight", 1.0)) * (config.invalid_weight if invalid else 1.0)
        try:
            chats = [pair["prompt"], *pair.get("shorter", ())]
            prompt = tokens.readable(chats, max(len(win), len(lose)))
        except PromptTooLong:
            lengths.left_out += 1
            continue
        lengths.shortened += len(prompt) < len(tokens.whole(pair["prompt"]))
        values = (float(pair.get(key, "nan")) for key in ("q_win", "q_lose"))
        found[pair["split"]].append(Row(prompt, win, lose, weight, invalid, *values))
    for split, rows in found.items():
        if not rows:
            long = f" of at most max_tokens={tokens.max_tokens} tokens" if lengths.left_out else ""
            raise ValueError(
                f"{path} has no {split} pairs{long}: search more tasks, or set another share with pairs "
                "held_out=0.2"
            )
    if config.loss == "regression" and any(np.isnan([r.q_win, r.q_lose]).any() for r in found["train"]):
        raise ValueError(f"{path} has no q_win and q_lose, which loss=regression is fitted to")
    return found
