"""`verl-multiturn envs` and `panels`: everything found, in any state, with what there is to know."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_multiturn.cli import app
from verl_multiturn.env import list_envs
from verl_multiturn.envs_index import describe, index
from verl_multiturn.panel import Panel, load_panel
from verl_multiturn.panel_index import of_env, overlaps, shipped

ROOT = Path(__file__).parents[1]
MINE = '''"""Mine: {what}."""
from verl_multiturn.env import Env
from verl_multiturn.needs import Needs
{more}

class Mine(Env):
    instruction = "Go."
    {body}

    def _reset(self, seed):
        return f"room {{seed}}", {{}}

    def _step(self, action):
        return "end", 1.0, True, {{"success": True}}
'''
LISTED = """
    def tasks(self, split):
        lists = {"train": ["a", "b", "c"], "valid_seen": ["d", "b"], "odd": ["e"]}
        if split not in lists:
            raise ValueError(f"no list {split}")
        return lists[split]
"""


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """`mine(name, body=, what=, more=)` writes ./environments/<name>.py; returns its name."""
    (tmp_path / "environments").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(ROOT)] + [str(ROOT)])
    before = set(sys.modules)

    def write(name, body="", what="a room", more="", text=None):
        path = tmp_path / "environments" / f"{name}.py"
        path.write_text(MINE.format(body=body, what=what, more=more) if text is None else text)
        return name

    yield write
    for name in {name for name in sys.modules if name.startswith("environments.")} - before:
        del sys.modules[name]


def entries():
    return {entry.name: entry for entry in index()}


def test_every_environment_is_there_and_says_what_it_is():
    found = entries()
    assert {name.partition(":")[0] for name in found} == set(list_envs())
    lake = found["frozen_lake"]
    assert lake.ours and lake.ready and lake.what == list_envs()["frozen_lake"]
    assert (lake.snapshots, lake.runs_in, lake.licence) == ("copy", "thread", "Apache-2.0")
    said = " ".join(call("envs").split())  # without the line breaks of the screen
    for entry in found.values():
        assert entry.problem is None and entry.what
        assert all(line in said for line in map(lambda text: " ".join(text.split()), describe(entry)))


def test_what_is_missing_and_how_to_get_it(mine, tmp_path):
    needs = 'needs = Needs(packages=("no_such_package",), programs=("no-such-program",), licence="GPL-3.0")'
    mine("needy", needs)
    mine("tool", 'needs = Needs(programs=("no-such-program",))')
    found = entries()
    needy = found["needy"]
    assert not needy.ready and not needy.ours
    assert needy.missing == ("no_such_package", "no-such-program")
    assert needy.install == "pip install no-such-package" and needy.licence == "GPL-3.0"
    assert found["tool"].install is None
    said = call("envs")
    assert "not installed: no_such_package, no-such-program; pip install" in said and "GPL-3.0" in said


def test_data_of_the_user(mine, tmp_path):
    body = """needs = Needs(data="files.json of example.org in $MINE_DATA")

    @classmethod
    def find_data(cls):
        import os
        return os.environ.get("MINE_DATA")
