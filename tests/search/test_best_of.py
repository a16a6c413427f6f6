"""Best of n: what is merged, what is chosen, and that nothing is carried out before."""

import json
import random
from collections import Counter
from math import exp
from pathlib import Path
from typing import ClassVar

import pytest

from environments.frozen_lake import FrozenLake
from verl_multiturn.base_env import Env
from verl_multiturn.env import make
from verl_multiturn.exact import exact_values
from verl_multiturn.search.best_of import SELECT, Candidate, act, choose, merge, oracle, scored
from verl_multiturn.search.rules import Rules

V9 = json.loads((Path(__file__).parents[1] / "data" / "qvalue_vectors.json").read_text())["V9_best_of_n"]


def uniform(observation, history, n, rng):
    return [rng.choice(["up", "down", "left", "right"]) for _ in range(n)]


# ------------------------------------------------------------------ merging and choosing


def test_equal_actions_are_merged_and_the_first_of_the_best_wins():
    found = merge(V9["raw"])
    assert [one.action.lower().strip() for one in found] == V9["canonical_unique"]
    assert [one.action for one in found] == ["Search[x]", "lookup[y]", "finish[z]"]  # the first spelling
    assert {one.action.lower(): one.votes for one in found} == V9["votes"]
    assert [one.place for one in found] == [0, 2, 3]
    chosen = choose(scored(found, [V9["q"][one.action.lower()] for one in found]))
    assert chosen.action.lower() == V9["pick"]


def test_answers_without_an_action_are_one_candidate():
    found = merge(["I think", "<a>up</a>", "who knows"], ["", "up", ""])
    assert [(one.text, one.votes) for one in found] == [("I think", 2), ("<a>up</a>", 1)]


def test_each_rule():
    found = [Candidate("a", "a", 1, 0, 0.3), Candidate("b", "b", 3, 1, 0.1), Candidate("c", "c", 1, 4, 0.3)]
    assert choose(found).action == "a" and choose(found, "oracle").action == "a"
    assert choose(found, "majority").action == "b"
    rng, draws = random.Random(1), 4000
    votes = Counter(choose(found, "random", rng).action for _ in range(draws))
    assert votes["b"] / draws == pytest.approx(0.6, abs=0.03)
    soft = Counter(choose(found, "softmax", rng, tau=0.2).action for _ in range(draws))
    assert soft["b"] / draws == pytest.approx(1 / (1 + 2 * exp(1)), abs=0.03)
    more = [Candidate("a", "a", 1, 0, 0.3), Candidate("c", "c", 2, 1, 0.3)]
    assert choose(more).action == "c"  # equal scores: the one that was said more often
    huge = [Candidate("a", "a", 1, 0, -1e6), Candidate("b", "b", 1, 1, 1e6)]
    assert choose(huge, "softmax", rng).action == "b"


def test_what_cannot_be_chosen_is_named():
    bare = [Candidate("a", "a", 1, 0)]
    for given, said in (
        (
            (bare, "agrmax"),
            "unknown rule to select a candidate 'agrmax'; valid: argmax.*Did you mean 'argmax'",
        ),
        (([], "majority"), "there is no candidate: the policy answered nothing"),
        ((bare, "argmax"), "select=argmax needs a score of every candidate"),
        ((bare, "random"), "select=random needs an rng"),
        ((scored(bare, [1.0]), "softmax", random.Random(1), 0.0), "needs an rng and tau > 0"),
    ):
        with pytest.raises(ValueError, match=said):
            choose(*given)
    for scores in ([], [1.0, 2.0], [float("nan")]):
        with pytest.raises(ValueError, match="needs one finite score for each of 1 candidates"):
            scored(bare, scores)


def test_rules_of_a_comparison():
    rules = Rules(["greedy", "argmax", "random"], 5, "folder")
    assert [rules.label(rule) for rule in rules.select] == ["greedy", "Q-guided best of 5", "random of 5"]
    with pytest.raises(ValueError, match="unknown rule of --select 'argmx'; valid: greedy, argmax"):
        Rules(["argmx"])
    with pytest.raises(ValueError, match="--select argmax needs a Q model: give --q-model FOLDER"):
        Rules(["argmax"])
    with pytest.raises(ValueError, match="names a rule twice: greedy,greedy"):
        Rules(["greedy", "greedy"])


# ------------------------------------------------------------------ acting


