"""The world of a language model's search: each visit is an episode of a run, taken up where a node left it.

What the policy reads, how its answer is parsed, what a turn does and which budgets end an episode are
`rollout.episode.Episode`'s, so that a tree holds what training would see.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Self

from verl_multiturn.compose import plain
from verl_multiturn.env import Env, derive_seed
from verl_multiturn.rollout.episode import Episode, Sample, Task
from verl_multiturn.rollout.layouts import LAYOUTS, Limits, NextPrompt, TrajectoryRows, TurnRows
from verl_multiturn.rollout.observed import Observed, reset, restore, snapshot
from verl_multiturn.rollout.parsing import ActionFormat, parse
from verl_multiturn.rollout.pool import EnvironmentFailure, EnvPool, ProcessEnv, ThreadEnv
from verl_multiturn.rollout.prompts import PromptPolicy, PromptTooLong, View, prompt_policy
from verl_multiturn.search.mcts import canonical, root_of
from verl_multiturn.search.scripted import Scripted, act
from verl_multiturn.search.tree import Node, Tree
from verl_multiturn.search.worlds import Account, Candidate, Place, Rollout, Spent


@dataclass(frozen=True)
class Shared:
    """What the trees of a collection share: the settings of a run, its environments, the model."""

    settings: dict[str, Any]
    policy: PromptPolicy
    form: ActionFormat
    limits: Limits
    pool: EnvPool
    model: Any  # `evaluate.Model` or `Scripted`
    chat: Any

    @classmethod
    def of(cls, config: Any, model: Any) -> Self:
        """From a run's configuration."""
        settings = plain(config.multiturn)
        limits = Limits(
            max_prompt_tokens=config.data.max_prompt_length,
            max_response_tokens=config.data.max_response_length,
            max_action_tokens=settings["max_action_tokens"],
            max_turns=settings["max_turns"],
            max_actions=settings["max_actions"],
        )
        kwargs = plain(config.data).get("apply_chat_template_kwargs") or {}
        form, policy = ActionFormat(**settings["action"]), prompt_policy(settings)
        return cls(settings, policy, form, limits, EnvPool.of(settings), model, model.chat(**kwargs))


@dataclass
class Spot:
    """What it takes to go on from a node."""

    view: View
    seen: Observed
    layout: TurnRows | TrajectoryRows
    prompt: NextPrompt | None  # None: the chat has no room for another answer
    turns: list[Any]  # that led here
    acted: int  # steps of the environment that led here
    taken: Any = None  # its snapshot


@dataclass
class Branch(Episode):
    """An episode from a spot on, whose costs a node pays."""

    account: Account = field(kw_only=True)
    payer: Node = field(kw_only=True)
    said: Sample | None = field(kw_only=True)  # what to say, once; None: ask
    model: Any = field(kw_only=True)
    env: Any = None

    async def _turn(self, env: Any, view: View, before: Observed, prompt: NextPrompt) -> Observed:
        self.env, acted, most = env, self.acted, self.form.max_actions
        self.account.steps(self.payer, most)
        try:
            if self.said is None:
                self.account.proposals(self.payer, 1)
            return await super()._turn(env, view, before, prompt)
        finally:
            self.account.steps(self.payer, self.acted - acted - most)

    async def _speak(self, prompt_ids: list[int], spent: int = 0) -> tuple[str, Sample, float]:
        if self.said is not None:
            return self.decode(self.said.ids), self.said, 0.0
        if isinstance(self.model, Scripted):
            seed = derive_seed(self.task.sampling_seed, len(self.turns))
            (action,) = await self.pool.call(self.env, f"{self.where}: act", act, self.model, seed, 1)
            sample = self.model.sample(action, self.form)
            return self.decode(sample.ids), sample, 0.0
        text, sample, seconds = await super()._speak(prompt_ids, spent)
        count(self.payer, prompt_ids, sample)
        return text, sample, seconds


def count(node: Node, prompt_ids: list[int], sample: Sample) -> None:
    """Charge the tokens of an answer."""
    node.prompt_tokens += len(prompt_ids)
    node.tokens += len(sample.ids)


