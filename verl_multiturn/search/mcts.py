"""Monte Carlo tree search over an environment with snapshots (Q-value paper, arXiv:2409.09345, 3.2).

One iteration selects by UCT from the root down, asks the policy for `width` candidates at a visited
leaf, carries out the first, plays on to the end, and books the return on the path:

    G_edge = r + γ · (0 if terminated, timeout_return if a limit ended it, invalid_return if the
             environment did not know the action, else the return of what followed)

What the authors' code does otherwise, each a test in tests/search/test_defects.py:
* the mean W / N is not divided by N again (the preset repo_compat does);
* a candidate is carried out when it is selected, not when it is proposed, and in its parent's
  restored state; equal candidates are merged before that;
* a finished subtree is closed and skipped, not deleted, and the search ends when the root is closed;
* every node on the path books the same visit, and so does the success that ends the search;
* a depth limit truncates, it does not make a node terminal; errors of the environment are raised.

With `parallel` = k iterations come in waves of up to k: each selects with a virtual loss on the paths of
those before it (W − loss · f, N + f where f are under way), all are played at once, and their returns are
booked in the order of selection. So the tree does not depend on who answers first.

The policy is any function, or any `worlds.World`; the noise of the environment is drawn anew in every
branch, so a search does not see what the real episode's chances will be. Random numbers follow from the
seed and the path: same seed, same tree.
"""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np

from verl_multiturn.base_env import Env, derive_seed
from verl_multiturn.search.config import PRESETS, SearchConfig, preset
from verl_multiturn.search.step_value import Step, StepValue
from verl_multiturn.search.tree import Node, Stopped, Tree
from verl_multiturn.search.uct import puct, uct
from verl_multiturn.search.worlds import Account, EnvWorld, Place, Propose, Spent, World

__all__ = ["PRESETS", "Growth", "Propose", "SearchConfig", "canonical", "preset", "root_of", "search"]

Together = Callable[[list[Coroutine[Any, Any, Any]]], Awaitable[list[Any]]]


def canonical(action: str) -> str:
    """Two actions are one if they differ in case and spacing only."""
    return " ".join(action.split()).lower()


def root_of(seed: int | str, observation: str) -> Node:
    """The root of a new tree."""
    return Node(None, None, 0, derive_seed("search", seed), observation=observation, executed=True)


