"""The `multiturn/vine_*` metrics of a VinePPO run: what the values of a step took, and what they are."""

from typing import Any

import numpy as np

from verl_multiturn.columns import Floats


def of_vine(sessions: list[dict[str, Any]]) -> dict[str, float]:
    """From the counts of `VineEpisode`, one trajectory record each with its `vine`.

    Means over the trajectories of a step; `failed_share`, `truncated_share` and `hole_share` are of its
    continuations, of those that came to an end, and of its states; `return_std` is a mean over states.
    `rollouts_per_state`: continuations of a state that has its own; `outside`: states whose returns leave
    [0, 1], with `Vine.adaptive`.
    `tokens_share`: tokens of the continuations against those of K for every state, none shared; of what
    they read, `cached_share` was in the prefix cache (left out where the server does not say).
    `last_tail_seconds` went by after the step's last trajectory had ended.
    """
    counts = [session["vine"] for session in sessions]

    def total(name: str) -> float:
        return float(sum(count[name] for count in counts))

    names = (
        "states",
        "unique_states",
        "skipped_states",
        "outside",
        "rollouts",
        "failed",
        "mismatches",
        "turns",
        "tokens",
        "tail_seconds",
    )
    found = {name: total(name) / max(1, len(counts)) for name in names}
    found["failed_share"] = total("failed") / max(1.0, total("rollouts"))
    found["truncated_share"] = total("truncated") / max(1.0, total("rollouts") - total("failed"))
    found["hole_share"] = total("holes") / max(1.0, total("states"))
    found["rollouts_per_state"] = total("rollouts") / max(1.0, total("unique_states"))
    spread = sum(count["return_std"] * count["unique_states"] for count in counts)
    found["tokens_share"] = total("tokens") / max(1.0, total("naive_tokens"))
    if total("read"):
        found["cached_share"] = total("cached") / total("read")
    played = max((count["ended"] for count in counts), default=0.0)
    waited = max((count["ended"] + count["tail_seconds"] for count in counts), default=0.0)
    found["last_tail_seconds"] = waited - played
    found["return_std"] = spread / max(1.0, total("unique_states"))
    return {f"multiturn/vine_{name}/mean": value for name, value in found.items()}


def of_values(values: Floats) -> dict[str, float]:
    """Mean and deviation of V over the states that have continuations; nothing where none has.

    Args:
        values: (N,), one for each step; nan where it has none.
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return {}
    found = {"value": float(np.mean(known)), "value_std": float(np.std(known))}
    return {f"multiturn/vine_{name}/mean": value for name, value in found.items()}
