"""Rows: what travels through verl comes back as the turns it was made of, in both layouts."""

import copy
import itertools
import json
import random
from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import verl_multiturn as vm
from verl_multiturn.rollout.rows import SIMILARITY, Rows, scores, to_outputs, to_records
from verl_multiturn.runs import to_turns
from verl_multiturn.steps import numbered
from verl_multiturn.turns import Trajectory, Turn, TurnBatch

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "gigpo_vectors.json").read_text())
LAYOUTS = ("turn", "trajectory")
both = pytest.mark.parametrize("layout", LAYOUTS)


def trajectory(group, sample, turns, terminated=True, texts=None):
    """A trajectory as `Episode.play` returns it; a turn is (anchor, reward, utterance, glue, valid)."""
    made, details = [], []
    for t, (anchor, reward, utterance, glue, valid) in enumerate(turns):
        log_probs = [-0.5 - 0.25 * n for n in range(len(utterance))]
        made.append(Turn(glue, utterance, log_probs, anchor, reward, action_text=f"say {t}", valid=valid))
        detail = {
            "observation": f"room {anchor}", "prompt": f"see {anchor}", "actions": [f"say {t}"],
            "thinks": True, "dropped_turns": 0, "dropped_actions": 0, "generate_seconds": 0.5,
            "env_seconds": 0.25,
            "extra": {"min_global_steps": 4 + t, "max_global_steps": 5 + t},
        }  # fmt: skip
        details.append(detail)
    info = {
        "env": "maze", "task": "7", "seed": 7, "task_type": "default", "dynamics_seed": 9,
        "instruction": "leave", "truncation": None if terminated else "turns", "seconds": 1.5,
        "details": details,
    }  # fmt: skip
    return Trajectory(group, sample, made, terminated, not terminated, success=terminated, info=info)


def turn(anchor="s", reward=0.0, utterance=(1, 2), glue=(8, 9), valid=True):
    return anchor, reward, list(utterance), list(glue), valid


def example():
    """Two groups, one of whose uids holds an underscore; repeated anchors; one empty utterance."""
    return [
        trajectory("a_1", 0, [turn("s0"), turn("s1", 1.0, (3, 4, 5))]),
        trajectory("a_1", 1, [turn("s0", 0.5), turn("s2", valid=False), turn("s1", 0.0, (6,), (7,))], False),
        trajectory("b", 0, [turn("s0"), turn("s0", 0.0, ()), turn("s1", 2.0)]),
        trajectory("b", 1, [turn("s0", -1.0)]),
    ]


class Batch:
    """What a trainer fetches of verl's batch: rows made by verl's own `as_dict`, in this order."""

    def __init__(self, trajectories, layout, keep_text=False, shuffle=None):
        rows = [
            (f"{one.group}_{one.trajectory}_{n}", output.as_dict())
            for one in trajectories
            for n, output in enumerate(to_outputs(one, layout, 0, keep_text))
        ]
        if shuffle is not None:
            random.Random(shuffle).shuffle(rows)
        self.keys, self.data = map(list, zip(*rows, strict=True))
        self.tags = [{"is_padding": False} for _ in rows]

    def pad(self, n, at):
        """Insert clones of row 0, as verl pads: other uids, the same extra_fields, mask 0."""
        for k in range(n):
            clone = copy.deepcopy(self.data[0])
            clone["response_mask"] = torch.zeros_like(clone["response_mask"])
            self.keys.insert(at, f"padding{k}_0_0")
            self.data.insert(at, clone)
            self.tags.insert(at, {"is_padding": True})
        return self

    @property
    def rows(self):
        return Rows.read(self.keys, self.tags, [row["extra_fields"] for row in self.data])

    def column(self, name):
        return [row[name].tolist() for row in self.data]

    @property
    def mask(self):
        return torch.nested.as_nested_tensor([row["response_mask"] for row in self.data], layout=torch.jagged)


