"""Sokoban: push every box onto a target; a push cannot be undone.

Description:
    Rooms are drawn by reverse play: from the solved room every position is worked out that pulling
    can reach in `max_solution` moves, and one that needs at least `min_solution` is drawn. So each
    room is solvable, and its shortest solution is known exactly. Rewards and symbols are those of
    gym-sokoban and RAGEN (arXiv 2504.20073).
Actions:
    up, down, left, right (any case). A move against a wall or a stuck box stays in place.
Observation:
    The room, a row a line, each cell after a space: # wall, _ floor, O target, X box, √ box on
    target, P player, S player on target. With `coordinates`, a last line "P r c X r c ... O r c
    ..." (row, column, from 0).
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

    instruction = (
        "Push every box onto a target. Symbols: # wall, _ floor, O target, X box, √ box on target, P player, "
        "S player on target. You push a box by walking into it; you cannot pull, nor push two boxes. "
        "Rows and columns count from 0 at the top left. Actions: up, down, left, right."
    )

    def __init__(
        self,
        size: int = 6,
        boxes: int = 1,
        max_turns: int = 15,
        min_solution: int = 2,
        max_solution: int = 10,
        coordinates: bool = True,
    ) -> None:
        if size < 5 or not 1 <= boxes <= (size - 2) ** 2 // 4:
            raise ValueError(f"needs size >= 5 and 1 to (size - 2)^2 / 4 boxes, not {size}, {boxes}")
        if not 1 <= min_solution <= max_solution <= max_turns:
            raise ValueError(
                f"needs 1 <= min_solution <= max_solution <= max_turns, not "
                f"{min_solution}, {max_solution}, {max_turns}"
            )
        self.size, self.count, self.max_turns = size, boxes, max_turns
        self.min_solution, self.max_solution, self.coordinates = min_solution, max_solution, coordinates

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        for _ in range(TRIES):
            self.floor = self._carve()
            if len(self.floor) < 2 * self.count + 1:
                continue
            self.targets = frozenset(self.rng.sample(sorted(self.floor), self.count))
            starts = [
                (player, boxes)
                for (player, boxes), length in self._lengths().items()
                if length >= self.min_solution and not boxes & self.targets
            ]
            if starts:
                self.player, self.boxes = self.rng.choice(starts)
                self.plan: dict[State, str] = {}
                length = self._solve()
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
        move = self._match(action)
        if move is None:
            return self._observation, -0.1, False, {"valid": False}
        placed = len(self.boxes & self.targets)
        self.player, self.boxes = self._after((self.player, self.boxes), move)
        solved = self.boxes == self.targets
        reward = -0.1 + len(self.boxes & self.targets) - placed + (10.0 if solved else 0.0)
        return self._text(), reward, solved, {"success": solved}

    def _symbol(self, cell: Cell) -> str:
        target = cell in self.targets
        if cell == self.player:
            return "S" if target else "P"
        if cell in self.boxes:
            return "√" if target else "X"
        return "O" if target else "_" if cell in self.floor else "#"

    def _text(self) -> str:
        side = range(self.size)
        rows = ["".join(f" {self._symbol((row, column))}" for column in side) for row in side]
        if self.coordinates:
            named = [("P", self.player)]
            named += [("X", box) for box in sorted(self.boxes)]
            named += [("O", target) for target in sorted(self.targets)]
            rows.append(" ".join(f"{symbol} {row} {column}" for symbol, (row, column) in named))
        return "\n".join(rows)

    def admissible(self) -> list[str]:
        """The four moves."""
        return list(MOVES)

    def expert(self) -> str:
        """The next move of a shortest solution; "up" where the room can no longer be solved."""
        state = (self.player, self.boxes)
        if state not in self.plan:
            self._solve()
        return self.plan[state]

    def _solve(self) -> int:
        """Write a shortest solution from here into `plan`; return its length (0: none found)."""
        start = (self.player, self.boxes)
        came: dict[State, tuple[State, str] | None] = {start: None}
        queue = deque([start])
        while queue and len(came) < MOST_STATES:
            state = queue.popleft()
            if state[1] == self.targets:
                length = 0
                while (link := came[state]) is not None:
                    state, action = link
                    self.plan[state] = action
                    length += 1
                return length
            for action in MOVES:
                after = self._after(state, action)
                if after not in came:
                    came[after] = (state, action)
                    queue.append(after)
        self.plan[start] = "up"
        return 0
