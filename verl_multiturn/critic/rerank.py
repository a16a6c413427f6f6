"""CHAI's player: of k utterances that the policy offers, say the one that a critic likes best.

Verma et al. 2022 (arXiv:2204.08426), as in ArCHer's comparison (arXiv:2402.19446): the policy is left as it
is, and min(Q_1, Q_2) of the target network chooses (`critic.offline.rerank`). It costs k utterances a turn.
"""

import asyncio
import json
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.critic.config import CriticConfig, FixedPointWarning
from verl_multiturn.critic.offline import rerank
from verl_multiturn.critic.replay import history
from verl_multiturn.critic.utterance import UtteranceCritic
from verl_multiturn.env import derive_seed
from verl_multiturn.errors import intact
from verl_multiturn.rollout.episode import Episode, Sample
from verl_multiturn.rollout.layouts import NextPrompt
from verl_multiturn.rollout.prompts import View

ARRAYS, CONFIG = "critic.npz", "critic.json"
AGAIN = "verl-multiturn offline writes it again"


@dataclass
class RerankedEpisode(Episode):
    """Plays with re-ranked utterances.

    Attributes:
        critic: chooses.
        candidates: k.
        limit: characters of a state that the critic reads, as it was fitted; None: all.
    """

    critic: UtteranceCritic | None = None
    candidates: int = 5  # the authors' k
    limit: int | None = None
    _state: str = ""

    async def before_turn(self, env: Any, view: View, seen: Any, prompt: NextPrompt) -> None:
        """Remember the state as the critic reads it."""
        seen_so_far = [one["observation"] for one in self.details]
        said = [turn.action_text for turn in self.turns]
        self._state = history([*seen_so_far, view.observation], said, view.instruction, self.limit)[-1]

    async def _speak(self, prompt_ids: list[int], spent: int = 0) -> tuple[str, Sample, float]:
        started, offered = time.perf_counter(), list[tuple[str, Sample]]()
        for k in range(self.candidates):
            seed = self.task.sampling_seed
            seed = None if seed is None else derive_seed(seed, len(self.turns), k) % 2**31
            sample = await self.generate(prompt_ids, self.limits.max_action_tokens - spent, seed)
            offered.append((self.decode(sample.ids), sample))
        chosen = await asyncio.to_thread(self._best, [text for text, _ in offered])
        text, sample = offered[chosen]
        return text, sample, time.perf_counter() - started

    def _best(self, texts: list[str]) -> int:
        assert self.critic is not None
        Q = self.critic.q_values([self._state] * len(texts), texts, target=True)
        return int(rerank(Q[:1], Q[-1:])[0])


def save_critic(critic: UtteranceCritic, limit: int | None, folder: Path) -> None:
    """Write `critic.npz` and `critic.json` into a folder."""
    critic.save(folder / ARRAYS)
    text = json.dumps({"config": asdict(critic.config), "limit": limit}, indent=1)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def load_critic(folder: str | Path) -> tuple[UtteranceCritic, int | None]:
    """A critic of `save_critic`, and the characters of a state that it reads.

    Raises:
        ValueError: there is none.
    """
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise ValueError(
            f"no critic in {path}: it has no {CONFIG}; verl-multiturn offline writes one with its model"
        )
    with intact(path / CONFIG, AGAIN), warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedPointWarning)  # said when it was fitted, if it was to be said
        about = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        critic, limit = UtteranceCritic(CriticConfig(**about["config"])), about["limit"]
    critic.load(path / ARRAYS, AGAIN)
    return critic, limit
