import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from pkgutil import resolve_name
from random import Random

import pytest
from typer.testing import CliRunner

from verl_multiturn.cli import app

pytest.importorskip("alfworld", reason="needs the extra alfworld")
pytest.importorskip("textworld.envs.pddl.pddl", reason="needs the extra alfworld")

import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredTWEnv
from alfworld.gen import constants
from textworld.envs import PddlEnv

from environments.alfworld_parts.games import Request, _Draws, write_games
from environments.alfworld_parts.problems import LEAST, draw
from environments.alfworld_parts.scenes import SPLITS, TASKS
from environments.alfworld_parts.solvers import Engine, game_file, solver
from environments.alfworld_parts.workers import Workers

ROOT = Path(__file__).parents[1]
SMALL, FULL = (8, 10), (None, None)
SPLIT_NAMES = {
    "train": "train",
    "valid_seen": "eval_in_distribution",
    "valid_unseen": "eval_out_of_distribution",
}
ODD_SOLVERS = """
import time
from environments.alfworld_parts.solvers import solver

def hanging(name):
    real = solver(name)
    def solve(problem):
        if int(problem.content, 16) % 3 == 0:
            time.sleep(3600)
        return real(problem)
    return solve

def never(name):
    return {}.get
"""


def stock():
    return AlfredDemangler(PddlEnv(textworld.EnvInfos(admissible_commands=True)))


def command(*arguments):
    return CliRunner().invoke(app, ["make-alfworld-games", *map(str, arguments)])


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("games") / "out"
    counts = {"train": 12, "valid_seen": 6, "valid_unseen": 6}
    write_games(out, Request(counts, 7, *SMALL, workers=2), quiet=True)
    return out


@pytest.mark.parametrize("size", [SMALL, FULL], ids=["small", "full"])
@pytest.mark.parametrize("task", TASKS)
def test_the_plan_wins_in_the_stock_engine(task, size):
    problem = draw(task, SPLITS["train"], Random(f"{task} {size}"), *size)
    env = stock()
    env.load(game_file(problem))
    state = env.reset()
    assert f"Your task is to: {problem.sentence}." in state.feedback
    assert not state.won
    for number, text in enumerate(problem.plan, 1):
        assert text in state.admissible_commands
        state, reward, done = env.step(text)
        assert done == state.won == (reward == 1) == (number == len(problem.plan))


@pytest.mark.parametrize("limits", [SMALL, (3, 2), (30, 4)])
def test_limits_are_kept_and_every_game_can_be_played(limits):
    solve = solver("plan")
    for number, task in enumerate(TASKS * 3):
        problem = draw(task, SPLITS["valid_unseen"], Random(number), *limits)
        declared = problem.pddl.partition("(:init")[0]
        assert declared.count(" - receptacle\n") <= limits[0]
        assert declared.count(" - object\n") <= limits[1]
        assert solve(problem) == list(problem.plan)


def test_the_least_limits_suffice_for_every_type():
    for task, limits in LEAST.items():
        for seed in range(40):
            assert draw(task, SPLITS["train"], Random(seed), *limits).plan


def test_commands_and_names_are_the_stock_engines():
    engine, env, rng = Engine(), stock(), Random(0)
    for number in (0, 1):  # the first has receptacles that share a place
        problem = draw(TASKS[number], SPLITS["train"], Random(f"x{number}"))
        env.load(game_file(problem))
        state = env.reset()
        engine.load(problem.pddl)
        for _ in range(6):
            assert sorted(engine.commands()) == state.admissible_commands
            text = rng.choice(state.admissible_commands)
            state, _, done = env.step(text)
            assert engine.wins([text]) == state.won == done


def test_a_wrong_plan_does_not_win():
    problem = draw(TASKS[0], SPLITS["train"], Random(1), *SMALL)
    engine = Engine()
    for wrong in (problem.plan[:-1], problem.plan[1:], (*problem.plan, "look"), ("fly", *problem.plan)):
        engine.load(problem.pddl)
        assert not engine.wins(wrong)


