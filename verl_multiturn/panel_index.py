"""Which tasks there are: the panels of an environment, how large they are, and whether they overlap."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, count
from typing import Any

from verl_multiturn.env import Env, make
from verl_multiturn.load import environment_folders
from verl_multiturn.panel import FIRST_ID, Panel, load_panel

# Names of lists that are tried where none is given; environments have no list of lists.
SPLITS = ("train", "val", "valid_seen", "valid_unseen", "dev", "test")
SIZE = 64  # tasks of a split that is built from seeds


@dataclass(frozen=True)
class Listed:
    """A panel, and where it comes from.

    Attributes:
        panel: the tasks.
        source: "shipped", "listed by the environment" or "from seed N".
    """

    panel: Panel
    source: str

    @property
    def types(self) -> dict[str, int]:
        """Tasks of each type, most frequent first."""
        return dict(Counter(task.type for task in self.panel.tasks).most_common())


def shipped() -> list[Listed]:
    """Every panel in an `environments/panels` folder, ours and the user's.

    Raises:
        ValueError: a file is no panel, or was changed.
    """
    names = {
        path.stem for folder in environment_folders() for path in sorted((folder / "panels").glob("*.json"))
    }
    return [Listed(load_panel(name), "shipped") for name in sorted(names)]


def of_env(
    env: str,
    kwargs: Mapping[str, Any],
    splits: Sequence[str] | None = None,
    first_seed: int = FIRST_ID["train"],
    size: int | None = None,
) -> list[Listed]:
    """The panels of one environment, as a run would build them.

    An environment that lists its tasks (`Env.tasks`) has one for each list; where tasks are seeds, test
    and val are the shipped panels or start at their usual seeds, and training tasks leave these out.

    Args:
        env: a name for `make`.
        kwargs: its keywords.
        splits: names of the environment's lists; None: those of `SPLITS` that it has.
        first_seed: where training tasks start, if tasks are seeds.
        size: most tasks of a panel; None: whole lists, 64 where tasks are seeds.

    Raises:
        ValueError: an unknown environment or keyword, a list that it lacks, no tasks.
    """
    if lists := _lists(env, kwargs, splits):
        return [
            Listed(Panel.build(env, kwargs, name, name, n=size, fewer=True), "listed by the environment")
            for name in lists
        ]
    ready = {one.panel.split: one for one in shipped() if _same(one.panel, env, kwargs)}
    for split in ("test", "val"):
        if split not in ready:
            ready[split] = _built(env, kwargs, FIRST_ID[split], split, size, frozenset())
    taken = frozenset[str]().union(*(one.panel.hashes for one in ready.values()))
    return [*ready.values(), _built(env, kwargs, first_seed, "train", size, taken)]


def overlaps(listed: Iterable[Listed]) -> list[tuple[str, str, int]]:
    """(name, name, tasks with equal content) of every two panels of the same environment and keywords."""
    return [
        (a.panel.name, b.panel.name, len(a.panel.hashes & b.panel.hashes))
        for a, b in combinations(listed, 2)
        if _same(a.panel, b.panel.env, b.panel.kwargs)
    ]


def _lists(env: str, kwargs: Mapping[str, Any], splits: Sequence[str] | None) -> list[str]:
    """The lists to show; empty where the tasks are seeds and no list was asked for."""
    one = make(env, **kwargs)
    try:
        if splits:
            for split in splits:
                one.tasks(split)  # raises for one that it lacks
            return list(splits)
        return [] if type(one).tasks is Env.tasks else [split for split in SPLITS if _has(one, split)]
    finally:
        one.close()


def _has(env: Env, split: str) -> bool:
    try:
        return bool(env.tasks(split))
    except ValueError:
        return False


def _same(panel: Panel, env: str, kwargs: Mapping[str, Any]) -> bool:
    return (panel.env, dict(panel.kwargs)) == (env, dict(kwargs))


def _built(
    env: str, kwargs: Mapping[str, Any], first: int, split: str, size: int | None, exclude: frozenset[str]
) -> Listed:
    panel = Panel.build(env, kwargs, count(first), split, exclude, size or SIZE, fewer=True)
    return Listed(panel, f"from seed {first}")
