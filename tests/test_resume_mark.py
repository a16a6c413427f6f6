"""verl's mark of the last checkpoint where it leads nowhere: refused before anything is begun or moved."""

import shutil

import pytest

from verl_multiturn import configure, doctor_run, tasks
from verl_multiturn.checkpoints import LATEST, check_mark
from verl_multiturn.compose import compose
from verl_multiturn.runs import Run, RunWriter


def checkpoint(folder, step, parts=("actor",), whole=True):
    for part in parts:
        (folder / f"global_step_{step}" / part).mkdir(parents=True)
    if whole:
        (folder / f"global_step_{step}" / "data.pt").touch()


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 8 and 10, of 12 a half, of 2 what the rotation leaves; the best is of step 4."""
    checkpoint(tmp_path, 8)
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 12, whole=False)
    checkpoint(tmp_path, 2)
    shutil.rmtree(tmp_path / "global_step_2" / "actor")
    checkpoint(tmp_path / "best", 4)
    return tmp_path


def test_a_good_mark_and_none_pass(folder):
    check_mark(folder)
    (folder / LATEST).write_text("10\n")
    check_mark(folder)


@pytest.mark.parametrize("data", [b"", b" \n", b"1o", b"-3", b"10.0", b"\xff\xfe", "²".encode(), b"\0\0"])
def test_a_mark_that_is_no_number_is_refused(folder, data):
    (folder / LATEST).write_bytes(data)
    with pytest.raises(ValueError) as caught:
        check_mark(folder)
    said = str(caught.value)
    assert "in it, not the step of a checkpoint; whole checkpoints there: best/global_step_4, " in said
    assert "global_step_8, global_step_10; go on with trainer.resume_mode=resume_path " in said
    assert f"trainer.resume_from_path={folder}/global_step_10, or remove {folder / LATEST}" in said
    assert "\n" not in said and "global_step_12" not in said and "global_step_2," not in said


def test_a_checkpoint_that_is_gone_is_refused(folder):
    (folder / LATEST).write_text("14")
    with pytest.raises(
        ValueError, match=r"names step 14, but there is no .*global_step_14; whole checkpoints"
    ):
        check_mark(folder)
    for path in (*folder.glob("global_step_*"), folder / "best"):
        shutil.rmtree(path)
    with pytest.raises(ValueError, match=f"whole checkpoints there: none; remove {folder / LATEST} to begin"):
        check_mark(folder)


@pytest.mark.parametrize("mark", ["", "14"])
def test_a_start_moves_nothing_aside(tmp_path, mark):
    """And the way out that the sentence names is taken."""
    with RunWriter(tmp_path, {"x": 1}) as writer:
        writer.metrics(1, {"loss": 1.0})
    checkpoint(tmp_path / "checkpoints", 1)
    (tmp_path / "checkpoints" / LATEST).write_text(mark)
    config = configure.prepare(compose("gigpo_frozenlake", ["hardware=cpu", f"multiturn.run={tmp_path}"]))
    with pytest.raises(ValueError, match="whole checkpoints there: global_step_1; go on with"):
        tasks.prepare_folder(config)
    (said,) = [line for line in doctor_run.lines(tmp_path) if line.name == "records"]
    assert said.status == "FAIL" and "whole checkpoints there: global_step_1; go on with" in said.text
    assert Run(tmp_path).metrics.index.tolist() == [1] and not (tmp_path / "discarded").exists()
    config.trainer.resume_mode = "resume_path"
    config.trainer.resume_from_path = str(tmp_path / "checkpoints" / "global_step_1")
    tasks.prepare_folder(config)
