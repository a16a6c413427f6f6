"""Trajectory -> verl rows, and back: verl rows -> TurnBatch, advantages -> tokens, recorded trajectories.

A row is one training sequence: a turn, or a whole trajectory. Per-turn data travels as plain records
with spans in `extra_fields`, never as per-token tensors: verl pads its batch with clones of row 0.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from verl_multiturn.errors import RunStopped
from verl_multiturn.filtering import Member
from verl_multiturn.rewards import Normalize, per_turn, trained_reward
from verl_multiturn.steps import by_step
from verl_multiturn.turns import Trajectory, TurnBatch

SIMILARITY = "anchor_text"
ORIGIN = "origin"  # of a row: [group, sample], which its key must name too


def to_outputs(
    trajectory: Trajectory, layout: str, pad_id: int = 0, keep_text: bool = False, penalty: float = 0.0
) -> list[AgentLoopOutput]:
    """Make the rows of a trajectory.

    Every row carries the episode's return less penalties as its score (verl copies the last row's score
    onto all of them), the records of its turns, and the weight versions it was sampled with.

    Args:
        trajectory: what `Episode.play` returned.
        layout: "turn" (a row per turn) or "trajectory" (one row).
        pad_id: the one untrained token of a row whose utterance is empty, since verl needs one.
        keep_text: also carry the observations as anchor text, for similarity grouping.
        penalty: what an invalid turn costs in training.
    """
    details = trajectory.info["details"]
    lost = penalty * sum(not turn.valid for turn in trajectory.turns)
    versions = [
        version
        for detail in details
        for name in ("min_global_steps", "max_global_steps")
        if (version := detail["extra"].get(name)) is not None
    ]
    shared = {
        "min_global_steps": min(versions, default=0),
        "max_global_steps": max(versions, default=0),
        "reward_extra_info": scores(trajectory),
        "trajectory": {
            **{name: value for name, value in trajectory.info.items() if name != "details"},
            "return": trajectory.episode_return,
            "penalty": lost,
            "success": trajectory.success,
            "terminated": trajectory.terminated,
            "truncated": trajectory.truncated,
        },
    }
    rows = [[t] for t in range(len(details))] if layout == "turn" else [list(range(len(details)))]
    outputs = []
    for row in rows:
        prompt_ids, response_ids, mask, log_probs, records = _lay_out(trajectory, row, keep_text, penalty)
        if not response_ids:
            response_ids, mask, log_probs = [pad_id], [0], None if log_probs is None else [0.0]
        seconds = AgentLoopMetrics(
            generate_sequences=sum(details[t]["generate_seconds"] for t in row),
            tool_calls=sum(details[t]["env_seconds"] for t in row),
        )
        outputs.append(
            AgentLoopOutput(
                prompt_ids=prompt_ids,
                response_ids=response_ids,
                response_mask=mask,
                response_logprobs=log_probs,
                reward_score=trajectory.episode_return - lost,
                num_turns=len(details),
                metrics=seconds,
                extra_fields={**shared, "turns": records, ORIGIN: [trajectory.group, trajectory.trajectory]},
            )
        )
    return outputs


def scores(trajectory: Trajectory) -> dict[str, float]:
    """What verl reports of a validation episode under `val-aux`.

    1 − valid is the sum of three shares of turns: those without a closed thought (1 − valid_think, left out
    where none is asked for), those that lack the action only (missing_action), and those with one that the
    environment does not know (unknown_action).
    """
    turns = trajectory.turns
    told = list(zip(turns, trajectory.info["details"], strict=True))
    thinks = [detail["thinks"] for _, detail in told]
    found = {
        "success": float(bool(trajectory.success)),
        "return": trajectory.episode_return,
        "turns": float(len(turns)),
        "valid": float(np.mean([turn.valid for turn in turns])),
        "missing_action": float(np.mean([d["thinks"] is not False and not d["actions"] for _, d in told])),
        "unknown_action": float(np.mean([bool(d["actions"]) and not turn.valid for turn, d in told])),
        "truncated": float(trajectory.truncated),
    }
    return found if None in thinks else found | {"valid_think": float(np.mean(thinks))}


def _lay_out(
    trajectory: Trajectory, row: list[int], keep_text: bool, penalty: float
) -> tuple[list[int], list[int], list[int], list[float] | None, list[dict[str, Any]]]:
    """Tokens, mask and turn records of one row; the mask is 1 exactly on the sampled ids."""
    prompt_ids = trajectory.turns[row[0]].prompt_ids
    response: list[int] = []
    mask: list[int] = []
    log_probs: list[float] | None = []
    records = []
    for t in row:
        turn, detail = trajectory.turns[t], trajectory.info["details"][t]
        glue = [] if t == row[0] else turn.prompt_ids
        start = len(response) + len(glue)
        response += glue + turn.action_ids
        mask += [0] * len(glue) + [1] * len(turn.action_ids)
        if log_probs is not None and turn.log_probs is not None:
            log_probs += [0.0] * len(glue) + turn.log_probs
        else:
            log_probs = None
        record = {
            "index": t,
            "span": [start, len(response)],
            "glue": len(glue),
            "anchor": turn.anchor,
            "reward": turn.reward,
            "penalty": 0.0 if turn.valid else penalty,
            "value": turn.value,
            "valid": turn.valid,
            "text": turn.action_text,
            **{name: detail[name] for name in ("observation", "prompt", "actions")},
            **{name: detail[name] for name in ("dropped_turns", "dropped_actions")},
            **{name: detail[name] for name in ("generate_seconds", "env_seconds")},
        }
        record |= {name: detail[name] for name in ("steps", "cut") if name in detail}
        if keep_text:
            record[SIMILARITY] = detail["observation"]
        records.append(record)
    return prompt_ids, response, mask, log_probs, records


@dataclass
class Rows:
    """The real rows of a verl batch (padding left out) and where each of their turns stands."""

    keys: list[str]  # of all rows of the batch, padding included
    real: list[int]  # positions in `keys` that are not padding
    fields: list[dict[str, Any]]  # extra_fields of the real rows

    @classmethod
    def read(cls, keys: Sequence[str], tags: Sequence[dict[str, Any]], extra_fields: Sequence[Any]) -> "Rows":
        """From a batch's keys, tags and fetched `extra_fields`, all over the same rows.

        Raises:
            RunStopped: a row stands twice, is missing, or carries another trajectory than its key names:
                credit would be given to the wrong tokens.
        """
        if not len(keys) == len(tags) == len(extra_fields) or len(set(keys)) < len(keys):
            raise RunStopped(
                f"the batch has {len(keys)} keys ({len(set(keys))} of them distinct), {len(tags)} tags and "
                f"{len(extra_fields)} rows: TransferQueue lost or doubled some; nothing was trained on it"
            )
        real = [i for i, tag in enumerate(tags) if not tag.get("is_padding", False)]
        plain = [getattr(extra, "data", extra) for extra in extra_fields]
        for i in real:
            if (origin := plain[i].get(ORIGIN)) and "_".join(map(str, origin)) != keys[i].rpartition("_")[0]:
                raise RunStopped(
                    f"row {keys[i]} carries the trajectory {origin[1]} of group {origin[0]}: TransferQueue "
                    "gave the rows in another order than their keys; nothing was trained on it"
                )
        return cls(list(keys), real, [plain[i] for i in real])

    def turns(self, values: Sequence[Sequence[float]] | None = None) -> TurnBatch:
        """The batch an algorithm reads, one entry per turn, in the order of `places`.

        Args:
            values: per row of the batch, V before each response token; None leaves the recorded values.
                verl has none behind the last token: after a truncated episode V counts as 0, as in
                verl's own GAE, since the limit that cut it is part of the task.
        """
        columns: dict[str, list[Any]] = defaultdict(list)
        last = {}
        for n, (row, record, trajectory) in enumerate(self.places):
            uid, sample, _ = self.keys[row].rsplit("_", 2)
            columns["group"].append(uid)
            columns["trajectory"].append(int(sample))
            columns["reward"].append(trained_reward(record))
            for name in ("index", "anchor", "valid"):
                columns[name].append(record[name])
            start, stop = record["span"]
            columns["tokens"].append(stop - start)
            # An empty utterance at the end of a row stands behind the last value.
            value = record["value"] if values is None else values[row][min(start, len(values[row]) - 1)]
            columns["value"].append(float(value))
            if SIMILARITY in record:
                columns[SIMILARITY].append(record[SIMILARITY])
            if record["index"] >= last.get((uid, sample), (-1,))[0]:
                last[uid, sample] = (record["index"], n, trajectory)
        ends = {n: trajectory for _, n, trajectory in last.values()}
        size = len(columns["index"])
        cut = [n in ends and ends[n]["truncated"] for n in range(size)]
        return TurnBatch.from_lists(
            **columns,
            next_value=None if values is None else [0.0 if one else np.nan for one in cut],
            terminated=[n in ends and ends[n]["terminated"] for n in range(size)],
            truncated=cut,
        )

    @cached_property
    def places(self) -> list[tuple[int, dict[str, Any], dict[str, Any]]]:
        """(row of the batch, turn record, trajectory record) of every turn."""
        return [
            (row, record, fields["trajectory"])
            for row, fields in zip(self.real, self.fields, strict=True)
            for record in fields["turns"]
        ]

    def by_step(self) -> "Rows":
        """The same rows with a record per step where utterances were cut into steps (`steps.by_step`)."""
        if not any("steps" in record for _, record, _ in self.places):
            return self
        sizes: dict[str, dict[int, int]] = defaultdict(dict)  # of a session: turn -> steps
        for row, record, _ in self.places:
            sizes[self._session(row)][record["index"]] = len(by_step(record))

        def first(row: int, turn: dict[str, Any]) -> int:
            return sum(n for t, n in sizes[self._session(row)].items() if t < turn["index"])

        fields = [
            one
            | {
                "turns": [
                    part | {"index": first(row, turn) + i}
                    for turn in one["turns"]
                    for i, part in enumerate(by_step(turn))
                ]
            }
            for row, one in zip(self.real, self.fields, strict=True)
        ]
        return Rows(self.keys, self.real, fields)

    def _session(self, row: int) -> str:
        return self.keys[row].rsplit("_", 1)[0]

    def starts(self) -> dict[str, set[str]]:
        """The first observations of each group's trajectories, by uid: one, unless something is wrong."""
        found: dict[str, set[str]] = defaultdict(set)
        for row, record, _ in self.places:
            if record["index"] == 0:
                found[self.keys[row].rsplit("_", 2)[0]].add(record["observation"])
        return dict(found)

    def spread(self, per_turn: np.ndarray, mask: torch.Tensor) -> torch.Tensor:
        """Give each token of an utterance its turn's number; 0 on all other tokens and on padding.

        Args:
            per_turn: (N,) one number per turn, in the order of `places`.
            mask: nested (B, response) response mask of the whole batch.

        Returns:
            Nested (B, response), float32.
        """
        rows = [torch.zeros(int(length)) for length in mask.offsets().diff()]
        for number, (row, record, _) in zip(per_turn.tolist(), self.places, strict=True):
            start, stop = record["span"]
            rows[row][start:stop] = number
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def at_ends(self, per_turn: np.ndarray, mask: torch.Tensor) -> torch.Tensor:
        """Give the last token of each utterance its turn's number, as verl places scores; 0 elsewhere.

        Args:
            per_turn: (N,) one number per turn, in the order of `places`.
            mask: nested (B, response) response mask of the whole batch.
        """
        rows = [torch.zeros(int(length)) for length in mask.offsets().diff()]
        for number, (row, record, _) in zip(per_turn.tolist(), self.places, strict=True):
            rows[row][max(0, record["span"][1] - 1)] += number
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    def rewards(self, normalize: Normalize, at_turns: bool) -> np.ndarray:
        """(N,) the rewards that token-level estimators see; see `verl_multiturn.rewards.per_turn`."""
        names, keys = [], {}
        for row, _, trajectory in self.places:
            group, session = self.keys[row].rsplit("_", 2)[0], self.keys[row].rsplit("_", 1)[0]
            names.append(session)
            keys[session] = {"group": group, "type": trajectory["task_type"], "batch": 0}.get(
                normalize.by or "batch"
            )
        records = [record for _, record, _ in self.places]
        return per_turn(
            names,
            [one["index"] for one in records],
            [trained_reward(one) for one in records],
            keys,
            normalize,
            at_turns,
        )

    def members(self, log_probs: Sequence[Sequence[float]] | None = None) -> dict[str, list[Member]]:
        """The trajectories of each group, by uid, in the order of their rows.

        Args:
            log_probs: of the sampled tokens, per row of the batch; None: `surprise` is 0.
        """
        spoken: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # tokens, −Σ log p
        for row, record, _ in self.places:
            start, stop = record["span"]
            counts = spoken[self.keys[row].rsplit("_", 1)[0]]
            counts[0] += stop - start
            if log_probs is not None:
                counts[1] -= sum(log_probs[row][start:stop])
        groups: dict[str, list[Member]] = defaultdict(list)
        for session, trajectory in self.sessions().items():
            tokens, surprise = spoken[session]
            task = float(trajectory["return"])
            member = Member(
                task, task - trajectory.get("penalty", 0.0), surprise / max(1.0, tokens), int(tokens)
            )
            groups[session.rsplit("_", 1)[0]].append(member)
        return dict(groups)

    def sessions(self) -> dict[str, dict[str, Any]]:
        """One trajectory record per session, by `uid_session`."""
        return {
            self.keys[row].rsplit("_", 1)[0]: fields["trajectory"] | {"scores": fields["reward_extra_info"]}
            for row, fields in zip(self.real, self.fields, strict=True)
        }


