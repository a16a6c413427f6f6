"""The commands search and pairs: trees over a panel's tasks, and what they prefer. Registered in `cli`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from verl_multiturn.cli_eval import Ticker


def search(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]...",
            help="A recipe whose prompts and limits are used; overrides, such as multiturn.search.preset=...",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the trees; the same again goes on with it.")] = Path(
        "trees"
    ),
    model: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face folder, checkpoint of verl, run folder, small, http://host:port/v1#name, "
            "expert, expert:SHARE (of random actions, default 0.5) or random; default: the recipe's."
        ),
    ] = None,
    env: Annotated[
        str | None, typer.Option(help="Environment; default: the panel's, run's, recipe's.")
    ] = None,
    panel: Annotated[
        str | None, typer.Option(help="Name or file; default: the run's or recipe's training tasks.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Recorded run whose prompts are used.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first tasks of the panel.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Of the candidates; default: that of training.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the searches; default: multiturn.seed.")] = None,
    trees: Annotated[
        int | None, typer.Option(min=1, help="Trees at a time; default: 64, endpoint 16.")
    ] = None,
    q_model: Annotated[
        str | None,
        typer.Option(
            help="Folder of a Q model: its values are the prior of the candidates, by "
            "multiturn.search.prior (visits or puct; default with it: puct)."
        ),
    ] = None,
) -> None:
    """Grow a search tree for each task; what a killed one has finished is kept."""
    given = settings or []
    recipe = given[0] if given and "=" not in given[0] else None
    overrides = given[1:] if recipe else given
    config, chosen = _configured(env, panel, recipe, run, overrides, limit)
    sampling = _sampling(config, temperature)
    name = model or _own(config)
    from verl_multiturn.compose import plain
    from verl_multiturn.search.collect import Collection
    from verl_multiturn.search.prior import prior_rule, prior_value

    block = config.multiturn.search
    block.prior = prior_rule(plain(block), q_model, "--q-model FOLDER")
    collection = Collection(
        config=config,
        panel=chosen,
        model=_model(name, config, sampling),
        name=name,
        folder=out,
        sampling=sampling,
        seed=config.multiturn.seed if seed is None else seed,
        trees=trees or (16 if "://" in name else 64),
        value=prior_value(q_model),
        q_model=q_model,
        tell=Ticker(),
    )
    typer.echo(f"{name} on {chosen.name}: {len(chosen.tasks)} trees, recording to {out}")
    collection.run()
    typer.echo(_summary(collection))


def pairs(
    trees: Annotated[Path, typer.Argument(help="Folder that search wrote.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Keys of multiturn.pairs, such as win=argmax min_gap=0.1."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="New file of pairs, one a line.")] = Path("pairs.jsonl"),
    form: Annotated[
        str, typer.Option("--format", help="own, which fit-q reads, or trl: prompt, chosen, rejected.")
    ] = "own",
) -> None:
    """Write the preference pairs of search trees: what a Q model is fitted to."""
    from verl_multiturn.cli_run import key_values
    from verl_multiturn.search.pair_files import write_pairs

    counts = write_pairs(trees, out, key_values(settings or []), form)
    typer.echo(f"{counts}; wrote {out}")


def _configured(
    env: str | None,
    panel: str | None,
    recipe: str | None,
    run: Path | None,
    overrides: list[str],
    limit: int | None,
) -> tuple[Any, Any]:
    """The configuration and the tasks; training tasks leave out those of the other panels."""
    from dataclasses import replace

    from omegaconf import open_dict

    from verl_multiturn.cli_eval import _configured as of
    from verl_multiturn.tasks import training_tasks

    config, chosen = of(env, panel, recipe, run, overrides)
    if chosen is None:
        with open_dict(config):
            chosen = training_tasks(config.multiturn, limit)
    return config, replace(chosen, tasks=chosen.tasks[:limit])


def _sampling(config: Any, temperature: float | None) -> dict[str, Any]:
    """As training samples: `actor_rollout_ref.rollout`."""
    from omegaconf import OmegaConf

    keys = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    found = {key: OmegaConf.select(config, f"actor_rollout_ref.rollout.{key}") for key in keys}
    sampling = {key: keys[key] if value is None else value for key, value in found.items()}
    sampling |= {} if temperature is None else {"temperature": temperature}
    return sampling | {"do_sample": sampling["temperature"] > 0}


def _own(config: Any) -> str:
    from omegaconf import OmegaConf

    path = OmegaConf.select(config, "actor_rollout_ref.model.path")
    if path is None:
        raise ValueError(
            "no model: give --model (a folder, http://host:port/v1#name, expert or random), or a recipe"
        )
    return str(path)


def _model(name: str, config: Any, sampling: dict[str, Any]) -> Any:
    from verl_multiturn.checkpoints import Found, find
    from verl_multiturn.cli_eval import _model as of
    from verl_multiturn.search.scripted import scripted

    if (policy := scripted(name)) is not None:
        return policy
    remote = "://" in name
    return of(Found(name) if remote or name == "small" else find(name), remote, config, sampling)


def _summary(collection: Any) -> str:
    """What was done, and what it cost."""
    progress, totals = collection.progress, collection.totals
    new = progress.done - progress.before
    failed = (
        f"{progress.failed} trees failed: see {collection.folder}/failures.jsonl; " if progress.failed else ""
    )
    there = f" ({progress.before} were there)" if progress.before else ""
    return (
        f"{failed}{progress.done} of {progress.total} trees{there}, {progress.solved} of {new} new ones "
        f"solved: {totals['proposals']:.0f} calls, {totals['prompt_tokens']:.0f} prompt tokens, "
        f"{totals['tokens']:.0f} generated tokens, {totals['env_steps']:.0f} environment steps, "
        f"{totals['seconds']:.0f} s of all trees"
    )
