"""Where a search asks, acts and plays on: the protocol, its costs, and a plain environment with a function.

What is asked and what acts may wait (a model's server, an environment in a process of its own); with a
plain environment nothing does, so that a search needs no event loop.
"""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from verl_multiturn.base_env import Env, derive_seed
from verl_multiturn.search.config import SearchConfig
from verl_multiturn.search.tree import History, Node, Tree

Propose = Callable[[str, History, int, random.Random], list[str]]  # observation, turns before, n, rng


class Spent(Exception):
    """The next call would exceed a budget."""


class Account:
    """Charges what is spent to a node and to the tree, within the budgets of a search."""

    def __init__(self, tree: Tree, config: SearchConfig) -> None:
        self.tree, self.config = tree, config

    def proposals(self, node: Node, n: int) -> None:
        """Charge n answers of the policy.

        Raises:
            Spent: they would exceed `max_proposals`.
        """
        limit = self.config.max_proposals
        if limit is not None and self.tree.proposals + n > limit:
            raise Spent
        node.proposals += n
        self.tree.proposals += n

    def steps(self, node: Node, n: int) -> None:
        """Charge n steps of the environment; n < 0 gives back what was not used.

        Raises:
            Spent: they would exceed `max_env_steps`.
        """
        limit = self.config.max_env_steps
        if limit is not None and self.tree.env_steps + n > limit:
            raise Spent
        node.env_steps += n
        self.tree.env_steps += n


@dataclass(frozen=True)
class Candidate:
    """An answer of the policy.

    Attributes:
        action: for the environment.
        key: answers with equal keys are one.
        text: the whole answer; None: it is the action.
        said: what the world needs to carry it out.
    """

    action: str
    key: str
    text: str | None = None
    said: Any = None


@dataclass(frozen=True)
class Rollout:
    """How a rollout went.

    Attributes:
        rewards: of its turns.
        end: the environment "terminated" it, a limit "cut" it, or the policy had no answer ("mute").
        solved: whether it ended in success.
    """

    rewards: list[float]
    end: Literal["terminated", "cut", "mute"]
    solved: bool


class Place(Protocol):
    """An environment, for one visit to a node."""

    async def carry_out(self, node: Node) -> None:
        """Act in the parent's state, with noise of the node's own; write down what came of it."""
        ...

    async def keep(self, node: Node) -> None:
        """Keep the state that `carry_out` led to, in `node.snapshot`."""
        ...

    async def roll_out(self, node: Node, until: int) -> Rollout:
        """Play on from the node, up to `until` turns from the root; an invalid action costs its turn."""
        ...


class World(Protocol):
    """What a search moves about in; calls may be made at the same time."""

    async def candidates(self, node: Node, n: int) -> list[Candidate]:
        """Up to n answers in the node's state, charged to it; none is carried out."""
        ...

    def place(self) -> AbstractAsyncContextManager[Place]:
        """For one visit."""
        ...


class EnvWorld:
    """One environment and a policy that is a function. Visits must follow one another.

    Args:
        env: may be moved about in.
        propose: (observation, history, n, rng) -> up to n actions.
        rollout: the same, asked for one action a turn.
        account: what the search has spent.
        same: actions with an equal image are one.
    """

    def __init__(
        self, env: Env, propose: Propose, rollout: Propose, account: Account, same: Callable[[str], str]
    ) -> None:
        self.env, self.propose, self.rollout, self.account, self.same = env, propose, rollout, account, same
        self.start = env.turn  # a replayed restore repeats the turns before the root too
        self.at: Node | None = None

    async def candidates(self, node: Node, n: int) -> list[Candidate]:
        """See `World`."""
        answers = self._ask(self.propose, node, node.observation, node.history(), n)
        return [Candidate(action, self.same(action)) for action in answers]

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        """See `World`."""
        self.at = None
        yield self

    async def carry_out(self, node: Node) -> None:
        """See `Place`."""
        assert node.parent is not None and node.action is not None
        self._restore(node.parent, node)
        self.account.steps(node, 1)
        node.observation, node.reward, node.terminal, node.truncated, info = self.env.step(node.action)
        node.valid, node.success = bool(info["valid"]), bool(info["success"])
        self.at = node

    async def keep(self, node: Node) -> None:
        """See `Place`."""
        node.snapshot = self.env.snapshot()

    async def roll_out(self, node: Node, until: int) -> Rollout:
        """See `Place`."""
        if self.at is not node:
            self._restore(node, node)
        observation, history, rewards = node.observation, node.history(), list[float]()
        for turn in range(node.depth, until):
            actions = self._ask(self.rollout, node, observation, history, 1, node.N, turn)
            if not actions:
                return Rollout(rewards, "mute", False)
            self.account.steps(node, 1)
            history += ((observation, actions[0]),)
            observation, reward, terminated, truncated, info = self.env.step(actions[0])
            rewards.append(reward)
            if terminated or truncated:
                return Rollout(rewards, "terminated" if terminated else "cut", bool(info["success"]))
        return Rollout(rewards, "cut", False)

    def _ask(
        self, policy: Propose, node: Node, observation: str, history: History, n: int, *purpose: int
    ) -> list[str]:
        """Up to n answers of a policy, within the budget; n are charged to the node."""
        self.account.proposals(node, n)
        answers = policy(observation, history, n, random.Random(derive_seed(node.seed, "ask", *purpose)))
        if isinstance(answers, str) or not all(isinstance(answer, str) for answer in answers):
            raise ValueError(f"a search's policy must return a list of actions, not {answers!r:.80}.")
        return list(answers[:n])

    def _restore(self, state: Node, payer: Node) -> None:
        """Put the environment into a node's state and renew its noise; a replay costs its turns."""
        if self.env.snapshots == "replay":
            self.account.steps(payer, self.start + state.depth)
        self.env.restore(state.snapshot, derive_seed(payer.seed, "noise", payer.N))
