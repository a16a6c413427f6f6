"""Sokoban: push every box onto a target; a push cannot be undone.

Description:
    Rooms are drawn by reverse play: from the solved room every position is worked out that pulling
    can reach in `max_solution` moves, and one that needs at least `min_solution` is drawn. So each
    room is solvable, and its shortest solution is known exactly. Drawing is tried `TRIES` times, from
    the task's seed alone. Rewards and symbols are those of gym-sokoban and RAGEN (arXiv 2504.20073).
Actions:
    up, down, left, right (any case). A move against a wall or a stuck box stays in place.
Observation:
    With `grid`, the room, a row a line, each cell after a space: # wall, _ floor, O target, X box,
    √ box on target, P player, S player on target. With `coordinates`, a last line "P r c X r c ...
    O r c ..." (row, column, from 0); without `grid` it goes on with the walls inside, "# r c ...".
Start:
    No box on a target.
Rewards:
    -0.1 a turn (an invalid one too, or silence would pay), +1 for a box onto a target, -1 for one
    off it, +10 when all are on targets.
Episode end:
    Terminated when solved. Truncated after `max_turns` turns.
Information:
    `success`: solved. `task_type`: by shortest solution, "short" (up to 4 moves), "middle" (5 to
    7), "long".
State key:
    The observation: the whole room; it leaves out the turn count.

Arguments:
    size: rows and columns, walls included.
    boxes: how many.
    max_turns: turns in an episode.
    min_solution, max_solution: bounds on the shortest solution, in moves.
    coordinates: whether to add the last line.
    grid: whether to show the room.
    symbols: of wall, floor, target, box on target, box, player, player on target, in this order.

Variants of RAGEN, with `max_turns=10, min_solution=1` (10 actions an episode; a step is one action):
    SimpleSokoban: `coordinates=False`. CoordSokoban: `grid=False`, or both. LargerSokoban: `size=8,
    boxes=2, coordinates=False`. SokobanDifferentGridVocab: `symbols="W.GCBA@", coordinates=False`.
    Its rooms are easier: uniform random play solves 18 % of its 6 x 6 rooms (mean shortest solution
    4.0 moves) and 10 % of these (4.7; 15 % with `max_solution=5`).
"""

from collections import deque
from collections.abc import Iterator

from verl_multiturn.env import Env, Info, Seed

__all__ = ["Sokoban"]

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
TRIES = 200
MOST_STATES = 200_000
Cell = tuple[int, int]
State = tuple[Cell, frozenset[Cell]]  # player, boxes


