"""The critic: losses against the NumPy equations, fixed points against exact values, exact resume."""

import json
import warnings
from dataclasses import fields, replace
from functools import partial
from math import nan
from pathlib import Path

import numpy as np
import pytest
import torch

import verl_multiturn as vm
from verl_multiturn.algorithms.archer import expectile, policy_targets
from verl_multiturn.critic.config import PRESETS, CriticConfig, FixedPointWarning, preset
from verl_multiturn.critic.encoders import Encoder, NGrams
from verl_multiturn.critic.replay import Transition
from verl_multiturn.critic.utterance import Network, UtteranceCritic, penalty, polyak, td_targets

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "archer_vectors.json").read_text())
close = partial(np.testing.assert_allclose, rtol=0)
TINY = CriticConfig(
    encoder="ngrams", hidden=16, lr=1e-3, batch=16, micro_batch=8, capacity=64, min_size=1, v_target="policy"
)


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def build(config=TINY, **change):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedPointWarning)
        return UtteranceCritic(replace(config, **change), encoder=NGrams(32))


# A chain of three states. "on" goes from s0 to s1 to s2 and from there out, "stay" stays; the policy
# goes on with probability 0.7, the replay holds both equally often.
REWARD = {
    ("s0", "on"): 0.0,
    ("s1", "on"): -0.5,
    ("s2", "on"): 1.0,
    **{(f"s{k}", "stay"): -0.1 for k in range(3)},
}
AFTER = {"s0": "s1", "s1": "s2", "s2": ""}
FRESH = {state: ["on"] * 7 + ["stay"] * 3 for state in AFTER}
GAMMA = 0.8


def chain():
    return [
        Transition(
            s, a, REWARD[s, a], AFTER[s] if a == "on" else s, (s, a) == ("s2", "on"), nan, 0, f"{s}_{a}"
        )
        for s, a in REWARD
    ]


def exact(value):
    """Q and V where V(s) = value(Q(s, on), Q(s, stay)), by iteration."""
    V = dict.fromkeys([*AFTER, ""], 0.0)
    for _ in range(200):
        Q = {(s, a): REWARD[s, a] + GAMMA * V[AFTER[s] if a == "on" else s] for s, a in REWARD}
        V |= {s: value(Q[s, "on"], Q[s, "stay"]) for s in AFTER}
    return Q, V


def settle(critic, fresh):
    """Large steps, then small ones: draws are random, and V between two utterances follows each."""
    critic.train(500, fresh)
    for group in critic.optimizer.param_groups:
        group["lr"] = 2e-4
    critic.train(200, fresh)


