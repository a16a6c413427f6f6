"""Offline ArCHer: fit the critic to recorded dialogues, and weigh what an actor may imitate of them.

No policy speaks here, so V learns from the replayed utterance: by expectile regression (IQL, Kostrikov
et al. 2021, arXiv:2110.06169), or the mean of it (sarsa). The actor imitates with the weights of
advantage-weighted regression (Peng et al. 2019, arXiv:1910.00177), exp(β A), as in the offline part of
arXiv:2402.19446. Beside it stand its baselines: filtered imitation, and CHAI's re-ranking of k
candidates by Q (Verma et al. 2022, arXiv:2204.08426).

A recorded dialogue is a trajectory of a run's folder (verl_multiturn.runs), or one line of JSON:

    {"turns": [{"observation": text, "action": text, "reward": number}, ...],
     "instruction": text, "terminated": bool, "final_observation": text, "version": int}

Only "turns" is needed; "final_observation" is what a cut dialogue is bootstrapped from. A turn may also
hold what only an actor reads: "prompt", the text of the message it answered, or "admissible", the actions
that its prompt listed.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from verl_multiturn.algorithms.archer import awr_weights
from verl_multiturn.algorithms.registry import Config
from verl_multiturn.algorithms.vectors import inside, numbers, vectors
from verl_multiturn.columns import Floats, Ints
from verl_multiturn.critic.config import PRESETS, CriticConfig, FixedPointWarning
from verl_multiturn.critic.encoders import Encoder
from verl_multiturn.critic.replay import Transition, history, of_episode
from verl_multiturn.critic.utterance import UtteranceCritic
from verl_multiturn.rewards import trained_reward
from verl_multiturn.run_files import lines
from verl_multiturn.runs import Run

ABOUT = ("instruction", "terminated", "final_observation")  # what a recorded trajectory says of itself


@dataclass(frozen=True)
class OfflineConfig(Config):
    """How recorded utterances become training data of an actor; sources as in CriticConfig."""

    actor: Literal["awr", "filtered_bc", "bc"] = "awr"  # paper's offline study
    beta: float = 1.0  # β; offline code
    weight_clip: float | None = 20.0  # largest weight; ours; offline code has none
    quantile: float = 0.9  # of filtered_bc; code
    epochs: int = 10  # of the critic; offline code

    def __post_init__(self) -> None:
        if self.actor in ("reinforce", "ppo"):
            raise ValueError(
                f"OfflineConfig.actor={self.actor} is refused: its gradient needs fresh utterances, and "
                "on recorded ones it collapses (the paper's 20 Questions: return -20, with awr -14.1); "
                "use awr, filtered_bc or bc."
            )
        super().__post_init__()
        self.check_range("epochs", 1)
        self.check_range("quantile", 0, 1)
        for key in ("beta", "weight_clip"):
            if (value := getattr(self, key)) is not None and value <= 0:
                raise ValueError(f"OfflineConfig.{key} must be above 0, not {value!r}.")


def read(
    source: str | Path,
    config: CriticConfig = PRESETS["offline"],
    split: str = "train",
    limit: int | None = None,
) -> list[list[Transition]]:
    """The transitions of every recorded dialogue, one list each.

    In a run a turn's reward is what was trained on (penalties off), its version the step, and its
    action the whole text that the policy wrote.

    Args:
        source: a run's folder, or a .jsonl file of dialogues.
        config: whose gamma and bootstrap_on_truncation hold.
        split: of a run.
        limit: characters of a state that are kept (see `history`).

    Raises:
        ValueError: neither, an unknown split, a malformed dialogue (its place is named), a reward that is no
            finite number, or bootstrap_on_truncation with a run that did not record its last observations.
    """
    return [_transitions(where, record, config, limit) for where, record in records(source, split)]


def records(source: str | Path, split: str = "train") -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each recorded dialogue stands, and the dialogue, in the order of `read`; nothing is checked.

    Raises:
        ValueError: neither a run's folder nor a file, or an unknown split.
    """
    path = Path(source)
    return _of_file(path) if path.is_file() else _of_run(Run(path), split)


def fit(
    dialogues: Sequence[Sequence[Transition]],
    config: CriticConfig = PRESETS["offline"],
    epochs: int = 10,
    device: str = "cpu",
    encoder: Encoder | None = None,
) -> tuple[UtteranceCritic, list[dict[str, float]]]:
    """A critic of the recorded dialogues, and its metrics of every epoch.

    The replay holds all transitions, whatever capacity, min_size and max_age the config has; an epoch
    is as many optimizer steps as draw the number of transitions.

    Raises:
        ValueError: no transition, or v_target=policy, as there is no policy to ask.
    """
    if config.v_target == "policy":
        raise ValueError(
            "offline there is no policy to ask: v_target must be expectile, sarsa or mc, not policy."
        )
    rows = [row for dialogue in dialogues for row in dialogue]
    if not rows:
        raise ValueError("there is no recorded turn to fit a critic to.")
    whole = replace(config, capacity=max(len(rows), config.batch), min_size=1, max_age=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedPointWarning)  # offline there is no other fixed point to be had
        critic = UtteranceCritic(whole, device, encoder)
    critic.add(rows)
    return critic, [critic.train(ceil(len(rows) / config.batch)) for _ in range(epochs)]


