"""Room for checkpoints, on a disk that is really full, and the best one, which rotation does not touch."""

import json
import shutil
import subprocess

import pytest
from omegaconf import OmegaConf

from verl_multiturn import checkpoints
from verl_multiturn.checkpoints import check_room, find, keep_best, keep_good, last_good, weights
from verl_multiturn.errors import RunStopped
from verl_multiturn.trainer_guard import GuardedRun


def checkpoint(folder, step, size=1000):
    shards = folder / f"global_step_{step}" / "actor"
    shards.mkdir(parents=True)
    (shards / "model_world_size_1_rank_0.pt").write_bytes(bytes([step]) * size)
    (shards.parent / "data.pt").touch()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB; where it cannot be mounted, the free space alone is another's word."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_is_refused_before_a_checkpoint_is_begun(small_disk):
    checkpoint(small_disk, 1, size=1_500_000)
    check_room(small_disk, "model")
    (small_disk / "other").write_bytes(bytes(1_200_000))
    with pytest.raises(RunStopped, match=r"no room for a checkpoint in .*: 0\.00 GB are free, it"):
        check_room(small_disk, "model")


def test_the_first_checkpoint_is_judged_by_the_model(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    free = type("Usage", (), {"free": 6599})
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda place: free)
    with pytest.raises(RunStopped, match="rerun the same command to resume"):
        check_room(tmp_path / "none yet", str(tmp_path))
    free.free = 6601
    check_room(tmp_path / "none yet", str(tmp_path))
    check_room(tmp_path / "none yet", "name/of-a-hub")


def test_half_a_checkpoint_does_not_say_how_large_one_is(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "global_step_1" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_1" / "actor" / "model_world_size_1_rank_0.pt").write_bytes(bytes(10))
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda place: type("Usage", (), {"free": 6599}))
    with pytest.raises(RunStopped, match="no room for a checkpoint"):
        check_room(tmp_path, str(tmp_path))


def test_a_model_of_the_hub_is_found_in_its_cache(tmp_path, monkeypatch):
    """As the hub's own library lays it down; nothing is downloaded. A critic doubles the first checkpoint."""
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(file_download.constants, "HF_HUB_CACHE", str(tmp_path))
    store = tmp_path / "models--Qwen--Qwen2.5-1.5B-Instruct"
    for name in ("blobs", "refs", "snapshots/abc"):
        (store / name).mkdir(parents=True)
    (store / "refs" / "main").write_text("abc")
    for name, size in (("config.json", 10), ("a.safetensors", 600), ("b.safetensors", 400), ("a.bin", 900)):
        (store / "blobs" / name).write_bytes(bytes(size))
        (store / "snapshots/abc" / name).symlink_to(f"../../blobs/{name}")
    model = "Qwen/Qwen2.5-1.5B-Instruct"
    assert (
        weights(model) == 1000 and weights("Qwen/other") == weights("no/such/name") == weights("/none") == 0
    )
    free = type("Usage", (), {"free": 6599})
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda place: free)
    with pytest.raises(RunStopped):
        check_room(tmp_path / "none yet", model)
    free.free = 6601
    check_room(tmp_path / "none yet", model)
    with pytest.raises(RunStopped):
        check_room(tmp_path / "none yet", model, models=2)
    free.free = 13201
    check_room(tmp_path / "none yet", model, models=2)


def test_the_largest_earlier_one_tells_the_size(tmp_path, monkeypatch):
    """Not the newest folder: the rotation touches old ones, and a kill leaves half of one."""
    for step, size in ((1, 10), (2, 1000), (3, 30)):
        checkpoint(tmp_path, step, size)
    (tmp_path / "global_step_1" / "gone").touch()
    (tmp_path / "global_step_1" / "gone").unlink()
    free = type("Usage", (), {"free": 1099})
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda place: free)
    with pytest.raises(RunStopped):
        check_room(tmp_path, "model")
    free.free = 1101
    check_room(tmp_path, "model")


def test_the_best_outlives_the_rotation(tmp_path):
    for step, success, best in ((1, 0.5, True), (2, 0.4, False), (3, 0.5, False), (4, 0.75, True)):
        checkpoint(tmp_path, step)
        assert keep_best(tmp_path, step, success) is best
        shutil.rmtree(tmp_path / f"global_step_{step}")  # as verl does
    (kept,) = (tmp_path / "best").glob("global_step_*")
    assert find(str(kept)).step == 4 and (kept / "actor/model_world_size_1_rank_0.pt").read_bytes()[0] == 4
    assert json.loads((tmp_path / "best/success.json").read_text()) == {"step": 4, "success": 0.75}
    assert keep_best(tmp_path, 9, 1.0) is False  # no checkpoint of that step


