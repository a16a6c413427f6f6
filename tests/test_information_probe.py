"""The rows that measure mutual information: every reasoning behind every prompt, scored as they stand."""

import math

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("verl")

import torch
from tensordict import TensorDict

from verl_multiturn.information_probe import InformationProbe
from verl_multiturn.rollout.rows import Rows

WORDS = {1: "<think>", 2: "a", 3: "b", 4: "</think>", 5: "x", 6: "</", 7: "think>"}
WORDS |= {10: "<think>\n", 11: ".</think>"}


def decode(ids):
    return "".join(WORDS[i] for i in ids)


def rows_of(spans):
    """{key: spans of its turns} as rows."""
    fields = [
        {
            "turns": [{"index": t, "span": list(span)} for t, span in enumerate(row)],
            "trajectory": {},
            "reward_extra_info": {},
        }
        for row in spans.values()
    ]
    return Rows.read(list(spans), [{} for _ in spans], fields)


def drawn(spans, prompts, responses, think=True, rule="first_turn", samples=8):
    rng = np.random.default_rng(0)
    return InformationProbe.draw(rows_of(spans), prompts, responses, decode, think, samples, rule, rng)


def test_a_reasoning_ends_where_it_is_closed():
    """Also where the tag is two tokens; one that is never closed is not drawn. Tags are no part of it."""
    spans = {"g_0_0": [(0, 4)], "g_1_0": [(0, 5)], "h_0_0": [(0, 2)]}
    probe = drawn(spans, [[8], [8], [9]], [[1, 2, 4, 5], [1, 3, 6, 7, 5], [1, 2]])
    assert probe.prompts == [[8, 1]] and probe.reasonings == [[2], [3]] and probe.own == [0, 0]
    assert drawn({"h_0_0": [(0, 2)]}, [[9]], [[1, 2]]) is None
    whole = drawn({"h_0_0": [(0, 2)]}, [[9]], [[1, 2]], think=False)
    assert whole.reasonings == [[1, 2]]


def test_the_prompt_of_a_later_turn_is_all_that_stood_before():
    """One row, two turns with glue between: the second prompt holds the first utterance."""
    spans = {"g_0_0": [(0, 3), (5, 8)]}
    responses = [[1, 2, 4, 9, 9, 1, 3, 4]]
    probe = drawn(spans, [[8]], responses, rule="trajectory", samples=16)
    assert sorted(probe.prompts, key=len) == [[8, 1], [8, 1, 2, 4, 9, 9, 1]]
    for own, reasoning in zip(probe.own, probe.reasonings, strict=True):
        assert (probe.prompts[own], reasoning) in [([8, 1], [2]), ([8, 1, 2, 4, 9, 9, 1], [3])]


@pytest.mark.parametrize(
    ("spoken", "before", "reasoning"),
    [
        ([5, 1, 2, 3, 4, 5], [5, 1], [2, 3]),  # what stands before the tag is before the reasoning
        ([2, 3, 4, 5], [], [2, 3]),  # the prompt ended with the tag
        ([10, 2, 11, 5], [10], [2]),  # tokens that are a tag and something else
        ([1, 2, 4, 1, 3, 4], [1], [2]),  # the first one
    ],
)
def test_the_tags_are_around_a_reasoning(spoken, before, reasoning):
    probe = drawn({"g_0_0": [(0, len(spoken))]}, [[8]], [spoken])
    assert probe.prompts == [[8, *before]] and probe.reasonings == [reasoning]


@pytest.mark.parametrize("spoken", [[1, 4], [4, 2], [1, 2], [2, 4, 1, 3]])
def test_what_is_no_reasoning(spoken):
    """Nothing between the tags, nothing before the closing one, never closed, closed before it is opened."""
    assert drawn({"g_0_0": [(0, len(spoken))]}, [[8]], [spoken]) is None


def test_every_reasoning_stands_behind_every_prompt():
    spans = {"g_0_0": [(0, 4)], "h_0_0": [(0, 3)]}
    probe = drawn(spans, [[8, 8], [9]], [[1, 2, 3, 4], [1, 3, 4]])
    keys = probe.keys(3)
    assert len(keys) == 6 and len(set(keys)) == 6  # 4 pairs, filled up for three ranks
    fields, tags = probe.fields(keys), probe.tags(keys, step=7)
    assert [row.tolist() for row in fields["input_ids"].unbind()][:4] == [
        [8, 8, 1, 2, 3], [9, 1, 2, 3], [8, 8, 1, 3], [9, 1, 3]
    ]  # fmt: skip
    assert [tag["seq_len"] for tag in tags] == [5, 4, 4, 3, 5, 5] and tags[0]["global_steps"] == 7
    assert fields["response_mask"].unbind()[0].tolist() == [1, 1]


def test_estimates_from_what_the_actor_wrote():
    """Two prompts, each reasoning twice as likely behind its own: I = log 2 − log 1.5 per reasoning."""
    spans = {"g_0_0": [(0, 2)], "h_0_0": [(0, 2)]}
    probe = drawn(spans, [[8], [9]], [[1, 4], [2, 4]], think=False)
    keys = probe.keys(1)
    fields = probe.fields(keys)
    own, other = math.log(0.5) / 2, math.log(0.25) / 2
    # verl's log-probabilities cover prompt and response, shifted by one: the response's last two count.
    rows = [torch.tensor([p, p, 0.0]) for p in (own, other, other, own)]
    data = TensorDict(
        {
            "log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
            "response_mask": fields["response_mask"],
        },
        batch_size=4,
    )
    found = probe.estimates(data)
    assert found["mi_sequence"] == pytest.approx(math.log(2) - math.log(1.5))
    # The z-score against a moving average of the std; everything else is the sample's.
    seen = []
    again = probe.estimates(data, lambda std: seen.append(std) or 0.5)
    assert seen == [found["mi_marginal_std"]] and again["mi_marginal_std"] == found["mi_marginal_std"]
    scale = (found["mi_marginal_std"] + 1e-3) / (0.5 + 1e-3)
    assert again["mi_z_score"] == pytest.approx(found["mi_z_score"] * scale)
