"""Thin subclasses of verl's V1 trainers: credit per turn, recorded runs, guarded steps.

`MultiTurnMixin` overrides hooks only; verl's own `fit`, `_step_once`, critic and actor updates run
unchanged. tests/test_verl_hooks.py guards every signature used here against the installed verl.
"""

import math
import time
from functools import partial
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu

from verl_multiturn import metrics as run_metrics
from verl_multiturn.algorithms import advantages
from verl_multiturn.algorithms.vineppo import whiten, with_horizon, with_sibling_roots
from verl_multiturn.audit_metrics import audited, of_audit
from verl_multiturn.collapse import detectors
from verl_multiturn.compose import plain
from verl_multiturn.errors import RunStopped
from verl_multiturn.filtering import group_filter
from verl_multiturn.heartbeat import Heartbeat
from verl_multiturn.kl import set_kl
from verl_multiturn.methods import TOKEN_ALGORITHMS, VERL_ALGORITHMS, keywords
from verl_multiturn.progress import Progress
from verl_multiturn.rollout.loop import first_prompt
from verl_multiturn.rollout.rows import Rows, to_records
from verl_multiturn.rollout.vine_config import Vine
from verl_multiturn.runs import RunWriter
from verl_multiturn.survivors import Survivors
from verl_multiturn.trainer_archer import ArCHerSteps
from verl_multiturn.trainer_guard import GuardedRun, ResumedRun
from verl_multiturn.trainer_q import QSteps
from verl_multiturn.trainer_record import RecordedSteps
from verl_multiturn.trainer_starpo import StarPOSteps
from verl_multiturn.vine_metrics import of_values, of_vine

MARGINAL_STD = "multiturn/mi_marginal_std/mean"


