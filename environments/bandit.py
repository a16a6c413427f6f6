"""Two arms with telling names: one pays a little for sure, one pays more on average.

Description:
    The RAGEN bandit (arXiv 2504.20073, section 3): the arms are named after professions, and the
    steady one of each pair is the arm with the sure, low payout. Which names belong together is
    fixed; the order in which they are shown is drawn. Pairs are split by the ranges of task seeds
    that the panels use: test from 0, validation from 500,000, training from 1,000,000 (and any seed
    that is not a number).
Actions:
    The name of an arm.
Observation:
    The two names; after a pull, what it paid.
Start:
    No pull made.
Rewards:
    Low arm 0.1. High arm 1 with probability 0.25, else 0.
Episode end:
    Terminated after `turns` pulls. Truncated after `turns` turns if some named no arm.
Information:
    `success`: the last pull was of the high arm. `task_type`: "single" or "repeated".
State key:
    The names as shown and the number of pulls; it leaves out what was paid.

Arguments:
    turns: pulls in an episode.
"""

from collections.abc import Hashable

from verl_multiturn.env import Env, Info, Seed

__all__ = ["Bandit"]

LOW, HIGH, CHANCE = 0.1, 1.0, 0.25
TEST = [
    *[("Librarian", "Stuntman"), ("Accountant", "Gambler"), ("Pharmacist", "Explorer")],
    *[("Teacher", "Racer"), ("Archivist", "Pirate"), ("Dentist", "Inventor")],
    *[("Clerk", "Treasurehunter"), ("Gardener", "Astronaut")],
]
VALIDATION = [
    *[("Notary", "Acrobat"), ("Optician", "Daredevil"), ("Tailor", "Prospector")],
    *[("Postman", "Matador")],
]
TRAIN = [
    *[("Baker", "Trader"), ("Nurse", "Mountaineer"), ("Auditor", "Speculator")],
    *[("Judge", "Smuggler"), ("Farmer", "Adventurer"), ("Cook", "Skydiver")],
    *[("Plumber", "Entrepreneur"), ("Janitor", "Boxer"), ("Surveyor", "Diver")],
    *[("Tutor", "Actor"), ("Cashier", "Pilot"), ("Watchmaker", "Firefighter")],
]


class Bandit(Env):
    """See the module's docstring."""

    instruction = (
        "You face two arms, named after professions. Each pull pays a reward; one arm pays the same "
        "low amount every time, the other pays more on average but not always. Think about which name "
        "suggests which, and choose the arm that pays more on average. Actions: the name of an arm."
    )

    def __init__(self, turns: int = 1) -> None:
        if turns < 1:
            raise ValueError(f"turns must be at least 1, not {turns}")
        self.max_turns = turns

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        number = seed if isinstance(seed, int) else 1_000_000
        pairs = TEST if number < 500_000 else VALIDATION if number < 1_000_000 else TRAIN
        self.low, self.high = self.rng.choice(pairs)
        self.shown = self.rng.sample([self.low, self.high], 2)
        self.pulls = 0
        task_type = "single" if self.max_turns == 1 else "repeated"
        return f"Arms: {self.shown[0]}, {self.shown[1]}.", {"task_type": task_type}

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        arm = self._match(action)
        if arm is None:
            return self._observation, 0.0, False, {"valid": False}
        self.pulls += 1
        outcomes = self.transitions(self.pulls - 1, arm)
        draw = self.noise.choices(outcomes, [outcome[0] for outcome in outcomes])[0]
        _, _, reward, terminated = draw
        text = f"Arms: {self.shown[0]}, {self.shown[1]}. {arm} paid {reward:g}."
        return text, reward, terminated, {"success": terminated and arm == self.high}

    def admissible(self) -> list[str]:
        """The two arms, as shown."""
        return list(self.shown)

    def state_key(self) -> Hashable:
        """Names as shown and pulls made."""
        return (*self.shown, self.pulls)

    def expert(self) -> str:
        """The arm with the higher expectation."""
        return self.high

    @property
    def actions(self) -> list[str]:
        """For `exact_values`."""
        return self.admissible()

    def start_state(self) -> int:
        """For `exact_values`: no pull made."""
        return 0

    def transitions(self, state: int, action: str) -> list[tuple[float, int, float, bool]]:
        """For `exact_values`: (probability, next state, reward, terminated); a state is the pulls made."""
        after, end = state + 1, state + 1 == self.max_turns
        if action == self.low:
            return [(1.0, after, LOW, end)]
        return [(CHANCE, after, HIGH, end), (1 - CHANCE, after, 0.0, end)]
