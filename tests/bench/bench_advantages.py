"""How long GiGPO's advantages take, next to a straightforward row-by-row implementation.

    python tests/bench/bench_advantages.py [--rounds 3] [--json FILE]

Both get the same fresh lists (uids and 600-character anchors as new string objects, so that no
hash is cached) and both times include everything from the lists to the advantages. Rounds are
interleaved; the table shows minimum and median. `--no-naive` times ours alone.
"""

import argparse
import json
import platform
import random
import statistics
import time

import numpy as np

import verl_multiturn as vm

ROWS = (6_400, 25_600, 100_000)
PAIRED = (6_400, 25_600)  # the naive one is quadratic
GAMMA = 0.95


def fresh(rows, seed=0):
    """Columns of a batch: groups of 8 trajectories of 10-50 turns, 30 states a group."""
    rng = random.Random(seed)
    columns = {key: [] for key in ("group", "trajectory", "index", "reward", "anchor")}
    sample = 0
    while len(columns["group"]) < rows:
        turns = min(rng.randint(10, 50), rows - len(columns["group"]))
        won = rng.random() < 0.5
        for t in range(turns):
            state = f"You arrive at place {rng.randrange(30)}. On it, you see: "
            columns["group"].append("-".join(["uid", str(sample // 8), "3f2a9c"]))
            columns["trajectory"].append("-".join(["trajectory", str(sample)]))
            columns["index"].append(t)
            columns["reward"].append(10.0 if won and t == turns - 1 else 0.0)
            columns["anchor"].append((state + "a mug, " * 100)[:600])
        sample += 1
    order = rng.sample(range(rows), rows)  # balancing tokens over ranks loses the order
    return {key: [column[i] for i in order] for key, column in columns.items()}


def ours(columns):
    """Lists to advantages, as the trainer does it."""
    turns = vm.TurnBatch.from_lists(**columns)
    return vm.advantages("gigpo", turns, gamma=GAMMA, by_std=False)


def naive(columns):
    """Lists to advantages, one row at a time: np.where over the ids, then the formula."""
    uid, trajectory, anchor = (
        np.array(columns[key], dtype=object) for key in ("group", "trajectory", "anchor")
    )
    index, reward = np.array(columns["index"]), np.array(columns["reward"])
    n = len(uid)
    G, R, first = np.zeros(n), np.zeros(n), index == 0
    for i in range(n):
        own = np.where(trajectory == trajectory[i])[0]
        R[i] = reward[own].sum()
        after = own[index[own] >= index[i]]
        G[i] = (GAMMA ** (index[after] - index[i]) * reward[after]).sum()
    A = np.zeros(n)
    for i in range(n):
        group = np.where(uid == uid[i])[0]
        same = group[anchor[group] == anchor[i]]
        A[i] = R[i] - R[group[first[group]]].mean() + G[i] - G[same].mean()
    return A


def seconds(compute, columns):
    start = time.perf_counter()
    result = compute(columns)
    return time.perf_counter() - start, result


def measure(rows, rounds, with_naive):
    """Times of both, round by round, the data made anew (and outside the clock) each time."""
    times = {"ours": [], "naive": []}
    for k in range(rounds):
        took, A = seconds(ours, fresh(rows, seed=k))
        times["ours"].append(took)
        if with_naive:
            took, expected = seconds(naive, fresh(rows, seed=k))
            times["naive"].append(took)
            np.testing.assert_allclose(A, expected, atol=1e-9)
    return {name: {"min": min(t), "median": statistics.median(t)} for name, t in times.items() if t}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--no-naive", action="store_true", help="time ours alone")
    options = parser.parse_args()
    report = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "rounds": options.rounds,
        "rows": {},
    }
    print(f"{'rows':>8} {'ours min':>10} {'median':>10} {'naive min':>10} {'median':>10} {'ratio':>7}")
    for rows in ROWS:
        figures = measure(rows, options.rounds, rows in PAIRED and not options.no_naive)
        line = f"{rows:>8} {figures['ours']['min']:>9.3f}s {figures['ours']['median']:>9.3f}s"
        if "naive" in figures:
            figures["ratio"] = figures["naive"]["median"] / figures["ours"]["median"]
            line += f" {figures['naive']['min']:>9.2f}s {figures['naive']['median']:>9.2f}s"
            line += f" {figures['ratio']:>6.0f}x"
        print(line, flush=True)
        report["rows"][str(rows)] = figures
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
