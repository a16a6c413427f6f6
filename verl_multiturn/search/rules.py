"""Which ways to choose among several answers are compared."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_multiturn.errors import unknown
from verl_multiturn.search.best_of import SELECT

SCORERS = ("engine", "vllm")  # a forward pass of transformers, or engines of vLLM
FITTED = ("q_model.json", "metrics.jsonl")  # a fit writes both, and no other fit the same
GREEDY = "greedy"  # one answer at temperature 0; all other rules choose among n


@dataclass(frozen=True)
class Rules:
    """Which rules are compared, and what they need.

    Raises:
        ValueError: an unknown rule or scorer, a rule twice, or one that needs a Q model and has none.
    """

    select: list[str]
    n: int = 5
    q_model: str | None = None  # folder
    tau: float = 1.0
    scorer: str = "engine"  # of `q_model.SCORERS`

    def __post_init__(self) -> None:
        if self.scorer not in SCORERS:
            raise unknown("scorer of a Q model", self.scorer, SCORERS)
        for rule in self.select:
            if rule not in (GREEDY, *SELECT):
                raise unknown("rule of --select", rule, (GREEDY, *SELECT))
            if rule in ("argmax", "softmax") and self.q_model is None:
                raise ValueError(f"--select {rule} needs a Q model: give --q-model FOLDER")
        if len(set(self.select)) < len(self.select):
            raise ValueError(f"--select names a rule twice: {','.join(self.select)}")

    def score(self) -> Any:
        """The Q model, loaded."""
        from verl_multiturn.search.q_model import load_q_model

        return load_q_model(str(self.q_model), self.scorer)

    def about(self, rule: str) -> dict[str, Any]:
        """What a rule chooses by, for the record; `q_model_hash` tells two fits in one folder apart."""
        found = {"select": rule, "n": 1 if rule == GREEDY else self.n, "q_model": self.q_model}
        if rule not in ("argmax", "softmax"):
            return found
        folder = Path(str(self.q_model)).expanduser()
        files = [path for path in map(folder.joinpath, FITTED) if path.is_file()]
        digest = hashlib.blake2b(b"".join(path.read_bytes() for path in files), digest_size=8).hexdigest()
        return found | {"tau": self.tau, "scorer": self.scorer, "q_model_hash": digest}

    def label(self, rule: str) -> str:
        """How a table names it."""
        names = {"argmax": f"Q-guided best of {self.n}", GREEDY: GREEDY, "majority": f"majority of {self.n}"}
        return names.get(rule, f"{rule} of {self.n}")
