"""Commands on what was played or is to be played: rescore, curves, replay, play. Registered in `cli`."""

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_multiturn.load import python_files


def rescore(
    run: Annotated[Path, typer.Argument(help="Folder of a recorded run.")],
    algorithms: Annotated[
        str | None, typer.Option(help="Comma-separated names; default: all of them.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Such as 3,10-20; default: all.")] = None,
    split: Annotated[str, typer.Option(help="Whose trajectories.")] = "train",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A keyword: gigpo.gamma=0.9; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file for the advantages, one row a turn.")] = None,
    q_model: Annotated[
        str | None, typer.Option(help="Folder of a Q model: adds Q − V of it as one more column.")
    ] = None,
) -> None:
    """Compute every algorithm's advantages on a run's trajectories, and compare them."""
    from verl_multiturn.rescore import print_rescored
    from verl_multiturn.rescore import rescore as score
    from verl_multiturn.runs import Run

    recorded = Run(run)
    names = None if algorithms is None else [name.strip() for name in algorithms.split(",") if name.strip()]
    chosen = None if steps is None else step_numbers(steps, recorded.steps(split))
    value = None
    if q_model is not None:
        from verl_multiturn.search.q_model import load_q_model
        from verl_multiturn.search.step_value import ModelValue

        value = ModelValue(load_q_model(q_model), "leave_one_out")
    found = score(recorded, names, chosen, keywords_by_name(settings or []), split, value)
    print_rescored(found)
    if out is not None:
        found.turns.to_csv(out, index=False)
        typer.echo(f"wrote {out}")


def curves(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of some.")],
    metric: Annotated[
        list[str] | None, typer.Option(help="NAME of the log or of multiturn/NAME/mean; may be repeated.")
    ] = None,
    x: Annotated[str, typer.Option(help="step, env_steps or tokens.")] = "step",
    last: Annotated[int, typer.Option(min=1, help="How many values the table's means are over.")] = 5,
    out: Annotated[Path | None, typer.Option(help="CSV file for the values, one row each.")] = None,
    png: Annotated[Path | None, typer.Option(help="Where to draw them.")] = None,
) -> None:
    """Compare training runs metric by metric: the seeds of a method together, with 95 % intervals."""
    from verl_multiturn.curves import DEFAULT, draw, summary
    from verl_multiturn.curves import curves as read
    from verl_multiturn.tables.recorded import read_runs

    found = read(read_runs(runs), metric or DEFAULT)
    typer.echo(summary(found, last).to_string(index=False, float_format="{:.3f}".format))
    if out is not None:
        found.to_csv(out, index=False)
    if png is not None:
        draw(found, png, x)
    for path in filter(None, (out, png)):
        typer.echo(f"wrote {path}")


def replay(
    run: Annotated[Path, typer.Argument(help="Folder of a recorded run.")],
    trajectory: Annotated[
        str | None, typer.Argument(help="group/trajectory, or how it unambiguously begins.")
    ] = None,
    step: Annotated[
        str | None, typer.Option(help="Such as 3,10-20, or all; default: all for one, the last for --all.")
    ] = None,
    split: Annotated[str, typer.Option(help="In which splits, such as train,val, or all.")] = "train",
    whole: Annotated[bool, typer.Option("--all", help="Every trajectory of the steps.")] = False,
    env: Annotated[str | None, typer.Option(help="Where the run's environment is now.")] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file for the differences, a row each.")] = None,
) -> None:
    """Play recorded trajectories again; exit code 1 at anything that is not as recorded."""
    from verl_multiturn.replay import environment, find_trajectory, places, read
    from verl_multiturn.replay_report import print_tally, tally
    from verl_multiturn.runs import Run

    if (trajectory is None) != whole:
        raise ValueError("give either a TRAJECTORY (group/trajectory) or --all for whole steps")
    recorded = Run(run)
    splits = recorded.splits() if split == "all" else [name.strip() for name in split.split(",")]
    where = places(recorded, splits, None)
    if step is not None and step != "all":
        where = places(recorded, splits, step_numbers(step, sorted({number for _, number in where})))
    elif step is None and whole:
        where = list(dict(where).items())  # the last step of each split
    records = read(recorded, where) if trajectory is None else [find_trajectory(recorded, trajectory, where)]
    block = recorded.config.get("multiturn") or {}
    announce(block if env is None else block.get("env_kwargs"), f"{run}/config.yaml")
    with closing(environment(recorded, env)) as rebuilt:
        found = tally(rebuilt, records, out, quiet=trajectory is not None)
    print_tally(found)
    if not found.ok:
        raise typer.Exit(1)


