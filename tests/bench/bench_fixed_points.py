"""ArCHer's critic against dynamic programming: a chain of two states, Twenty Questions with ten words.

    PYTHONPATH=. python tests/bench/bench_fixed_points.py [--seeds 1 2 3] [--arms policy sarsa] [--json FILE]

The real `CriticActor` and `UtteranceCritic` learn Q and V of a policy that stays as it is. Their encoder has
a number for each text, so that the heads can hold a table. The game is played in its environment; a state is
the words that the answers leave. The policy guesses or asks what splits them best, one as likely as the
other. The replay holds every state that this can reach, with both and with the question that splits them
worst, each with every word that may be hidden, once: chances are the true ones. Exact values:
`verl_multiturn.exact`, those of the chain in closed form. Arms:

policy        V learns from the policy's utterances in exact shares
drawn         from one of them, drawn anew after every 50 updates
kept          from one, drawn once: what the cache of a warm-up leaves of them. kept 8: from eight
sarsa         V of the replay's behaviour: each of its utterances as likely
mc            Q and V learn the returns of 2,000 games of that; compared with the replay's own means
"""

import argparse
import json
import random
import time
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cache
from math import nan
from pathlib import Path

import numpy as np
import torch

from environments.twenty_questions_parts.exact import BeliefModel
from verl_multiturn.critic.actor import CriticActor
from verl_multiturn.critic.config import ArcherConfig, CriticConfig, FixedPointWarning
from verl_multiturn.critic.encoders import Encoder
from verl_multiturn.critic.replay import Transition, of_episode
from verl_multiturn.critic.utterance import UtteranceCritic
from verl_multiturn.env import make
from verl_multiturn.exact import exact_values
from verl_multiturn.measure import machine

GAMMA = 0.95
SIZES = {"hidden": 128, "layers": 1, "batch": 512, "micro_batch": 512, "capacity": 200_000, "min_size": 1}
CONFIG = CriticConfig(encoder="ngrams", gamma=GAMMA, **SIZES)
PHASE = 50  # updates from one policy to the next
RATES = (
    (4, 3e-3),
    (4, 1e-3),
    (6, 2e-4),
    (10, 5e-5),
)  # phases, Adam's rate: the draws' noise is averaged late
SCALE = 8.0  # of the encoder's numbers: with 1 the heads' first layer tells texts apart too slowly
ARMS = {
    "policy": {},
    "drawn": {"utterances": 1},
    "kept": {"utterances": 1, "kept": True},
    "kept 8": {"utterances": 8, "kept": True},
    "sarsa": {"v_target": "sarsa"},
    "mc": {"v_target": "mc"},
}
GAMES = 2000  # of mc


@dataclass
class Problem:
    """A task, and what is true of it.

    Attributes:
        rows: of the replay.
        policy: state -> utterance -> probability.
        Q: (state, utterance) -> value under the policy.
        uniform: likewise, where each utterance of a state is as likely.
    """

    rows: list
    policy: dict
    Q: dict
    uniform: dict

    def fresh(self, states, count, rng):
        """State -> what the policy says there now; count None: as few as have its exact shares."""
        if count is None:
            return {s: _exactly(self.policy[s]) for s in states}
        return {s: rng.choices(*zip(*self.policy[s].items(), strict=True), k=count) for s in states}


def _exactly(chances):
    whole = next(n for n in range(1, 11) if all(abs(n * p - round(n * p)) < 1e-9 for p in chances.values()))
    return [a for a, p in chances.items() for _ in range(round(whole * p))]


class Table(Encoder):
    """One number for each known text."""

    def __init__(self, pairs):
        super().__init__()
        self.place = {text: k for k, text in enumerate(dict.fromkeys(x for pair in pairs for x in pair))}
        self.width = len(self.place)

    def encode(self, texts):
        """See Encoder. -> (N, D)."""
        return SCALE * torch.eye(self.width)[[self.place[text] for text in texts]]