class Watched(FrozenLake):
    """Writes down what is carried out."""

    steps: ClassVar[list[tuple[int, str]]] = []

    def step(self, action):
        self.steps.append((self.turn, action))
        return super().step(action)


@pytest.mark.parametrize("select", SELECT)
def test_only_the_chosen_action_is_carried_out(select):
    env, steps = Watched(slip=0.3), Watched.steps
    steps.clear()
    env.reset(3)
    choice = act(uniform, env, select=select, score=lambda o, h, a: range(len(a)), seed=4)
    assert env.turn == 1 and steps[-1] == (0, choice.chosen.action)
    assert len(steps) == 1 or select == "oracle"  # which tries them in a state that it puts back
    assert sum(one.votes for one in choice.candidates) == 5
    again = make("frozen_lake", slip=0.3)
    again.reset(3)
    assert again.step(choice.chosen.action) == choice.result  # the noise was not touched


def exact(env):
    """The exact Q of the best play as a score."""
    Q = exact_values(env, "optimal", gamma=0.99).Q
    return lambda observation, history, actions: [
        Q[env.position, env.max_turns - env.turn][action] for action in actions
    ]


def episodes(select, seeds, n=5, score=None):
    env, wins = make("frozen_lake"), []
    for seed in seeds:
        observation, _ = env.reset(seed)
        value, history, over = exact(env) if score else None, (), False
        while not over:
            choice = act(uniform, env, n, select, value, seed=f"{seed} {env.turn}", history=history)
            history += ((observation, choice.chosen.action),)
            observation, _, terminated, truncated, info = choice.result
            over = terminated or truncated
        wins.append(info["success"])
    return wins


def test_with_the_exact_values_it_reaches_the_oracle():
    guided = episodes("argmax", range(40), score=True)
    assert guided == episodes("oracle", range(40))
    alone = episodes("random", range(40))
    assert sum(guided) > sum(alone) + 10
    assert sum(episodes("oracle", range(40), n=1)) == pytest.approx(sum(alone), abs=8)  # n = 1: no choice


def test_an_oracle_puts_the_environment_back():
    env = make("frozen_lake", slip=0.5)
    env.reset(5)
    env.step("up")
    before = env.snapshot()
    values = oracle(env, ["up", "down", "left", "right"])
    assert env.snapshot() == before and all(-0.001 < value < 1 for value in values)
    assert oracle(env, ["up", "down", "left", "right"]) == values
    assert oracle(env, ["up"], left=1)[0] <= values[0]


class Bare(Env):
    """Without an expert, and without snapshots if told so."""

    def __init__(self, snapshots="copy"):
        self.snapshots = snapshots

    def _reset(self, seed):
        return "start", {}

    def _step(self, action):
        return "on", 0.0, False, {}


def test_an_oracle_that_cannot_be_is_refused():
    for env, said in (
        (Bare("none"), "snapshots, which Bare does not have"),
        (Bare(), "Bare has no scripted"),
    ):
        env.reset(0)
        with pytest.raises(ValueError, match=said):
            oracle(env, ["a"])
    env = make("frozen_lake")
    observation, _ = env.reset(1)
    with pytest.raises(ValueError, match="select=argmax needs a score"):
        act(uniform, env)
    with pytest.raises(ValueError, match="there is no candidate"):
        act(lambda *a: [], env, select="majority")
    with pytest.raises(ValueError, match="n must be a whole number of answers from 1 on, not '"):
        act(uniform, env, observation)
    assert env.turn == 0


def test_what_is_not_given_is_read_off_the_environment():
    env, read = make("frozen_lake"), []
    observation, _ = env.reset(3)

    def policy(observation, history, n, rng):
        read.append((observation, history, n))
        return uniform(observation, history, n, rng)

    choice = act(policy, env, n=3, select="random")
    act(policy, env, 2, "random", history=((observation, choice.chosen.action),))
    act(policy, env, 1, "random", observation="elsewhere")
    after = choice.result[0]
    assert read[0] == (observation, (), 3) and read[1] == (after, ((observation, choice.chosen.action),), 2)
    assert read[2] == ("elsewhere", (), 1)


def test_a_q_model_below_the_home_folder_is_told_apart_by_its_content(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "q_model.json").write_text("{}")
    there, here = (Rules(["argmax"], q_model=q).about("argmax") for q in (str(tmp_path / "q"), "~/q"))
    assert here["q_model_hash"] == there["q_model_hash"]
