"""Environments that misbehave on command, for the tests of the pool and of the agent loop."""

import os
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


class Odd(Steady):
    """An action names what goes wrong."""

    def _step(self, action):
        if action == "raise":
            raise KeyError("no such door")
        if action == "hang":
            time.sleep(0.8)
        if action == "hang for ever":
            time.sleep(600)
        if action == "die":
            os._exit(7)
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
