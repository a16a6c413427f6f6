"""The wheel, installed away from the checkout: environments, panels, recipes and configuration come along."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
REPOSITORY = Path(__file__).parents[2]

OWN = '''
"""Mine."""
from verl_multiturn.env import Env
__all__ = ["Mine"]
class Mine(Env):
    """Say yes."""
    instruction = "Say yes. Actions: yes, no."
    def _reset(self, seed):
        return f"{seed}?", {}
    def _step(self, action):
        return "ok", float(action == "yes"), True, {"success": action == "yes"}
    def admissible(self):
        return ["yes", "no"]
'''

CHECK = """
import verl_multiturn as vm
assert "site-packages" in vm.__file__, vm.__file__
print(sorted(vm.list_envs()), sorted(vm.list_recipes()))
assert vm.make("mine").reset(3)[0] == "3?"
assert len(vm.load_panel("frozen_lake-test").tasks) == 512
assert vm.check_env("frozen_lake", episodes=2).ok
"""


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, REPOSITORY, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").glob("python3*/site-packages"))
    run(*pip, "--python", python, "install", "--no-deps", wheel, cwd=tmp_path)
    # The dependencies of this environment serve, after the wheel's own packages.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / "mine.py").write_text(OWN)
    said = run(python, "-c", CHECK, cwd=tmp_path)
    assert "'frozen_lake'" in said and "'mine'" in said and "'gigpo_frozenlake'" in said
    said = run(
        python,
        *("-m", "verl_multiturn.main", "--config-name", "gigpo_frozenlake", "hardware=cpu", "--dry-run"),
        cwd=tmp_path,
    )
    assert said.startswith("ok: gigpo on frozen_lake")
