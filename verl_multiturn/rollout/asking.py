"""Single utterances outside of any episode: prompts in, what verl's LLM servers sample there out.

For ArCHer, whose critic and in-silico actor need fresh utterances at replayed states, and for the baseline
of a Q model's advantages. The servers must be awake: between the end of a step's rollout and the moment
verl puts them to sleep.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from verl_multiturn.errors import RunStopped
from verl_multiturn.rollout.episode import Sample


@dataclass(frozen=True)
class Question:
    """A prompt to be continued.

    Attributes:
        prompt_ids: what the policy reads.
        seeds: one for each utterance; None: the engine's own. The utterances share a server and its
            prefix cache.
    """

    prompt_ids: list[int]
    seeds: tuple[int | None, ...] = (None,)


def ask(
    client: Any,
    questions: Sequence[Question],
    sampling_params: dict[str, Any],
    max_inflight: int = 256,
    timeout: float = 3600.0,
) -> list[list[Sample]]:
    """Sample every utterance. -> one list per question.

    Args:
        client: verl's LLMServerClient.
        questions: in any number.
        sampling_params: verl's, with max_tokens.
        max_inflight: utterances at the same time.
        timeout: seconds for all of them.

    Raises:
        RunStopped: they took longer.
    """
    if not questions:
        return []
    try:
        return asyncio.run(_ask(client, questions, sampling_params, max_inflight, timeout))
    except TimeoutError:
        count = sum(len(one.seeds) for one in questions)
        raise RunStopped(
            f"{count} fresh utterances took longer than {timeout:g} s (multiturn.episode_timeout): raise it, "
            "or ask for fewer (multiturn.archer.updates, multiturn.q_advantage.candidates)"
        ) from None


async def _ask(
    client: Any,
    questions: Sequence[Question],
    sampling_params: dict[str, Any],
    max_inflight: int,
    timeout: float,
) -> list[list[Sample]]:
    free = asyncio.Semaphore(max_inflight)

    async def one(request_id: str, prompt_ids: list[int], seed: int | None) -> Sample:
        params = dict(sampling_params) | ({} if seed is None else {"seed": seed})
        async with free:
            out = await client.generate(request_id=request_id, prompt_ids=prompt_ids, sampling_params=params)
        log_probs = None if out.log_probs is None else list(out.log_probs)
        return Sample(list(out.token_ids), log_probs, dict(out.extra_fields))

    async with asyncio.timeout(timeout):
        calls = []
        for question in questions:
            request_id = uuid4().hex
            calls += [one(request_id, question.prompt_ids, seed) for seed in question.seeds]
        said = iter(await asyncio.gather(*calls))
    return [[next(said) for _ in question.seeds] for question in questions]
