"""Cost of recording one step: PYTHONPATH=. python tests/bench/bench_recording.py [folder]."""

import random
import sys
import tempfile
import time
from pathlib import Path

import orjson

from verl_multiturn.runs import RunWriter

SIZES = [(64, 8, 40), (128, 50, 600)]  # trajectories, turns, prompt tokens a turn
ACTION_TOKENS = 20


def turn(index, prompt_tokens, rng):
    prompt = [rng.randrange(150_000) for _ in range(prompt_tokens)]
    return {
        "index": index, "observation": " ".join(map(str, prompt)), "prompt_ids": prompt,
        "prompt": " ".join(map(str, prompt)), "action_ids": prompt[:ACTION_TOKENS],
        "log_probs": [-rng.random() for _ in range(ACTION_TOKENS)], "text": "<act>right</act>",
        "actions": ["right"], "valid": True, "reward": 0.0, "anchor": f"{rng.getrandbits(128):x}",
        "value": None, "advantage": 0.5, "row": index, "span": [0, ACTION_TOKENS],
        "generate_seconds": 0.5, "env_seconds": 0.001,
    }  # fmt: skip


def measure(folder, trajectories, turns, prompt_tokens, steps=5):
    rng = random.Random(0)
    rows = [
        {"group": f"g{n // 8}", "trajectory": n % 8, "return": 1.0,
         "turns": [turn(t, prompt_tokens, rng) for t in range(turns)]}
        for n in range(trajectories)
    ]  # fmt: skip
    size = sum(len(orjson.dumps(row)) for row in rows) / 1e6
    with RunWriter(folder) as writer:
        calling, whole = [], []
        for step in range(steps):
            start = time.perf_counter()
            writer.trajectories("train", step, rows)
            writer.metrics(step, {f"metric/{n}": 0.5 for n in range(100)})
            calling.append(time.perf_counter() - start)
            # A trainer is busy elsewhere meanwhile; the bench waits, to time one step alone.
            while not (Path(folder) / f"trajectories/train/{step}.jsonl.zst").exists():
                time.sleep(0.0005)
            whole.append(time.perf_counter() - start)
    packed = (Path(folder) / "trajectories/train/0.jsonl.zst").stat().st_size / 1e6
    middle = sorted(whole)[steps // 2]
    print(
        f"{trajectories} x {turns} turns x {prompt_tokens} tokens: "
        f"{1e3 * sorted(calling)[steps // 2]:.2f} ms on the calling thread; background "
        f"{1e3 * middle:.0f} ms = {size / middle:.0f} MB/s; {size:.1f} MB -> {packed:.1f} MB a step"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as root:
        for size in SIZES:
            measure(f"{root}/{size[0]}", *size)
