"""ArCHer's critic of whole utterances (Zhou et al. 2024, arXiv:2402.19446, section 3.2).

One encoder, trained end to end, reads the state s (the text so far) and the utterance a apart; twin
heads Q_i(s, a) and V_i(s) stand on it, i = 1, 2, and a slowly moving copy (tgt) of everything:

    L = Σ_i mean (Q_i(s, a) − r − γ (1 − d) V_i^tgt(s'))²  +  Σ_i mean (V_i(s) − Q_i^tgt(s, a_π))²
    θ^tgt ← (1 − τ) θ^tgt + τ θ             after every optimizer step
    A(s, a) = min(Q_1, Q_2) − min(V_1, V_2)        of the online critic

(s, a, r, s', d) is drawn from the replay, a_π is a fresh utterance of the current policy. The NumPy
functions of verl_multiturn.algorithms.archer are the same equations; the tests compare the two.
"""

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import hypot, inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from verl_multiturn.checkpoints import EARLIER
from verl_multiturn.columns import Floats
from verl_multiturn.critic.arrays import Arrays, read_arrays, under, write_arrays
from verl_multiturn.critic.config import CriticConfig, FixedPointWarning
from verl_multiturn.critic.encoders import Encoder, make_encoder
from verl_multiturn.critic.replay import Replay, Transition, pack_json, unpack_json
from verl_multiturn.errors import intact

Tensor = torch.Tensor
Utterances = Mapping[str, Sequence[str]]  # state -> utterances of the current policy there


def td_targets(rewards: Tensor, dones: Tensor, v_next: Tensor, gamma: float) -> Tensor:
    """y_i = r + γ (1 − d) V_i^tgt(s'); what stands in v_next where done is not read. -> (H, N).

    Args:
        rewards: (N,)
        dones: (N,) bool.
        v_next: (H, N), one row per head.
        gamma: discount of a turn.
    """
    return rewards + gamma * v_next.masked_fill(dones, 0.0)


def penalty(u: Tensor, loss: str = "mse", expectile: float | None = None) -> Tensor:
    """Loss of each error u = target − prediction: u², or Huber's (u²/2 within 1); times |τ − 1(u < 0)|."""
    size = u**2 if loss == "mse" else F.huber_loss(u, torch.zeros_like(u), reduction="none")
    return size if expectile is None else torch.where(u < 0, (1 - expectile) * size, expectile * size)


@torch.no_grad()
def polyak(target: torch.nn.Module, online: torch.nn.Module, tau: float) -> None:
    """θ^tgt ← (1 − τ) θ^tgt + τ θ, every parameter, the encoder's too."""
    for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
        slow.lerp_(fast, tau)


