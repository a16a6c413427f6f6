"""Seconds per training step: our trainer against stock verl's, single-turn GRPO on the same prompts.

    python tests/bench/bench_step.py [--steps 12] [--rounds 2] [--json FILE]

Both run in turn, several rounds, with the same model, sampler, batch and looking interval (0.05 s instead
of verl's 2 s, which would round every stock step up). The first two steps of a run are left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PHASES = ("step", "gen", "old_log_prob", "adv", "update_actor")
COMMON = [
    *(
        "multiturn.env=bandit",
        "multiturn.env_kwargs={}",
        "multiturn.val=bandit-val",
        "multiturn.test=bandit-test",
    ),
    *(
        "multiturn.train={first_seed: 1000000, size: 16}",
        "multiturn.row=trajectory",
        "multiturn.algorithm=grpo",
    ),
    *("data.max_prompt_length=256", "data.max_response_length=16", "multiturn.small_model.steps=40"),
    *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"),
]


def stock(arguments: list[str]) -> None:
    """Stock trainer and agent loop on a parquet of the same prompts; only the looking interval is set."""
    import pandas as pd

    from verl_multiturn import configure, main, small_model, tasks
    from verl_multiturn.compose import compose
    from verl_multiturn.cpu import settings

    config = configure.prepare(compose("gigpo_frozenlake", arguments))
    found = tasks.panels(config)
    model = str(small_model.build(config))
    settings.apply()
    env = found["train"].make()
    folder = Path(config.multiturn.run)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "prompt": [{"role": "user", "content": env.reset(task.id)[0]}],
            "data_source": "bandit",
            "reward_model": {"style": "rule", "ground_truth": str(task.id)},
            "extra_info": {"index": i},
        }
        for i, task in enumerate(found["train"].tasks)
    ]
    pd.DataFrame(rows).to_parquet(folder / "prompts.parquet")
    config.actor_rollout_ref.model.path = model
    config.data.custom_cls.path = config.data.custom_cls.name = None
    config.data.train_files = config.data.val_files = str(folder / "prompts.parquet")
    config.actor_rollout_ref.rollout.agent.default_agent_loop = "single_turn_agent"
    config.reward.num_workers = 1
    config.reward.custom_reward_function.path = str(Path(__file__).resolve())
    config.ray_kwargs.ray_init._temp_dir = tempfile.mkdtemp(prefix="vm", dir="/tmp")
    config.trainer.logger = ["file"]
    os.environ["VERL_FILE_LOGGER_PATH"] = str(folder / "stock.jsonl")
    os.environ["TQDM_DISABLE"] = "1"

    import verl.trainer.ppo.v1.trainer_sync as sync

    plain = sync.PPOTrainerSync.__init__

    def faster(self, config):
        plain(self, config)
        self.replay_buffer.poll_interval = 0.05

    sync.PPOTrainerSync.__init__ = faster
    main._runner = lambda in_process, runner=main._runner: _stock_runner()
    sys.exit(main.run(config))


def _stock_runner():
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1

    plain = TaskRunnerV1.__ray_metadata__.modified_class

    class Here:
        class run:
            @staticmethod
            def remote(config):
                return ray.put(plain().run(config))

        @classmethod
        def remote(cls):
            return cls

    return Here


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **unused) -> float:
    """The reward function of the stock run: the environment itself."""
    from verl_multiturn.env import make
    from verl_multiturn.rollout.parsing import ActionFormat, parse

    env = make("bandit")
    env.reset(int(ground_truth))
    actions = parse(solution_str, ActionFormat(tag="answer", think=False)).actions
    return float(env.step(actions[0] if actions else "")[1])


def once(kind: str, folder: Path, steps: int) -> dict[str, list[float]]:
    """Run one side; returns seconds of each phase per step, the first two steps left out."""
    run = [*COMMON, "hardware=cpu", f"multiturn.run={folder}", f"trainer.total_training_steps={steps}"]
    ours = [sys.executable, "-m", "verl_multiturn.main", "--config-name", "gigpo_frozenlake"]
    theirs = [sys.executable, str(Path(__file__).resolve()), "--stock"]
    command = [*(ours if kind == "ours" else theirs), *run]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    lines = [
        json.loads(line) for line in (folder / ("metrics.jsonl" if kind == "ours" else "stock.jsonl")).open()
    ]
    metrics = [line.get("metrics", line.get("data")) for line in lines]
    metrics = [m for m in metrics if "timing_s/step" in m][2:]
    return {phase: [m[f"timing_s/{phase}"] for m in metrics] for phase in PHASES} | {
        "tokens": [m["perf/total_num_tokens"] for m in metrics]
    }


def main() -> None:
    """Run both sides in turn and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {"stock": {}, "ours": {}}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            for kind in ("stock", "ours") if number % 2 == 0 else ("ours", "stock"):
                for phase, seconds in once(kind, Path(folder) / f"{kind}{number}", given.steps).items():
                    found[kind].setdefault(phase, []).extend(seconds)
    medians = {kind: {phase: statistics.median(s) for phase, s in by.items()} for kind, by in found.items()}
    print(f"{'phase':14s} {'stock':>9s} {'ours':>9s}  ratio   (median of {len(found['ours']['step'])} steps)")
    for phase in (*PHASES, "tokens"):
        a, b = medians["stock"][phase], medians["ours"][phase]
        print(f"{phase:14s} {a:9.3f} {b:9.3f}  {b / a:.3f}")
    if given.json:
        given.json.write_text(json.dumps({"medians": medians, "steps": found}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--stock"]:
        stock(sys.argv[2:])
    else:
        main()
