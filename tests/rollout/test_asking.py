"""Utterances outside of episodes, and the rows made of them."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import torch

from verl_multiturn.errors import RunStopped
from verl_multiturn.rollout.asking import Question, ask
from verl_multiturn.rollout.episode import Sample
from verl_multiturn.rollout.silico import InSilico


class Client:
    """Says the prompt's first token and the seed; counts who is being served."""

    def __init__(self, seconds=0.0):
        self.calls, self.now, self.most, self.seconds = [], 0, 0, seconds

    async def generate(self, request_id, prompt_ids, sampling_params):
        self.now += 1
        self.most = max(self.most, self.now)
        self.calls.append((request_id, list(prompt_ids), dict(sampling_params)))
        # Later questions are answered sooner.
        await asyncio.sleep(self.seconds or 0.001 / (1 + len(self.calls)))
        self.now -= 1
        ids = [prompt_ids[0], sampling_params.get("seed", -1)]
        return SimpleNamespace(token_ids=ids, log_probs=[-0.5, -0.25], extra_fields={"max_global_steps": 3})


def test_every_question_gets_its_answers_in_order():
    client = Client()
    questions = [Question([k, 9], (10 * k, 10 * k + 1)) for k in range(5)]
    said = ask(client, questions, {"temperature": 1.0, "max_tokens": 4}, max_inflight=3)
    assert [[one.ids for one in pair] for pair in said] == [[[k, 10 * k], [k, 10 * k + 1]] for k in range(5)]
    assert said[0][0] == Sample([0, 0], [-0.5, -0.25], {"max_global_steps": 3})
    assert client.most == 3
    by_request = {}
    for request_id, prompt_ids, _ in client.calls:
        by_request.setdefault(request_id, []).append(prompt_ids)
    assert sorted(by_request.values()) == [[[k, 9]] * 2 for k in range(5)], (
        "a prompt's answers share a server"
    )


def test_without_a_seed_the_engine_draws():
    client = Client()
    ask(client, [Question([1])], {"max_tokens": 4})
    assert client.calls[0][2] == {"max_tokens": 4}
    assert ask(client, [], {}) == [] and len(client.calls) == 1


def test_an_answer_that_never_comes_ends_the_run():
    with pytest.raises(RunStopped, match=r"^2 fresh utterances .* longer than 0.01 s"):
        ask(Client(seconds=5.0), [Question([1], (None, None))], {}, timeout=0.01)


def test_rows_of_fresh_utterances():
    samples = [Sample([5, 6], [-0.1, -0.2]), Sample([], [])]
    made = InSilico(["s", "t"], ["a", ""], [[1, 2, 3], [4]], samples, step=7, pad_id=0)
    assert made.keys == ["000007-silico000000_0_0", "000007-silico000001_0_0"]
    fields = made.fields()
    assert [row.tolist() for row in fields["input_ids"].unbind()] == [[1, 2, 3, 5, 6], [4, 0]]
    assert [row.tolist() for row in fields["position_ids"].unbind()] == [[0, 1, 2, 3, 4], [0, 1]]
    for name in ("response_mask", "loss_mask"):  # the stop token is in the loss, padding is not
        assert [row.tolist() for row in fields[name].unbind()] == [[1, 1], [0]]
    assert fields["rollout_log_probs"].unbind()[0].tolist() == pytest.approx([-0.1, -0.2])
    assert torch.equal(fields["num_turns"], torch.ones(2, dtype=torch.int64))
    first = made.tags()[0]
    assert (first["prompt_len"], first["response_len"], first["seq_len"]) == (3, 2, 5)
    assert first["min_global_steps"] == first["max_global_steps"] == 6