def to_records(
    rows: Rows,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]] | None,
    advantages: Sequence[Sequence[float]] | None,
    split: str,
    step: int,
    trained: bool = True,
) -> list[dict[str, Any]]:
    """Recorded trajectories (schema in `verl_multiturn.runs`), from the fetched columns of a batch."""
    trajectories: dict[str, dict[str, Any]] = {}
    for row, record, trajectory in sorted(rows.places, key=lambda p: (_session(rows, p[0]), p[1]["index"])):
        uid, sample, number = rows.keys[row].rsplit("_", 2)
        whole = trajectories.setdefault(
            f"{uid}_{sample}",
            {
                "split": split,
                "step": step,
                "group": uid,
                "trajectory": int(sample),
                **trajectory,
                "trained": trained and split == "train",
                "turns": [],
            },
        )
        start, stop = record["span"]
        new = list(prompts[row]) if start == 0 else list(responses[row][start - record["glue"] : start])
        kept = {name: value for name, value in record.items() if name not in ("glue", SIMILARITY)}
        credit = None if advantages is None else advantages[row]
        if steps := record.get("steps"):
            record = record | {"value": steps[0]["value"]}
            kept["steps"] = [_credit(step, step["span"], start, credit) for step in steps]
        whole["turns"].append(
            {
                **kept,
                "prompt_ids": new,
                "action_ids": list(responses[row][start:stop]),
                "log_probs": None if log_probs is None else list(log_probs[row][start:stop]),
                "row": int(number),
                **_credit(record, record["span"], 0, credit),
            }
        )
    return list(trajectories.values())


def _session(rows: Rows, row: int) -> tuple[str, int]:
    uid, sample, _ = rows.keys[row].rsplit("_", 2)
    return uid, int(sample)


def _credit(
    record: dict[str, Any], span: list[int], offset: int, credit: Sequence[float] | None
) -> dict[str, Any]:
    """Span, value and advantage of a turn or a step, as they are recorded."""
    start, stop = span
    return {
        "span": span,
        "value": None if np.isnan(record["value"]) else record["value"],
        "advantage": None if credit is None or stop == start else float(credit[offset + start]),
    }
