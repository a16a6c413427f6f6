"""What the stages of a Q model cost (arXiv 2409.09345): trees, the DPO fit, the evaluation.

Upper bounds: a tree takes all its iterations, each with n candidates and a rollout to the depth limit, so
m (n + D) calls of the policy and as many steps of the environment; every turn of its best path gives pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from verl_multiturn.compose import plain
from verl_multiturn.planning import formulas as of
from verl_multiturn.planning.formulas import Gpu, Rates, Shape
from verl_multiturn.planning.plan import CPU, FILL, GB, SPARE, calibrated, shape
from verl_multiturn.search.config import configured
from verl_multiturn.search.fit_data import FitConfig
from verl_multiturn.search.pair_files import PairConfig

AT_ONCE = 64  # trees, and episodes of the evaluation


@dataclass(frozen=True)
class Stages:
    """What a recipe of multiturn.algorithm=qvalue asks of one GPU; bounds, tokens are means.

    Attributes:
        agent, start: shapes of the agent and of what the Q model starts from.
        gpu: fitting takes one; the others can serve the agent.
        trees, calls: how many, of the policy in each; steps of the environment likewise.
        prompt, utterance: tokens read and written in a call.
        pairs: of all trees.
        fit: settings of the DPO fit; longest: tokens of its longest row.
        decisions: turns that the evaluation plays, all rules together; n: answers of most.
    """

    agent: Shape
    start: Shape
    gpu: Gpu
    trees: int
    calls: int
    prompt: float
    utterance: float
    pairs: int
    fit: FitConfig
    longest: int
    decisions: int
    n: int

    @classmethod
    def of(cls, config: DictConfig, gpu: Gpu) -> "Stages":
        """Of a prepared configuration.

        Raises:
            ValueError: a recipe for the CPU, or an unknown model.
        """
        if config.trainer.device == "cpu":
            raise ValueError(CPU)
        settings = plain(config.multiturn)
        block, search = settings["qvalue"], configured(settings["search"])
        pairs, fit = PairConfig.of(settings["pairs"]), FitConfig.of(settings["fit"])
        path = str(config.actor_rollout_ref.model.path)
        agent = shape(path.rpartition("#")[2] if "://" in path else path)
        calls = search.iterations * (search.width + search.max_depth)
        # Every turn of the best path, or every iteration's leaf, against one or all of the others.
        places = search.max_depth if pairs.win == "best_path" else search.iterations
        found = places * (1 if pairs.lose == "worst" else search.width - 1)
        data, tasks = config.data, block["limit"] or 100
        return cls(
            agent=agent,
            start=shape(block["model"]) if block["model"] else agent,
            gpu=gpu,
            trees=block["tasks"],
            calls=min(calls, search.max_proposals or calls),
            prompt=FILL * data.max_prompt_length,
            utterance=FILL * settings["max_action_tokens"],
            pairs=block["tasks"] * min(found, pairs.max_per_task or found),
            fit=fit,
            longest=min(fit.max_tokens or 4096, data.max_prompt_length + data.max_response_length),
            decisions=tasks * block["samples"] * len(block["select"]) * search.max_depth,
            n=block["n"],
        )

    @property
    def fit_bytes(self) -> float:
        """Memory of the fit: float32 weights, gradients, moments; a micro-batch of both answers."""
        p = of.parameters(self.start)
        rank = self.fit.lora_rank
        states = sum(of.state_bytes(p, of.lora_parameters(self.start, rank) if rank else p, 1))
        tokens = 2 * self.fit.micro * self.longest
        return states + of.activation_bytes(self.start, tokens, False) + of.logit_bytes(self.start, tokens)

    @property
    def row(self) -> float:
        """Tokens of a prompt and an answer in the fit."""
        return min(self.longest, self.prompt + self.utterance)

    def seconds(self, rates: Rates) -> dict[str, float]:
        """Of each stage, on one GPU; the agent behind a server that decodes many calls at once."""
        found = {}
        for stage, calls, at_once in (
            ("trees", self.trees * self.calls, AT_ONCE),
            ("evaluation", self.decisions * self.n, AT_ONCE * self.n),
        ):
            found[stage] = of.decode_seconds(
                self.agent, self.gpu, rates, calls * self.utterance, self.prompt, at_once, 1, 1
            ) + of.forward_flops(of.parameters(self.agent), calls * self.prompt) / self._peak(rates)
        p, tokens = of.parameters(self.start), 2 * self.pairs * self.row
        flops = self.fit.epochs * of.update_flops(p, tokens, False) + of.forward_flops(p, tokens)
        return found | {"fit": flops / self._peak(rates)}

    def _peak(self, rates: Rates) -> float:
        return self.gpu.flops * rates.compute

    @property
    def fits(self) -> bool:
        """Whether the fit and the agent do."""
        room = SPARE * self.gpu.memory
        return self.fit_bytes <= room and of.BF16 * of.parameters(self.agent) <= room


def lines(s: Stages) -> Iterator[str]:
    """The plan in words."""
    seconds = s.seconds(calibrated())
    hours = {stage: f"{one / 3600:.1f} h" for stage, one in seconds.items()}
    calls = s.trees * s.calls
    yield (
        f"agent {of.parameters(s.agent) / GB:.2f}, Q model {of.parameters(s.start) / GB:.2f} billion "
        f"parameters, on one {s.gpu.name}; upper bounds"
    )
    yield (
        f"trees: {s.trees:,} x {s.calls:,} calls, m (n + D), and as many steps of the environment: "
        f"{calls:,} calls, {calls * s.utterance / 1e6:,.0f} million tokens written, "
        f"{calls * s.prompt / 1e6:,.0f} million read, about {hours['trees']} of a server"
    )
    yield (
        f"fit: {s.pairs:,} pairs x {s.fit.epochs} epochs in {s.fit.epochs * -(-s.pairs // s.fit.batch):,} "
        f"updates, {2 * s.pairs * s.row / 1e6:,.0f} million tokens an epoch, about {hours['fit']}; "
        f"{s.fit_bytes / GB:.0f} GB of {SPARE * s.gpu.memory / GB:.0f}"
    )
    yield (
        f"evaluation: {s.decisions:,} turns of up to {s.n} answers under all rules, about "
        f"{hours['evaluation']} of a server"
    )
    yield (
        f"assumed: {FILL:.0%} of the recipe's limits, {AT_ONCE} trees or episodes at once; an agent that "
        "transformers samples in the process is slower than a server"
    )
    if not s.fits:
        yield (
            "does not fit: set multiturn.fit.micro=1, then multiturn.fit.lora_rank=64, then a smaller "
            "multiturn.fit.max_tokens"
        )


def print_plan(s: Stages, console: Console | None = None) -> bool:
    """Print it; returns whether it fits."""
    console = console or Console()
    for line in lines(s):
        console.print(line, highlight=False, soft_wrap=True)
    return s.fits


def as_json(s: Stages) -> dict[str, Any]:
    """Everything that is printed, as numbers."""
    seconds = s.seconds(calibrated())
    return {
        "fits": s.fits,
        "memory_gb": {"fit": s.fit_bytes / GB, "agent": of.BF16 * of.parameters(s.agent) / GB},
        "trees": s.trees,
        "calls": s.trees * s.calls,
        "pairs": s.pairs,
        "turns": s.decisions,
        "seconds": seconds | {"hours": sum(seconds.values()) / 3600},
    }
