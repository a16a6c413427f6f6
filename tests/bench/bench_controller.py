"""What the trainer itself does in a step: verl's batch -> turns -> advantages -> tokens -> records -> file.

    PYTHONPATH=. python tests/bench/bench_controller.py [ROWS ...]

Turn rows of `bench_advantages`' batch (600 characters of observation, 64 and 16 tokens a row), GiGPO; CPU
seconds of this process by part, threads included, without TransferQueue's transfers.
"""

import sys
import tempfile
import time

import torch
from bench_advantages import GAMMA, fresh

import verl_multiturn as vm
from verl_multiturn.rollout.rows import Rows, to_records
from verl_multiturn.runs import RunWriter

PROMPT, RESPONSE = list(range(64)), list(range(16))
PARTS = ("rows", "turns", "advantages", "tokens", "records", "file")


def batch(rows, seed=0):
    """Keys, tags and extra_fields, as TransferQueue hands them over; one row a turn."""
    columns, keys, fields = fresh(rows, seed), [], []
    for group, name, index, reward, anchor in zip(*columns.values(), strict=True):
        sample = int(name.rpartition("-")[2]) % 8
        keys.append(f"{group}_{sample}_{index}")
        record = {
            "index": index, "span": [0, len(RESPONSE)], "glue": 0, "anchor": anchor, "reward": reward,
            "penalty": 0.0, "value": float("nan"), "valid": True, "text": "go to 3", "observation": anchor,
            "prompt": anchor, "actions": ["go to 3"], "dropped_turns": 0, "dropped_actions": 0,
            "generate_seconds": 0.1, "env_seconds": 0.01,
        }  # fmt: skip
        shared = {"return": 10.0, "penalty": 0.0, "success": True, "terminated": True, "truncated": False,
                  "task_type": "a"}  # fmt: skip
        fields.append({"turns": [record], "trajectory": shared, "origin": [group, sample]})
    return keys, [{}] * rows, fields


def measure(size, seed=0):
    """{part: CPU seconds} for so many rows, and the sum of them as "all"."""
    given = batch(size, seed)
    mask = torch.nested.as_nested_tensor([torch.ones(len(RESPONSE))] * size, layout=torch.jagged)
    marks = [time.process_time()]

    def done(value):
        marks.append(time.process_time())
        return value

    with tempfile.TemporaryDirectory() as folder:
        rows = done(Rows.read(*given))
        turns = done(rows.turns())
        per_turn = done(vm.advantages("gigpo", turns, gamma=GAMMA, by_std=False))
        tokens = done([one.tolist() for one in rows.spread(per_turn, mask).unbind()])
        columns = [PROMPT] * size, [RESPONSE] * size, [[-0.5] * len(RESPONSE)] * size
        records = done(to_records(rows, *columns, tokens, "train", 1))
        with RunWriter(folder) as writer:
            writer.trajectories("train", 1, records)
        done(None)
    assert sum(len(one["turns"]) for one in records) == size
    spent = {name: after - before for name, before, after in zip(PARTS, marks, marks[1:], strict=False)}
    return spent | {"all": sum(spent.values())}


def main():
    sizes = [int(word) for word in sys.argv[1:]] or [1_000, 10_000, 100_000]
    print(f"{'rows':>8}", *(f"{name:>10}" for name in (*PARTS, "all")))
    for size in sizes:
        print(f"{size:>8}", *(f"{seconds:>9.3f}s" for seconds in measure(size).values()), flush=True)


if __name__ == "__main__":
    main()
