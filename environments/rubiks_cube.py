"""Rubik's cube, 2x2x2: turn the faces until each shows one colour.

Description:
    A cube a drawn number of quarter turns away from solved, no less: a scramble that fewer undo is
    drawn again. It is held in one of 24 ways at random. Turns and reward are those of RAGEN's code
    (arXiv 2504.20073).
Actions:
    U, R, F, D, L, B (up, right, front, down, left, back): a quarter turn of that half, clockwise as
    seen from its side; with ' counterclockwise. Any case.
Observation:
    A line for each face, U, R, F, D, L, B: its letter and the colours of its four cells (w r g y o b), row
    by row, as seen from outside with U at the top; U is seen with F at the bottom, D with F at the top.
Start:
    Scrambled by `min_scramble` to `max_scramble` turns, each number as likely as the others.
Rewards:
    1 when solved, else 0.
Episode end:
    Terminated when solved. Truncated after `max_turns` turns.
Information:
    `success`: solved. `solution`: turns of a shortest solution, at the start. `task_type`:
    "scramble-<solution>".
State key:
    The observation: all faces; it leaves out the turn count.

Arguments:
    min_scramble, max_scramble: bounds on the shortest solution, in quarter turns, up to 8.
    max_turns: turns in an episode, at least `max_scramble`.
"""

from functools import lru_cache
from operator import itemgetter

from verl_multiturn.env import Env, Info, Seed

__all__ = ["RubiksCube"]

Vector = tuple[int, ...]  # x to the right, y up, z to the front
# Face -> outwards, and the directions in which its columns and rows are read.
FACES: dict[str, tuple[Vector, Vector, Vector]] = {
    "U": ((0, 1, 0), (1, 0, 0), (0, 0, 1)),
    "R": ((1, 0, 0), (0, 0, -1), (0, -1, 0)),
    "F": ((0, 0, 1), (1, 0, 0), (0, -1, 0)),
    "D": ((0, -1, 0), (1, 0, 0), (0, 0, -1)),
    "L": ((-1, 0, 0), (0, 0, 1), (0, -1, 0)),
    "B": ((0, 0, -1), (-1, 0, 0), (0, -1, 0)),
}
# Each of the 24 cells: the corner it belongs to, and where it looks.
CELLS: list[tuple[Vector, Vector]] = [
    (tuple(o + across * r + down * b for o, r, b in zip(out, right, below, strict=True)), out)
    for out, right, below in FACES.values()
    for down in (-1, 1)
    for across in (-1, 1)
]


def _dot(a: Vector, b: Vector) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _turned(v: Vector, axis: Vector) -> Vector:
    """`v` a quarter turn on, clockwise as seen from the tip of `axis`: (v · axis) axis + v × axis."""
    (x, y, z), (a, b, c), along = v, axis, _dot(v, axis)
    return (along * a + y * c - z * b, along * b + z * a - x * c, along * c + x * b - y * a)


def _sources() -> dict[str, list[int]]:
    """For each move, the cell whose colour each cell gets."""
    moves = {}
    for face, (axis, _, _) in FACES.items():
        there = [
            CELLS.index((_turned(corner, axis), _turned(look, axis))) if _dot(corner, axis) > 0 else cell
            for cell, (corner, look) in enumerate(CELLS)
        ]
        moves[face] = [there.index(cell) for cell in range(len(CELLS))]
        moves[f"{face}'"] = there
    return moves


MOVES = {move: itemgetter(*sources) for move, sources in _sources().items()}
INVERSE = {move: move[0] if "'" in move else f"{move}'" for move in MOVES}
# The other three only turn the cube as a whole as well, so they shorten no solution.
ENOUGH = [move for move in MOVES if move[0] in "URF"]
HELD = itemgetter(*(cell for cell, (corner, _) in enumerate(CELLS) if corner == (-1, -1, -1)))
COLOURS = "wrgyob"
TRIES = 1_000


def turn(cube: str, move: str) -> str:
    """The cube (24 colours in the order of `CELLS`) after a move."""
    return "".join(MOVES[move](cube))


def _solved() -> list[str]:
    """The solved cube, held in each of 24 ways: turning both halves alike turns it as a whole."""
    found = ["".join(colour * 4 for colour in COLOURS)]
    for cube in found:
        for one, other in ("UD", "RL"):
            held = turn(turn(cube, one), INVERSE[other])
            found += [held] if held not in found else []
    return found


SOLVED = _solved()
GOALS = {HELD(cube): cube for cube in SOLVED}


class RubiksCube(Env):
    """See the module's docstring."""

    def __init__(self, min_scramble: int = 1, max_scramble: int = 3, max_turns: int = 8) -> None:
        if not 1 <= min_scramble <= max_scramble <= min(8, max_turns):
            raise ValueError(
                f"needs 1 <= min_scramble <= max_scramble <= 8 and max_scramble <= max_turns, not "
                f"{min_scramble}, {max_scramble}, {max_turns}"
            )
        self.min_scramble, self.max_scramble, self.max_turns = min_scramble, max_scramble, max_turns
        turns = "1 turn" if max_turns == 1 else f"{max_turns} turns"
        self.instruction = (
            f"Solve the 2x2x2 cube in at most {turns}: each face must show a single colour. Each line gives "
            "a face (U up, R right, F front, D down, L left, B back) and its two rows of colours, seen from "
            "outside. An action turns that half by a quarter, clockwise as seen from its side; with ' "
            f"counterclockwise. Actions: {', '.join(MOVES)}."
        )

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        length = self.rng.randint(self.min_scramble, self.max_scramble)
        for _ in range(TRIES):
            self.cube = self.rng.choice(SOLVED)
            for _ in range(length):
                self.cube = turn(self.cube, self.rng.choice(list(MOVES)))
            if len(solve(self.cube)) == length:
                return self._text(), {"task_type": f"scramble-{length}", "solution": length}
        raise RuntimeError(f"no scramble of {length} turns in {TRIES} tries.")

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        move = self._match(action.replace("’", "'"))
        if move is None:
            return self._observation, 0.0, False, {"valid": False}
        self.cube = turn(self.cube, move)
        solved = self.cube == GOALS[HELD(self.cube)]
        return self._text(), float(solved), solved, {"success": solved}

    def _text(self) -> str:
        rows = [" ".join(self.cube[start : start + 2]) for start in range(0, len(CELLS), 2)]
        return "\n".join(f"{face}: {rows[2 * i]} / {rows[2 * i + 1]}" for i, face in enumerate(FACES))

    def admissible(self) -> list[str]:
        """The twelve quarter turns."""
        return list(MOVES)

    def expert(self) -> str:
        """The first turn of a shortest solution."""
        return solve(self.cube)[0]


@lru_cache(10_000)
def solve(cube: str) -> tuple[str, ...]:
    """A shortest solution, in turns of U, R and F: breadth-first from both ends, so exact."""
    ways: list[dict[str, tuple[str, ...]]] = [{cube: ()}, {GOALS[HELD(cube)]: ()}]
    edges = [list(way) for way in ways]
    while not (met := ways[0].keys() & ways[1].keys()):
        side = len(edges[1]) < len(edges[0])
        way, edge = ways[side], edges[side]
        edges[side] = []
        for state in edge:
            for move in ENOUGH:
                after = turn(state, move)
                if after not in way:
                    way[after] = (INVERSE[move], *way[state]) if side else (*way[state], move)
                    edges[side].append(after)
    middle = min(met)
    return ways[0][middle] + ways[1][middle]
