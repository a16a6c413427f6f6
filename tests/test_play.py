import io
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from verl_multiturn.cli import app
from verl_multiturn.env import Env, make
from verl_multiturn.panel import Panel, load_panel
from verl_multiturn.play import Human, Quit, Screen, play_tasks, player, policy_of, summary, tasks
from verl_multiturn.play_settings import settings
from verl_multiturn.policies import evaluate, expert_policy
from verl_multiturn.runs import RunWriter
from verl_multiturn.stats import wilson

EXAMPLES = Path(__file__).parents[1] / "examples"


def call(*arguments, code=0, typed=None):
    result = CliRunner().invoke(app, ["play", *map(str, arguments)], input=typed)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def screen(turns=True):
    return Screen(Console(file=io.StringIO(), width=200), turns)


def shown(one):
    return one.console.file.getvalue()


def lines(*typed):
    """Stands in for a keyboard: these lines, then the end of the input."""
    left = iter(typed)

    def read(prompt):
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return read


class Free(Env):
    """Lists no actions and has no expert; takes anything."""

    instruction = "say [bold]anything[/bold]"

    def _reset(self, seed):
        return f"seed {seed}", {}

    def _step(self, action):
        return f"you said {action}", 1.0, action == "end", {"success": action == "end"}


def test_a_person_plays_by_number_by_name_and_by_the_expert():
    said = call("frozen_lake", "--seed", 3, typed="3\n9\nDOWN\n\n\n\n\n\n")
    assert "Walk on the frozen lake" in said and "task 3 (" in said
    assert "legal: 1 up   2 down   3 left   4 right" in said
    assert "step 1: left" in said and "there are 4 actions" in said and "step 2: DOWN\n" in said
    assert "solved after" in said and "human" in said and "20.7 to 100.0" in said


@pytest.mark.parametrize("typed", ["1\nq\n", "1\nquit\n", "1\n"])  # the last: the input ends
def test_a_person_leaves(typed):
    said = call("frozen_lake", "--seed", 3, typed=typed)
    assert "step 1: up" in said and "the episode in progress does not count" in said
    assert "no episode was finished" in said


def test_finished_episodes_count_after_leaving():
    said = call("bandit", "--episodes", 3, typed="1\n2\nq\n")
    assert "does not count" in said and said.rstrip().splitlines()[-1].split()[-1] == "2"


def test_actions_that_are_numbers_are_not_numbered():
    one = screen()
    env = make(f"{EXAMPLES / 'new_environment.py'}:GuessNumber", high=4)
    env.reset(0)
    assert Human(one, lines("3"))(env, "") == "3"
    assert "legal: 1, 2, 3, 4\n" in shown(one)


def test_an_environment_without_lists_and_expert():
    one = screen()
    play = player(Free(), policy_of("human", one, read=lines("", "7", "[red]", "end")), one)
    (episode,) = play_tasks(play, tasks("a"), one)
    assert (episode.turns, episode.episode_return, episode.success) == (3, 3, True)
    text = shown(one)
    assert "say [bold]anything[/bold]" in text and "you said [red]" in text  # no markup is read
    assert "type an action or its number" in text and "legal" not in text
    with pytest.raises(Quit):
        Human(one, lines())(Free(), "")


KITCHEN = """
from verl_multiturn.env import Env
from verl_multiturn.errors import unknown

PLACES = [f"{kind} {n}" for kind in ("cabinet", "countertop", "drawer", "shelf") for n in range(1, 10)]

class Kitchen(Env):
    instruction = "Find the mug."
    max_turns = 6

    def tasks(self, split):
        return [f"{split}/pick mug-{n}" for n in range(3)]

    def _reset(self, seed):
        if not isinstance(seed, str):
            seed = self.tasks("train")[seed % 3]
        if seed.rpartition("/")[0] not in ("train", "valid"):
            raise ValueError(f"no game {seed!r}")
        return f"game {seed}", {"task_type": "pick"}

    def _step(self, action):
        known = action in self.admissible()
        done = action == "go to shelf 9"
        return f"you {action}", 0.0, done, {"valid": known, "success": done}

    def admissible(self):
        return [f"go to {place}" for place in PLACES] + ["inventory", "look"]
"""


@pytest.fixture
def kitchen(tmp_path):
    (tmp_path / "kitchen.py").write_text(KITCHEN)
    return tmp_path / "kitchen.py"