class Branches:
    """The `World` of one task.

    Args:
        shared: of the collection.
        task: id, chances, content hash.
        seed: of the search.
    """

    def __init__(self, shared: Shared, task: Task, seed: int | str) -> None:
        self.shared, self.task = shared, task
        self.root = root_of(seed, "")
        self.tree = Tree(self.root)
        self.account: Account  # set with the search's budgets, before it starts
        self.replays = False

    async def start(self, account: Account) -> None:
        """Reset the environment and look at it.

        Raises:
            EnvironmentFailure: it failed, has no snapshots, or is not the task of the panel.
        """
        self.account = account
        where, root = f"{self.shared.settings['env']}, task {self.task.id}", self.root
        async with self.place() as visit:
            env = await visit.env()
            kind = await self.shared.pool.call(env, f"{where}: snapshots", snapshots)
            if kind == "none":
                raise EnvironmentFailure(f"{where} has no snapshots, which a search needs to go back")
            self.replays = kind == "replay"
            call = f"{where}: reset"
            seen = await self.shared.pool.call(env, call, reset, self.task.id, self.task.dynamics_seed)
            if self.task.content not in (None, seen.content):
                raise EnvironmentFailure(
                    f"{where} is not the task of the panel: its content hash is {seen.content}, the panel "
                    f"says {self.task.content}"
                )
            root.observation = seen.observation
            layout = LAYOUTS[self.shared.settings["row"]]
            model = self.shared.model
            rows = layout(self.shared.policy, self.shared.chat, self.shared.limits, model.eos)
            view = View(seen.instruction, seen.observation, seen.admissible)
            prompt = await asyncio.to_thread(rows.prompt, view)
            visit.spot = Spot(view, seen, rows, prompt, [], 0)
            await visit.keep(root)

    async def candidates(self, node: Node, n: int) -> list[Candidate]:
        """See `World`: n answers at the same time, each with a seed of its own."""
        spot, model, began = node.snapshot, self.shared.model, time.perf_counter()
        self.account.proposals(node, n)
        node.messages, node.admissible = list(spot.prompt.messages), spot.view.admissible
        self.root.instruction = spot.view.instruction
        if isinstance(model, Scripted):
            async with self.place() as visit:
                env = await visit.restored(node, node)
                seed = derive_seed(node.seed, "candidates")
                call = self.shared.pool.call(env, f"task {self.task.id}: act", act, model, seed, n)
                samples = [model.sample(action, self.shared.form) for action in await call]
        else:
            seeds = [derive_seed(node.seed, "candidate", i) % 2**31 for i in range(n)]
            most = self.shared.limits.max_action_tokens
            samples = await at_once([_one(model, spot.prompt.ids, most, seed) for seed in seeds])
            for sample in samples:
                count(node, spot.prompt.ids, sample)
        node.seconds += time.perf_counter() - began
        return [self._candidate(sample, spot) for sample in samples]

    def _candidate(self, sample: Sample, spot: Spot) -> Candidate:
        text, limit = self.shared.model.decode(sample.ids), self.shared.limits.max_actions
        actions = parse(text, self.shared.form).actions[: None if limit is None else limit - spot.acted]
        action = f" {self.shared.form.separator} ".join(actions)
        return Candidate(action, canonical(action), text, sample)

    @asynccontextmanager
    async def place(self) -> AsyncIterator["Visit"]:
        """See `World`."""
        visit = Visit(self)
        try:
            yield visit
        except Spent:
            visit.leave()
            raise
        except BaseException:
            await visit.abandon()
            raise
        visit.leave()

    def branch(self, spot: Spot, payer: Node, said: Sample | None, seed: int, until: int | None) -> Branch:
        """An episode that stands at `spot`; it ends after `until` turns from the root."""
        shared, limits = self.shared, self.shared.limits
        turns = limits.max_turns or spot.seen.max_turns
        return Branch(
            env_name=shared.settings["env"],
            env_kwargs=shared.settings["env_kwargs"],
            task=replace(self.task, sampling_seed=seed),
            layout=copy(spot.layout),  # a layout replaces its lists, it never changes them
            form=shared.form,
            limits=replace(limits, max_turns=turns if until is None else min(turns, until)),
            pool=shared.pool,
            generate=shared.model,
            decode=shared.model.decode,
            anchor=shared.settings["anchor"],
            turns=list(spot.turns),
            acted=spot.acted,
            account=self.account,
            payer=payer,
            said=said,
            model=shared.model,
        )


