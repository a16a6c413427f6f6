"""The command eval: how well a model plays a panel. Registered in `cli`."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_multiturn.cli_run import announce

PACE = 5.0  # seconds between two lines of progress, where they do not replace each other


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="Hugging Face folder, checkpoint of verl, run folder (its latest), "
            "http://host:port/v1#name; random or expert: no model."
        ),
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of the run or recipe.")
    ] = None,
    env: Annotated[
        str | None, typer.Option(help="Environment; default: the panel's, run's, recipe's.")
    ] = None,
    panel: Annotated[
        str | None, typer.Option(help="Name or file; default: the run's or recipe's test panel.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Which panel of the run or recipe: test or val; default: test.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe whose prompts and limits are used.")] = None,
    run: Annotated[
        Path | None, typer.Option(help="Recorded run whose prompts are used; default: the checkpoint's.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the record; the same again goes on with it; default: a new one in runs/."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Episodes for each task.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first tasks of the panel.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0: greedy; default: that of validation.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Episodes at a time; default: 64, endpoint 16.")
    ] = None,
    critic: Annotated[
        Path | None, typer.Option(help="Folder of an offline critic: it chooses among --candidates (CHAI).")
    ] = None,
    candidates: Annotated[int, typer.Option(min=1, help="Utterances to choose from, with --critic.")] = 5,
    q_model: Annotated[
        str | None, typer.Option(help="Folder of a Q model: each answer is the best of --n by it.")
    ] = None,
    select: Annotated[
        str | None,
        typer.Option(
            help="How an answer is chosen, comma-separated to compare: greedy, random, majority, argmax, "
            "softmax, oracle; default: argmax with --q-model."
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Answers to choose from, with --select.")] = 5,
    tau: Annotated[float, typer.Option(min=1e-6, help="Temperature of softmax.")] = 1.0,
    scorer: Annotated[
        str, typer.Option(help="What reads the Q model: engine (a forward pass here) or vllm.")
    ] = "engine",
) -> None:
    """Play a panel with a model and record it: success with its 95 % interval, return, turns."""
    from verl_multiturn.eval_records import table
    from verl_multiturn.report import print_table
    from verl_multiturn.search.rules import Rules

    source = (env, panel, split, recipe, run, settings or [])
    if panel and split:
        raise ValueError("give either --panel or --split: each names the tasks")
    if (select or q_model or critic) and _scripted(model):
        raise ValueError(f"{model} has no answers to choose from: leave --select, --q-model and --critic out")
    if scorer != "engine" and q_model is None:
        raise ValueError(f"--scorer {scorer} reads a Q model: give --q-model FOLDER")
    if select or q_model:
        if critic is not None:
            raise ValueError("give either --critic or --q-model and --select: each chooses the answers")
        rules = Rules((select or "argmax").split(","), n, q_model, tau, scorer)
        _compared(model, source, limit, temperature, out, samples, concurrency, rules)
        return

    playing = _prepared(model, source, limit, temperature, out, samples, concurrency)
    if critic is not None:
        playing.episode = _reranked(critic, candidates)
        playing.about |= {"critic": str(critic), "candidates": candidates}
    chosen, folder = playing.panel, playing.folder
    typer.echo(f"{model} on {chosen.name}: {len(chosen.tasks)} tasks x {samples}, recording to {folder}")
    playing.run()
    print_table(table(_label(model, playing.step), playing.records))
    if failed := playing.progress.failed:
        typer.echo(f"{failed} episodes failed and do not count: see {folder}/failures.jsonl")


def _reranked(folder: Path, candidates: int) -> Any:
    """What builds episodes whose utterances a critic chooses."""
    from functools import partial

    from verl_multiturn.critic.rerank import RerankedEpisode, load_critic

    critic, limit = load_critic(folder)
    return partial(RerankedEpisode, critic=critic, candidates=candidates, limit=limit)


def _compared(
    model: str,
    source: tuple[Any, ...],
    limit: int | None,
    temperature: float | None,
    out: Path | None,
    samples: int,
    concurrency: int | None,
    rules: Any,
) -> None:
    """One evaluation for each rule of choice, on the same tasks and chances, and a table of them."""
    from verl_multiturn.search.compare import compare, print_costs

    def prepared(temperature_: float | None, folder: Path | None) -> Any:
        return _prepared(model, source, limit, temperature_, folder, samples, concurrency, reuse=True)

    print_costs(compare(rules, prepared, temperature, out, typer.echo))


class Ticker:
    """Shows progress on one line of a terminal, or as a line now and then."""

    def __init__(self) -> None:
        self._last, self._replaces = time.perf_counter(), sys.stderr.isatty()

    def __call__(self, progress: Any) -> None:
        """Show it, if it is time."""
        now, over = time.perf_counter(), progress.done + progress.failed == progress.total
        if over or now - self._last > (0.2 if self._replaces else PACE):
            self._last = now
            start, end = ("\r\033[K", "\n" if over else "") if self._replaces else ("", "\n")
            sys.stderr.write(f"{start}{progress}{end}")
            sys.stderr.flush()


def _label(model: str, step: int) -> str:
    """A name short enough for a table."""
    name = model.rpartition("#")[2].rstrip("/").rpartition("/")[2]
    return f"step {step}" if step else name if len(name) <= 20 else f"{name[:19]}…"


def _prepared(
    model: str,
    source: tuple[Any, ...],
    limit: int | None,
    temperature: float | None,
    out: Path | None,
    samples: int,
    concurrency: int | None,
    reuse: bool = False,
) -> Any:
    """The evaluation to run; what is quickly refused is refused before a model is merged or loaded."""
    from dataclasses import replace
    from functools import partial

    from verl_multiturn.checkpoints import Found, find
    from verl_multiturn.compose import plain
    from verl_multiturn.eval_folder import check_folder
    from verl_multiturn.eval_records import choose_panel, free_folder
    from verl_multiturn.evaluate import Evaluation
    from verl_multiturn.rollout.episode import Episode
    from verl_multiturn.search.scripted import ScriptedEpisode, one_action_a_turn

    remote, policy = "://" in model, _scripted(model)
    # "small": the model of a recipe with hardware=cpu
    found = Found(model) if remote or policy or model == "small" else find(model)
    env, panel, split, recipe, run, settings = source
    run = run or (None if recipe else found.run)
    config, chosen = _configured(env, panel, recipe, run, settings)
    chosen = chosen or choose_panel(config, run=run, only=split)
    if policy:
        one_action_a_turn(config)
    chosen = replace(chosen, tasks=chosen.tasks[:limit])
    sampling = plain(config.actor_rollout_ref.rollout.val_kwargs)
    sampling |= {} if temperature is None else {"temperature": temperature, "do_sample": temperature > 0}
    check_folder(folder := out or free_folder(chosen), reuse)
    about = {"model": model, "sampling": sampling}
    about |= {} if remote or policy else _learnt_offline(Path(model))
    return Evaluation(
        config=config,
        panel=chosen,
        model=policy or _model(found, remote, config, sampling),
        folder=folder,
        step=found.step,
        samples=samples,
        concurrency=concurrency or (16 if remote else 64),
        about=about | {"panel": chosen.name},
        tell=Ticker(),
        episode=partial(ScriptedEpisode, policy=policy) if policy else Episode,
        reuse=reuse,
    )


def _scripted(model: str) -> Any:
    """The policy of the names random and expert (expert:0.3: with so many random actions); else None."""
    from verl_multiturn.search.scripted import EXPERT, Scripted, scripted

    return Scripted(0.0) if model == EXPERT else scripted(model)


def _learnt_offline(folder: Path) -> dict[str, Any]:
    """Of a model that `verl-multiturn offline` wrote: how, as tables tell its methods apart."""
    from verl_multiturn.errors import intact

    report = folder / "offline.json"
    if not report.is_file():
        return {}
    with intact(report, "write the model anew or remove the file"):
        found = dict(json.loads(report.read_text(encoding="utf-8")))
    return {"offline": {key: found.get(key) for key in ("actor", "v_target", "model")}}


def _configured(
    env: str | None, panel: str | None, recipe: str | None, run: Path | None, settings: list[str]
) -> tuple[Any, Any]:
    """The configuration, and the panel if one was named: its tasks bring their environment."""
    from verl_multiturn.compose import plain
    from verl_multiturn.panel import load_panel
    from verl_multiturn.play_settings import check_panel
    from verl_multiturn.play_settings import settings as of

    if env and ".py" in env:  # the record is read from other folders, too
        file, _, name = env.partition(":")
        env = f"{Path(file).resolve()}:{name}" if name else str(Path(file).resolve())
    if panel is None:
        config = of(env, None, recipe, run, settings)
        if run is not None:
            announce(plain(config.multiturn), f"{run}/config.yaml")
        return config, None
    chosen = load_panel(panel)
    announce([chosen.env, dict(chosen.kwargs)], f"panel {panel}")
    check_panel(chosen, env, {})
    config = of(chosen.env, None, recipe, run, settings)
    config.multiturn.env_kwargs = dict(chosen.kwargs)  # its tasks are others with any other keywords
    return config, chosen


def _model(found: Any, remote: bool, config: Any, sampling: dict[str, Any]) -> Any:
    from omegaconf import OmegaConf

    if remote:
        from verl_multiturn.endpoint import Endpoint

        return Endpoint(found.path, sampling)
    from verl_multiturn.checkpoints import merged
    from verl_multiturn.play_settings import model_folder
    from verl_multiturn.samplers import Sampler

    template = OmegaConf.select(config, "actor_rollout_ref.model.custom_chat_template")
    return Sampler(model_folder(config, merged(found)), sampling, template)
