"""Fits a Q model to preference pairs by DPO on the tokens of one turn (arXiv:2409.09345, Eq. 8).

    dpo              L = −log σ(β Δ),  Δ = (l_w − l_l) − (ref_w − ref_l),  l = agg_t log π(a_t | h, a_<t)
    bradley_terry    L = −log σ(s_w − s_l),  s a scalar head on the last token
    regression       L = ((s_w − Q_w)² + (s_l − Q_l)²) / 2,  Q = W / N of the tree

agg is the sum (the paper) or the mean; the Q model then scores by the same. The loop is ours: TRL's
DPOTrainer installs beside verl's pins, but it tokenizes prompt and completion itself, so that scores at
inference would be of other ids than were fitted, has one accuracy for all pairs where losers that are
invalid actions must be counted apart, and has neither of the two other losses.

Log-probabilities of the reference are computed once, before the first update, and kept in the folder.
Dropout is off, as in the authors' runs. Every so often the held-out pairs are ranked; the weights with
the highest accuracy on pairs of two valid actions (ties: the lower loss) are kept, because in the authors'
own numbers a third epoch loses what the first one gained. The share with Q_w > Q_l is the accuracy; a
tie counts one half. Where a success of best of n is measured as well, it comes first, accuracy breaks ties.
"""

import copy
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from verl_multiturn.columns import Floats
from verl_multiturn.errors import intact
from verl_multiturn.search import q_model
from verl_multiturn.search.fit_data import FitConfig, Lengths, Row, rows_of
from verl_multiturn.search.fit_folder import REFERENCE, begin, check_folder, fitting
from verl_multiturn.search.guided import ScoreAnswers
from verl_multiturn.search.q_model import HeadModel, QModel, QSpec, Tokens
from verl_multiturn.search.scorers import TransformersLogProbs

METRICS = "metrics.jsonl"
PARTS = ("all", "valid", "invalid")  # of the held-out pairs


