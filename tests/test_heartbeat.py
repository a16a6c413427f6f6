"""Signs of life, lost processes, and what the doctor makes of them. Real processes, really killed."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_multiturn import doctor_run, heartbeat, watch
from verl_multiturn.cli import app
from verl_multiturn.errors import RunStopped
from verl_multiturn.heartbeat import Heartbeat, born, read
from verl_multiturn.runs import RunWriter

ROOT = Path(__file__).parents[1]

DRIVER = """
import sys, time
from verl_multiturn.heartbeat import Heartbeat, born

class Watch:
    def __init__(self, pid):
        self.pid, self.since = pid, born(pid)
    processes = property(lambda self: {"Server": [self.pid]})
    def lost(self):
        return None if born(self.pid) == self.since else f"the process of Server (process {self.pid}) is gone"

heart = Heartbeat(sys.argv[1], interval=0.02, grace=float(sys.argv[3]))
heart.start()
heart.watch(Watch(int(sys.argv[2])))
heart.enter("actor update", 7)
print("up", flush=True)
try:
    while True:
        time.sleep(0.02)
        if sys.argv[4] == "looks":
            heart.check()
except RuntimeError as error:
    if not error.said:
        sys.stderr.write(f"error: {error}\\n")
    heart.close("stopped", str(error))
    sys.exit(1)
"""


@pytest.fixture
def server():
    """A process to be killed."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def driver(folder, server, grace=20.0, does="looks"):
    command = [sys.executable, "-c", DRIVER, str(folder), str(server.pid), str(grace), does]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout.readline() == "up\n"
    return process


def states(folder):
    return {line.name: (line.status, line.text) for line in doctor_run.lines(folder)}


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("does", "grace"), [("looks", 20.0), ("hangs", 0.2)])
def test_a_lost_process_stops_the_run_with_one_sentence(tmp_path, server, does, grace):
    """Also a driver that waits for ever for its answer."""
    process = driver(tmp_path, server, grace, does)
    until(lambda: read(tmp_path)["processes"] == {"Server": [server.pid]})
    assert states(tmp_path)["state"][0] == states(tmp_path)["processes"][0] == "ok"
    began = time.monotonic()
    server.kill()
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - began < 30 and process.returncode == 1
    sentence = (
        f"the process of Server (process {server.pid}) is gone, in phase 'actor update' of step 7; "
        "the same command resumes from the last checkpoint"
    )
    assert said == f"error: {sentence}\n"
    beat = read(tmp_path)
    assert (beat["ending"], beat["reason"], beat["step"]) == ("stopped", sentence, 7)
    status, text = states(tmp_path)["state"]
    assert status == "FAIL" and text.endswith(f"in phase 'actor update' of step 7: {sentence}")


def test_a_killed_driver_is_explained(tmp_path, server):
    process = driver(tmp_path, server)
    until(lambda: read(tmp_path)["processes"])
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = states(tmp_path)
    status, text = found["state"]
    assert status == "FAIL" and f"the driver (process {process.pid}) is gone without a word" in text
    assert "in phase 'actor update' of step 7; its last sign of life was " in text
    assert found["processes"] == ("warn", f"left of it: Server ({server.pid}): end them before you resume")
    done = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])
    assert done.exit_code == 1 and json.loads(done.output)["lines"][0]["text"][:30] == text[:30]


def test_a_stopped_driver_is_not_a_dead_one(tmp_path, server, monkeypatch):
    process = driver(tmp_path, server)
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(doctor_run, "STALE", 0.1)
    time.sleep(0.3)
    status, text = states(tmp_path)["state"]
    assert status == "FAIL" and "is there but has given no sign of life" in text
    process.kill()
    process.wait()


def test_a_reader_never_sees_half_a_beat(tmp_path):
    heart = Heartbeat(tmp_path, interval=0.0005)
    heart.start()
    seen = [read(tmp_path)["step"] for _ in range(500) if heart.enter("rollout", _) is None]
    heart.close("done")
    assert len(seen) == 500 and not list(tmp_path.glob(".heartbeat*"))
    assert states(tmp_path)["state"][0] == "ok"


