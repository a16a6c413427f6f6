"""With which configuration and which model `play` plays: a recorded run's, a recipe's, or the defaults."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_multiturn.compose import CONFIG, check_keys, compose, plain
from verl_multiturn.configure import prepare
from verl_multiturn.panel import Panel
from verl_multiturn.runs import Run

PLAIN_BUDGET = 4096  # tokens of a prompt and of a conversation, where no run or recipe gives them


def settings(
    env: str | None = None,
    env_kwargs: dict[str, Any] | None = None,
    recipe: str | None = None,
    run: str | Path | None = None,
    overrides: list[str] | None = None,
) -> DictConfig:
    """The configuration a model is played with: a recorded run's, a recipe's, or our defaults.

    Args:
        env: replaces the configuration's environment.
        env_kwargs: on top of its keywords; alone, where `env` is another environment.
        recipe: name of a recipe, composed as training composes it.
        run: folder of a recorded run.
        overrides: key=value, for hydra where a recipe is given, else plain keys.

    Raises:
        ValueError: recipe and run together, an unknown recipe or key, no environment.
    """
    given = overrides or []
    if recipe and run:
        raise ValueError("give either a recipe or a run: each brings a whole configuration")
    if recipe:
        config = compose(recipe, given)
    else:
        base = OmegaConf.create(Run(run).config) if run else _defaults()
        config = OmegaConf.merge(base, OmegaConf.from_dotlist(given))  # type: ignore[assignment]
        check_keys(config, base)
    block = config.multiturn
    name = env or OmegaConf.select(config, "multiturn.env", throw_on_missing=False)
    if name is None:
        raise ValueError("no environment: name one, or a run or recipe that has one")
    with open_dict(config):
        same = name == OmegaConf.select(config, "multiturn.env", throw_on_missing=False)
        block.env_kwargs = (plain(block.env_kwargs) if same else {}) | (env_kwargs or {})
        block.env = name
    return prepare(config) if recipe else config


def check_panel(panel: Panel, env: str | None, env_kwargs: dict[str, Any]) -> None:
    """Refuse to play a panel's tasks in another environment, or with other keywords, than its own."""
    if env not in (None, panel.env) or env_kwargs not in ({}, dict(panel.kwargs)):
        raise ValueError(
            f"panel {panel.name} is of {panel.env} with {dict(panel.kwargs)}, not of {env or panel.env} with "
            f"{env_kwargs}: leave the environment and its keywords out"
        )


def _defaults() -> DictConfig:
    """Our base group alone: verl need not be installed to watch a model play."""
    block = OmegaConf.load(CONFIG / "multiturn.yaml").multiturn
    block.run = ""  # names the experiment, which there is none of
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
    model = {"model": {"path": None}, "rollout": {"val_kwargs": sampling}}
    data = {"max_prompt_length": PLAIN_BUDGET, "max_response_length": PLAIN_BUDGET}
    return OmegaConf.create({"multiturn": block, "data": data, "actor_rollout_ref": model})


def model_folder(config: DictConfig, model: str | None = None) -> str:
    """The model to load: the one given, else the configuration's (the small one is built if need be).

    Raises:
        ValueError: none is named, or the folder has no weights that transformers reads.
    """
    path = model or OmegaConf.select(config, "actor_rollout_ref.model.path")
    if path is None:
        raise ValueError(
            "no model: give a Hugging Face folder with --model, or a --run or --recipe that has one"
        )
    if path == "small":
        from verl_multiturn import small_model

        return str(small_model.build(config))
    folder = Path(path).expanduser()
    if not folder.exists():
        if folder.is_absolute() or str(path).startswith("."):
            raise ValueError(f"no model folder {folder}")
        return str(path)  # a name for transformers to find, in its cache or on the hub
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise ValueError(_no_weights(folder))
    return str(folder)


def _no_weights(folder: Path) -> str:
    for place in (folder, folder / "actor", folder.parent):
        if list(place.glob("model_world_size_*.pt")):
            return (
                f"{place} holds verl's checkpoint, not a Hugging Face model; convert it: python -m "
                f"verl.model_merger merge --backend fsdp --local_dir {place} --target_dir FOLDER"
            )
    return f"{folder} has no weights (*.safetensors or *.bin)"