def test_the_last_from_before_a_collapse_outlives_the_rotation(tmp_path):
    """Two checkpoints are kept by verl's rotation; the rule first holds at step 25 and ends the run at 60."""
    for step in range(1, 61):
        if step % 10 == 0:
            checkpoint(tmp_path, step)
            for old in range(10, step - 10, 10):
                shutil.rmtree(tmp_path / f"global_step_{old}/actor", ignore_errors=True)  # as verl does
        kept = keep_good(tmp_path, "echo_trap", 25 if step >= 25 else None)
        assert kept == (tmp_path / "good/echo_trap/global_step_20" if step == 25 else None)
    assert sorted(one.parent.name[-2:] for one in tmp_path.glob("global_step_*/actor")) == ["50", "60"]
    assert last_good(tmp_path, "echo_trap", 25) == (
        f"The last checkpoint before it is of step 20: {tmp_path}/good/echo_trap/global_step_20"
    )
    assert find(str(tmp_path / "good/echo_trap/global_step_20")).step == 20
    assert last_good(tmp_path, "no_success", 25) == "No checkpoint is from before it"


def test_a_false_alarm_gives_its_room_back(tmp_path):
    checkpoint(tmp_path, 10)
    for rule in ("echo_trap", "no_success"):
        assert keep_good(tmp_path, rule, 15)
    assert keep_good(tmp_path, "echo_trap", None) is None
    assert [one.name for one in (tmp_path / "good").iterdir()] == ["no_success"]
    checkpoint(tmp_path, 20)
    assert keep_good(tmp_path, "no_success", 18) is None  # the one of step 20 is not from before it
    assert keep_good(tmp_path, "no_success", 24).name == "global_step_20"
    assert [one.name for one in (tmp_path / "good/no_success").iterdir()] == ["global_step_20"]


def test_the_best_is_named_where_no_other_is_from_before_it(tmp_path):
    checkpoint(tmp_path, 10)
    keep_best(tmp_path, 10, 0.5)
    shutil.rmtree(tmp_path / "global_step_10/actor")
    shutil.copytree(
        tmp_path / "best/global_step_10", tmp_path / "best/global_step_12.part"
    )  # killed in between
    checkpoint(tmp_path, 30)
    named = f"The last checkpoint before it is of step 10: {tmp_path}/best/global_step_10"
    assert last_good(tmp_path, "echo_trap", 15) == named
    checkpoint(tmp_path, 11)
    assert last_good(tmp_path, "echo_trap", 15).endswith(f"of step 11: {tmp_path}/global_step_11")
    assert last_good(tmp_path, "echo_trap", None).endswith(f"of step 30: {tmp_path}/global_step_30")


def test_a_kill_in_between_leaves_the_one_before(tmp_path):
    checkpoint(tmp_path, 1)
    keep_best(tmp_path, 1, 0.5)
    (tmp_path / "best" / "global_step_2.part").mkdir()
    (tmp_path / "best" / "global_step_2.part" / "half").touch()
    checkpoint(tmp_path, 2)
    assert keep_best(tmp_path, 2, 0.6)
    names = sorted(path.name for path in (tmp_path / "best").iterdir())
    assert names == ["global_step_2", "success.json"]
    assert not (tmp_path / "best/global_step_2/half").exists()


def test_a_step_that_is_saved_again_leaves_what_was_kept_of_it(tmp_path, monkeypatch):
    """A run that went on from an earlier checkpoint: verl writes into the files that are there."""

    class Verl:
        global_steps, use_critic = 1, False

        def _save_checkpoint(self):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "model_world_size_1_rank_0.pt").write_bytes(self.weights)

    class Guarded(GuardedRun, Verl):
        config = OmegaConf.create(
            {"trainer": {"default_local_dir": str(tmp_path)}, "actor_rollout_ref": {"model": {"path": "x/y"}}}
        )
        folder = tmp_path / "global_step_1" / "actor"

    run, kept = Guarded(), tmp_path / "best" / "global_step_1" / "actor" / "model_world_size_1_rank_0.pt"
    for weights_of in (b"first", b"second"):
        run.weights = weights_of
        run._save_checkpoint()
        assert keep_best(tmp_path, 1, 0.5) == (weights_of == b"first")
    assert kept.read_bytes() == b"first"
    assert (run.folder / kept.name).read_bytes() == b"second"
