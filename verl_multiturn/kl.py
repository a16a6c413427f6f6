"""VinePPO's KL (Kazemnejad et al. 2024, arXiv:2410.01679): summed over a response, mean over responses.

verl 0.9.1 aggregates the KL as it does the policy's loss. On its mean over tokens a coefficient c of the
paper is c times the mean number of trained tokens, which changes from update to update:

    c · 1/N Σ_i Σ_t k_it  =  (c · 1/N Σ_i T_i) · Σ_i Σ_t k_it / Σ_i T_i

The loss here is verl's own with that coefficient, for each mini-batch that of its own responses.
"""

import copy
from functools import partial
from typing import Any

from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss


def summed_kl_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """verl's `ppo_loss`, its `kl_loss_coef` times the mini-batch's trained tokens over its rows.

    Args:
        config: verl's ActorConfig, with loss_agg_mode=token-mean; `kl_loss_coef` is c.
        model_output: of a micro-batch.
        data: likewise; carries `batch_num_tokens` and `global_batch_size` of its mini-batch over all devices.
            A masked padding row counts as a row, as in verl's own means over sequences.
        dp_group: as `ppo_loss` has it.

    Returns:
        The loss, and metrics, of which `kl_coef` is the coefficient that was used.
    """
    scaled = copy.copy(config)
    length = data["batch_num_tokens"] / data["global_batch_size"]
    # Past verl's guard of frozen fields: this copy lives for one call.
    object.__setattr__(scaled, "kl_loss_coef", config.kl_loss_coef * length)
    return ppo_loss(scaled, model_output, data, dp_group)


def set_kl(workers: Any, actor: Any) -> None:
    """Have the actor's workers take `summed_kl_loss` in the place of verl's.

    Args:
        workers: verl's group of actor workers.
        actor: the run's `actor_rollout_ref.actor`.
    """
    workers.set_loss_fn(partial(summed_kl_loss, config=omega_conf_to_dataclass(actor)))
