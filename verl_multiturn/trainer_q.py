"""What multiturn.algorithm=q_advantage adds to a training step: fresh answers, and a Q model's judgement.

A mixin of `MultiTurnMixin`. After the rollout of a step, while the servers are awake, the current policy is
asked for more answers to the prompt of each turn; where verl computes advantages, the Q model scores what was
said and what else would have been, in the trainer's process. None of these answers is carried out.
"""

import time
from collections import defaultdict
from typing import Any

import numpy as np
import transfer_queue as tq

from verl_multiturn import metrics as run_metrics
from verl_multiturn.algorithms.archer import scaled
from verl_multiturn.columns import Floats
from verl_multiturn.compose import plain
from verl_multiturn.errors import RunStopped
from verl_multiturn.rollout.rows import Rows
from verl_multiturn.search.credit import QAdvantageConfig, credit
from verl_multiturn.search.q_model import load_q_model
from verl_multiturn.search.recorded import steps_of
from verl_multiturn.search.step_value import ModelValue, Values
from verl_multiturn.turns import TurnBatch

NAME = "q_advantage"


class QSteps:
    """Attributes and methods of the trainer that it is mixed into are declared here, for the reader."""

    settings: Any
    _rows: Any
    _put: Any
    _ask: Any
    _decode: Any
    asked_tokens: int

    q_settings: QAdvantageConfig
    q_value: ModelValue
    beside: dict[tuple[str, int], list[str]]  # of this step: session, turn -> fresh answers

    def _load_checkpoint(self) -> None:
        """verl's; then the Q model, which training does not change."""
        super()._load_checkpoint()  # type: ignore[misc]
        if self.settings.algorithm != NAME:
            return
        try:
            self.q_settings = QAdvantageConfig.of(plain(self.settings.q_advantage))
            score = load_q_model(str(self.q_settings.q_model))
        except (ValueError, ImportError) as error:
            raise RunStopped(str(error)) from None
        self.q_value = ModelValue(score, self.q_settings.baseline)

    # ------------------------------------------------------------------ after the rollout

    def _listen(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Ask the policy for other answers to what it read; the batch is the rollout's."""
        batch = super()._listen(batch, metrics)  # type: ignore[misc]
        if self.settings.algorithm != NAME:
            return batch
        started, rows, self.asked_tokens = time.perf_counter(), self._rows(batch), 0
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["prompts", "responses"]
        )
        prompts, responses = (
            [row.tolist() for row in data[name].unbind()] for name in ("prompts", "responses")
        )
        places = {
            (rows.keys[row].rsplit("_", 1)[0], record["index"]): (row, record["span"][0])
            for row, record, _ in rows.places
        }
        order = sorted(places)  # rows stand in the order of completion
        read = [[*prompts[row], *responses[row][:start]] for row, start in map(places.__getitem__, order)]
        said = self._ask(NAME, read, self.q_settings.candidates, self.q_settings.max_inflight)
        heard = [[self._decode(one.ids) for one in some] for some in said]
        self.beside = dict(zip(order, heard, strict=True))
        numbers = {"asked_tokens": float(self.asked_tokens), "ask_seconds": time.perf_counter() - started}
        metrics |= {f"multiturn/{NAME}/{name}/mean": value for name, value in numbers.items()}
        return batch

    # ------------------------------------------------------------------ credit

    def _q_advantages(self, rows: Rows, batch: Any, metrics: dict[str, Any]) -> Any:
        """The Q model's credit of the step's turns, spread over the utterances."""
        started = time.perf_counter()
        turns, values = rows.turns(), self._q_values(rows)
        A = credit(turns, values, self.q_settings)
        seconds = time.perf_counter() - started
        tokens = [record["span"][1] - record["span"][0] for _, record, _ in rows.places]
        per_turn = scaled(A, self.q_settings.normalize, tokens, self.q_settings.clip)
        numbers = {"score_seconds": seconds, "std": float(A.std()), "agreement": agreement(turns, A)}
        metrics |= {f"multiturn/{NAME}/{name}/mean": value for name, value in numbers.items()}
        metrics |= run_metrics.of_turns(turns, per_turn)
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"]
        )
        advantages, returns = (rows.spread(x, data["response_mask"]) for x in (per_turn, values.Q))
        return self._put(batch, advantages=advantages, returns=returns)

    def _q_values(self, rows: Rows) -> Values:
        """Q and V by place; the fresh answers are kept in the turns' records, and V if it is of returns."""
        sessions: dict[str, list[int]] = defaultdict(list)
        for place, (row, record, _) in enumerate(rows.places):
            session = rows.keys[row].rsplit("_", 1)[0]
            record["others"] = self.beside[session, record["index"]]
            sessions[session].append(place)
        places, records = [], []
        for session, unordered in sorted(sessions.items()):
            some = sorted(unordered, key=lambda place: rows.places[place][1]["index"])
            group, sample = session.rsplit("_", 1)
            whole = rows.places[some[0]][2] | {"group": group, "trajectory": int(sample)}
            records.append(whole | {"turns": [rows.places[place][1] for place in some]})
            places += some
        found = self.q_value.values(steps_of(records, plain(self.settings)))
        Q, V = np.zeros(len(places)), np.zeros(len(places))
        Q[places], V[places] = found
        if self.q_settings.credit == "shaping":  # else `rescore` would take it for a value of returns
            for (_, record, _), value in zip(rows.places, V.tolist(), strict=True):
                record["value"] = value
        return Values(Q, V)


def agreement(turns: TurnBatch, A: Floats) -> float:
    """Pearson's correlation of a trajectory's summed credit with its return; 0 where one does not vary.

    It falls where the policy has learnt what the Q model likes and the task does not pay.
    """
    sums = np.bincount(turns.trajectory_code, weights=A)
    returns = np.bincount(turns.trajectory_code, weights=turns.reward)
    if sums.std() < 1e-12 or returns.std() < 1e-12:
        return 0.0
    return float(np.corrcoef(sums, returns)[0, 1])
