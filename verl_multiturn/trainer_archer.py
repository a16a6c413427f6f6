"""What ArCHer adds to a training step: replay, fresh utterances, the critic's updates, its advantages.

A mixin of `MultiTurnMixin`. After the rollout of a step, while the servers are awake, its transitions go into
the replay and the current policy is asked at the replayed states that the critic is about to learn from;
where verl computes advantages, the critic takes its updates and judges the utterances.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq

from verl_multiturn import metrics as run_metrics
from verl_multiturn.algorithms.archer import scaled
from verl_multiturn.checkpoints import LATEST
from verl_multiturn.columns import Floats
from verl_multiturn.compose import plain
from verl_multiturn.critic.actor import FILE, start
from verl_multiturn.critic.config import ArcherConfig, CriticConfig, archer_config, critic_config
from verl_multiturn.critic.dialogues import Dialogue, calibration, dialogues, prompts
from verl_multiturn.env import derive_seed
from verl_multiturn.errors import RunStopped
from verl_multiturn.progress import Progress
from verl_multiturn.rollout.asking import Question, ask
from verl_multiturn.rollout.rows import Rows
from verl_multiturn.rollout.silico import InSilico
from verl_multiturn.runs import RunWriter


class ArCHerSteps:
    """Attributes and methods of the trainer that it is mixed into are declared here, for the reader."""

    config: Any
    settings: Any
    tokenizer: Any
    resource_pool_manager: Any
    get_llm_client: Any
    global_steps: int
    writer: RunWriter
    progress: Progress
    _filtered_out: list[dict[str, Any]]
    _audit: Any
    _rows: Any
    _record: Any
    _clear: Any
    _put: Any
    _checkpoint: Any
    _resumed: Any

    archer: ArcherConfig
    critic_settings: CriticConfig
    utterance_critic: Any  # calls a method of the critic's actor by name
    in_silico: InSilico | None = None  # the rows of this step, instead of the rollout's
    _rolled_out: Any = None  # the batch that they stand for
    asked_tokens: int = 0  # in this step, outside of the rollout

    # ------------------------------------------------------------------ start, checkpoints, end

    def _load_checkpoint(self) -> None:
        """verl's, which sets the step; then the critic is started, from its part of the checkpoint."""
        super()._load_checkpoint()  # type: ignore[misc]
        if self.settings.algorithm != "archer":
            return
        block = plain(self.settings.critic)
        self.archer, self.critic_settings = archer_config(plain(self.settings.archer)), critic_config(block)
        bundles = None
        if block["gpus"]:
            bundles = self.resource_pool_manager.resource_pool_dict["global_pool"].get_placement_groups()[0]
        shares = block["gpus"], block["cpus"]
        self.utterance_critic = start(
            self.critic_settings, self.archer, *shares, self._resume, bundles, self.settings.phase_timeout
        )
        if self.global_steps:
            folder = self._resumed()
            if not (folder / FILE).exists():
                raise RunStopped(
                    f"the checkpoint {folder} has no {FILE}: it is not of multiturn.algorithm=archer"
                )
            self.utterance_critic("load", str((folder / FILE).resolve()))

    def _save_checkpoint(self) -> None:
        """The critic's part first: verl's ends with the note that the checkpoint is complete."""
        if self.settings.algorithm == "archer":
            self.utterance_critic("save", str((self._checkpoint(self.global_steps) / FILE).resolve()))
        super()._save_checkpoint()  # type: ignore[misc]
        for file in self._checkpoint(self.global_steps).parent.glob(f"global_step_*/{FILE}"):
            if not (file.parent / "actor").exists():  # verl keeps max_actor_ckpt_to_keep of them
                file.unlink()

    def _resume(self) -> str:
        """How to go on without the critic, in words."""
        latest = Path(self.config.trainer.default_local_dir) / LATEST
        if latest.exists():
            return f"the same command resumes from {self._checkpoint(latest.read_text().strip())}"
        return "there is none, so the same command starts anew (see trainer.save_freq)"

    def _caveats(self) -> list[str]:
        """What the critic converges to, where that is not the value of the current policy."""
        return self.critic_settings.caveats() if self.settings.algorithm == "archer" else []

    # ------------------------------------------------------------------ after the rollout

    @property
    def _version(self) -> int:
        """Updates of the actor so far: by verl's gate the first is in step `trainer.critic_warmup`."""
        return max(0, self.global_steps - max(1, int(self.config.trainer.critic_warmup)))

    @property
    def _updates_actor(self) -> bool:
        return bool(self.config.trainer.critic_warmup <= self.global_steps)

    def _listen(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Fill the replay with a step's rollout, ask the policy; the batch that is trained on."""
        self.in_silico = None
        if self.settings.algorithm != "archer":
            return batch
        started, rows, self.asked_tokens = time.perf_counter(), self._rows(batch), 0
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["prompts", "responses"]
        )
        found = self._dialogues(rows)
        columns = ([row.tolist() for row in data[name].unbind()] for name in ("prompts", "responses"))
        read = prompts(rows, found, *columns)
        self.utterance_critic("add", [turn for one in found for turn in one.transitions], read)
        wanted, drawn = self.utterance_critic("wanted", self._version)
        said = self._ask("critic", list(wanted.values()), self.archer.utterances)
        heard = [[self._decode(one.ids) for one in samples] for samples in said]
        self.utterance_critic("heard", dict(zip(wanted, heard, strict=True)))
        numbers = {"replay_states": float(drawn), "asked": float(len(wanted) * self.archer.utterances)}
        if drawn:
            numbers |= {"fresh_share": len(wanted) / drawn, "cached_share": 1 - len(wanted) / drawn}
        if self.archer.mode == "in_silico" and self._updates_actor:
            batch = self._speak_in_silico(batch)
        numbers |= {"asked_tokens": float(self.asked_tokens), "ask_seconds": time.perf_counter() - started}
        metrics |= {f"multiturn/archer/{name}/mean": value for name, value in numbers.items()}
        return batch

    def _dialogues(self, rows: Rows) -> list[Dialogue]:
        return dialogues(rows, self.critic_settings, self._version, self.global_steps, self.archer.state)

    def _ask(self, purpose: str, prompt_ids: list[list[int]], count: int, at_once: int | None = None) -> Any:
        """`count` utterances of the current policy at each prompt, `at_once` (None: ArCHer's) at a time."""
        rollout = self.config.actor_rollout_ref.rollout
        seeds: list[tuple[int | None, ...]] = [(None,) * count] * len(prompt_ids)
        if self.settings.seeded:
            parts = (purpose, self.settings.seed, self.global_steps)
            seeds = [
                tuple(derive_seed(*parts, place, k) % 2**31 for k in range(count))
                for place in range(len(prompt_ids))
            ]
        sampling = {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "repetition_penalty": 1.0,
            "logprobs": rollout.calculate_log_probs,
            "max_tokens": self.settings.max_action_tokens,
        }
        questions = [Question(ids, some) for ids, some in zip(prompt_ids, seeds, strict=True)]
        limits = at_once or self.archer.max_inflight, self.settings.episode_timeout
        said = ask(self.get_llm_client(), questions, sampling, *limits)
        self.asked_tokens += sum(len(one.ids) for samples in said for one in samples)
        return said

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _speak_in_silico(self, batch: Any) -> Any:
        """Fresh utterances at replayed states, as the rows that this step trains on."""
        drawn = self.utterance_critic("draw", self.archer.states)
        states, read = [state for state, _ in drawn], [ids for _, ids in drawn]
        said = [one for (one,) in self._ask("actor", read, 1)]
        actions = [self._decode(one.ids) for one in said]
        self._rolled_out, pad = batch, self.tokenizer.eos_token_id
        self.in_silico = rows = InSilico(states, actions, read, said, self.global_steps, pad)
        return tq.kv_batch_put(
            keys=rows.keys, partition_id=batch.partition_id, fields=rows.fields(), tags=rows.tags()
        )

    # ------------------------------------------------------------------ credit

    def _critic_advantages(self, rows: Rows, batch: Any, metrics: dict[str, Any]) -> Any:
        """The critic's updates, then A and V of the step's turns, spread over the utterances."""
        self._train_critic(metrics)
        A, V = self._judge_turns(rows, metrics)
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"]
        )
        tokens = np.array([record["span"][1] - record["span"][0] for _, record, _ in rows.places])
        credit = scaled(A, self.archer.normalize, tokens, self.archer.clip)
        columns = (rows.spread(x, data["response_mask"]) for x in (credit, A + V))
        return self._put_credit(batch, metrics, *columns)

    def _put_credit(self, batch: Any, metrics: dict[str, Any], credit: torch.Tensor, Q: torch.Tensor) -> Any:
        """A token's advantage and return; with a baseline A − b(s, a_<j), and A for verl's critic to learn b.

        Args:
            batch: of the step.
            metrics: get the share of A² over tokens that b accounts for.
            credit: nested (B, response), 0 outside of utterances; Q likewise.
            Q: what verl logs as return otherwise.
        """
        if not self.archer.token_baseline:
            return self._put(batch, advantages=credit, returns=Q)
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["values", "response_mask"]
        )
        parts = zip(*(x.unbind() for x in (credit, data["values"], data["response_mask"])), strict=True)
        rest = [(A - b) * mask for A, b, mask in parts]
        left, whole = (sum(float(row.square().sum()) for row in some) for some in (rest, credit.unbind()))
        if whole:
            metrics["multiturn/archer/baseline_share/mean"] = 1 - left / whole
        advantages = torch.nested.as_nested_tensor(rest, layout=torch.jagged)
        return self._put(batch, advantages=advantages, returns=credit)

    def _train_critic(self, metrics: dict[str, Any]) -> None:
        started = time.perf_counter()
        found = self.utterance_critic("train")
        found["train_seconds"] = time.perf_counter() - started
        metrics |= {f"multiturn/archer/{name}/mean": value for name, value in found.items()}
        if self._updates_actor and not found["all_steps"]:
            raise RunStopped(
                f"step {self.global_steps}: the actor is to be updated (trainer.critic_warmup="
                f"{self.config.trainer.critic_warmup}), and the critic has learnt nothing: the replay has "
                f"{found['replay']:.0f} of multiturn.critic.min_size={self.critic_settings.min_size} "
                "transitions; raise trainer.critic_warmup or lower min_size"
            )

    def _judge_turns(self, rows: Rows, metrics: dict[str, Any]) -> tuple[Floats, Floats]:
        """A and V by place, kept in the turns' records."""
        c = self.critic_settings
        found = self._dialogues(rows)
        places = [place for one in found for place in one.places]
        turns = [turn for one in found for turn in one.transitions]
        A, V = np.zeros(len(places)), np.zeros(len(places))
        A[places], V[places] = self.utterance_critic(
            "judge", [x.state for x in turns], [x.action for x in turns]
        )
        numbers = calibration(found, A, V, c.gamma, c.reward_scale)
        metrics |= {f"multiturn/archer/{name}/mean": value for name, value in numbers.items()}
        metrics |= run_metrics.of_turns(rows.turns(), A)
        for (_, record, _), value in zip(rows.places, V.tolist(), strict=True):
            record["value"] = value
        return A, V

    def _in_silico_advantages(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Likewise for in-silico rows; the rollout is recorded as not trained on."""
        rows, fresh = self._rows(self._rolled_out), self.in_silico
        assert fresh is not None
        metrics |= run_metrics.of_sessions(list(rows.sessions().values()))
        self._train_critic(metrics)
        self._judge_turns(rows, metrics)
        self._audit(rows, batch, metrics)
        A, V = self.utterance_critic("judge", fresh.states, fresh.actions)
        credit = scaled(A, self.archer.normalize, [len(one.ids) for one in fresh.samples], self.archer.clip)
        number = dict(zip(fresh.keys, zip(credit.tolist(), (A + V).tolist(), strict=True), strict=True))
        batch = self._put_numbers(batch, number, metrics)
        self.writer.trajectories("train", self.global_steps, self._record(rows, "train", trained=False))
        self._clear(self._rolled_out.keys, batch.partition_id)
        return batch

    def _put_numbers(
        self, batch: Any, number: dict[str, tuple[float, float]], metrics: dict[str, Any]
    ) -> Any:
        """An advantage and a return for all tokens of each row; 0 in padding."""
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"]
        )
        masks = data["response_mask"].unbind()
        columns = [
            [mask * number.get(key, (0.0, 0.0))[k] for key, mask in zip(batch.keys, masks, strict=True)]
            for k in range(2)
        ]
        nested = (torch.nested.as_nested_tensor(rows, layout=torch.jagged) for rows in columns)
        return self._put_credit(batch, metrics, *nested)