def test_phases_nest_and_an_error_keeps_its_phase(tmp_path):
    heart, names = Heartbeat(tmp_path), []
    heart.enter("rollout", 1)

    def work(fail):
        names.append(heart._state["phase"])
        if fail:
            raise KeyError("x")

    inner = heart.during("advantages", lambda: 3, work)
    inner(False)
    assert names == ["advantages"] and heart._state["phase"] == "rollout"
    with pytest.raises(KeyError):
        inner(True)
    assert (heart._state["phase"], heart._state["step"]) == ("advantages", 3)


def test_the_first_cause_is_found_behind_a_failed_call(tmp_path):
    """A call to a dead process raises before the next look at it."""

    class Watch:
        processes = {}
        gone = None

        def lost(self):
            return self.gone

    heart, watch = Heartbeat(tmp_path, interval=0.1, grace=600.0), Watch()
    heart.start()
    heart.watch(watch)
    assert heart.explain(0.3) is None
    watch.gone = "the process of X is gone"
    assert heart.explain().startswith("the process of X is gone, in phase 'start-up' of step 0")
    with pytest.raises(RunStopped, match="of X is gone"):
        heart.check()
    heart.close("stopped")


def test_a_process_outlives_a_run_that_left_it_in_order(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(heartbeat.os, "_exit", ended.append)
    for left in (True, False):
        heart = Heartbeat(tmp_path, grace=0.2)
        heart.start()
        ending = threading.Thread(target=heart._end)
        ending.start()
        if left:
            heartbeat.over()
        ending.join()
        heart.close("stopped")
        assert ended == ([] if left else [1])


WRONG = {"time": "x", "step": 1, "phase": "rollout", "since": 1, "host": "h", "pid": 1, "born": 1,
         "processes": {}, "ending": None, "reason": None}  # fmt: skip
LACKING = {name: value for name, value in WRONG.items() if name != "ending"} | {"time": 1}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"time": 1}', "\x00\x01", json.dumps(WRONG), json.dumps(LACKING)],
)
def test_a_damaged_beat_is_one_sentence(tmp_path, text):
    (tmp_path / heartbeat.NAME).write_text(text)
    with pytest.raises(ValueError, match=r"heartbeat.json is damaged: "):
        read(tmp_path)
    ((status, said),) = states(tmp_path).values()
    assert status == "FAIL" and "is damaged" in said


def test_what_the_records_add(tmp_path):
    """The last checkpoint, what was lost and by what, and a phase that lasts too long."""
    with RunWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.metrics(step, {"timing_s/gen": 2.0})
            writer.trajectories("train", step, [])
        for turn in (1, 4):
            error = {"error": "the LLM server took longer than 5 s", "task": 9, "turn": turn, "step": 3}
            writer.failure(error | {"waiting": "LLM server", "waiting_seconds": 5.0, "seconds": 8.0})
    (tmp_path / "checkpoints" / "global_step_2").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    heart = Heartbeat(tmp_path)
    heart.enter("rollout", 4)
    heart._write()
    later = {line.name: line for line in doctor_run.lines(tmp_path, now=time.time() + 20)}
    assert later["pace"].status == "ok"
    found = {line.name: line for line in doctor_run.lines(tmp_path, now=time.time() + 100)}
    assert found["pace"].status == "warn"
    assert found["pace"].text.startswith("rollout usually takes 2.0 s, this one 10")
    assert "steps up to 3 are recorded; the last checkpoint is of step 2" in found["records"].text
    assert "2 trajectories were lost, 2 by: the LLM server took longer than 5 s" in found["failures"].text
    assert "task 9, turn 4, for the LLM server, 5 s of 8" in found["failures"].text


@pytest.mark.parametrize("name", ["metrics.jsonl", "failures.jsonl"])
@pytest.mark.parametrize("text", ['{"step": 1\n{"step": 2}\n', "5\n", '{"waiting": "LLM server"}\n'])
def test_a_damaged_record_is_a_finding_beside_the_others(tmp_path, name, text):
    heart = Heartbeat(tmp_path)
    heart.enter("rollout", 4)
    heart._write()
    (tmp_path / "trajectories").mkdir()
    (tmp_path / name).write_text(text)
    found = states(tmp_path)
    status, said = found["pace" if name == "metrics.jsonl" else "failures"]
    assert status == "FAIL" and name in said
    assert found["state"][0] == "ok" and "there is no checkpoint" in found["records"][1]


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(ValueError, match=r"is no run: it has no heartbeat\.json, metrics\.jsonl or"):
        doctor_run.folder_of(str(tmp_path))
    assert doctor_run.folder_of("gigpo_frozenlake") is None