class MultiTurnMixin(GuardedRun, RecordedSteps, StarPOSteps, QSteps, ArCHerSteps, ResumedRun):
    """What every mode shares. `mode` is verl's name of it."""

    mode: str

    def __init__(self, config: Any) -> None:
        # verl keys its synchronous behaviour on this string, not on the class.
        config.trainer.v1.trainer_mode = self.mode
        super().__init__(config)  # type: ignore[call-arg]
        self.settings = config.multiturn
        self.heart, self._before = Heartbeat(self.settings.run, limit=self.settings.phase_timeout), None
        self.filter = group_filter(plain(self.settings.filter))
        self._filtered_out: list[dict[str, Any]] = []  # records of this step's groups that are not trained on
        self._kept_share, self._empty_steps = 1.0, 0
        self._marginal_std: float | None = None
        self.detectors = detectors(plain(self.settings.collapse))
        self._val_records: list[dict[str, Any]] = []
        self._fetched = 0
        self._submitted: Any = None  # the prompts rolled out last
        # verl's default of 2 s rounds every rollout and every validation up; no key reaches it.
        self.replay_buffer.poll_interval = self.settings.poll_interval
        self.replay_buffer.sample = partial(self._sample, self.replay_buffer.sample)

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()  # type: ignore[misc]
        try:
            first_prompt(self.config, self.tokenizer)
        except ValueError as error:
            raise RunStopped(str(error)) from None

    # ------------------------------------------------------------------ run folder and progress

    def fit(self, agent_loop_manager: Any) -> None:
        """verl's `fit`, recorded; whatever ends it, the run folder stays whole."""
        config = plain(self.config)
        config["ray_kwargs"]["ray_init"]["_temp_dir"] = None  # a new one each start: not part of the run
        self.progress = Progress(self.total_training_steps, self.global_steps)
        if self.global_steps >= self.total_training_steps:
            self.progress.note(
                f"{self.settings.run} is trained to step {self.global_steps} already: raise "
                "trainer.total_training_steps, or name another folder in multiturn.run"
            )
        if self.settings.algorithm == "vineppo":
            for sentence in self._vine().biased:
                self.progress.note(sentence)
        if self.settings.kl_aggregation == "sequence_sum":
            set_kl(self.actor_rollout_wg, self.config.actor_rollout_ref.actor)
        self._size_mini_batches("actor", self.actor_rollout_wg, "update_actor")
        if self.use_critic:
            self._size_mini_batches("critic", self.critic_wg, "train_mini_batch")
        for caveat in self._caveats():
            self.progress.note(caveat)
        with (
            self._alive(),
            RunWriter(self.settings.run, config, resume_step=self.global_steps or None) as self.writer,
        ):
            for step, recorded in self._recorded_metrics():
                if self.settings.information.ema is not None and MARGINAL_STD in recorded:
                    self._averaged(recorded[MARGINAL_STD])
                for detector in self.detectors:
                    detector.update(step, recorded)
            self._complete_validation()
            super().fit(agent_loop_manager)  # type: ignore[misc]

    # ------------------------------------------------------------------ sampling

    def _sample(self, sample: Any, global_steps: int, partition_id: str, batch_size: int) -> Any:
        """verl's sampler, with a check: it would silently train on whatever episodes survived."""
        if partition_id == "val":
            batch, metrics = self._sample_some(sample, global_steps, partition_id, batch_size)
            if not batch.keys:
                raise RunStopped(
                    f"validation at step {global_steps}: none of {batch_size} tasks was played to its end; "
                    f"{self.settings.run}/failures.jsonl says why"
                )
            self._val_records += self._record(self._rows(batch), "val")
            self._expected_val += batch_size * self.config.actor_rollout_ref.rollout.val_kwargs.n
            return batch, metrics
        rule, size = self.settings.failures, self.config.actor_rollout_ref.rollout.n
        expected, kept = batch_size * size, Survivors(rule.group, batch_size, size)
        for attempt in range(rule.refills + 1):
            batch, metrics = self._sample_some(sample, global_steps, partition_id, kept.missing)
            self._clear(kept.take(batch), partition_id)
            if rule.group == "refill" and kept.missing and attempt < rule.refills:
                self._roll_out_again(kept, attempt + 1)
                continue
            survived = kept.trajectories
            if survived >= rule.min_share * expected:
                metrics["multiturn/failed_trajectories/mean"] = kept.failed
                metrics["multiturn/dropped_groups/mean"] = kept.dropped
                metrics["multiturn/refills/mean"] = attempt
                return self._listen(kept.batch, metrics), metrics
            self.progress.note(
                f"step {global_steps}: {survived} of {expected} trajectories survived (see failures.jsonl)"
            )
            self._clear(kept.batch.keys, partition_id)
            kept = Survivors(rule.group, batch_size, size)
            if attempt < rule.refills:
                self._add_prompts_to_generate(batch_size)
        raise RunStopped(
            f"step {global_steps} has {survived} of {expected} trajectories after {rule.refills} refills, "
            f"fewer than multiturn.failures.min_share={rule.min_share:g}: {self.settings.run}/failures.jsonl "
            "names what failed; nothing was trained on this step"
        )

    def _clear(self, keys: list[str], partition_id: str) -> None:
        if keys:
            tq.kv_clear(keys=keys, partition_id=partition_id)

    def _roll_out_again(self, kept: Survivors, attempt: int) -> None:
        """Submit the tasks of the groups that lost trajectories once more, under new uids."""
        self.progress.note(
            f"step {self.global_steps}: {kept.missing} of {kept.groups} groups lost trajectories and are "
            "rolled out again (see failures.jsonl)"
        )
        uids = list(self._submitted["uid"])
        places = [place for place, uid in enumerate(uids) if uid not in kept.uids]
        again = self._submitted[places]
        renamed = [f"{uids[place].partition('.')[0]}.{attempt}" for place in places]
        tu.assign_non_tensor_stack(again, "uid", renamed)
        self._submit_batch_to_rollout(again)

    def _submit_batch_to_rollout(self, batch: Any) -> Any:
        self._submitted = batch
        return super()._submit_batch_to_rollout(batch)  # type: ignore[misc]

    def _sample_some(self, sample: Any, global_steps: int, partition_id: str, batch_size: int) -> Any:
        """verl raises where not one trajectory survived; here that is an empty batch like any other."""
        try:
            return sample(global_steps, partition_id, batch_size)
        except RuntimeError as error:
            if "no materializable trajectories" not in str(error):
                raise
            buffer = self.replay_buffer
            uids = list(buffer.finished_keys[partition_id] | buffer.failure_keys[partition_id])
            tq.kv_clear(keys=uids, partition_id=partition_id)
            return tq.KVBatchMeta(partition_id=partition_id, keys=[], tags=[]), {}

    def _fetch_one_gen_batch(self) -> Any:
        batch = super()._fetch_one_gen_batch()  # type: ignore[misc]
        if self.settings.seeded:
            # verl's uids are random; mini-batches follow their order. No "_": keys are split there.
            uids = [f"{self.global_steps:06d}-{self._fetched + i:06d}" for i in range(len(batch))]
            self._fetched += len(batch)
            tu.assign_non_tensor_stack(batch, "uid", uids)
        return batch

    def _balance_batch(self, batch: Any, metrics: dict, **kwargs: Any) -> Any:
        if self.settings.seeded:
            # Rows arrive in the order of completion.
            order = [(uid, int(s), int(i)) for uid, s, i in (key.rsplit("_", 2) for key in batch.keys)]
            batch.reorder(sorted(range(len(order)), key=order.__getitem__))
        self._filtered_out, self._kept_share = [], 1.0
        every = self.settings.information.every
        if every is not None and (self.global_steps == 1 or self.global_steps % every == 0):
            self._measure_information(self._rows(batch), metrics)
        if self.filter.shrinks:
            batch = self._shrink(batch, metrics)
        self._real_rows = len(batch.keys)
        batch = super()._balance_batch(batch, metrics, **kwargs)  # type: ignore[misc]
        metrics["multiturn/rows/mean"] = self._real_rows
        metrics["multiturn/padded_rows/mean"] = len(batch.keys) - self._real_rows
        return batch

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Mini-batches follow the real rows: the number of them is verl's, rounded, their size what it takes.

        verl fills the last one up instead: with turn rows, or after a filter, mostly with padding.
        """
        updated = {}
        if self.config.trainer.critic_warmup <= self.global_steps:
            updated["actor"] = self.config.actor_rollout_ref.actor.ppo_mini_batch_size
        if self.use_critic:
            updated["critic"] = self.config.critic.ppo_mini_batch_size
        n, self._dp_size = self.config.actor_rollout_ref.rollout.n, dp_size
        self._mini_batches = {
            role: max(1, round(self._real_rows / (size * n))) for role, size in updated.items()
        }
        return dp_size * math.lcm(*self._mini_batches.values())

    def _size_mini_batches(self, role: str, workers: Any, method: str) -> None:
        """Have an update of these workers take the mini-batches of `_get_required_batch_multiple`."""
        update = getattr(workers, method)

        def sized(batch: Any) -> Any:
            size = len(batch.keys) // self._mini_batches[role]
            batch.extra_info.update({"global_batch_size": size, "mini_batch_size": size})
            return update(batch)

        setattr(workers, method, sized)

    # ------------------------------------------------------------------ credit

    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        """Turn-level algorithms here, verl's own through `super()`; then record the step."""
        if self.in_silico is not None:
            return self._in_silico_advantages(batch, metrics)
        name = self.settings.algorithm
        rows = self._rows(batch)
        members = rows.members()
        self._check_groups(rows, members, metrics)
        if not self.filter.shrinks:
            metrics |= run_metrics.of_sessions(list(rows.sessions().values()))
            metrics |= run_metrics.of_groups(self.filter.compared(list(members.values())))
        if name in VERL_ALGORITHMS:
            self._place_rewards(rows, batch)
            batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        elif name in TOKEN_ALGORITHMS:
            batch = self._token_advantages(rows, batch, metrics)
        elif name == "archer":
            batch = self._critic_advantages(rows, batch, metrics)
        elif name == "q_advantage":
            batch = self._q_advantages(rows, batch, metrics)
        else:
            batch = self._turn_advantages(name, rows, batch, metrics)
        self._audit(rows, batch, metrics)
        self._weigh(members, batch)
        started = time.perf_counter()
        records = [*self._record(rows, "train"), *self._filtered_out]
        self.writer.trajectories("train", self.global_steps, records)
        metrics["multiturn/record_seconds/mean"] = time.perf_counter() - started
        return batch

    def _audit(self, rows: Rows, batch: Any, metrics: dict) -> None:
        """Compare the values of this step with what `multiturn.audit` played from their states."""
        sessions = list(rows.sessions().values())
        if not any("audit" in session for session in sessions):
            return
        if self.settings.algorithm in VERL_ALGORITHMS:  # whose values only verl has read
            data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["values"])
            values = rows.turns(list(data["values"].unbind())).value
            for (_, record, _), value in zip(rows.places, values.tolist(), strict=True):
                record["value"] = value
        metrics |= of_audit(audited(rows), sessions)

    def _vine(self) -> Vine:
        return Vine.of(plain(self.settings), self.config.actor_rollout_ref.rollout.n)

    def _turn_advantages(self, name: str, rows: Rows, batch: Any, metrics: dict) -> Any:
        fields = ["response_mask"] + (["values"] if self.use_critic else [])
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        rows = rows.by_step()
        turns = rows.turns(list(data["values"].unbind()) if self.use_critic else None)
        started = time.perf_counter()
        if name == "vineppo":
            vine = self._vine()
            if vine.horizon is not None and vine.horizon_value == "group":
                cut = [record.get("cut", 0.0) for _, record, _ in rows.places]
                turns = with_horizon(turns, cut, vine.horizon, vine.gamma)
            metrics |= of_vine(list(rows.sessions().values())) | of_values(turns.value)
            turns = with_sibling_roots(turns, vine.gamma, self.settings.vineppo.lam, vine.pooled)
        given = keywords(self.settings)
        apart = name == "vineppo" and given["whiten"] and given["scope"] == "minibatch"
        per_turn = advantages(name, turns, **given | ({"whiten": False} if apart else {}))
        if apart:
            per_turn = whiten(per_turn, turns.tokens, self._updates_of(rows, batch))
        metrics["multiturn/advantage_seconds/mean"] = time.perf_counter() - started
        metrics |= run_metrics.of_turns(turns, per_turn, keywords(self.settings) if name == "gigpo" else {})
        if self.use_critic or name == "vineppo":
            for (_, record, _), value in zip(rows.places, turns.value.tolist(), strict=True):
                record.get("step", record)["value"] = value
        # A critic over turns learns A + V, the return its advantage was measured against.
        target = per_turn + turns.value if self.use_critic else per_turn
        advantages_, returns = (rows.spread(x, data["response_mask"]) for x in (per_turn, target))
        return self._put(batch, advantages=advantages_, returns=returns)

    def _updates_of(self, rows: Rows, batch: Any) -> list[int]:
        """(N,) which mini-batch each turn is in: each device goes through its share in order."""
        share = len(batch.keys) // self._dp_size
        size = share // self._mini_batches.get("actor", 1)
        return [row % share // size for row, _, _ in rows.places]

    # ------------------------------------------------------------------ validation

    def _validate(self) -> dict:
        self._val_records, self._expected_val = [], 0
        started = time.perf_counter()
        metrics = super()._validate()  # type: ignore[misc]
        samples = self.config.actor_rollout_ref.rollout.val_kwargs.n
        also = {name: samples * self.val_dataset.sizes[name] for name in self.settings.also}
        metrics |= run_metrics.of_panels(self._val_records, self._expected_val, also)
        self.writer.trajectories("val", self.global_steps, self._val_records)
        self.writer.flush()  # a resumed run takes the line below as the sign that it need not validate again
        self.writer.metrics(self.global_steps, metrics)
        self._so_far = self._so_far | metrics
        self.progress.validation(self.global_steps, metrics, time.perf_counter() - started)
        self._keep_best(metrics)
        return metrics

    # ------------------------------------------------------------------ records

    def _rows(self, batch: Any) -> Rows:
        fetched = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"]
        )
        return Rows.read(batch.keys, batch.tags, list(fetched["extra_fields"]))

    def _record(self, rows: Rows, split: str, trained: bool = True) -> list[dict[str, Any]]:
        fields = ["prompts", "responses"]
        if self.config.actor_rollout_ref.rollout.calculate_log_probs:
            fields.append("rollout_log_probs")
        if split == "train" and trained:
            fields.append("advantages")
        data = tq.kv_batch_get(keys=rows.keys, partition_id=split, select_fields=fields)

        def column(name: str) -> Any:
            return [row.tolist() for row in data[name].unbind()] if name in data else None

        columns = (column(name) for name in ("prompts", "responses", "rollout_log_probs", "advantages"))
        return to_records(rows, *columns, split, self.global_steps, trained)


@register_trainer("multiturn_sync")
class MultiTurnTrainer(MultiTurnMixin, PPOTrainerSync):
    """Rollout and training take turns on the same devices; every step is on-policy."""

    mode = "sync"


@register_trainer("multiturn_colocate_async")
class MultiTurnColocateAsyncTrainer(MultiTurnMixin, PPOTrainerColocateAsync):
    """Rollout and training share devices; trajectories may span weight versions."""

    mode = "colocate_async"
