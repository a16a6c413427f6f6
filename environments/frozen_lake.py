"""A frozen lake: walk to the goal without falling into a hole.

Description:
    A square map, drawn anew for every task or given: holes, a start and a goal that a path joins.
    The classic of Gymnasium's toy text, with RAGEN's symbols (arXiv 2504.20073).
Actions:
    up, down, left, right (any case). A step off the map stays in place.
Observation:
    With `grid`, the map, a row a line, each cell after a space: P player, G goal, O hole, _ ice. With
    `coordinates`, a last line (row, column, from 0): "P r c G r c"; without `grid` it goes on with
    the holes, "O r c ...".
Start:
    Player and goal at a shortest distance between `min_distance` and `max_distance`, as drawn from the
    task's seed in `TRIES` tries.
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
    slip: chance that a move goes to one of the two sides instead, half of it to each (drawn from the
        dynamics seed, so that members of a group slip differently).
    max_turns: turns in an episode.
    min_distance, max_distance: bounds on the shortest path; default upper bound max_turns - 2.
    map: None draws one for each task; "4x4" and "8x8" are Gymnasium's; or rows of S start, F ice, H
        hole, G goal (a list, or a text with the rows between spaces). Then `size` is the map's and
        `hole_prob` is not used.
    grid: whether to show the map.
    coordinates: whether to add the last line.

Variants of RAGEN, with `max_turns=10, min_distance=1, max_distance=10` (10 actions an episode; a step
is one action):
    FrozenLake: version 1 `hole_prob=0.2, slip=0.6667` (Gymnasium's is_slippery: the way meant and both
    sides, a third each); version 2 `hole_prob=0.1, slip=0.2` (a success_rate s is a slip of 1 - s);
    deterministic `slip=0`; all with `coordinates=False`. CoordFrozenLake: `grid=False`, or both.
"""

from collections import deque
from collections.abc import Sequence

from verl_multiturn.env import Env, Info, Seed
from verl_multiturn.errors import unknown

__all__ = ["FrozenLake"]

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
TRIES = 10_000
MAPS = {
    "4x4": "SFFF FHFH FFFH HFFG",
    "8x8": "SFFFFFFF FFFFFFFF FFFHFFFF FFFFFHFF FFFHFFFF FHHFFFHF FHFFHFHF FFFHFFFG",
}
Cell = tuple[int, int]


