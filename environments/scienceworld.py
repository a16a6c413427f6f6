"""ScienceWorld: thirty tasks of elementary-school science in a simulated house (arXiv 2203.07540).

Description:
    Boil water, find out what conducts electricity, grow a fruit: 30 tasks in 7,207 variations, played by
    the authors' own simulator (Java). Each environment has a Java machine of its own, of 200 to 500
    MB (its heap is limited to 512 MB); its start takes 2 s, once.
Actions:
    Such as "open door to kitchen" or "move seed to flower pot 1"; the instruction lists the forms. Where
    a name is ambiguous the simulator asks which is meant, by number; any other answer drops the question
    and costs a turn, as an action. An action that it does not know is invalid and costs no time.
Observation:
    The simulator's answer; first, the room. With `full`, always room and inventory, too.
Start:
    A string "<task>/<variation>", or a seed, which picks one of a split: below 500,000 test, below
    1,000,000 dev, from there on train, where panels start by default. Splits are the authors'.
    The simulator's chance (bees, flowers, genes) is the same each time: the same actions give the same
    episode (environments/textworld_parts/science.py says what that takes).
Rewards:
    The score's change / 100. A wrong answer in a task that allows only one costs what was earned and 1.
Episode end:
    Terminated when the task is done or failed. Truncated after `max_turns` turns.
Information:
    `success`: a score of 100. `score`: from 0 to 100, or -100. `task_type`: the task. `variation`.
State key:
    Room, inventory, score and open question; it leaves out turns, other rooms and what is inside of
    closed things.

Arguments:
    tasks: names of those to play; default all.
    simplifications: the simulator's: "easy" or any of openDoors, openContainers, teleportAction,
        selfWateringFlowerPots, noElectricalAction.
    actions: whether `admissible` lists the possible actions, some hundreds, which costs 20 to 100 ms a turn.
    full: see Observation.
    max_turns: turns in an episode.
"""

import hashlib
import random
from collections.abc import Hashable, Sequence
from typing import ClassVar, Literal

from environments.textworld_parts.science import TASKS, Simulator, borrow, check_tasks, ids, leave, split_id
from verl_multiturn.env import Info, ReplayEnv, Seed
from verl_multiturn.needs import Needs
from verl_multiturn.panel import FIRST_ID

__all__ = ["ScienceWorld"]

ASKS = "Ambiguous request"
UNKNOWN = ("No known action", "Unknown action")
_plans: dict[tuple[str, int, str], tuple[str, ...]] = {}  # each costs up to half a minute


class ScienceWorld(ReplayEnv):
    """See the module's docstring."""

    needs: ClassVar[Needs] = Needs(
        extra="scienceworld", packages=("scienceworld", "py4j"), programs=("java",), licence="Apache-2.0"
    )
    runs_in: Literal["thread", "process"] = "process"

    def __init__(
        self,
        tasks: str | Sequence[str] = tuple(TASKS),
        simplifications: str | Sequence[str] = (),
        actions: bool = False,
        full: bool = False,
        max_turns: int = 100,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"needs max_turns of at least 1, not {max_turns}")
        self.names = (tasks,) if isinstance(tasks, str) else tuple(tasks)
        simpler = simplifications.split(",") if isinstance(simplifications, str) else simplifications
        chosen = tuple(name.strip() for name in simpler if name.strip())
        check_tasks(self.names, chosen)
        if not self.names:
            raise ValueError("scienceworld needs at least one task")
        self.simplifications = ",".join(chosen)
        self.actions, self.full, self.max_turns = actions, full, max_turns
        self._simulator: Simulator | None = None
        self._task, self._sent, self._question, self._score = ("", 0), list[str](), "", 0

    def tasks(self, split: str) -> list[Seed]:
        """The ids of train, dev (also "val") or test: 3,592, 1,796 and 1,819 for all tasks."""
        return list(ids(split, self.names))

    def peek(self, seed: Seed) -> tuple[str, str]:
        """Task, variation and simplifications, and the task; the simulator is not asked."""
        return self._content(*self._find(seed)), self._find(seed)[0]

    def content(self, observation: str) -> str:
        """Task, variation and simplifications."""
        return self._content(*self._task)

    def _content(self, task: str, variation: int) -> str:
        return f"{task}/{variation}/{self.simplifications}"

    def _find(self, seed: Seed) -> tuple[str, int]:
        if isinstance(seed, str):
            return split_id(seed)
        split = max((s for s in FIRST_ID if FIRST_ID[s] <= max(seed, 0)), key=lambda s: FIRST_ID[s])
        listed = ids(split, self.names)
        return split_id(listed[(seed - FIRST_ID[split]) % len(listed)])

    @property
    def _java(self) -> Simulator:
        if self._simulator is None:
            self._simulator = borrow()
        return self._simulator

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        self._task, self._sent, self._question, self._score = self._find(seed), [], "", 0
        self._java.load(*self._task, self.simplifications)
        forms = ", ".join(self._java.verbs())
        self.instruction = (
            f"{self._java.task()} Answer with one action. Forms of actions, where OBJ is a thing or a place: "
            f"{forms}."
        )
        room, carried = self._java.look()
        info = {"task_type": self._task[0], "variation": self._task[1]}
        return f"{room}\n\n{carried}" if self.full else room, info

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        text = " ".join(action.split())
        answer, asked = self._java.do(text), bool(self._question)
        self._sent.append(text)
        self._question = answer.strip() if answer.startswith(ASKS) else ""
        before, self._score = self._score, self._java.score
        info = {
            "valid": asked or not answer.startswith(UNKNOWN),
            "success": self._score == 100,
            "score": self._score,
        }
        return self._shown(answer.strip()), (self._score - before) / 100, self._java.over, info

    def _shown(self, answer: str) -> str:
        if not self.full:
            return answer
        room, carried = self._java.look()
        return "\n\n".join([room, carried] if answer in (room, carried) else [answer, room, carried])

    def admissible(self) -> list[str] | None:
        """Every possible action, or the numbers of an open question; None unless `actions` is set."""
        return self._java.valid() if self.actions else None

    def random_action(self, rng: random.Random) -> str:
        """Any possible action, whether or not `admissible` lists them."""
        return rng.choice(self._java.valid())

    def state_key(self) -> Hashable:
        """See the module's docstring."""
        seen = "\0".join((*self._java.look(), str(self._score), self._question))
        return hashlib.blake2b(seen.encode(), digest_size=16).hexdigest()

    def expert(self) -> str:
        """The next step of the simulator's own solution, which begins at the start and knows no detours."""
        plan, done = self._plan(), 0
        for action in self._sent:
            done += done < len(plan) and action == plan[done]
        return plan[done] if done < len(plan) else "look around"

    def _plan(self) -> tuple[str, ...]:
        key = (*self._task, self.simplifications)
        if key not in _plans:
            self._java.load(*key, plan=True)  # it begins anew, so go again to where we were
            _plans[key] = tuple(" ".join(action.split()) for action in self._java.plan())
            for action in self._sent:
                self._java.do(action)
        return _plans[key]

    def close(self) -> None:
        """Leave the Java machine to the next environment of this process; it ends with the process."""
        if self._simulator is not None:
            leave(self._simulator)
            self._simulator = None
