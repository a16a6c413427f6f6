"""From a folder of trees to a file of preference pairs: what a Q model is fitted to, one pair a line.

A pair is one JSON object:

    prompt       chat messages: what the policy read there, by the run's own prompts
    shorter      the same with less and less history, then fewer legal actions: for a Q model that reads less
                 than the policy; not there where nothing can be left out, or the trees do not say it
    win, lose    the whole answers, preferred first
    win_action, lose_action     what the environment was given
    gap          Q(win) - Q(lose) > 0; q_win, q_lose: the two
    visits       [of win, of lose]
    weight       in the loss, mean 1 over the file's training pairs
    invalid      whether the environment did not know the loser's action, or the answer had no valid form
    task, group  id of the task, and the hash of its content; index: the turn, from 0
    split        "train" or "held_out": by the group alone, so no task is on both sides

As form "trl" a line is what TRL's DPOTrainer reads, {prompt, chosen, rejected} as chat messages, and `split`
to choose by. It tokenizes them itself, and its max_length cuts a long prompt's end: set it to None.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from verl_multiturn.algorithms.registry import Config
from verl_multiturn.errors import unknown
from verl_multiturn.rollout.prompts import Messages, PromptPolicy, View, prompt_policy
from verl_multiturn.run_files import Record, json_line, write_atomically
from verl_multiturn.search.pairs import Lose, Pair, Win, walk
from verl_multiturn.search.tree_files import config_of, read_trees

FORMS = ("own", "trl")


@dataclass(frozen=True)
class PairConfig(Config):
    """The block `multiturn.pairs`."""

    win: Win = "best_path"  # Fig. 3 of the paper; "argmax" is the authors' code
    lose: Lose = "worst"
    min_gap: float = 0.0  # smallest gap of a pair
    min_visits: int = 1  # that both sides need; 0 lets candidates in that were never tried
    weight: Literal["none", "gap", "gap_se"] = "none"  # 1, the gap, or the gap over its standard error
    max_per_task: int | None = None  # those with the largest gaps
    held_out: float = 0.1  # share of the tasks
    invalid: Literal["keep", "drop"] = "keep"  # losers that are not valid actions

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("min_gap", "min_visits"):
            self.check_range(key, 0)
        self.check_range("held_out", 0, 1)
        if self.max_per_task is not None:
            self.check_range("max_per_task", 1)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "PairConfig":
        """From a group of keys.

        Raises:
            ValueError: an unknown key or a value that does not fit.
        """
        valid = [field.name for field in fields(cls)]
        for key in settings:
            if key not in valid:
                raise unknown("key of pairs", key, valid)
        return cls(**settings)


@dataclass
class Counts:
    """What became of the trees."""

    trees: int = 0
    without: int = 0  # that gave no pair
    train: int = 0
    held_out: int = 0
    invalid: int = 0  # pairs whose loser is not a valid action, kept or dropped
    capped: int = 0  # left out by `max_per_task`

    def __str__(self) -> str:
        """One line."""
        capped = f", {self.capped} left out by max_per_task" if self.capped else ""
        return (
            f"{self.train} pairs to train on, {self.held_out} held out, from {self.trees - self.without} of "
            f"{self.trees} trees; {self.invalid} losers are invalid actions{capped}"
        )


def write_pairs(
    folder: str | Path, out: Path, settings: Mapping[str, Any] | None = None, form: str = "own"
) -> Counts:
    """Write the pairs of a folder of trees.

    Args:
        folder: as `search` wrote it.
        out: the file; appears when it is complete.
        settings: keys of `PairConfig`, on top of the `multiturn.pairs` that the trees were grown with.
        form: of a line, one of `FORMS`.

    Raises:
        ValueError: no trees, a damaged tree, an unknown key or form, a file that exists, or no pair at all.
    """
    if form not in FORMS:
        raise unknown("format of pairs", form, FORMS)
    recorded = config_of(folder)["multiturn"]
    config = PairConfig.of({**(recorded.get("pairs") or {}), **(settings or {})})
    policy = prompt_policy(recorded) if "prompt" in recorded else None
    if out.exists():
        raise ValueError(f"{out} exists: nothing is overwritten, choose another --out")
    counts = Counts()
    found = [pair for tree in read_trees(folder) for pair in pairs_of(tree, config, counts, policy)]
    found.sort(key=lambda pair: (str(pair["task"]), pair["index"]))  # not in the order of completion
    if not found:
        why = "no tree found a reward above 0" if counts.invalid == 0 else "all losers are invalid actions"
        raise ValueError(
            f"{folder} gives no pair: {counts.trees} trees, {why}, or gaps and visits are below "
            f"min_gap={config.min_gap:g} and min_visits={config.min_visits}; search longer, or lower them"
        )
    scale = float(np.mean([pair["weight"] for pair in found if pair["split"] == "train"] or [1.0]))
    found = [pair | {"weight": pair["weight"] / scale} for pair in found]
    pairs = found if form == "own" else map(_for_trl, found)
    write_atomically(out, (json_line(pair) for pair in pairs))
    return counts


def pairs_of(
    tree: Record, config: PairConfig, counts: Counts, policy: PromptPolicy | None = None
) -> list[Record]:
    """The pairs of one recorded tree, by turn; `counts` is brought up to date, `policy` wrote the prompts."""
    counts.trees += 1
    pairs = list(walk(tree["root"], config.win, config.lose, config.min_gap, config.min_visits))
    bad = [pair for pair in pairs if not pair.lose.get("valid", True)]
    counts.invalid += len(bad)
    if config.invalid == "drop":
        pairs = [pair for pair in pairs if pair.lose.get("valid", True)]
    if config.max_per_task is not None and len(pairs) > config.max_per_task:
        counts.capped += len(pairs) - config.max_per_task
        largest = sorted(pairs, key=lambda pair: -pair.gap)[: config.max_per_task]
        pairs = [pair for pair in pairs if pair in largest]
    counts.without += not pairs
    split = "held_out" if held_out(tree["content"], config.held_out) else "train"
    setattr(counts, split, getattr(counts, split) + len(pairs))
    return [_record(tree, pair, split, config.weight) | _shorter(tree, pair, policy) for pair in pairs]


def held_out(content: str, share: float) -> bool:
    """Whether a task is held out: by its content alone, whatever other tasks there are."""
    digest = hashlib.blake2b(f"held out {content}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def read_pairs(path: str | Path) -> Iterator[Record]:
    """The pairs of a file.

    Raises:
        ValueError: no such file, or a line that is no pair; its number is named.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no pairs at {file}: write them with verl-multiturn pairs TREES --out {file}")
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            pair = orjson.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {number} is not JSON: {error}") from None
        if isinstance(pair, dict) and {"chosen", "rejected"} <= set(pair):
            raise ValueError(f"{file} is in TRL's format: write the pairs again without --format trl")
        if not isinstance(pair, dict) or not {"prompt", "win", "lose", "split"} <= set(pair):
            raise ValueError(f"{file}, line {number} is no pair: it needs prompt, win, lose and split")
        yield pair


