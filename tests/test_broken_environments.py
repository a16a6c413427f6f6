"""What is said of an environment with a bug: by `check_env` before a run, by the pool during it."""

import asyncio
import random
import time
from pathlib import Path

import pytest

from verl_multiturn.check import check_env
from verl_multiturn.env import make
from verl_multiturn.rollout.pool import EnvironmentFailure, EnvPool, reset, step

FILE = str(Path(__file__).parents[1] / "examples" / "broken_environments.py")

# name -> what check_env says first, and what the pool says of reset and an action; None: it cannot know.
SAID = {
    "Raises": (
        "unknown action: action '' raised ValueError: invalid literal for int() with base 10: ''",
        "act raised ValueError: invalid literal for int() with base 10: 'open sesame'",
    ),
    "Hangs": (
        "types: step('2') took longer than 0.5 s; nothing after it was tried",
        "act took longer than 0.5 s",
    ),
    "WrongType": (
        "types: step's reward is str, not float.",
        "act raised TypeError: step returned reward of type str",
    ),
    "GlobalChance": (
        "global random: it uses or seeds the global `random`: use self.rng and self.noise.",
        None,
    ),
    "UnhashableKey": (
        "state keys: state_key() returned list: unhashable type: 'list'.",
        "reset raised TypeError: state_key() has type list, which has no hash",
    ),
    "LeakingSuccess": (
        "success flags: success of seed 0 at step 0 was False at first and is True after other episodes: it "
        "outlives its episode; keep it in self and clear it in _reset.",
        None,
    ),
}


def checked(name, **given):
    """On a fresh copy of the file's classes: one of them never forgets that it was played."""
    make(f"{FILE}:{name}").__class__.won = False
    return check_env(f"{FILE}:{name}", **given)


@pytest.mark.parametrize("name", SAID)
def test_what_check_env_says(name):
    report = checked(name, timeout=0.5)
    assert SAID[name][0] in report.failures and not report.ok, str(report)


def test_one_bug_one_failure():
    """Nothing else is wrong with them, but for what follows from the bug."""
    assert check_env(f"{FILE}:Doors").failures == []
    follows = {"LeakingSuccess": {"unknown action"}}
    for name in SAID:
        laws = {failure.partition(":")[0] for failure in checked(name, timeout=0.5).failures}
        assert laws - follows.get(name, set()) == {SAID[name][0].partition(":")[0]}, name


@pytest.mark.parametrize("name", SAID)
def test_what_the_pool_says(name):
    async def go():
        pool = EnvPool(2, 0.5)
        env = await pool.acquire(f"{FILE}:{name}", {})
        try:
            await pool.call(env, "reset", reset, 5, 1)
            await pool.call(env, "act", step, "open sesame")
        except EnvironmentFailure as error:
            return str(error)
        finally:
            await pool.abandon(env)
            pool.close()
        return None

    state = random.getstate()
    assert asyncio.run(go()) == SAID[name][1]
    random.setstate(state)


def test_check_env_comes_back_from_a_hang_anywhere(tmp_path, monkeypatch):
    """In the import, the constructor, a key, a close: one sentence each, in time."""
    monkeypatch.syspath_prepend(str(Path(FILE).parent))
    for where, said in (
        ("import", "make: importing it took longer than 0.3 s; nothing after it was tried"),
        ("__init__", "make: building it took longer than 0.3 s; nothing after it was tried"),
        ("_reset", "types: reset(0) took longer than 0.3 s; nothing after it was tried"),
        ("state_key", "same seed: what follows step('1') took longer than 0.3 s; nothing after it was tried"),
        ("close", "close: close() took longer than 0.3 s; nothing after it was tried"),
    ):
        file = tmp_path / f"hangs_in_{where.strip('_')}.py"
        file.write_text(
            "import time\nfrom broken_environments import Doors\n"
            "__all__ = ['Slow']\n"
            f"if {where!r} == 'import': time.sleep(60)\n"
            "class Slow(Doors):\n"
            "    max_turns, snapshots = 1, 'none'\n"
            "    def random_action(self, rng): return '1'\n"
            + ("" if where == "import" else f"    def {where}(self, *given): time.sleep(60)\n")
        )
        started = time.monotonic()
        report = check_env(str(file), episodes=1, timeout=0.3)
        assert time.monotonic() - started < 5
        assert said in report.failures and report.checks[-1].ok is False, str(report)


def test_check_env_survives_sys_exit():
    class Exits(make(f"{FILE}:Doors").__class__):
        def _step(self, action):
            raise SystemExit(3)

    assert check_env(Exits).failures == ["types: raised SystemExit: 3"]
