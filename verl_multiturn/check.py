"""`check_env`: does an environment keep the contract of `env.py`? One sentence for each law."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from verl_multiturn.env import Env, as_env, make
from verl_multiturn.laws import LAWS
from verl_multiturn.load import load_class
from verl_multiturn.probe import Broken, Clock, Subject


@dataclass(frozen=True)
class Check:
    """The outcome of one law: its name, whether it holds, and a sentence."""

    name: str
    ok: bool
    sentence: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'}  {self.name:<16} {self.sentence}"


@dataclass
class Report:
    """What `check_env` found; `str(report)` is readable.

    Attributes:
        env: the name it was called with.
        checks: in the order they ran.
        reset_ms: mean time of a reset, in milliseconds (nan: never measured).
        step_ms: mean time of a step, in milliseconds (nan: never measured).
    """

    env: str
    checks: list[Check] = field(default_factory=list)
    reset_ms: float = float("nan")
    step_ms: float = float("nan")

    @property
    def failures(self) -> list[str]:
        """A sentence for each broken law, with the law's name."""
        return [f"{check.name}: {check.sentence}" for check in self.checks if not check.ok]

    @property
    def ok(self) -> bool:
        """Whether every law holds."""
        return not self.failures

    def __str__(self) -> str:
        head = f"{self.env}: {'ok' if self.ok else f'{len(self.failures)} FAILED'}"
        cost = f"reset {self.reset_ms:.3f} ms, step {self.step_ms:.3f} ms"
        return "\n".join([head, *(f"  {check}" for check in self.checks), f"  cost: {cost}"])


def check_env(env: Any, episodes: int = 8, seed: int = 0, timeout: float = 60.0, **kwargs: Any) -> Report:
    """Try every law on a few episodes. An environment that raises or hangs gets a failure line.

    The environment runs in a thread of its own, as it would in training.

    Args:
        env: a name for `make`, a class, or an instance (then every check shares it).
        episodes: tasks to play, with seeds `seed`, `seed + 1`, ...
        seed: the first task.
        timeout: seconds that one call of it may take.
        **kwargs: passed to the class.

    Raises:
        ValueError: `env` names nothing, or `episodes` is below 1.
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, not {episodes}")
    given = not isinstance(env, str | type)
    if given and kwargs:
        raise ValueError("keywords go with a name or a class, not with an instance")
    title = env if isinstance(env, str) else (type(env) if given else env).__name__
    report, clock = Report(title), Clock()
    made: list[Env] = []

    def new() -> Env:
        clock.at("building it")
        one = make(env, **kwargs) if isinstance(env, str) else as_env(env if given else env(**kwargs))
        made.append(one)
        return one

    def check() -> None:
        if isinstance(env, str):
            _look_up(env)
        _guard(report, clock, "make", lambda: f"it can be built ({type(new()).__name__})")
        if not made:
            return
        _try_laws(report, Subject(made[0], new, not given, [seed + i for i in range(episodes)], clock))
        if not given:
            clock.at("close()")
            _guard(report, clock, "close", partial(_close, made))

    clock.at("importing it")
    if _ends(check, clock, timeout):
        return report
    sentence = f"{clock.now[0]} took longer than {timeout:g} s; nothing after it was tried"
    # A new report: the thread that hangs may still come back and write to the other.
    return replace(report, checks=[*report.checks, Check(clock.law or "make", False, sentence)])


def _ends(check: Callable[[], None], clock: Clock, timeout: float) -> bool:
    """Call it in a thread and raise what it raises; False: one call took too long, the thread is lost."""
    problems: list[BaseException] = []

    def work() -> None:
        try:
            check()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=work, name="check_env", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(min(timeout, 0.1))
        if thread.is_alive() and time.monotonic() - clock.now[1] > timeout:
            return False
    if problems:
        raise problems[0]
    return True


def _close(made: list[Env]) -> str:
    for one in made:
        one.close()
    return "it closes"


def _look_up(name: str) -> None:
    """A name that leads nowhere is the caller's mistake, not the environment's: raise."""
    try:
        load_class(name, Env)
    except ValueError:
        raise
    except Exception:
        return  # the environment's own import fails; the report will tell


def _try_laws(report: Report, subject: Subject) -> None:
    start = time.perf_counter()
    for name, law in LAWS:
        _guard(report, subject.clock, name, partial(law, subject))
        if name == "types" and not report.ok:
            break  # what follows would only repeat it
    spent = time.perf_counter() - start
    if subject.resets and subject.steps:
        report.reset_ms = 1e3 * sum(subject.resets) / len(subject.resets)
        report.step_ms = 1e3 * sum(subject.steps) / len(subject.steps)
    sentence = f"{len(subject.resets)} resets and {len(subject.steps)} steps in {spent:.2f} s"
    report.checks.append(Check("cost", True, sentence))


def _guard(report: Report, clock: Clock, name: str, law: Callable[[], str]) -> None:
    clock.law = name
    try:
        report.checks.append(Check(name, True, law()))
    except Broken as broken:
        report.checks.append(Check(name, False, str(broken)))
    except (Exception, SystemExit) as error:  # an environment may raise anything: say so and go on
        report.checks.append(Check(name, False, f"raised {type(error).__name__}: {error}"))
