"""`verl-multiturn doctor`: is this machine set up, and what would this recipe really do?

Without a recipe: packages, known breakages, devices, memory, disk. With one: every refusal, not only
the first; keys without effect; panels, batch arithmetic, budgets; and one episode with its mask.
"""

from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_multiturn import doctor_budget, doctor_dead, doctor_recipe, doctor_setup
from verl_multiturn.doctor_report import Line, Report
from verl_multiturn.panel import Panel


def examine(
    recipe: str | None = None,
    overrides: list[str] | None = None,
    imports: bool = True,
    sample: bool = True,
) -> Report:
    """Look at the set-up and, if a recipe is named, at what it would do here.

    Args:
        recipe: name of a recipe.
        overrides: hydra overrides, as for a run.
        imports: really import transformers, vllm and verl, in another process (half a minute).
        sample: play one episode through the rollout and verl's rows (imports verl here).

    Raises:
        ValueError: no recipe of that name.
    """
    report = Report()
    composed = None if recipe is None else doctor_recipe.composed(recipe, overrides or [])
    run = Path.cwd()
    if composed is not None and composed.config is not None:
        given = OmegaConf.select(composed.config, "multiturn.run", throw_on_missing=False)
        run = Path(given or run)
    report.extend(doctor_setup.lines(run, imports))
    if composed is not None:
        report.extend(composed.lines)
        if composed.config is not None:
            _recipe(report, composed.config, composed.accepted, sample)
    return report


def _recipe(report: Report, config: DictConfig, accepted: bool, sample: bool) -> None:
    """What a composed recipe would do; sizes are only told of one that is accepted."""
    _guard(report, "keys without effect", lambda: doctor_dead.lines(config, doctor_recipe.base()))
    if not accepted:
        return
    panels: dict[str, Panel] = {}
    _guard(report, "panels", lambda: doctor_recipe.panels(config, panels))
    _guard(report, "batch and budgets", lambda: doctor_budget.lines(config))
    _guard(report, "model", lambda: doctor_recipe.model(config))
    if sample and panels:
        from verl_multiturn import doctor_sample

        _guard(report, "one sample", lambda: doctor_sample.lines(config, panels["train"], report))


def _guard(report: Report, part: str, look: Callable[[], list[Line]]) -> None:
    """A check that breaks is a finding, not the end of the report."""
    try:
        report.extend(look())
    except Exception as error:  # an environment's own code runs in there: it may raise anything
        sentence = " ".join(str(error).split()) or type(error).__name__
        report.extend([Line(part, "FAIL", part.split()[-1], sentence)])