class Fitting:
    """One fitting: model, pairs, reference.

    Args:
        pairs: file of pairs.
        model: Hugging Face folder or name of the model to start from; it is the reference, too.
        out: folder of the Q model.
        config: see FitConfig.
        tell: called with a line now and then.
        success: of an agent whose answers are chosen by a score: what the weights that are kept are judged by
            before accuracy; a second model is in memory then (not with LoRA). None: accuracy alone.

    Raises:
        ValueError: a folder that holds something else than an unfinished fit, no pairs, no model.
    """

    def __init__(
        self,
        pairs: str | Path,
        model: str,
        out: str | Path,
        config: FitConfig,
        tell: Callable[[str], None] = lambda line: None,
        success: Callable[[ScoreAnswers], float] | None = None,
    ) -> None:
        import torch

        from verl_multiturn.samplers import load_model, load_tokenizer

        self.out, self.config, self.tell, self.success = Path(out), config, tell, success
        check_folder(self.out)
        torch.manual_seed(config.seed)
        self.tokenizer = load_tokenizer(model, config.chat_template, "multiturn.fit.chat_template")
        self.model = load_model(model, self.tokenizer, q_model.DTYPE)[0]
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", 4096)
        folder = Path(model).expanduser()
        self.spec = QSpec(
            reference=str(folder.resolve()) if folder.is_dir() else model,
            loss=config.loss,
            beta=config.beta,
            aggregate=config.aggregate,
            max_tokens=config.max_tokens or min(4096, longest),
            lora=config.lora_rank > 0,
        )
        self.tokens, self.lengths = Tokens(self.tokenizer, self.spec.max_tokens), Lengths()
        self.rows = rows_of(pairs, self.tokens, config, self.lengths)
        if self.lengths.shortened or self.lengths.left_out:
            tell(f"longer than max_tokens={self.spec.max_tokens}, of {self.lengths}")
        begin(self.out)
        self.head = None if config.loss == "dpo" else q_model.new_head(self.model)
        self.reference = {split: self._reference(split) for split in self.rows}
        self.frozen = (
            copy.deepcopy(self.model) if success and self.head is None and not config.lora_rank else None
        )
        if config.lora_rank:
            peft = q_model.peft()
            settings = peft.LoraConfig(
                r=config.lora_rank,
                lora_alpha=2 * config.lora_rank,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            )
            self.model = peft.get_peft_model(self.model, settings)
        self.model.eval()  # no dropout
        self.best = (-inf, -inf, -inf)

    def run(self) -> dict[str, float]:
        """Fit, and keep the best weights; the held-out numbers of these."""
        with fitting(self.out):
            return self._run()

    def _run(self) -> dict[str, float]:
        import torch

        config, rows = self.config, self.rows["train"]
        parameters = [p for p in self._parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=0.0)
        updates = config.epochs * -(-len(rows) // config.batch)
        looks = {round((k + 1) * updates / config.evaluations) for k in range(config.evaluations)}
        began, worse = time.perf_counter(), 0
        kept = self._look(0, None, began)
        for update, batch in enumerate(self._batches(), 1):
            for group in optimizer.param_groups:
                group["lr"] = config.lr * min(1.0, update / max(1.0, config.warmup * updates))
            loss = self._step(batch)
            torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            if update not in looks:
                continue
            found = self._look(update, loss, began)
            worse = 0 if found["kept"] else worse + 1
            kept = found if found["kept"] else kept
            if worse == config.patience:
                self.tell(f"stopped: {worse} evaluations without a better one")
                break
        return kept

    def _batches(self) -> Iterator[list[int]]:
        """Places in the training rows, shuffled anew each epoch."""
        order, rng = list(range(len(self.rows["train"]))), random.Random(self.config.seed)
        for _ in range(self.config.epochs):
            rng.shuffle(order)
            for start in range(0, len(order), self.config.batch):
                yield order[start : start + self.config.batch]

    def _step(self, batch: list[int]) -> float:
        """Add up the gradient of the batch's mean loss, a few pairs at a time; the loss."""
        rows, total = self.rows["train"], 0.0
        for start in range(0, len(batch), self.config.micro):
            places = batch[start : start + self.config.micro]
            loss, _ = self._losses([rows[n] for n in places], self.reference["train"][places])
            loss = loss.sum() / len(batch)
            loss.backward()
            total += float(loss.detach())
        return total

    def _losses(self, rows: Sequence[Row], reference: Floats) -> tuple[Any, Any]:
        """Weighted losses and margins of a few pairs. -> (rows,) each."""
        import torch

        # Together, so that a pair's two answers share a forward pass.
        both = [(row.prompt, answer) for row in rows for answer in (row.win, row.lose)]
        values = self._values(both).reshape(-1, 2)
        weight = torch.tensor([row.weight for row in rows], device=values.device)
        softplus = torch.nn.functional.softplus
        if self.config.loss == "dpo":
            values = values - torch.as_tensor(reference, dtype=values.dtype, device=values.device)
        margin = values[:, 0] - values[:, 1]
        if self.config.loss == "regression":
            targets = torch.tensor([[row.q_win, row.q_lose] for row in rows], device=values.device)
            return weight * ((values - targets) ** 2).mean(1), margin
        beta = self.config.beta if self.config.loss == "dpo" else 1.0
        return weight * softplus(-beta * margin), margin

    def _values(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Any:
        """What the loss is made of: summed (or mean) log-probabilities, or the head. -> (rows,)."""
        with self._precision():
            if self.head is not None:
                return q_model.head_scores(self.model, self.head, rows)
            return answer_log_probs(self.model, rows, self.config.aggregate)

    def _precision(self) -> AbstractContextManager[Any]:
        """Weights stay in float32: an update of 1e-6 is lost in half precision."""
        import torch

        on = self.model.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if on else nullcontext()

    def _reference(self, split: str) -> Floats:
        """log π_ref of winners and losers, from the folder if they were computed before. -> (N, 2)."""
        import torch

        rows = self.rows[split]
        if self.head is not None:
            return np.zeros((len(rows), 2), np.float32)
        parts = [repr((self.spec, [(row.prompt, row.win, row.lose) for row in rows]))]
        key = f"{split}_{hashlib.blake2b(''.join(parts).encode(), digest_size=8).hexdigest()}"
        path = self.out / REFERENCE
        with intact(path, "delete it, it is computed again"):
            kept = dict(np.load(path)) if path.exists() else {}
        if key not in kept:
            both = [(row.prompt, answer) for row in rows for answer in (row.win, row.lose)]
            size = 2 * self.config.micro
            with torch.inference_mode():
                parts_of = [self._values(both[k : k + size]).cpu() for k in range(0, len(both), size)]
            kept[key] = torch.cat(parts_of).reshape(-1, 2).numpy()
            draft = path.with_suffix(".part.npz")
            np.savez(draft, **kept)
            draft.replace(path)
        return np.asarray(kept[key])

    def _look(self, update: int, loss: float | None, began: float) -> dict[str, Any]:
        """Rank the held-out pairs; keep the weights if they are the best so far."""
        import torch

        rows, losses, margins = self.rows["held_out"], [], []
        with torch.inference_mode():
            for start in range(0, len(rows), self.config.micro):
                part = slice(start, start + self.config.micro)
                found = self._losses(rows[part], self.reference["held_out"][part])
                losses += found[0].tolist()
                margins += found[1].tolist()
        record: dict[str, Any] = {"update": update, "train_loss": loss, "loss": float(np.mean(losses))}
        right = (np.sign(margins) + 1) / 2
        invalid = np.array([row.invalid for row in rows])
        for name, chosen in zip(PARTS, (np.ones_like(invalid), ~invalid, invalid), strict=True):
            record |= {f"accuracy_{name}": float(right[chosen].mean()) if chosen.any() else None}
            record |= {f"pairs_{name}": int(chosen.sum())}
        record |= {"shortened": self.lengths.shortened, "left_out": self.lengths.left_out}
        record["success"] = None if self.success is None else self.success(self._score())
        judged = record["accuracy_valid"] if record["pairs_valid"] else record["accuracy_all"]
        mark = (record["success"] or 0.0, judged, -record["loss"])
        record["kept"] = mark > self.best
        if record["kept"]:
            self.best = mark
            self._save()
        record["seconds"] = round(time.perf_counter() - began, 1)
        with (self.out / METRICS).open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.tell(_line(record))
        return record

    def _score(self) -> ScoreAnswers:
        """The weights as they are, as a Q model."""
        if self.head is not None:
            return HeadModel(self.tokens, self.model, self.head)
        lora = self.frozen is None
        reference = TransformersLogProbs(self.model if lora else self.frozen, adapter=not lora)
        return QModel(self.spec, self.tokens, TransformersLogProbs(self.model), reference)

    def _save(self) -> None:
        from safetensors.torch import save_file

        self.model.save_pretrained(self.out)
        self.tokenizer.save_pretrained(self.out)
        if self.head is not None:
            save_file(self.head.state_dict(), self.out / q_model.HEAD)
        q_model.write_spec(self.out, self.spec)

    def _parameters(self) -> list[Any]:
        return [*self.model.parameters(), *(self.head.parameters() if self.head is not None else ())]


def answer_log_probs(
    model: Any, rows: Sequence[tuple[Sequence[int], Sequence[int]]], aggregate: str = "sum"
) -> Any:
    """Sum or mean over an answer's tokens of log π(a_t | prompt, a_<t), with gradients. -> (rows,)."""
    import torch

    ids, mask = q_model.padded([[*prompt, *answer] for prompt, answer in rows], model.device)
    logits = model(ids, attention_mask=mask).logits[:, :-1].float()
    found = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    starts = torch.tensor([len(prompt) for prompt, _ in rows], device=ids.device)[:, None]
    places = torch.arange(1, ids.shape[1], device=ids.device)
    said = (places >= starts) & (mask[:, 1:] == 1)
    total = (found * said).sum(1)
    return total if aggregate == "sum" else total / said.sum(1)


def fit(
    pairs: str | Path,
    model: str,
    out: str | Path,
    config: FitConfig,
    tell: Callable[[str], None] = lambda line: None,
    success: Callable[[ScoreAnswers], float] | None = None,
) -> dict[str, float]:
    """Fit a Q model and write it to a folder; see `Fitting`. The held-out numbers of what was kept."""
    return Fitting(pairs, model, out, config, tell, success).run()


def _line(record: Mapping[str, Any]) -> str:
    shown = ", ".join(
        f"{name} {100 * record[f'accuracy_{name}']:.1f} % of {record[f'pairs_{name}']}"
        for name in PARTS
        if record[f"pairs_{name}"]
    )
    loss = "" if record["train_loss"] is None else f"loss {record['train_loss']:.4f}, "
    won = "" if record["success"] is None else f", best of n {100 * record['success']:.1f} %"
    kept = f"{won}{', kept' if record['kept'] else ''}"
    return f"update {record['update']}: {loss}held out {record['loss']:.4f}, accuracy {shown}{kept}"
