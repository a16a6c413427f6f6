"""A frozen lake: walk to the goal without falling into a hole.

Description:
    A square map, drawn anew for every task: holes, a start and a goal that a path joins. The
    classic of Gymnasium's toy text, with RAGEN's symbols (arXiv 2504.20073).
Actions:
    up, down, left, right (any case). A step off the map stays in place.
Observation:
    The map, a row a line, each cell after a space: P player, G goal, O hole, _ ice. The last line
    holds the coordinates (row, column, from 0): "P r c G r c".
Start:
    Player and goal at a shortest distance between `min_distance` and `max_distance`.
Rewards:
    1 at the goal, else 0.
Episode end:
    Terminated at the goal or in a hole. Truncated after `max_turns` turns.
Information:
    `success`: at the goal. `task_type`: by shortest distance, "near" (up to 2), "middle" (3, 4),
    "far" (5 and more).
State key:
    The observation: map and position; it leaves out the turn count.

Arguments:
    size: rows and columns.
    hole_prob: chance that a cell is a hole.
    slip: chance that a move goes to one of the two sides instead (drawn from the dynamics seed).
    max_turns: turns in an episode.
    min_distance, max_distance: bounds on the shortest path; default upper bound max_turns - 2.
"""

from collections import deque

from verl_multiturn.env import Env, Info, Seed

__all__ = ["FrozenLake"]

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
TRIES = 10_000
Cell = tuple[int, int]


class FrozenLake(Env):
    """See the module's docstring."""

    instruction = (
        "Walk on the frozen lake from P to the goal G without falling into a hole O; _ is safe ice. "
        "The last line gives row and column, counted from 0 at the top left. Actions: up, down, left, right."
    )

    def __init__(
        self,
        size: int = 4,
        hole_prob: float = 0.25,
        slip: float = 0.0,
        max_turns: int = 8,
        min_distance: int = 2,
        max_distance: int | None = None,
    ) -> None:
        longest = max_turns - 2 if max_distance is None else max_distance
        if size < 2 or not 1 <= min_distance <= longest:
            raise ValueError(
                f"needs size >= 2 and 1 <= min_distance <= max_distance (default max_turns - 2), "
                f"not size={size}, min_distance={min_distance}, max_distance={longest}"
            )
        if not (0 <= hole_prob < 1 and 0 <= slip <= 1):
            raise ValueError(f"needs 0 <= hole_prob < 1 and 0 <= slip <= 1, not {hole_prob}, {slip}")
        self.size, self.hole_prob, self.slip, self.max_turns = size, hole_prob, slip, max_turns
        self.min_distance, self.max_distance = min_distance, longest
        if slip > 0:
            self.instruction += f" The ice is slippery: a move goes sideways with chance {slip:g}."

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        for _ in range(TRIES):
            self.holes = {cell for cell in cells if self.rng.random() < self.hole_prob}
            free = [cell for cell in cells if cell not in self.holes]
            if len(free) < 2:
                continue
            self.start, self.goal = self.rng.sample(free, 2)
            self.distance = self._distances()
            length = self.distance.get(self.start, 0)
            if self.min_distance <= length <= self.max_distance:
                self.position = self.start
                task_type = "near" if length <= 2 else "middle" if length <= 4 else "far"
                return self._text(), {"task_type": task_type, "distance": length}
        raise RuntimeError(
            f"no map of size {self.size} with hole_prob {self.hole_prob} and a distance in "
            f"[{self.min_distance}, {self.max_distance}] in {TRIES} tries."
        )

    def _distances(self) -> dict[Cell, int]:
        """Steps to the goal from each cell that can reach it, walking without slips."""
        distance, queue = {self.goal: 0}, deque([self.goal])
        while queue:
            cell = queue.popleft()
            for action in MOVES:
                near = self._move(cell, action)
                if near not in self.holes and near not in distance:
                    distance[near] = distance[cell] + 1
                    queue.append(near)
        return distance

    def _move(self, cell: Cell, action: str) -> Cell:
        down, right = MOVES[action]
        row, column = cell[0] + down, cell[1] + right
        return (row, column) if 0 <= row < self.size and 0 <= column < self.size else cell

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        move = self._match(action)
        if move is None:
            return self._observation, 0.0, False, {"valid": False}
        outcomes = self.transitions(self.position, move)
        draw = self.noise.choices(outcomes, [outcome[0] for outcome in outcomes])[0]
        _, self.position, reward, terminated = draw
        return self._text(), reward, terminated, {"success": self.position == self.goal}

    def _text(self) -> str:
        symbols = dict.fromkeys(self.holes, "O") | {self.goal: "G", self.position: "P"}
        side = range(self.size)
        rows = ["".join(f" {symbols.get((row, column), '_')}" for column in side) for row in side]
        (row, column), (goal_row, goal_column) = self.position, self.goal
        return "\n".join([*rows, f"P {row} {column} G {goal_row} {goal_column}"])

    def admissible(self) -> list[str]:
        """The four moves."""
        return list(MOVES)

    def experts(self) -> list[str]:
        """First actions of shortest paths, as if nothing slipped; empty where there is no path."""
        here = self.distance.get(self.position, 0)
        return [a for a in MOVES if self.distance.get(self._move(self.position, a), here) < here]

    def expert(self) -> str:
        """The first of `experts`; "up" where there is none."""
        return next(iter(self.experts()), "up")

    @property
    def actions(self) -> list[str]:
        """For `exact_values`."""
        return list(MOVES)

    def start_state(self) -> Cell:
        """For `exact_values`: the start of this map."""
        return self.start

    def transitions(self, state: Cell, action: str) -> list[tuple[float, Cell, float, bool]]:
        """For `exact_values`: (probability, next state, reward, terminated); a state is a cell."""
        sides = ("left", "right") if action in ("up", "down") else ("up", "down")
        chances = {action: 1 - self.slip} | dict.fromkeys(sides, self.slip / 2)
        after = [(p, self._move(state, move)) for move, p in chances.items() if p > 0]
        return [
            (p, cell, float(cell == self.goal), cell == self.goal or cell in self.holes) for p, cell in after
        ]