class Network(torch.nn.Module):
    """An encoder with H heads of Q and H of V: Q_i from [h_s, h_a] (late fusion), V_i from h_s.

    Args:
        encoder: of states and utterances, D wide.
        hidden: width of a head's hidden layers.
        layers: how many.
        heads: H.
    """

    def __init__(self, encoder: Encoder, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        self.encoder, D = encoder, encoder.width
        self.q = torch.nn.ModuleList(_mlp(2 * D, hidden, layers) for _ in range(heads))
        self.v = torch.nn.ModuleList(_mlp(D, hidden, layers) for _ in range(heads))

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Vectors of N >= 1 texts, each distinct one read once. -> (N, D)."""
        places = {text: k for k, text in enumerate(dict.fromkeys(texts))}
        h = self.encoder.encode(list(places)).to(next(self.q.parameters()).device)
        return h[[places[text] for text in texts]]

    def q_values(self, h_s: Tensor, h_a: Tensor) -> Tensor:
        """Q_i of N pairs of vectors. -> (H, N)."""
        h = torch.cat([h_s, h_a], dim=-1)
        return torch.stack([head(h).squeeze(-1) for head in self.q])

    def v_values(self, h_s: Tensor) -> Tensor:
        """V_i of N vectors. -> (H, N)."""
        return torch.stack([head(h_s).squeeze(-1) for head in self.v])


class UtteranceCritic:
    """Replay, online and target network, optimizer: everything of the critic but the policy.

    Deterministic on a CPU: same config, same calls, same numbers, also across `load_state_dict`.

    Args:
        config: see CriticConfig; a choice that moves the fixed point is warned of.
        device: of the networks.
        encoder: instead of the config's, e.g. one that is built already.

    Attributes:
        replay: the transitions.
        network: online; target: its slow copy, without gradients.
        steps: optimizer steps so far.
    """

    def __init__(
        self, config: CriticConfig | None = None, device: str = "cpu", encoder: Encoder | None = None
    ) -> None:
        self.config = c = CriticConfig() if config is None else config
        for caveat in c.caveats():
            warnings.warn(caveat, FixedPointWarning, stacklevel=2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(c.seed)
            encoder = make_encoder(c.encoder, c.max_tokens) if encoder is None else encoder
            network = Network(encoder, c.hidden, c.layers, c.heads)
        self.network = network.to(device).eval()
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        self.replay = Replay(c.capacity, c.max_age, c.seed)
        self.steps = 0
        read = list(self.network.encoder.parameters())
        judge = [*self.network.q.parameters(), *self.network.v.parameters()]
        groups = [(read, c.lr), (judge, c.lr if c.head_lr is None else c.head_lr)]
        self.optimizer = torch.optim.Adam(
            [{"params": some, "lr": lr} for some, lr in groups if some], lr=c.lr
        )
        apart = [(read, c.grad_clip), (judge, c.head_grad_clip)]
        self._clips = [(read + judge, c.grad_clip)] if c.head_grad_clip is None else apart

    def add(self, transitions: Iterable[Transition]) -> None:
        """Put transitions into the replay; see `Replay.add`."""
        self.replay.add(transitions)

    def upcoming(self, steps: int) -> list[str]:
        """The distinct states that `train(steps)` draws, if nothing is added before: ask the policy there."""
        return self.replay.upcoming(steps, self.config.batch)

    def train(self, steps: int, utterances: Utterances | None = None) -> dict[str, float]:
        """Take optimizer steps, none while the replay holds fewer than min_size transitions.

        Args:
            steps: how many; the paper's runs take 50 per iteration.
            utterances: state -> one or more utterances of the current policy, with
                v_target=policy; more than one: V learns the mean of their Q.

        Returns:
            "steps" taken, "replay" transitions, and means over the steps of: "loss", "q_loss" and
            "v_loss" (batch means), "grad_norm" (before the clip), "q", "v" and "advantage" (online, at
            the replayed utterances), "advantage_std", "disagreement" |Q_1 − Q_2|, "fresh" (share of
            drawn states with fresh utterances) and "age" (policy versions behind the newest).

        Raises:
            ValueError: v_target=policy without the utterances it needs, or v_target=mc with a
                transition whose return is not known.
            FloatingPointError: a gradient that is not finite; the networks are as before that step.
        """
        if self.config.v_target == "policy" and utterances is None:
            raise ValueError(
                "v_target=policy learns V from fresh utterances of the policy: pass train(steps, utterances) "
                "a mapping from state to utterances, or choose v_target sarsa, expectile or mc."
            )
        ready = len(self.replay) >= self.config.min_size
        records = [self._step(utterances or {}) for _ in range(steps if ready else 0)]
        means = {name: float(np.mean([record[name] for record in records])) for name in (records or [{}])[0]}
        return {"steps": float(len(records)), "replay": float(len(self.replay)), **means}

    def advantage(self, states: Sequence[str], actions: Sequence[str]) -> Floats:
        """A = min(Q_1, Q_2) − min(V_1, V_2) of the online critic, each minimum on its own. -> (N,).

        With pessimism=none means instead. In units of reward_scale.

        Raises:
            ValueError: different lengths.
        """
        return self._pooled(self.q_values(states, actions)) - self.values(states)

    @torch.no_grad()
    def values(self, states: Sequence[str]) -> Floats:
        """min(V_1, V_2) of the online critic (pessimism=none: the mean). -> (N,)."""
        read = self.network
        rows = [read.v_values(read.embed(part)) for part in self._parts(states)]
        return self._pooled(_numpy(rows, self.config.heads))

    @torch.no_grad()
    def q_values(self, states: Sequence[str], actions: Sequence[str], target: bool = False) -> Floats:
        """Every head's Q. -> (H, N).

        Args:
            states: (N,)
            actions: (N,)
            target: of the target network, by which CHAI's re-ranking chooses.

        Raises:
            ValueError: different lengths.
        """
        if len(states) != len(actions):
            raise ValueError(f"states has {len(states)} entries, but actions has {len(actions)}.")
        read = self.target if target else self.network
        pairs = zip(self._parts(states), self._parts(actions), strict=True)
        rows = [read.q_values(read.embed(s), read.embed(a)) for s, a in pairs]
        return _numpy(rows, self.config.heads)

    @torch.no_grad()
    def lag(self) -> float:
        """How far the target network is behind: |θ − θ^tgt| / |θ|."""
        apart, size = 0.0, 0.0
        for fast, slow in zip(self.network.parameters(), self.target.parameters(), strict=True):
            apart += float((fast - slow).square().sum())
            size += float(fast.square().sum())
        return float(np.sqrt(apart / max(size, 1e-12)))

    def state_dict(self) -> Arrays:
        """Networks, optimizer, replay and its generator as one flat dict of arrays."""
        arrays = {"meta": pack_json({"steps": self.steps})}
        for part, module in (("network", self.network), ("target", self.target)):
            arrays |= {f"{part}.{name}": x.cpu().numpy() for name, x in module.state_dict().items()}
        for k, moments in self.optimizer.state_dict()["state"].items():
            arrays |= {f"adam.{k}.{name}": x.cpu().numpy() for name, x in moments.items()}
        arrays |= {f"replay.{name}": x for name, x in self.replay.state_dict().items()}
        return {name: np.copy(x) for name, x in arrays.items()}

    def load_state_dict(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over a `state_dict`: what follows is what would have followed there, to the bit.

        Learning rates stay those of this config.

        Raises:
            ValueError: networks of other shapes, or another capacity; nothing is changed then.
        """
        for part, module in (("network", self.network), ("target", self.target)):
            _check_shapes(part, module, arrays)
        self.replay.load_state_dict(under("replay", arrays))
        for part, module in (("network", self.network), ("target", self.target)):
            module.load_state_dict({name: torch.tensor(x) for name, x in under(part, arrays).items()})
        moments: dict[int, dict[str, Tensor]] = {}
        for key, x in under("adam", arrays).items():
            number, _, name = key.partition(".")
            moments.setdefault(int(number), {})[name] = torch.tensor(x)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.steps = unpack_json(arrays["meta"])["steps"]

    def save(self, path: str | Path) -> None:
        """Write the `state_dict` to one .npz file, which appears when it is complete."""
        write_arrays(path, self.state_dict())

    def load(self, path: str | Path, cure: str = EARLIER) -> None:
        """Read what `save` wrote; nothing in the file is executed. `cure`: what to do where it cannot be.

        Raises:
            ValueError: as `load_state_dict`, or a file that is none of `save`.
        """
        arrays = read_arrays(path, cure)
        with intact(path, cure):
            self.load_state_dict(arrays)

    def _step(self, utterances: Utterances) -> dict[str, float]:
        """One optimizer step and, when due, one Polyak step; its metrics."""
        c, rows = self.config, self.replay.sample(self.config.batch)
        fresh = self._fresh(rows, utterances)
        self.optimizer.zero_grad()
        sums = np.zeros(2)
        Q_all, V_all = [], []
        for start in range(0, len(rows), c.micro_batch):
            part, said = rows[start : start + c.micro_batch], fresh[start : start + c.micro_batch]
            Q, V, q_loss, v_loss = self._losses(part, said)
            whole = (rows, fresh) if c.accumulate == "mean" else (part, said)
            loss = q_loss / len(whole[0]) + v_loss / max(1, _covered(whole[1]))
            loss.backward()  # type: ignore[no-untyped-call]
            sums += q_loss.item(), v_loss.item()
            Q_all.append(Q.detach())
            V_all.append(V.detach())
        norm = self._clip()
        self.optimizer.step()
        self.steps += 1
        if self.steps % c.target_every == 0:
            polyak(self.target, self.network, c.tau)
        Q_seen, V_seen = _numpy(Q_all, c.heads), _numpy(V_all, c.heads)
        A = self._pooled(Q_seen) - self._pooled(V_seen)
        q_mean, v_mean = sums / (len(rows), max(1, _covered(fresh)))
        return {
            "loss": q_mean + v_mean,
            "q_loss": q_mean,
            "v_loss": v_mean,
            "grad_norm": norm,
            "q": float(Q_seen.mean()),
            "v": float(V_seen.mean()),
            "advantage": float(A.mean()),
            "advantage_std": float(A.std()),
            "disagreement": float(np.ptp(Q_seen, axis=0).mean()),
            "fresh": float(np.mean([row.state in utterances for row in rows])),
            "age": float(np.mean([self.replay.newest - row.version for row in rows])),
        }

    def _fresh(self, rows: list[Transition], utterances: Utterances) -> list[Sequence[str]]:
        """The utterances that V of each row learns from; none: V does not learn there."""
        if self.config.v_target != "policy":
            return [[row.action] for row in rows]
        fresh = [utterances.get(row.state, ()) for row in rows]
        if isinstance(wrong := next((some for some in fresh if isinstance(some, str)), None), str):
            raise ValueError(
                f"utterances must map a state to a list of utterances, not to the text {wrong!r:.60}."
            )
        if self.config.uncovered == "sarsa":
            return [some or [row.action] for some, row in zip(fresh, rows, strict=True)]
        missing = [row.state for some, row in zip(fresh, rows, strict=True) if not some]
        if missing and self.config.uncovered == "refuse":
            raise ValueError(
                f"utterances has none for {len(missing)} of the {len(rows)} states drawn, such as one that "
                f"ends in {missing[0][-40:]!r}: give some for every state of upcoming(), or set uncovered to "
                "skip or sarsa."
            )
        return fresh

    def _losses(
        self, rows: list[Transition], fresh: list[Sequence[str]]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Q and V (H, N) at the replayed utterances, and both losses summed over heads and rows."""
        c, states = self.config, [row.state for row in rows]
        y_q, y_v = self._targets(rows, fresh)
        h_s, h_a = self.network.embed(states), self.network.embed([row.action for row in rows])
        Q, V = self.network.q_values(h_s, h_a), self.network.v_values(h_s)
        learnt = torch.tensor([len(some) > 0 for some in fresh], device=V.device)
        tau = c.expectile if c.v_target == "expectile" else None
        v_loss = penalty(y_v - V, c.loss, tau)
        return Q, V, penalty(y_q - Q, c.loss).sum(), v_loss.masked_fill(~learnt, 0.0).sum()

    @torch.no_grad()
    def _targets(self, rows: list[Transition], fresh: list[Sequence[str]]) -> tuple[Tensor, Tensor]:
        """What Q and V of the rows learn; V's are 0 where nothing fresh is said. -> (H, N), (H, N)."""
        c, slow = self.config, self.target
        device = next(slow.q.parameters()).device
        if c.v_target == "mc":
            if unknown_return := next((row.id for row in rows if np.isnan(row.mc_return)), None):
                raise ValueError(f"v_target=mc needs mc_return, which transition {unknown_return!r} lacks.")
            returns = [c.reward_scale * row.mc_return for row in rows]
            y = torch.tensor(returns, dtype=torch.float32, device=device).expand(c.heads, -1)
            return y, y
        rewards = torch.tensor(
            [c.reward_scale * row.reward for row in rows], dtype=torch.float32, device=device
        )
        alive = [k for k, row in enumerate(rows) if not row.done]
        v_next = torch.zeros((c.heads, len(rows)), device=device)
        if alive:
            v_next[:, alive] = slow.v_values(slow.embed([rows[k].next_state for k in alive]))
        places = [k for k, some in enumerate(fresh) for _ in some]
        y_v = torch.zeros_like(v_next)
        if places:
            spoken = slow.embed([text for some in fresh for text in some])
            Q = slow.q_values(slow.embed([rows[k].state for k in places]), spoken)
            share = torch.tensor([1 / len(fresh[k]) for k in places], device=device)
            y_v.index_add_(1, torch.tensor(places, device=device), Q * share)
        if c.pessimism == "target":
            v_next, y_v = (x.amin(0, keepdim=True).expand(c.heads, -1) for x in (v_next, y_v))
        dones = torch.tensor([bool(row.done) for row in rows], device=device)
        return td_targets(rewards, dones, v_next, c.gamma), y_v

    def _clip(self) -> float:
        """Clip the critic's own gradients; their norm before."""
        norms = [
            float(torch.nn.utils.clip_grad_norm_(some, inf if limit is None else limit))
            for some, limit in self._clips
            if some
        ]
        norm = hypot(*norms)
        if not norm < inf:
            self.optimizer.zero_grad()
            raise FloatingPointError(
                f"the critic's gradient is {norm} at step {self.steps + 1}: lower lr or reward_scale."
            )
        return norm

    def _pooled(self, heads: Floats) -> Floats:
        """(H, N) -> (N,): the minimum over the heads, or without pessimism their mean."""
        return np.asarray(heads.mean(0) if self.config.pessimism == "none" else heads.min(0), np.float64)

    def _parts(self, texts: Sequence[str]) -> list[Sequence[str]]:
        size = self.config.micro_batch
        return [texts[k : k + size] for k in range(0, len(texts), size)]


def _mlp(inputs: int, hidden: int, layers: int) -> torch.nn.Sequential:
    widths = [inputs, *[hidden] * layers]
    body = [part for a, b in pairwise(widths) for part in (torch.nn.Linear(a, b), torch.nn.ReLU())]
    return torch.nn.Sequential(*body, torch.nn.Linear(widths[-1], 1))


def _covered(fresh: list[Sequence[str]]) -> int:
    return sum(len(some) > 0 for some in fresh)


def _numpy(parts: list[Tensor], heads: int) -> Floats:
    """Parts (H, n), side by side. -> (H, N) float64."""
    return np.concatenate(
        [np.zeros((heads, 0)), *(part.detach().cpu().double().numpy() for part in parts)], axis=1
    )


def _check_shapes(part: str, module: torch.nn.Module, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    here = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    there = {name: x.shape for name, x in under(part, arrays).items()}
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            raise ValueError(
                f"the saved critic is another network: {part}.{name} has shape {there.get(name)} there "
                f"and {here.get(name)} here."
            )
