"""What the tests of the rollout share: a scripted LLM server, a tiny tokenizer, an episode in one call."""

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_multiturn.env import derive_seed
from verl_multiturn.rollout.audit import AuditedEpisode, Audits
from verl_multiturn.rollout.audit_config import Audit
from verl_multiturn.rollout.continuations import Vines
from verl_multiturn.rollout.episode import Sample, Task
from verl_multiturn.rollout.layouts import LAYOUTS, Limits
from verl_multiturn.rollout.parsing import ActionFormat
from verl_multiturn.rollout.pool import EnvPool
from verl_multiturn.rollout.prompts import PromptPolicy, Templates
from verl_multiturn.rollout.vine import VineEpisode
from verl_multiturn.rollout.vine_config import Vine

HERE = Path(__file__).parent


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
def sessions(tokens):
    """`sessions(config, fake, split, step, count, shared)`: outputs of a prompt's, run as verl's worker does.

    What they share, the rollout's `shared` (vines or audits), must have been let go by then.
    """
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap

    from verl_multiturn.dataset import EnvDataset
    from verl_multiturn.rollout import loop

    def run(config, fake, split, step, count, shared):
        loop._rollouts.clear()

        def made():
            return loop.MultiTurnLoop(
                trainer_config=DictConfigWrap(config), server_manager=fake, tokenizer=tokens,
                processor=None, hf_model_type="qwen2", dataset_cls=EnvDataset,
                data_config=DictConfigWrap(config.data),
            )  # fmt: skip

        async def go():
            row = {
                "raw_prompt": [], "index": 0, "data_source": "steady", "split": split, "task": 3,
                "task_hash": None, "task_type": "default", "uid": "u", "global_steps": step,
            }  # fmt: skip
            coroutines = [made().run({"temperature": 1.0}, **row, session_id=m) for m in range(count)]
            found = await asyncio.gather(*coroutines)
            kept = getattr(loop._rollouts[id(made().config)], shared)
            assert kept.groups == {} and len(asyncio.all_tasks()) == 1
            return found

        return asyncio.run(go())

    return run


@pytest.fixture(scope="session")
def play(tokens, chat, plan):
    """`play(script, row=, env=, ...)` plays one episode; see the returned names."""
    from verl_multiturn.rollout.episode import Episode
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


@pytest.fixture(scope="module")
def beside():
    """vine_environments imports its neighbour by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield
    sys.modules.pop("odd_environments", None)


class CountingPool(EnvPool):
    """Knows how many environments were made, given up, and are in use."""

    made = given_up = 0

    async def acquire(self, name, kwargs):
        idle = self.idle
        env = await super().acquire(name, kwargs)
        self.made += not idle
        return env

    async def abandon(self, env):
        self.given_up += 1
        await super().abandon(env)

    @property
    def idle(self):
        return sum(map(len, self._idle.values()))


@dataclass
class Call:
    """A request to the server."""

    request: str
    prompt: list
    seed: int
    sample: int
    primary: bool
    turn: int | None = None  # of a primary


@dataclass
class World:
    """A group of trajectories of one prompt, and all that they share."""

    tokens: object
    chat: object
    say: object  # (Call, text of the prompt) -> what is said
    vine: Vine
    env: str
    env_kwargs: dict
    row: str
    limits: Limits
    form: ActionFormat
    templates: Templates
    pool: CountingPool
    step: int = 1
    calls: list = field(default_factory=list)
    after: object = None  # awaited in every call
    audit: Audit | None = None
    audited: int = 0  # states of each trajectory
    audits: Audits | None = None

    def __post_init__(self):
        self.vines = Vines(self.vine)

    def episode(self, sample, kind=VineEpisode):
        seed = derive_seed("sampling of", sample)
        turn_of = {derive_seed(seed, t) % 2**31: t for t in range(50)}

        async def generate(prompt_ids, max_tokens, given):
            turn = turn_of.get(given)
            call = Call(f"r{sample}", list(prompt_ids), given, sample, turn is not None, turn)
            self.calls.append(call)
            await (asyncio.sleep(0) if self.after is None else self.after(call))
            text = self.say(call, self.tokens.decode(prompt_ids, skip_special_tokens=True))
            ids = [*self.tokens.encode(text, add_special_tokens=False), self.tokens.eos_token_id]
            return Sample(ids[:max_tokens], None, {})

        layout = LAYOUTS[self.row]
        more = {}
        if issubclass(kind, VineEpisode):
            more |= {"vines": self.vines, "seed": derive_seed("vine", self.step)}
        if issubclass(kind, AuditedEpisode):
            self.audits = self.audits or Audits(self.audit)
            more |= {"audits": self.audits, "audited": self.audited}
            more["audit_seed"] = derive_seed("audit", self.step)
        return kind(
            env_name=self.env,
            env_kwargs=self.env_kwargs,
            task=Task(3, "g", sample, dynamics_seed=derive_seed(3, sample, self.step), sampling_seed=seed),
            layout=layout(PromptPolicy(self.templates), self.chat, self.limits, self.tokens.eos_token_id),
            form=self.form,
            limits=self.limits,
            pool=self.pool,
            generate=generate,
            decode=lambda ids: self.tokens.decode(ids, skip_special_tokens=True),
            **more,
        )

    async def go(self, n, kind=VineEpisode):
        tasks = [asyncio.create_task(self.episode(m, kind).play()) for m in range(n)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert self.vines.groups == {} and (self.audits is None or self.audits.groups == {})
        assert len(asyncio.all_tasks()) == 1  # nothing is left behind
        return found

    def play(self, n=1, kind=VineEpisode):
        found = asyncio.run(self.go(n, kind))
        errors = [one for one in found if isinstance(one, BaseException)]
        if errors:
            raise errors[0]
        return found

    def rolled(self):
        return [call for call in self.calls if not call.primary]


@pytest.fixture
def world(tokens, chat, plan):
    """`world(say, env=, row=, rollouts=, ...)`; what is said is put into the form of an action."""

    def make(
        say,
        env=f"{HERE / 'odd_environments.py'}:Steady",
        row="turn",
        env_kwargs=None,
        form=None,
        templates=None,
        **given,
    ):
        budgets = {"max_prompt_tokens": 400, "max_response_tokens": 2000, "max_action_tokens": 40}
        budgets |= {name: given.pop(name) for name in (*budgets, "max_turns", "max_actions") if name in given}
        wrap = given.pop("wrap", "<answer>{}</answer>")
        pool = CountingPool(8, given.pop("timeout", 10.0))
        more = {"audit": given.pop("audit", None), "audited": given.pop("audited", 0)}
        return World(
            tokens, chat, lambda call, text: wrap.format(say(call, text)),
            Vine(**({"rollouts": 3, "group": 2} | given)), env, env_kwargs or {}, row, Limits(**budgets),
            form or plan.form, templates or plan.templates, pool, **more,
        )  # fmt: skip

    return make