class Visit(Place):
    """See `worlds.Place`; takes an environment of the pool when it needs one."""

    def __init__(self, world: Branches) -> None:
        self.world, self.pool = world, world.shared.pool
        self.at: Node | None = None
        self.spot: Spot | None = None  # where `carry_out` led to
        self._env: ThreadEnv | ProcessEnv | None = None

    async def env(self) -> ThreadEnv | ProcessEnv:
        """The environment of this visit."""
        if self._env is None:
            settings = self.world.shared.settings
            self._env = await self.pool.acquire(settings["env"], settings["env_kwargs"])
        return self._env

    def leave(self) -> None:
        """Give the environment back."""
        settings = self.world.shared.settings
        if self._env is not None:
            self.pool.release(self._env, settings["env"], settings["env_kwargs"])

    async def abandon(self) -> None:
        """Give the environment up."""
        if self._env is not None:
            await self.pool.abandon(self._env)

    async def restored(self, state: Node, payer: Node) -> ThreadEnv | ProcessEnv:
        """The environment in a node's state, with new noise; a replay costs its steps.

        Raises:
            EnvironmentFailure: a replay shows something else than before.
        """
        spot, env = state.snapshot, await self.env()
        if self.world.replays:
            self.world.account.steps(payer, spot.acted)
        what = f"task {self.world.task.id}: restore to turn {state.depth}"
        seed = derive_seed(payer.seed, "noise", payer.N)
        if (problem := await self.pool.call(env, what, restore, spot.taken, seed)) is not None:
            raise EnvironmentFailure(f"{what}: {problem}")
        return env

    async def carry_out(self, node: Node) -> None:
        """See `Place`: the turn of an episode, with the answer that was given."""
        assert node.parent is not None
        began, spot = time.perf_counter(), node.parent.snapshot
        env = await self.restored(node.parent, node)
        branch = self.world.branch(spot, node, node.said, node.seed, None)
        view = replace(spot.view, past=list(spot.view.past))
        seen = await branch._turn(env, view, spot.seen, spot.prompt)
        turn, over = branch.turns[-1], len(branch.turns) >= (branch.limits.max_turns or 0)
        node.observation, node.reward, node.terminal = seen.observation, float(turn.reward), seen.terminated
        node.valid, node.success = bool(turn.valid), bool(seen.info.get("success", False))
        node.truncated = seen.truncated or over or branch._actions_left() == 0
        if not (node.terminal or node.truncated):
            view.observation, view.admissible = seen.observation, seen.admissible
            try:
                prompt = await asyncio.to_thread(branch.layout.prompt, view)
            except PromptTooLong:
                prompt = None  # a run fails here: nothing can follow
            node.truncated = prompt is None
            self.spot = Spot(view, seen, branch.layout, prompt, branch.turns, branch.acted)
        self.at = node
        node.seconds += time.perf_counter() - began

    async def keep(self, node: Node) -> None:
        """See `Place`."""
        assert self.spot is not None
        what = f"task {self.world.task.id}: snapshot at turn {node.depth}"
        self.spot.taken = await self.pool.call(await self.env(), what, snapshot)
        node.snapshot = self.spot

    async def roll_out(self, node: Node, until: int) -> Rollout:
        """See `Place`: an episode played to its end."""
        began, spot = time.perf_counter(), node.snapshot
        env = await (self.env() if self.at is node else self.restored(node, node))
        branch = self.world.branch(spot, node, None, derive_seed(node.seed, "roll", node.N), until)
        view, solved, terminated = replace(spot.view, past=list(spot.view.past)), False, False
        try:
            seen, _ = await branch._go_on(env, view, spot.seen, spot.prompt)
            solved, terminated = bool(seen.info.get("success", False)), seen.terminated
        except PromptTooLong:
            pass  # cut, as in `carry_out`
        node.seconds += time.perf_counter() - began
        rewards = [float(turn.reward) for turn in branch.turns[len(spot.turns) :]]
        return Rollout(rewards, "terminated" if terminated else "cut", solved)


def snapshots(env: Env) -> str:
    """The kind of its snapshots."""
    return env.snapshots


async def _one(model: Any, prompt_ids: list[int], max_tokens: int, seed: int) -> Sample:
    sample: Sample = await model(prompt_ids, max_tokens, seed)
    return sample


async def at_once(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of calls made at the same time; the first error ends them all."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
