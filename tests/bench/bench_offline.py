"""Offline ArCHer against imitation: 20 Questions with ten words, a log half expert, half random play.

    PYTHONPATH=. python tests/bench/bench_offline.py --json results/archer/offline.json

For each seed a log is played. From it learn, with the loss of `critic.imitation` (−mean w log π): bc (all of
it, w = 1), filtered_bc (the best tenth of the games), awr (all of it, weighed by an IQL critic fitted to it),
and chai (the bc policy offers five questions, that critic chooses). All take the same number of optimizer
steps. Policy and critic heads are small MLPs on `Lines`, a fixed code of the dialogue, so that a seed takes
a minute and the comparison is one of the rules, not of what a language model can read. Each plays every word
`--samples` times, drawing from its distribution. Exact references:
`environments.twenty_questions_parts.exact`.
"""

import argparse
import json
import random
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from environments.twenty_questions_parts.exact import reference_returns
from verl_multiturn.critic.config import PRESETS
from verl_multiturn.critic.encoders import Encoder
from verl_multiturn.critic.offline import OfflineConfig, fit, imitate, read, rerank
from verl_multiturn.critic.replay import history
from verl_multiturn.env import derive_seed, make
from verl_multiturn.measure import machine
from verl_multiturn.stats import mean_interval

KWARGS = {"words": 10, "questions": "listed", "full": False}
CRITIC = replace(PRESETS["offline"], hidden=64, lr=1e-3, gamma=0.95, micro_batch=128)
ARMS = ("bc", "filtered_bc", "awr")


class Lines(Encoder):
    """A bucket for each line and for each line with the one after it (a question and its answer)."""

    width = 512

    def encode(self, texts):
        """See Encoder. -> (N, 512)."""
        rows = torch.zeros((len(texts), self.width))
        for row, text in zip(rows, texts, strict=True):
            lines = text.split("\n")
            for part in [*lines, *map("\n".join, pairwise(lines))]:
                row[derive_seed(part) % self.width] = 1.0
        return rows


class Policy:
    """Softmax over the listed questions, from the code of the dialogue."""

    def __init__(self, actions, seed):
        torch.manual_seed(seed)
        self.actions, self.encoder = actions, Lines()
        self.place = {action: k for k, action in enumerate(actions)}
        layers = [torch.nn.Linear(Lines.width, 64), torch.nn.ReLU(), torch.nn.Linear(64, len(actions))]
        self.network = torch.nn.Sequential(*layers)

    def learn(self, rows, weights, steps, batch, seed):
        """Minimise −mean w log π over recorded turns."""
        kept = [k for k, weight in enumerate(weights) if weight > 0]
        x = self.encoder.encode([rows[k].state for k in kept])
        y = torch.tensor([self.place[rows[k].action] for k in kept])
        w = torch.tensor([weights[k] for k in kept], dtype=torch.float32)
        rng, optimizer = np.random.default_rng(seed), torch.optim.Adam(self.network.parameters(), lr=1e-3)
        for _ in range(steps):
            drawn = torch.tensor(rng.integers(len(kept), size=batch))
            losses = torch.nn.functional.cross_entropy(self.network(x[drawn]), y[drawn], reduction="none")
            optimizer.zero_grad()
            (losses * w[drawn]).mean().backward()
            optimizer.step()

    @torch.no_grad()
    def offer(self, state, k, rng):
        """K draws."""
        p = self.network(self.encoder.encode([state]))[0].softmax(-1).double().numpy()
        return [self.actions[n] for n in rng.choice(len(p), size=k, p=p / p.sum())]


def log(path, episodes, seed):
    """Every second game by the expert, the others at random; returns their mean return."""
    env, rng, lines, total = make("twenty_questions", **KWARGS), random.Random(seed), [], 0.0
    for n in range(episodes):
        observation, _ = env.reset(n // 2)
        turns, over = [], False
        while not over:
            action = env.expert() if n % 2 else env.random_action(rng)
            turn = {"observation": observation, "action": action}
            observation, reward, terminated, truncated, _ = env.step(action)
            turns.append(turn | {"reward": reward})
            total, over = total + reward, terminated or truncated
        lines.append(json.dumps({"turns": turns}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return total / episodes


def play(policy, samples, seed, critic=None, k=5):
    """Mean return over all words; with a critic, it chooses among k questions."""
    env, rng, returns = make("twenty_questions", **KWARGS), np.random.default_rng(seed), []
    for word in env.words:
        for _ in range(samples):
            seen, said, total, over = [env.reset(word)[0]], [], 0.0, False
            while not over:
                state = history(seen, said)[-1]
                offered = policy.offer(state, k if critic else 1, rng)
                chosen = 0
                if critic:
                    Q = critic.q_values([state] * k, offered, target=True)
                    chosen = int(rerank(Q[:1], Q[-1:])[0])
                observation, reward, terminated, truncated, _ = env.step(offered[chosen])
                said, seen = [*said, offered[chosen]], [*seen, observation]
                total, over = total + reward, terminated or truncated
            returns.append(total)
    return float(np.mean(returns))


def one_seed(seed, arguments):
    """Mean returns by arm."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        found = {"log": log(path, arguments.episodes, seed)}
        dialogues = read(path, CRITIC)
    rows = [row for one in dialogues for row in one]
    critic, metrics = fit(dialogues, replace(CRITIC, seed=seed), arguments.critic_epochs, encoder=Lines())
    print(f"seed {seed}: {len(rows)} turns, q_loss {metrics[0]['q_loss']:.3f} to {metrics[-1]['q_loss']:.3f}")
    env = make("twenty_questions", **KWARGS)
    env.reset(0)
    for arm in ARMS:
        policy = Policy(env.admissible(), seed)
        weights = imitate(critic, dialogues, OfflineConfig(actor=arm, beta=arguments.beta))
        policy.learn(rows, weights, arguments.steps, 128, seed)
        found[arm] = play(policy, arguments.samples, seed)
        if arm == "bc":
            found["chai"] = play(policy, arguments.samples, seed, critic)
    return found


def main():
    """Run all seeds, print a table; numbers go to --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--episodes", type=int, default=400, help="of the log")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps of each policy")
    parser.add_argument("--critic-epochs", type=int, default=20)
    parser.add_argument("--beta", type=float, default=1.0, help="of awr")
    parser.add_argument("--samples", type=int, default=40, help="games for each word")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    exact = reference_returns(make("twenty_questions", **KWARGS))
    print(f"exact: best {exact['best']:.2f}, random {exact['random']:.2f}")
    started, rows = time.process_time(), {}
    for seed in arguments.seeds:
        rows[seed] = one_seed(seed, arguments)
        shown = ", ".join(f"{arm} {value:.2f}" for arm, value in rows[seed].items())
        print(f"seed {seed}: {shown}; {time.process_time() - started:.0f} s of CPU so far", flush=True)
    arms = {arm: [row[arm] for row in rows.values()] for arm in rows[arguments.seeds[0]]}
    arms |= {
        f"{arm} - bc": [a - b for a, b in zip(arms[arm], arms["bc"], strict=True)]
        for arm in ("filtered_bc", "awr", "chai")
    }
    table = {}
    for arm, values in arms.items():
        mean = mean_interval(values)
        table[arm] = {"mean": mean.mean, "low": mean.low, "high": mean.high, "seeds": values}
        print(f"{arm:16} {mean.mean:7.2f} [{mean.low:.2f}, {mean.high:.2f}]")
    if arguments.json:
        how = {name: value for name, value in vars(arguments).items() if name != "json"}
        found = {"exact": exact, "settings": how, "machine": machine(), "arms": table}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
