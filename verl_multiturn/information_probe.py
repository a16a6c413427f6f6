"""Mutual information of prompt and reasoning in a run (RAGEN-2, arXiv 2604.06268): the rows to score.

Every sampled reasoning is put behind every sampled prompt and scored by the actor, teacher-forced: n · P
short rows. `algorithms/information.py` makes the estimates of the log-probabilities.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from verl.workers.utils.padding import response_from_nested

from verl_multiturn.algorithms.information import mutual_information, sample_pairs
from verl_multiturn.rollout.rows import Rows

PARTITION = "information"
OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class InformationProbe:
    """n reasonings and the P distinct prompts that they answered.

    Attributes:
        prompts: P lists of token ids, all that stood before a reasoning, `<think>` included.
        reasonings: n lists of token ids.
        own: (n,) index of each reasoning's own prompt.
    """

    prompts: list[list[int]]
    reasonings: list[list[int]]
    own: list[int]

    @classmethod
    def draw(
        cls,
        rows: Rows,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        decode: Callable[[list[int]], str],
        think: bool,
        samples: int,
        rule: str,
        rng: np.random.Generator,
    ) -> "InformationProbe | None":
        """Sample reasonings of a batch; None where it has none.

        Args:
            rows: of the batch.
            prompts: token ids of its rows.
            responses: likewise.
            decode: ids to text.
            think: a reasoning stands between `<think>`, the end of its prompt, and `</think>`, which is cut;
                False: the whole utterance is one.
            samples: of `sample_pairs`, n there.
            rule: of `sample_pairs`.
            rng: of `sample_pairs`.
        """
        sessions: dict[str, list[tuple[int, list[int], list[int]]]] = defaultdict(list)
        for row, record, _ in rows.places:
            start, stop = record["span"]
            spoken = list(responses[row][start:stop])
            first, last = _reasoning(spoken, decode) if think else (0, len(spoken))
            before = [*prompts[row], *responses[row][: start + first]]
            sessions[rows.keys[row].rsplit("_", 1)[0]].append((record["index"], before, spoken[first:last]))
        turns = [sorted(session, key=lambda turn: turn[0]) for session in sessions.values()]
        sizes = [[len(reasoning) for _, _, reasoning in session] for session in turns]
        drawn = [turns[i][t] for i, t in sample_pairs(sizes, samples, rng, rule)]
        if not drawn:
            return None
        places = {
            key: place for place, key in enumerate(dict.fromkeys(tuple(before) for _, before, _ in drawn))
        }
        own = [places[tuple(before)] for _, before, _ in drawn]
        return cls([list(key) for key in places], [reasoning for *_, reasoning in drawn], own)

    def keys(self, multiple: int) -> list[str]:
        """One per row to score, in the order of `fields`; the first is repeated up to a multiple."""
        count = len(self.reasonings) * len(self.prompts)
        return [f"mi_{k}_0" for k in range(count + -count % multiple)]

    def fields(self, keys: Sequence[str]) -> TensorDict:
        """What verl's workers read of a row: reasoning 0 behind each prompt, then reasoning 1, and so on."""
        pairs = self._pairs(len(keys))
        columns: dict[str, list[torch.Tensor]] = defaultdict(list)
        for x, z in pairs:
            columns["prompts"].append(torch.tensor(x))
            columns["responses"].append(torch.tensor(z))
            columns["input_ids"].append(torch.tensor([*x, *z]))
            columns["position_ids"].append(torch.arange(len(x) + len(z)))
            for name in ("response_mask", "loss_mask"):
                columns[name].append(torch.ones(len(z), dtype=torch.int64))
        nested: dict[str, Any] = {
            name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()
        }
        nested["multi_modal_inputs"] = NonTensorStack(*({} for _ in pairs))
        return TensorDict(nested, batch_size=len(pairs))

    def tags(self, keys: Sequence[str], step: int) -> list[dict[str, Any]]:
        """verl's tags of these rows."""
        sizes = [(len(x), len(z)) for x, z in self._pairs(len(keys))]
        versions = {name: step for name in ("global_steps", "min_global_steps", "max_global_steps")}
        return [
            {"status": "success", "prompt_len": x, "response_len": z, "seq_len": x + z, **versions}
            for x, z in sizes
        ]

    def _pairs(self, count: int) -> list[tuple[list[int], list[int]]]:
        """(Prompt, reasoning) of each row, the first once more up to the count."""
        pairs = [(x, z) for z in self.reasonings for x in self.prompts]
        return pairs + [pairs[0]] * (count - len(pairs))

    def estimates(
        self, data: TensorDict, average: Callable[[float], float] | None = None
    ) -> dict[str, float]:
        """`mutual_information` of what the actor wrote (`log_probs`, `response_mask` of the rows).

        `average` makes the std of the z-score of the sample's, e.g. its moving average over steps.
        """
        log_probs = response_from_nested(data["log_probs"], data["response_mask"])
        n, P = len(self.reasonings), len(self.prompts)
        sums = [float(row.sum()) for row in log_probs.unbind()][: n * P]
        # A probability of 1 may round to one above it.
        L = np.minimum(np.array(sums), 0.0).reshape(n, P)
        lengths = [len(z) for z in self.reasonings]
        found = mutual_information(L, lengths, self.own)
        if average is None:
            return found
        std = average(found["mi_marginal_std"])
        z_score = mutual_information(L, lengths, self.own, marginal_std=std)["mi_z_score"]
        return found | {"mi_z_score": z_score}


def _reasoning(spoken: list[int], decode: Callable[[list[int]], str]) -> tuple[int, int]:
    """Where the tokens of a reasoning begin and end; (0, 0): it is not closed.

    A token that holds a part of a tag is none of the reasoning's.
    """
    text = decode(spoken)
    opened = text.find(OPEN)
    begin = 0 if opened < 0 else opened + len(OPEN)
    if (end := text.find(CLOSE, begin)) < 0:
        return 0, 0
    sizes = range(len(spoken) + 1)

    def written(size: int) -> int:
        return len(decode(spoken[:size]))

    return bisect_left(sizes, begin, key=written), bisect_right(sizes, end, key=written) - 1
