"""From the rows of a training step to what ArCHer's critic reads: states, utterances, transitions."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_multiturn.columns import Floats
from verl_multiturn.critic.config import CriticConfig
from verl_multiturn.critic.replay import Transition, history, of_episode
from verl_multiturn.rewards import trained_reward


@dataclass(frozen=True)
class Dialogue:
    """The turns of one trajectory."""

    session: str  # key of the trajectory
    places: list[int]  # of its turns in `rows.places`, by time
    transitions: list[Transition]


def dialogues(
    rows: Any, config: CriticConfig, version: int, step: int, state: str = "history"
) -> list[Dialogue]:
    """The trajectories of a step; their order, and so all that follows, does not depend on the rows'.

    A reward is what is trained on, penalties taken off.

    Args:
        rows: of verl_multiturn.rollout.rows.
        config: whose gamma and bootstrap_on_truncation hold.
        version: of the policy that spoke.
        step: of training; part of the transitions' ids.
        state: what one is, see ArcherConfig.
    """
    sessions: dict[str, list[int]] = defaultdict(list)
    for place, (row, _, _) in enumerate(rows.places):
        sessions[rows.keys[row].rsplit("_", 1)[0]].append(place)
    found = []
    for session, unordered in sorted(sessions.items()):
        places = sorted(unordered, key=lambda place: rows.places[place][1]["index"])
        records = [rows.places[place][1] for place in places]
        whole = rows.places[places[0]][2]
        actions = [one["text"] for one in records]
        transitions = of_episode(
            _states(state, records, whole, actions),
            actions,
            [trained_reward(one) for one in records],
            id=f"{step}:{session}",
            gamma=config.gamma,
            version=version,
            terminated=whole["terminated"],
            bootstrap_on_truncation=config.bootstrap_on_truncation,
        )
        found.append(Dialogue(session, places, transitions))
    return found


def _states(
    kind: str, records: Sequence[dict[str, Any]], whole: dict[str, Any], actions: Sequence[str]
) -> list[str]:
    """s_0 … s_{T-1}, and s_T where the episode was cut and its last observation is known."""
    if kind == "prompt":
        return [one["prompt"] for one in records]
    seen, instruction = [one["observation"] for one in records], whole.get("instruction") or ""
    if whole.get("final_observation") is not None:
        seen.append(whole["final_observation"])
    if kind == "history":
        return history(seen, actions, instruction)
    return [f"{instruction}\n{observation}" if instruction else observation for observation in seen]


def prompts(
    rows: Any,
    found: Sequence[Dialogue],
    prompt_ids: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
) -> dict[str, list[int]]:
    """State -> all tokens that the policy read there.

    Args:
        rows: of the batch.
        found: its dialogues.
        prompt_ids: per row of the batch; responses likewise.
        responses: per row of the batch.
    """
    read = {}
    for dialogue in found:
        for place, turn in zip(dialogue.places, dialogue.transitions, strict=True):
            row, record, _ = rows.places[place]
            read[turn.state] = [*prompt_ids[row], *responses[row][: record["span"][0]]]
    return read


def calibration(
    found: Sequence[Dialogue], A: Floats, V: Floats, gamma: float, scale: float = 1.0
) -> dict[str, float]:
    """How the critic fits what it is asked about in a step.

    Args:
        found: of the step.
        A: (N,) advantages, by place; V likewise.
        V: (N,) values.
        gamma: discount of a turn.
        scale: of the rewards.

    Returns:
        "td_error", the mean of |r + γ V(s') − Q(s, a)|; and by turn t (from the tenth on, by tens):
        "advantage_turn_t", "value_error_turn_t", the mean of V(s_t) − G_t, and, where G_t varies,
        "explained_variance_turn_t", 1 − var(G_t − V) / var(G_t).
    """
    errors, columns = [], defaultdict(list)
    for dialogue in found:
        for t, (place, turn) in enumerate(zip(dialogue.places, dialogue.transitions, strict=True)):
            columns[_turn(t)].append((A[place], V[place], scale * turn.mc_return))
            follows = t + 1 < len(dialogue.places)
            if follows or turn.done:
                after = gamma * V[dialogue.places[t + 1]] if follows else 0.0
                errors.append(abs(scale * turn.reward + after - A[place] - V[place]))
    means = {"td_error": float(np.mean(errors))} if errors else {}
    for name, entries in columns.items():
        advantage, value, G = np.array(entries, np.float64).T
        means[f"advantage_turn_{name}"] = float(advantage.mean())
        means[f"value_error_turn_{name}"] = float((value - G).mean())
        if G.var() > 0:
            means[f"explained_variance_turn_{name}"] = float(1 - (G - value).var() / G.var())
    return means


def _turn(t: int) -> str:
    return str(t) if t < 10 else f"{t // 10 * 10}_to_{t // 10 * 10 + 9}"