def _record(tree: Record, pair: Pair, split: str, weight: str) -> Record:
    win, lose = pair.win, pair.lose
    return {
        "prompt": pair.node["messages"],
        "win": _text(win),
        "lose": _text(lose),
        "win_action": win["action"],
        "lose_action": lose["action"],
        "gap": pair.gap,
        "q_win": pair.q_win,
        "q_lose": pair.q_win - pair.gap,
        "visits": [win["N"], lose["N"]],
        "weight": {"none": 1.0, "gap": pair.gap, "gap_se": _over_error(pair)}[weight],
        "invalid": not lose.get("valid", True),
        "task": tree["task"],
        "group": tree["content"],
        "index": len(pair.path),
        "env": tree["env"],
        "split": split,
    }


def _for_trl(pair: Record) -> Record:
    answers = {"chosen": pair["win"], "rejected": pair["lose"]}
    said = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
    return {"prompt": pair["prompt"]} | said | {"split": pair["split"]}


def _shorter(tree: Record, pair: Pair, policy: PromptPolicy | None) -> dict[str, list[Messages]]:
    """The prompt with less of it, from what the nodes down to the pair hold."""
    node = tree["root"]
    if policy is None or "instruction" not in node:
        return {}
    view = View(node["instruction"], "")
    for action in pair.path:
        view.past.append((node["observation"], action))
        node = next(child for child in node["children"] if child["action"] == action)
    view.observation, view.admissible = node["observation"], node.get("admissible")
    found = policy.shorter(view, pair.node["messages"])
    return {"shorter": found} if found else {}


def _text(node: Mapping[str, Any]) -> str:
    return str(node["action"] if node.get("text") is None else node["text"])


def _over_error(pair: Pair) -> float:
    """The gap over its standard error; equal returns, or a single one, leave a variance of 1 / N."""
    error = sqrt(sum(_variance(node) / max(1, node["N"]) for node in (pair.win, pair.lose)))
    return float(pair.gap / error)


def _variance(node: Mapping[str, Any]) -> float:
    """Of the returns booked on a node, from their sum and the sum of their squares."""
    n = max(1, node["N"])
    spread = (node["W2"] - node["W"] ** 2 / n) / (n - 1) if n > 1 else 0.0
    return float(max(spread, 1 / n))
