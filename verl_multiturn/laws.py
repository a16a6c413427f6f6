"""The laws of the environment contract: each returns a sentence, or raises `Broken` with one."""

import pickle
import random
from collections.abc import Callable, Hashable
from functools import partial

from verl_multiturn.env import derive_seed
from verl_multiturn.isolation_laws import global_chance, instances, success_flags
from verl_multiturn.probe import Broken, Subject, kind, need

NONSENSE = ("", "no such action \N{SNOWMAN}", "x" * 2_000)


def types(s: Subject) -> str:
    """Attributes, reset and step have the contract's types."""
    for seed in s.seeds:
        rng = random.Random(seed)
        _, info = s.reset(s.env, seed)
        need(isinstance(info.get("task_type"), str), "reset's info['task_type'] must be a str.")
        need(isinstance(s.env.instruction, str) and s.env.instruction, "instruction must be a text.")
        turns = s.env.max_turns
        need(isinstance(turns, int) and turns >= 1, f"max_turns is {turns!r}, not a positive int.")
        actions, trace = s.play(s.env, partial(s.act, s.env, rng))
        s.first.setdefault(seed, (actions, [t[4]["success"] for t in trace]))
    need(s.env.snapshots in ("copy", "replay", "none"), f"snapshots is {s.env.snapshots!r}.")
    need(s.env.runs_in in ("thread", "process"), f"runs_in is {s.env.runs_in!r}.")
    return "attributes, reset and step have the right types"


def before_reset(s: Subject) -> str:
    """A new environment refuses to step."""
    if not s.fresh:
        return "not tried: an instance was given"
    try:
        s.other.step("")
    except Exception:
        return "step before the first reset raises"  # any refusal will do
    raise Broken("step before the first reset must raise.")


def same_seed(s: Subject) -> str:
    """The same seeds and actions give the same text and rewards, in another instance too."""
    for seed in s.seeds:
        rng = random.Random(seed)
        first = s.reset(s.env, seed, seed)[0]
        actions, trace = s.play(s.env, partial(s.act, s.env, rng))
        for env in (s.env, s.other):
            need(s.reset(env, seed, seed)[0] == first, f"reset({seed}) does not always give the same text.")
            same = [t[:4] for t in s.follow(env, actions)] == [t[:4] for t in trace]
            need(same, f"the same seeds and actions do not give the same episode (seed {seed}).")
    return "the same seeds and actions give the same episode"


def dynamics_seed(s: Subject) -> str:
    """Another dynamics_seed leaves the start as it was."""
    for seed in s.seeds:
        starts = {(s.reset(s.env, seed, noise)[0], s.env.instruction) for noise in (1, 2, 3)}
        need(len(starts) == 1, f"another dynamics_seed changes the start of seed {seed}.")
    return "another dynamics_seed leaves the start as it was"


def state_keys(s: Subject) -> str:
    """Keys are hashable, stable, and equal for equal states."""
    for seed in s.seeds:
        keys: list[list[Hashable]] = []
        actions = s.middle(s.env, seed)
        for env in (s.env, s.other):
            if s.middle(env, seed) != actions:
                raise Broken(f"the same seeds do not give the same episode (seed {seed}).")
            keys.append([env.state_key(), *(t[4] for t in s.follow(env, actions))])
        for key in keys[0]:
            try:
                hash(key)
            except TypeError as error:
                raise Broken(f"state_key() returned {kind(key)}: {error}.") from None
        need(keys[0] == keys[1], f"state_key() differs between equal states (seed {seed}).")
    return "state keys are hashable and equal for equal states"


def endings(s: Subject) -> str:
    """An episode ends once, in time, and then refuses to go on."""
    for seed in s.seeds:
        rng = random.Random(seed)
        s.reset(s.env, seed)
        actions, trace = s.play(s.env, partial(s.act, s.env, rng))
        both = trace[-1][2] and trace[-1][3]
        need(not both, f"terminated and truncated at once (seed {seed}, step {len(trace) - 1}).")
        late = len(actions) > s.env.max_turns
        need(not late, f"an episode took {len(actions)} steps; max_turns is {s.env.max_turns}.")
        try:
            s.env.step(actions[-1])
        except Exception:
            continue  # any refusal will do
        raise Broken("step after the end must raise.")
    return "episodes end within max_turns, never terminated and truncated at once; then step raises"


