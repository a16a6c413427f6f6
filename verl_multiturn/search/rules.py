"""Which ways to choose among several answers are compared."""

from dataclasses import dataclass
from typing import Any

from verl_multiturn.errors import unknown
from verl_multiturn.search.best_of import SELECT

GREEDY = "greedy"  # one answer at temperature 0; all other rules choose among n


@dataclass(frozen=True)
class Rules:
    """Which rules are compared, and what they need.

    Raises:
        ValueError: an unknown rule, one twice, or one that needs a Q model and has none.
    """

    select: list[str]
    n: int = 5
    q_model: str | None = None  # folder
    tau: float = 1.0

    def __post_init__(self) -> None:
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

        return load_q_model(str(self.q_model))

    def label(self, rule: str) -> str:
        """How a table names it."""
        names = {"argmax": f"Q-guided best of {self.n}", GREEDY: GREEDY, "majority": f"majority of {self.n}"}
        return names.get(rule, f"{rule} of {self.n}")
