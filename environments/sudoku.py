"""Sudoku: fill the grid, one number a turn; a wrong number can be taken out again.

Description:
    A random full grid out of which numbers are taken, in random order and only where the solution stays
    the only one, until `blanks` are gone. Rewards follow RAGEN's code (arXiv 2504.20073), which also
    pays 0.5 for a wrong number that breaks no rule; here such a number pays nothing, and clearing takes
    back what placing has paid, so that only progress earns.
Actions:
    "place N at row R column C" (any case; also "col") into a blank, where N stands neither in the
    row, the column nor the box; "clear row R column C" for a number placed before. Else invalid.
Observation:
    The grid, a row a line, each cell after a space: a number, a placed number in parentheses, _ blank.
Start:
    Nothing placed.
Rewards:
    +1 for the solution's number, -1 for clearing it, 0 for another number and for clearing that, +10
    when solved; -0.1 for an invalid action.
Episode end:
    Terminated when solved. Truncated after `max_turns` turns.
Information:
    `success`: solved. `task_type`: "singles", if filling cells that have only one number left is
    enough, else "search".
State key:
    The observation: the whole grid; it leaves out the turn count.

Arguments:
    size: 4 or 9, rows and columns.
    blanks: cells to fill; default half of the cells, at most 12 of 16 or 54 of 81.
    max_turns: turns in an episode, at least `blanks`; default `blanks` and 4 more.
"""

import random
import re
from collections.abc import Sequence
from functools import cache
from math import isqrt

from verl_multiturn.env import Env, Info, Seed

__all__ = ["Sudoku"]

MOST_BLANKS = {4: 12, 9: 54}  # beyond, a unique solution is rarely or never left
MARGIN = 4
TRIES = 200
ACTION = re.compile(r"(?:place ([1-9]) at|clear) row ([1-9]) col(?:umn)? ([1-9])")
Grid = list[int]  # row after row, 0: blank


class Sudoku(Env):
    """See the module's docstring."""

    def __init__(self, size: int = 4, blanks: int | None = None, max_turns: int | None = None) -> None:
        if size not in MOST_BLANKS:
            raise ValueError(f"needs size 4 or 9, not {size}")
        self.size, self.blanks = size, size**2 // 2 if blanks is None else blanks
        if not 1 <= self.blanks <= MOST_BLANKS[size]:
            raise ValueError(f"needs 1 <= blanks <= {MOST_BLANKS[size]} for size {size}, not {blanks}")
        self.max_turns = self.blanks + MARGIN if max_turns is None else max_turns
        if self.max_turns < self.blanks:
            raise ValueError(
                f"needs max_turns >= blanks, or nothing can be solved, not {max_turns} for {self.blanks}"
            )
        box = isqrt(size)
        self.instruction = (
            f"Fill the blanks _ so that every row, every column and every {box}x{box} box holds each number "
            f"from 1 to {size} once. A number that its row, column or box already holds cannot be placed. "
            "Numbers that you placed stand in parentheses; only they can be cleared. Rows and columns count "
            "from 1 at the top left. Actions: place N at row R column C; clear row R column C."
        )

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        for _ in range(TRIES):
            self.solution = [0] * self.size**2
            _fill(self.solution, self.rng)
            self.grid = self._dig()
            if self.grid.count(0) == self.blanks:
                self.given = [number > 0 for number in self.grid]
                return self._text(), {"task_type": "singles" if _by_singles(self.grid) else "search"}
        raise RuntimeError(f"no grid of size {self.size} with {self.blanks} blanks in {TRIES} tries.")

    def _dig(self) -> Grid:
        """The solution with up to `blanks` numbers taken out, so that no other grid completes it."""
        grid = self.solution.copy()
        for cell in self.rng.sample(range(len(grid)), len(grid)):
            if grid.count(0) == self.blanks:
                break
            number, grid[cell] = grid[cell], 0
            if any(_fill(_with(grid, cell, other)) for other in _options(grid, cell) if other != number):
                grid[cell] = number
        return grid

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        cell, number = self._read(action)
        if cell is None:
            return self._observation, -0.1, False, {"valid": False}
        before = self._right()
        self.grid[cell] = number
        solved = self.grid == self.solution
        reward = self._right() - before + (10.0 if solved else 0.0)
        return self._text(), reward, solved, {"success": solved}

    def _right(self) -> int:
        return sum(number == right for number, right in zip(self.grid, self.solution, strict=True))

    def _read(self, action: str) -> tuple[int | None, int]:
        """The cell that a legal action changes, and to what (0: cleared); (None, 0): not legal."""
        match = ACTION.fullmatch(" ".join(action.split()).lower())
        if match is None:
            return None, 0
        number, row, column = (int(group or 0) for group in match.groups())
        if max(row, column) > self.size:
            return None, 0
        cell = (row - 1) * self.size + column - 1
        legal = number in _options(self.grid, cell) if number else self.grid[cell] > 0
        return (cell, number) if legal and not self.given[cell] else (None, 0)

    def _text(self) -> str:
        shown = [
            "_" if number == 0 else str(number) if given else f"({number})"
            for number, given in zip(self.grid, self.given, strict=True)
        ]
        rows = [shown[start : start + self.size] for start in range(0, len(shown), self.size)]
        return "\n".join("".join(f" {cell}" for cell in row) for row in rows)

    def admissible(self) -> list[str]:
        """Every number that breaks no rule, and every number that can be cleared."""
        actions = []
        for cell, given in enumerate(self.given):
            if not given:
                actions += [_say(self.size, cell, number) for number in _options(self.grid, cell)]
                actions += [_say(self.size, cell, 0)] if self.grid[cell] else []
        return actions

    def expert(self) -> str:
        """Clears the first wrong number, or else fills the first blank."""
        pairs = list(zip(self.grid, self.solution, strict=True))
        wrong = [cell for cell, (number, right) in enumerate(pairs) if number not in (0, right)]
        cell = wrong[0] if wrong else self.grid.index(0)
        return _say(self.size, cell, 0 if wrong else self.solution[cell])


