"""Offline ArCHer against imitation: 20 Questions with ten words, a log half expert, half random play.

    PYTHONPATH=. python tests/bench/bench_offline.py --out results/archer/offline.json

For each seed: a log is played, the small model learns the form of a question from random play, and from
there on the log by `verl-multiturn offline`: all of it (bc), its best tenth (filtered_bc), and all of it
weighed by an IQL critic (awr). Then each plays every word `--samples` times at temperature 1; the last row
lets the critic choose among five utterances of the bc model (CHAI). Exact references:
`environments.twenty_questions_parts.exact`.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from environments.twenty_questions_parts.exact import reference_returns
from verl_multiturn import small_model
from verl_multiturn.critic.offline import OfflineConfig, rerank
from verl_multiturn.critic.replay import history
from verl_multiturn.critic.rerank import load_critic
from verl_multiturn.env import derive_seed, make
from verl_multiturn.measure import machine
from verl_multiturn.model_policy import Chat
from verl_multiturn.offline import Job, run
from verl_multiturn.play_settings import settings
from verl_multiturn.rollout.prompts import View, prompt_policy
from verl_multiturn.samplers import Sampler, _Request
from verl_multiturn.stats import mean_interval

KWARGS = {"words": 10, "questions": "listed", "full": False}
PROMPTS = (
    "multiturn.env=twenty_questions", "multiturn.prompt.first='{observation}'",
    "multiturn.prompt.turn='{history}\n{observation}'", "multiturn.prompt.history=20",
    "multiturn.prompt.history_item='{observation}\n{action}'", "multiturn.prompt.format=''",
    "multiturn.action.tag=null", "multiturn.action.think=false",
)  # fmt: skip
SMALL = ("noise=1.0", "batch=64", "layers=2", "width=32")  # 30 thousand parameters
CRITIC = {"encoder": "ngrams", "hidden": 64, "lr": 1e-3, "gamma": 0.95, "batch": 128, "micro_batch": 128}
ACTOR = {"lr": 3e-3, "batch": 64, "micro_batch": 64}
LONGEST = 12  # tokens of a question


def log(path: Path, episodes: int, seed: int) -> float:
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


def play(folder: Path, samples: int, seed: int, critic: Path | None = None, k: int = 5) -> tuple[float, int]:
    """Mean return of a model over all words, and the number of games; all games go on side by side."""
    config = settings(None, KWARGS, overrides=list(PROMPTS))
    policy = prompt_policy(config.multiturn.prompt)
    sampler = Sampler(str(folder), {"temperature": 1.0})
    chat = Chat(sampler.tokenizer)
    judge = None if critic is None else load_critic(critic)[0]
    games = []
    for word in make("twenty_questions", **KWARGS).words:
        for _ in range(samples):
            env = make("twenty_questions", **KWARGS)
            games.append((env, View(env.instruction, env.reset(word)[0])))
    total, turn, active = 0.0, 0, list(range(len(games)))
    while active:
        offers = k if judge else 1
        requests = []
        for n in active:
            view = games[n][1]
            prompt = chat.build_initial_tokens(policy.messages(view, min(20, len(view.past)), None))
            seeds = (derive_seed(seed, n, turn, offer) for offer in range(offers))
            requests += [_Request(prompt, LONGEST, one, None) for one in seeds]
        texts = [sampler.decode(sample.ids) for sample in sampler.generate(requests)]
        still = []
        for place, n in enumerate(active):
            env, view = games[n]
            offered = texts[place * offers : (place + 1) * offers]
            said = offered[0]
            if judge:
                seen = [*(observation for observation, _ in view.past), view.observation]
                state = history(seen, [action for _, action in view.past])[-1]
                Q = judge.q_values([state] * offers, offered, target=True)
                said = offered[int(rerank(Q[:1], Q[-1:])[0])]
            observation, reward, terminated, truncated, _ = env.step(said)
            view.past.append((view.observation, said))
            view.observation, total = observation, total + reward
            if not (terminated or truncated):
                still.append(n)
        active, turn = still, turn + 1
    return total / len(games), len(games)


def one_seed(seed: int, arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Mean returns by arm."""
    path = folder / "log.jsonl"
    found = {"log": log(path, arguments.episodes, seed)}
    small = [*SMALL, f"steps={arguments.form_steps}", f"seed={seed}"]
    words = [*PROMPTS, *(f"multiturn.small_model.{word}" for word in small)]
    start = small_model.build(settings(None, KWARGS, overrides=words))
    found["start"], _ = play(start, arguments.samples, seed)
    for actor in ("bc", "filtered_bc", "awr"):
        weights = OfflineConfig(actor=actor, epochs=arguments.critic_epochs)
        how = {**ACTOR, "epochs": arguments.epochs, "seed": seed}
        if actor == "filtered_bc":  # as many optimizer steps on fewer turns
            how["epochs"] *= arguments.filtered_times
        out = folder / actor
        run(Job(path, str(start), out, weights, {**CRITIC, "seed": seed}, how, PROMPTS), print)
        found[actor], games = play(out, arguments.samples, seed)
        print(f"seed {seed}: {actor} {found[actor]:.2f} over {games} games", flush=True)
    found["chai"], _ = play(folder / "bc", arguments.samples, seed, folder / "awr")
    return found


def main() -> None:
    """Run all seeds and print a table; numbers go to --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--episodes", type=int, default=200, help="of the log")
    parser.add_argument("--form-steps", type=int, default=40, help="of the warm start on random play")
    parser.add_argument("--epochs", type=int, default=6, help="of the actor")
    parser.add_argument("--filtered-times", type=int, default=4, help="times as many for filtered_bc")
    parser.add_argument("--critic-epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=10, help="games for each word")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    exact = reference_returns(make("twenty_questions", **KWARGS))
    print(f"exact: best {exact['best']:.2f}, random {exact['random']:.2f}")
    rows, started = {}, time.process_time()
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            rows[seed] = one_seed(seed, arguments, Path(folder))
        print(f"seed {seed}: {rows[seed]}, {time.process_time() - started:.0f} s of CPU", flush=True)
    table = {}
    for arm in rows[arguments.seeds[0]]:
        values = [row[arm] for row in rows.values()]
        mean = mean_interval(values)
        table[arm] = {"mean": mean.mean, "low": mean.low, "high": mean.high, "seeds": values}
        print(f"{arm:12} {mean.mean:7.2f} [{mean.low:.2f}, {mean.high:.2f}]")
    difference = mean_interval([row["awr"] - row["bc"] for row in rows.values()])
    print(
        f"awr - bc     {difference.mean:7.2f} [{difference.low:.2f}, {difference.high:.2f}], paired by seed"
    )
    if arguments.out:
        settings_ = {name: value for name, value in vars(arguments).items() if name != "out"}
        found = {"exact": exact, "settings": settings_, "machine": machine(), "arms": table}
        found["awr - bc"] = {"mean": difference.mean, "low": difference.low, "high": difference.high}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