def chain(on=0.7):
    """Two states: "on" leads from "first" to "second" and out, "stay" stays. With chance p of "on"

    V_2 = (p r_2 + (1 - p) r) / (1 - g (1 - p)),   V_1 = (p (r_1 + g V_2) + (1 - p) r) / (1 - g (1 - p)).
    """
    r1, r2, stay = -0.5, 1.0, -0.1

    def exact(p):
        rest = 1 - GAMMA * (1 - p)
        V2 = (p * r2 + (1 - p) * stay) / rest
        V1 = (p * (r1 + GAMMA * V2) + (1 - p) * stay) / rest
        first = {("first", "on"): r1 + GAMMA * V2, ("first", "stay"): stay + GAMMA * V1}
        return first | {("second", "on"): r2, ("second", "stay"): stay + GAMMA * V2}

    rows = [
        Transition("first", "on", r1, "second", False, nan, 0, "a"),
        Transition("first", "stay", stay, "first", False, nan, 0, "b"),
        Transition("second", "on", r2, "", True, nan, 0, "c"),
        Transition("second", "stay", stay, "second", False, nan, 0, "d"),
    ]
    return Problem(rows, {s: {"on": on, "stay": 1 - on} for s in ("first", "second")}, exact(on), exact(0.5))


class Game:
    """Twenty Questions with ten words; as `exact_values` reads it, with three utterances at each state.

    As long as it is played by the policy it ends before its limit, whatever one other question did before:
    the words that the answers leave are all of the state.
    """

    actions = ("guess", "best", "worst")  # a word; the question that splits the words best, the worst one

    def __init__(self):
        self.env = make("twenty_questions", words=10, questions="listed", full=False)
        self.model = BeliefModel(type(self.env), self.env.words, self.env.max_turns)
        self.max_turns, self.start_state = self.env.max_turns, self.model.start_state

    def words(self, belief):
        """Those of a bit mask."""
        return [word for k, word in enumerate(self.env.words) if belief >> k & 1]

    @cache  # noqa: B019
    def menu(self, belief):
        """What each of `actions` says."""
        words, told = self.words(belief), self.env.table.questions
        left = {q: sum(n * n for n in Counter(told[q][w] for w in words).values()) for q in told}
        asked = [q for q in self.model.actions if q in told]
        said = self.env.table.guess(words[0]), min(asked, key=left.get), max(asked, key=left.get)
        return dict(zip(self.actions, said, strict=True))

    def transitions(self, belief, action):
        """See `BeliefModel`."""
        return self.model.transitions(belief, self.menu(belief)[action])

    def policy(self, belief):
        """Action -> probability."""
        return {"guess": 0.5, "best": 0.5} if belief.bit_count() > 1 else {"guess": 1.0}

    def uniform(self, belief):
        """Of the utterances in the replay, each as likely."""
        said = {text: action for action, text in self.menu(belief).items()}
        return dict.fromkeys(said.values(), 1 / len(said))

    def seen(self):
        """What the critic reads of the game as it stands, and the bit mask of the words."""
        words = self.env.candidates()
        return f"It may be: {', '.join(words)}", self.model.state_of(words)

    def turn(self, word, past, action):
        """One turn after others, the word hidden: its transition without an id, and the words left."""
        self.env.reset(word)
        for said in past:
            self.env.step(said)
        state, _ = self.seen()
        _, reward, terminated, truncated, _ = self.env.step(action)
        after, belief = self.seen()
        end = terminated or truncated
        return (state, action, reward, "" if end else after, end), belief

    def problem(self):
        """See the module's docstring."""
        exact = {rule: exact_values(self, rule, GAMMA) for rule in (self.policy, self.uniform)}
        found, past = Problem([], {}, {}, {}), {self.start_state(): []}
        todo = list(past)
        for belief in todo:
            at, menu = (belief, self.max_turns - len(past[belief])), self.menu(belief)
            for action in self.uniform(belief):
                for word in self.words(belief):
                    turn, after = self.turn(word, past[belief], menu[action])
                    found.rows.append(Transition(*turn, nan, 0, str(len(found.rows))))
                    if not turn[-1] and after not in past:
                        past[after] = [*past[belief], menu[action]]
                        todo.append(after)
                found.Q[turn[:2]] = exact[self.policy].Q[at][action]
                found.uniform[turn[:2]] = exact[self.uniform].Q[at][action]
            found.policy[turn[0]] = {menu[action]: p for action, p in self.policy(belief).items()}
        return found

    def games(self, count, seed):
        """Transitions, with returns, of games of the replay's behaviour."""
        rng, rows = random.Random(seed), []
        for game in range(count):
            self.env.reset(game)
            states, said, rewards, end = [], [], [], False
            while not end:
                state, belief = self.seen()
                states.append(state)
                said.append(self.menu(belief)[rng.choice(list(self.uniform(belief)))])
                _, reward, terminated, truncated, _ = self.env.step(said[-1])
                rewards.append(reward)
                end = terminated or truncated
            rows += of_episode(states, said, rewards, id=str(game), gamma=GAMMA)
        return rows


