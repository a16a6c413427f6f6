"""GEM's games: the contract, and that the library is what is played."""

import pytest

from verl_multiturn.check import check_env
from verl_multiturn.env import make

gem = pytest.importorskip("gem", reason="pip install --no-deps gem-llm")
pytest.importorskip("gem.envs", reason="gem needs reasoning-gym")


class Doubles(gem.Env):
    """A user's own: say twice the number, which comes from the global generator as GEM's games' do."""

    def __init__(self, top=9, max_turns=3):
        self.top, self.max_turns = top, max_turns

    def reset(self, seed=None):
        import random

        super().reset(seed)
        self.number, self.turn_count = random.randint(1, self.top), 0
        return "Double it.", {"suffix": f"{self.number}"}

    def step(self, action):
        self.turn_count += 1
        right = action == f"\\boxed{{{2 * self.number}}}"
        return "yes" if right else "no", float(right), right, False, {}

    def sample_random_action(self):
        import random

        return f"\\boxed{{{random.randint(1, 2 * self.top)}}}"


GAMES = ["GuessTheNumber", "Mastermind", "Minesweeper", "FifteenPuzzle", "Sudoku", "TowerofHanoi", "Game2048"]
IDS = [*(f"game:{name}-v0-easy" for name in [*GAMES, "Sokoban", "Crosswords"]), "rg:chain_sum"]


@pytest.mark.parametrize("kwargs", [{}, *({"id": id} for id in IDS), {"id": f"{__file__}:Doubles"}])
def test_contract(kwargs):
    report = check_env("gem", episodes=2, **kwargs)
    assert report.ok, str(report)


@pytest.mark.parametrize("form", ["{}", "I move \\boxed{{{}}}."])
def test_hanoi_can_be_solved(form):
    env = make("gem", id="game:TowerofHanoi-v0-easy")
    board, _ = env.reset(0)
    assert board.startswith("Here is the current state") and "tower A to tower C" in env.instruction
    for move in ["A C", "A B", "C B", "A C", "B A", "B C", "A C"]:
        _, reward, terminated, _, info = env.step(form.format(move))
    assert (reward, terminated, info["success"], env.turn) == (1.0, True, True, 7)


def test_rewards_that_come_in_parts_add_up_to_success():
    env = make("gem", id="game:Sudoku-v0-easy")
    env.reset(1)
    cells = [(r, c) for r in range(4) for c in range(4) if env.env.board[r][c] == 0]
    paid = []
    for row, column in cells:
        paid.append(env.step(f"{row + 1} {column + 1} {env.env.full_grid[row][column]}"))
    assert [step[4]["success"] for step in paid] == [False] * (len(cells) - 1) + [True]
    assert sum(step[1] for step in paid) == pytest.approx(1)


def test_what_gem_cannot_parse_ends_the_episode():
    env = make("gem", id="game:TowerofHanoi-v0-easy")
    env.reset(0)
    key = env.state_key()
    _, reward, terminated, _, info = env.step("the big one")
    assert (reward, terminated, info["valid"], env.state_key() == key) == (-0.1, True, False, True)


def test_members_of_a_group_get_other_tiles_on_the_same_board():
    env, starts, ends = make("gem", id="game:Game2048-v0-easy"), set(), set()
    for member in range(6):
        starts.add(env.reset(4, dynamics_seed=member)[0])
        for action in ("left", "up", "left", "up"):
            text = env.step(action)[0]
        ends.add(text)
    assert len(starts) == 1 and len(ends) > 1


def test_the_number_of_turns_counts_no_state():
    env = make("gem", id="game:TowerofHanoi-v0-easy")
    env.reset(0)
    key = env.state_key()
    env.step("A C")
    assert env.state_key() != key
    env.step("C A")
    assert env.state_key() == key


def test_wrong_ids_are_named():
    with pytest.raises(ValueError, match="Did you mean 'game:Sokoban-v0-easy'"):
        make("gem", id="game:Sokoban-v0-eas")
    with pytest.raises(ValueError, match="no module 'mine'"):
        make("gem", id="mine:Game")


def test_missing_word_lists_are_named():
    nltk = pytest.importorskip("nltk", reason="needs nltk")
    try:
        nltk.data.find("corpora/words")
    except LookupError:
        with pytest.raises(FileNotFoundError, match="needs data of NLTK: Resource 'words' not found"):
            make("gem", id="game:Hangman-v0-easy")
    else:
        pytest.skip("NLTK's words are here")