def by_turn(turns, values):
    """(group, trajectory, index) -> value."""
    names = zip(turns.group, turns.trajectory, turns.index, strict=True)
    return dict(zip([(g, int(m), int(t)) for g, m, t in names], values, strict=True))


def credit(trajectories, layout, algorithm="gigpo", **how):
    """The advantage of every turn, by name."""
    turns = Batch(trajectories, layout, **how).rows.turns()
    return by_turn(turns, vm.advantages(algorithm, turns).tolist())


# ------------------------------------------------------------------ rows -> TurnBatch


@both
def test_round_trip(layout):
    turns, direct = Batch(example(), layout).rows.turns(), TurnBatch.from_trajectories(example())
    assert len(turns) == len(direct) == 9
    for name in ("reward", "anchor", "terminated", "truncated", "tokens", "valid"):
        there, here = by_turn(turns, getattr(turns, name)), by_turn(direct, getattr(direct, name))
        assert there == here, name
    assert all(isnan(value) for value in turns.value)


def test_both_layouts_give_the_same_turns_and_advantages():
    one, other = (Batch(example(), layout).rows.turns() for layout in LAYOUTS)
    for name in vars(one):
        if name != "anchor_text":
            assert np.array_equal(getattr(one, name), getattr(other, name), equal_nan=name.endswith("value"))
    for algorithm in ("gigpo", "grpo", "rloo", "reinforce"):
        first = credit(example(), "turn", algorithm)
        assert first == credit(example(), "trajectory", algorithm) and any(first.values())


@both
def test_advantages_are_those_of_the_trajectories(layout):
    """Through rows, verl's types and back: bit for bit what the algorithm gives on the trajectories."""
    direct = TurnBatch.from_trajectories(example())
    assert credit(example(), layout) == by_turn(direct, vm.advantages("gigpo", direct).tolist())


@both
@pytest.mark.parametrize("at", [0, 2])
def test_padding_rows_are_dropped(layout, at):
    batch, padded = Batch(example(), layout), Batch(example(), layout).pad(3, at)
    one, other = batch.rows.turns(), padded.rows.turns()
    assert len(one) == len(other) and set(other.group) == {"a_1", "b"}
    assert by_turn(one, vm.advantages("gigpo", one)) == by_turn(other, vm.advantages("gigpo", other))
    assert padded.rows.sessions() == batch.rows.sessions()
    spread = padded.rows.spread(np.ones(len(other)), padded.mask).unbind()
    assert all(not part.any() for part, tag in zip(spread, padded.tags, strict=True) if tag["is_padding"])
    assert sum(float(part.sum()) for part in spread) == sum(one.tokens)


def test_wrapped_extra_fields_are_unwrapped():
    """A TensorDict hands over NonTensorData."""
    from tensordict import NonTensorData

    batch = Batch(example(), "turn")
    wrapped = [NonTensorData(row["extra_fields"]) for row in batch.data]
    assert Rows.read(batch.keys, batch.tags, wrapped).fields == batch.rows.fields


def test_every_row_carries_the_whole_return():
    """verl copies the last row's score onto a session's other rows; the versions are the session's."""
    outputs = to_outputs(example()[1], "turn")
    assert [output.reward_score for output in outputs] == [0.5] * 3
    for output in outputs:
        fields = output.extra_fields
        assert (fields["min_global_steps"], fields["max_global_steps"]) == (4, 7)
        assert fields["reward_extra_info"]["valid"] == pytest.approx(2 / 3)
        assert fields["trajectory"]["return"] == 0.5 and "details" not in fields["trajectory"]
        assert output.num_turns == 3
    assert [output.metrics.generate_sequences for output in outputs] == [0.5] * 3
    assert to_outputs(example()[1], "trajectory")[0].metrics.tool_calls == 0.75