def imitate(
    critic: UtteranceCritic | None,
    dialogues: Sequence[Sequence[Transition]],
    config: OfflineConfig | None = None,
) -> Floats:
    """How much an actor imitates each recorded utterance: its loss is −mean(w log π(a | s)). -> (N,).

    awr: min(exp(β A), clip) by the critic; filtered_bc: 1 in the dialogues that are kept, else 0; bc: 1.

    Args:
        critic: of `fit`; only awr reads it.
        dialogues: N turns in all.
        config: see OfflineConfig.

    Raises:
        ValueError: awr without a critic.
    """
    config = OfflineConfig() if config is None else config
    if config.actor == "bc":
        return np.ones(sum(map(len, dialogues)))
    if config.actor == "filtered_bc":
        kept = set(filtered([sum(row.reward for row in one) for one in dialogues], config.quantile).tolist())
        return np.array([float(k in kept) for k, dialogue in enumerate(dialogues) for _ in dialogue])
    if critic is None:
        raise ValueError("actor=awr weighs by a critic's advantages: give the critic of fit.")
    rows = [row for dialogue in dialogues for row in dialogue]
    A = critic.advantage([row.state for row in rows], [row.action for row in rows])
    return awr_weights(A, config.beta, config.weight_clip)


def filtered(returns: npt.ArrayLike, quantile: float = 0.9, compat: Literal["archer"] | None = None) -> Ints:
    """Filtered behaviour cloning: the trajectories at or above a quantile of all returns. -> indices.

    Where the quantile is the lowest return itself, only what is better is kept, maybe nothing: by the
    authors' rule (compat="archer") all would be, as long as fewer than 1 − quantile succeed.

    Args:
        returns: (N,) of every trajectory so far.
        quantile: in [0, 1].
        compat: "archer": the authors' rule, return >= quantile.

    Raises:
        ValueError: empty, nan, or a quantile outside [0, 1].
    """
    inside("quantile", quantile, 0, 1)
    (R,) = vectors(returns=returns)
    cut = np.quantile(R, quantile)
    strict = cut == R.min() and quantile > 0 and compat is None
    return np.flatnonzero(R > cut if strict else R >= cut)


def rerank(q1: npt.ArrayLike, q2: npt.ArrayLike) -> Ints:
    """CHAI: of k candidates per state, the one with the highest min(Q_1, Q_2); ties: the first. -> (N,).

    Args:
        q1: (N, k) Q_1^tgt(s, a_1 … a_k) of the target network (UtteranceCritic.q_values).
        q2: (N, k)

    Raises:
        ValueError: other shapes, or nan.
    """
    Q1, Q2 = numbers("q1", q1), numbers("q2", q2)
    if Q1.ndim != 2 or Q1.shape != Q2.shape or not Q1.size:
        raise ValueError(f"q1 and q2 must be (N, k) and not empty, not of shapes {Q1.shape} and {Q2.shape}.")
    if np.isnan(Q1).any() or np.isnan(Q2).any():
        raise ValueError("q1 and q2 must not hold nan.")
    return np.asarray(np.minimum(Q1, Q2).argmax(axis=1), np.int64)


def _of_run(run: Run, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for step in run.steps(split):
        for record in run.trajectories(split, step):
            where = f"{split}/{step}/{record['group']}/{record['trajectory']}"
            turns = [
                {
                    "observation": turn["observation"],
                    "action": turn["text"],
                    "reward": _trained(turn),
                    "prompt": turn.get("prompt"),
                }
                for turn in record["turns"]
            ]
            about = {name: value for name, value in record.items() if name in ABOUT}
            yield where, about | {"turns": turns, "version": step}


def _of_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, record in enumerate(lines(path), start=1):
        yield f"{path.name}, line {number}", record


def _trained(turn: dict[str, Any]) -> float | None:
    return None if turn["reward"] is None else trained_reward(turn)


def _transitions(
    where: str, record: dict[str, Any], config: CriticConfig, limit: int | None
) -> list[Transition]:
    turns = record.get("turns") if isinstance(record, dict) else None
    if not isinstance(turns, list):
        raise ValueError(f"{where} is no dialogue: it must be an object with a list of turns.")
    for t, turn in enumerate(turns):
        for name in ("observation", "action", "reward"):
            if not isinstance(turn, dict) or name not in turn:
                raise ValueError(f"{where}: turn {t} has no {name!r}.")
            if name != "reward" and not isinstance(turn[name], str):
                raise ValueError(f"{where}: the {name} of turn {t} must be a text, not {turn[name]!r:.60}.")
    seen = [turn["observation"] for turn in turns]
    if record.get("final_observation") is not None:
        seen.append(record["final_observation"])
    actions = [turn["action"] for turn in turns]
    return of_episode(
        history(seen, actions, record.get("instruction") or "", limit),
        actions,
        [turn["reward"] for turn in turns],
        id=where,
        gamma=config.gamma,
        version=record.get("version", 0),
        terminated=record.get("terminated", True),
        bootstrap_on_truncation=config.bootstrap_on_truncation,
    )