def test_a_task_by_its_name_and_many_actions_by_number_or_beginning(kitchen):
    said = call(
        kitchen, "--seed", "valid/pick mug-1", typed="38\nGO TO  SHELF\ninv\n=look around\ngo to shelf 9\n"
    )
    assert "task valid/pick mug-1 (pick)" in said and "game valid/pick mug-1" in said
    lines = said.partition("legal:\n")[2].splitlines()
    assert "legal: 1" not in said and max(map(len, lines[:20])) <= 80  # columns, as wide as the screen
    assert lines[0].split() == [*"1 go to cabinet 1".split(), *"14 go to countertop 5".split(),
                                *"27 go to drawer 9".split()]  # fmt: skip
    assert "step 1: look\n" in said  # by number
    assert "9 actions begin so; =GO TO  SHELF sends it as it is: go to shelf 1, go to shelf 2" in said
    assert "step 2: inventory\n" in said  # the only one that begins so
    assert "step 3: look around (not an action here)" in said  # as it stands
    assert "step 4: go to shelf 9\n" in said and "solved after 4 turns" in said


def test_a_task_that_there_is_not(kitchen):
    said = call(kitchen, "--seed", "valid_seen/pick mug-1", "--policy", "random", code=2)
    assert said.strip() == "no game 'valid_seen/pick mug-1'"


def test_a_panel_of_named_tasks(kitchen, tmp_path):
    panel = Panel.build(f"{kitchen}:Kitchen", {}, "valid", "valid")
    panel.save(tmp_path / "valid.json")
    said = call("--panel", tmp_path / "valid.json", "--policy", "random")
    assert [line for line in said.splitlines() if line.startswith("task ")] == [
        f"task valid/pick mug-{n} (pick), up to 6 turns" for n in range(3)
    ]


def test_every_action_is_shown_once():
    one = screen()
    legal = [f"action number {n}" for n in range(1, 42)]
    one.choices(legal, numbered=True)
    text = shown(one)
    assert [
        text.count(f"{n} action number {n} ") + text.count(f"{n} action number {n}\n") for n in (1, 9, 41)
    ] == [1] * 3
    assert len(text.splitlines()) == 6 and max(map(len, text.splitlines())) <= 200


def test_random_and_expert_are_those_of_a_panel():
    panel = load_panel("frozen_lake-val")
    one = screen(turns=False)
    episodes = play_tasks(player(panel.make(), expert_policy, one), tasks(panel=panel, episodes=9), one)
    assert episodes == evaluate(panel, expert_policy)[:9]
    row = summary("expert", episodes).loc["expert"]
    assert (row.success_low, row.n) == (wilson(9, 9).low, 9)
    assert shown(one).count("solved after") == 9 and "step 1" not in shown(one)
    said = call("frozen_lake", "--policy", "random", "--panel", "frozen_lake-val", "--no-turns")
    assert "random" in said and said.rstrip().splitlines()[-1].split()[-1] == str(len(panel.tasks))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frozen_lak"], "Did you mean 'frozen_lake'?"),
        (["frozen_lake", "sizes=3"], "Did you mean 'size'?"),
        (["frozen_lake", "size"], "'size' is not key=value"),
        (["frozen_lake", "--policy", "experts"], "Did you mean 'expert'?"),
        ([], "no environment: name one"),
        (["sokoban", "--panel", "frozen_lake-val"], "leave the environment and its keywords out"),
        (["frozen_lake", "size=5", "--panel", "frozen_lake-val"], "not of frozen_lake with {'size': 5}"),
        (["frozen_lake", "--seed", "a", "--episodes", "2"], "cannot start at 'a'"),
        (["frozen_lake", "--policy", "model"], "no model: give a Hugging Face folder"),
        (["frozen_lake", "--model", "/nowhere"], "no model folder /nowhere"),
        (["--run", "/nowhere"], "/nowhere is not a recorded run"),
        (["--run", "/nowhere", "--recipe", "x"], "either a recipe or a run"),
        (["frozen_lake", "--set", "multiturn.gama=3"], "unknown config key in multiturn: 'gama'"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message):
    said = call(*arguments, code=2)
    assert message in said and len(said.splitlines()) == 1


def run_of(folder, **settings):
    config = {"multiturn": {"env": "frozen_lake", "env_kwargs": {"size": 3}, "max_turns": None} | settings}
    with RunWriter(folder, config) as writer:
        writer.metrics(1, {})
    return folder


def test_the_environment_of_a_run(tmp_path):
    said = call("--run", run_of(tmp_path), "--policy", "expert")
    grid = said.partition("turns\n")[2].splitlines()[:3]
    assert [len(line.split()) for line in grid] == [3, 3, 3]  # size=3, as the run had it
    config = settings(env_kwargs={"slip": 0.5}, run=tmp_path)
    assert config.multiturn.env_kwargs == {"size": 3, "slip": 0.5}
    config = settings(env="bandit", run=tmp_path, overrides=["multiturn.max_turns=4"])
    assert config.multiturn.env_kwargs == {} and config.multiturn.max_turns == 4


def test_the_policies_draw_from_their_own_chance():
    state = random.getstate()
    call("frozen_lake", "--policy", "random")
    assert random.getstate() == state


def test_the_example():
    command = [sys.executable, EXAMPLES / "play.py", "bandit", "--policy", "expert"]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    assert "expert" in subprocess.check_output(command, env=environment, text=True)
