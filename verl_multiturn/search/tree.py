"""The tree that a search grows: nodes with (W, N) kept apart, costs, and the nested-dict format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, nan
from typing import Any, Literal

from verl_multiturn.errors import unknown

History = tuple[tuple[str, str], ...]  # (observation, action) of every turn before, oldest first
COSTS = ("prompt_tokens", "tokens", "seconds")  # of a node, beside proposals and env_steps
OPTIONAL = ("text", "messages", "instruction", "admissible")  # recorded where there is one
Stopped = Literal["iterations", "closed", "success", "budget"]


@dataclass(slots=True, eq=False)
class Node:
    """An action and where it led. The root is the start of the search, with no action.

    Attributes:
        action: as it was proposed first, and is sent to the environment.
        seed: of everything random that happens here; follows from the path alone.
        votes: how often it was proposed among its parent's candidates.
        N: visits.
        W: sum over the visits of the return from this action on; W2 of its square.
        best: the highest of these returns.
        reward: what the action paid at once.
        executed: the action was carried out; a candidate is not, before it is selected.
        terminal: the environment ended the episode here.
        truncated: a limit ended it here: the environment's, or the search's on depth.
        valid: the environment knew the action.
        closed: nothing is left to try here or below: skipped in selection, never removed.
        expanded: the policy was asked for candidates.
        snapshot: the environment's state; dropped when the node is closed.
        proposals: answers the policy gave here, in expansion and rollouts.
        prompt_tokens: that the policy read for them; tokens: that it wrote.
        env_steps: steps of the environment taken here: its own action, rollouts, replayed restores.
        seconds: spent here, waiting for others included.
        text: the whole answer of which the action is a part; None: the action is the answer.
        said: what the world needs to carry it out; dropped with the snapshots.
        messages: the prompt for the candidates, where the policy reads one.
        instruction, admissible: what that prompt was built from, beside the turns before: the root's
            instruction, and the actions listed here.
        prior: of the candidate among its siblings, see `SearchConfig.prior`.
        flying: visits under way through this node, in a wave.
    """

    action: str | None
    parent: Node | None
    depth: int
    seed: int
    votes: int = 1
    N: int = 0
    W: float = 0.0
    W2: float = 0.0
    best: float = -inf
    reward: float = 0.0
    observation: str = ""
    executed: bool = False
    terminal: bool = False
    truncated: bool = False
    valid: bool = True
    success: bool = False
    closed: bool = False
    expanded: bool = False
    snapshot: Any = None
    proposals: int = 0
    env_steps: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    text: str | None = None
    said: Any = None
    messages: list[dict[str, str]] | None = None
    instruction: str | None = None
    admissible: Sequence[str] | None = None
    prior: float = 0.0
    flying: int = 0
    children: list[Node] = field(default_factory=list)

    @property
    def Q(self) -> float:
        """Mean return W / N; nan before the first visit."""
        return self.W / self.N if self.N else nan

    @property
    def path(self) -> list[Node]:
        """From the root to here, both included."""
        path: list[Node] = []
        node: Node | None = self
        while node is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def history(self) -> History:
        """The turns that led here."""
        path = self.path
        return tuple((a.observation, str(b.action)) for a, b in pairwise(path))

    def backup(self, G: float, gamma: float = 1.0) -> None:
        """Book a return on every node from here to the root: one visit, one number each.

        W += G, N += 1 with G = r + γ · (G of the action after it); Eq. 5 with the sum kept.

        Args:
            G: the return from this node's own action on, its reward included.
            gamma: discount of a turn.
        """
        node: Node | None = self
        while node is not None:
            node.N, node.W, node.W2 = node.N + 1, node.W + G, node.W2 + G * G
            node.best = max(node.best, G)
            node = node.parent
            if node is not None and node.parent is not None:  # the root has no reward of its own
                G = node.reward + gamma * G

    def close(self) -> None:
        """Close this node, and every ancestor whose children are all closed by that."""
        node: Node | None = self
        while node is not None:
            node.closed, node.snapshot = True, None
            node = node.parent
            if node is None or not all(child.closed for child in node.children):
                return

    def to_dict(self) -> dict[str, Any]:
        """The subtree as nested dicts {action, N, W, reward, terminal, children, ...}, JSON-able."""
        top = self._record()
        stack = [(self, top)]
        while stack:
            node, record = stack.pop()
            record["children"] = [child._record() for child in node.children]
            stack.extend(zip(node.children, record["children"], strict=True))
        return top

    def _record(self) -> dict[str, Any]:
        keys = ("action", "N", "W", "reward", "terminal", "truncated", "valid", "success", "executed")
        more = ("closed", "votes", "W2", "prior", "observation", "proposals", "env_steps", *COSTS)
        optional = {key: getattr(self, key) for key in OPTIONAL if getattr(self, key) is not None}
        return {key: getattr(self, key) for key in (*keys, *more)} | optional


@dataclass(slots=True)
class Tree:
    """What a search came to.

    Attributes:
        root: the start.
        stopped: why it ended: "iterations" done, root "closed", first "success", or "budget" spent.
        iterations: returns booked, the root's N.
        proposals: answers the policy gave.
        env_steps: steps of the environment, replayed ones included.
        rollout_successes: rollouts that ended in success; their turns are not nodes.
    """

    root: Node
    stopped: Stopped = "iterations"
    iterations: int = 0
    proposals: int = 0
    env_steps: int = 0
    rollout_successes: int = 0

    def nodes(self) -> Iterator[Node]:
        """Every node, pre-order."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    @property
    def success(self) -> bool:
        """Whether an action in the tree solved the task."""
        return any(node.success for node in self.nodes())

    def best_action(self, by: Literal["best", "mean"] = "best") -> str | None:
        """The root's action to take; None: none was tried. Ties: the higher Q, then the first.

        "best" starts the best trajectory found, right where nothing is left to chance; "mean" takes
        the highest Q, which one lucky outcome moves less.
        """
        if by not in ("best", "mean"):
            raise unknown("rule for the best action", by, ("best", "mean"))
        tried = [child for child in self.root.children if child.N]
        best = max(tried, key=lambda child: (child.best if by == "best" else child.Q, child.Q), default=None)
        return None if best is None else best.action

    def to_dict(self) -> dict[str, Any]:
        """The tree as nested dicts, what `preference_pairs` reads."""
        return self.root.to_dict()
