"""Demonstrations for a warm start: the scripted expert, with noise, in the prompts of a run."""

import dataclasses
import hashlib
import json
import random
import re
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_multiturn.cache import cache_root
from verl_multiturn.compose import plain
from verl_multiturn.env import Env, derive_seed, make
from verl_multiturn.load import load_class
from verl_multiturn.rollout.parsing import ActionFormat
from verl_multiturn.rollout.prompts import Messages, PromptPolicy, Templates, View, load_policy

FIRST_SEED = 2_000_000_000  # demonstrations come from tasks no panel uses
_PARTS = ("demonstrations.py", "small_model.py", "rollout/prompts.py", "rollout/parsing.py")
CODE = tuple(Path(__file__).parent / name for name in _PARTS)
Demonstration = list[tuple[Messages, str]]  # per turn: what the policy reads, and the answer


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that the model depends on."""

    env: str
    env_kwargs: dict[str, Any]
    row: str
    templates: Templates
    policy: str | None
    form: ActionFormat
    max_tokens: int  # of a prompt, or of a whole conversation
    vocabulary: int  # tokens, at most
    width: int
    layers: int
    steps: int
    noise: float
    mistakes: float  # share of the random actions that come from other episodes
    imitate: str  # what was "played", or what the "expert" would have done there
    prompt_weight: float
    episodes: int | None  # distinct demonstrations; None: every one is new
    batch: int
    mixed: int  # batches whose rows are mixed
    lr: float
    seed: int

    @classmethod
    def of(cls, config: DictConfig) -> "Plan":
        """From a run's configuration."""
        settings = plain(config.multiturn)
        sizes = {name: value for name, value in settings["small_model"].items() if name != "cache"}
        if sizes["seed"] is None:
            sizes["seed"] = settings["seed"]
        return cls(
            env=settings["env"],
            env_kwargs=settings["env_kwargs"],
            row=settings["row"],
            templates=Templates.of(settings),
            policy=settings["prompt"]["policy"],
            form=ActionFormat(**settings["action"]),
            max_tokens=config.data.max_prompt_length + config.data.max_response_length,
            **sizes,
        )

    def digest(self) -> str:
        """Of the plan, of the code that carries it out, of the environment's file and its parts."""
        module = Path(str(sys.modules[load_class(self.env, Env).__module__].__file__))
        parts = sorted(set(re.findall(r"from environments\.(\w+_parts)\b", module.read_text())))
        files = [file for part in parts for file in sorted((module.parent / part).glob("*.py"))]
        sources = [path.read_text() for path in (*CODE, module, *files)]
        parts = [json.dumps(dataclasses.asdict(self), sort_keys=True, default=str), *sources]
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def small_folder(config: DictConfig) -> Path:
    """Where the small model of a run is kept."""
    plan, given = Plan.of(config), config.multiturn.small_model.cache
    cache = Path(given).expanduser() if given else cache_root()
    return cache / f"{Path(plan.env.partition(':')[0]).stem}-{plan.digest()}"


def demonstrations(plan: Plan, noise: float, first: int = FIRST_SEED) -> Iterator[Demonstration]:
    """Endless episodes of the expert, with a share `noise` of random actions.

    Yields:
        Per episode, a list of (messages the policy reads at a turn, its answer). With trajectory rows
        the messages of a turn contain those of the turns before.
    """
    env, policy = make(plan.env, **plan.env_kwargs), load_policy(plan.policy)(plan.templates)
    rng = random.Random(derive_seed("demonstrations", plan.seed, first))
    seed, elsewhere = first, deque[str](maxlen=1000)
    while True:
        yield _episode(env, policy, plan, noise, rng, seed, elsewhere)
        seed += 1


def repeated(plan: Plan) -> Iterator[Demonstration]:
    """`plan.episodes` demonstrations over and over, in changing order; all new ones if it is None."""
    stream = demonstrations(plan, plan.noise)
    if plan.episodes is None:
        yield from stream
        return
    kept = [next(stream) for _ in range(plan.episodes)]
    rng = random.Random(derive_seed("order of demonstrations", plan.seed))
    while True:
        rng.shuffle(kept)
        yield from kept


def _episode(
    env: Env,
    policy: PromptPolicy,
    plan: Plan,
    noise: float,
    rng: random.Random,
    seed: int,
    elsewhere: deque[str],
) -> Demonstration:
    observation, _ = env.reset(seed)
    view, chat = View(env.instruction, observation), list[dict[str, str]]()
    turns, over = [], False
    while not over:
        view.observation, view.admissible = observation, env.admissible()
        chance = rng.random() < noise
        action = env.random_action(rng) if chance else _expert(env, rng)
        if plan.mistakes and not chance:
            elsewhere.append(action)
        # What an action that does nothing here leads to must have been seen too: a policy that never met
        # it repeats its mistake to the end.
        if chance and elsewhere and rng.random() < plan.mistakes:
            action = rng.choice(elsewhere)
        learnt = _expert(env, rng) if chance and plan.imitate == "expert" else action
        answer = f"<{plan.form.tag}>{learnt}</{plan.form.tag}>" if plan.form.tag else learnt
        if plan.form.think:
            answer = f"<think></think>{answer}"
        if plan.row == "trajectory" and chat:
            chat = [*chat, policy.follow_up(view)]
        else:
            chat = policy.messages(view, min(plan.templates.history, len(view.past)), view.admissible)
        turns.append((chat, answer))
        view.past.append((observation, action))
        chat = [*chat, {"role": "assistant", "content": answer}]
        observation, _, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
    return turns


def _expert(env: Env, rng: random.Random) -> str:
    try:
        return env.expert()
    except NotImplementedError:
        return env.random_action(rng)


class Encoder:
    """Token ids and loss mask of a demonstration, by the pieces of the chat template."""

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens
        self.pieces: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        """Ids of a text, remembered: observations and answers repeat."""
        if text not in self.pieces:
            self.pieces[text] = self.tokens.encode(text, add_special_tokens=False)
        return self.pieces[text]

    def __call__(self, messages: Messages, answer: str) -> tuple[list[int], list[bool]]:
        """The chat with the answer; every assistant message is learnt, its end token too."""
        ids: list[int] = []
        mask: list[bool] = []
        for message in [*messages, {"role": "assistant", "content": answer}]:
            head = self.ids(f"<|im_start|>{message['role']}\n")
            body = [*self.ids(message["content"]), self.tokens.eos_token_id]
            end = self.ids("\n")
            learnt = message["role"] == "assistant"
            ids += head + body + end
            mask += [False] * len(head) + [learnt] * len(body) + [False] * len(end)
        return ids, mask
