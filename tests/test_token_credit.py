"""Bi-level GAE over rows: the vectors of starpo.json, in both layouts, in any order of rows."""

import random

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("verl")

import torch

from verl_multiturn.rollout.rows import Rows
from verl_multiturn.token_credit import BilevelConfig, bilevel

EIGHT = BilevelConfig(gamma=0.99, lam=0.95, gamma_turn=0.9, whiten=False)
A_8 = [2.34485309, 2.3889985, 2.437, 1.42176335, 1.4107, 1.4]
WHITE_8 = [0.82689932, 0.90905948, 0.99839631, -0.89108683, -0.91167712, -0.93159116]


def rows_of(turns):
    """{key: [(index, span, reward), ...]} as rows."""
    fields = [
        {
            "turns": [{"index": t, "span": list(span), "reward": r} for t, span, r in records],
            "trajectory": {"return": 0.0, "task_type": "x"},
            "reward_extra_info": {},
        }
        for records in turns.values()
    ]
    return Rows.read(list(turns), [{} for _ in turns], fields)


def nested(*lengths):
    return torch.nested.as_nested_tensor([torch.ones(n) for n in lengths], layout=torch.jagged)


def scored(rows, values, lengths, config):
    rewards = np.array([record["reward"] for _, record, _ in rows.places])
    A, G = bilevel(rows, values, rewards, nested(*lengths), config)
    return [row.tolist() for row in A.unbind()], [row.tolist() for row in G.unbind()]


def test_one_row_with_an_observation_in_between():
    """Vector 8: an observation token at index 3, whose value nobody reads."""
    rows = rows_of({"g_0_0": [(0, (0, 3), 1.0), (1, (4, 7), 2.0)]})
    values = [[0.1, 0.2, 0.3, 9.0, 0.4, 0.5, 0.6]]
    (A,), (G,) = scored(rows, values, [7], EIGHT)
    assert A == pytest.approx([*A_8[:3], 0, *A_8[3:]], abs=1e-6)
    assert G == pytest.approx([2.44485309, 2.5889985, 2.737, 0, 1.82176335, 1.9107, 2.0], abs=1e-6)
    (white,), _ = scored(rows, values, [7], BilevelConfig(gamma=0.99, lam=0.95, gamma_turn=0.9))
    assert white == pytest.approx([*WHITE_8[:3], 0, *WHITE_8[3:]], abs=1e-6)


def test_a_row_for_each_turn_is_the_same():
    rows = rows_of({"g_0_1": [(1, (0, 3), 2.0)], "g_0_0": [(0, (0, 3), 1.0)]})
    A, _ = scored(rows, [[0.4, 0.5, 0.6], [0.1, 0.2, 0.3]], [3, 3], EIGHT)
    assert A[1] == pytest.approx(A_8[:3], abs=1e-6) and A[0] == pytest.approx(A_8[3:], abs=1e-6)


def test_a_turn_without_tokens_gives_its_reward_to_the_one_before():
    """Its row holds one masked token; whichever turn is silent, no reward is lost."""
    last = rows_of({"g_0_0": [(0, (0, 2), 1.0)], "g_0_1": [(1, (0, 0), 2.0)]})
    first = rows_of({"g_0_0": [(0, (0, 0), 2.0)], "g_0_1": [(1, (0, 2), 1.0)]})
    plain = BilevelConfig(gamma=1.0, lam=1.0, gamma_turn=1.0, whiten=False)
    assert scored(last, [[0.0, 0.0], [9.0]], [2, 1], plain)[0] == [[3.0, 3.0], [0.0]]
    assert scored(first, [[9.0], [0.0, 0.0]], [1, 2], plain)[0] == [[0.0], [3.0, 3.0]]


def test_padding_and_the_order_of_rows_change_nothing():
    rng = random.Random(3)
    turns = {
        f"g{g}_{s}_{t}": [(t, (0, 1 + (g + t) % 3), rng.random())]
        for g in range(3)
        for s in range(2)
        for t in range(4)
    }
    values = {key: [rng.random() for _ in range(3)] for key in turns}
    keys = list(turns)
    first = dict(
        zip(
            keys, scored(rows_of(turns), [values[k] for k in keys], [3] * 24, BilevelConfig())[0], strict=True
        )
    )
    rng.shuffle(keys)
    mixed = rows_of({key: turns[key] for key in keys})
    padded = Rows(["pad_0_0", *mixed.keys], [place + 1 for place in mixed.real], mixed.fields)
    again = scored(padded, [[7.0] * 3, *(values[k] for k in keys)], [3] * 25, BilevelConfig())[0]
    assert again[0] == [0.0] * 3
    for key, row in zip(keys, again[1:], strict=True):
        assert row == pytest.approx(first[key], abs=1e-6)


@pytest.mark.parametrize("name", ["gamma", "lam", "gamma_turn"])
def test_shares_are_in_range(name):
    with pytest.raises(ValueError, match=rf"bilevel_gae\.{name}=1\.5 must be in"):
        BilevelConfig(**{name: 1.5})