def test_records_are_plain_json():
    for output in to_outputs(example()[0], "trajectory", keep_text=True):
        assert json.loads(json.dumps(output.extra_fields)) == json.loads(json.dumps(output.extra_fields))


def test_what_makes_turns_invalid_adds_up():
    """Four turns: all right, no thought, no action, an action the environment does not know."""
    told = trajectory("a", 0, [turn(), *[turn(valid=False)] * 3])
    for t, (thinks, actions) in enumerate([(True, ["up"]), (False, []), (True, []), (True, ["fly"])]):
        told.info["details"][t] |= {"thinks": thinks, "actions": actions}
    found = scores(told)
    assert (found["valid"], found["valid_think"]) == (0.25, 0.75)
    assert (found["missing_action"], found["unknown_action"]) == (0.25, 0.25)
    assert 1 - found["valid"] == 1 - found["valid_think"] + found["missing_action"] + found["unknown_action"]
    for detail in told.info["details"]:
        detail["thinks"] = None
    assert "valid_think" not in scores(told) and scores(told)["missing_action"] == 0.5


def test_sessions():
    sessions = Batch(example(), "turn", shuffle=1).rows.sessions()
    assert set(sessions) == {"a_1_0", "a_1_1", "b_0", "b_1"}
    assert sessions["a_1_1"]["truncated"] and sessions["a_1_1"]["scores"]["turns"] == 3


@both
def test_values_are_those_before_the_first_token_of_an_utterance(layout):
    """Also where the utterance is empty, even as the last of a row: verl has no value behind a row."""
    trajectories = [*example(), trajectory("c", 0, [turn("s0"), turn("s1", 0.0, ())])]
    batch = Batch(trajectories, layout).pad(1, 0)
    values = [[100.0 * n + k for k in range(len(r))] for n, r in enumerate(batch.column("responses"))]
    turns = batch.rows.turns([torch.tensor(row) for row in values])
    for (row, record, _), value in zip(batch.rows.places, turns.value, strict=True):
        assert value == 100 * row + min(record["span"][0], len(values[row]) - 1)


@both
def test_a_critic_meets_truncated_episodes(layout):
    """verl has no value behind the last token: V counts as 0 there, as in verl's own GAE."""
    batch = Batch([trajectory("g", 0, [turn("s0", 1.0), turn("s1", 2.0)], terminated=False)], layout)
    values = [[0.25] * len(row) for row in batch.column("responses")]
    turns = batch.rows.turns(values)
    A = by_turn(turns, vm.advantages("turn_gae", turns).tolist())
    assert A == {("g", 0, 0): 3 - 0.25, ("g", 0, 1): 2 - 0.25} and turns.truncated.sum() == 1


def test_text_for_similarity():
    turns = Batch(example(), "turn", keep_text=True).rows.turns()
    assert turns.anchor_text[0].startswith("room s") and len(turns.anchor_text) == 9
    assert SIMILARITY not in Batch(example(), "turn").rows.places[0][1]


def test_log_probs_are_all_or_none():
    one = example()[0]
    bare = Turn([8, 9], [1], None, "s", 0.0)
    one.turns[1] = bare
    assert to_outputs(one, "trajectory")[0].response_logprobs is None
    assert [o.response_logprobs is None for o in to_outputs(one, "turn")] == [False, True]


# ------------------------------------------------------------------ advantages -> tokens


def test_spread_vector_19():
    """One row, two utterances with glue between them, as the vector's masks say."""
    vector = VECTORS["19_broadcast_to_tokens"]
    rows, masks = [], vector["in"]["mask"]
    for n, (A, mask) in enumerate(zip(vector["in"]["A"], masks, strict=True)):
        marked, spans = [*mask, 0], []
        for k, one in enumerate(marked):
            if one and (not k or not marked[k - 1]):
                spans.append([k, k + marked[k:].index(0)])
        rows.append(([A] * len(spans), spans, f"u_{n}_0"))
    fields = [
        {"turns": [{"span": span} for span in spans], "trajectory": {}, "reward_extra_info": {}}
        for _, spans, _ in rows
    ]
    read = Rows.read([key for *_, key in rows], [{}] * len(rows), fields)
    per_turn = np.array([A for As, *_ in rows for A in As])
    nested = torch.nested.as_nested_tensor([torch.tensor(m) for m in masks], layout=torch.jagged)
    spread = read.spread(per_turn, nested)
    assert spread.is_nested and spread.dtype == torch.float32
    assert [row.tolist() for row in spread.unbind()] == vector["out"]