@pytest.mark.parametrize("name", ["expert", "planner"])
def test_the_other_solvers_solve_every_type(name, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_MULTITURN_CACHE", str(tmp_path))
    solve, engine = solver(name), Engine()
    for task in TASKS:
        problem = draw(task, SPLITS["train"], Random(f"{task} 1"), 4, 4)
        commands = solve(problem)
        engine.load(problem.pddl)
        assert engine.wins(commands)


def test_game_files_are_what_upstream_writes(folder):
    files = sorted((folder / "json_2.1.1").rglob("game.tw-pddl"))
    assert len(files) == 24
    for path in files:
        game, traj = json.loads(path.read_text()), json.loads((path.parent / "traj_data.json").read_text())
        assert set(game) == {"pddl_domain", "grammar", "pddl_problem", "solvable", "walkthrough"}
        assert game["solvable"] is True and game["walkthrough"]
        assert game["pddl_problem"] == (path.parent / "initial_state.pddl").read_text()
        assert game["pddl_domain"] == (folder / "logic" / "alfred.pddl").read_text()
        assert "UNKNOWN GOAL" not in game["grammar"]
        target = traj["pddl_params"]["parent_target"] or traj["pddl_params"]["toggle_target"]
        name = f"{traj['task_type']}-{traj['pddl_params']['object_target']}-None-{target}"
        assert path.parent.parent.name == f"{name}-{traj['scene']['scene_num']}"
    note = json.loads((folder / "generated.json").read_text())
    assert "not the games of the ALFWorld benchmark" in note["what"]
    assert note["games"]["train"] == dict.fromkeys(TASKS, 2)


def test_upstreams_environment_lists_and_plays_them(folder):
    logic, data = folder / "logic", folder / "json_2.1.1"
    config = {
        "general": {"training_method": "dqn"},
        "rl": {"training": {"max_nb_steps_per_episode": 50}},
        "env": {
            "goal_desc_human_anns_prob": 0,
            "task_types": [1, 2, 3, 4, 5, 6],
            "domain_randomization": False,
            "expert_type": "handcoded",
        },
        "logic": {"domain": str(logic / "alfred.pddl"), "grammar": str(logic / "alfred.twl2")},
        "dataset": {"num_train_games": -1, "num_eval_games": -1},
    }
    keys = ("data_path", "eval_id_data_path", "eval_ood_data_path")
    config["dataset"] |= {key: str(data / split) for key, split in zip(keys, SPLIT_NAMES, strict=True)}
    found = {split: AlfredTWEnv(config, name) for split, name in SPLIT_NAMES.items()}
    assert {split: env.num_games for split, env in found.items()} == {
        "train": 12,
        "valid_seen": 6,
        "valid_unseen": 6,
    }
    env = found["valid_unseen"].init_env(batch_size=1)
    try:
        _, info = env.reset()
        for text in json.loads(Path(info["extra.gamefile"][0]).read_text())["walkthrough"]:
            _, _, done, info = env.step([text])
        assert done[0] and info["won"][0]
    finally:
        env.close()


def layout(path):
    """What a game is about, read from its files: goal, and class and contents of each receptacle."""
    pddl, traj = path.read_text(), json.loads((path.parent / "traj_data.json").read_text())
    pddl = pddl.partition("(:goal")[0]
    kinds = dict(re.findall(r"\((?:objectType|receptacleType) (\S+) (\S+)\)", pddl))
    inside = {name: Counter() for name in re.findall(r"\(receptacleAtLocation (\S+) ", pddl)}
    for thing, place in re.findall(r"\(inReceptacle (\S+) (\S+)\)", pddl):
        inside[place][kinds[thing]] += 1
    rows = sorted((kinds[place], sorted(things.items())) for place, things in inside.items())
    return json.dumps([traj["task_type"], traj["pddl_params"], rows]), traj["scene"]["scene_num"]


def test_splits_are_disjoint_and_unseen_scenes_are_unseen(folder):
    found = []
    for split in SPLITS:
        for path in (folder / "json_2.1.1" / split).rglob("initial_state.pddl"):
            digest, scene = layout(path)
            found.append(digest)
            assert (scene in constants.TEST_SCENE_NUMBERS) == (split == "valid_unseen")
            assert (scene in constants.TRAIN_SCENE_NUMBERS) == (split != "valid_unseen")
    assert len(set(found)) == len(found) == 24


def test_the_same_layout_at_other_coordinates_is_known():
    # So few things fit in that the same layouts come up again and again, until no new one is found.
    request = Request({"train": 100_000}, 0, 2, 2, ("look_at_obj_in_light",))
    seen = []
    with pytest.raises(ValueError, match="ask for fewer, or allow more receptacles and objects"):
        for _, problem in _Draws(request).of([("train", index) for index in range(100_000)]):
            seen.append(problem.content)
    assert len(set(seen)) == len(seen) > 100


def test_same_arguments_same_bytes_whatever_workers_and_hash_seed(tmp_path):
    def generate(name, workers, hash_seed):
        arguments = ["--train", 6, "--valid-unseen", 2, "--max-receptacles", 4, "--max-objects", 4]
        call = [sys.executable, "-m", "verl_multiturn.cli", "make-alfworld-games", tmp_path / name]
        call += [*arguments, "--seed", 3, "--workers", workers]
        where = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(hash_seed)}
        subprocess.run(list(map(str, call)), env=where, check=True, capture_output=True)
        return tree(tmp_path / name)

    first = generate("a", 1, 1)
    assert len(first) == 8 * 3 + 3
    assert generate("b", 3, 2) == first
    slots = [("train", index) for index in range(6)]
    other = {problem.folder for _, problem in _Draws(Request({"train": 6}, 4, 4, 4)).of(slots)}
    assert not any(name in path for name in other for path in first)


