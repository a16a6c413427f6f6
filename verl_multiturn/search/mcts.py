"""Monte Carlo tree search over an environment with snapshots (Q-value paper, arXiv:2409.09345, 3.2).

One iteration selects by UCT from the root down, asks the policy for `width` candidates at a visited
leaf, carries out the first, plays on to the end, and books the return on the path:

    G_edge = r + γ · (0 if terminated, timeout_return if a limit ended it, invalid_return if the
             environment did not know the action, else the return of what followed)

What the authors' code does otherwise, each a test in tests/search/test_mcts.py:
* the mean W / N is not divided by N again (the preset repo_compat does);
* a candidate is carried out when it is selected, not when it is proposed, and in its parent's
  restored state; equal candidates are merged before that;
* a finished subtree is closed and skipped, not deleted, and the search ends when the root is closed;
* every node on the path books the same visit, and so does the success that ends the search;
* a depth limit truncates, it does not make a node terminal; errors of the environment are raised.

The policy is any function; the noise of the environment is drawn anew in every branch, so a search
does not see what the real episode's chances will be. Random numbers follow from the seed and the
path: same seed, same tree.
"""

import random
from collections.abc import Callable

import numpy as np

from verl_multiturn.base_env import Env, derive_seed
from verl_multiturn.search.config import PRESETS, SearchConfig, preset
from verl_multiturn.search.tree import History, Node, Stopped, Tree
from verl_multiturn.search.uct import uct

__all__ = ["PRESETS", "Propose", "SearchConfig", "canonical", "preset", "search"]

Propose = Callable[[str, History, int, random.Random], list[str]]  # observation, turns before, n, rng


def canonical(action: str) -> str:
    """Two actions are one if they differ in case and spacing only."""
    return " ".join(action.split()).lower()


def search(
    env: Env,
    observation: str,
    propose: Propose,
    rollout: Propose | None = None,
    config: SearchConfig = PRESETS["default"],
    seed: int | str = 0,
    same: Callable[[str], str] = canonical,
) -> Tree:
    """Grow a tree from the environment's current state; `env` itself is not touched.

    Args:
        env: in mid-episode, with snapshots.
        observation: its last observation.
        propose: (observation, history, n, rng) -> up to n actions; more are not looked at.
        rollout: the same, asked for one action a turn; default: `propose`.
        config: limits, penalties, budgets.
        seed: of the search.
        same: actions with an equal image are merged; the first spelling is kept.

    Raises:
        ValueError: the environment has no snapshots, or a policy returns no list of strings.
    """
    if env.snapshots == "none":
        raise ValueError(f"{type(env).__name__} has no snapshots, which a search needs to go back.")
    work = env.fork()
    try:
        return _Search(work, observation, propose, rollout or propose, config, seed, same).run()
    finally:
        work.close()


class _Spent(Exception):
    """The next call would exceed a budget."""


