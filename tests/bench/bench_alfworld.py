"""ALFWorld's engine with caches against stock: the same text, how much faster, what a snapshot costs.

    python tests/bench/bench_alfworld.py [--games 30] [--steps 28] [--out results/bench/alfworld.json]

Small and full scenes, the same random and invalid commands in both engines, CPU seconds of one process.
Cold: the first time a game is seen on a machine; warm: its translation is in the cache.
"""

import argparse
import json
import os
import pickle
import random
import tempfile
import time
from pathlib import Path
from statistics import median

from environments.alfworld_parts.games import Request, write_games


def play(engine, games: list[Path], steps: int) -> tuple[list, dict[str, list[float]]]:
    """Everything that the engine said, and the seconds of each kind of call."""
    said, seconds = [], {"load": [], "reset": [], "step": []}

    def timed(kind, call, *args):
        start = time.process_time()
        result = call(*args)
        seconds[kind].append(time.process_time() - start)
        return result

    for number, game in enumerate(games):
        rng = random.Random(number)
        timed("load", engine.load, str(game))
        state = timed("reset", engine.reset)
        said.append((state.feedback, tuple(state["admissible_commands"])))
        for turn in range(steps):
            command = "dance" if turn % 6 == 5 else rng.choice(state["admissible_commands"])
            state, reward, done = timed("step", engine.step, command)
            said.append((state.feedback, tuple(state["admissible_commands"]), reward, done))
            if done:
                break
    return said, seconds


def restores(engine, games: list[Path], steps: int) -> dict[str, float]:
    """A snapshot after `steps` commands: its bytes and the time to restore it; the same state is asserted."""
    sizes, seconds = [], []
    for number, game in enumerate(games):
        rng = random.Random(number)
        engine.load(str(game))
        state = engine.reset()
        for _ in range(steps):
            if not (state := engine.step(rng.choice(state["admissible_commands"]))[0])["done"]:
                continue
            break
        snapshot, before = engine.unwrapped.snapshot(), state
        start = time.process_time()
        after = engine.unwrapped.restore(snapshot)
        seconds.append(time.process_time() - start)
        sizes.append(len(pickle.dumps(snapshot)))
        assert after.feedback == before.feedback
        assert after["admissible_commands"] == before["admissible_commands"]
        assert set(map(str, after["_facts"])) == set(map(str, before["_facts"]))
    return {"snapshot_bytes": median(sizes), "restore_ms": 1e3 * median(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--games", type=int, default=30)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    report = {"games": given.games, "steps": given.steps}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["VERL_MULTITURN_CACHE"] = f"{scratch}/cache"  # cold at first
        from environments.alfworld_parts.engine import new_engine, stock_engine

        for name, limits in (("small", {"receptacles": 8, "objects": 10}), ("full", {})):
            folder = Path(scratch) / name
            write_games(folder, Request({"train": given.games}, seed=7, **limits), quiet=True)
            games = sorted(folder.rglob("game.tw-pddl"))
            stock_said, stock = play(stock_engine(), games, given.steps)
            cold_said, cold = play(new_engine(), games, given.steps)
            warm_said, warm = play(new_engine(), games, given.steps)
            assert cold_said == stock_said and warm_said == stock_said, "the text differs"
            row = {"identical": len(stock_said)}
            for kind in stock:
                times = [1e3 * median(seconds[kind]) for seconds in (stock, cold, warm)]
                row[f"{kind}_ms"] = dict(zip(("stock", "cold", "warm"), times, strict=True))
                row[f"{kind}_ratio"] = round(times[0] / times[2], 1)
            row["steps_per_second"] = {
                k: round(len(s["step"]) / sum(s["step"])) for k, s in (("stock", stock), ("warm", warm))
            }
            report[name] = row | restores(new_engine(), games, given.steps)
    text = json.dumps(report, indent=1)
    if given.out:
        given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
