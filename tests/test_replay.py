import asyncio
import itertools
import random
import textwrap

import pytest
from typer.testing import CliRunner

from verl_multiturn.cli import app
from verl_multiturn.replay import environment, find_trajectories, name_of, replay, replay_all
from verl_multiturn.rollout.episode import Episode, Sample, Task
from verl_multiturn.rollout.layouts import Limits, TurnRows
from verl_multiturn.rollout.parsing import ActionFormat
from verl_multiturn.rollout.pool import EnvPool
from verl_multiturn.rollout.prompts import PromptPolicy, Templates
from verl_multiturn.runs import Run, RunWriter

WORDS = [
    "<a>left</a>", "<a>right|down</a>", "<a>up|up</a>", "<a>down|right</a>", "no tag", "<a>fly</a>",
]  # fmt: skip
KWARGS = {"size": 4, "slip": 0.3}


class Letters:
    """A chat that is its own tokenizer: one id per character."""

    def build_initial_tokens(self, messages):
        return [ord(letter) for letter in messages[-1]["content"]]


def recorded(env, kwargs, task, group, sample, step, say, **limits):
    """One episode as training plays it, as a record."""
    bounds = Limits(10_000, 10_000, 64, **limits)

    async def generate(prompt_ids, max_tokens, seed):
        return Sample([ord(letter) for letter in say()])

    pool = EnvPool(1)
    trajectory = asyncio.run(
        Episode(
            env, kwargs, Task(task, group, sample, dynamics_seed=97 * task + sample),
            TurnRows(PromptPolicy(Templates()), Letters(), bounds, None),
            ActionFormat(tag="a", think=False, separator="|", max_actions=2), bounds, pool, generate,
            decode=lambda ids: "".join(map(chr, ids)),
        ).play()
    )  # fmt: skip
    pool.close()
    shared = {name: value for name, value in trajectory.info.items() if name != "details"}
    turns = [
        {
            "index": t, "observation": detail["observation"], "actions": detail["actions"],
            "valid": turn.valid, "reward": turn.reward, "anchor": turn.anchor, "value": None,
            "action_ids": turn.action_ids, "text": turn.action_text, "advantage": None,
        }
        for t, (turn, detail) in enumerate(zip(trajectory.turns, trajectory.info["details"], strict=True))
    ]  # fmt: skip
    return shared | {
        "split": "train", "step": step, "group": group, "trajectory": sample, "turns": turns,
        "return": trajectory.episode_return, "success": trajectory.success,
        "terminated": trajectory.terminated, "truncated": trajectory.truncated,
    }  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("replay") / "run", random.Random(0)
    say = lambda: rng.choice(WORDS)  # noqa: E731
    with RunWriter(folder, {"multiturn": {"env": "frozen_lake", "env_kwargs": KWARGS}}) as writer:
        for step, limits in ((1, {}), (2, {"max_turns": 2}), (3, {"max_actions": 3})):
            rows = [
                recorded("frozen_lake", KWARGS, task, f"s{step}-{task}", sample, step, say, **limits)
                for task in range(8)
                for sample in range(12 if task == 0 else 3)
            ]
            writer.trajectories("train", step, rows)
        writer.metrics(1, {})
    return Run(folder)


def long_ones(run):
    """Trajectories of several turns."""
    return [record for record in run.trajectories("train", 1) if len(record["turns"]) > 2]


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def test_every_trajectory_is_played_again(run):
    records = list(itertools.chain(*(run.trajectories("train", step) for step in (1, 2, 3))))
    replays = replay_all(environment(run), records)
    assert len(replays) == 99 and all(one.ok for one in replays)
    # The cases that matter are among them.
    turns = [turn for record in records for turn in record["turns"]]
    assert any(turn["actions"] == [] for turn in turns)
    assert any(len(turn["actions"]) == 2 and turn["valid"] for turn in turns)
    assert {record["truncation"] for record in records} >= {None, "turns"}
    stopped = [
        one for one in replays if one.steps < sum(len(t["actions"] or [""]) for t in one.record["turns"])
    ]
    assert stopped, "no episode ended inside a turn"
    assert {record["success"] for record in records} == {True, False}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("observation", "nowhere", "observation before it recorded 'nowhere', now"),
        ("reward", 0.25, "reward recorded 0.25, now 0"),
        ("valid", None, "valid recorded"),
    ],
)
def test_the_first_difference_of_a_turn(run, key, value, said):
    def change(record):
        turn = record["turns"][1]
        turn[key] = (not turn["valid"]) if value is None else value

    record = long_ones(run)[0]
    change(record)
    found = replay(environment(run), record)
    assert not found.ok and found.difference.turn == 1 and found.turns == 1
    assert f"{name_of(record)} differs at turn 1: {said}" in str(found.difference)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda r: r.update(success=not r["success"]), "success"),
        (lambda r: r.update(terminated=not r["terminated"]), "terminated"),
        (lambda r: r.update(truncation="environment"), "truncated by the environment"),
        (lambda r: r.update(instruction="dance"), "instruction"),
    ],
)
def test_differences_of_the_whole(run, change, what):
    record = next(r for r in run.trajectories("train", 1) if r["terminated"])
    assert replay(environment(run), record).ok
    change(record)
    assert replay(environment(run), record).difference.what == what