@both
def test_spread_follows_the_mask(layout):
    batch = Batch(example(), layout, shuffle=5).pad(2, 1)
    mask = batch.mask
    numbers = np.arange(1.0, 10.0)
    spread = batch.rows.spread(numbers, mask)
    assert torch.equal(spread.offsets(), mask.offsets())
    for row, marked in zip(spread.unbind(), mask.unbind(), strict=True):
        assert torch.equal(row != 0, marked != 0)
    tokens = batch.rows.turns().tokens
    assert sum(float(row.sum()) for row in spread.unbind()) == float(numbers @ tokens)


# ------------------------------------------------------------------ records


@both
def test_records_hold_the_tokens_of_every_row(layout):
    batch = Batch([one for one in example() if one.group != "b"], layout, shuffle=3).pad(2, 0)
    rows = batch.rows
    turns = rows.turns()
    A = vm.advantages("gigpo", turns)
    spread = [row.tolist() for row in rows.spread(A, batch.mask).unbind()]
    columns = batch.column("prompts"), batch.column("responses"), batch.column("rollout_log_probs")
    records = to_records(rows, *columns, spread, "train", 12)
    assert [(r["group"], r["trajectory"]) for r in records] == [("a_1", 0), ("a_1", 1)]
    numbers = by_turn(turns, A.tolist())
    for record in records:
        session = f"{record['group']}_{record['trajectory']}"
        assert [t["index"] for t in record["turns"]] == list(range(len(record["turns"])))
        streams = {}
        for one in record["turns"]:
            streams.setdefault(one["row"], []).extend(one["prompt_ids"] + one["action_ids"])
            name = record["group"], record["trajectory"], one["index"]
            assert one["advantage"] == pytest.approx(numbers[name], rel=1e-6)
            assert one["value"] is None and "glue" not in one
            assert len(one["log_probs"]) == len(one["action_ids"])
            assert one["log_probs"][0] == -0.5  # that of the first sampled token, not of glue
        for number, stream in streams.items():
            row = batch.keys.index(f"{session}_{number}")
            assert stream == columns[0][row] + columns[1][row]
        assert record["split"] == "train" and record["step"] == 12


def test_records_without_advantages_and_with_an_empty_utterance():
    batch = Batch(example(), "trajectory")
    rows = batch.rows
    records = to_records(rows, batch.column("prompts"), batch.column("responses"), None, None, "val", 1)
    empty = records[2]["turns"][1]
    assert empty["action_ids"] == [] and empty["advantage"] is None and empty["log_probs"] is None
    spread = rows.spread(np.ones(9), batch.mask)
    columns = batch.column("prompts"), batch.column("responses"), None
    trained = to_records(rows, *columns, [row.tolist() for row in spread.unbind()], "train", 1)
    assert [t["advantage"] for t in trained[2]["turns"]] == [1.0, None, 1.0]


# ------------------------------------------------------------------ steps inside an utterance


def stepped():
    """The example with every utterance cut in front of its second token; values count all steps up."""
    found, value = example(), iter(range(1, 99))
    for one in found:
        for turn_, detail in zip(one.turns, one.info["details"], strict=True):
            size = len(turn_.action_ids)
            bounds = [0, 1, size] if size > 1 else [0, size]
            spans = itertools.pairwise(bounds)
            detail["steps"] = [{"span": list(span), "value": float(next(value))} for span in spans]
    return found


