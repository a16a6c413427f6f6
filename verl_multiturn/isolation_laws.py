"""The laws on what an environment must leave alone: global chance, other instances, later episodes."""

import pickle
import random
from functools import partial
from typing import Any

import numpy as np

from verl_multiturn.env import derive_seed
from verl_multiturn.probe import Subject, Trace, need


def global_chance(s: Subject) -> str:
    """Neither `random` nor `numpy.random` is touched."""
    saved = random.getstate(), np.random.get_state()
    try:
        # A state no environment would seed by itself, else seeding the same number again would not show.
        random.seed(derive_seed("check_env"))
        np.random.seed(derive_seed("check_env") % 2**32)
        before = random.getstate(), pickle.dumps(np.random.get_state())
        for seed in s.seeds[:3]:
            s.reset(s.env, seed)
            s.play(s.env, partial(s.act, s.env, random.Random(seed)))
        after = random.getstate(), pickle.dumps(np.random.get_state())
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
    for i, name in enumerate(("random", "numpy.random")):
        need(before[i] == after[i], f"it uses or seeds the global `{name}`: use self.rng and self.noise.")
    return "the global generators are left alone"


def instances(s: Subject) -> str:
    """Two instances of one process, stepped in turns, do what each does alone."""
    if not s.fresh:
        return "not tried: an instance was given"
    if s.env.runs_in == "process":
        return "not tried: each instance has a process of its own"
    for first, second in zip(s.seeds, s.seeds[1:] or s.seeds, strict=False):
        pair = [(s.env, first), (s.other, second)]
        alone, plans = [], []
        for env, seed in pair:
            s.reset(env, seed, seed)
            actions, trace = s.play(env, partial(s.act, env, random.Random(seed)))
            plans.append(actions)
            alone.append(_outcomes(trace))
        together: list[Trace] = [[], []]
        for env, seed in pair:
            s.reset(env, seed, seed)
        for t in range(max(map(len, plans))):
            for i, (env, _) in enumerate(pair):
                if t < len(plans[i]) and not _over(together[i]):
                    together[i].append(s.step(env, plans[i][t]))
        same = [_outcomes(trace) for trace in together] == alone
        need(
            same,
            f"two instances stepped in turns do not do what each does alone (seeds {first}, {second}): they "
            'share state of the class or module; keep it in self, or declare runs_in = "process".',
        )
    return "two instances stepped in turns do what each does alone"


def success_flags(s: Subject) -> str:
    """After other episodes were won, an episode's success is what it was before."""
    for seed, (actions, before) in s.first.items():
        for env in (s.env, s.other):
            s.reset(env, seed)
            for t, action in enumerate(actions):
                now = s.step(env, action)[4]["success"]
                need(
                    now == before[t],
                    f"success of seed {seed} at step {t} was {before[t]} at first and is {now} after other "
                    "episodes: it outlives its episode; keep it in self and clear it in _reset.",
                )
    return "success is not left over from other episodes"


def _over(trace: Trace) -> bool:
    return bool(trace and (trace[-1][2] or trace[-1][3]))


def _outcomes(trace: Trace) -> list[Any]:
    return [(*t[:4], t[4]["success"]) for t in trace]
