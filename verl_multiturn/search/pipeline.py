"""Q models from beginning to end: trees, pairs, fitting, evaluation of the agent with and without it.

What `bash recipes/qvalue_<environment>.sh` runs. The run folder gets

    config.yaml             the configuration
    trees/  pairs.jsonl     of the commands search and pairs, on the training tasks
    q_model/                of fit-q, from `multiturn.qvalue.model` (null: the agent itself)
    eval/<rule>/            of eval, on the test panel, one recorded run for each rule of choice
    table.csv               the table that is printed

The same command again goes on where a killed one stopped: finished stages are kept, a collection of trees
goes on with the missing ones. Other settings than those of a finished stage are refused.
"""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from verl_multiturn.compose import plain
from verl_multiturn.errors import intact
from verl_multiturn.search.compare import costs, evaluate_rule, print_costs
from verl_multiturn.search.fit import REFERENCE, fit
from verl_multiturn.search.fit_data import FitConfig
from verl_multiturn.search.prior import prior_value
from verl_multiturn.search.rules import Rules

Say = Callable[[str], None]
STAGES = "stages.json"


def say(line: str) -> None:
    """A line of progress."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Pipeline:
    """All stages of a run, in order.

    Args:
        config: prepared.
        tell: called with lines of progress.
    """

    def __init__(self, config: DictConfig, tell: Say = say) -> None:
        from verl_multiturn.play_settings import model_folder

        self.config, self.tell = config, tell
        self.settings = plain(config.multiturn)
        self.folder = Path(config.multiturn.run)
        self.folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, self.folder / "config.yaml", resolve=True)
        path = str(config.actor_rollout_ref.model.path)
        self.agent = path if "://" in path else model_folder(config)

    def run(self) -> pd.DataFrame:
        """Every stage that is not finished; the table of the last one.

        Raises:
            ValueError: a stage was finished with other settings, or a stage's own refusal.
        """
        self._search()
        self._pairs()
        self._fit()
        table = self._evaluate()
        table.to_csv(self.folder / "table.csv", index_label="rule")
        print_costs(table)
        return table

    def _search(self) -> None:
        from verl_multiturn.cli_eval import Ticker
        from verl_multiturn.cli_search import _sampling
        from verl_multiturn.search.collect import Collection
        from verl_multiturn.tasks import training_tasks

        tasks, sampling = self.settings["qvalue"]["tasks"], _sampling(self.config, None)
        about = {name: self.settings[name] for name in ("env", "env_kwargs", "search", "seed")}
        prior = self.settings["qvalue"]["prior"]
        if self._finished("search", about | {"tasks": tasks, "agent": self.agent, "prior": prior}):
            return
        panel = training_tasks(self.config.multiturn, tasks)
        collection = Collection(
            config=self.config,
            panel=replace(panel, tasks=panel.tasks[:tasks]),
            model=self._model(sampling),
            name=self.agent,
            folder=self.folder / "trees",
            sampling=sampling,
            seed=self.settings["seed"],
            value=prior_value(prior),
            q_model=prior,
            tell=Ticker(),
        )
        self.tell(f"search: {len(collection.panel.tasks)} trees, recording to {self.folder / 'trees'}")
        collection.run()
        self._finish("search")

    def _pairs(self) -> None:
        from verl_multiturn.search.pair_files import write_pairs

        if self._finished("pairs", self.settings["pairs"]):
            return
        path = self.folder / "pairs.jsonl"
        path.unlink(missing_ok=True)  # of a run that ended between this file and its mark
        self.tell(f"pairs: {write_pairs(self.folder / 'trees', path, self.settings['pairs'])}")
        self._finish("pairs")

    def _fit(self) -> None:
        start = self.settings["qvalue"]["model"] or self.agent
        config = FitConfig.of({"seed": self.settings["seed"], **self.settings["fit"]})
        if self._finished("fit", asdict(config) | {"model": start}):
            return
        draft = self.folder / "q_model"
        for path in draft.glob("*"):
            if path.name != REFERENCE:  # these need not be computed again
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.tell(f"fit: from {start}, to {draft}")
        kept = fit(self.folder / "pairs.jsonl", start, draft, config, self.tell)
        self.tell(f"fit: kept the weights of update {kept['update']:.0f}")
        self._finish("fit")

    def _evaluate(self) -> pd.DataFrame:
        block, rows = self.settings["qvalue"], []
        rules = Rules(block["select"], block["n"], str(self.folder / "q_model"), block["tau"])
        for rule in rules.select:
            final = self.folder / "eval" / rule
            about = {key: block[key] for key in ("n", "tau", "samples", "limit", "temperature")}
            if not self._finished(f"eval {rule}", about):
                shutil.rmtree(final, ignore_errors=True)
                evaluate_rule(rule, rules, self._evaluation, block["temperature"], final, self.tell)
                self._finish(f"eval {rule}")
            rows.append(costs(rules.label(rule), _records(final)))
        return pd.concat(rows)

    def _evaluation(self, temperature: float | None, folder: Path | None) -> Any:
        from verl_multiturn.cli_eval import Ticker
        from verl_multiturn.eval_records import choose_panel
        from verl_multiturn.evaluate import Evaluation

        block = self.settings["qvalue"]
        sampling = plain(self.config.actor_rollout_ref.rollout.val_kwargs)
        if temperature is not None:
            sampling |= {"temperature": temperature, "do_sample": temperature > 0}
        panel = choose_panel(self.config)
        return Evaluation(
            config=self.config,
            panel=replace(panel, tasks=panel.tasks[: block["limit"]]),
            model=self._model(sampling),
            folder=folder or self.folder / "eval",
            samples=block["samples"],
            about={"model": self.agent, "sampling": sampling, "panel": panel.name},
            tell=Ticker(),
        )

    def _model(self, sampling: dict[str, Any]) -> Any:
        from verl_multiturn.checkpoints import Found
        from verl_multiturn.cli_eval import _model

        return _model(Found(self.agent), "://" in self.agent, self.config, sampling)

    def _finished(self, stage: str, about: dict[str, Any]) -> bool:
        """Whether a stage was finished with these settings; remembers them."""
        self._about = json.loads(json.dumps(about, default=str))
        then = self._stages().get(stage)
        if then is None:
            return False
        for key in sorted({*then, *self._about}):
            if then.get(key) != self._about.get(key):
                raise ValueError(
                    f"{self.folder}: the stage {stage} was done with {key}={then.get(key)}, this run has "
                    f"{self._about.get(key)}: name another folder in multiturn.run"
                )
        self.tell(f"{stage}: done before")
        return True

    def _finish(self, stage: str) -> None:
        path = self.folder / STAGES
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(self._stages() | {stage: self._about}, indent=1))
        draft.replace(path)

    def _stages(self) -> dict[str, Any]:
        path = self.folder / STAGES
        with intact(path, "delete it, and the stages are done again"):
            return dict(json.loads(path.read_text())) if path.exists() else {}


def _records(folder: Path) -> list[dict[str, Any]]:
    from verl_multiturn.runs import Run

    run = Run(folder)
    return run.trajectories("eval", run.steps("eval")[-1])
