"""What follows from a composed configuration; every refusal is one sentence.

Nothing here imports torch, ray or verl: a wrong configuration is refused in a second.
"""

from pathlib import Path

from omegaconf import DictConfig, open_dict

from verl_multiturn.algorithms import find
from verl_multiturn.compose import plain
from verl_multiturn.contradictions import check_choices, check_step
from verl_multiturn.filtering import group_filter
from verl_multiturn.limits import check_values
from verl_multiturn.methods import ACTOR_ALGORITHMS, SEARCH, TOKEN_ALGORITHMS, VERL_ALGORITHMS
from verl_multiturn.panel import ALSO


def prepare(config: DictConfig) -> DictConfig:
    """Derive what follows from `multiturn.algorithm`, check what can be checked before a process starts.

    Raises:
        ValueError: a contradiction; the sentence says what to change.
    """
    settings = config.multiturn
    check_values(config)
    check_choices(config)
    _derive_algorithm(config)
    with open_dict(config):
        if settings.algorithm == "q_advantage":
            settings.q_advantage.q_model = str(Path(settings.q_advantage.q_model).expanduser().resolve())
        path, _, name = settings.env.partition(":")
        if path.endswith(".py"):
            settings.env = f"{Path(path).resolve()}:{name}" if name else str(Path(path).resolve())
        settings.run = str(Path(settings.run).resolve())
        if settings.also:
            panels = ("val", *(f"{ALSO}{name}" for name in settings.also))
            config.data.val_files = [f"{settings.run}/panels/{panel}.json" for panel in panels]
    check_step(config)
    rule = group_filter(plain(settings.filter))
    if rule.refills:
        # verl's DAPO refill; its "reward" is a row's score, penalties included.
        with open_dict(config):
            metric = "return" if rule.returns == "task" else "reward"
            config.algorithm.filter_groups = {"enable": True, "metric": metric}
    return config


def _derive_algorithm(config: DictConfig) -> None:
    """`multiturn.algorithm` decides verl's estimator and critic; a contradiction is refused."""
    settings, name = config.multiturn, config.multiturn.algorithm
    if name == SEARCH:
        config.critic.enable = False
        return
    estimator = VERL_ALGORITHMS.get(name, name)
    given = config.algorithm.adv_estimator
    if estimator is None:
        if given is None:
            raise ValueError(
                "multiturn.algorithm=verl needs algorithm.adv_estimator, e.g. reinforce_plus_plus"
            )
    elif given not in (None, estimator):
        raise ValueError(
            f"algorithm.adv_estimator={given} contradicts multiturn.algorithm={name}: set the latter only"
        )
    else:
        config.algorithm.adv_estimator = estimator
    if name in ("ppo", "verl") and settings.row != "trajectory":
        raise ValueError(
            f"multiturn.algorithm={name} with multiturn.row=turn would score every turn as an episode of its "
            "own: use multiturn.row=trajectory, or one of grpo, rloo, reinforce, turn_gae, gigpo"
        )
    # The values of vineppo come from rollouts, those of archer from its own critic (verl's is its baseline),
    # those of q_advantage from a Q model.
    others = (*VERL_ALGORITHMS, *TOKEN_ALGORITHMS, *ACTOR_ALGORITHMS, "vineppo")
    own = name not in others and "value" in find(name).needs
    critic = own or name in TOKEN_ALGORITHMS or config.algorithm.adv_estimator == "gae"
    critic = critic or (name == "archer" and settings.archer.token_baseline)
    if config.critic.enable not in (None, critic):
        raise ValueError(
            f"critic.enable={config.critic.enable} contradicts multiturn.algorithm={name}, "
            f"which {'needs a critic' if critic else 'has none'}: leave it out"
        )
    config.critic.enable = critic
    if critic and config.critic.model.path != config.actor_rollout_ref.model.path:
        if str(config.critic.model.path).startswith("~/models/"):  # verl's placeholder
            config.critic.model.path = config.actor_rollout_ref.model.path


def check_hardware(config: DictConfig, cuda: bool) -> None:
    """Refuse a run on GPUs where there is none, and name the switch."""
    if config.trainer.device != "cpu" and not cuda:
        raise ValueError(
            "this recipe is for GPUs and none was found: add hardware=cpu for a real run on this machine "
            "with the small default model"
        )


def without_flash_attention(config: DictConfig, installed: bool) -> None:
    """Fall back to PyTorch's attention where flash-attn is not installed."""
    model = config.actor_rollout_ref.model
    if installed or "attn_implementation" in model.override_config:
        return
    for part in (config.actor_rollout_ref.model, config.critic.model):
        with open_dict(part):
            part.override_config.setdefault("attn_implementation", "sdpa")
            part.use_remove_padding = False
    if config.critic.enable and config.trainer.device != "cpu":
        raise ValueError(
            "verl's critic needs flash-attn on a GPU: install it as README says (extra `flash`), or use an "
            "algorithm without a critic"
        )
