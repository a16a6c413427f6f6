"""How `main.run` says the end of a run, with errors as Ray brings them from other processes. No Ray runs."""

import json
import time

import pytest

pytest.importorskip("verl")

import ray
from ray.exceptions import ActorDiedError, RayTaskError
from verl.trainer import main_ppo
from verl.trainer.main_ppo import TaskRunnerV1

from verl_multiturn import configure, heartbeat, main
from verl_multiturn.compose import compose
from verl_multiturn.errors import RunStopped, cause_of
from verl_multiturn.heartbeat import RESUMES, Heartbeat

SENTENCE = f"the process of Server (process 7) is gone, in phase 'rollout' of step 3; {RESUMES}"


def remote(cause):
    """The error as a caller of an actor gets it; Ray passes the same cause on from one to the next."""
    text = f"ray::Runner.run() (pid=5)\n  File x\n{type(cause).__name__}: {cause}"
    error = RayTaskError("run", text, cause, proctitle="ray::Runner", pid=5, ip="127.0.0.1")
    return error.as_instanceof_cause()


@pytest.fixture(scope="module")
def composed():
    return configure.prepare(compose("gigpo_frozenlake", ["hardware=cpu"]))


@pytest.fixture
def config(composed, tmp_path):
    config = composed.copy()
    config.multiturn.run = str(tmp_path)
    return config


@pytest.fixture
def ends(config, tmp_path, monkeypatch, capsys):
    """The exit code of a run that ends with an error, and what it writes to standard error."""
    monkeypatch.setattr("verl.utils.config.validate_config", lambda *_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)

    def ends(error, before=None):
        def run_ppo(config, task_runner_class):
            if before is not None:
                before(tmp_path)
            raise error

        monkeypatch.setattr(main_ppo, "run_ppo", run_ppo)
        return main.run(config), capsys.readouterr().err

    return ends


@pytest.mark.parametrize("said", [False, True])
def test_a_stop_in_an_actor_is_its_sentence(ends, said):
    """Whether the actor said it or not: its standard error need not have come here."""
    cause = RunStopped(SENTENCE)
    cause.said = said
    error = remote(cause)
    assert isinstance(error, RunStopped) and "\n" in str(error), "as Ray builds it"
    assert ends(error) == (1, f"error: {SENTENCE}\n")


def test_a_stop_in_this_process_is_said_once(ends):
    cause = RunStopped(SENTENCE)
    assert ends(cause) == (1, f"error: {SENTENCE}\n")
    cause.said = True
    assert ends(cause) == (1, "")


def test_a_lost_actor_is_explained_once(ends, tmp_path):
    def lost(folder):
        heart = Heartbeat(folder, interval=600.0)
        heart.start()
        heart.close("stopped", SENTENCE)

    code, said = ends(ActorDiedError(), before=lost)
    assert (code, said) == (1, f"error: {SENTENCE}\n") and said.count(RESUMES) == 1


def test_the_reason_of_an_earlier_start_is_not_the_reason(ends, tmp_path):
    heart = Heartbeat(tmp_path, interval=600.0)
    heart.start()
    heart.close("stopped", "an older story")
    beat = json.loads((tmp_path / heartbeat.NAME).read_text())
    (tmp_path / heartbeat.NAME).write_text(json.dumps(beat | {"started": time.time() - 3600}))
    code, said = ends(ActorDiedError())
    assert code == 1 and said.startswith("error: a process of the run is gone: ") and "older" not in said
    assert said.endswith(f"; {RESUMES}\n") and said.count(RESUMES) == said.count("\n") == 1


def test_the_cause_of_an_error_is_what_was_raised():
    inner = ValueError("x")
    assert cause_of(inner) is inner and cause_of(remote(inner)) is inner


# ------------------------------------------------------------------------------- before the training


@pytest.mark.parametrize(
    ("error", "ending", "reason"),
    [
        (RunStopped("no room for the critic"), "stopped", "no room for the critic"),
        (remote(RunStopped("the prompt is too long")), "stopped", "the prompt is too long"),
        (remote(OSError("no such model")), "stopped", "OSError: no such model"),
        (KeyboardInterrupt(), "interrupted", None),
    ],
)
@pytest.mark.parametrize("when", ["init", "between"])
def test_what_fails_before_the_training_is_the_runs_end(
    config, tmp_path, monkeypatch, when, error, ending, reason
):
    """In the trainer's start-up, and where verl makes the rollout workers after it."""
    trainer_base = pytest.importorskip("verl.trainer.ppo.v1.trainer_base")
    from verl_multiturn.trainer import MultiTurnTrainer

    def fails(self):
        raise error

    def run(self, config):
        self.trainer = MultiTurnTrainer(config)
        self.trainer.init()
        assert heartbeat.read(tmp_path)["ending"] is None
        fails(self)

    monkeypatch.setattr(trainer_base.PPOTrainer, "init", fails if when == "init" else lambda self: None)
    monkeypatch.setattr(TaskRunnerV1.__ray_metadata__.modified_class, "run", run)
    with pytest.raises(type(error)):
        main._runner(in_process=True).remote().run.remote(config)
    beat = heartbeat.read(tmp_path)
    assert (beat["ending"], beat["reason"], beat["phase"]) == (ending, reason, "start-up")