def search(
    env: Env,
    observation: str,
    propose: Propose,
    rollout: Propose | None = None,
    config: SearchConfig = PRESETS["default"],
    seed: int | str = 0,
    same: Callable[[str], str] = canonical,
    value: StepValue | None = None,
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
        value: of the candidates, for `config.prior`.

    Raises:
        ValueError: the environment has no snapshots, a policy returns no list of strings, or a prior
            has no value.
    """
    if env.snapshots == "none":
        raise ValueError(f"{type(env).__name__} has no snapshots, which a search needs to go back.")
    work = env.fork()
    try:
        tree = Tree(root_of(seed, observation))
        tree.root.snapshot = work.snapshot()
        world = EnvWorld(work, propose, rollout or propose, Account(tree, config), same)
        _finished(Growth(tree, world, config, value).run())
    finally:
        work.close()
    return tree


def _finished(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in which nothing waits: no event loop is needed, and one may be running."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise RuntimeError("a search of a plain environment waited for something")


async def one_by_one(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results, one after the other."""
    return [await coroutine for coroutine in coroutines]


class Growth:
    """Grows a tree in a world.

    Args:
        tree: a root with its snapshot.
        world: what is asked, and acts.
        config: limits, penalties, budgets.
        value: of the candidates, for `config.prior`.
        together: how the calls of a wave are awaited.

    Raises:
        ValueError: a prior without a value, or a value without one.
    """

    def __init__(
        self,
        tree: Tree,
        world: World,
        config: SearchConfig,
        value: StepValue | None = None,
        together: Together = one_by_one,
    ) -> None:
        if (value is None) != (config.prior == "none"):
            raise ValueError(
                f"SearchConfig.prior={config.prior!r} needs a StepValue in `value`."
                if value is None
                else "a search with `value` needs SearchConfig.prior='visits' or 'puct'."
            )
        self.tree, self.world, self.config, self.value, self.together = tree, world, config, value, together
        self.stop = config.max_depth if config.rollout_depth is None else config.rollout_depth

    async def run(self) -> None:
        """Grow the tree until it is stopped, and let go of the environment's states."""
        self.tree.stopped = await self._grow()
        for node in self.tree.nodes():
            node.snapshot = node.said = None  # a tree is a record, not a set of environments
            node.flying = 0  # a spent budget leaves descents where they were

    async def _grow(self) -> Stopped:
        """Iterate, booking each return; why it ended."""
        tree, config = self.tree, self.config
        while tree.iterations < config.iterations:
            try:
                leaves = await self._leaves(min(config.parallel, config.iterations - tree.iterations))
            except Spent:
                return "budget"
            outcomes = await self.together([self._visit(leaf) for leaf in leaves])
            over = False
            for leaf, outcome in zip(leaves, outcomes, strict=True):
                for node in leaf.path:
                    node.flying -= 1
                if outcome is not None:  # else the return is unknown and is not booked; its costs are
                    over |= self._book(leaf, *outcome)
            if over:
                return "success"
            if None in outcomes:
                return "budget"
            if tree.root.closed and not config.revisit_closed:
                return "closed"
        return "iterations"

    def _book(self, leaf: Node, after: float, solved: bool) -> bool:
        """Book a return; whether it ends the search."""
        tree, config = self.tree, self.config
        leaf.backup(after if leaf is tree.root else leaf.reward + config.gamma * after, config.gamma)
        if leaf.closed:
            leaf.close()
        tree.iterations += 1
        tree.rollout_successes += solved
        return (leaf.success and config.stop_on_success) or (solved and config.stop_on_rollout_success)

    async def _leaves(self, k: int) -> list[Node]:
        """Up to k different nodes to visit: fewer where the descents meet."""
        leaves: list[Node] = []
        self.tree.root.flying += k
        going = [self.tree.root] * k
        while going:
            asking: list[Node] = []
            for start in going:
                node = self._descend(start)
                if self._to_expand(node):
                    asking.append(node)
                elif node in leaves:
                    for passed in node.path:
                        passed.flying -= 1
                else:
                    leaves.append(node)
            await self.together([self._expand(node) for node in dict.fromkeys(asking)])
            going = asking
        return leaves

    def _descend(self, node: Node) -> Node:
        """Down the tree to a node that is new, to be expanded, at max_depth, or an end."""
        while node.executed and not self._to_expand(node):
            if node.closed and not node.children:
                return node
            if node.depth >= self.config.max_depth or (node.parent and not node.N):
                return node
            node = self._choose(node)
            node.flying += 1
        return node

    def _to_expand(self, node: Node) -> bool:
        seen = node.executed and (node.parent is None or node.N > 0)
        return seen and not (node.expanded or node.closed or node.depth >= self.config.max_depth)

    def _choose(self, node: Node) -> Node:
        """The open child with the highest score; unvisited ones first, in the order of proposal."""
        config = self.config
        children = [child for child in node.children if config.revisit_closed or not child.closed]
        if len(children) == 1:
            return children[0]
        if config.prior == "none":
            for child in children:
                if not child.N + child.flying:
                    return child
        W, N, flying, prior = np.array([(c.W, c.N, c.flying, c.prior) for c in children]).T
        W, N = W - config.virtual_loss * flying, N + flying
        parent = node.N + float(flying.sum())
        if config.prior == "puct":
            scores = puct(W, N, parent, prior, config.c)
        else:
            if config.prior == "visits":
                W, N = W + config.prior_visits * prior, N + config.prior_visits
                parent += config.prior_visits * len(children)
            scores = uct(W / N if config.divide_twice else W, N, parent, config.c)
        return children[int(np.argmax(scores))]

    async def _expand(self, node: Node) -> None:
        """Ask for candidates and merge equal ones; none is carried out here."""
        answers = await self.world.candidates(node, self.config.width)
        node.expanded = True
        merged: dict[str, Node] = {}
        for one in answers:
            if one.key in merged:
                merged[one.key].votes += 1
            else:
                child = Node(one.action, node, node.depth + 1, derive_seed(node.seed, "child", one.key))
                child.text, child.said = one.text, one.said
                merged[one.key] = child
        node.children = list(merged.values())
        node.closed = not node.children  # a dead end: the policy knows no action here
        if self.value is not None and node.children:
            self._set_priors(node, self.value)

    def _set_priors(self, node: Node, value: StepValue) -> None:
        path = tuple(str(one.action) for one in node.path[1:])
        steps = [
            Step(node.depth, str(child.action), path, node.observation, node.messages, child.text)
            for child in node.children
        ]
        Q = value.values(steps).Q
        known = Q[~np.isnan(Q)]
        Q = np.where(np.isnan(Q), known.mean() if len(known) else 0.0, Q)  # unknown: as good as the others
        if self.config.prior == "puct":
            weights = np.exp((Q - Q.max()) / self.config.prior_temperature)
            Q = weights / weights.sum()
        for child, prior in zip(node.children, Q, strict=True):
            child.prior = float(prior)

    async def _visit(self, leaf: Node) -> tuple[float, bool] | None:
        """Carry out a new leaf; the return of what follows, and whether a rollout solved it; None: spent."""
        try:
            async with self.world.place() as place:
                if not leaf.executed:
                    await self._execute(place, leaf)
                return await self._after(place, leaf)
        except Spent:
            return None

    async def _execute(self, place: Place, node: Node) -> None:
        await place.carry_out(node)
        node.executed = True
        node.truncated = not node.terminal and (node.truncated or node.depth >= self.stop)
        node.closed = node.terminal or node.truncated or not node.valid
        if not node.closed:
            await place.keep(node)

    async def _after(self, place: Place, leaf: Node) -> tuple[float, bool]:
        """The return of what follows the leaf, and whether a rollout from it solved the task."""
        if leaf.terminal:
            return 0.0, False
        if not leaf.valid or (leaf.expanded and not leaf.children):
            return self.config.invalid_return, False
        if leaf.truncated:
            return self.config.timeout_return, False
        rollout = await place.roll_out(leaf, self.stop)
        ends = {"terminated": 0.0, "cut": self.config.timeout_return, "mute": self.config.invalid_return}
        after = ends[rollout.end]
        for reward in reversed(rollout.rewards):
            after = reward + self.config.gamma * after
        return after, rollout.solved
