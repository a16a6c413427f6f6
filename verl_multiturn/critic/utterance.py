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
import os
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import hypot, inf
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from verl_multiturn.algorithms.registry import Config
from verl_multiturn.columns import Floats
from verl_multiturn.critic.encoders import Encoder, make_encoder
from verl_multiturn.critic.replay import Arrays, Replay, Transition, pack_json, unpack_json
from verl_multiturn.errors import unknown

Tensor = torch.Tensor
Utterances = Mapping[str, Sequence[str]]  # state -> utterances of the current policy there


class FixedPointWarning(UserWarning):
    """What the critic converges to is not the value of the current policy."""


@dataclass(frozen=True)
class CriticConfig(Config):
    """Every choice of the critic; `preset` has the settings of the authors' runs.

    Sources in the comments: paper (arXiv:2402.19446), code and offline code (the authors'), IQL
    (arXiv:2110.06169), ours. With no note the paper and the code agree.
    """

    encoder: str = "roberta-base"  # 3.2; see verl_multiturn.critic.encoders
    max_tokens: int = 512  # of a text, its end; code
    hidden: int = 768  # width of the heads' layers; code
    layers: int = 2  # hidden layers of a head; code
    heads: int = 2  # of Q and of V, 1 or 2; 3.2 (double Q)
    gamma: float = 0.95  # discount of a turn; paper: 0.98 Detective, 0.9 WebShop, else 0.95
    tau: float = 0.1  # Polyak step; offline code 0.05
    target_every: int = 1  # optimizer steps between two Polyak steps; code
    v_target: Literal["policy", "sarsa", "expectile", "mc"] = "policy"
    # policy: Q^tgt at fresh utterances, 3.2; sarsa: at the replayed one, offline code;
    # expectile: of the same, IQL Eq. 5; mc: Q and V on the discounted return, the paper's ablation
    expectile: float = 0.9  # with v_target=expectile; offline code
    uncovered: Literal["refuse", "skip", "sarsa"] = "refuse"
    # a drawn state without fresh utterances: an error, no loss of V there, or the replayed one; ours
    loss: Literal["mse", "huber"] = "mse"  # huber: ours
    pessimism: Literal["adv", "target", "none"] = "adv"
    # minimum of the heads: in the advantage only, 3.2; in the targets too; nowhere (mean); the last two ours
    lr: float = 2e-5  # Adam, no weight decay, constant; code; offline code 1e-5
    head_lr: float | None = None  # of the heads; None: lr; ours
    batch: int = 256  # transitions of an optimizer step; code: 8 x 32
    micro_batch: int = 32  # transitions of a forward pass
    accumulate: Literal["mean", "sum"] = "mean"
    # sum: the micro-batches' mean gradients are added undivided, code; Adam is blind to the factor,
    # but the clip then acts batch / micro_batch times as strongly
    grad_clip: float | None = 1.0  # norm of the critic's gradients alone; code: with stale actor gradients
    head_grad_clip: float | None = None  # clips the heads apart from the encoder; None: together; ours
    reward_scale: float = 1.0  # times r and the return: Q, V and A are in these units; ours
    bootstrap_on_truncation: bool = False  # a turn limit is no end; for whoever makes transitions; ours
    capacity: int = 10_000  # of the replay; paper; code 100,000
    min_size: int = 2048  # transitions before the first optimizer step; ours
    max_age: int | None = None  # policy versions after which a transition is not drawn any more; ours
    seed: int = 0  # of heads, random encoders and the replay's draws

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = ("hidden", "layers", "target_every", "batch", "micro_batch", "capacity", "min_size")
        for key in whole:
            self.check_range(key, 1)
        self.check_range("max_tokens", 2)
        self.check_range("heads", 1, 2)
        for key in ("gamma", "tau", "expectile"):
            self.check_range(key, 0, 1)
        for key in ("lr", "head_lr", "grad_clip", "head_grad_clip", "max_age", "seed"):
            if getattr(self, key) is not None:
                self.check_range(key, 0)
        if self.expectile in (0, 1):
            raise ValueError(f"CriticConfig.expectile must lie in (0, 1), not {self.expectile!r}.")
        for key in ("batch", "min_size"):
            if self.capacity < getattr(self, key):
                raise ValueError(
                    f"CriticConfig.capacity={self.capacity} must be at least {key}={getattr(self, key)}."
                )

    def caveats(self) -> list[str]:
        """One sentence for each choice that makes Q and V those of something else than the policy."""
        found = {
            "sarsa": "V learns the value of the policies that filled the replay, not of the current one",
            "expectile": f"V learns the {self.expectile}-expectile over replayed utterances: near 0.5 the "
            "value of the policies that spoke them, near 1 that of the best utterance",
            "mc": "Q and V learn the returns of the policies that filled the replay, not of the current one",
        }
        sentences = [f"v_target={self.v_target}: {found[self.v_target]}."] if self.v_target in found else []
        if self.v_target == "policy" and self.uncovered == "sarsa":
            sentences.append(f"uncovered=sarsa: where there are no fresh utterances, {found['sarsa']}.")
        if self.pessimism == "target" and self.heads == 2 and self.v_target != "mc":
            sentences.append(
                "pessimism=target: the minimum inside the targets makes Q and V too low on average."
            )
        return sentences


PRESETS = {
    "paper": CriticConfig(),
    "repo_compat": CriticConfig(micro_batch=8, accumulate="sum", capacity=100_000, min_size=1),
    "offline": CriticConfig(v_target="expectile", gamma=0.99, tau=0.05, lr=1e-5, batch=128, min_size=1),
    "cpu": CriticConfig(encoder="small", hidden=64, lr=1e-3, batch=64, micro_batch=64, min_size=64),
}


def preset(name: str) -> CriticConfig:
    """A config of `PRESETS`; change it with `dataclasses.replace`."""
    if name not in PRESETS:
        raise unknown("critic preset", name, PRESETS)
    return PRESETS[name]


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
        self.replay.load_state_dict(_under("replay", arrays))
        for part, module in (("network", self.network), ("target", self.target)):
            module.load_state_dict({name: torch.tensor(x) for name, x in _under(part, arrays).items()})
        moments: dict[int, dict[str, Tensor]] = {}
        for key, x in _under("adam", arrays).items():
            number, _, name = key.partition(".")
            moments.setdefault(int(number), {})[name] = torch.tensor(x)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.steps = unpack_json(arrays["meta"])["steps"]

    def save(self, path: str | Path) -> None:
        """Write the `state_dict` to one .npz file, which appears when it is complete."""
        part = Path(f"{path}.part")
        try:
            with part.open("wb") as file:
                np.savez(file, **self.state_dict())  # type: ignore[arg-type]
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def load(self, path: str | Path) -> None:
        """Read what `save` wrote; nothing in the file is executed.

        Raises:
            ValueError: as `load_state_dict`, or a file that is none of `save`.
        """
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{path} is no file that a critic saved.")
        with np.load(path, allow_pickle=False) as file:
            self.load_state_dict(dict(file))

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


def _under(part: str, arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """The arrays whose names begin with the part's, without it."""
    return {name.removeprefix(f"{part}."): x for name, x in arrays.items() if name.startswith(f"{part}.")}


def _check_shapes(part: str, module: torch.nn.Module, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    here = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    there = {name: x.shape for name, x in _under(part, arrays).items()}
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            raise ValueError(
                f"the saved critic is another network: {part}.{name} has shape {there.get(name)} there "
                f"and {here.get(name)} here."
            )
