"""Gymnasium's environments in text: the contract, and that the library is what is played."""

import random
from pathlib import Path

import pytest

from verl_multiturn.check import check_env
from verl_multiturn.env import derive_seed, make

gymnasium = pytest.importorskip("gymnasium", reason="pip install verl-multiturn[gym]")

EXAMPLE = str(Path(__file__).parents[1] / "examples" / "minigrid.py")


class Echo(gymnasium.Env):
    """# Echo

    Say the word.
    """

    action_space = gymnasium.spaces.Text(10)
    observation_space = gymnasium.spaces.Text(10)
    metadata = {"render_modes": []}

    def __init__(self, words=("left", "right")):
        self.words = words

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.word = str(self.np_random.choice(self.words))
        return self.word, {}

    def step(self, action):
        right = action == self.word
        return self.word, float(right), right, False, {"is_success": right}


@pytest.mark.parametrize(
    "kwargs",
    [
        {"id": "FrozenLake-v1"},
        {"id": "FrozenLake-v1", "keywords": {"desc": None, "is_slippery": False}, "max_turns": 20},
        {"id": "Taxi-v4", "max_turns": 40, "invalid_reward": -1.0},
        {"id": "CliffWalking-v1", "success_above": -2.0, "invalid_reward": -1.0},
        {"id": "Blackjack-v1"},
        {"id": "CartPole-v1"},
        {"id": "Pendulum-v1", "max_turns": 5},
        {"id": f"{__file__}:Echo", "keywords": {"words": ["one", "two"]}},
    ],
    ids=lambda kwargs: Path(kwargs["id"]).name,
)
def test_contract(kwargs):
    report = check_env("gymnasium", episodes=4, **kwargs)
    assert report.ok, str(report)


@pytest.mark.parametrize("kwargs", [{}, {"render": f"{EXAMPLE}:render"}])
@pytest.mark.parametrize("id", ["MiniGrid-Empty-5x5-v0", "MiniGrid-DoorKey-5x5-v0"])
def test_minigrid(id, kwargs):
    pytest.importorskip("minigrid", reason="pip install verl-multiturn[gym]")
    report = check_env("gymnasium", episodes=3, id=f"minigrid:{id}", max_turns=30, **kwargs)
    assert report.ok, str(report)


def test_minigrid_in_words():
    pytest.importorskip("minigrid", reason="pip install verl-multiturn[gym]")
    env = make("gymnasium", id="minigrid:MiniGrid-Empty-5x5-v0", render=f"{EXAMPLE}:render")
    first, _ = env.reset(0)
    assert first.splitlines()[0] == "Mission: get to the green goal square."
    assert "green goal: 2 ahead, 2 to the right." in first and "wall: 1 to the left." in first
    for action in ["forward", "forward", "right", "forward", "Forward"]:
        _, reward, terminated, _, info = env.step(action)
    assert reward > 0.9 and terminated and info["success"]
    assert env.names == ["left", "right", "forward", "pickup", "drop", "toggle", "done"]


def test_frozen_lake_is_the_librarys():
    keywords = {"desc": None, "is_slippery": False}
    env = make("gymnasium", id="FrozenLake-v1", keywords=keywords)
    truth = gymnasium.make("FrozenLake-v1", render_mode="ansi", **keywords)
    for seed in range(5):
        text, _ = env.reset(seed)
        truth.reset(seed=random.Random(derive_seed("task", seed)).getrandbits(31))
        rng = random.Random(seed)
        while True:
            assert text.replace("[red:", "").replace("]", "") == "\n".join(
                line for line in _plain(truth.render()).strip("\n").split("\n") if not line.startswith(" ")
            )
            number = rng.randrange(4)
            text, reward, terminated, truncated, info = env.step(["left", "down", "right", "up"][number])
            expected = truth.step(number)
            assert (reward, terminated, truncated) == expected[1:4] and info["success"] == (reward == 1)
            if terminated or truncated:
                break


def _plain(picture):
    return picture.replace("\x1b[41m", "").replace("\x1b[0m", "")


def test_frozen_lake_can_be_won_and_the_colour_is_kept():
    env = make("gymnasium", keywords={"is_slippery": False})
    assert env.reset(0)[0] == "[red:S]FFF\nFHFH\nFFFH\nHFFG"
    for action in ["down", "down", "right", "down", "Right", " right "]:
        text, reward, terminated, _, info = env.step(action)
    assert (text.split("\n")[3], reward, terminated, info["success"]) == ("HFF[red:G]", 1.0, True, True)


def test_members_of_a_group_slip_differently():
    env, ends = make("gymnasium", id="FrozenLake-v1"), set()
    for member in range(16):
        env.reset(2, dynamics_seed=member)
        ends.add(env.step("down")[0])
    assert len(ends) > 1


def test_masked_actions_are_not_listed_but_valid():
    env = make("gymnasium", id="Taxi-v4", invalid_reward=-1.0)
    env.reset(3)
    assert set(env.admissible()) < set(env.names)
    masked = next(name for name in env.names if name not in env.admissible())
    assert env.step(masked)[4]["valid"]
    assert env.step("fly")[1:] == (-1.0, False, False, {"valid": False, "success": False})


def test_other_action_spaces_take_json():
    env = make("gymnasium", id="Pendulum-v1")
    env.reset(0)
    assert env.step("[0.5]")[4]["valid"]
    for action in ("[9]", "0.5", "[0.5, 1]", "left", '["a"]', "{}"):
        assert not env.step(action)[4]["valid"], action
    assert make("gymnasium", id=f"{__file__}:Echo").instruction == "Say the word."


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"id": "FrozenLak-v1"}, "Did you mean: `FrozenLake`"),
        ({"id": "Taxi-v3"}, "Taxi-v4"),
        ({"id": "no_such_package:Thing-v0"}, "no_such_package"),
        ({"id": f"{__file__}:Ecco"}, "Did you mean 'Echo'"),
        ({"actions": ["up", "down"]}, "has 4 actions"),
        ({"render": "no_such_module:f"}, "no module"),
        ({"keywords": {"slippery": True}}, "slippery"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_wrong_arguments_are_named(kwargs, says):
    with pytest.raises(ValueError, match=r".") as caught:
        make("gymnasium", **kwargs)
    assert says in str(caught.value)
