import asyncio
import itertools
import random
import textwrap

import pytest
from typer.testing import CliRunner

from verl_multiturn.cli import app
from verl_multiturn.replay import (
    Unreadable,
    environment,
    find_trajectory,
    name_of,
    places,
    read,
    replay,
)  # fmt: skip
from verl_multiturn.replay_report import ranges, tally
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


def replay_all(env, records):
    """One after another in one environment, as a rollout plays."""
    return [replay(env, record) for record in records]


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
def test_a_difference_of_one_turn(run, key, value, said):
    def change(record):
        turn = record["turns"][1]
        turn[key] = (not turn["valid"]) if value is None else value

    record = long_ones(run)[0]
    change(record)
    found = replay(environment(run), record)
    assert not found.ok and found.differing == [1] and found.turns == len(record["turns"])
    assert f"{name_of(record)} differs at turn 1: {said}" in str(found.differences[0])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda r: r.update(success=not r["success"]), "success"),
        (lambda r: r.update(terminated=not r["terminated"]), "terminated"),
        (lambda r: r.update(truncation="environment"), "truncated by the environment"),
        (lambda r: r.update(instruction="dance"), "instruction"),
        (lambda r: r.update(final_observation="home"), "observation after it"),
    ],
)
def test_differences_of_the_whole(run, change, what):
    record = next(r for r in run.trajectories("train", 1) if r["terminated"])
    assert replay(environment(run), record).ok
    change(record)
    assert [one.what for one in replay(environment(run), record).differences] == [what]


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
    (found,) = replay(env, record).differences
    assert str(found).endswith("the episode recorded 'goes on', now 'has ended'")
    record["turns"][0]["actions"] = ["raise"]
    raised = replay(env, record)
    assert "now KeyError('lost')" in str(raised.differences[0]) and raised.lost == 2


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
    everywhere = places(run, ["train"], None)
    assert everywhere == [("train", 1), ("train", 2), ("train", 3)]
    assert places(run, ["train"], [3, 1]) == [("train", 1), ("train", 3)]
    assert name_of(find_trajectory(run, "s1-0/1", everywhere)) == "s1-0/1"  # not s1-0/10
    assert find_trajectory(run, "s2-5/2", [("train", 2)])["step"] == 2
    with pytest.raises(ValueError, match=r"begins the names of 3 trajectories: s2-5/0 of step 2"):
        find_trajectory(run, "s2-5", everywhere)
    with pytest.raises(ValueError, match=r"Did you mean 's1-5/2'\? \(the nearest of 99\)"):
        find_trajectory(run, "s1_5/2", everywhere)
    with pytest.raises(ValueError, match="unknown split 'vla'"):
        places(run, ["vla"], None)
    with pytest.raises(ValueError, match="unknown step of split 'train' '7'; valid: 1, 2, 3"):
        places(run, ["train"], [7])
    assert [ranges(numbers) for numbers in ([], [3], [1, 2, 3, 5, 7, 8])] == ["", "3", "1-3, 5, 7-8"]


def rewritten(folder, env, splits):
    """A run of these splits: {split: {step: records}}."""
    with RunWriter(folder, {"multiturn": env}) as writer:
        writer.metrics(1, {})
        for split, steps in splits.items():
            for step, records in steps.items():
                writer.trajectories(split, step, [r | {"split": split, "step": step} for r in records])
    return Run(folder)


def test_the_command(run, tmp_path):
    assert "33 of 33 trajectories are as recorded" in call("replay", run.folder, "--all", "--step", 2)
    assert "99 of 99 trajectories are as recorded" in call("replay", run.folder, "--all", "--step", "all")
    assert "66 of 66 trajectories" in call("replay", run.folder, "--all", "--step", "2-9")
    said = call("replay", run.folder, "s1-2/0")
    assert "equal" in said and "1 of 1 trajectories are as recorded" in said
    assert "give either a TRAJECTORY" in call("replay", run.folder, code=2)
    assert "give either a TRAJECTORY" in call("replay", run.folder, "s1", "--all", code=2)
    assert "unknown step of split 'train' '8'" in call("replay", run.folder, "--all", "--step", 8, code=2)
    assert "unknown split 'test'" in call("replay", run.folder, "--all", "--split", "train,test", code=2)


def test_what_a_run_has_imported_is_told_before(run, tmp_path):
    """Before: whatever the file does, the sentence stands above it."""
    (tmp_path / "theirs.py").write_text("raise SystemExit('theirs ran')\n")
    env = {"env": f"{tmp_path}/theirs.py:Lake", "env_kwargs": {"maps": [{"by": "maps.py:make"}]}}
    folder = rewritten(tmp_path / "foreign", env, {"train": {1: run.trajectories("train", 1)[:1]}}).folder
    result = CliRunner().invoke(app, ["replay", str(folder), "--all"])
    said = " ".join(result.output.split())
    assert "theirs ran" in str(result.exception) or "theirs ran" in said
    assert said.startswith(
        f"imports {tmp_path}/theirs.py, which {folder}/config.yaml names imports maps.py, which"
    )
    assert "imports" not in call("replay", run.folder, "s1-2/0")


