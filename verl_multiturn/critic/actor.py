"""ArCHer's critic as a run has it: the critic, and what its replayed states need to be asked about again.

`CriticActor` is a plain class. `start` puts it into a Ray actor, on a share of a GPU or on the CPU; whatever
ends that actor ends the run: nothing is started again from zero.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from verl_multiturn.checkpoints import EARLIER
from verl_multiturn.columns import Floats
from verl_multiturn.critic.arrays import Arrays, read_arrays, under, write_arrays
from verl_multiturn.critic.config import ArcherConfig, CriticConfig
from verl_multiturn.critic.replay import Transition, pack_json, unpack_json
from verl_multiturn.critic.utterance import UtteranceCritic
from verl_multiturn.errors import RunStopped, intact

FILE = "utterance_critic.npz"  # beside verl's own files in the folder of a checkpoint
START_SECONDS = 600.0


class CriticActor:
    """The critic with the prompts of its states, and the policy's fresh utterances at them.

    Args:
        critic: see CriticConfig.
        archer: see ArcherConfig.
        device: of the networks.

    Attributes:
        prompts: state -> the tokens that the policy read there, for every state of the replay.
        fresh: state -> utterances of policy `version`.
    """

    def __init__(self, critic: CriticConfig, archer: ArcherConfig, device: str = "cpu") -> None:
        self.config, self.archer, self.device = critic, archer, device
        self.prompts: dict[str, list[int]] = {}
        self.fresh: dict[str, list[str]] = {}
        self.version = 0
        # Of its own: a draw must not change what `wanted` has said that `train` will draw.
        self._rng = np.random.default_rng([critic.seed, 1])

    @cached_property
    def critic(self) -> UtteranceCritic:
        """Built at its first use: what goes wrong is then said by a call, not by a dead actor."""
        return UtteranceCritic(self.config, self.device)

    def size(self) -> int:
        """Transitions that can be drawn."""
        return len(self.critic.replay)

    def add(self, transitions: Sequence[Transition], prompts: Mapping[str, list[int]]) -> None:
        """Put a step's transitions into the replay, with the prompts of their states."""
        self.critic.add(transitions)
        self.prompts |= prompts
        alive = {row.state for row in self.critic.replay.rows}
        self.prompts = {state: ids for state, ids in self.prompts.items() if state in alive}
        self.fresh = {state: said for state, said in self.fresh.items() if state in alive}

    def wanted(self, version: int) -> tuple[dict[str, list[int]], int]:
        """What must be asked before `train`: state -> prompt, where policy `version` was not heard yet.

        Returns:
            The prompts, and how many distinct states `train` will draw.
        """
        if version != self.version:
            self.fresh, self.version = {}, version
        if self.config.v_target != "policy" or self.size() < self.config.min_size:
            return {}, 0
        states = self.critic.upcoming(self.archer.updates)
        return {state: self.prompts[state] for state in states if state not in self.fresh}, len(states)

    def heard(self, utterances: Mapping[str, list[str]]) -> None:
        """What policy `version` said at states of `wanted`."""
        self.fresh |= utterances

    def train(self) -> dict[str, float]:
        """Take the updates of a training step; see `UtteranceCritic.train`.

        Returns:
            Its metrics, "target_lag" (|θ − θ^tgt| / |θ|), and "all_steps" taken since the beginning.
        """
        heard = self.fresh if self.config.v_target == "policy" else None
        found = self.critic.train(self.archer.updates, heard)
        return found | {"target_lag": self.critic.lag(), "all_steps": float(self.critic.steps)}

    def judge(self, states: Sequence[str], actions: Sequence[str]) -> tuple[Floats, Floats]:
        """A(s, a) and V(s) of the online critic, in units of reward_scale. -> (N,), (N,)."""
        V = self.critic.values(states)
        return self.critic.advantage(states, actions), V

    def draw(self, count: int) -> list[tuple[str, list[int]]]:
        """States of the replay, uniformly and with replacement, with their prompts."""
        return [(row.state, self.prompts[row.state]) for row in self.critic.replay.sample(count, self._rng)]

    def save(self, path: str) -> None:
        """Write all of it to one file, which appears when it is complete."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        ids = list(self.prompts.values())
        meta = {"version": self.version, "fresh": self.fresh, "states": list(self.prompts)}
        meta["rng"] = self._rng.bit_generator.state
        mine: Arrays = {
            "meta": pack_json(meta),
            "prompt": np.array([token for one in ids for token in one], np.int64),
            "prompt_ends": np.cumsum([len(one) for one in ids], dtype=np.int64),
        }
        arrays = {f"critic.{name}": x for name, x in self.critic.state_dict().items()}
        write_arrays(path, arrays | {f"actor.{name}": x for name, x in mine.items()})

    def load(self, path: str) -> None:
        """Go on from what `save` wrote, to the bit.

        Raises:
            ValueError: no such file, or of another critic.
        """
        arrays = read_arrays(path)
        with intact(path, EARLIER):
            self.critic.load_state_dict(under("critic", arrays))
            mine = under("actor", arrays)
            meta, ids = unpack_json(mine["meta"]), mine["prompt"].tolist()
            ends = [0, *mine["prompt_ends"].tolist()]
            spans = zip(meta["states"], ends, ends[1:], strict=False)
            self.prompts = {state: ids[start:stop] for state, start, stop in spans}
            self.version, self.fresh = meta["version"], meta["fresh"]
            self._rng.bit_generator.state = meta["rng"]


class RemoteCritic:
    """Calls a `CriticActor` in its Ray actor.

    Args:
        actor: its handle.
        resume: says how to go on when it is gone.
        patience: seconds that a call may take; None: for ever.
    """

    def __init__(self, actor: Any, resume: Callable[[], str], patience: float | None = None) -> None:
        self.actor, self.resume, self.patience = actor, resume, patience

    def __call__(self, method: str, *args: Any) -> Any:
        """The method's result.

        Raises:
            RunStopped: the actor has ended or does not answer, or the method raised; the sentence says how to
                go on.
        """
        import ray

        try:
            return self.within(self.patience, method, *args)
        except ray.exceptions.GetTimeoutError:
            raise RunStopped(
                f"the utterance critic has not answered in {method} for {self.patience:g} s "
                f"(multiturn.phase_timeout): {self.resume()}"
            ) from None

    def within(self, seconds: float | None, method: str, *args: Any) -> Any:
        """The method's result, or Ray's GetTimeoutError after so many seconds; else as a call."""
        import ray

        try:
            return ray.get(getattr(self.actor, method).remote(*args), timeout=seconds)
        except ray.exceptions.GetTimeoutError:
            raise
        except ray.exceptions.RayTaskError as error:
            raise RunStopped(f"the utterance critic, in {method}: {error.cause}") from None
        except ray.exceptions.RayActorError:
            raise RunStopped(
                f"the utterance critic's process ended in {method}, and with it what it learnt since the "
                f"last checkpoint: {self.resume()}"
            ) from None


def start(
    critic: CriticConfig,
    archer: ArcherConfig,
    gpus: float,
    cpus: float,
    resume: Callable[[], str],
    bundles: Any = None,
    patience: float | None = None,
) -> RemoteCritic:
    """A critic in a Ray actor of its own, ready.

    Args:
        critic: see CriticConfig.
        archer: see ArcherConfig.
        gpus: share of a GPU; 0: the CPU.
        cpus: that Ray sets aside.
        resume: see RemoteCritic.
        bundles: placement group whose first bundle has the GPU; verl holds all of them.
        patience: see RemoteCritic.

    Raises:
        RunStopped: the critic cannot be built, or Ray has no room for it.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0}
    if gpus and bundles is not None:
        place = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=0)
        options["scheduling_strategy"] = place
    actor = ray.remote(CriticActor).options(**options).remote(critic, archer, "cuda" if gpus else "cpu")
    remote = RemoteCritic(actor, resume, patience)
    try:
        remote.within(START_SECONDS, "size")
    except ray.exceptions.GetTimeoutError:
        raise RunStopped(
            f"Ray found no room for the utterance critic in {START_SECONDS:g} s: lower "
            f"multiturn.critic.gpus={gpus:g} or multiturn.critic.cpus={cpus:g}"
        ) from None
    return remote