"""
    mine("with_data", body)
    (entry,) = [one for one in index() if one.name == "with_data"]
    assert entry.data_found is None
    assert describe(entry)[-1] == "data: not found; files.json of example.org in $MINE_DATA"
    os.environ["MINE_DATA"] = "/somewhere"
    try:
        (entry,) = [one for one in index() if one.name == "with_data"]
    finally:
        del os.environ["MINE_DATA"]
    assert entry.data_found == "/somewhere" and describe(entry)[-1] == "data: found in /somewhere"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("class Broken(:\n", "SyntaxError"),
        ("__all__ = []\nimport no_such_module_at_all\n", "ModuleNotFoundError: No module named"),
        ("__all__ = []\nimport sys\nsys.exit('good bye')\n", "SystemExit: good bye"),
        ("__all__ = []\n", "has no environment class"),
        (MINE.format(what="x", more="", body="needs = 3"), "Mine.needs is of type int"),
        (MINE.format(what="x", more="", body="find_data = None; needs = Needs(data='x')"), "TypeError"),
    ],
)
def test_a_broken_file_hides_nothing(mine, text, problem):
    mine("sound")
    mine("broken", text=text)
    found = entries()
    assert found["sound"].ready and {"frozen_lake", "sokoban"} <= set(found)
    broken = found["broken"]
    assert not broken.ready and problem in broken.problem and "\n" not in broken.problem
    assert "cannot be used: " in call("envs")


def test_several_classes_in_a_file(mine):
    more = "class Other(Env):\n    pass\n"
    mine("pair", more=more)
    found = entries()
    assert {"pair:Mine", "pair:Other"} <= set(found) and "pair" not in found
    assert found["pair:Mine"].licence is None  # a user's own that says nothing is not ours to license


def test_measured_speeds(mine, tmp_path):
    mine("fast")
    rows = [
        {"name": "fast", "variant": variant, "steps_per_second": speed, "machine": "two CPUs"}
        for variant, speed in (("", 1234.5), ("large", 99.0))
    ]
    rows.append({"name": "fast", "variant": "broken", "problem": "hangs", "machine": "two CPUs"})
    (tmp_path / "environments" / "speeds.json").write_text(json.dumps({"rows": rows}))
    (entry,) = [one for one in index() if one.name == "fast"]
    assert [row["variant"] for row in entry.speed] == ["", "large"]
    said = " ".join(call("envs").split())  # without the line breaks of the screen
    assert "1,234 (default), 99 (large) steps/s" in said
    assert "measured on two CPUs" in said
    (tmp_path / "environments" / "speeds.json").write_text("[]")
    assert "speeds.json does not hold measured speeds" in call("envs", code=2)


def test_for_machines():
    found = {row["name"]: row for row in json.loads(call("envs", "--json"))}
    assert set(found) == set(entries())
    lake = found["frozen_lake"]
    assert {"what", "ready", "missing", "install", "data", "data_found", "snapshots", "runs_in", "licence",
            "speed", "problem", "ours"} <= set(lake)  # fmt: skip
    assert lake["ready"] is True and lake["missing"] == []


def test_it_answers_at_once():
    """No package of an environment is imported, nor what is heavy of ours."""
    heavy = "{'textworld', 'alfworld', 'gymnasium', 'torch', 'verl', 'pandas', 'bm25s'}"
    code = "import sys; from verl_multiturn.envs_index import index; index();"
    code += f"print(sorted({heavy} & set(sys.modules)))"
    start = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True, cwd=ROOT)
    assert printed.strip() == "[]" and time.perf_counter() - start < 20


# ------------------------------------------------------------------------------------- panels


def test_shipped_panels():
    listed = {one.panel.name: one for one in shipped()}
    assert "frozen_lake-test" in listed and listed["frozen_lake-test"].types["middle"] > 0
    pairs = overlaps(listed.values())
    assert ("frozen_lake-test", "frozen_lake-val", 0) in pairs
    assert all(n == 0 for _, _, n in pairs)
    assert not [pair for pair in pairs if pair[0].split("-")[0] != pair[1].split("-")[0]]
    said = call("panels")
    test = load_panel("frozen_lake-test")
    assert f"fingerprint {test.fingerprint}" in said and "512 tasks, shipped, the first is 0" in said
    assert "frozen_lake-test and frozen_lake-val: 0 tasks in common, by content" in said


def test_panels_of_a_keyword_that_is_a_list():
    said = call("panels", "arithmetic", "steps=[1, 2]", "--size", 8)
    assert "steps-1" in said and "0 tasks in common, by content" in said


def test_panels_of_an_environment_whose_tasks_are_seeds():
    listed = of_env("frozen_lake", {}, size=8)
    assert [(one.panel.split, one.source) for one in listed] == [
        ("test", "shipped"), ("val", "shipped"), ("train", "from seed 1000000"),
    ]  # fmt: skip
    assert len(listed[2].panel.tasks) == 8
    other = of_env("frozen_lake", {"size": 5}, size=8, first_seed=77)
    assert [one.source for one in other] == ["from seed 0", "from seed 500000", "from seed 77"]
    assert [one.panel.tasks[0].id for one in other] == [0, 500_000, 77]
    said = call("panels", "frozen_lake", "size=5", "--size", 8)
    assert said.count("in common, by content") == 3 and "8 tasks, from seed 1000000" in said


def test_panels_of_an_environment_that_lists_its_tasks(mine):
    mine("listed", LISTED)
    listed = of_env("listed", {})
    assert [(one.panel.split, len(one.panel.tasks)) for one in listed] == [("train", 3), ("valid_seen", 2)]
    assert overlaps(listed) == [("listed-train", "listed-valid_seen", 1)]
    said = call("panels", "listed", code=1)  # not disjoint: said, and told to a script
    assert "listed-train and listed-valid_seen: 1 task in common, by content" in said
    said = call("panels", "listed", "--split", "train", "--split", "odd", "--size", 2)
    assert "2 tasks, listed by the environment, the first is a" in said and "0 tasks in common" in said
    panel = Panel.build("listed", {}, "valid_seen", "valid_seen")
    assert panel.fingerprint in call("panels", "listed", "--split", "valid_seen")


def test_a_users_own_panels_are_shown_beside(mine, tmp_path):
    mine("listed", LISTED)
    (tmp_path / "environments" / "panels").mkdir()
    Panel.build("listed", {}, "train", "kept", n=2).save(tmp_path / "environments/panels/listed-kept.json")
    said = call("panels", "listed", "--split", "train")
    assert "listed-kept" in said and "2 tasks, shipped" in said
    assert "in common" not in said  # a panel made of a list shares its tasks: they are not compared


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["frozen_lak"], "Did you mean 'frozen_lake'?"),
        (["frozen_lake", "sizes=4"], "Did you mean 'size'?"),
        (["frozen_lake", "--split", "train"], "FrozenLake lists no tasks of split 'train'"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence):
    said = call("panels", *arguments, code=2)
    assert sentence in said and len(said.splitlines()) == 1
