"""The command fit-q: a Q model from preference pairs. Registered in `cli`."""

from pathlib import Path
from typing import Annotated

import typer


def fit_q(
    pairs: Annotated[Path, typer.Argument(help="File of pairs, written by the command pairs.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys of multiturn.fit, such as lr=1e-4 lora_rank=16."),
    ] = None,
    model: Annotated[str, typer.Option(help="Hugging Face folder or name to start from.")] = ...,  # type: ignore[assignment]
    out: Annotated[Path, typer.Option(help="New folder of the Q model.")] = Path("q_model"),
) -> None:
    """Fit a Q model by DPO on the tokens of one turn; the best weights on held-out pairs are kept."""
    from verl_multiturn.cli_run import key_values
    from verl_multiturn.search.fit import fit
    from verl_multiturn.search.fit_data import FitConfig

    config = FitConfig.of(key_values(settings or [], "lr=1e-4"))
    kept = fit(pairs, model, out, config, typer.echo)
    typer.echo(f"wrote {out}: the weights of update {kept['update']:.0f}")
