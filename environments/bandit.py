"""Two arms with telling names: one pays a little for sure, one pays more on average.

Description:
    The RAGEN bandit (arXiv 2504.20073, section 3): the arms are named after professions, and the
    steady one of each pair is the arm with the sure, low payout. Which names belong together is
    fixed; the order in which they are shown is drawn. Pairs are split by the ranges of task seeds
    that the panels use: test from 0, validation from 500,000, training from 1,000,000 (and any seed
    that is not a number). The paper's first phrasing has one pair to train on, Phoenix and Dragon,
    and one to test on, Teacher and Engineer (low arm first); the pair for validation is ours.
Actions:
    The name of an arm.
Observation:
    The two names; after a pull, what it paid.
Start:
    No pull made.
Rewards:
    Low arm `low_reward`. High arm 1 with probability 0.25, else 0.
Episode end:
    Terminated after `turns` pulls. Truncated after `turns` turns if some named no arm.
Information:
    `success`: the last pull was of the high arm. `task_type`: "single" or "repeated".
State key:
    The names as shown and the number of pulls; it leaves out what was paid.

Arguments:
    turns: pulls in an episode.
    phrasing: "professions" or "symbols", the paper's first.
    misleading: whether the steady name is the high arm's: BanditRev. The text, which says nothing of
        what a name means, stays the same: a task and its reverse have the same content.
    low_reward: what the low arm pays: 0.1 in RAGEN's code, 0.15 in its paper.
"""

from collections.abc import Hashable

from verl_multiturn.env import Env, Info, Seed
from verl_multiturn.errors import unknown

__all__ = ["Bandit"]

HIGH, CHANCE = 1.0, 0.25
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
PAIRS = {  # test, validation, training
    "professions": (TEST, VALIDATION, TRAIN),
    "symbols": ([("Teacher", "Engineer")], [("Anchor", "Comet")], [("Phoenix", "Dragon")]),
}
NAMED = {"professions": ", named after professions", "symbols": " with symbolic names"}


class Bandit(Env):
    """See the module's docstring."""

    def __init__(
        self,
        turns: int = 1,
        phrasing: str = "professions",
        misleading: bool = False,
        low_reward: float = 0.1,
    ) -> None:
        if turns < 1:
            raise ValueError(f"turns must be at least 1, not {turns}")
        if phrasing not in PAIRS:
            raise unknown("phrasing", phrasing, PAIRS)
        if not 0 <= low_reward < CHANCE * HIGH:
            raise ValueError(
                f"needs 0 <= low_reward < {CHANCE * HIGH}, the high arm's mean, not {low_reward}"
            )
        self.phrasing, self.misleading, self.low_reward = phrasing, misleading, low_reward
        self.instruction = (
            f"You face two arms{NAMED[phrasing]}. Each pull pays a reward; one arm pays the same "
            "low amount every time, the other pays more on average but not always. Think about which name "
            "suggests which, and choose the arm that pays more on average. Actions: the name of an arm."
        )
        self.max_turns = turns

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        number = seed if isinstance(seed, int) else 1_000_000
        pairs = PAIRS[self.phrasing][0 if number < 500_000 else 1 if number < 1_000_000 else 2]
        steady, daring = self.rng.choice(pairs)
        self.shown = self.rng.sample([steady, daring], 2)
        self.low, self.high = (daring, steady) if self.misleading else (steady, daring)
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
            return [(1.0, after, self.low_reward, end)]
        return [(CHANCE, after, HIGH, end), (1 - CHANCE, after, 0.0, end)]
