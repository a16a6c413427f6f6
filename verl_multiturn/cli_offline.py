"""The command offline: learn from what was recorded, without playing. Registered in `cli`."""

from pathlib import Path
from typing import Annotated, Any

import typer


def offline(
    source: Annotated[Path, typer.Argument(help="Folder of a recorded run, or a JSONL file of dialogues.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="critic.lr=1e-4, actor.epochs=3, weights.beta=2; else of the run."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Hugging Face folder to start from, or small; default: the run's.")
    ] = None,
    out: Annotated[Path, typer.Option(help="New folder: model, critic, report.")] = Path("runs/offline"),
    actor: Annotated[str, typer.Option(help="awr (with an IQL critic), filtered_bc or bc.")] = "awr",
    preset: Annotated[str, typer.Option(help="Settings of the critic.")] = "offline",
    recipe: Annotated[str | None, typer.Option(help="Recipe whose prompts and formats are used.")] = None,
    split: Annotated[str, typer.Option(help="Of a run: whose trajectories.")] = "train",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Characters of a state that the critic reads, from its end.")
    ] = None,
) -> None:
    """Fit a critic (IQL) to recorded dialogues and let a model imitate them by its advantages (AWR)."""
    from verl_multiturn.critic.offline import OfflineConfig
    from verl_multiturn.evaluate import check_new
    from verl_multiturn.offline import Job, changed, run

    check_new(out)
    blocks, overrides = _by_block(settings or [])
    job = Job(
        source=source,
        model=model,
        out=out,
        weights=changed(OfflineConfig(actor=actor), blocks["weights"], "weights"),  # type: ignore[arg-type]
        critic=blocks["critic"],
        actor=blocks["actor"],
        overrides=overrides,
        preset=preset,
        recipe=recipe,
        split=split,
        limit=limit,
    )
    run(job, typer.echo)


def _by_block(pairs: list[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """`block.key=value` words by our blocks critic, actor and weights, and all other words."""
    from verl_multiturn.cli_run import key_values

    blocks: dict[str, dict[str, Any]] = {"critic": {}, "actor": {}, "weights": {}}
    rest = []
    for pair in pairs:
        block, dot, _ = pair.partition("=")[0].partition(".")
        if dot and block in blocks:
            blocks[block] |= key_values([pair.partition(".")[2]], "critic.lr=1e-4")
        else:
            rest.append(pair)
    return blocks, rest