RULES = {
    "policy": ({"v_target": "policy"}, lambda on, stay: 0.7 * on + 0.3 * stay),
    "sarsa": ({"v_target": "sarsa"}, lambda on, stay: 0.5 * on + 0.5 * stay),
    "expectile": ({"v_target": "expectile"}, lambda on, stay: expectile([on, stay], 0.9)),
    "policy, none covered": (
        {"v_target": "policy", "uncovered": "sarsa"},
        lambda on, stay: 0.5 * on + 0.5 * stay,
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_exact_fixed_point_of_a_chain(rule):
    change, value = RULES[rule]
    critic = build(gamma=GAMMA, lr=3e-3, batch=64, micro_batch=64, **change)
    critic.add(chain())
    fresh = {} if rule == "policy, none covered" else FRESH
    settle(critic, fresh)
    Q, V = exact(value)
    states, actions = zip(*REWARD, strict=True)
    for head in range(2):
        close(critic.q_values(states, actions)[head], [Q[pair] for pair in REWARD], atol=0.03)
    close(critic.values(list(AFTER)), [V[s] for s in AFTER], atol=0.05)
    gap = max(abs(V[s] - exact(RULES["policy"][1])[1][s]) for s in AFTER)
    assert rule == "policy" or gap > 0.1  # the rules differ by more than the tolerance


def test_monte_carlo_learns_the_returns():
    critic = build(v_target="mc", lr=3e-3, gamma=GAMMA, batch=64, micro_batch=64)
    returns = dict(zip(REWARD, [0.5, -1.0, 0.25, 0.75, 0.0, -0.5], strict=True))
    critic.add([replace(row, mc_return=returns[row.state, row.action]) for row in chain()])
    settle(critic, None)
    states, actions = zip(*REWARD, strict=True)
    close(critic.q_values(states, actions).min(0), list(returns.values()), atol=0.03)
    means = [np.mean([G for (s, _), G in returns.items() if s == state]) for state in AFTER]
    close(critic.values(list(AFTER)), means, atol=0.05)


def test_the_small_transformer_learns_the_chain():
    torch.manual_seed(1)
    critic = UtteranceCritic(replace(PRESETS["cpu"], gamma=GAMMA, min_size=1, lr=2e-3, max_tokens=8))
    before = [p.clone() for p in critic.network.encoder.parameters()]
    critic.add(chain())
    critic.train(150, FRESH)
    assert all(
        (p != q).any()
        for p, q in zip(before, critic.network.encoder.parameters(), strict=True)
        if p.dim() > 1
    )
    V = exact(RULES["policy"][1])[1]
    close(critic.values(list(AFTER)), [V[s] for s in AFTER], atol=0.15)
    A = critic.advantage(["s2", "s2"], ["on", "stay"])
    assert A[0] > 0.1 and A[1] < -0.1


def test_a1_targets_equal_the_numpy_ones():
    r, d, v = [-1, -1, 0, -1], [0, 0, 1, 1], [[-3, -2, 5, 5], [-2.5, -2.2, nan, 5]]
    y = td_targets(torch.tensor(r).double(), torch.tensor(d).bool(), tensor(*v), 0.95)
    close(y, vm.q_targets(r, d, *v, 0.95), atol=1e-12)
    close(y, list(VECTORS["A1 Q targets gamma=.95"].values()), atol=1e-12)


def test_a2_squared_errors():
    # The table has the losses alone; of these errors they are the mean squares.
    errors = {
        "q1": [0.25, 0.2, 0.2, 0.2],
        "q2": [0.225, 0.21, 0.3, 0],
        "v1": [0.3, 0.4, 0, 0],
        "v2": [0.1, 0.2, 0.3, 0.3],
    }
    expected = VECTORS["A2 critic loss"]
    means = {name: penalty(tensor(u)).mean().item() for name, u in errors.items()}
    for name, mean in means.items():
        close(mean, expected[name], atol=1e-12)
    close(sum(means.values()), expected["total"], atol=1e-12)


def test_a9_expectile_loss_equals_the_numpy_one():
    u = [1, -1, 0.5, -0.25]
    for tau in (0.1, 0.5, 0.9):
        close(penalty(tensor(u), expectile=tau).mean(), vm.expectile_loss(u, tau), atol=1e-12)
    close(penalty(tensor(u), expectile=0.9).mean(), VECTORS["A9 expectile loss"]["tau_0p9"], atol=1e-12)
    close(penalty(tensor(u), "huber"), [[0.5, 0.5, 0.125, 0.03125]], atol=1e-12)


def test_a4_polyak():
    expected = VECTORS["A4 Polyak tau=.1 target 1 online 2"]
    slow, fast = (torch.nn.Linear(1, 1, bias=False).double() for _ in range(2))
    torch.nn.init.constant_(slow.weight, 1.0)
    torch.nn.init.constant_(fast.weight, 2.0)
    for value in expected["first3"]:
        polyak(slow, fast, 0.1)
        close(slow.weight.item(), value, atol=1e-12)
    for _ in range(47):
        polyak(slow, fast, 0.1)
    close(2 - slow.weight.item(), json.loads(expected["lags"])["tau=0.1"]["left_after_50"], atol=1e-12)


def test_the_target_moves_as_polyak_says_and_has_no_gradient():
    critic = build(tau=0.25, target_every=2)
    critic.add(chain())
    start = [p.clone() for p in critic.target.parameters()]
    assert all((p == q).all() for p, q in zip(start, critic.network.parameters(), strict=True))
    critic.train(1, FRESH)
    assert all((p == q).all() for p, q in zip(start, critic.target.parameters(), strict=True))
    critic.train(1, FRESH)
    for old, now, online in zip(start, critic.target.parameters(), critic.network.parameters(), strict=True):
        torch.testing.assert_close(now, 0.75 * old + 0.25 * online.detach())
        assert now.grad is None and not now.requires_grad


def test_a3_pessimistic_advantage_equals_the_numpy_one():
    critic = build()
    states, actions = ["x", "y", "z"] * 7, [f"go {k}" for k in range(21)]  # three chunks, the last one short
    Q = critic.q_values(states, actions)
    net = critic.network
    with torch.no_grad():
        V = net.v_values(net.embed(states)).double().numpy()
        whole = net.q_values(net.embed(states), net.embed(actions)).double().numpy()
    close(Q, whole, atol=1e-6)
    A = critic.advantage(states, actions)
    close(A, vm.critic_advantage(*Q, *V), atol=1e-6)
    close(critic.values(states), V.min(0), atol=1e-6)
    assert np.abs(A - np.minimum(Q[0] - V[0], Q[1] - V[1])).max() > 1e-3
    assert A.shape == (21,) and A.dtype == np.float64
    critic = build(pessimism="none")
    close(critic.advantage(states, actions), Q.mean(0) - V.mean(0), atol=1e-6)
    assert critic.advantage([], []).shape == (0,)
    single = build(heads=1)
    assert single.q_values(["x"], ["y"]).shape == (1, 1)


def test_the_advantage_is_the_online_critics():
    critic = build(tau=0.0)
    critic.add(chain())
    before, slow = critic.advantage(["s2"], ["on"]), critic.q_values(["s2"], ["on"], target=True)
    critic.train(3, FRESH)
    assert critic.advantage(["s2"], ["on"]) != before
    assert (critic.q_values(["s2"], ["on"], target=True) == slow).all()
    assert (critic.q_values(["s2"], ["on"]) != slow).all()


def test_targets_by_the_numpy_equations():
    critic = build(pessimism="adv", gamma=0.9, reward_scale=2.0)
    rows = [*chain(), chain()[0]]
    fresh = [FRESH[row.state][:k] for k, row in enumerate(rows, start=1)]
    y_q, y_v = critic._targets(rows, fresh)
    slow, alive = critic.target, [not row.done for row in rows]
    with torch.no_grad():
        V = slow.v_values(slow.embed([row.next_state for row in rows])).numpy()
    close(y_q, vm.q_targets([2 * row.reward for row in rows], [not a for a in alive], *V, 0.9), atol=1e-6)
    for k, (row, said) in enumerate(zip(rows, fresh, strict=True)):
        Q = critic.q_values([row.state] * len(said), said, target=True)
        close(y_v[:, k], policy_targets(Q.T.reshape(len(said), 2).T).ravel(), atol=1e-6)


def test_the_minimum_enters_the_targets_only_if_asked():
    rows, fresh = chain(), [["on"]] * 6
    plain, low = build()._targets(rows, fresh), build(pessimism="target")._targets(rows, fresh)
    assert (plain[0][0] != plain[0][1]).any() and (plain[1][0] != plain[1][1]).all()
    V, done = build(gamma=1.0)._targets(rows, fresh)[0], [row.done for row in rows]
    assert (V[0] == V[1]).tolist() == done  # the bootstrap differs by head, an end does not
    for one, two in zip(plain, low, strict=True):
        torch.testing.assert_close(two, one.amin(0, keepdim=True).expand(2, -1))


def test_the_target_of_v_ignores_the_replayed_action():
    critic, fresh = build(), [["on", "stay"]] * 6
    other = [replace(row, action="jump") for row in chain()]
    assert (critic._targets(chain(), fresh)[1] == critic._targets(other, fresh)[1]).all()
    assert (critic._losses(chain(), fresh)[0] != critic._losses(other, fresh)[0]).any()


def test_gamma_zero_gives_the_reward():
    y_q, _ = build(gamma=0.0)._targets(chain(), [["on"]] * 6)
    close(y_q, [[row.reward for row in chain()]] * 2, atol=1e-7)


def test_a_step_is_the_gradient_of_the_batch_mean_in_any_micro_batches():
    whole, parts = build(micro_batch=16), build(micro_batch=3)
    for critic in (whole, parts):
        critic.add(chain())
    seen, split = whole.train(1, FRESH), parts.train(1, FRESH)
    for name, value in seen.items():
        assert split[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    rows = build()
    rows.add(chain())
    sample = rows.replay.sample(16)
    *_, q_loss, v_loss = rows._losses(sample, [FRESH[row.state] for row in sample])
    assert seen["q_loss"] == pytest.approx(q_loss.item() / 16, rel=1e-5)
    assert seen["v_loss"] == pytest.approx(v_loss.item() / 16, rel=1e-5)
    summed = build(micro_batch=4, accumulate="sum")
    summed.add(chain())
    assert summed.train(1, FRESH)["grad_norm"] == pytest.approx(4 * seen["grad_norm"], rel=1e-4)


class Linear(Encoder):
    """One parameter a letter: an encoder whose gradient can be told from the heads'."""

    def __init__(self):
        super().__init__()
        self.width, self.table = 8, torch.nn.Embedding(256, 8)

    def encode(self, texts):
        return torch.stack([self.table(torch.tensor([ord(c) for c in text])).sum(0) for text in texts])


def gradients(**change):
    torch.manual_seed(0)
    critic = UtteranceCritic(replace(TINY, lr=0.0, **change), encoder=Linear())
    critic.add(replace(row, reward=50.0) for row in chain())
    actor = torch.nn.Parameter(torch.ones(3))
    actor.grad = torch.full((3,), 1e6)  # stale, of a network that this clip must not see
    metrics = critic.train(1, FRESH)
    assert (actor.grad == 1e6).all()
    norms = [
        float(torch.stack([p.grad.norm() for p in part]).norm())
        for part in (
            list(critic.network.encoder.parameters()),
            [*critic.network.q.parameters(), *critic.network.v.parameters()],
        )
    ]
    return metrics["grad_norm"], np.array(norms)


def test_a12_the_clip_is_the_critics_own():
    expected = VECTORS["A12 clip"]
    norm, free = gradients(grad_clip=None)
    assert norm == pytest.approx(np.hypot(*free)) and norm > 10
    norm, clipped = gradients(grad_clip=1.0)
    assert norm == pytest.approx(np.hypot(*free)) and np.hypot(*clipped) == pytest.approx(
        expected["separate_critic_grad"], rel=1e-4
    )
    close(clipped / free, [1 / norm] * 2, atol=1e-4)
    _, apart = gradients(grad_clip=1.0, head_grad_clip=0.5)
    close(apart, [1.0, 0.5], atol=1e-4)
    _, heads = gradients(grad_clip=None, head_grad_clip=0.5)
    close(heads, [free[0], 0.5], atol=1e-3)


def test_learning_rates_of_encoder_and_heads():
    torch.manual_seed(0)
    critic = UtteranceCritic(replace(TINY, lr=0.0, head_lr=1e-2), encoder=Linear())
    critic.add(chain())
    before = [p.clone() for p in critic.network.parameters()]
    critic.train(1, FRESH)
    moved = [(p != q).any().item() for p, q in zip(before, critic.network.parameters(), strict=True)]
    assert moved == [False] + [True] * 24


def run(critic, steps=4):
    return [critic.train(1, FRESH) for _ in range(steps)]


def test_resume_is_equal_to_the_bit(tmp_path):
    torch.manual_seed(3)
    first = UtteranceCritic(replace(PRESETS["cpu"], batch=8, micro_batch=4, min_size=1, capacity=9))
    first.add(chain())
    run(first)
    first.save(tmp_path / "critic.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["critic.npz"]
    torch.manual_seed(77)
    again = UtteranceCritic(replace(first.config, seed=5))
    again.load(tmp_path / "critic.npz")
    late = [replace(row, id=f"late {row.id}", version=2) for row in chain()]
    for critic in (first, again):
        critic.add(late)
    assert run(again) == run(first)
    one, two = first.state_dict(), again.state_dict()
    assert one.keys() == two.keys() and again.steps == 8
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)
    assert any(name.startswith("adam.") for name in one) and any("encoder" in name for name in one)


def test_the_same_seed_gives_the_same_critic_whatever_the_global_generator():
    config = replace(PRESETS["cpu"], batch=8, min_size=1)
    critics = []
    for noise, seed in ((1, 0), (2, 0), (2, 1)):
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        critic = UtteranceCritic(replace(config, seed=seed))
        assert (torch.get_rng_state() == state).all()
        critic.add(chain())
        critics.append((run(critic, 2), critic.values(["s0"]).tolist()))
    assert critics[0] == critics[1] != critics[2]


def test_another_critics_checkpoint_is_refused(tmp_path):
    critic, other = build(), build(hidden=8)
    other.add(chain())
    before = critic.state_dict()
    with pytest.raises(
        ValueError, match=r"network.q.0.0.weight has shape \(8, 64\) there and \(16, 64\) here"
    ):
        critic.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"shape None there"):
        critic.load_state_dict(build(heads=1).state_dict())
    with pytest.raises(ValueError, match="capacity 100, not 64"):
        critic.load_state_dict(build(capacity=100).state_dict())
    assert all((x == before[name]).all() for name, x in critic.state_dict().items())
    (tmp_path / "no.npz").write_text("no")
    with pytest.raises(ValueError, match="no file that a critic saved"):
        critic.load(tmp_path / "no.npz")
    np.savez(tmp_path / "bad.npz", meta=np.array([{"a": print}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        critic.load(tmp_path / "bad.npz")


def test_head_sizes_of_the_paper():
    class Wide(Encoder):
        width = 768

    network = Network(Wide(), hidden=768, layers=2, heads=2)
    sizes = [sum(p.numel() for p in head.parameters()) for head in (*network.q, *network.v)]
    assert sizes == [1_771_777, 1_771_777, 1_181_953, 1_181_953]


def test_states_without_fresh_utterances():
    some = {"s0": ["on"], "s1": ["on"]}
    refusing, skipping = build(), build(uncovered="skip")
    for critic in (refusing, skipping):
        critic.add(chain())
    with pytest.raises(ValueError, match=r"utterances has none for \d+ of the 16 states drawn.*ends in 's2'"):
        refusing.train(1, some)
    metrics = skipping.train(20, some)
    assert 0.4 < metrics["fresh"] < 0.9
    rows = chain()
    fresh = skipping._fresh(rows, some)
    Q, V, q_loss, v_loss = skipping._losses(rows, fresh)
    y_q, y_v = skipping._targets(rows, fresh)
    learnt = [row.state != "s2" for row in rows]
    close(v_loss.item(), ((y_v - V) ** 2)[:, learnt].sum().item(), atol=1e-6)
    close(q_loss.item(), ((y_q - Q) ** 2).sum().item(), atol=1e-6)
    none = skipping.train(2, {})
    assert none["v_loss"] == 0 and none["fresh"] == 0 and none["q_loss"] > 0


def test_upcoming_states_are_the_ones_that_are_drawn():
    critic = build(batch=2)
    critic.add(chain())
    told = critic.upcoming(2)
    metrics = critic.train(2, {state: ["on"] for state in told})
    assert metrics["fresh"] == 1 and set(told) <= set(AFTER)


def test_no_step_below_the_least_size():
    critic = build(min_size=7)
    critic.add(chain())
    assert critic.train(5, FRESH) == {"steps": 0, "replay": 6} and critic.steps == 0
    critic.add([replace(chain()[0], id="seventh", version=3)])
    metrics = critic.train(5, FRESH)
    assert metrics["steps"] == 5 == critic.steps and 0 < metrics["age"] < 3
    assert all(np.isfinite(list(metrics.values())))


def test_what_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        UtteranceCritic(TINY)
        UtteranceCritic(replace(TINY, uncovered="skip", pessimism="none"))
    for change, words in [
        ({"v_target": "sarsa"}, "v_target=sarsa: V learns the value of the policies that filled"),
        ({"v_target": "expectile", "expectile": 0.8}, "v_target=expectile: V learns the 0.8-expectile"),
        ({"v_target": "mc"}, "v_target=mc: Q and V learn the returns"),
        ({"uncovered": "sarsa"}, "uncovered=sarsa: where there are no fresh"),
        ({"pessimism": "target"}, "makes Q and V too low"),
    ]:
        with pytest.warns(FixedPointWarning, match=words):
            UtteranceCritic(replace(TINY, **change))


def test_a_gradient_that_is_not_finite_leaves_the_critic_as_it_was():
    critic = build(reward_scale=1e30)
    critic.add(replace(row, reward=1e30) for row in chain())
    before = critic.state_dict()
    with pytest.raises(
        FloatingPointError, match=r"gradient is (nan|inf) at step 1: lower lr or reward_scale"
    ):
        critic.train(1, FRESH)
    for name, x in critic.state_dict().items():
        if name.startswith(("network", "target", "adam")):
            assert (x == before[name]).all(), name


def test_presets():
    assert preset("paper") == CriticConfig()
    assert (preset("offline").v_target, preset("offline").gamma, preset("offline").tau) == (
        "expectile",
        0.99,
        0.05,
    )
    assert preset("repo_compat").batch // preset("repo_compat").micro_batch == 32
    with pytest.raises(ValueError, match=r"unknown critic preset 'papr'.*Did you mean 'paper'"):
        preset("papr")
    assert len(fields(CriticConfig)) == 26


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: CriticConfig(v_target="iql"), "unknown CriticConfig.v_target 'iql'; valid: policy, sarsa"),
        (lambda: CriticConfig(v_target="polcy"), "Did you mean 'policy'"),
        (lambda: CriticConfig(heads=3), r"heads must be in \[1, 2\], not 3"),
        (lambda: CriticConfig(gamma=1.5), "gamma must be in"),
        (lambda: CriticConfig(expectile=1.0), r"expectile must lie in \(0, 1\)"),
        (lambda: CriticConfig(capacity=100), "capacity=100 must be at least batch=256"),
        (lambda: CriticConfig(capacity=1000), "capacity=1000 must be at least min_size=2048"),
        (lambda: CriticConfig(lr=-1.0), "lr must be at least 0"),
        (lambda: CriticConfig(batch=0), "batch must be at least 1"),
        (
            lambda: build().train(1),
            "v_target=policy learns V from fresh utterances of the policy: pass train",
        ),
        (lambda: build().advantage(["s"], []), "states has 1 entries, but actions has 0"),
        (lambda: build().add([replace(chain()[0], reward=nan)]), "reward must be a finite number, not nan"),
    ],
)
def test_one_sentence_says_what_is_wrong(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_utterances_and_returns_that_do_not_fit():
    critic = build()
    critic.add(chain())
    with pytest.raises(ValueError, match="must map a state to a list of utterances, not to the text 'on'"):
        critic.train(1, dict.fromkeys(AFTER, "on"))
    critic = build(v_target="mc")
    critic.add(chain())
    with pytest.raises(ValueError, match=r"v_target=mc needs mc_return, which transition 's\d_\w+' lacks"):
        critic.train(1)