@both
@pytest.mark.parametrize("shuffle", [None, 5])
def test_credit_by_step(layout, shuffle):
    """Each token has the number of its step; counts, values, rewards and lengths are those of the steps."""
    batch = Batch(stepped(), layout, shuffle=shuffle).pad(2, 1)
    steps = batch.rows.by_step()
    turns = steps.turns()
    numbers = by_turn(turns, turns.value.tolist())
    assert [numbers["a_1", 0, t] for t in range(4)] == [1, 2, 3, 4]
    assert by_turn(turns, turns.reward.tolist())["a_1", 0, 3] == 1 and turns.reward.sum() == 2.5
    assert by_turn(turns, turns.tokens.tolist())["a_1", 0, 3] == 2
    spread = steps.spread(turns.value, batch.mask)
    for row, marked in zip(spread.unbind(), batch.mask.unbind(), strict=True):
        assert torch.equal(row != 0, marked != 0)
    columns = batch.column("prompts"), batch.column("responses"), None
    records = to_records(batch.rows, *columns, [row.tolist() for row in spread.unbind()], "train", 1)
    for record in records:
        for one in record["turns"]:
            assert "step" not in one and one["value"] == one["steps"][0]["value"]
            assert one["advantage"] == one["steps"][0]["advantage"]
            for step in one["steps"]:
                a, b = step["span"]
                assert step["advantage"] == (step["value"] if a < b else None)
                assert spread[batch.keys.index(f"{record['group']}_{record['trajectory']}_{one['row']}")][
                    one["span"][0] + a : one["span"][0] + b
                ].tolist() == [step["value"]] * (b - a)
    again = to_turns([one | {"turns": numbered(one["turns"])} for one in records])
    for name in ("value", "reward", "tokens", "index"):
        assert by_turn(again, getattr(again, name).tolist()) == by_turn(turns, getattr(turns, name).tolist())


@both
def test_without_steps_the_rows_are_the_same(layout):
    rows = Batch(example(), layout).rows
    assert rows.by_step() is rows


# ------------------------------------------------------------------ what must change nothing


utterance = st.lists(st.integers(1, 9), max_size=4)
turn_strategy = st.builds(
    turn, st.sampled_from(["s0", "s1", "s2"]), st.sampled_from([0.0, 1.0, -0.5]), utterance, utterance
)
batches = st.lists(
    st.tuples(st.sampled_from("ab"), st.lists(turn_strategy, min_size=1, max_size=4), st.booleans()),
    min_size=1,
    max_size=5,
).map(
    lambda drawn: [
        trajectory(group, n, [(a, r, u, g or [9], v) for a, r, u, g, v in turns], terminated)
        for n, (group, turns, terminated) in enumerate(drawn)
    ]
)
quick = settings(max_examples=25, deadline=None)


@quick
@given(batches, st.sampled_from(LAYOUTS), st.integers(1, 5))
def test_longer_observations_change_no_advantage(trajectories, layout, more):
    longer = copy.deepcopy(trajectories)
    for one in longer:
        one.turns = [replace(t, prompt_ids=t.prompt_ids + [9] * more) for t in one.turns]
    assert credit(longer, layout) == credit(trajectories, layout)


@quick
@given(batches, st.sampled_from(LAYOUTS), st.integers(0, 99))
def test_permuted_rows_change_nothing(trajectories, layout, seed):
    one, other = credit(trajectories, layout), credit(trajectories, layout, shuffle=seed)
    assert one.keys() == other.keys()
    assert [one[name] for name in one] == pytest.approx([other[name] for name in one], abs=1e-12)


@quick
@given(batches)
def test_layouts_agree(trajectories):
    one, other = credit(trajectories, "turn"), credit(trajectories, "trajectory")
    assert one == other
    assert nan not in one.values()
