"""Best of n: several candidates for a turn, one of them carried out (Q-value paper, arXiv:2409.09345, 3.5).

The policy proposes n answers; equal actions are merged and keep their number as votes; then one is chosen:

    argmax     the highest score, such as a Q model's
    softmax    drawn with p ∝ exp(score / τ)
    majority   the most votes
    random     one of the n answers: what the policy alone would have said
    oracle     the highest return of what follows, played in a copy of the environment by its expert

Nothing is carried out before the choice: the authors' code steps its environment through all candidates,
and on HotPotQA goes on from wherever the last one led. All rules spend n answers a turn, so they compare
at equal budget. Ties go to the candidate with more votes, then to the first.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_multiturn.base_env import Env, StepResult, derive_seed
from verl_multiturn.errors import unknown
from verl_multiturn.search.mcts import Propose, canonical
from verl_multiturn.search.tree import History

SELECT = ("argmax", "softmax", "majority", "random", "oracle")
SOONER = 1e-4  # what an oracle takes off for a turn: of equal returns the sooner one is the safer one
SCORED = ("argmax", "softmax", "oracle")  # these need a score

Score = Callable[[str, History, list[str]], Sequence[float]]  # observation, turns before, actions


@dataclass(frozen=True)
class Candidate:
    """An action that the policy proposed.

    Attributes:
        text: the answer that proposed it first.
        action: of that answer; equal for all that were merged, up to case and spacing.
        votes: answers with this action.
        place: of the first of them among the answers.
        score: None where no rule asked for it.
    """

    text: str
    action: str
    votes: int
    place: int
    score: float | None = None


@dataclass(frozen=True)
class Choice:
    """The candidates of a turn, and which was chosen; `result` is what the environment answered to it."""

    chosen: Candidate
    candidates: list[Candidate] = field(default_factory=list)
    result: StepResult | None = None


def merge(texts: Sequence[str], actions: Sequence[str] | None = None) -> list[Candidate]:
    """Equal actions as one candidate each, in the order of their first occurrence.

    Args:
        texts: the answers.
        actions: of each answer, "" where it has none; None: the answers are the actions.
    """
    found: dict[str, Candidate] = {}
    for place, (text, action) in enumerate(zip(texts, actions or texts, strict=True)):
        key = canonical(action)
        if key in found:
            found[key] = replace(found[key], votes=found[key].votes + 1)
        else:
            found[key] = Candidate(text, action, 1, place)
    return list(found.values())


def scored(candidates: Iterable[Candidate], scores: Iterable[float]) -> list[Candidate]:
    """The candidates with their scores.

    Raises:
        ValueError: another number of scores, or one that is no finite number.
    """
    found, numbers = list(candidates), [float(score) for score in scores]
    if len(numbers) != len(found) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"needs one finite score for each of {len(found)} candidates, not {numbers}")
    return [replace(one, score=score) for one, score in zip(found, numbers, strict=True)]


def choose(
    candidates: Sequence[Candidate],
    select: str = "argmax",
    rng: random.Random | None = None,
    tau: float = 1.0,
) -> Candidate:
    """One of the candidates, by a rule of `SELECT`.

    Args:
        candidates: with scores where the rule needs them.
        select: the rule.
        rng: for softmax and random.
        tau: τ > 0 of softmax.

    Raises:
        ValueError: an unknown rule, no candidate, no score, no chance, or τ <= 0.
    """
    check_select(select)
    if not candidates:
        raise ValueError("there is no candidate: the policy answered nothing")
    if select == "majority":
        return max(candidates, key=lambda one: one.votes)
    if select in ("random", "softmax"):
        if rng is None or tau <= 0:
            raise ValueError(f"select={select} needs an rng and tau > 0, not {rng} and {tau}")
        if select == "random":
            return rng.choices(candidates, [one.votes for one in candidates])[0]
    scores = [one.score for one in candidates if one.score is not None]
    if len(scores) < len(candidates):
        raise ValueError(f"select={select} needs a score of every candidate")
    if select == "softmax":
        top = max(scores)
        return rng.choices(candidates, [math.exp((score - top) / tau) for score in scores])[0]  # type: ignore[union-attr]
    return max(candidates, key=lambda one: (one.score, one.votes))


def check_select(select: str) -> None:
    """Refuse an unknown rule.

    Raises:
        ValueError: it is none of `SELECT`.
    """
    if select not in SELECT:
        raise unknown("rule to select a candidate", select, SELECT)


def act(
    policy: Propose,
    env: Env,
    n: int = 5,
    select: str = "argmax",
    score: Score | None = None,
    seed: int | str = 0,
    tau: float = 1.0,
    *,
    observation: str | None = None,
    history: History = (),
) -> Choice:
    """Take one turn: n proposals, one of them carried out in `env`.

    Args:
        policy: (observation, history, n, rng) -> up to n actions.
        env: in mid-episode; steps once.
        n: proposals to ask for.
        select: a rule of `SELECT`.
        score: (observation, history, actions) -> a number for each; for argmax and softmax.
        seed: of policy and choice.
        tau: τ of softmax.
        observation: what the policy and the score read; None: the environment's last one.
        history: the turns before; an environment keeps none, so what reads it must be given it.

    Raises:
        ValueError: see `choose`; or argmax and softmax without a score, or an n that is no number of answers.
    """
    check_select(select)
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"n must be a whole number of answers from 1 on, not {n!r}")
    observation = env._observation if observation is None else observation
    actions = policy(observation, history, n, random.Random(derive_seed(seed, "propose")))[:n]
    candidates = merge(actions)
    if select == "oracle":
        candidates = scored(candidates, oracle(env, [one.action for one in candidates]))
    elif select in SCORED:
        if score is None:
            raise ValueError(f"select={select} needs a score")
        candidates = scored(candidates, score(observation, history, [one.action for one in candidates]))
    chosen = choose(candidates, select, random.Random(derive_seed(seed, "choose")), tau)
    return Choice(chosen, candidates, env.step(chosen.action))


def oracle(env: Env, actions: Sequence[str], left: int | None = None, seed: int = 0) -> list[float]:
    """The return of each action and of the environment's expert behind it; `env` is put back as it was.

    The chances behind an action are drawn anew: an oracle knows the rules, not the dice. Of equal returns
    the one in fewer turns is worth a little more, since what the expert would do later may not be among
    the candidates then. So it is a strong choice, and a bound where the expert plays best.

    Args:
        env: in mid-episode, with snapshots and an expert.
        actions: to be valued.
        left: turns that the episode may still take; None: the environment's own limit.
        seed: of the chances.

    Raises:
        ValueError: no snapshots, or no expert.
    """
    if env.snapshots == "none":
        raise ValueError(f"select=oracle plays on from snapshots, which {type(env).__name__} does not have")
    taken: Any = env.snapshot()
    found = []
    for action in actions:
        env.restore(taken, derive_seed(seed, "oracle", action))
        found.append(_played_on(env, action, left))
    env.restore(taken)
    return found


def _played_on(env: Env, action: str, left: int | None) -> float:
    turns, total = 0, 0.0
    while True:
        _, reward, terminated, truncated, _ = env.step(action)
        turns, total = turns + 1, total + reward
        if terminated or truncated or turns == left:
            return total - SOONER * turns
        try:
            action = env.expert()
        except NotImplementedError as error:
            raise ValueError(f"select=oracle plays on with an expert: {error}") from None
