"""A simulated LLM server with continuous batching, and an environment that answers late."""

import asyncio
import heapq
import math
import random
import time
from collections import deque
from pathlib import Path

from verl_multiturn.env import Env, derive_seed
from verl_multiturn.rollout.parsing import ActionFormat

STEP, PER_REQUEST, CAPACITY = 4e-3, 30e-6, 256  # seconds, seconds, requests
LATENCY, SPREAD, TAIL, TAIL_SHARE = 0.020, 1.0, 0.5, 0.01  # mean and sigma of a lognormal; the rare long call
TOKENS, MAX_TOKENS = 30, 128  # of an utterance: mean, and where it is cut
MAX_TURNS, TURNS = 20, 6  # of an episode: limit, and median of the long-tailed length
PROMPT_TOKENS = 400
FORM = ActionFormat(tag="answer", think=False)
HERE = f"{Path(__file__).resolve()}:Slow"
UTTERANCE = "<answer>go</answer>"


def draw_tokens(seed, turn):
    rng = random.Random(derive_seed("tokens", seed, turn))
    return max(4, min(MAX_TOKENS, round(rng.lognormvariate(math.log(TOKENS) - 0.32, 0.8))))


class Slow(Env):
    """Answers late, now and then very late; the task decides how long the episode is."""

    instruction = "Go on. Action: go."
    max_turns = MAX_TURNS

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def _reset(self, seed):
        length = round(self.rng.lognormvariate(math.log(TURNS), 0.6))
        self.left = max(1, min(MAX_TURNS, length))
        self.seen = 0
        return "at 0", {"task_type": "slow"}

    def _step(self, action):
        latency = TAIL
        if self.rng.random() >= TAIL_SHARE:
            latency = self.rng.lognormvariate(math.log(LATENCY) - SPREAD**2 / 2, SPREAD)
        if self.scale:
            time.sleep(self.scale * latency)
        self.seen += 1
        done = self.seen >= self.left
        return f"at {self.seen}", float(done), done, {"valid": True, "success": done}

    def admissible(self):
        return ["go"]


class Server:
    """The simulated server; `scale` 0 answers at once."""

    def __init__(self, scale=1.0):
        self.scale, self.requests, self.busy, self.steps, self.load = scale, 0, 0.0, 0, 0
        self.running, self.waiting, self.wake = [], deque(), asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._serve())

    async def generate(self, tokens):
        self.requests += 1
        if not self.scale:
            await asyncio.sleep(0)
            return [7] * tokens
        done = asyncio.get_running_loop().create_future()
        self.waiting.append((tokens, done))
        self.wake.set()
        await done
        return [7] * tokens

    async def _serve(self):
        while True:
            while self.waiting and len(self.running) < CAPACITY:
                tokens, done = self.waiting.popleft()
                heapq.heappush(self.running, (self.steps + tokens, id(done), done))
            if not self.running:
                self.wake.clear()
                await self.wake.wait()
                continue
            started = time.perf_counter()
            await asyncio.sleep(self.scale * (STEP + PER_REQUEST * len(self.running)))
            self.busy += time.perf_counter() - started
            self.steps, self.load = self.steps + 1, self.load + len(self.running)
            while self.running and self.running[0][0] <= self.steps:
                heapq.heappop(self.running)[2].set_result(None)


class Chat:
    """Prompts of a fixed length: the tokenizer is not what is measured."""

    def build_initial_tokens(self, messages):
        return [1] * PROMPT_TOKENS
