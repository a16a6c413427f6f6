"""`make`, its errors, and the base classes' promises."""

import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_multiturn.base_env import Env, ReplayEnv
from verl_multiturn.env import derive_seed, list_envs, make

ENVIRON = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
ONE = '''"""One line."""
from verl_multiturn.env import Env
__all__ = ["Coin"]
class Coin(Env):
    """A coin."""
    instruction, max_turns = "Call it.", 3
    def __init__(self, bias=0.5): self.bias = bias
    def _reset(self, seed): return "coin", {}
    def _step(self, action):
        known = action in self.admissible()
        return "landed", float(self.noise.random() < self.bias), False, {"valid": known}
    def admissible(self): return ["heads", "tails"]
'''


@pytest.fixture
def coin(tmp_path):
    path = tmp_path / "coin.py"
    path.write_text(ONE)
    return path


def sentence(name, **kwargs):
    with pytest.raises(ValueError) as caught:
        make(name, **kwargs)
    text = str(caught.value)
    assert "\n" not in text and text.endswith((".", "?"))
    return text


def test_every_way_to_name_an_environment(coin):
    assert type(make("frozen_lake", size=5)).__name__ == "FrozenLake"
    assert type(make("environments.frozen_lake")).__name__ == "FrozenLake"
    assert make("environments.frozen_lake:FrozenLake", size=5).size == 5
    assert type(make(str(coin))) is type(make(f"{coin}:Coin", bias=1.0))


def test_unknown_names_list_the_valid_ones_and_the_nearest():
    text = sentence("frozen_lak")
    assert (
        all(name in text for name in ("bandit", "chain_sum", "frozen_lake", "sokoban"))
        and "Did you mean 'frozen_lake'" in text
    )
    assert "Did you mean 'size'" in sentence("frozen_lake", siz=5)
    assert "FrozenLake" in sentence("environments.frozen_lake:FrozenLak")
    assert "no module 'no_such_package.thing'" in sentence("no_such_package.thing:Class")


def test_files_without_exactly_one_class(tmp_path, coin):
    assert "no environment file" in sentence(str(tmp_path / "none.py"))
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert "write `class MyEnv(Env)`" in sentence(str(tmp_path / "empty.py"))
    two = ONE.replace('__all__ = ["Coin"]\n', "") + "class Dime(Coin): pass\n"
    (tmp_path / "two.py").write_text(two)
    assert "2 environment classes (Coin, Dime)" in sentence(str(tmp_path / "two.py"))
    assert type(make(f"{tmp_path}/two.py:Dime")).__name__ == "Dime"
    assert "is not an environment" in sentence(f"{tmp_path}/empty.py:x")


def test_a_missing_dependency_speaks_for_itself(tmp_path):
    path = tmp_path / "needs.py"
    path.write_text("import no_such_dependency\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        make(str(path))
    path.write_text('raise ImportError("pip install verl-multiturn[thing]")\n')
    with pytest.raises(ImportError, match=r"pip install verl-multiturn\[thing\]"):
        make(str(path))


def test_an_instance_from_a_file_pickles(coin):
    env = make(str(coin))
    env.reset(1)
    copy = pickle.loads(pickle.dumps(env))
    assert [copy.step("heads") for _ in range(3)] == [env.step("heads") for _ in range(3)]


def run_in(folder, code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=ENVIRON, capture_output=True, text=True, check=False)


def test_a_user_folder_merges_with_ours(tmp_path):
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / "coin.py").write_text(ONE)
    code = """if True:
        import sys
        sys.path.remove("")  # as under a console script
        from verl_multiturn.env import list_envs, make
        print(list_envs()["coin"], type(make("coin")).__name__, type(make("bandit")).__name__)"""
    done = run_in(tmp_path, code)
    assert done.stdout.split() == ["One", "line.", "Coin", "Bandit"], done.stderr


def test_a_regular_package_that_shadows_is_named(tmp_path):
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / "__init__.py").write_text("")
    done = run_in(tmp_path, "from verl_multiturn.env import make; make('bandit')")
    assert "ValueError" in done.stderr
    assert str(tmp_path / "environments" / "__init__.py") in done.stderr


def test_listing_imports_nothing():
    code = "import sys, verl_multiturn.env as e; e.list_envs(); print('environments.bandit' in sys.modules)"
    assert run_in(".", code).stdout.strip() == "False"
    assert all(list_envs().values())


