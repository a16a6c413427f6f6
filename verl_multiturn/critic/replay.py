"""Replay of utterance-level transitions, for ArCHer's critic (Zhou et al. 2024, arXiv:2402.19446, 3.2).

A ring of the newest transitions. Every one that is young enough is equally likely at every draw, and
draws are independent (with replacement). That holds before and after the ring wraps; in the authors'
code the counter of insertions stays in use as the length, so that early slots come up too often.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isinf, nan
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_multiturn.algorithms.vectors import inside
from verl_multiturn.critic.arrays import Arrays

_TEXTS = ("state", "action", "next_state")
_NUMBERS = {"reward": np.float64, "done": np.bool_, "mc_return": np.float64, "version": np.int64}


@dataclass(frozen=True)
class Transition:
    """One turn: (s, a, r, s', d) with what the rules for V need.

    Attributes:
        state: s, the text up to the turn (`history`).
        action: a, the whole utterance.
        reward: r, finite.
        next_state: s', the text up to the next turn; not read where done.
        done: d, nothing follows.
        mc_return: Σ γ^k r_{t+k} to the end of the episode; nan where it is not known.
        version: of the policy that spoke, at least 0.
        id: unique in a replay.

    Raises:
        ValueError: one sentence that names the transition and the field.
    """

    state: str
    action: str
    reward: float
    next_state: str
    done: bool
    mc_return: float
    version: int
    id: str

    def __post_init__(self) -> None:
        problem = None
        if texts := [name for name in ("id", *_TEXTS) if not isinstance(getattr(self, name), str)]:
            problem = f"its {texts[0]} must be a text, not {getattr(self, texts[0])!r:.60}"
        elif not _number(self.reward) or not isfinite(self.reward):
            problem = f"its reward must be a finite number, not {self.reward!r}"
        elif not _number(self.mc_return) or isinf(self.mc_return):
            problem = f"its mc_return must be a finite number, or nan, not {self.mc_return!r}"
        elif not isinstance(self.done, bool | np.bool_):
            problem = f"its done must be a boolean, not {self.done!r}"
        elif not isinstance(self.version, Integral) or isinstance(self.version, bool) or self.version < 0:
            problem = f"its version must be a whole number of at least 0, not {self.version!r}"
        if problem:
            raise ValueError(f"transition {self.id!r:.80}: {problem}.")


def history(
    observations: Sequence[str], actions: Sequence[str], instruction: str = "", limit: int | None = None
) -> list[str]:
    """s_t = instruction, o_0, a_0, o_1, …, o_t, one below the other, for every observation.

    Args:
        observations: o_0 … o_T; the last may be missing.
        actions: a_0 … a_{T-1}.
        instruction: first line; "": none.
        limit: characters that are kept of each text's end; None: all.
    """
    texts, so_far = [], [instruction] if instruction else []
    for t, observation in enumerate(observations):
        so_far.append(observation)
        text = "\n".join(so_far)
        texts.append(text if limit is None else text[-limit:])
        so_far += actions[t : t + 1]
    return texts


def of_episode(
    states: Sequence[str],
    actions: Sequence[str],
    rewards: Sequence[float],
    *,
    id: str,
    gamma: float,
    version: int = 0,
    terminated: bool = True,
    bootstrap_on_truncation: bool = False,
) -> list[Transition]:
    """The T transitions of an episode; their ids are `id`, a colon and t.

    Args:
        states: s_0 … s_{T-1}, and s_T where a truncated episode is bootstrapped (see `history`).
        actions: (T,)
        rewards: (T,)
        id: of the episode.
        gamma: discount of a turn, for mc_return; the critic's own.
        version: of the policy.
        terminated: False: a limit cut the episode.
        bootstrap_on_truncation: a cut episode is not done at its last turn. The paper counts the
            turn limit as an end; mc_return ends there either way.

    Raises:
        ValueError: lengths that do not fit, a reward that is not finite, or a missing s_T.
    """
    inside("gamma", gamma, 0, 1)
    T = len(actions)
    if len(rewards) != T or len(states) not in (T, T + 1):
        raise ValueError(
            f"episode {id!r} has {T} actions, {len(rewards)} rewards and {len(states)} states; "
            "it needs as many rewards as actions and as many states, or one more."
        )
    goes_on = bootstrap_on_truncation and not terminated
    if goes_on and len(states) == T:
        raise ValueError(f"episode {id!r} was cut by a limit: bootstrapping needs the state after its end.")
    turns, G = [], 0.0
    for t in reversed(range(T)):
        G = _float(rewards[t]) + gamma * (G if t < T - 1 else 0.0)
        done = t == T - 1 and not goes_on
        after = "" if done else states[t + 1]
        G_t = G if isfinite(G) else nan  # the reward itself is refused below
        turns.append(Transition(states[t], actions[t], rewards[t], after, done, G_t, version, f"{id}:{t}"))
    return turns[::-1]


class Replay:
    """The newest transitions, drawn uniformly by a generator of its own.

    Args:
        capacity: most transitions that are kept; the paper's 10,000 (the authors' code: 100,000).
        max_age: a transition more than this many policy versions behind the newest is not drawn any
            more; None: all are.
        seed: of the draws.

    Attributes:
        rows: the ring's slots, in the order of insertion until it wraps.
        newest: the latest policy version seen.
    """

    def __init__(self, capacity: int = 10_000, max_age: int | None = None, seed: int = 0) -> None:
        inside("capacity", capacity, 1, float("inf"))
        inside("max_age", 0 if max_age is None else max_age, 0, float("inf"))
        self.capacity, self.max_age, self.newest = capacity, max_age, 0
        self.rows: list[Transition] = []
        self._next = 0  # the slot that is written next
        self._ids: set[str] = set()
        self._rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        """How many transitions can be drawn."""
        return len(self._slots())

    def add(self, transitions: Iterable[Transition]) -> None:
        """Append transitions; the oldest make room. All are added, or on an error none.

        Raises:
            ValueError: an id that is here already, such as a padding row's.
        """
        new = list(transitions)
        seen = set(self._ids)
        for row in new:
            if row.id in seen:
                raise ValueError(f"transition {row.id!r} is in the replay already; drop padding rows first.")
            seen.add(row.id)
        for row in new:
            if len(self.rows) < self.capacity:
                self.rows.append(row)
            else:
                self._ids.remove(self.rows[self._next].id)
                self.rows[self._next] = row
            self._ids.add(row.id)
            self._next = (self._next + 1) % self.capacity
            self.newest = max(self.newest, int(row.version))

    def sample(self, n: int, rng: np.random.Generator | None = None) -> list[Transition]:
        """N independent uniform draws.

        Args:
            n: N.
            rng: draws instead of the replay's own generator, which then stays as it is.

        Raises:
            ValueError: nothing can be drawn.
        """
        slots = self._slots()
        if not len(slots):
            raise ValueError("the replay is empty: add transitions first.")
        rng = self._rng if rng is None else rng
        return [self.rows[slots[k]] for k in rng.integers(len(slots), size=n)]

    def upcoming(self, draws: int, n: int) -> list[str]:
        """The distinct states of the next `draws` samples of n, if nothing is added before them."""
        before = self._rng.bit_generator.state
        states = dict.fromkeys(row.state for _ in range(draws) for row in self.sample(n))
        self._rng.bit_generator.state = before
        return list(states)

    def state_dict(self) -> Arrays:
        """All of it as arrays: numbers, texts (each distinct one once) as UTF-8 bytes, the rest as JSON."""
        texts = {text: k for k, text in enumerate(dict.fromkeys(self._texts()))}
        blobs = [text.encode("utf-8", "surrogatepass") for text in texts]
        meta = {
            "capacity": self.capacity,
            "newest": self.newest,
            "next": self._next,
            "ids": [row.id for row in self.rows],
            "rng": self._rng.bit_generator.state,
        }
        arrays: Arrays = {
            "text": np.frombuffer(b"".join(blobs), np.uint8),
            "text_ends": np.cumsum([len(blob) for blob in blobs], dtype=np.int64),
            "meta": pack_json(meta),
        }
        for name in _TEXTS:
            arrays[name] = np.array([texts[getattr(row, name)] for row in self.rows], np.int64)
        for name, kind in _NUMBERS.items():
            arrays[name] = np.array([getattr(row, name) for row in self.rows], kind)
        return arrays

    def load_state_dict(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over a `state_dict`: the same slots, and the same draws from here on.

        Raises:
            ValueError: another capacity.
        """
        meta = unpack_json(arrays["meta"])
        if meta["capacity"] != self.capacity:
            raise ValueError(
                f"the saved replay has capacity {meta['capacity']}, not {self.capacity} as this one."
            )
        blob, texts, start = arrays["text"].tobytes(), [], 0
        for end in arrays["text_ends"].tolist():
            texts.append(blob[start:end].decode("utf-8", "surrogatepass"))
            start = end
        spoken = {name: [texts[k] for k in arrays[name].tolist()] for name in _TEXTS}
        counted = {name: arrays[name].tolist() for name in _NUMBERS}
        columns = spoken | counted | {"id": meta["ids"]}
        rows = zip(*columns.values(), strict=True)
        self.rows = [Transition(**dict(zip(columns, row, strict=True))) for row in rows]
        self._ids = set(meta["ids"])
        self._next, self.newest = meta["next"], meta["newest"]
        self._rng.bit_generator.state = meta["rng"]

    def _slots(self) -> npt.NDArray[np.int64]:
        """The slots that can be drawn."""
        if self.max_age is None:
            return np.arange(len(self.rows))
        versions = np.fromiter((row.version for row in self.rows), np.int64, len(self.rows))
        return np.flatnonzero(versions >= self.newest - self.max_age)

    def _texts(self) -> Iterable[str]:
        return (getattr(row, name) for row in self.rows for name in _TEXTS)


def pack_json(value: Any) -> npt.NDArray[np.uint8]:
    """A JSON value as an array of bytes, so that a file of arrays needs no pickle."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def unpack_json(array: npt.NDArray[Any]) -> Any:
    """What `pack_json` packed."""
    return json.loads(array.tobytes())


def _number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _float(reward: object) -> float:
    return float(reward) if _number(reward) else nan  # type: ignore[arg-type]