def learn(problem, seed, utterances=None, kept=False, rates=RATES, **change):
    """The critic after all phases.

    Args:
        problem: see Problem.
        seed: of the critic and of what the policy says.
        utterances: at a state, see `Problem.fresh`.
        kept: over all phases.
        rates: see RATES.
        change: of CONFIG.
    """
    config, rng, version = replace(CONFIG, seed=seed, **change), random.Random(seed), 1
    actor = CriticActor(config, ArcherConfig(updates=PHASE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedPointWarning)
        actor.critic = UtteranceCritic(config, encoder=Table(problem.Q))
    actor.add(problem.rows, {state: [0] for state in problem.policy})
    for phases, rate in rates:
        for group in actor.critic.optimizer.param_groups:
            group["lr"] = rate
        for _ in range(phases):
            version += not kept
            wanted, _ = actor.wanted(version)
            actor.heard(problem.fresh(wanted, utterances, rng))
            actor.train()
    return actor.critic


def truth(problem, uniform=False):
    """Q and V of the policy, or of the replay's behaviour."""
    Q, V = problem.uniform if uniform else problem.Q, {}
    for s, spoken in problem.policy.items():
        said = [a for state, a in Q if state == s]
        V[s] = sum(Q[s, a] * (1 / len(said) if uniform else spoken.get(a, 0.0)) for a in said)
    return Q, V


def means(rows):
    """Mean return of each pair, and of each state."""
    returns, of_state = defaultdict(list), defaultdict(list)
    for row in rows:
        returns[row.state, row.action].append(row.mc_return)
        of_state[row.state].append(row.mc_return)
    return tuple({key: float(np.mean(seen)) for key, seen in some.items()} for some in (returns, of_state))


def errors(critic, Q, V):
    """Largest and mean distance from Q and V, over heads and pairs or states."""
    read = critic.network
    with torch.no_grad():
        found = read.v_values(read.embed(list(V))).double().numpy()
    off = {
        "q": np.abs(critic.q_values(*zip(*Q, strict=True)) - np.array(list(Q.values()))),
        "v": np.abs(found - np.array(list(V.values()))),
    }
    return {f"{x}_{how}": float(getattr(wrong, how)()) for x, wrong in off.items() for how in ("max", "mean")}


def one(arm, task, game, seed, batch):
    """What an arm is off by after learning."""
    problem = game.problem() if task == "game" else chain()
    exact = truth(problem, arm == "sarsa")
    if arm == "mc":
        problem.rows = game.games(GAMES, seed)
        exact = means(problem.rows)
    started = time.process_time()
    batch = batch if task == "game" else 64
    critic = learn(problem, seed, batch=batch, micro_batch=batch, **ARMS[arm])
    size = {"pairs": len(exact[0]), "transitions": len(problem.rows), "steps": critic.steps}
    return errors(critic, *exact) | size | {"cpu_seconds": time.process_time() - started}


def main():
    """Run all arms, print a line each; numbers go to --json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--batch", type=int, default=1024, help="of the game")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    game, table = Game(), []
    for arm in given.arms:
        for task in ("game",) if arm == "mc" else ("chain", "game"):
            for seed in given.seeds:
                row = {"arm": arm, "task": task, "seed": seed} | one(arm, task, game, seed, given.batch)
                print(
                    ", ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
                )
                table.append(row)
    if given.json:
        found = {"machine": machine(), "rates": RATES, "phase": PHASE, "batch": given.batch, "rows": table}
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