def play(
    env: Annotated[
        str | None, typer.Argument(help="As for check-env; may be left out with --run or --recipe.")
    ] = None,
    keywords: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For the environment.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="human, random, expert or model (the default with --model)."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face folder; default: the run's.")] = None,
    run: Annotated[Path | None, typer.Option(help="Recorded run whose prompts the model reads.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe whose prompts the model reads.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Overrides key=value of the run or recipe.")
    ] = None,
    seed: Annotated[str, typer.Option(help="The first task.")] = "0",
    panel: Annotated[str | None, typer.Option(help="Play the tasks of a panel (name or file).")] = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="Default: 1, or the whole panel.")] = None,
    turns: Annotated[
        bool | None, typer.Option("--turns/--no-turns", help="Show every turn; default: up to 3 episodes.")
    ] = None,
) -> None:
    """Play an environment: yourself, at random, by its expert, or with a model."""
    from verl_multiturn.panel import load_panel
    from verl_multiturn.play import Screen, play_tasks, print_summary, tasks

    name = policy or ("model" if model else "human")
    group = None if panel is None else load_panel(panel)
    chosen = tasks(int(seed) if seed.lstrip("-").isdigit() else seed, group, episodes)
    shown = (name == "human" or len(chosen) <= 3) if turns is None else turns
    screen = Screen(turns=shown)
    given = key_values(keywords or [])
    with _player(name, screen, env, given, (model, run, recipe, settings), group) as play_one:
        finished = play_tasks(play_one, chosen, screen)
    print_summary(name, finished, screen)


@contextmanager
def _player(
    policy: str, screen: Any, env: str | None, given: dict[str, Any], source: tuple[Any, ...], panel: Any
) -> Iterator[Any]:
    """What plays a task, for the time of the games."""
    from verl_multiturn import play_settings as of
    from verl_multiturn.compose import plain
    from verl_multiturn.env import make
    from verl_multiturn.play import player, policy_of

    model, run, recipe, overrides = source
    if panel is not None:  # its tasks are only what they are with its own keywords
        of.check_panel(panel, env, given)
        env, given = panel.env, dict(panel.kwargs)
    if run is not None:
        announce(plain(of.settings(env, given, recipe, run, overrides).multiturn), f"{run}/config.yaml")
    if policy == "model":
        from verl_multiturn.model_policy import ModelPlayer
        from verl_multiturn.samplers import Sampler

        config = of.settings(env, given, recipe, run, overrides)
        folder = of.model_folder(config, model)
        sampler = Sampler(folder, plain(config.actor_rollout_ref.rollout.val_kwargs))
        screen.say(f"model {folder}", "dim")
        with closing(ModelPlayer(config, sampler, screen)) as one:
            yield one
        return
    if policy == "human":
        with suppress(ImportError):  # not on every system; lets `input` edit its line
            import readline  # noqa: F401
    chosen = policy_of(policy, screen)
    if run or recipe or overrides or env is None:
        block = of.settings(env, given, recipe, run, overrides).multiturn
        env, given = block.env, plain(block.env_kwargs)
    with closing(make(env, **given)) as made:
        yield player(made, chosen, screen)


def announce(settings: Any, source: str) -> None:
    """Say which Python files a recorded configuration is about to have imported: they are code."""
    for file in python_files(settings):
        typer.echo(f"imports {file}, which {source} names", err=True)


def key_values(pairs: list[str], example: str = "size=4") -> dict[str, Any]:
    """`key=value` words as a dict; values as in YAML, lists and dicts plain, dotted keys nested."""
    from omegaconf import OmegaConf

    from verl_multiturn.compose import plain

    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"{pair!r} is not key=value, such as {example}")
    return {str(key): value for key, value in plain(OmegaConf.from_dotlist(pairs)).items()}


def keywords_by_name(pairs: list[str]) -> dict[str, dict[str, Any]]:
    """`algorithm.key=value` words, by algorithm; an algorithm's name may hold dots itself."""
    found: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        path, equals, value = pair.partition("=")
        name, dot, key = path.rpartition(".")
        if not (equals and dot):
            raise ValueError(f"{pair!r} is not algorithm.key=value, such as gigpo.gamma=0.9")
        found.setdefault(name, {}).update(key_values([f"{key}={value}"]))
    return found


def step_numbers(text: str, recorded: list[int]) -> list[int]:
    """The steps that `3,10-20` names; a range takes those that were recorded."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            raise ValueError(f"{text!r} does not name steps, such as 3,10-20") from None
        inside = [step for step in recorded if low <= step <= high]
        if not inside and dash:
            raise ValueError(f"no step from {low} to {high} was recorded; recorded: {recorded}")
        found += inside if dash else [low]
    return sorted(set(found))
