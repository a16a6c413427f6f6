"""The formulas behind `verl-multiturn plan`, each with its source. Bytes, FLOP, seconds; no rounding.

Symbols: P parameters, L layers, h hidden size, i intermediate size, H and k query and key heads of d
dimensions, V vocabulary, G GPUs.
"""

from dataclasses import dataclass

BF16, FP32 = 2, 4  # bytes
ADAM = 8  # bytes a parameter: two moments in float32


@dataclass(frozen=True)
class Shape:
    """A decoder with gated MLP and grouped heads (Llama, Qwen2), or a plain one (GPT-2, Phi-1.5, BERT).

    Attributes:
        bias: queries, keys and values have one.
        plain: an MLP of two matrices, a bias everywhere, LayerNorm.
        norms: of a layer.
        positions: learnt vectors beside those of the vocabulary.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    bias: bool = False
    head_dim: int | None = None
    plain: bool = False
    norms: int = 2
    positions: int = 0

    @property
    def d(self) -> int:
        """Dimensions of a head."""
        return self.head_dim or self.hidden // self.heads


@dataclass(frozen=True)
class Gpu:
    """A GPU: memory in bytes, dense bfloat16 FLOP/s, bytes/s of its memory."""

    name: str
    memory: float
    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Rates:
    """Which share of the data sheet is reached; see `planning.plan.calibrated`.

    Attributes:
        compute: of the peak FLOP/s, in forward and backward passes.
        bandwidth: of the memory bandwidth, when decoding.
        decode: seconds of a decoding step that no hardware shortens (scheduling, kernels).
        turn: seconds of a turn beside generation (environment, prompt, transport).
    """

    compute: float = 0.4
    bandwidth: float = 0.7
    decode: float = 0.008
    turn: float = 0.0


def layer_parameters(m: Shape) -> int:
    """h(H+2k)d + Hdh + 3hi + 2h, and (H+2k)d biases. Source: the Llama and Qwen2 architecture.

    Plain: 2hi, norms of 2h, and (H+2k)d + i + 2h biases. Source: Radford et al. 2019 (GPT-2); Li et al. 2023,
    arXiv 2309.05463 (Phi-1.5, one norm a layer).
    """
    q, kv = m.heads * m.d, m.kv_heads * m.d
    matrices = m.hidden * (q + 2 * kv) + q * m.hidden + (2 if m.plain else 3) * m.hidden * m.intermediate
    biases = q + 2 * kv + m.intermediate + 2 * m.hidden if m.plain else (q + 2 * kv) * m.bias
    return matrices + biases + _norm(m) * m.norms


def _norm(m: Shape) -> int:
    return m.hidden * (2 if m.plain else 1)


def parameters(m: Shape) -> int:
    """P = L layers + Vh embeddings (twice if untied) + positions + norm. Source: as `layer_parameters`."""
    vectors = m.vocabulary * (1 if m.tied else 2) + m.positions
    return m.layers * layer_parameters(m) + vectors * m.hidden + _norm(m)


def lora_parameters(m: Shape, rank: int) -> int:
    """r (in + out) of each linear layer of a block. Source: Hu et al. 2021, arXiv 2106.09685, 4.1."""
    q, kv = m.heads * m.d, m.kv_heads * m.d
    mlp = (2 if m.plain else 3) * (m.hidden + m.intermediate)
    sizes = 2 * (m.hidden + q) + 2 * (m.hidden + kv) + mlp
    return m.layers * rank * sizes


def state_bytes(p: float, trained: float, gpus: int) -> tuple[float, float, float]:
    """Weights, gradients, optimizer on one GPU: float32 everywhere, sharded G ways (4 + 4 + 8 bytes).

    Source: Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1 and stage 3; 16 bytes a parameter as
    there, but held as float32 with bfloat16 copies of one unit at a time, as FSDP's mixed precision does.
    """
    return FP32 * p / gpus, FP32 * trained / gpus, ADAM * trained / gpus


def gathered_bytes(m: Shape) -> float:
    """The unit that FSDP gathers: the larger of a layer and the embeddings, in bfloat16, and the next one.

    Source: Zhao et al. 2023, arXiv 2304.11277, section 3.2 (one unit is computed, one is prefetched).
    """
    return 2 * BF16 * max(layer_parameters(m), m.vocabulary * m.hidden)


def layer_activation_bytes(m: Shape, tokens: float) -> float:
    """bfloat16 tensors that a layer keeps for its backward pass, attention not materialised.

    4h (inputs and outputs of two norms), 2Hd + 2kd (queries, keys, values, what attention gives), 4i
    (gate, up, activation, product; plain: 2i), each 2 bytes a token. Source: the count of Korthikanti et al.
    2022, arXiv 2205.05198, section 4.1, redone for gated MLPs and flash attention.
    """
    mlp = (2 if m.plain else 4) * m.intermediate
    return BF16 * tokens * (4 * m.hidden + 2 * (m.heads + m.kv_heads) * m.d + mlp)


def activation_bytes(m: Shape, tokens: float, checkpointing: bool) -> float:
    """All layers; with gradient checkpointing each layer's input and one layer at a time.

    Source: Chen et al. 2016, arXiv 1604.06174; Korthikanti et al. 2022, section 5.
    """
    if not checkpointing:
        return m.layers * layer_activation_bytes(m, tokens)
    return m.layers * BF16 * tokens * m.hidden + layer_activation_bytes(m, tokens)


def logit_bytes(m: Shape, tokens: float) -> float:
    """Logits in bfloat16, a float32 copy, and its gradient: 10 V bytes a token. Own count."""
    return (BF16 + 2 * FP32) * m.vocabulary * tokens


def kv_bytes_per_token(m: Shape) -> float:
    """2 L k d in bfloat16. Source: Pope et al. 2022, arXiv 2211.05102, section 3.3."""
    return 2 * m.layers * m.kv_heads * m.d * BF16


def forward_flops(p: float, tokens: float) -> float:
    """2P a token. Source: Kaplan et al. 2020, arXiv 2001.08361, section 2.1."""
    return 2 * p * tokens


def update_flops(p: float, tokens: float, checkpointing: bool) -> float:
    """6P a token, 8P with checkpointing. Source: Kaplan et al.; Korthikanti et al. 2022, appendix A."""
    return (8 if checkpointing else 6) * p * tokens


def decode_seconds(
    m: Shape, gpu: Gpu, rates: Rates, tokens: float, context: float, sequences: float, engines: int, tp: int
) -> float:
    """Seconds to generate: every step reads the weights and the cache of all running sequences.

    tokens / (engines · c) steps of decode + (2P + c · context · kv) / (tp · bandwidth), c sequences at a
    time on an engine. Source: Pope et al. 2022, section 2 (decoding is bound by memory).
    """
    c = max(1.0, sequences / engines)
    read = BF16 * parameters(m) + c * context * kv_bytes_per_token(m)
    step = rates.decode + read / (tp * gpu.bandwidth * rates.bandwidth)
    return tokens / (engines * c) * step


def distinct_draws(draws: float, among: float) -> float:
    """N (1 − (1 − 1/N)^n), expected distinct items of n uniform draws of N with replacement."""
    return float(among * (1 - (1 - 1 / among) ** draws))


def vine_turns(turns: float, rollouts: float) -> float:
    """Turns of continuations per turn of the rollout: K (T - 1) / 2, from states 1 to T - 1 to the end.

    Source: arXiv 2410.01679; the first state has none with multiturn.vine.root=siblings.
    """
    return rollouts * max(0.0, turns - 1) / 2
