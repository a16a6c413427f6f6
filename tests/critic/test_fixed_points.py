"""|Q − Q_dp| of the real critic, over all pairs: a chain of two states, Twenty Questions with ten words.

More steps, seeds and rules for V: tests/bench/bench_fixed_points.py, results/archer/fixed_points.md.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from environments.twenty_questions_parts.exact import reference_returns
from verl_multiturn.exact import exact_values

SPEC = importlib.util.spec_from_file_location(
    "bench_fixed_points", Path(__file__).parents[1] / "bench" / "bench_fixed_points.py"
)
bench = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench)


@pytest.fixture(scope="module")
def game():
    return bench.Game()


def test_the_chain_in_closed_form():
    """V of the policy has no noise here, its utterances come in exact shares; sarsa's comes from draws."""
    problem, rates = bench.chain(), ((2, 3e-3), (4, 2e-4))
    for change, uniform, bound in (({}, False, 0.01), ({"v_target": "sarsa"}, True, 0.05)):
        critic = bench.learn(problem, 1, rates=rates, batch=64, micro_batch=64, **change)
        found = bench.errors(critic, *bench.truth(problem, uniform))
        assert found["q_max"] < bound and found["v_max"] < bound, (change, found)
    gap = max(abs(problem.Q[pair] - problem.uniform[pair]) for pair in problem.Q)
    assert gap > 0.1, "policy and behaviour differ by more than the tolerance"


def test_the_game_of_the_environment_is_the_one_that_is_solved(game):
    """Every transition that was played has the chance and the reward that dynamic programming reads."""
    problem = game.problem()
    assert (len(problem.policy), len(problem.Q), len(problem.rows)) == (33, 89, 329)
    exact = exact_values(game, "optimal").start
    assert exact == pytest.approx(reference_returns(game.env)["best"]) == pytest.approx(-2.8)
    by_hand = {}
    for row in problem.rows:
        pair = row.state, row.action
        after = 0.0 if row.done else sum(
            p * problem.Q[row.next_state, a] for a, p in problem.policy[row.next_state].items()
        )  # fmt: skip
        by_hand.setdefault(pair, []).append(row.reward + bench.GAMMA * after)
    for pair, targets in by_hand.items():
        assert sum(targets) / len(targets) == pytest.approx(problem.Q[pair], abs=1e-9), pair


def test_ten_words_by_dynamic_programming(game):
    """1,200 updates; the largest of 178 errors, and that of V at each state."""
    torch.set_num_threads(1)
    problem = game.problem()
    critic = bench.learn(problem, 1)
    found = bench.errors(critic, *bench.truth(problem))
    assert found["q_max"] < 0.05 and found["q_mean"] < 0.02 and found["v_max"] < 0.05, found
    start, (Q, V) = next(iter(problem.policy)), bench.truth(problem)
    asked = list(game.menu(game.start_state()).values())
    A, exact = critic.advantage([start] * 3, asked), [Q[start, a] - V[start] for a in asked]
    assert pytest.approx(exact, abs=0.1) == A
    assert exact[0] < -0.2 and exact[1] > 0.2 and A[0] < 0 < A[1], "a guess, a question that splits in halves"
