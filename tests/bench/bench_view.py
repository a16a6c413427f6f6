"""The page of a run of 10,000 trajectories: python tests/bench/bench_view.py [FOLDER] [--json FILE].

Episodes of FrozenLake by the random policy, and by the expert in a share that grows over the steps; values
are means of 3 continuations of the random policy from snapshots, token ids are the bytes of the texts.
Then: seconds to build the page, and in headless Chromium, a fresh one each time, first contentful paint and
the time until another step, another trajectory and a filter are drawn. `--shots FOLDER` takes pictures of two
places of that page and of a page of search trees (20 tasks, 60 iterations, candidates of the random policy).
"""

import argparse
import base64
import json
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from verl_multiturn import advantages
from verl_multiturn.env import derive_seed, make
from verl_multiturn.rollout.episode import anchor_of
from verl_multiturn.rollout.pool import reset, step
from verl_multiturn.runs import RunWriter, to_turns
from verl_multiturn.search.config import SearchConfig
from verl_multiturn.search.mcts import search
from verl_multiturn.view import build_view
from verl_multiturn.view_trees import build_trees

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe --window-size=1500,1000"
)
ENV, K, GROUP, GAMMA = "frozen_lake", 3, 8, 0.95


def continuations(env, state, seed):
    """Returns of `K` episodes of the random policy from a snapshot, to which it goes back."""
    found = []
    for k in range(K):
        env.restore(state, seed=derive_seed(seed, k))
        rng, G, done = random.Random(derive_seed("play", seed, k)), 0.0, False
        while not done:
            _, reward, terminated, truncated, _ = env.step(env.random_action(rng))
            G, done = G + reward, terminated or truncated
        found.append(G)
    env.restore(state)
    return found


def played(env, number, task, sample, skill, rng):
    """One episode as a record."""
    seen, turns, returns = reset(env, task, derive_seed(number, task, sample)), [], {}
    start = seen
    while not (seen.terminated or seen.truncated):
        t = len(turns)
        returns[str(t)] = continuations(env, env.snapshot(), derive_seed(number, task, sample, t))
        action = env.expert() if rng.random() < skill else env.random_action(rng)
        before, seen = seen, step(env, action)
        text = f"<answer>{action}</answer>"
        ids = list(text.encode())
        turns.append(
            {
                "index": t, "observation": before.observation, "prompt": before.observation,
                "prompt_ids": list(before.observation.encode()), "text": text, "action_ids": ids,
                "log_probs": [-0.01] * len(ids), "actions": [action], "valid": True, "reward": seen.reward,
                "anchor": anchor_of("state", before), "value": float(np.mean(returns[str(t)])),
                "advantage": None, "row": t, "span": [0, len(ids)],
            }
        )  # fmt: skip
    return {
        "split": "train", "step": number, "group": f"{number}-{task}", "trajectory": sample, "env": ENV,
        "task": task, "task_type": start.info["task_type"], "instruction": start.instruction,
        "return": sum(turn["reward"] for turn in turns), "success": seen.info["success"],
        "terminated": seen.terminated, "truncated": seen.truncated, "trained": True,
        "truncation": "environment" if seen.truncated else None, "turns": turns,
        "vine": {"states": len(turns), "rollouts": K * len(turns), "failed": 0, "returns": returns},
    }  # fmt: skip


def write_run(folder, trajectories, steps=40):
    """A run of so many trajectories; groups whose returns are equal are left out of training."""
    env, rng = make(ENV), random.Random(1)
    config = {"multiturn": {"algorithm": "vineppo", "env": ENV, "seed": 1, "gigpo": {"gamma": GAMMA}}}
    groups = trajectories // (steps * GROUP) + 1
    left = trajectories
    with RunWriter(folder, config) as writer:
        for number in range(1, steps + 1):
            rows = []
            for group in range(groups):
                task, size = 1000 * number + group, min(GROUP, left)
                rows += [played(env, number, task, k, number / steps, rng) for k in range(size)]
                left -= size
                for one in rows[len(rows) - size :]:
                    one["trained"] = len({row["return"] for row in rows[len(rows) - size :]}) > 1
            kept = [row for row in rows if row["trained"]]
            scored = iter(advantages("vineppo", to_turns(kept)).tolist())
            for turn in (turn for row in kept for turn in row["turns"]):
                turn["advantage"] = next(scored)
            writer.trajectories("train", number, rows)
            success = sum(row["success"] for row in rows) / len(rows)
            numbers = {
                "success": success,
                "trajectories": len(rows),
                "turns": np.mean([len(r["turns"]) for r in rows]),
            }
            writer.metrics(number, {f"multiturn/{name}/mean": float(x) for name, x in numbers.items()})