def test_hung_and_crashing_jobs_end_their_process_only():
    started = time.monotonic()
    with Workers[float](resolve_name, ("time:sleep",), 2, limit=1.0) as pool:
        answers = sorted(pool.run([0.01, 3600.0, 0.02, 3601.0, 0.03]))
    assert answers == [
        (0.01, None, ""),
        (0.02, None, ""),
        (0.03, None, ""),
        (3600.0, None, "time-out"),
        (3601.0, None, "time-out"),
    ]
    assert time.monotonic() - started < 60 and not multiprocessing.active_children()
    with Workers[int](resolve_name, ("os:_exit",), 1, limit=30.0) as pool:
        assert [why for _, _, why in pool.run([3, 4])] == ["crash", "crash"]
    with Workers[str](resolve_name, ("math:sqrt",), 1, limit=30.0) as pool:
        (_, _, error), (_, root, fine) = pool.run(["x", 4.0])
    assert (error, root, fine) == ("TypeError: must be real number, not str", 2.0, "")
    with Workers[int](resolve_name, ("math:no_such",), 1, limit=30.0) as pool:
        with pytest.raises(RuntimeError, match="does not start: AttributeError"):
            list(pool.run([1]))


@pytest.fixture
def odd_solvers(tmp_path, monkeypatch):
    (tmp_path / "odd_solvers.py").write_text(ODD_SOLVERS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "odd_solvers"
    sys.modules.pop("odd_solvers", None)


def test_games_whose_solver_hangs_are_drawn_again(odd_solvers, tmp_path):
    make, request = (
        resolve_name(f"{odd_solvers}:hanging"),
        Request({"train": 3}, 2, 4, 4, limit=3.0, workers=2),
    )
    summary = write_games(tmp_path / "out", request, make, quiet=True)
    assert summary["drawn_again"]["time-out"] >= 1
    assert summary["games"]["train"] == dict.fromkeys(TASKS[:3], 1) | dict.fromkeys(TASKS[3:], 0)
    assert len(list(tmp_path.rglob("game.tw-pddl"))) == 3
    assert not multiprocessing.active_children()


def test_a_solver_that_never_solves_ends_with_a_sentence(odd_solvers, tmp_path):
    request = Request({"train": 1}, 0, 4, 4)
    with pytest.raises(ValueError, match=r"20 games of type pick_and_place_simple failed .* unsolved"):
        write_games(tmp_path / "out", request, resolve_name(f"{odd_solvers}:never"), quiet=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--types", "pick_heat_then_place"], "Did you mean 'pick_heat_then_place_in_recep'?"),
        (["--solver", "experts"], "valid: plan, expert, planner. Did you mean 'expert'?"),
        (["--max-receptacles", 2], "pick_clean_then_place_in_recep needs 3 receptacles at least"),
        (["--max-objects", 1], "look_at_obj_in_light needs 2 objects at least; --max-objects is 1"),
        (["--time-limit", 0], "needs a positive time limit"),
        (["--train", 0], "positive number of games"),
    ],
)
def test_wrong_requests_end_with_a_sentence(arguments, words, tmp_path):
    result = command(tmp_path / "out", "--train", 1, *arguments)
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output
    assert len(result.output.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_a_folder_with_files_is_refused(folder):
    before = tree(folder)
    result = command(folder, "--train", 1)
    assert result.exit_code == 2 and "is not an empty folder" in result.output
    assert tree(folder) == before