def unknown_action(s: Subject) -> str:
    """Nonsense does not raise, and an invalid turn leaves the state as it was."""
    for seed in s.seeds[:2]:
        for action in NONSENSE:
            s.reset(s.env, seed)
            before, listed = s.env.state_key(), s.env.admissible()
            try:
                info = s.step(s.env, action)[4]
            except Broken:
                raise
            except Exception as error:
                raise Broken(f"action {action[:20]!r} raised {type(error).__name__}: {error}") from None
            valid = info["valid"]
            need(
                valid or not info["success"],
                f"info['success'] is True after the invalid action {action[:20]!r}, the first of an episode.",
            )
            known = listed is None or action in listed or not valid
            need(known, f"action {action[:20]!r} is not admissible, yet info['valid'] is True.")
            need(
                valid or s.env.state_key() == before, f"invalid action {action[:20]!r} changed the state key."
            )
    return "unknown actions are invalid turns, without an exception"


def snapshot(s: Subject) -> str:
    """From any snapshot the same actions give the same; parent and siblings stay apart."""
    if s.env.snapshots == "none":
        return 'not tried: snapshots = "none"'
    for seed in s.seeds:
        actions = s.middle(s.env, seed)
        saved, key = s.timed(s.env.snapshot), s.env.state_key()
        child, sibling = s.timed(s.env.fork), s.timed(s.env.fork)
        need(child is not s.env, "fork returns the environment itself.")
        truth = s.follow(child, actions)
        need(s.env.state_key() == key, f"a fork's steps changed its parent (seed {seed}).")
        need(s.follow(sibling, actions) == truth, f"two forks of one state differ (seed {seed}).")
        need(s.follow(s.env, actions) == truth, f"a fork's steps changed its parent (seed {seed}).")
        for _ in range(2):
            s.timed(s.env.restore, saved)
            need(s.env.state_key() == key, f"restore does not bring back the state key (seed {seed}).")
            need(
                s.follow(s.env, actions) == truth,
                f"from a snapshot the same actions give another episode (seed {seed}).",
            )
        twins = []
        for _ in range(2):
            s.timed(s.env.restore, saved, seed=derive_seed(seed, "twin"))
            need(s.env.state_key() == key, f"restore with a seed changes the state (seed {seed}).")
            twins.append(s.step(s.env, actions[0])[:4])
        need(twins[0] == twins[1], f"restore with the same seed gives two different steps (seed {seed}).")
        s.timed(child.close)
        s.timed(sibling.close)
    return f'snapshots ("{s.env.snapshots}") replay exactly; parent and siblings stay apart'


def pickles(s: Subject) -> str:
    """A pickled copy goes on as the original does."""
    for seed in s.seeds[:3]:
        actions = s.middle(s.env, seed)
        copy = s.timed(pickle.loads, s.timed(pickle.dumps, s.env))
        same = s.follow(copy, actions) == s.follow(s.env, actions)
        need(same, f"after a pickle round trip the episode goes on differently (seed {seed}).")
    return "a pickled copy goes on as the original does"


def random_play(s: Subject) -> str:
    """A random policy finishes."""
    try:
        won = _wins(s, lambda rng: s.env.random_action(rng))
    except NotImplementedError:
        return "not shown: it has no random actions"
    return f"a random policy finishes; success in {won} of {len(s.seeds)}"


def expert_play(s: Subject) -> str:
    """The scripted expert finishes, and wins at least once."""
    try:
        won = _wins(s, lambda rng: s.env.expert())
    except NotImplementedError:
        return "not shown: it has no scripted expert"
    need(won, f"the expert never succeeded in {len(s.seeds)} episodes: success may be out of reach.")
    return f"the expert finishes; success in {won} of {len(s.seeds)}"


def success(s: Subject) -> str:
    """Success is reachable; where nobody shows it, that is said, not failed."""
    for who, choose in (("expert", lambda rng: s.env.expert()), ("random policy", s.env.random_action)):
        try:
            if _wins(s, choose):
                return f"success is reachable: shown by the {who}"
        except NotImplementedError:
            continue
    return "not shown: neither an expert nor the random policy reached success"


def _wins(s: Subject, choose: Callable[[random.Random], str]) -> int:
    won = 0
    for seed in s.seeds:
        rng = random.Random(seed)
        s.reset(s.env, seed)
        won += s.play(s.env, partial(choose, rng))[1][-1][4]["success"]
    return won


LAWS: list[tuple[str, Callable[[Subject], str]]] = [
    ("types", types),
    ("before reset", before_reset),
    ("same seed", same_seed),
    ("dynamics seed", dynamics_seed),
    ("state keys", state_keys),
    ("endings", endings),
    ("unknown action", unknown_action),
    ("snapshot", snapshot),
    ("pickle", pickles),
    ("global random", global_chance),
    ("instances", instances),
    ("random policy", random_play),
    ("expert", expert_play),
    ("success", success),
    ("success flags", success_flags),
]