def test_other_noise_is_noticed(run):
    records = [record | {"dynamics_seed": 1} for record in long_ones(run)]
    assert not all(one.ok for one in replay_all(environment(run), records))


def test_an_environment_that_raises_or_ends_early(run, tmp_path):
    record = run.trajectories("train", 1)[0]
    (tmp_path / "short.py").write_text(
        textwrap.dedent(
            """
            from verl_multiturn.env import Env

            class Short(Env):
                def _reset(self, seed):
                    self.n = 0
                    return "o", {}

                def _step(self, action):
                    self.n += 1
                    if action == "raise":
                        raise KeyError("lost")
                    return "o", 0.0, self.n == 1, {}
            """
        )
    )
    env = environment(run_with(tmp_path, tmp_path / "short.py"))
    turn = {"observation": "o", "actions": ["x"], "reward": 0.0, "valid": True}
    record |= {"instruction": "", "turns": [turn | {"index": 0}, turn | {"index": 1}]}
    assert str(replay(env, record).difference).endswith("the episode recorded 'goes on', now 'has ended'")
    record["turns"][0]["actions"] = ["raise"]
    assert "now KeyError('lost')" in str(replay(env, record).difference)


def run_with(folder, env):
    with RunWriter(folder / "run", {"multiturn": {"env": str(env)}} if env else None) as writer:
        writer.metrics(1, {})
    return Run(folder / "run")


def test_a_file_that_is_gone(tmp_path):
    with pytest.raises(ValueError, match="which is not there") as error:
        environment(run_with(tmp_path, tmp_path / "gone.py:Gone"))
    assert "--env" in str(error.value)
    assert environment(Run(tmp_path / "run"), "frozen_lake").max_turns


def test_a_run_that_names_no_environment(tmp_path):
    with pytest.raises(ValueError, match="names no environment"):
        environment(run_with(tmp_path, None))


def test_names(run):
    assert [name_of(r) for r in find_trajectories(run, "s1-0/1")] == ["s1-0/1"]  # not s1-0/10
    assert find_trajectories(run, "s2-5/2", step=2)[0]["step"] == 2
    assert len(find_trajectories(run, None)) == 33
    assert {r["step"] for r in find_trajectories(run, None, step=1)} == {1}
    with pytest.raises(ValueError, match=r"begins the names of 3 trajectories: s2-5/0 of step 2"):
        find_trajectories(run, "s2-5")
    with pytest.raises(ValueError, match=r"Did you mean 's1-5/2'\? \(the nearest of 99\)"):
        find_trajectories(run, "s1_5/2")
    with pytest.raises(ValueError, match="unknown split 'vla'"):
        find_trajectories(run, "s", split="vla")


def test_the_command(run, tmp_path):
    assert "33 of 33 trajectories are as recorded" in call("replay", run.folder, "--all", "--step", 2)
    said = call("replay", run.folder, "s1-2/0")
    assert "equal" in said and "1 of 1 trajectories are as recorded" in said
    assert "give either a TRAJECTORY" in call("replay", run.folder, code=2)
    assert "give either a TRAJECTORY" in call("replay", run.folder, "s1", "--all", code=2)
    rows = run.trajectories("train", 1)[:4]
    rows[2]["turns"][0]["reward"] = 7.0
    config = {"multiturn": {"env": "frozen_lake", "env_kwargs": KWARGS}}
    with RunWriter(tmp_path / "changed", config) as writer:
        writer.metrics(1, {})
        writer.trajectories("train", 1, rows)
    said = call("replay", tmp_path / "changed", "--all", code=1)
    assert "3 of 4 trajectories are as recorded" in said
    assert "s1-0/2 differs at turn 0: reward recorded 7.0, now 0.0" in said
    assert "differs: reward" in call("replay", tmp_path / "changed", "s1-0/2", code=1)
