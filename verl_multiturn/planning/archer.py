"""What ArCHer asks of GPUs beside the actor: its critic of utterances, and utterances asked of the policy.

arXiv 2402.19446, section 3: in an iteration the critic takes so many optimizer steps; each reads the states
and utterances of a batch, and the target network reads those of the targets. All weights are float32.
"""

from dataclasses import dataclass
from typing import Any

from verl_multiturn.planning import formulas as of
from verl_multiturn.planning.formulas import Gpu, Rates, Shape

FLOAT32 = 1 / 16  # of the data sheets' bfloat16: 19.5 of 312 TFLOP/s on an A100, 67 of 989 on an H100


@dataclass(frozen=True)
class Archer:
    """Of one step.

    Attributes:
        encoder: of the critic; None: one of 0.1 million parameters or none, or on the CPU: not counted.
        updates, batch, micro_batch: optimizer steps, transitions of each, of a forward pass.
        state, utterance: tokens that the encoder reads of each.
        reads: states and utterances that the targets of a transition read.
        asked: utterances asked of the policy: for the targets of V, and for the actor (in silico).
        judged: utterances whose advantage is taken.
        inflight: utterances asked at the same time.
    """

    encoder: Shape | None
    updates: int
    batch: int
    micro_batch: int
    state: float
    utterance: float
    reads: tuple[float, float]
    asked: float
    judged: float
    inflight: int

    def held(self) -> float:
        """Bytes on its GPU all the time: weights, gradients, two moments, and the target's weights."""
        if self.encoder is None:
            return 0.0
        p = of.parameters(self.encoder)
        return sum(of.state_bytes(p, p, 1)) + of.FP32 * p

    def activations(self) -> float:
        """Bytes of a micro-batch's forward pass, float32, nothing recomputed."""
        if self.encoder is None:
            return 0.0
        tokens = self.micro_batch * (self.state + self.utterance)
        return of.FP32 / of.BF16 * of.activation_bytes(self.encoder, tokens, checkpointing=False)

    def seconds(self, gpu: Gpu, rates: Rates) -> float:
        """Of the critic's updates and of judging, on one GPU in float32; embeddings are looked up."""
        if self.encoder is None:
            return 0.0
        p = self.encoder.layers * of.layer_parameters(self.encoder)
        states, utterances = self.reads
        targets = states * self.state + utterances * self.utterance
        transition = of.update_flops(p, self.state + self.utterance, checkpointing=False)
        transition += of.forward_flops(p, targets)
        flops = self.updates * self.batch * transition
        flops += of.forward_flops(p, self.judged * (2 * self.state + self.utterance))  # A = Q − V, apart
        return flops / (gpu.flops * FLOAT32 * rates.compute)


def reads(v_target: str, utterances: int) -> tuple[float, float]:
    """States and utterances that the targets of one transition read; see `critic.utterance`.

    Q's target reads the next state; V's the state again, and fresh utterances (policy) or the replayed one.
    """
    return {"mc": (0.0, 0.0), "policy": (2.0, float(utterances))}.get(v_target, (2.0, 1.0))


def asked(archer: Any, critic: Any) -> float:
    """Utterances asked in a step with a full replay: M at each distinct state drawn, and one in silico.

    Args:
        archer: of `critic.config.archer_config`.
        critic: of `critic.config.critic_config`.
    """
    drawn = of.distinct_draws(archer.updates * critic.batch, critic.capacity)
    for_values = archer.utterances * drawn if critic.v_target == "policy" else 0.0
    return for_values + (archer.states if archer.mode == "in_silico" else 0)
