"""An environment that fails now and then."""

from verl_multiturn.env import Env, derive_seed

__all__ = ["Flaky"]


class Flaky(Env):
    """Say "go" three times; a share of the episodes divides by zero on the way."""

    instruction = "Say go three times. Actions: go, stay."
    max_turns = 5

    def __init__(self, share: float = 0.3) -> None:
        self.share = share

    def _reset(self, seed):
        self.left, self.number = 3, derive_seed(seed) % 1000
        # Demonstrations for the warm start come from seeds beyond two billion and never fail.
        self.fails = self.noise.random() < self.share and int(seed) < 2_000_000_000
        return self._text(), {"task_type": "default"}

    def _step(self, action):
        move = self._match(action)
        if self.fails and self.turn == 2:
            return 1 // 0
        self.left -= move == "go"
        return (
            self._text(),
            float(self.left == 0),
            self.left == 0,
            {"valid": move is not None, "success": self.left == 0},
        )

    def _text(self):
        return f"number {self.number}, {self.left} to go"

    def admissible(self):
        return ["go", "stay"]

    def expert(self):
        return "go"
