"""An actor learns recorded utterances, each with its weight: behaviour cloning, filtered, or AWR's.

    L(θ) = −mean_n w_n Σ_j log π_θ(a_nj | prompt_n, a_n,<j)

over the turns n with a weight and all tokens j of the utterance, the stop token too (Peng et al. 2019,
arXiv:1910.00177; ArCHer's offline study, arXiv:2402.19446, with the token sum of its code). What the policy
read is rendered as a rollout renders it: the recorded prompt, or the templates of a run or recipe.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from verl_multiturn.algorithms.registry import Config
from verl_multiturn.columns import Floats
from verl_multiturn.env import derive_seed
from verl_multiturn.rollout.parsing import ActionFormat, parse
from verl_multiturn.rollout.prompts import Messages, PromptPolicy, View


@dataclass(frozen=True)
class ActorConfig(Config):
    """How the actor learns; sources as in CriticConfig."""

    lr: float = 1e-4  # of Adam, constant; offline code
    epochs: int = 10  # over the recorded turns; offline code
    batch: int = 128  # turns of an optimizer step; offline code: 32 x 4
    micro_batch: int = 32  # turns of a forward pass; offline code
    grad_clip: float = 1.0  # norm of the gradient; ours
    max_tokens: int = 4096  # of prompt and utterance; longer turns are left out; ours
    seed: int = 0  # of the order

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("epochs", "batch", "micro_batch", "max_tokens"):
            self.check_range(key, 1)
        self.check_range("lr", 0)
        if self.grad_clip <= 0:
            raise ValueError(f"ActorConfig.grad_clip must be above 0, not {self.grad_clip!r}.")


class Row(NamedTuple):
    """A turn to learn: ids of prompt and utterance, where the utterance begins, its weight."""

    ids: list[int]
    start: int
    weight: float


@dataclass(frozen=True)
class Renderer:
    """Turns a recorded dialogue into what the policy read at each turn.

    Attributes:
        policy: writes a prompt where none was recorded.
        form: of an utterance, to find the actions in it.
        row: "turn" or "trajectory".
    """

    policy: PromptPolicy
    form: ActionFormat
    row: str

    def __call__(self, record: dict[str, Any]) -> list[Messages]:
        """The chat before each turn of a dialogue (see `critic.offline`)."""
        view, chat, found = View(record.get("instruction") or "", ""), list[dict[str, str]](), []
        for turn in record["turns"]:
            view.observation, view.admissible = turn["observation"], turn.get("admissible")
            chat = self._next(view, chat, turn.get("prompt"))
            found.append(chat)
            actions = f" {self.form.separator} ".join(parse(turn["action"], self.form).actions)
            view.past.append((turn["observation"], actions))
            chat = [*chat, {"role": "assistant", "content": turn["action"]}]
        return found

    def _next(self, view: View, chat: Messages, prompt: str | None) -> Messages:
        if self.row == "trajectory" and chat:
            told = self.policy.follow_up(view) if prompt is None else {"role": "user", "content": prompt}
            return [*chat, told]
        shown = min(self.policy.templates.history, len(view.past))
        fresh = self.policy.messages(view, shown, view.admissible)
        return fresh if prompt is None else [*fresh[:-1], {"role": "user", "content": prompt}]


def rows_of(
    records: Sequence[dict[str, Any]],
    weights: Floats,
    render: Renderer,
    encode: Callable[[Messages], list[int]],
    tokenizer: Any,
    config: ActorConfig,
) -> tuple[list[Row], int]:
    """The turns to learn, and how many were too long; turns of weight 0 are neither.

    Args:
        records: dialogues, N turns in all.
        weights: (N,), by turn.
        render: see Renderer.
        encode: a chat's tokens, the opening of the answer included.
        tokenizer: of the model.
        config: whose max_tokens holds.

    Raises:
        ValueError: another number of weights than of turns.
    """
    turns = [
        (chat, turn["action"])
        for one in records
        for chat, turn in zip(render(one), one["turns"], strict=True)
    ]
    if len(turns) != len(weights):
        raise ValueError(f"there are {len(turns)} turns, but {len(weights)} weights.")
    rows, long = [], 0
    for (chat, text), weight in zip(turns, weights, strict=True):
        if weight <= 0:
            continue
        prompt = encode(chat)
        said = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        if len(prompt) + len(said) > config.max_tokens:
            long += 1
        else:
            rows.append(Row([*prompt, *said], len(prompt), float(weight)))
    return rows, long


def learn(
    model: Any, rows: Sequence[Row], config: ActorConfig, tell: Callable[[int, float], None] | None = None
) -> list[float]:
    """Train a causal language model in place; returns the mean loss of every epoch.

    Args:
        model: of transformers.
        rows: what to learn.
        config: see ActorConfig.
        tell: called with epoch and loss after each.

    Raises:
        ValueError: nothing to learn.
        FloatingPointError: a gradient that is not finite.
    """
    import torch

    if not rows:
        raise ValueError("no recorded turn has a weight: there is nothing to imitate.")
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    rng, losses = random.Random(derive_seed("imitation", config.seed)), []
    model.eval()  # no dropout, as in the authors' code
    for epoch in range(1, config.epochs + 1):
        total = 0.0
        for batch in _batches(rows, config.batch, rng):
            optimizer.zero_grad()
            for start in range(0, len(batch), config.micro_batch):
                loss = _loss(model, batch[start : start + config.micro_batch]) / len(batch)
                loss.backward()
                total += float(loss.detach()) * len(batch)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
            if not torch.isfinite(norm):
                raise FloatingPointError(f"the actor's gradient is {norm} in epoch {epoch}: lower lr.")
            optimizer.step()
        losses.append(total / len(rows))
        if tell is not None:
            tell(epoch, losses[-1])
    return losses


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a Hugging Face folder that `verl-multiturn eval` and vLLM read."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _batches(rows: Sequence[Row], size: int, rng: random.Random) -> Iterator[list[Row]]:
    """All rows in a new order, in batches of like length inside each."""
    order = rng.sample(range(len(rows)), len(rows))
    for start in range(0, len(order), size):
        yield sorted((rows[k] for k in order[start : start + size]), key=lambda row: len(row.ids))


def _loss(model: Any, rows: Sequence[Row]) -> Any:
    """−Σ_n w_n Σ_j log π(a_nj), padded on the right."""
    import torch

    longest = max(len(row.ids) for row in rows)
    ids = torch.zeros((len(rows), longest), dtype=torch.long)
    mask, weight = torch.zeros_like(ids), torch.zeros((len(rows), longest))
    for k, row in enumerate(rows):
        ids[k, : len(row.ids)] = torch.tensor(row.ids)
        mask[k, : len(row.ids)] = 1
        weight[k, row.start : len(row.ids)] = row.weight
    ids, mask, weight = (x.to(model.device) for x in (ids, mask, weight))
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * weight[:, 1:].flatten()).sum()
