"""Steps inside an utterance: where its tokens are cut, and records of turns taken apart by step.

VinePPO (arXiv:2410.01679) gives credit to the steps of a response. A rule of `split_steps` cuts the text;
each cut moves up to the next token's start, and nothing is tokenised again: the authors' code does, so
that the ids it trains may differ from those that were sampled.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from verl_multiturn.algorithms.splitting import split_steps

WITHIN = ("line", "math", "sentence", "fixed_tokens")  # splitters that cut utterances
SPLITTERS = ("turn", *WITHIN, "none")
Record = dict[str, Any]


def token_cuts(
    ids: Sequence[int], text: str, decode: Callable[[list[int]], str], splitter: str, size: int = 64
) -> list[int]:
    """Where in `ids` the steps after the first begin, strictly increasing; [] for one step.

    A cut behind which only special tokens are left is none: nothing would be left to say.

    Args:
        ids: of an utterance.
        text: what `decode` makes of them.
        decode: leaves special tokens out.
        splitter: one of `SPLITTERS`.
        size: tokens of a step, where the splitter is "fixed_tokens".
    """
    if splitter not in WITHIN:
        return []

    @cache
    def read(n: int) -> int:
        """Characters of the text that the first n tokens say in full: half a character is none."""
        begun = decode(list(ids[:n]))
        pairs = zip(begun, text, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(begun), len(text)))

    if splitter == "fixed_tokens":
        found = list(range(size, len(ids), size))
    else:
        bounds = split_steps(text, splitter)[1:-1]
        found = sorted({bisect_left(range(len(ids)), bound, key=read) for bound in bounds})
    return [cut for cut in found if 0 < cut < len(ids) and read(cut) < len(text)]


def by_step(turn: Record) -> list[Record]:
    """A record per step of a turn, the reward and its penalty with the last; [turn] where it has no `steps`.

    Each holds `step`, the object that it came from. Spans, tokens and log-probs are those of the step; it
    has its own value, and only the first has the turn's anchor. `index` stays that of the turn.
    """
    steps = turn.get("steps")
    if not steps:
        return [turn]
    begin, records = turn["span"][0], []
    for step in steps:
        start, stop = step["span"]
        record = {**turn, "steps": None, "step": step, "span": [begin + start, begin + stop]}
        record |= {"value": step["value"], "advantage": step.get("advantage")}
        for name in ("action_ids", "log_probs"):
            if turn.get(name) is not None:
                record[name] = turn[name][start:stop]
        if step is not steps[0]:
            record["anchor"] = None
        if step is not steps[-1]:
            record |= {"reward": 0.0, "penalty": 0.0}
        records.append(record)
    return records


def numbered(turns: Sequence[Record]) -> list[Record]:
    """The steps of a trajectory's turns; `index` counts steps. Either all turns have `steps`, or none."""
    parts = [part for turn in turns for part in by_step(turn)]
    return [{**part, "index": i} if "step" in part else part for i, part in enumerate(parts)]
