"""Train: `python -m verl_multiturn.main --config-name <recipe> [hydra overrides]`.

Composes and checks the recipe, prepares its tasks (and, with hardware=cpu, its model), then hands
the configuration to verl's own `run_ppo`.
"""

import argparse
import importlib.util
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_multiturn import configure, heartbeat, tasks
from verl_multiturn.compose import compose
from verl_multiturn.errors import RunStopped, cause_of
from verl_multiturn.methods import SEARCH
from verl_multiturn.recipes_index import has_cuda

RAY_PREFIX = "vm-ray-"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m verl_multiturn.main", description=__doc__)
    parser.add_argument("--config-name", required=True, metavar="RECIPE", help="see verl-multiturn recipes")
    parser.add_argument("--cfg", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("--dry-run", action="store_true", help="check everything, start nothing")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of refusals")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args(arguments)
    try:
        config = configure.prepare(compose(given.config_name, given.overrides))
        if given.cfg:
            sys.stdout.write(OmegaConf.to_yaml(config, resolve=True))
            return 0
        if not given.dry_run:
            configure.check_hardware(config, has_cuda())
        found = tasks.panels(config)
        if given.dry_run:
            sys.stdout.write(_summary(config, found) + "\n")
            return 0
        if config.multiturn.algorithm == SEARCH:
            return search(config)
        _ready(config, found)
        sys.stdout.write(f"{_summary(config, found)}\nrecording to {config.multiturn.run}\n")
        if note := kept(config):
            sys.stdout.write(f"{note}\n")
        sys.stdout.flush()
    except (ValueError, ImportError, OSError, NotImplementedError) as error:
        if given.debug:
            raise
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("stopped before the run began\n")
        return 130
    return run(config)


def _summary(config: DictConfig, found: dict[str, Any]) -> str:
    settings = config.multiturn
    if settings.algorithm == SEARCH:
        return _search_summary(config, found)
    counts = ", ".join(f"{len(panel.tasks)} {split}" for split, panel in found.items())
    steps = config.trainer.total_training_steps
    return (
        f"ok: {settings.algorithm} on {settings.env} ({counts} tasks), {settings.row} rows, "
        f"{config.data.train_batch_size} x {config.actor_rollout_ref.rollout.n} trajectories a step, "
        f"{steps} steps, {config.trainer.device}, model {config.actor_rollout_ref.model.path}"
    )


def kept(config: DictConfig) -> str | None:
    """Among which validations `checkpoints/best` is chosen, in a sentence; None: all, or nothing is saved."""
    test, save = config.trainer.test_freq, config.trainer.save_freq
    if config.multiturn.algorithm == SEARCH or test <= 0 or save <= 0 or test % save == 0:
        return None
    return (
        f"checkpoints/best is the best of the validations at every {math.lcm(test, save)} steps and at the "
        f"end, where a checkpoint is saved, not of all (trainer.test_freq={test}, save_freq={save})"
    )


def _search_summary(config: DictConfig, found: dict[str, Any]) -> str:
    settings = config.multiturn
    counts = ", ".join(f"{len(panel.tasks)} {split}" for split, panel in found.items())
    return (
        f"ok: {settings.algorithm} on {settings.env} ({counts} tasks), {settings.qvalue.tasks} trees, best "
        f"of {settings.qvalue.n}, {config.trainer.device}, model {config.actor_rollout_ref.model.path}"
    )


def search(config: DictConfig) -> int:
    """Run the stages of a Q model; no verl, no Ray. Returns the exit code."""
    from verl_multiturn.search.pipeline import Pipeline

    try:
        Pipeline(config).run()
    except KeyboardInterrupt:
        sys.stderr.write(
            f"stopped; what was finished is in {config.multiturn.run}, the same command goes on\n"
        )
        return 130
    return 0


def _ready(config: DictConfig, found: dict[str, Any]) -> None:
    """Everything that a run needs on disk and in its environment."""
    flash = importlib.util.find_spec("flash_attn") is not None
    configure.without_flash_attention(config, flash)
    if config.trainer.device == "cpu":
        from verl_multiturn.cpu import settings

        ray_init = config.ray_kwargs.ray_init
        alone = ray_init.address == "local"
        if not alone:
            ray_init.num_cpus = ray_init.num_gpus = None  # what a cluster has, its nodes were started with
        elif ray_init._temp_dir is None:
            # Ray's socket paths have a limit of 107 characters.
            ray_init._temp_dir = tempfile.mkdtemp(prefix=RAY_PREFIX, dir="/tmp")
        settings.apply(ray_init._temp_dir if alone else None)
    os.environ.setdefault("TQDM_DISABLE", "1")  # one progress line is enough
    # Rollout workers find ./environments and the user's modules as this process does.
    paths = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    tasks.prepare_folder(config)
    tasks.write(found, config.multiturn.run)
    if config.actor_rollout_ref.model.path == "small":
        from verl_multiturn import small_model

        path = str(small_model.build(config))
        config.actor_rollout_ref.model.path = path
        if config.critic.model.path == "small":
            config.critic.model.path = path


def run(config: DictConfig) -> int:
    """Start verl with a prepared configuration; returns the exit code."""
    import ray
    from ray.exceptions import LocalRayletDiedError, NodeDiedError, RayActorError, WorkerCrashedError
    from verl.trainer import main_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    validate_config(config, need_reference_policy(config), need_critic(config))
    began = time.time()
    try:
        main_ppo.run_ppo(config, task_runner_class=_runner(config.multiturn.in_process))
    except KeyboardInterrupt:
        sys.stderr.write(
            f"stopped; what was recorded is in {config.multiturn.run}, the same command resumes from the "
            "last checkpoint\n"
        )
        return 130
    except RunStopped as error:
        cause = cause_of(error)
        # What another process has said may not have come here: Ray's own may be what is gone.
        if cause is not error or not error.said:
            sys.stderr.write(f"error: {cause}\n")
        return 1
    except (RayActorError, NodeDiedError, LocalRayletDiedError, WorkerCrashedError) as error:
        beat = heartbeat.read(config.multiturn.run) or {}
        why = beat.get("reason") if beat.get("started", 0.0) >= began else None
        lost = f"a process of the run is gone: {str(error).splitlines()[0]}; {heartbeat.RESUMES}"
        sys.stderr.write(f"error: {why or lost}\n")
        return 1
    except Exception as error:
        # Ray raises a bare Exception.
        if "timed out during startup" not in str(error):
            raise
        sys.stderr.write(
            "error: Ray did not start in time: the machine is overloaded; wait for its other work, or set "
            "RAY_raylet_start_wait_time_s to more seconds\n"
        )
        return 1
    finally:
        ray.shutdown()
        heartbeat.over()
    if Path(config.ray_kwargs.ray_init._temp_dir or "").name.startswith(RAY_PREFIX):
        shutil.rmtree(
            config.ray_kwargs.ray_init._temp_dir, ignore_errors=True
        )  # logs of a run that went well
    return 0


def _runner(in_process: bool) -> Any:
    """verl's TaskRunner with our trainers registered, as a Ray actor or in this process."""
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1

    class Runner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[name-defined,misc]
        def run(self, config: DictConfig) -> None:
            from verl.trainer import main_ppo
            from verl.trainer.ppo.v1 import trainer_base

            import verl_multiturn.trainer  # noqa: F401  registers the trainers in this process

            if threading.current_thread() is threading.main_thread():
                # Ends like Ctrl-C, in order; here, because Ray has set a handler of its own by now.
                signal.signal(signal.SIGTERM, signal.default_int_handler)
            # The configuration and the metrics that verl would print stand in the run folder.
            main_ppo.pprint = trainer_base.pprint = lambda *_: None
            config.trainer.v1.trainer_mode = f"multiturn_{config.trainer.v1.trainer_mode}"
            try:
                super().run(config)
            except BaseException as error:
                if self.trainer is not None:  # it may have failed before its training began
                    self.trainer.close(error)
                raise

    if not in_process:
        return ray.remote(Runner)

    class Here:
        """What `run_ppo` asks of an actor class, without the actor."""

        class run:
            @staticmethod
            def remote(config: DictConfig) -> Any:
                return ray.put(Runner().run(config))

        @classmethod
        def remote(cls) -> type["Here"]:
            return cls

    return Here


if __name__ == "__main__":
    sys.exit(main())
