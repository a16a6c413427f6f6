"""ArCHer's critic phase with and without the cache of fresh utterances, on a simulated LLM server.

    PYTHONPATH=. python tests/bench/bench_archer.py [--json FILE] [--phases 5] [--repeats 3] [--scale 1]

Real: games of Twenty Questions with ten words, transitions, replay, `ask`, `CriticActor` with its critic in
this process. Simulated: the server (simulated.py; --scale times its latency) and the policy, which says a
listed question at random. Beside other work wall time says little: the server's time is computed from its
steps, ours is CPU time. A phase is the critic's part of a training step: 128 new games, utterances at the
states that the next 50 updates of 256 transitions draw, the updates. All ways make the same draws:

every draw      one utterance for each drawn transition, as the paper's code does
once a policy   one for each drawn state: the policy has changed since the phase before
warm-up         likewise, and it has not: what it said before is kept (`multiturn/archer/cached_share`)
"""

import argparse
import asyncio
import copy
import json
import random
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from simulated import CAPACITY, PER_REQUEST, STEP, Server

from verl_multiturn.critic.actor import CriticActor
from verl_multiturn.critic.config import ArcherConfig, CriticConfig
from verl_multiturn.critic.replay import history, of_episode
from verl_multiturn.env import make
from verl_multiturn.measure import machine
from verl_multiturn.rollout.asking import Question, ask

NAMES = ("states", "asked", "server_seconds", "asking_seconds", "training_seconds", "seconds", "wall_seconds")
WAYS = ("every draw", "once a policy", "warm-up")
GAMES = 128  # of a training step
FILL = 4  # steps before the first phase; after it the replay is full


class Client:
    """verl's `LLMServerClient` as `ask` calls it; four bytes of an utterance are a token."""

    def __init__(self, questions, scale, seed):
        self.questions, self.scale, self.rng = questions, scale, random.Random(seed)
        self.asked, self.servers = 0, {}

    def seconds(self):
        """What the server took for all so far, by its latencies."""
        return self.scale * sum(STEP * one.steps + PER_REQUEST * one.load for one in self.servers.values())

    async def generate(self, request_id, prompt_ids, sampling_params):
        """See `ask`, which has an event loop of its own each time."""
        loop = asyncio.get_running_loop()
        if loop not in self.servers:
            self.servers[loop] = Server(self.scale)
        text = self.rng.choice(self.questions)
        self.asked += 1
        await self.servers[loop].generate(len(text) // 4 + 1)
        return SimpleNamespace(token_ids=list(text.encode()), log_probs=None, extra_fields={})


def played(steps, gamma, seed):
    """Per step, the transitions of random games and the prompts of their states."""
    env, rng, found = (
        make("twenty_questions", words=10, questions="listed", full=False),
        random.Random(seed),
        [],
    )
    for step in range(steps):
        rows = []
        for game in range(GAMES):
            seen, said, rewards, end = [env.reset(game)[0]], [], [], False
            while not end:
                said.append(env.random_action(rng))
                observation, reward, terminated, truncated, _ = env.step(said[-1])
                seen, end = [*seen, observation], terminated or truncated
                rewards.append(reward)
            states = history(seen[:-1], said, env.instruction)
            rows += of_episode(states, said, rewards, id=f"{step}:{game}", gamma=gamma)
        found.append((rows, {row.state: list(row.state[-1000:].encode()) for row in rows}))
    return found, env.admissible()


def texts(client, prompts):
    """One utterance at each prompt."""
    said = ask(client, [Question(ids) for ids in prompts], {"max_tokens": 32})
    return [bytes(one.ids).decode() for (one,) in said]


def every_draw(actor, client):
    """Distinct states, CPU seconds of asking and of the updates.

    Of what is heard at a state that a batch has twice the last counts.
    """
    ahead = copy.deepcopy(actor.critic.replay)
    drawn = [[row.state for row in ahead.sample(actor.config.batch)] for _ in range(actor.archer.updates)]
    started = time.process_time()
    said = iter(texts(client, [actor.prompts[state] for states in drawn for state in states]))
    heard = [{state: [next(said)] for state in states} for states in drawn]
    asked = time.process_time()
    for some in heard:
        actor.critic.train(1, some)
    states = {state for some in drawn for state in some}
    return len(states), asked - started, time.process_time() - asked


def cached(actor, client, version):
    """Likewise, as the trainer does it."""
    started = time.process_time()
    wanted, states = actor.wanted(version)
    said = texts(client, list(wanted.values()))
    actor.heard({state: [text] for state, text in zip(wanted, said, strict=True)})
    asked = time.process_time()
    actor.train()
    return states, asked - started, time.process_time() - asked


def measure(way, given, steps, questions):
    """Means over the phases; see `NAMES`."""
    archer = ArcherConfig(updates=given.updates)
    actor, client = CriticActor(critic_config(given), archer), Client(questions, given.scale, 1)
    for rows, prompts in steps[:FILL]:
        actor.add(rows, prompts)
    actor.critic.values(
        [row.state for rows, _ in steps for row in rows]
    )  # the encoder keeps what it has read
    phases = []
    for version, (rows, prompts) in enumerate(steps[FILL:], start=1):
        actor.add(rows, prompts)
        before, served, started = client.asked, client.seconds(), time.perf_counter()
        now = version if way == WAYS[1] else 0
        states, *took = every_draw(actor, client) if way == WAYS[0] else cached(actor, client, now)
        wall, served = time.perf_counter() - started, client.seconds() - served
        phases.append((states, client.asked - before, served, *took, served + sum(took), wall))
    columns = dict(zip(NAMES, zip(*phases, strict=True), strict=True))
    found = {name: statistics.fmean(column) for name, column in columns.items()}
    return found | {"asked_by_phase": columns["asked"], "states_by_phase": columns["states"]}


def critic_config(given):
    """The paper's replay, batch and rule for V; heads that a CPU can train."""
    return CriticConfig(encoder=given.encoder, hidden=64, batch=given.batch, micro_batch=given.batch)


def main():
    """Measure all ways, print a table; numbers go to --json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--phases", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the server's latency; 0: at once")
    parser.add_argument("--encoder", default="ngrams")
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--batch", type=int, default=256)
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for repeat in range(given.repeats):
        steps, questions = played(FILL + given.phases, 0.95, repeat)
        runs.append({way: measure(way, given, steps, questions) for way in WAYS})
    print(
        f"{given.phases} phases of {given.updates} x {given.batch} draws, {given.repeats} repeats (medians)"
    )
    print(" " * 14 + "".join(f"{name:>17}" for name in NAMES))
    for way in WAYS:
        cells = [statistics.median(run[way][name] for run in runs) for name in NAMES]
        print(f"{way:14}" + "".join(f"{cell:17.{0 if cell > 100 else 2}f}" for cell in cells))
    ratios = {}
    for way in WAYS[1:]:
        for name in ("asked", "server_seconds", "seconds"):
            shares = [run[WAYS[0]][name] / max(run[way][name], 1e-9) for run in runs]
            ratios[f"{WAYS[0]} / {way}, {name}"] = shares
            print(f"{WAYS[0]} / {way}, {name}: {statistics.median(shares):.2f} (lowest {min(shares):.2f})")
    if given.json:
        server = {"step": STEP, "per_request": PER_REQUEST, "capacity": CAPACITY, "scale": given.scale}
        how = {name: value for name, value in vars(given).items() if name not in ("json", "scale")}
        found = {"machine": machine(), "settings": how, "server": server, "runs": runs, "ratios": ratios}
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
