"""What the tests of the rollout share: a scripted LLM server, a tiny tokenizer, an episode in one call."""

import asyncio
from types import SimpleNamespace

import pytest


class Server:
    """verl's LLM server client, whose utterances were written down before.

    Args:
        tokens: encodes utterances given as text, the stop token after them.
        script: texts, or ids as they would be sampled; then the last one again and again.
    """

    def __init__(self, tokens, script):
        self.script = [
            [*tokens.encode(one, add_special_tokens=False), tokens.eos_token_id]
            if isinstance(one, str)
            else list(one)
            for one in script
        ]
        self.calls, self.said, self.log_probs = [], [], []

    async def generate(self, request_id, prompt_ids, sampling_params):
        from verl.workers.rollout.replica import TokenOutput

        await asyncio.sleep(0)
        ids = self.script[min(len(self.calls), len(self.script) - 1)][: sampling_params["max_tokens"]]
        # Every log-probability is another number, so that a shifted one is noticed.
        log_probs = [-1e-3 * (1 + n + sum(map(len, self.said))) for n in range(len(ids))]
        self.calls.append((request_id, list(prompt_ids), dict(sampling_params)))
        self.said.append(ids)
        self.log_probs.append(log_probs)
        version = len(self.calls)
        extra = {"min_global_steps": version, "max_global_steps": version}
        return TokenOutput(token_ids=ids, log_probs=log_probs, extra_fields=extra)


@pytest.fixture(scope="session")
def plan():
    """The smallest plan of a small model."""
    from verl_multiturn.demonstrations import Plan
    from verl_multiturn.rollout.parsing import ActionFormat
    from verl_multiturn.rollout.prompts import Templates

    plain = Templates(first="{observation}", turn="{observation}", next="{observation}", history=0)
    return Plan(
        env="frozen_lake", env_kwargs={}, row="turn", templates=plain, policy=None,
        form=ActionFormat(tag="answer", think=False), max_tokens=1024, vocabulary=512, width=32,
        layers=1, steps=2,
        noise=0.4, mistakes=0.0, imitate="played", prompt_weight=0.0, episodes=None,
        batch=4, mixed=1, lr=3e-3, seed=1,
    )  # fmt: skip


@pytest.fixture(scope="session")
def tokens(plan):
    """A tokenizer as the small model has it."""
    from verl_multiturn import small_model

    return small_model.tokenizer(plan, episodes=5)


@pytest.fixture(scope="session")
def chat(tokens):
    """verl's own builder of token streams."""
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    return create_continuous_token_builder(tokens, hf_model_type="qwen2")


@pytest.fixture(scope="session")
def server(tokens):
    """`server(script)`."""
    return lambda script: Server(tokens, script)


@pytest.fixture(scope="session")
def play(tokens, chat, plan):
    """`play(script, row=, env=, ...)` plays one episode; see the returned names."""
    from verl_multiturn.rollout.episode import Episode, Sample, Task
    from verl_multiturn.rollout.layouts import LAYOUTS, Limits
    from verl_multiturn.rollout.pool import EnvPool
    from verl_multiturn.rollout.prompts import PromptPolicy
    from verl_multiturn.rollout.rows import to_outputs

    def run(script, row="turn", env="frozen_lake", form=None, templates=None, pool=None, **given):
        server = Server(tokens, script)
        task = {"id": 3, "group": "g", "sample": 0, "dynamics_seed": 1, "content": None}
        task |= {name: given.pop(name) for name in task.keys() & given}
        budgets = {"max_prompt_tokens": 400, "max_response_tokens": 2000, "max_action_tokens": 40}
        limits = Limits(**(budgets | given))

        async def generate(prompt_ids, max_tokens, seed):
            out = await server.generate("r", prompt_ids, {"max_tokens": max_tokens, "seed": seed})
            return Sample(list(out.token_ids), list(out.log_probs), dict(out.extra_fields))

        episode = Episode(
            env_name=env,
            env_kwargs={},
            task=Task(**task),
            layout=LAYOUTS[row](PromptPolicy(templates or plan.templates), chat, limits, tokens.eos_token_id),
            form=form or plan.form,
            limits=limits,
            pool=pool or EnvPool(4, 5.0),
            generate=generate,
            decode=lambda ids: tokens.decode(ids, skip_special_tokens=True),
        )
        trajectory = asyncio.run(episode.play())
        outputs = to_outputs(trajectory, row, tokens.eos_token_id)
        return SimpleNamespace(trajectory=trajectory, outputs=outputs, server=server, episode=episode)

    return run