def test_all_that_differs_is_told(run, tmp_path):
    """Two turns of one trajectory and the end of another, in two splits; a third file is cut off."""
    rows = run.trajectories("train", 1)
    long = next(n for n, record in enumerate(rows) if len(record["turns"]) > 3)
    rows[long]["turns"][0]["reward"] = 7.0
    rows[long]["turns"][2]["observation"] = "nowhere"
    fine = run.trajectories("train", 1)[:20]
    ended = next(n for n, r in enumerate(fine) if r["terminated"] and n != long)
    wrong = [*fine[:ended], fine[ended] | {"success": not fine[ended]["success"]}]
    env = {"env": "frozen_lake", "env_kwargs": KWARGS}
    splits = {"train": {1: rows, 2: fine, 3: fine}, "val": {2: wrong, 4: fine}}
    folder = rewritten(tmp_path / "changed", env, splits).folder
    said = call("replay", folder, "--all", "--step", "all", "--split", "all", code=1)
    count = 33 + 3 * 20 + ended + 1
    assert f"{count - 2} of {count} trajectories are as recorded" in said
    name = name_of(rows[long])
    assert f"{name} differs at turn 0: reward recorded 7.0, now 0.0" in said
    assert f"{name} differs at turn 2: observation before it recorded 'nowhere'" in said
    kinds = "observations 1, rewards 1, valid 0, ends 1, errors 0; turns not compared 0; unreadable 0"
    assert f"differing: trajectories 2, turns 3; {kinds}" in said
    assert "differs: reward" in call("replay", folder, name, "--step", 1, code=1)
    assert "40 of 40" in call("replay", folder, "--all", "--split", "train,val")  # their last steps
    out = tmp_path / "differences.csv"
    call("replay", folder, "--all", "--step", "1,2", "--split", "val,train", "--out", out, code=1)
    lines = out.read_text().splitlines()
    assert lines[0] == "split,step,trajectory,turn,kind,what,recorded,now"
    assert lines[1].startswith(f"val,2,{name_of(fine[ended])}") and ",ends,success," in lines[1]
    assert lines[2] == f"train,1,{name},0,rewards,reward,7.0,0.0"
    path = folder / "trajectories/train/2.jsonl.zst"
    path.write_bytes(path.read_bytes()[:-30])
    said = call("replay", folder, "--all", "--step", "2-3", code=1)
    assert "unreadable 1" in said and "2.jsonl.zst is damaged" in said and "20 of 20" in said
    assert "2.jsonl.zst is damaged" in call("replay", folder, "nobody", code=2)


def test_a_line_that_is_no_trajectory_is_told(run, tmp_path):
    good = run.trajectories("train", 1)[:2]
    bad = [{name: value for name, value in good[0].items() if name != key} for key in ("seed", "turns")]
    bad += [good[0] | {"turns": turns} for turns in (3, [None], [good[0]["turns"][0] | {"reward": None}])]
    for n, one in enumerate(bad):
        env = {"env": "frozen_lake", "env_kwargs": KWARGS}
        changed = rewritten(tmp_path / str(n), env, {"train": {1: [good[0], one, good[1]]}})
        first, wrong, last = read(changed, [("train", 1)])
        assert (first, last) == tuple(good) and isinstance(wrong, Unreadable)
        assert "1.jsonl.zst, line 2 has no (usable)" in wrong.why
        found = tally(environment(changed), [first, wrong, last], quiet=True)
        assert (found.trajectories, found.equal, found.ok) == (2, 2, False)
        assert "unreadable 1" in str(found)


LEAKY = """
import random
from environments.frozen_lake import FrozenLake

class Leaky(FrozenLake):
    def _step(self, action):
        observation, reward, done, info = super()._step(action)
        return f"{observation} {random.SystemRandom().random()}", reward, done, info
"""


def test_an_environment_that_is_not_deterministic(tmp_path):
    """Every observation after the first differs, the rest does not, and every turn is compared."""
    (tmp_path / "leaky.py").write_text(LEAKY)
    env, rng = f"{tmp_path}/leaky.py:Leaky", random.Random(3)
    say = lambda: rng.choice(WORDS)  # noqa: E731
    records = [recorded(env, KWARGS, task, f"g{task}", 0, 1, say, max_turns=5) for task in range(12)]
    changed = rewritten(tmp_path / "run", {"env": env, "env_kwargs": KWARGS}, {"train": {1: records}})
    found = tally(environment(changed), read(changed, places(changed, ["train"], None)), quiet=True)
    turns = sum(len(record["turns"]) for record in records)
    cut = sum(record["final_observation"] is not None for record in records)
    assert (found.turns, found.lost) == (turns, 0)
    assert found.kinds == {"observations": turns - len(records) + cut}
    assert found.equal == sum(len(r["turns"]) == 1 and r["terminated"] for r in records) < 12


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("sokoban", ["up", "down", "left", "right"]),
        ("countdown", ["1+2", "3*(4-1)", "no"]),
        ("game_2048", ["up", "down", "left", "right"]),
        ("twenty_questions", ["Is it alive?", "Is it a dog?", "Can I eat it?"]),
    ],
)
def test_other_environments(tmp_path, env, words):
    """Chance of its own, a tree that is evaluated, an oracle: all are as recorded."""
    rng = random.Random(7)
    say = lambda: f"<a>{rng.choice(words)}</a>"  # noqa: E731
    records = [recorded(env, {}, task, f"g{task}", 0, 1, say, max_turns=4) for task in range(3)]
    assert all(record["turns"] for record in records)
    played = replay_all(environment(run_with(tmp_path, env)), records)
    assert [one.differences for one in played] == [(), (), ()]
