"""Environments that misbehave on command, for the tests of the pool and of the agent loop."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import time

from verl_multiturn.env import Env


class Steady(Env):
    """Says what it was told; the number of an action is its reward, "win" and "stop" end the episode."""

    instruction = "do as told"
    max_turns = 6

    def _reset(self, seed):
        self.told = []
        return f"task {seed} in {os.getpid()}", {}

    def _step(self, action):
        self.told.append(action)
        reward = float(action) if action.isdigit() else 0.0
        won = action == "win"
        info = {"success": won, "truncated": action == "stop", "valid": bool(action)}
        return f"told {self.told}", reward + won, won, info


def misbehave(word):
    """Do what the word says, if it says anything."""
    if word == "raise":
        raise KeyError("no such door")
    if word == "exit":
        sys.exit(3)
    if word == "stop iteration":
        raise StopIteration("no more")
    if word == "hang":
        time.sleep(0.8)
    if word == "hang for ever":
        time.sleep(600)
    if word == "die":
        os._exit(7)
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "segfault":
        ctypes.string_at(0)


class Odd(Steady):
    """An action, or a task, names what goes wrong."""

    def _reset(self, seed):
        misbehave(seed)
        return super()._reset(seed)

    def _step(self, action):
        misbehave(action)
        observation, reward, terminated, info = super()._step(action)
        if action == "secret":
            info["secret"] = lambda: None
        return observation, reward, terminated, info

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        odd = {
            "number": (7, reward, terminated, truncated, info),
            "text reward": (observation, "much", terminated, truncated, info),
            "nan": (observation, float("nan"), terminated, truncated, info),
            "maybe": (observation, reward, "maybe", truncated, info),
            "no info": (observation, reward, terminated, truncated, None),
        }
        return odd.get(action, (observation, reward, terminated, truncated, info))

    def state_key(self):
        return self.told if "unhashable" in self.told else tuple(self.told)


class BadClose(Odd):
    """Cannot even be closed."""

    def close(self):
        raise OSError("closed already")


class BadStart(Steady):
    """Cannot be made."""

    def __init__(self):
        raise RuntimeError("no licence")


class Apart(Odd):
    """In a process of its own."""

    runs_in = "process"


class BadStartApart(BadStart):
    """Cannot be made in its process."""

    runs_in = "process"


class HangingStartApart(Steady):
    """Hangs in its process before it says a word, after it has left its number in a file."""

    runs_in = "process"

    def __init__(self, file):
        with open(file, "w", encoding="utf-8") as text:
            text.write(str(os.getpid()))
        time.sleep(600)


class HangingClose(Apart):
    """Cannot be closed in its process."""

    def close(self):
        time.sleep(600)


class HangingCloseHere(Odd):
    """Cannot be closed in its thread."""

    def close(self):
        time.sleep(600)


class Leaking(Steady):
    """Keeps 20 MiB of every episode."""

    runs_in = "process"
    kept = []

    def _reset(self, seed):
        self.kept.append(os.urandom(1) * (20 << 20))
        return super()._reset(seed)


class Sticky(Steady):
    """Keeps its success with the class, and never takes it back."""

    runs_in = "process"
    won = False

    def _step(self, action):
        observation, reward, terminated, info = super()._step(action)
        Sticky.won = Sticky.won or action == "win"
        return observation, reward, terminated, info | {"success": Sticky.won}


class Telling(Steady):
    """Tells about the process that it is in; a half line stays unwritten when it is forked."""

    runs_in = "process"

    @classmethod
    def preload(cls):
        import numpy.random

        numpy.random.random()
        sys.stdout.write("preloaded")

    def _reset(self, seed):
        import numpy as np

        threads = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        return "asked", {"threads": threads, "chances": (random.random(), float(np.random.random()))}

    def _step(self, action):
        started = subprocess.Popen(["sleep", "600"]).pid if action == "start" else 0
        return "started", 0.0, False, {"started": started}