class Browser:
    """Chromium, driven through its debugging pipe."""

    def __init__(self, profile):
        (r, self.output), (self.input, w) = os.pipe(), os.pipe()
        browser = next(filter(None, map(shutil.which, NAMES)), None)
        if browser is None:
            raise SystemExit(f"needs a browser on PATH: {', '.join(NAMES)}")
        command = [browser, *FLAGS.split(), f"--user-data-dir={profile}", "about:blank"]
        wired = ["bash", "-c", f'exec "$@" 3<&{r} 4>&{w}', "bash", *command]
        self.process = subprocess.Popen(wired, pass_fds=(r, w), stderr=subprocess.DEVNULL)
        os.close(r), os.close(w)
        self.buffer, self.number, self.session = b"", 0, None
        page = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)[
            "sessionId"
        ]

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.output, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                self.buffer += os.read(self.input, 1 << 20)
            line, _, self.buffer = self.buffer.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self.number:
                return answer["result"]

    def value(self, expression):
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        return found["result"].get("value")

    def until(self, expression):
        while not (found := self.value(expression)):
            time.sleep(0.02)
        return found

    def close(self):
        self.call("Browser.close")
        self.process.wait()


PAINT = "(performance.getEntriesByName('first-contentful-paint')[0] || {}).startTime"
TIMED = """(async () => { const start = performance.now(); %s;
 await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
 return performance.now() - start; })()"""
ACTS = {
    "another step": "document.getElementById('earlier').click()",
    "another trajectory": "document.querySelectorAll('#rows button')[1].click()",
    "a filter": "{ const f = document.getElementById('success'); f.value = 'good';"
    " f.dispatchEvent(new Event('input')); }",
}


def once(page):
    """Milliseconds: first contentful paint from the start of the navigation, then of each act."""
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(profile)
        try:
            browser.call("Page.navigate", url=page.absolute().as_uri())
            found = {"first contentful paint": browser.until(PAINT)}
            browser.until("document.querySelectorAll('#rows button').length")
            found["trajectory shown"] = browser.value("performance.now()")
            return found | {name: browser.value(TIMED % act) for name, act in ACTS.items()}
        finally:
            browser.close()


def write_trees(file, tasks=20):
    """Search trees of FrozenLake."""
    env, config = make(ENV), SearchConfig(iterations=60, width=4, max_depth=8)
    with file.open("w") as lines:
        for task in range(tasks):
            observation, info = env.reset(task)
            tree = search(env, observation, random_moves, config=config, seed=task)
            about = {"task": task, "task_type": info["task_type"], "env": ENV, "success": tree.success}
            about |= {"proposals": tree.proposals, "env_steps": tree.env_steps, "stopped": tree.stopped}
            lines.write(json.dumps(about | {"root": tree.to_dict()}) + "\n")


def random_moves(observation, history, n, rng):
    return [rng.choice(["up", "down", "left", "right"]) for _ in range(n)]


def shots(page, folder):
    """Pictures of the credit of a trajectory, of its tokens, and of a search tree."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "lake_trees" / "trees.jsonl"
        file.parent.mkdir()
        write_trees(file)
        places = {
            "credit": f"{page.as_uri()}#split=train&step=25&turn=3&curves=1",
            "tokens": f"{page.as_uri()}#split=train&step=30&success=bad&tokens=1&turn=1&curves=0",
            "tree": f"{build_trees(file).path.as_uri()}#tree=1&node=1",
        }
        for name, url in places.items():
            browser = Browser(f"{temporary}/{name}")
            browser.call("Page.navigate", url=url)
            browser.until(
                "document.querySelectorAll('#rows button').length && document.readyState == 'complete'"
            )
            picture = browser.call("Page.captureScreenshot", format="png")["data"]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.png").write_bytes(base64.b64decode(picture))
            browser.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shots", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "run"
        if not (folder / "metrics.jsonl").exists():
            write_run(folder, given.trajectories)
        start = time.perf_counter()
        page = build_view(folder)
        built = time.perf_counter() - start
        rounds = [once(page.path) for _ in range(given.rounds)]
        if given.shots:
            shots(page.path.absolute(), given.shots)
    medians = {name: round(statistics.median(one[name] for one in rounds)) for name in rounds[0]}
    found = {
        "trajectories": page.trajectories, "MB": round(page.size / 1e6, 1), "tokens": page.tokens,
        "build s": round(built, 1), "load": round(os.getloadavg()[0], 1), "rounds": given.rounds,
        "median ms": medians, "worst ms": {name: round(max(one[name] for one in rounds)) for name in medians},
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
