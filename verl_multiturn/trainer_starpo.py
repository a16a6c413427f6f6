"""What StarPO adds to a training step: groups left out, rewards placed, bi-level GAE, information.

A mixin of `MultiTurnMixin`: it overrides `_step_once` and offers the rest to the hooks in trainer.py.
"""

import time
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict

from verl_multiturn import metrics as run_metrics
from verl_multiturn.compose import plain
from verl_multiturn.errors import RunStopped
from verl_multiturn.filtering import EmptyStep, GroupFilter, Member
from verl_multiturn.information_probe import PARTITION, InformationProbe
from verl_multiturn.methods import keywords, turn_rewards
from verl_multiturn.progress import Progress
from verl_multiturn.rewards import Normalize
from verl_multiturn.rollout.rows import Rows
from verl_multiturn.runs import RunWriter
from verl_multiturn.token_credit import BilevelConfig, bilevel


class StarPOSteps:
    """Attributes and methods of the trainer that it is mixed into are declared here, for the reader."""

    config: Any
    settings: Any
    tokenizer: Any
    actor_rollout_wg: Any
    global_steps: int
    filter: GroupFilter
    writer: RunWriter
    progress: Progress
    _filtered_out: list[dict[str, Any]]
    _kept_share: float
    _empty_steps: int
    _marginal_std: float | None
    _rows: Any
    _record: Any
    _clear: Any

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, Any], sample_batch_size: int) -> Any:
        """verl's; a step whose filter keeps nothing ends there, counted, with its trajectories recorded."""
        try:
            batch = super()._step_once(metrics, timing_raw, sample_batch_size)  # type: ignore[misc]
        except EmptyStep:
            self._empty_steps += 1
            metrics["multiturn/empty_step/mean"] = 1.0
            self.writer.trajectories("train", self.global_steps, self._filtered_out)
            self.progress.note(
                f"step {self.global_steps}: multiturn.filter kept none of the groups, nothing is trained"
            )
            if self.filter.stop_after is not None and self._empty_steps >= self.filter.stop_after:
                raise RunStopped(
                    f"multiturn.filter kept nothing in {self._empty_steps} steps in a row "
                    f"(multiturn.filter.stop_after={self.filter.stop_after}): the groups no longer differ, "
                    "or do not differ yet"
                ) from None
            return tq.KVBatchMeta(partition_id="train", keys=[], tags=[])
        self._empty_steps = 0
        metrics["multiturn/empty_step/mean"] = 0.0
        return batch

    def _shrink(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Leave out the groups that `multiturn.filter` drops, before any forward pass is spent on them."""
        rows = self._rows(batch)
        metrics |= run_metrics.of_sessions(list(rows.sessions().values()))
        members = self._members(rows)
        try:
            kept = self.filter.kept(list(members.values()))
        except ValueError as error:
            raise RunStopped(f"step {self.global_steps}, multiturn.filter: {error}") from None
        uids = list(members)
        dropped = set(uids) - {uids[g] for g in kept}
        metrics |= run_metrics.of_groups(self.filter.compared(list(members.values())), kept)
        self._kept_share = metrics["multiturn/kept_share/mean"] = len(kept) / len(uids)
        if dropped:
            lost = {
                key: (tag, fields)
                for key, tag, fields in zip(batch.keys, batch.tags, rows.fields, strict=True)
                if key.rsplit("_", 2)[0] in dropped
            }
            tags, fields = zip(*lost.values(), strict=True)
            self._filtered_out = self._record(Rows.read([*lost], tags, fields), "train", trained=False)
            self._clear([*lost], batch.partition_id)
            extra = batch.extra_info
            batch = batch.select_keys([key for key in batch.keys if key not in lost])
            batch.extra_info.update(extra)
        if not kept:
            raise EmptyStep
        return batch

    def _members(self, rows: Rows) -> dict[str, list[Member]]:
        """The trajectories of each group, as the filter sees them."""
        log_probs = None
        if self.filter.reads_tokens:
            data = tq.kv_batch_get(keys=rows.keys, partition_id="train", select_fields=["rollout_log_probs"])
            log_probs = [row.tolist() for row in data["rollout_log_probs"].unbind()]
        return rows.members(log_probs)

    def _measure_information(self, rows: Rows, metrics: dict[str, Any]) -> None:
        """Mutual information of prompts and reasonings, by teacher forcing on the actor."""
        settings, started = self.settings.information, time.perf_counter()
        data = tq.kv_batch_get(keys=rows.keys, partition_id="train", select_fields=["prompts", "responses"])
        probe = InformationProbe.draw(
            rows,
            [row.tolist() for row in data["prompts"].unbind()],
            [row.tolist() for row in data["responses"].unbind()],
            self.tokenizer.decode,
            self.settings.action.think,
            settings.samples,
            settings.rule,
            np.random.default_rng([self.settings.seed, self.global_steps]),
        )
        if probe is None:
            return
        keys = probe.keys(max(self.actor_rollout_wg._query_dispatch_info("actor")) + 1)
        batch = tq.kv_batch_put(
            keys=keys,
            partition_id=PARTITION,
            fields=probe.fields(keys),
            tags=probe.tags(keys, self.global_steps),
        )
        temperature = self.config.actor_rollout_ref.rollout.temperature
        batch.extra_info.update(
            {"calculate_entropy": False, "compute_loss": False, "temperature": temperature}
        )
        self.actor_rollout_wg.compute_log_prob(batch)
        data = tq.kv_batch_get(
            keys=keys, partition_id=PARTITION, select_fields=["log_probs", "response_mask"]
        )
        found = probe.estimates(data, None if settings.ema is None else self._averaged)
        metrics |= {f"multiturn/{name}/mean": value for name, value in found.items()}
        self._clear(keys, PARTITION)
        metrics["multiturn/information_seconds/mean"] = time.perf_counter() - started

    def _averaged(self, std: float) -> float:
        """The moving average of `multiturn.information.ema`, with one more std in it."""
        kept, before = self.settings.information.ema, self._marginal_std
        self._marginal_std = std if before is None else kept * before + (1 - kept) * std
        return self._marginal_std

    def _token_advantages(self, rows: Rows, batch: Any, metrics: dict[str, Any]) -> Any:
        fields = ["response_mask", "values"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        values = [row.tolist() for row in data["values"].unbind()]
        started = time.perf_counter()
        config = BilevelConfig(**keywords(self.settings))
        credit, returns = bilevel(rows, values, self._rewards(rows), data["response_mask"], config)
        metrics["multiturn/advantage_seconds/mean"] = time.perf_counter() - started
        for (_, record, _), value in zip(rows.places, rows.turns(values).value.tolist(), strict=True):
            record["value"] = value
        return self._put(batch, advantages=credit, returns=returns)

    def _rewards(self, rows: Rows) -> np.ndarray:
        """(N,) what token-level estimators see of each turn's reward."""
        normalize = Normalize(**plain(self.settings.normalize))
        return rows.rewards(normalize, at_turns=turn_rewards(self.settings))

    def _place_rewards(self, rows: Rows, batch: Any) -> None:
        """Where verl's estimators should see more than the return at the end of each row, write it there."""
        if not turn_rewards(self.settings) and self.settings.normalize.by is None:
            return
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"]
        )
        per_turn = self._rewards(rows)
        self._put(batch, rm_scores=rows.at_ends(per_turn, data["response_mask"]))

    def _weigh(self, members: dict[str, list[Member]], batch: Any) -> None:
        """Multiply the advantages of each group by its weight."""
        weights = self.filter.weights(list(members.values()), self._kept_share)
        if all(weight == 1.0 for weight in weights):
            return
        by_uid = dict(zip(members, weights, strict=True))
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages"])
        weighed = [
            row * by_uid.get(key.rsplit("_", 2)[0], 1.0)
            for key, row in zip(batch.keys, data["advantages"].unbind(), strict=True)
        ]
        self._put(batch, advantages=torch.nested.as_nested_tensor(weighed, layout=torch.jagged))

    def _put(self, batch: Any, **columns: torch.Tensor) -> Any:
        fields = TensorDict(columns, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
