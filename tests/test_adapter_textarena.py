"""TextArena's single-player games: the contract, and that the library is what is played."""

import random

import pytest

from verl_multiturn.check import check_env
from verl_multiturn.env import make

ta = pytest.importorskip("textarena", reason="pip install verl-multiturn[textarena]")


class Coin(ta.Env):
    """A user's own: call a coin that is thrown at each call."""

    def __init__(self, stakes=1):
        self.stakes = stakes

    def reset(self, num_players, seed=None):
        self.state = ta.SinglePlayerState(num_players=num_players, seed=seed)
        self.state.reset(game_state={"calls": 0}, player_prompt_function=lambda **_: "Call it.")

    def step(self, action):
        if action not in ("[heads]", "[tails]"):
            self.state.set_invalid_move("no side")
        elif action == random.choice(["[heads]", "[tails]"]):
            self.state.set_outcome(self.stakes, "right")
        else:
            self.state.game_state["calls"] += 1
            self.state.add_observation("wrong", ta.ObservationType.GAME_MESSAGE)
        return self.state.step()


GAMES = [
    *("FrozenLake-v0", "FrozenLake-v0-random", "TowerOfHanoi-v0", "GuessTheNumber-v0", "LightsOut-v0"),
    *("2048-v0-ultra-easy", "Blackjack-v0", "FifteenPuzzle-v0", "Mastermind-v0", "Minesweeper-v0"),
    *("PegJump-v0", "Secretary-v0", "Bandit-v0", "LogicPuzzle-v0"),
    *("Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0", "ThreeCardMonte-v0"),  # the confused ones
]


@pytest.mark.parametrize("id", GAMES)
def test_contract(id):
    report = check_env("textarena", episodes=2, id=id)
    assert report.ok, str(report)


def test_contract_of_sokoban():
    report = check_env("textarena", episodes=1, id="Sokoban-v0", max_turns=8)  # a reset takes 0.1 s
    assert report.ok, str(report)


def test_contract_of_a_users_own():
    report = check_env("textarena", episodes=4, id=f"{__file__}:Coin", actions=["[heads]", "[tails]"])
    assert report.ok, str(report)


def test_hanoi_can_be_solved():
    env = make("textarena", id="TowerOfHanoi-v0")
    board, _ = env.reset(0)
    assert "A: [3, 2, 1]" in board and "Hanoi" in env.instruction
    for move in ["[A C]", "A B", "C B", "A C", "B A", "B C", "A C"]:
        text, reward, terminated, _, info = env.step(move)
    assert (reward, terminated, info["success"], env.turn) == (1.0, True, True, 7)
    assert info["reason"] and not text.startswith("Hanoi")


def test_guessing_by_halves_wins():
    env = make("textarena", id="GuessTheNumber-v0")
    won = 0
    for seed in range(5):
        env.reset(seed)
        low, high = 1, 20
        while True:
            middle = (low + high) // 2
            text, _, terminated, truncated, info = env.step(f"[{middle}]")
            if terminated or truncated:
                break
            low, high = (middle + 1, high) if "higher" in text else (low, middle - 1)
        won += info["success"]
    assert won == 5


@pytest.mark.parametrize("id", ["FrozenLake-v0", "Countdown-v0"])
def test_the_second_invalid_move_in_a_row_ends_the_game(id):
    env = make("textarena", id=id)
    env.reset(0)
    key = env.state_key()
    text, reward, terminated, _, info = env.step("[sideways]")
    assert (reward, terminated, info["valid"]) == (0.0, False, False) and "invalid move" in text
    assert env.state_key() == key
    text, reward, terminated, _, info = env.step("[sideways]")
    assert terminated and not info["valid"] and not info["success"] and isinstance(reward, float)
    assert "format" in info["reason"]


def test_the_policys_own_words_are_not_shown_again():
    env = make("textarena", id="FrozenLake-v0")
    env.reset(0)
    assert "banana" not in env.step("banana [down]")[0]


@pytest.mark.parametrize(
    ("id", "says"),
    [("FrozenLak-v0", "Did you mean 'FrozenLake-v0'"), (f"{__file__}:Con", "Did you mean 'Coin'")],
)
def test_wrong_ids_are_named(id, says):
    with pytest.raises(ValueError, match=says):
        make("textarena", id=id)


def test_a_game_for_two_is_refused():
    with pytest.raises(ValueError, match="Nim-v0 is no game for one player"):
        make("textarena", id="Nim-v0").reset(0)
