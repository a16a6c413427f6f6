"""2048: slide the numbers of a 4x4 board until one of them has grown to the goal.

Description:
    A move pushes all numbers to one side; two equal ones that meet become their sum, each number once
    a move. After a move that changed something a 2 (chance 0.9) or a 4 appears on a random empty cell.
    The start follows from the seed, what appears later from the dynamics seed. Rewards are those that
    RAGEN's code (arXiv 2504.20073) documents. Its goal, 2048 within 800 turns, is out of reach: a turn
    adds 2.2 on average, and the numbers on the board must add up to the goal.
Actions:
    up, right, down, left (any case). A move that changes nothing is valid; nothing appears.
Observation:
    The board, a row a line, each cell after a space: a number, or _ for an empty cell.
Start:
    `start_tiles` numbers on random cells.
Rewards:
    0.1 log2(1 + m), with m the sum of the numbers that the move made; -0.1 for a move that changes
    nothing, and for an invalid action.
Episode end:
    Terminated when the goal stands on the board, or when no move changes it. Truncated after
    `max_turns` turns.
Information:
    `success`: the goal stands on the board. `highest`: the largest number. `task_type`: "goal-<goal>".
State key:
    The observation: the whole board; it leaves out the turn count.

Arguments:
    goal: a power of two from 8 to 2048.
    max_turns: turns in an episode; refused if what appears in them on average does not add up to the
        goal.
    start_tiles: numbers at the start; the game's own two make only 480 starts, few for disjoint panels.
"""

import math
import random
from functools import lru_cache

from verl_multiturn.env import Env, Info, Seed

__all__ = ["Game2048"]

SIDE = range(4)
LINES = {  # for each move the cells of each line, from the side that the numbers are pushed to
    "up": [tuple(4 * row + column for row in SIDE) for column in SIDE],
    "right": [tuple(4 * row + column for column in reversed(SIDE)) for row in SIDE],
    "down": [tuple(4 * row + column for row in reversed(SIDE)) for column in SIDE],
    "left": [tuple(4 * row + column for column in SIDE) for row in SIDE],
}
NEW, CHANCES = (2, 4), (0.9, 0.1)
MEAN = 2.2
Board = tuple[int, ...]  # row after row, 0: empty


class Game2048(Env):
    """See the module's docstring."""

    def __init__(self, goal: int = 64, max_turns: int = 48, start_tiles: int = 4) -> None:
        if goal not in [2**power for power in range(3, 12)]:
            raise ValueError(f"needs a power of two from 8 to 2048 as goal, not {goal}")
        if not 1 <= start_tiles <= 8:
            raise ValueError(f"needs 1 to 8 start_tiles, not {start_tiles}")
        least = math.ceil(goal / MEAN - start_tiles) + 1
        if max_turns < least:
            raise ValueError(
                f"needs max_turns >= {least} for goal {goal}, as a turn adds {MEAN} on average, "
                f"not {max_turns}"
            )
        self.goal, self.max_turns, self.start_tiles = goal, max_turns, start_tiles
        self.instruction = (
            f"Slide the numbers of the board until {goal} stands on it; you have {max_turns} moves. A move "
            "pushes all numbers to one side; two equal numbers that meet become their sum. After each move "
            "that changes the board a 2 or a 4 appears on an empty cell _. You lose if no move changes the "
            "board. Actions: up, right, down, left."
        )

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        self.board: Board = (0,) * 16
        for _ in range(self.start_tiles):
            self._add(self.rng)
        return self._text(), {"task_type": f"goal-{self.goal}"}

    def _add(self, rng: random.Random) -> None:
        cell = rng.choice(_empty(self.board))
        self.board = _with(self.board, cell, rng.choices(NEW, CHANCES)[0])

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        move = self._match(action)
        if move is None:
            return self._observation, -0.1, False, {"valid": False}
        after, made = _push(self.board, move)
        reward = -0.1
        if after != self.board:
            self.board, reward = after, 0.1 * math.log2(1 + made)
            self._add(self.noise)
        highest = max(self.board)
        success = highest >= self.goal
        lost = not success and all(_push(self.board, any_move)[0] == self.board for any_move in LINES)
        return self._text(), reward, success or lost, {"success": success, "highest": highest}

    def _text(self) -> str:
        rows = [self.board[4 * row : 4 * row + 4] for row in SIDE]
        return "\n".join("".join(f" {number or '_'}" for number in row) for row in rows)

    def admissible(self) -> list[str]:
        """The four moves."""
        return list(LINES)

    def expert(self) -> str:
        """The move that leaves most cells empty after the next one, averaged over where a 2 appears."""
        hopes = {}
        for move in LINES:
            after, _ = _push(self.board, move)
            if after != self.board:
                rooms = [_room(_with(after, cell, 2)) for cell in _empty(after)]
                hopes[move] = sum(rooms) / len(rooms)
        return max(hopes, key=hopes.__getitem__, default="up")


@lru_cache(100_000)
def _slide(line: Board) -> tuple[Board, int]:
    """A line pushed to its first cell, and the sum of the numbers made."""
    numbers = [number for number in line if number]
    pushed: list[int] = []
    made = 0
    while numbers:
        number = numbers.pop(0)
        if numbers and numbers[0] == number:
            number += numbers.pop(0)
            made += number
        pushed.append(number)
    return (*pushed, *[0] * (len(line) - len(pushed))), made


def _push(board: Board, move: str) -> tuple[Board, int]:
    """The board after a move, before a number appears, and the sum of the numbers made."""
    after, made = [0] * len(board), 0
    for cells in LINES[move]:
        line, more = _slide(tuple([board[cell] for cell in cells]))
        made += more
        for cell, number in zip(cells, line, strict=True):
            after[cell] = number
    return tuple(after), made


def _room(board: Board) -> int:
    """The empty cells after the best move; -1: there is no move."""
    boards = [_push(board, move)[0] for move in LINES]
    return max((after.count(0) for after in boards if after != board), default=-1)


def _empty(board: Board) -> list[int]:
    return [cell for cell, number in enumerate(board) if not number]


def _with(board: Board, cell: int, number: int) -> Board:
    return (*board[:cell], number, *board[cell + 1 :])
