"""Play an environment turn by turn: a person in the terminal, chance, the expert or a model.

Everything is written to a rich console, so that the same code serves the command and a notebook.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from random import Random

import pandas as pd
from rich.console import Console
from rich.text import Text

from verl_multiturn.env import Env, Seed, derive_seed
from verl_multiturn.errors import unknown
from verl_multiturn.panel import Panel
from verl_multiturn.policies import Episode, Policy, expert_policy, random_policy
from verl_multiturn.report import print_table
from verl_multiturn.rollout.pool import Observed, reset, step
from verl_multiturn.stats import mean_interval, wilson

POLICIES = ("human", "random", "expert", "model")
Player = Callable[[Seed, str], Episode]  # plays a task of a type


class Quit(Exception):
    """The person has had enough."""


class Screen:
    """Shows episodes: each turn, or one line at an end."""

    def __init__(self, console: Console | None = None, turns: bool = True) -> None:
        self.console, self.turns = console or Console(), turns
        self._played, self._instruction = 0, ""

    def say(self, text: str, style: str = "") -> None:
        """A line as it is: observations are full of brackets, which rich would read as markup."""
        self.console.print(Text(text, style=style), soft_wrap=True)

    def start(self, task: Seed, kind: str, seen: Observed) -> None:
        """An episode begins."""
        self._played = 0
        if not self.turns:
            return
        if seen.instruction != self._instruction:  # once, unless each task has its own
            self._instruction = seen.instruction
            self.say(seen.instruction, "bold")
        self.say(f"\ntask {task} ({kind}), up to {seen.max_turns} turns", "cyan")
        self.say(seen.observation)

    def choices(self, legal: Sequence[str], numbered: bool) -> None:
        """The actions: on one line if they fit, else in columns."""
        names = [f"{n} {action}" if numbered else action for n, action in enumerate(legal, 1)]
        line = "legal: " + ("   " if numbered else ", ").join(names)
        if len(line) <= self.console.width:
            if legal:
                self.say(line, "green")
            return
        digits, widest = len(str(len(legal))), max(map(len, legal))
        heads = (f"{n:>{digits}} " if numbered else "" for n in range(1, len(legal) + 1))
        cells = [f"{head}{action:<{widest}}" for head, action in zip(heads, legal, strict=True)]
        columns = max(1, (self.console.width - 2) // (len(cells[0]) + 3))
        rows = -(-len(cells) // columns)
        self.say("legal:", "green")
        for row in range(rows):
            self.say("  " + "   ".join(cells[row::rows]).rstrip(), "green")

    def utterance(self, text: str) -> None:
        """What a model wrote."""
        if self.turns:
            self.say(f"model: {text}", "dim")

    def acted(self, action: str, seen: Observed) -> None:
        """A step of the environment."""
        self._played += 1
        if self.turns:
            mark = "" if seen.info.get("valid", True) else " (not an action here)"
            self.say(f"\nstep {self._played}: {action or '(nothing)'}{mark}", "cyan")
            self.say(f"{seen.observation}\nreward {seen.reward:g}")

    def end(self, episode: Episode) -> None:
        """An episode is over."""
        how = "solved" if episode.success else "stopped by a limit" if episode.truncated else "not solved"
        turns = f"{episode.turns} turn{'s' if episode.turns != 1 else ''}"
        kind = "" if self.turns else f"task {episode.task} ({episode.task_type}): "
        lead = "\n" if self.turns else ""
        self.say(f"{lead}{kind}{how} after {turns}, return {episode.episode_return:g}")


class Human:
    """The person at the keyboard, as a policy.

    A line is an action's number, an action, or how one begins; "=" before it sends it as it stands.

    Args:
        screen: where the legal actions are shown.
        read: asks for a line; raises EOFError at the end of the input.
    """

    def __init__(self, screen: Screen, read: Callable[[str], str] = input) -> None:
        self.screen, self.read = screen, read

    def __call__(self, env: Env, observation: str) -> str:
        """Ask until there is an action."""
        legal = env.admissible() or []
        # Where actions are numbers themselves, a second numbering would be misread.
        numbered = not any(action.strip().lstrip("+-").isdigit() for action in legal)
        self.screen.choices(legal, numbered)
        while True:
            try:
                line = self.read("> ").strip()
            except (EOFError, KeyboardInterrupt):
                self.screen.say("")
                raise Quit from None
            if line in legal:
                return line
            if line.lower() in ("q", "quit"):
                raise Quit
            action = self._chosen(line, legal, numbered) if line else self._hint(env)
            if action is not None:
                return action

    def _chosen(self, line: str, legal: Sequence[str], numbered: bool) -> str | None:
        """The action that a line means; None, with a remark, where it means none or several."""
        if line.startswith("="):
            return line[1:].strip()
        if numbered and legal and line.isdigit():
            if 0 < int(line) <= len(legal):
                return legal[int(line) - 1]
            self.screen.say(f"there are {len(legal)} actions", "yellow")
            return None
        typed = " ".join(line.split()).lower()
        near = [action for action in legal if action.lower().startswith(typed)]
        if any(action.lower() == typed for action in near) or not near:
            return line  # the environment knows best what to make of it
        if len(near) == 1:
            return near[0]
        self.screen.say(
            f"{len(near)} actions begin so; ={line} sends it as it is: {', '.join(near)}", "yellow"
        )
        return None

    def _hint(self, env: Env) -> str | None:
        try:
            return env.expert()
        except NotImplementedError:
            self.screen.say("type an action or its number; q ends the game", "yellow")
            return None


def policy_of(name: str, screen: Screen, seed: int = 0, read: Callable[[str], str] = input) -> Policy:
    """A policy that needs no model, by its name."""
    found: dict[str, Policy] = {
        "human": Human(screen, read),
        "random": random_policy(Random(seed)),
        "expert": expert_policy,
    }
    if name not in found:
        raise unknown("policy", name, POLICIES)
    return found[name]


def player(env: Env, policy: Policy, screen: Screen) -> Player:
    """Plays tasks of one environment with a policy."""

    def play(task: Seed, kind: str) -> Episode:
        seen = reset(env, task, derive_seed(task, 0))
        kind, total, turns, invalid = seen.info.get("task_type", kind), 0.0, 0, 0
        screen.start(task, kind, seen)
        while not (seen.terminated or seen.truncated):
            action = policy(env, seen.observation)
            seen = step(env, action)
            screen.acted(action, seen)
            total, turns = total + seen.reward, turns + 1
            invalid += not seen.info.get("valid", True)
        return Episode(task, kind, total, bool(seen.info.get("success")), turns, invalid, seen.truncated)

    return play


def tasks(seed: Seed = 0, panel: Panel | None = None, episodes: int | None = None) -> list[tuple[Seed, str]]:
    """The tasks to play, with their types: `episodes` of a panel (default: all), else seeds from `seed`.

    Raises:
        ValueError: more than one episode from a seed that is not a number.
    """
    if panel is not None:
        return [(task.id, task.type) for task in islice(panel.tasks, episodes)]
    count = episodes or 1
    if isinstance(seed, int):
        return [(seed + n, "default") for n in range(count)]
    if count > 1:
        raise ValueError(f"tasks are counted from a number: --episodes {count} cannot start at {seed!r}")
    return [(seed, "default")]


def play_tasks(play: Player, chosen: Iterable[tuple[Seed, str]], screen: Screen) -> list[Episode]:
    """Play tasks one after another until the person quits; returns the finished episodes."""
    episodes: list[Episode] = []
    try:
        for task, kind in chosen:
            episodes.append(play(task, kind))
            screen.end(episodes[-1])
    except Quit:
        screen.say("stopped; the episode in progress does not count", "yellow")
    return episodes


def summary(name: str, episodes: Sequence[Episode]) -> pd.DataFrame:
    """One row, as in `report.success_table`: success (Wilson) and return with 95 % intervals, turns, n."""
    rate = wilson(sum(one.success for one in episodes), len(episodes))
    mean = mean_interval([one.episode_return for one in episodes])
    row = {"success": rate.mean, "success_low": rate.low, "success_high": rate.high}
    row |= {"return": mean.mean, "return_low": mean.low, "return_high": mean.high}
    row |= {"turns": sum(one.turns for one in episodes) / len(episodes), "n": len(episodes)}
    return pd.DataFrame([row], index=[name])


def print_summary(name: str, episodes: Sequence[Episode], screen: Screen) -> None:
    """Print what the episodes came to."""
    if not episodes:
        screen.say("no episode was finished")
        return
    print_table(summary(name, episodes), screen.console)
    if invalid := sum(one.invalid for one in episodes):
        turns = sum(one.turns for one in episodes)
        screen.say(f"{invalid} of {turns} turns without a valid action")
