"""The actor's loss with VinePPO's KL: summed over a row, a mean over rows, on verl's own loss."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("verl")

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

from verl_multiturn.compose import compose
from verl_multiturn.kl import set_kl, summed_kl_loss

LENGTHS = (4, 1, 3)  # trained tokens of each row


@pytest.fixture(scope="module")
def actor():
    return compose("vineppo_gsm8k", []).actor_rollout_ref.actor


@pytest.fixture
def loss(actor):
    """The loss that workers are given."""
    told = []
    set_kl(SimpleNamespace(set_loss_fn=told.append), actor)
    return told[0]


def jagged(rows):
    return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)


def batch(rows):
    """A micro-batch of some of three rows, each with a prompt of two tokens. -> (model output, data, k3)."""
    generator = torch.Generator().manual_seed(3)
    new, ref = ([-2 * torch.rand(length, generator=generator) for length in LENGTHS] for _ in range(2))
    data = {
        "prompts": jagged([[1, 1]] * len(rows)),
        "responses": jagged([[2] * LENGTHS[row] for row in rows]),
        "response_mask": jagged([[1] * LENGTHS[row] for row in rows]),
        "old_log_probs": jagged([new[row] for row in rows]),
        "advantages": jagged([[0.0] * LENGTHS[row] for row in rows]),
        "ref_log_prob": jagged([ref[row] for row in rows]),
    }
    made = TensorDict(data, batch_size=len(rows))
    tu.assign_non_tensor(made, dp_size=1, batch_num_tokens=sum(LENGTHS), global_batch_size=len(LENGTHS))
    # Log-probabilities of prompt and response, shifted by one.
    whole = [torch.cat([torch.zeros(1), new[row], torch.zeros(1)]) for row in rows]
    k3 = [torch.exp(ref[row] - new[row]) - (ref[row] - new[row]) - 1 for row in rows]
    return {"log_probs": jagged(whole)}, made, [float(k.sum()) for k in k3]


def test_the_papers_sum(loss, actor):
    """Advantages of 0 leave the KL alone: c / N of its sum; verl's own is smaller by the mean length."""
    output, data, sums = batch([0, 1, 2])
    found, metrics = loss(model_output=output, data=data)
    c = actor.kl_loss_coef
    assert float(found) == pytest.approx(c * sum(sums) / 3, rel=1e-5)
    assert metrics["kl_coef"] == pytest.approx(c * 8 / 3)
    own, metrics = ppo_loss(loss.keywords["config"], output, data)
    assert float(own) == pytest.approx(c * sum(sums) / 8, rel=1e-5) and metrics["kl_coef"] == c


def test_micro_batches_add_up(loss):
    whole, parts = (
        [float(loss(model_output=output, data=data)[0]) for output, data, _ in map(batch, some)]
        for some in ([[0, 1, 2]], [[0], [1, 2]])
    )
    assert sum(parts) == pytest.approx(whole[0], rel=1e-5)
    assert loss.func is summed_kl_loss