class Duck:
    """Has reset and step, and inherits nothing."""

    instruction, max_turns = "Quack.", 4

    def reset(self, seed):
        self.count = 0
        return "pond", {}

    def step(self, action):
        self.count += 1
        return f"quack {self.count}", 1.0, False, self.count == 2, {}


def test_a_class_with_reset_and_step_will_do(tmp_path):
    env = make(f"{__file__}:Duck")
    env.reset(0)
    child = env.fork()
    assert child.step("a")[0] == "quack 1" == env.step("a")[0]
    assert env.step("b")[2:4] == (False, True)
    with pytest.raises(RuntimeError, match="has ended"):
        env.step("c")
    assert env.instruction == "Quack." and env.max_turns == 4


def test_steps_outside_an_episode_raise():
    env = make("bandit")
    with pytest.raises(RuntimeError, match="has not begun"):
        env.step("x")
    env.reset(0)
    env.step(env.expert())
    with pytest.raises(RuntimeError, match="has ended"):
        env.step("x")


def test_wrong_shapes_are_named():
    class Short(Env):
        def _reset(self, seed):
            return "start", {}

        def _step(self, action):
            return "text", 0.0, False, False, {}

    env = Short()
    env.reset(0)
    with pytest.raises(TypeError, match=r"Short._step must return \(observation, reward, terminated, info\)"):
        env.step("a")
    Short._reset = lambda self, seed: ("start", None)
    with pytest.raises(TypeError, match=r"Short._reset must return \(observation, info\) with info a dict"):
        env.reset(0)


def test_a_file_that_does_not_parse_hides_no_other(tmp_path):
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / "broken.py").write_text("class :")
    done = run_in(tmp_path, "from verl_multiturn.env import list_envs; print(list_envs())")
    assert "'broken': 'cannot be read: invalid syntax" in done.stdout and "'bandit'" in done.stdout


def test_restore_with_a_seed_renews_only_the_noise():
    env = make("frozen_lake", slip=1.0, max_turns=30, min_distance=4)
    env.reset(5, dynamics_seed=1)
    saved, start = env.snapshot(), env.state_key()
    after = set()
    for seed in range(20):
        env.restore(saved, seed)
        assert env.state_key() == start
        after.add(env.step("up")[0])
    assert len(after) == 2  # left or right of "up"


class Dice(ReplayEnv):
    """Rolls; the drift is a fault that replay must notice."""

    instruction, max_turns, drift = "Roll.", 5, 0

    def _reset(self, seed):
        return "ready", {}

    def _step(self, action):
        roll = self.noise.randint(1, 6) if self.turn < 3 else self.noise.randint(1, 6) + self.drift
        return f"{action} {roll}", float(roll), False, {}


def test_replay_goes_back_and_names_the_first_step_that_differs():
    env = Dice()
    env.reset(1)
    env.step("a")
    saved = env.snapshot()
    truth = [env.step(a) for a in "bcd"]
    env.restore(saved)
    assert [env.step(a) for a in "bcd"] == truth
    env.restore(saved, seed=9)
    child, copy = env.fork(), pickle.loads(pickle.dumps(env))
    assert child.step("b") == copy.step("b") == env.step("b")
    env.reset(1)
    for a in "abc":
        env.step(a)
    saved, env.drift = env.snapshot(), 10
    with pytest.raises(RuntimeError, match=r"step 2 \('c'\)"):
        env.restore(saved)
    with pytest.raises(TypeError):
        Dice(size=3)


@given(st.lists(st.one_of(st.integers(), st.text()), max_size=4))
def test_derived_seeds_fit_63_bits_and_parts_do_not_run_together(parts):
    assert 0 <= derive_seed(*parts) < 2**63
    assert derive_seed(*parts, "a", "b") != derive_seed(*parts, "ab")
    assert derive_seed(1, 2) == 5396716174300205261


def test_a_policy_seeded_like_the_task_does_not_know_it():
    env = make("bandit")
    won = 0
    for seed in range(400):
        env.reset(seed)
        won += env.step(env.random_action(random.Random(seed)))[4]["success"]
    assert 140 < won < 260


def test_an_env_without_its_two_methods_says_so():
    class Half(Env):
        pass

    with pytest.raises(NotImplementedError, match="Half must define _reset"):
        Half().reset(0)