def _say(size: int, cell: int, number: int) -> str:
    where = f"row {cell // size + 1} column {cell % size + 1}"
    return f"place {number} at {where}" if number else f"clear {where}"


@cache
def _neighbours(size: int) -> list[list[int]]:
    """For each cell the other cells of its row, column and box."""
    box, cells = isqrt(size), range(size**2)
    groups = [
        {("row", cell // size), ("column", cell % size), ("box", cell // size // box, cell % size // box)}
        for cell in cells
    ]
    return [[other for other in cells if other != cell and groups[cell] & groups[other]] for cell in cells]


def _options(grid: Grid, cell: int) -> list[int]:
    """What may stand in a blank cell, ascending; nothing for a filled one."""
    if grid[cell]:
        return []
    size = isqrt(len(grid))
    taken = {grid[other] for other in _neighbours(size)[cell]}
    return [number for number in range(1, size + 1) if number not in taken]


def _with(grid: Grid, cell: int, number: int) -> Grid:
    return [*grid[:cell], number, *grid[cell + 1 :]]


def _fill(grid: Grid, rng: random.Random | None = None) -> bool:
    """Complete a grid in place, trying numbers in `rng`'s order; False: none completes it, as it was."""
    blanks = [(_options(grid, cell), cell) for cell, number in enumerate(grid) if not number]
    if not blanks:
        return True
    options, cell = min(blanks, key=_count)
    for number in rng.sample(options, len(options)) if rng else options:
        grid[cell] = number
        if _fill(grid, rng):
            return True
    grid[cell] = 0
    return False


def _count(blank: tuple[Sequence[int], int]) -> int:
    return len(blank[0])


def _by_singles(grid: Grid) -> bool:
    """Whether filling cells that have one number left, again and again, completes the grid."""
    grid = grid.copy()
    while blanks := [cell for cell, number in enumerate(grid) if not number]:
        filled = 0
        for cell in blanks:
            options = _options(grid, cell)
            if len(options) == 1:
                grid[cell], filled = options[0], filled + 1
        if not filled:
            return False
    return True