class FrozenLake(Env):
    """See the module's docstring."""

    def __init__(
        self,
        size: int = 4,
        hole_prob: float = 0.25,
        slip: float = 0.0,
        max_turns: int = 8,
        min_distance: int = 2,
        max_distance: int | None = None,
        map: str | Sequence[str] | None = None,
        grid: bool = True,
        coordinates: bool = True,
    ) -> None:
        longest = max_turns - 2 if max_distance is None else max_distance
        if size < 2 or not 1 <= min_distance <= longest:
            raise ValueError(
                f"needs size >= 2 and 1 <= min_distance <= max_distance (default max_turns - 2), "
                f"not size={size}, min_distance={min_distance}, max_distance={longest}"
            )
        if not (0 <= hole_prob < 1 and 0 <= slip <= 1):
            raise ValueError(f"needs 0 <= hole_prob < 1 and 0 <= slip <= 1, not {hole_prob}, {slip}")
        if not (grid or coordinates):
            raise ValueError("needs grid or coordinates: without both, nothing is shown")
        self.rows = None if map is None else _rows(map)
        self.size, self.hole_prob, self.slip, self.max_turns = size, hole_prob, slip, max_turns
        self.min_distance, self.max_distance = min_distance, longest
        self.grid, self.coordinates = grid, coordinates
        if self.rows:
            self.size = len(self.rows)
            length, most = self._take(self.rows), min(longest, max_turns)
            if not min_distance <= length <= most:
                raise ValueError(
                    f"needs a map with a path of {min_distance} to {most} steps (min_distance, max_distance "
                    f"or max_turns - 2, max_turns), not {length or 'none'}"
                )
        self.instruction = self._instruction()

    def _instruction(self) -> str:
        """What the arguments allow to be seen and done, and nothing else."""
        task = "Walk on the frozen lake from P to the goal G without falling into a hole O; "
        where = " The last line gives row and column, counted from 0 at the top left."
        if self.grid:
            task += "_ is safe ice." + (where if self.coordinates else "")
        else:
            task += (
                f"all else of the {self.size} x {self.size} lake is safe ice. Each letter is followed by its "
                "row and column, counted from 0 at the top left."
            )
        task += f" Actions: {', '.join(MOVES)}."
        if self.slip > 0:
            task += f" The ice is slippery: a move goes sideways with chance {self.slip:g}."
        return task

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        length = self._take(self.rows) if self.rows else self._draw()
        self.position, self.chances = self.start, list[dict[Cell, float]]()
        task_type = "near" if length <= 2 else "middle" if length <= 4 else "far"
        return self._text(), {"task_type": task_type, "distance": length}

    def _take(self, rows: Sequence[str]) -> int:
        """Take the map from `rows`; its distance (0: no path)."""
        named = [
            (letter, (row, column)) for row, line in enumerate(rows) for column, letter in enumerate(line)
        ]
        self.holes = {cell for letter, cell in named if letter == "H"}
        self.start, self.goal = (cell for wanted in "SG" for letter, cell in named if letter == wanted)
        self.distance = self._distances()
        return self.distance.get(self.start, 0)

    def _draw(self) -> int:
        """Draw a map from the task's seed; its distance."""
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
                return length
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
        side, lines = range(self.size), []
        if self.grid:
            symbols = dict.fromkeys(self.holes, "O") | {self.goal: "G", self.position: "P"}
            lines = ["".join(f" {symbols.get((row, column), '_')}" for column in side) for row in side]
        if self.coordinates:
            named = [("P", self.position), ("G", self.goal)]
            named += [] if self.grid else [("O", hole) for hole in sorted(self.holes)]
            lines.append(" ".join(f"{symbol} {row} {column}" for symbol, (row, column) in named))
        return "\n".join(lines)

    def admissible(self) -> list[str]:
        """The four moves."""
        return list(MOVES)

    def experts(self) -> list[str]:
        """First actions of shortest paths, as if nothing slipped; empty where there is no path."""
        here = self.distance.get(self.position, 0)
        return [a for a in MOVES if self.distance.get(self._move(self.position, a), here) < here]

    def expert(self) -> str:
        """On dry ice the first of `experts` ("up" where there is none), else the best move.

        The best is most likely to end at the goal in the turns that are left, computed backwards from
        the last turn over all positions.
        """
        if self.slip == 0:
            return next(iter(self.experts()), "up")
        for left in range(len(self.chances), self.max_turns):
            later = self.chances[-1] if left else {}
            self.chances.append(
                {cell: max(self._chance(cell, move, later) for move in MOVES) for cell in self.distance}
            )
        left = self.max_turns - self.turn - 1
        later = self.chances[left - 1] if left > 0 else {}
        return max(MOVES, key=lambda move: self._chance(self.position, move, later))

    def _chance(self, cell: Cell, action: str, later: dict[Cell, float]) -> float:
        """Of ending at the goal by `action` from `cell`, with chances `later` where it does not end."""
        return sum(
            p * (reward if ended else later.get(near, 0.0))
            for p, near, reward, ended in self.transitions(cell, action)
        )

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


def _rows(map: str | Sequence[str]) -> list[str]:
    """The rows of a map of Gymnasium's letters.

    Raises:
        ValueError: it is not a name of `MAPS`, nor a square of S, F, H and G with one S and one G.
    """
    if isinstance(map, str) and map not in MAPS and not set(map) <= set("SFHG \n"):
        raise unknown("map", map, MAPS, "Or give its rows, of the letters S, F, H and G.")
    rows = MAPS.get(map, map).split() if isinstance(map, str) else list(map)
    letters = "".join(rows)
    square = {len(row) for row in rows} == {len(rows)}
    if not square or set(letters) - set("SFHG") or (letters.count("S"), letters.count("G")) != (1, 1):
        raise ValueError(f"needs a square map of S, F, H and G with one S and one G, not {' '.join(rows)!r}")
    return rows