class Sokoban(Env):
    """See the module's docstring."""

    _drawn: tuple[set[Cell], list[str], str] | None = None

    def __init__(
        self,
        size: int = 6,
        boxes: int = 1,
        max_turns: int = 15,
        min_solution: int = 2,
        max_solution: int = 10,
        coordinates: bool = True,
        grid: bool = True,
        symbols: str = "#_O√XPS",
    ) -> None:
        if size < 5 or not 1 <= boxes <= (size - 2) ** 2 // 4:
            raise ValueError(f"needs size >= 5 and 1 to (size - 2)^2 / 4 boxes, not {size}, {boxes}")
        if not 1 <= min_solution <= max_solution <= max_turns:
            raise ValueError(
                f"needs 1 <= min_solution <= max_solution <= max_turns, not "
                f"{min_solution}, {max_solution}, {max_turns}"
            )
        if not (grid or coordinates):
            raise ValueError("needs grid or coordinates: without both, nothing is shown")
        if len(symbols) != 7 or len(set(symbols)) != 7 or any(s.isspace() or s.isdigit() for s in symbols):
            raise ValueError(f"needs 7 different symbols, none a space or a digit, not {symbols!r}")
        self.size, self.count, self.max_turns = size, boxes, max_turns
        self.min_solution, self.max_solution = min_solution, max_solution
        self.grid, self.coordinates, self.symbols = grid, coordinates, tuple(symbols)
        self.instruction = self._instruction()

    def _instruction(self) -> str:
        """What the arguments allow to be seen and done, and nothing else."""
        wall, floor, target, placed, box, player, standing = self.symbols
        if self.grid:
            legend = (
                f"{wall} wall, {floor} floor, {target} target, {box} box, {placed} box on target, "
                f"{player} player, {standing} player on target."
            )
        else:
            legend = (
                f"{player} player, {box} box, {target} target, {wall} wall, each followed by its row and "
                f"column; the border of the {self.size} x {self.size} room is wall, too."
            )
        count = "Rows and columns count from 0 at the top left. " if self.coordinates else ""
        return (
            f"Push every box onto a target. Symbols: {legend} You push a box by walking into it; you cannot "
            f"pull, nor push two boxes. {count}Actions: {', '.join(MOVES)}."
        )

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        for _ in range(TRIES):
            self.floor = self._carve()
            if len(self.floor) < 2 * self.count + 1:
                continue
            self.targets = frozenset(self.rng.sample(sorted(self.floor), self.count))
            lengths = self._lengths()
            starts = [
                state
                for state, length in lengths.items()
                if length >= self.min_solution and not state[1] & self.targets
            ]
            if starts:
                start = self.rng.choice(starts)
                self.player, self.boxes = start
                self.plan: dict[State, str] = {}
                length = lengths[start]
                task_type = "short" if length <= 4 else "middle" if length <= 7 else "long"
                return self._text(), {"task_type": task_type, "solution": length}
        raise RuntimeError(
            f"no room of size {self.size} with {self.count} boxes and a solution of {self.min_solution} to "
            f"{self.max_solution} moves in {TRIES} tries."
        )

    def _carve(self) -> set[Cell]:
        """A connected floor: a random walk through the inside, three quarters of it at most."""
        inside = range(1, self.size - 1)
        row, column = self.rng.choice(inside), self.rng.choice(inside)
        floor = {(row, column)}
        for _ in range(3 * len(inside) ** 2):
            down, right = self.rng.choice(list(MOVES.values()))
            if row + down in inside and column + right in inside:
                row, column = row + down, column + right
                floor.add((row, column))
            if 4 * len(floor) >= 3 * len(inside) ** 2:
                break
        return floor

    def _lengths(self) -> dict[State, int]:
        """Positions that reverse play reaches -> moves to the solution; breadth first, so exact."""
        lengths: dict[State, int] = {
            (player, self.targets): 0 for player in sorted(self.floor - self.targets)
        }
        queue = deque(lengths)
        while queue and len(lengths) < MOST_STATES:
            state = queue.popleft()
            if lengths[state] == self.max_solution:
                break
            for before in self._before(state):
                if before not in lengths:
                    lengths[before] = lengths[state] + 1
                    queue.append(before)
        return lengths

    def _before(self, state: State) -> Iterator[State]:
        """The positions from which one move leads to `state`: a step back, alone or pulling a box."""
        (row, column), boxes = state
        for down, right in MOVES.values():
            back, ahead = (row - down, column - right), (row + down, column + right)
            if back in self.floor and back not in boxes:
                yield back, boxes
                if ahead in boxes:
                    yield back, boxes - {ahead} | {(row, column)}

    def _after(self, state: State, action: str) -> State:
        (row, column), boxes = state
        down, right = MOVES[action]
        ahead, beyond = (row + down, column + right), (row + 2 * down, column + 2 * right)
        if ahead not in self.floor:
            return state
        if ahead not in boxes:
            return ahead, boxes
        if beyond not in self.floor or beyond in boxes:
            return state
        return ahead, boxes - {ahead} | {beyond}

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        move = action if action in MOVES else self._match(action)
        if move is None:
            return self._observation, -0.1, False, {"valid": False}
        before = (self.player, self.boxes)
        after = self._after(before, move)
        if after is before:
            return self._observation, -0.1, False, {}
        self.player, self.boxes = after
        reward, solved = -0.1, False
        if self.boxes is not before[1]:
            solved = self.boxes == self.targets
            gained = len(self.boxes & self.targets) - len(before[1] & self.targets)
            reward += gained + (10.0 if solved else 0.0)
        return self._text(), reward, solved, {"success": solved}

    def _text(self) -> str:
        # Most of a room never changes, and drawing it would be most of the time of a step.
        if self._drawn is None or self._drawn[0] is not self.floor:
            self._drawn = (self.floor, *self._draw())
        rows, still = self._drawn[1].copy(), self._drawn[2]
        _, _, _, placed, box, player, standing = self.symbols
        boxes = sorted(self.boxes)
        if self.grid:
            marks = [(cell, placed if cell in self.targets else box) for cell in boxes]
            marks.append((self.player, standing if self.player in self.targets else player))
            for (row, column), mark in marks:
                line, at = rows[row], 2 * column + 1
                rows[row] = f"{line[:at]}{mark}{line[at + 1 :]}"
        if self.coordinates:
            moving = "".join([f"{box} {row} {column} " for row, column in boxes])
            rows.append(f"{player} {self.player[0]} {self.player[1]} {moving}{still}")
        return "\n".join(rows)

    def _draw(self) -> tuple[list[str], str]:
        """What never changes: rows of the room without player and boxes; the end of the last line."""
        wall, floor, target, *_ = self.symbols
        side, rows = range(self.size), []
        named = [(target, cell) for cell in sorted(self.targets)]
        if self.grid:
            look = dict.fromkeys(self.floor, floor) | dict.fromkeys(self.targets, target)
            rows = ["".join(f" {look.get((row, column), wall)}" for column in side) for row in side]
        else:
            inside = [(row, column) for row in side[1:-1] for column in side[1:-1]]
            named += [(wall, cell) for cell in inside if cell not in self.floor]
        return rows, " ".join(f"{symbol} {row} {column}" for symbol, (row, column) in named)

    def admissible(self) -> list[str]:
        """The four moves."""
        return list(MOVES)

    def expert(self) -> str:
        """The next move of a shortest solution; "up" where the room can no longer be solved."""
        state = (self.player, self.boxes)
        if state not in self.plan:
            self._solve()
        return self.plan[state]

    def _solve(self) -> None:
        """Write a shortest solution from here into `plan`."""
        start = (self.player, self.boxes)
        came: dict[State, tuple[State, str] | None] = {start: None}
        queue = deque([start])
        while queue and len(came) < MOST_STATES:
            state = queue.popleft()
            if state[1] == self.targets:
                while (link := came[state]) is not None:
                    state, action = link
                    self.plan[state] = action
                return
            for action in MOVES:
                after = self._after(state, action)
                if after not in came:
                    came[after] = (state, action)
                    queue.append(after)
        self.plan[start] = "up"
