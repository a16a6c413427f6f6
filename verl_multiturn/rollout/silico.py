"""Training rows of ArCHer's in-silico actor: one fresh utterance at a replayed state, a row each."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from verl_multiturn.rollout.episode import Sample


@dataclass(frozen=True)
class InSilico:
    """The rows of a step.

    Attributes:
        states: (N,) what the critic reads.
        actions: (N,) likewise.
        prompt_ids: (N,) what the policy read.
        samples: (N,) what it wrote.
        step: of training.
        pad_id: the one untrained token of a row whose utterance is empty, since verl needs one.
    """

    states: list[str]
    actions: list[str]
    prompt_ids: Sequence[list[int]]
    samples: Sequence[Sample]
    step: int
    pad_id: int

    @property
    def keys(self) -> list[str]:
        """As of any row: uid, session and row."""
        return [f"{self.step:06d}-silico{k:06d}_0_0" for k in range(len(self.states))]

    def fields(self) -> TensorDict:
        """What verl reads of a row; their score is 0, as there is no episode."""
        columns: dict[str, list[torch.Tensor]] = defaultdict(list)
        for prompt, (ids, mask, log_probs) in zip(self.prompt_ids, self._responses(), strict=True):
            columns["prompts"].append(torch.tensor(prompt))
            columns["responses"].append(torch.tensor(ids))
            columns["input_ids"].append(torch.tensor([*prompt, *ids]))
            columns["position_ids"].append(torch.arange(len(prompt) + len(ids)))
            for name in ("response_mask", "loss_mask"):
                columns[name].append(torch.tensor(mask))
            columns["rm_scores"].append(torch.zeros(len(ids)))
            if log_probs is not None:
                columns["rollout_log_probs"].append(torch.tensor(log_probs))
        fields: dict[str, Any] = {
            name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()
        }
        fields["num_turns"] = torch.ones(len(self.states), dtype=torch.int64)
        fields["multi_modal_inputs"] = NonTensorStack(*({} for _ in self.states))
        fields["extra_fields"] = NonTensorStack(*({"turns": []} for _ in self.states))
        fields["uid"] = NonTensorStack(*(key.rsplit("_", 2)[0] for key in self.keys))
        return TensorDict(fields, batch_size=len(self.states))

    def tags(self) -> list[dict[str, Any]]:
        """verl's tags of these rows; their weights are those of the step before."""
        sizes = [
            (len(prompt), len(ids))
            for prompt, (ids, _, _) in zip(self.prompt_ids, self._responses(), strict=True)
        ]
        versions = {"global_steps": self.step, "min_global_steps": self.step - 1}
        versions["max_global_steps"] = self.step - 1
        return [
            {"status": "success", "prompt_len": x, "response_len": z, "seq_len": x + z, **versions}
            for x, z in sizes
        ]

    def _responses(self) -> list[tuple[list[int], list[int], list[float] | None]]:
        """Ids, mask and log-probabilities of each row."""
        return [
            (one.ids, [1] * len(one.ids), one.log_probs)
            if one.ids
            else ([self.pad_id], [0], None if one.log_probs is None else [0.0])
            for one in self.samples
        ]
