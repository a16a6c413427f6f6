"""SkyRL-gym's text environments: the contract, and that the library's verifier decides."""

import json

import pytest

from verl_multiturn.check import check_env
from verl_multiturn.env import make

pytest.importorskip("skyrl_gym", reason="pip install skyrl-gym")

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

ROWS = [
    {
        "id": f"{pens}x{boxes}",
        "data_source": "pens",
        "prompt": [
            {"role": "system", "content": "Write the answer after ####."},
            {"role": "user", "content": f"{boxes} boxes hold {pens} pens each. How many pens?"},
        ],
        "reward_spec": {"ground_truth": str(pens * boxes)},
        "reward_model": {"ground_truth": str(pens * boxes)},
    }
    for pens in (2, 3, 5)
    for boxes in (4, 7)
]


class Count(BaseTextEnv):
    """A user's own: count upwards, one number a turn."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.max_turns, self.said = env_config["to"], 0

    def step(self, action):
        self.turns += 1
        self.said += action.strip() == str(self.said + 1)
        done = self.said == self.max_turns
        messages = [{"role": "user", "content": f"You are at {self.said}."}]
        return BaseTextEnvStepOutput(observations=messages, reward=float(done), done=done, metadata={})


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return str(path)


@pytest.mark.parametrize("id", ["gsm8k", "gsm8k_multi_turn", "aime"])
def test_contract(rows, id):
    report = check_env("skyrl_gym", episodes=4, rows=rows, id=id)
    assert report.ok, str(report)


def test_contract_of_a_users_own():
    given = [{"prompt": "Count.", "extra": 1}]
    report = check_env("skyrl_gym", episodes=2, rows=given, id=f"{__file__}:Count", config={"to": 3})
    assert report.ok, str(report)
    env = make("skyrl_gym", rows=given, id=f"{__file__}:Count", config={"to": 2})
    env.reset(0)
    assert env.step("1") == ("You are at 1.", 0.0, False, False, env_info(success=False))
    assert env.step("2") == ("You are at 2.", 1.0, True, False, env_info(success=True))


def env_info(success):
    return {"valid": True, "success": success, "metadata": {}}


def test_gsm8k_of_several_turns(rows):
    env = make("skyrl_gym", rows=rows, id="gsm8k_multi_turn", max_turns=4)
    start, info = env.reset(1)
    assert start == "7 boxes hold 2 pens each. How many pens?" and info["task_type"] == "pens"
    assert env.instruction == "Write the answer after ####."
    key = env.state_key()
    text, reward, terminated, _, info = env.step("")
    assert (text, reward, terminated, info["valid"], env.state_key()) == (start, 0.0, False, False, key)
    text, reward, terminated, _, _ = env.step("I guess #### 13")
    assert reward == pytest.approx(0.2 / 5) and not terminated and "#### ANSWER" in text
    _, reward, terminated, _, info = env.step("#### 14")
    assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_rows_are_named_by_number_or_id(rows):
    env = make("skyrl_gym", rows=rows)
    assert env.reset(2)[0] == env.reset(2 + len(ROWS))[0] == env.reset("3x4")[0]
    with pytest.raises(ValueError, match="unknown id of a row '3x5'"):
        env.reset("3x5")


def test_a_snapshot_does_not_carry_the_file(tmp_path):
    text = "\n".join(json.dumps(row) for row in ROWS * 50)
    (tmp_path / "many.jsonl").write_text(text)
    env = make("skyrl_gym", rows=f"{tmp_path}/many.jsonl")
    env.reset(0)
    assert len(env.snapshot()) < 20_000 < len(text)


def test_wrong_arguments_are_named(rows):
    with pytest.raises(FileNotFoundError, match=r"name a \.jsonl, \.json or \.parquet file"):
        make("skyrl_gym")
    with pytest.raises(ValueError, match="Did you mean 'gsm8k'"):
        make("skyrl_gym", rows=rows, id="gsm8")
    with pytest.raises(ValueError, match="a row does not suit gsm8k: reward_spec field is required"):
        make("skyrl_gym", rows=[{"prompt": "x"}])
