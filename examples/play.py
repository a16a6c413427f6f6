"""Play an environment in the terminal, yourself or by policy.

    python examples/play.py frozen_lake
    python examples/play.py sokoban --who expert --seed 7
    python examples/play.py examples/new_environment.py:GuessNumber --who random

An empty line asks the scripted expert.
"""

import argparse
import random

from verl_multiturn.env import Env, make
from verl_multiturn.policies import Policy, expert_policy, random_policy


def ask(env: Env, observation: str) -> str:
    """The human policy."""
    return input("> ").strip() or env.expert()


def play(env: Env, policy: Policy, seed: int) -> None:
    """One episode, shown turn by turn."""
    observation, info = env.reset(seed)
    print(f"{env.instruction}\n\ntask {seed} ({info['task_type']})\n{observation}")
    total, ended = 0.0, False
    while not ended:
        action = policy(env, observation)
        observation, reward, terminated, truncated, info = env.step(action)
        total, ended = total + reward, terminated or truncated
        mark = "" if info["valid"] else " (not an action)"
        print(f"\nturn {env.turn} of {env.max_turns}: {action}{mark}\n{observation}\nreward {reward:g}")
    how = "solved" if info["success"] else "out of turns" if truncated else "failed"
    print(f"\n{how}; return {total:g}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Play an environment in the terminal.")
    parser.add_argument("env", help="a name for make, e.g. frozen_lake")
    parser.add_argument("--who", choices=["human", "random", "expert"], default="human")
    parser.add_argument("--seed", type=int, default=0, help="the task")
    args = parser.parse_args()
    policies = {
        "human": ask,
        "random": random_policy(random.Random(args.seed)),
        "expert": expert_policy,
    }
    play(make(args.env), policies[args.who], args.seed)


if __name__ == "__main__":
    main()