class _Search:
    """One search: the environment it moves about in, and the tree."""

    def __init__(
        self,
        env: Env,
        observation: str,
        propose: Propose,
        rollout: Propose,
        config: SearchConfig,
        seed: int | str,
        same: Callable[[str], str],
    ) -> None:
        self.env, self.propose, self.rollout, self.config, self.same = env, propose, rollout, config, same
        root = Node(None, None, 0, derive_seed("search", seed), observation=observation, executed=True)
        root.snapshot = env.snapshot()
        self.tree = Tree(root)
        self.start = env.turn  # a replayed restore repeats the turns before the root too
        self.stop = config.max_depth if config.rollout_depth is None else config.rollout_depth

    def run(self) -> Tree:
        """Grow the tree until it is stopped, and let go of the environment's states."""
        self.tree.stopped = self._grow()
        for node in self.tree.nodes():
            node.snapshot = None  # a tree is a record, not a set of environments
        return self.tree

    def _grow(self) -> Stopped:
        """Iterate, booking one return each time; why it ended."""
        tree, config = self.tree, self.config
        for _ in range(config.iterations):
            try:
                leaf = self._select()
                after, solved = self._after(leaf)
            except _Spent:
                return "budget"  # the return is unknown and is not booked; its costs are
            leaf.backup(after if leaf is tree.root else leaf.reward + config.gamma * after, config.gamma)
            if leaf.closed:
                leaf.close()
            tree.iterations += 1
            tree.rollout_successes += solved
            if (leaf.success and config.stop_on_success) or (solved and config.stop_on_rollout_success):
                return "success"
            if tree.root.closed and not config.revisit_closed:
                return "closed"
        return "iterations"

    def _select(self) -> Node:
        """Down the tree to a node that is new, or at max_depth, or an end."""
        node = self.tree.root
        while node.executed:
            if node.closed and not node.children:
                return node
            if node.depth >= self.config.max_depth or (node.parent and not node.N):
                return node
            if not node.expanded:
                self._expand(node)
                if not node.children:
                    node.closed = True  # a dead end: the policy knows no action here
                    return node
            node = self._choose(node)
        self._execute(node)
        return node

    def _choose(self, node: Node) -> Node:
        """The open child with the highest UCT; unvisited ones first, in the order of proposal."""
        again = self.config.revisit_closed
        children = [child for child in node.children if again or not child.closed]
        for child in children:
            if not child.N or len(children) == 1:
                return child
        W, N = np.array([(child.W, child.N) for child in children]).T
        scores = uct(W / N if self.config.divide_twice else W, N, node.N, self.config.c)
        return children[int(np.argmax(scores))]

    def _expand(self, node: Node) -> None:
        """Ask for candidates and merge equal ones; none is carried out here."""
        answers = self._ask(self.propose, node, node.observation, node.history(), self.config.width)
        node.expanded = True
        merged: dict[str, Node] = {}
        for action in answers:
            key = self.same(action)
            if key in merged:
                merged[key].votes += 1
            else:
                merged[key] = Node(action, node, node.depth + 1, derive_seed(node.seed, "child", key))
        node.children = list(merged.values())

    def _execute(self, node: Node) -> None:
        """Carry out a candidate in its parent's state, with noise of its own."""
        assert node.parent is not None and node.action is not None
        self._restore(node.parent, node)
        self._spend(node, 1)
        node.observation, node.reward, node.terminal, truncated, info = self.env.step(node.action)
        node.executed, node.valid, node.success = True, bool(info["valid"]), bool(info["success"])
        node.truncated = not node.terminal and (truncated or node.depth >= self.stop)
        node.closed = node.terminal or node.truncated or not node.valid
        if not node.closed:
            node.snapshot = self.env.snapshot()

    def _after(self, leaf: Node) -> tuple[float, bool]:
        """The return of what follows the leaf, and whether a rollout from it solved the task."""
        if leaf.terminal:
            return 0.0, False
        if not leaf.valid or (leaf.expanded and not leaf.children):
            return self.config.invalid_return, False
        if leaf.truncated:
            return self.config.timeout_return, False
        return self._roll_out(leaf)

    def _roll_out(self, leaf: Node) -> tuple[float, bool]:
        """Play on with the rollout policy to the end of the episode; an invalid action costs its turn."""
        if leaf.N:  # on the first visit the environment is still here
            self._restore(leaf, leaf)
        observation, history, solved = leaf.observation, leaf.history(), False
        rewards, after = [], self.config.timeout_return
        for turn in range(leaf.depth, self.stop):
            actions = self._ask(self.rollout, leaf, observation, history, 1, leaf.N, turn)
            if not actions:
                after = self.config.invalid_return
                break
            self._spend(leaf, 1)
            history += ((observation, actions[0]),)
            observation, reward, terminated, truncated, info = self.env.step(actions[0])
            rewards.append(reward)
            if terminated or truncated:
                after, solved = 0.0 if terminated else after, bool(info["success"])
                break
        for reward in reversed(rewards):
            after = reward + self.config.gamma * after
        return after, solved

    def _ask(
        self, policy: Propose, node: Node, observation: str, history: History, n: int, *purpose: int
    ) -> list[str]:
        """Up to n answers of a policy, within the budget; n are charged to the node."""
        limit = self.config.max_proposals
        if limit is not None and self.tree.proposals + n > limit:
            raise _Spent
        node.proposals += n
        self.tree.proposals += n
        answers = policy(observation, history, n, random.Random(derive_seed(node.seed, "ask", *purpose)))
        if isinstance(answers, str) or not all(isinstance(answer, str) for answer in answers):
            raise ValueError(f"a search's policy must return a list of actions, not {answers!r:.80}.")
        return list(answers[:n])

    def _restore(self, state: Node, payer: Node) -> None:
        """Put the environment into a node's state and renew its noise; a replay costs its turns."""
        if self.env.snapshots == "replay":
            self._spend(payer, self.start + state.depth)
        self.env.restore(state.snapshot, derive_seed(payer.seed, "noise", payer.N))

    def _spend(self, node: Node, steps: int) -> None:
        """Charge steps of the environment to a node, within the budget."""
        limit = self.config.max_env_steps
        if limit is not None and self.tree.env_steps + steps > limit:
            raise _Spent
        node.env_steps += steps
        self.tree.env_steps += steps
