"""Sokoban's steps and resets a second, next to gym_sokoban wrapped so that it gives the same text.

    PYTHONPATH=. python tests/bench/bench_sokoban.py --gym gym/bin/python [--rounds 2] [--json FILE]

`--gym` is an interpreter that has gym_sokoban, in an environment of its own (it pulls gym 0.26, no longer
maintained, and needs a setuptools that still has pkg_resources):

    python -m venv gym && gym/bin/pip install gym-sokoban "setuptools<80"

Both play the same rooms with the same random actions; text, reward and end of every step are compared.
Resets are of each one's own generator, at the same size and number of boxes. gym_sokoban draws a picture
at every step, which a wrapper for text throws away: "rgb_array" is what its `step` does by itself (as in
RAGEN's wrapper, arXiv 2504.20073), "tiny_rgb_array" the smallest that it can draw. Seconds of CPU of one
process; rounds are interleaved, the table shows each one's best round.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"6x6, 1 box": {"size": 6, "boxes": 1}, "8x8, 2 boxes": {"size": 8, "boxes": 2}}
TURNS = 15
MODES = ("rgb_array", "tiny_rgb_array")
CODES = {"#": (0, 0), "_": (1, 1), "O": (2, 2), "√": (2, 3), "X": (1, 4), "P": (1, 5), "S": (2, 5)}


def ours(kwargs, coordinates, count, first):
    """Times of `count` rooms, and for each its first text, actions, and what each step gave."""
    from verl_multiturn.env import make

    env = make("sokoban", max_turns=TURNS, min_solution=1, coordinates=coordinates, **kwargs)
    names, rng, played = env.admissible(), random.Random(first), []
    seconds, steps = {"reset": 0.0, "step": 0.0}, 0
    for seed in range(first, first + count):
        actions, given = rng.choices(range(4), k=TURNS), []
        start = time.process_time()
        text, _ = env.reset(seed)
        between = time.process_time()
        for action in actions:
            result = env.step(names[action])
            given.append(result[:3])
            if result[2] or result[3]:
                break
        end = time.process_time()
        seconds["reset"] += between - start
        seconds["step"] += end - between
        steps += len(given)
        played.append((text, actions, given))
    return {"steps": steps / seconds["step"], "resets": count / seconds["reset"]}, played


def theirs(size, boxes, coordinates, mode, resets, played):
    """The same of gym_sokoban; runs in the other interpreter."""
    import numpy as np
    from gym_sokoban.envs.sokoban_env import SokobanEnv

    env = SokobanEnv(dim_room=(size, size), max_steps=TURNS, num_boxes=boxes, reset=False)

    def told(symbol, where):
        return [f"{symbol} {row} {column}" for row, column in np.argwhere(where).tolist()]

    def text():
        fixed, state = env.room_fixed, env.room_state
        room = np.where((state == 5) & (fixed == 2), 6, state).tolist()
        lines = ["".join(f" {'#_O√XPS'[cell]}" for cell in row) for row in room]
        if coordinates:
            on = (state == 3) | (state == 4)
            lines.append(" ".join(told("P", state == 5) + told("X", on) + told("O", fixed == 2)))
        return "\n".join(lines)

    start = time.process_time()
    for seed in range(resets):
        random.seed(seed)
        np.random.seed(seed)
        env.reset(render_mode=mode)
        text()
    reset = time.process_time() - start
    seconds = steps = 0
    for first, actions, given in played:
        codes = [[CODES[one] for one in line.split()] for line in first.split("\n")[:size]]
        env.room_fixed = np.array([[code[0] for code in row] for row in codes])
        env.room_state = np.array([[code[1] for code in row] for row in codes])
        env.player_position = np.argwhere(env.room_state == 5)[0]
        env.num_env_steps = env.reward_last = env.boxes_on_target = 0
        assert text() == first, (text(), first)
        said = []
        start = time.process_time()
        for action in actions:
            _, reward, done, _ = env.step(action + 1, observation_mode=mode)
            said.append((text(), reward))
            if done:
                break
        seconds += time.process_time() - start
        steps += len(said)
        assert [one[0] for one in said] == [one[0] for one in given], "the text differs"
        assert all(abs(one[1] - two[1]) < 1e-9 for one, two in zip(said, given, strict=True)), (said, given)
    return {"steps": steps / seconds, "resets": resets / reset}


def measure(gym, kwargs, coordinates, rounds, count):
    """The best of both over the rounds, and the ratios of each round."""
    rows = {"ours": [], **{mode: [] for mode in MODES}}
    for k in range(rounds):
        mine, played = ours(kwargs, coordinates, count, 100_000 * k)
        rows["ours"].append(mine)
        for mode in MODES:
            some = max(1, count // (40 if mode == "rgb_array" else 5))
            asked = [*kwargs.values(), coordinates, mode, max(1, some // 4), played[:some]]
            done = subprocess.run(
                [gym, "-W", "ignore", __file__, "--gym-side"],
                input=json.dumps(asked),
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                env={**os.environ, "PYTHONIOENCODING": "utf-8"},
            )
            rows[mode].append(json.loads(done.stdout.splitlines()[-1]))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gym", help="the Python that has gym_sokoban")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rooms", type=int, default=2000, help="rooms a round; fewer for gym_sokoban")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--gym-side", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.gym_side:
        print(json.dumps(theirs(*json.load(sys.stdin))))
        return
    if not given.gym:
        parser.error('needs --gym: python -m venv gym && gym/bin/pip install gym-sokoban "setuptools<80"')
    sys.path.insert(0, str(ROOT))
    report = {"python": platform.python_version(), "rounds": given.rounds, "rows": []}
    for room, kwargs in ROOMS.items():
        for coordinates in (False, True):
            rows = measure(given.gym, kwargs, coordinates, given.rounds, given.rooms)
            text = "grid, coordinates" if coordinates else "grid"
            row = {"room": room, "text": text, "load": os.getloadavg()[0], "per_second": rows, "ratio": {}}
            print(f"{room}, {text}")
            best = {who: {what: max(r[what] for r in runs) for what in runs[0]} for who, runs in rows.items()}
            print(
                f"  {'ours':15} {best['ours']['steps']:9.0f} steps/s {best['ours']['resets']:7.0f} resets/s"
            )
            for mode in MODES:
                row["ratio"][mode] = {
                    what: [
                        mine[what] / other[what] for mine, other in zip(rows["ours"], rows[mode], strict=True)
                    ]
                    for what in ("steps", "resets")
                }
                ratios = {
                    what: ", ".join(f"{r:.0f}" for r in values) for what, values in row["ratio"][mode].items()
                }
                print(
                    f"  {mode:15} {best[mode]['steps']:9.0f} steps/s {best[mode]['resets']:7.0f} resets/s; "
                    f"ours, round by round: {ratios['steps']} x and {ratios['resets']} x",
                    flush=True,
                )
            report["rows"].append(row)
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
