"""Q models from beginning to end: trees, pairs, fitting, evaluation of the agent with and without it.

What `bash recipes/qvalue_<environment>.sh` runs. The run folder gets

    config.yaml             the configuration
    trees/  pairs.jsonl     of the commands search and pairs, on the training tasks
    q_model/                of fit-q, from `multiturn.qvalue.model` (null: the agent itself)
    eval/<rule>/            of eval, on the test panel, one recorded run for each rule of choice
    table.csv               the table that is printed

The same command again goes on where a killed one stopped: finished stages are kept, a collection of trees
goes on with the missing ones, an evaluation with the missing episodes. Trees that failed are tried again;
where that adds some, the later stages are done again. Other settings than those of a finished stage are
refused.
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
from verl_multiturn.eval_folder import state_of
from verl_multiturn.panel import Panel
from verl_multiturn.search.compare import costs, evaluate_rule, print_costs, success_of
from verl_multiturn.search.fit import fit
from verl_multiturn.search.fit_data import FitConfig
from verl_multiturn.search.fit_folder import REFERENCE
from verl_multiturn.search.prior import prior_value
from verl_multiturn.search.rules import Rules
from verl_multiturn.tasks import panel_of

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
        self.trees = self.failed = 0  # of the search, where it was not done before

    def run(self) -> pd.DataFrame:
        """Every stage that is not finished; the table of the last one.

        Raises:
            ValueError: a stage was finished with other settings, or a stage's own refusal.
        """
        self._search()
        self._pairs()
        self._fit()
        table = self._evaluate()
        table["trees_failed"] = self.failed
        table.to_csv(self.folder / "table.csv", index_label="rule")
        print_costs(table)
        if self.failed:
            self.tell(
                f"{self.failed} of {self.failed + self.trees} trees failed, and the Q model is fitted "
                f"without them: see {self.folder}/trees/failures.jsonl; the same command tries them again"
            )
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
        progress = collection.progress
        self.trees, self.failed = progress.done, progress.failed
        if progress.done > progress.before and self._stages():
            self.tell(f"search: {progress.done - progress.before} more trees, all that follows is done again")
            self._forget()
        if not self.failed:
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
        about = asdict(config) | {"model": start, "stop_tasks": self.settings["qvalue"]["stop_tasks"]}
        if self._finished("fit", about):
            return
        draft = self.folder / "q_model"
        for path in draft.glob("*"):
            if path.name != REFERENCE:  # these need not be computed again
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for rule in ("argmax", "softmax"):  # of an earlier Q model
            shutil.rmtree(self.folder / "eval" / rule, ignore_errors=True)
        self.tell(f"fit: from {start}, to {draft}")
        kept = fit(self.folder / "pairs.jsonl", start, draft, config, self.tell, self._success())
        self.tell(f"fit: kept the weights of update {kept['update']:.0f}")
        self._finish("fit")

    def _success(self) -> Any:
        """What the weights are judged by beside accuracy: the agent on the first tasks of validation."""
        block = self.settings["qvalue"]
        if block["stop_tasks"] is None:
            return None
        panel = panel_of(self.config.multiturn, "val")
        panel = replace(panel, tasks=panel.tasks[: block["stop_tasks"]])

        def prepare(folder: Path) -> Any:
            return self._evaluation(block["temperature"], folder, panel, tell=lambda progress: None)

        return success_of(prepare, block["n"])

    def _evaluate(self) -> pd.DataFrame:
        block, rows = self.settings["qvalue"], []
        folder = str(self.folder / "q_model")
        rules = Rules(block["select"], block["n"], folder, block["tau"], block["scorer"])
        for rule in rules.select:
            final = self.folder / "eval" / rule
            about = {key: block[key] for key in ("n", "tau", "samples", "limit", "temperature")}
            if rule in ("argmax", "softmax") and block["scorer"] != "engine":
                about["scorer"] = block["scorer"]
            if not self._finished(f"eval {rule}", about):
                if state_of(final) == "other":  # of a run that ended before it could begin
                    shutil.rmtree(final)
                evaluate_rule(rule, rules, self._evaluation, block["temperature"], final, self.tell)
                self._finish(f"eval {rule}")
            rows.append(costs(rules.label(rule), *_recorded(final)))
        return pd.concat(rows)

    def _evaluation(
        self,
        temperature: float | None,
        folder: Path | None,
        panel: Panel | None = None,
        tell: Callable[[Any], None] | None = None,
    ) -> Any:
        from verl_multiturn.cli_eval import Ticker
        from verl_multiturn.eval_records import choose_panel
        from verl_multiturn.evaluate import Evaluation

        block = self.settings["qvalue"]
        sampling = plain(self.config.actor_rollout_ref.rollout.val_kwargs)
        if temperature is not None:
            sampling |= {"temperature": temperature, "do_sample": temperature > 0}
        if panel is None:
            panel = choose_panel(self.config)
            panel = replace(panel, tasks=panel.tasks[: block["limit"]])
        return Evaluation(
            config=self.config,
            panel=panel,
            model=self._model(sampling),
            folder=folder or self.folder / "eval",
            samples=block["samples"],
            about={"model": self.agent, "sampling": sampling, "panel": panel.name},
            tell=tell or Ticker(),
            reuse=True,
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
        self._mark(self._stages() | {stage: self._about})

    def _forget(self) -> None:
        """Take back all stages, and what they made of fewer trees."""
        self._mark({})
        for name in ("q_model", "eval"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / "pairs.jsonl").unlink(missing_ok=True)

    def _mark(self, stages: dict[str, Any]) -> None:
        path = self.folder / STAGES
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(stages, indent=1))
        draft.replace(path)

    def _stages(self) -> dict[str, Any]:
        path = self.folder / STAGES
        with intact(path, "delete it, and the stages are done again"):
            return dict(json.loads(path.read_text())) if path.exists() else {}


def _recorded(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """The episodes of an evaluation, and how many failed."""
    from verl_multiturn.runs import Run

    run = Run(folder)
    step = run.steps("eval")[-1]
    return run.trajectories("eval", step), int(run.metrics.loc[step, "eval/failed"])
