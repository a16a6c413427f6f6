"""A recorded run as one static HTML page: curves, trajectories turn by turn, groups and anchor groups.

The page holds everything it needs, a step's trajectories in an element of their own that is read when the
step is opened. Recorded texts stand in it as escaped JSON and are shown as text.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from verl_multiturn import run_files
from verl_multiturn.errors import unknown
from verl_multiturn.runs import Run
from verl_multiturn.view_curves import curves, metric_table
from verl_multiturn.view_data import TRAJECTORY_FIELDS, TURN_FIELDS, Step, embeddable, pack_step
from verl_multiturn.view_page import page, refuse_foreign
from verl_multiturn.view_pieces import token_pieces
from verl_multiturn.view_scores import Scorer

MAX_BYTES = 300_000_000  # more than a browser opens with ease
TOKENS_BYTES = 50_000_000  # tokens are left out of larger pages, unless asked for
SCRIPTS = ("dom.js", "data.js", "curves.js", "credit.js", "reader.js", "side.js", "state.js", "page.js")


class View(NamedTuple):
    """A page that was written."""

    path: Path
    size: int  # bytes
    trajectories: int
    tokens: bool  # whether it holds token ids and log-probs


def build_view(
    run: str | Path,
    out: str | Path | None = None,
    steps: Sequence[int] | None = None,
    last: int | None = None,
    split: str | None = None,
    tokens: bool | None = None,
    algorithms: Sequence[str] | None = None,
) -> View:
    """Write the page of a recorded run.

    Args:
        run: the run's folder.
        out: the page; default: view.html in the run's folder. An earlier page of ours is replaced.
        steps: only these steps.
        last: only the last steps of each split, this many.
        split: only this split.
        tokens: embed token ids and log-probs; None: where the page stays below 50 MB.
        algorithms: whose advantages stand beside the recorded ones; None: all that are registered.

    Raises:
        ValueError: no recorded run, nothing of it chosen, an unknown algorithm, a record that cannot be
            shown, a page above 300 MB, or a file at `out` that is not ours. Nothing is written then.
    """
    recorded = Run(run)
    path = recorded.folder / "view.html" if out is None else Path(out)
    refuse_foreign(path)
    chosen = _choose(recorded, steps, last, split)
    config = _config(recorded)
    scorer = Scorer(recorded, algorithms)
    packed, embedded = _pack(recorded.folder, chosen, tokens, scorer)
    meta = embeddable(_meta(recorded, config, packed, embedded) | {"algorithms": scorer.names})
    title = recorded.folder.absolute().name
    elements = _elements(meta, packed, embedded)
    run_files.write_atomically(path, page(title, "page.html", SCRIPTS, elements))
    return View(path, path.stat().st_size, sum(step.size for step in packed), embedded)


def parse_steps(text: str) -> list[int]:
    """The steps of "1,5,30"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of steps, such as 1,5,30") from None


def _choose(
    run: Run, steps: Sequence[int] | None, last: int | None, split: str | None
) -> list[tuple[str, int]]:
    """(split, step) of what is shown, by split, then step."""
    if steps is not None and last is not None:
        raise ValueError("steps and last exclude each other")
    if last is not None and last < 1:
        raise ValueError(f"last must be at least 1, not {last}")
    try:
        recorded = {name: run.steps(name) for name in run.splits()}
    except ValueError as error:
        raise ValueError(f"{run.folder} holds trajectory files not named by a step: {error}") from error
    if not recorded:
        raise ValueError(f"{run.folder} has no recorded trajectories")
    if split is not None:
        if split not in recorded:
            raise unknown("split", split, recorded)
        recorded = {split: recorded[split]}
    for step in steps or ():
        if not any(step in some for some in recorded.values()):
            raise unknown("step", step, sorted(set().union(*recorded.values())))
    return [
        (name, step)
        for name, some in recorded.items()
        for step in (some if last is None else some[-last:])
        if steps is None or step in steps
    ]


def _pack(
    folder: Path, chosen: Sequence[tuple[str, int]], tokens: bool | None, scorer: Scorer
) -> tuple[list[Step], bool]:
    """Pack the chosen steps, newest first, until they are too much; and whether tokens are embedded."""
    packed: dict[tuple[str, int], Step] = {}
    size = spare = 0
    for key in sorted(chosen, key=lambda one: -one[1]):
        fits = size + spare <= TOKENS_BYTES
        step = pack_step(folder, *key, tokens=fits if tokens is None else tokens, score=scorer)
        size += len(step.data) + (len(step.tokens) if tokens else 0)
        spare += 0 if tokens else len(step.tokens)
        if size > MAX_BYTES:
            splits = len({split for split, _ in chosen})
            last = MAX_BYTES * (len(packed) + 1) // size // splits
            fewer = f"choose fewer steps, e.g. --last {last}" if last else "choose one split with --split"
            without = ", or leave the tokens out with --no-tokens" if tokens else ""
            raise ValueError(f"the page would be larger than {MAX_BYTES // 10**6} MB; {fewer}{without}")
        packed[key] = step
    embedded = size + spare <= TOKENS_BYTES if tokens is None else tokens
    return [packed[key] for key in chosen], embedded and any(step.tokens for step in packed.values())


def _meta(run: Run, config: Any, packed: Sequence[Step], tokens: bool) -> dict[str, Any]:
    """What the page knows from the start; the steps follow, each to be parsed when it is opened."""
    metrics = _metrics(run)
    algorithm = OmegaConf.select(config, "multiturn.algorithm")
    env = OmegaConf.select(config, "multiturn.env")
    gamma = OmegaConf.select(config, f"multiturn.{algorithm}.gamma") if algorithm else None
    ids = frozenset[int]().union(*(step.token_ids for step in packed)) if tokens else ()
    model = OmegaConf.select(config, "actor_rollout_ref.model.path")
    places = sorted(run.folder.glob("checkpoints/global_step_*/actor/huggingface"))
    places += [Path(str(model)).expanduser()] if model else []
    return {
        "name": run.folder.absolute().name,
        "env": env,
        "algorithm": algorithm,
        "seed": OmegaConf.select(config, "multiturn.seed"),
        "gamma": gamma if isinstance(gamma, int | float) else 1.0,
        "failures": len(run.failures),
        "trajectory_fields": TRAJECTORY_FIELDS,
        "turn_fields": TURN_FIELDS,
        "steps": [{"split": step.split, "step": step.step, "size": step.size} for step in packed],
        "tokens": tokens,
        "pieces": token_pieces(places, ids),
        "curves": curves(packed, metrics, env),
        "metrics": metric_table(metrics),
    }


def _config(run: Run) -> Any:
    try:
        return OmegaConf.create(run.config)
    except (yaml.YAMLError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{run.folder / 'config.yaml'} cannot be read: {reason}") from error


def _metrics(run: Run) -> dict[int, dict[str, float]]:
    try:
        table = run.metrics
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        message = f"{run.folder / 'metrics.jsonl'} does not hold the metrics of a run: {error!r}"
        raise ValueError(message) from error
    rows = zip(table.index, table.to_dict("records"), strict=True)
    return {int(step): {str(k): v for k, v in row.items() if v == v} for step, row in rows}  # not nan


def _elements(meta: bytes, packed: Sequence[Step], tokens: bool) -> Iterator[tuple[str, bytes]]:
    yield "meta", meta
    for n, step in enumerate(packed):
        yield f"step-{n}", step.data
        if tokens and step.tokens:
            yield f"tokens-{n}", step.tokens