def test_a_process_number_used_again_is_another_process():
    mine = born(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child_born = born(child.pid)
    until(lambda: born(child.pid) is None)  # a zombie counts as dead
    child.wait()
    assert mine is not None and child_born is not None and child_born >= mine


def test_a_full_disk_does_not_end_the_heartbeat(tmp_path):
    """The kernel refuses to write the file; the run itself goes on."""
    code = textwrap.dedent(
        """
        import io, resource, signal, sys, time
        from verl_multiturn.heartbeat import Heartbeat
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        heart = Heartbeat(sys.argv[1], interval=0.02)
        heart.start()
        out, sys.stderr = sys.stderr, io.StringIO()
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, -1))
        while "cannot be written" not in sys.stderr.getvalue():
            time.sleep(0.02)
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        heart.close("done")
        out.write(sys.stderr.getvalue())
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=30, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0 and "heartbeat.json cannot be written: File too large" in done.stderr
    assert read(tmp_path)["ending"] == "done"


def test_a_last_beat_that_finds_no_room_leaves_the_cause_to_be_seen(tmp_path, monkeypatch, capsys):
    heart = Heartbeat(tmp_path, interval=600.0)
    heart.start()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    heart.close("stopped", "the cause")
    assert "heartbeat.json cannot be written: No space left on device" in capsys.readouterr().err


class Looks:
    """A watch whose looks are given: an error is raised, a number of seconds slept, None is all right."""

    processes = {}

    def __init__(self, *looks):
        self.looks, self.count = list(looks), 0

    def lost(self):
        self.count += 1
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, Exception):
            raise look
        if isinstance(look, float):
            time.sleep(look)
            return None
        return look


def test_an_error_of_the_look_at_the_processes_ends_nothing(tmp_path):
    """Ray's list may fail once; a process that is lost later is still found, and the file is written."""
    heart = Heartbeat(tmp_path, interval=0.02, grace=600.0, patience=600.0)
    heart.start()
    looks = Looks(KeyError("Pid"), ConnectionError("GCS\nis away"), None, KeyError("Pid"), "X is gone")
    heart.watch(looks)
    until(lambda: heart.problem is not None)
    assert looks.count >= 5 and heart.problem.startswith("X is gone, in phase 'start-up' of step 0")
    before = read(tmp_path)["time"]
    until(lambda: read(tmp_path)["time"] > before)
    heart.close("stopped", heart.problem)


@pytest.mark.parametrize(
    ("looks", "why"),
    [([None, ConnectionError("GCS\nis away")], r" \(ConnectionError: GCS is away\)"), ([None, 5.0], "")],
    ids=["raises", "hangs"],
)
def test_a_ray_that_no_longer_answers_stops_the_run(tmp_path, capsys, looks, why):
    heart = Heartbeat(tmp_path, interval=0.02, grace=600.0, patience=0.3)
    heart.start()
    heart.enter("actor update", 7)
    heart.watch(Looks(*looks))
    until(lambda: heart.problem is not None)
    sentence = rf"Ray no longer answers: for 0\.3 s it did not say which processes are there{why}, in phase "
    with pytest.raises(RunStopped, match=sentence + "'actor update' of step 7; the same command resumes"):
        heart.check()
    assert capsys.readouterr().err == f"error: {heart.problem}\n", "said once"
    heart.close("stopped", heart.problem)


def test_a_phase_that_never_ends_stops_the_run(tmp_path, capsys):
    """A rollout has limits of its own; an update that another one's end would end has not."""
    heart = Heartbeat(tmp_path, interval=0.02, grace=600.0, limit=0.2)
    heart.start()
    heart.enter("rollout", 7)
    time.sleep(0.4)
    heart.check()
    heart.enter("actor update", 7)
    time.sleep(0.05)
    heart.check()
    until(lambda: heart.problem is not None)
    sentence = "nothing has come for 0.2 s (multiturn.phase_timeout), in phase 'actor update' of step 7; "
    assert heart.problem == sentence + heartbeat.RESUMES and capsys.readouterr().err.count("\n") == 1
    heart.close("stopped", heart.problem)


def test_what_is_said_first_of_an_end_stays(tmp_path):
    heart = Heartbeat(tmp_path, interval=600.0)
    heart.start()
    heart.close("stopped", "the cause")
    heart.close("stopped", "what followed from it")
    assert read(tmp_path)["reason"] == "the cause"


# ------------------------------------------------------------------------------- the processes, as Ray says


def actor(name, state="ALIVE", pid=11):
    return {"State": state, "ActorClassName": name, "Pid": pid, "Address": {"IPAddress": "10.0.0.1"}}


@pytest.fixture
def ray_list(monkeypatch):
    """Stand-ins for what Ray and the kernel say: a list of actors, daemons and when each began."""
    listed = {"actors": {}, "daemons": {}, "born": {}}
    monkeypatch.setattr(watch, "_actors", lambda: dict(listed["actors"]))
    monkeypatch.setattr(watch, "daemons", lambda: dict(listed["daemons"]))
    monkeypatch.setattr(watch, "born", lambda pid: listed["born"].get(pid))
    return listed


def test_actors_that_die_or_vanish_are_lost(ray_list):
    ray_list["actors"] = {"a": actor("Worker"), "b": actor("Server", pid=12), "c": actor("Old", "DEAD")}
    looked = watch.RayWatch()
    assert looked.processes == {"Worker": [11], "Server": [12]} and looked.lost() is None
    ray_list["actors"]["d"] = actor("Later", "DEAD")  # one of another purpose, made and ended since
    assert looked.lost() is None
    ray_list["actors"]["b"] = actor("Server", "DEAD", pid=12)
    assert looked.lost() == "the process of Server (process 12 on 10.0.0.1) is gone"
    del ray_list["actors"]["b"]
    assert looked.lost() == "the process of Server (process 12 on 10.0.0.1) is gone"


def test_an_actor_that_was_being_made_gets_its_process(ray_list):
    ray_list["actors"] = {"a": actor("Worker", "PENDING_CREATION", pid=0)}
    looked = watch.RayWatch()
    ray_list["actors"]["a"] = actor("Worker", pid=21)
    assert looked.lost() is None and looked.processes == {"Worker": [21]}


def test_rays_own_are_looked_at_before_it_is_asked(ray_list, monkeypatch):
    """Without its control store the question for the actors would wait."""
    ray_list["daemons"], ray_list["born"] = {7: ("gcs_server", 100), 8: ("raylet", 101)}, {7: 100, 8: 101}
    looked = watch.RayWatch()
    assert looked.processes == {"gcs_server": [7], "raylet": [8]} and looked.lost() is None
    monkeypatch.setattr(watch, "_actors", lambda: pytest.fail("asked"))
    for gone in (None, 500):  # nobody has the number now, or somebody else
        ray_list["born"][7] = gone
        assert looked.lost() == "Ray's gcs_server (process 7) is gone"


@pytest.mark.parametrize("above", ["driver", "raylet"])
def test_rays_own_are_found_from_the_driver_and_from_an_actor(tmp_path, above):
    """Real processes under the names of Ray's: beside this one, and as the raylet that has it as a child."""
    sleeper = "import ctypes, sys, time; ctypes.CDLL(None).prctl(15, sys.argv[1].encode()); time.sleep(60)"
    look = "from verl_multiturn.watch import daemons; print(sorted(name for name, _ in daemons().values()))"
    script = f"""
import ctypes, subprocess, sys
def start(name):
    return subprocess.Popen([sys.executable, "-c", {sleeper!r}, name], stdout=subprocess.DEVNULL)
helpers = [start("gcs_server"), start("other")]
raylet = {"start('raylet')" if above == "driver" else "None"}
for one in helpers + [raylet] * (raylet is not None):
    while open(f"/proc/{{one.pid}}/comm").read().strip() not in ("gcs_server", "other", "raylet"):
        pass
if raylet is not None:
    {look}
else:
    middle = "import ctypes, subprocess, sys; ctypes.CDLL(None).prctl(15, b'raylet'); "
    middle += "subprocess.run([sys.executable, '-c', sys.argv[1]])"
    subprocess.run([sys.executable, "-c", middle, {look!r}])
for one in helpers + [raylet] * (raylet is not None):
    one.kill()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout == "['gcs_server', 'raylet']\n", done.stderr
