"""The advantages of several algorithms for the page of a run, computed again from its records."""

from collections.abc import Sequence

import numpy as np

from verl_multiturn.algorithms import Algorithm, Config, list_algorithms
from verl_multiturn.rescore import configured, score
from verl_multiturn.run_files import Record
from verl_multiturn.runs import Run, to_turns
from verl_multiturn.view_data import TurnScores


class Scorer:
    """Scores one step as training scored it: all its trajectories together, less those the filter left out.

    Turns are scored whole, also where the run cut them into steps.

    Args:
        run: whose configuration of each algorithm is used.
        names: of algorithms; None: all that are registered, those that the run configures wrongly without.

    Raises:
        ValueError: an unknown algorithm among `names`, or one that the run configures wrongly.
    """

    def __init__(self, run: Run, names: Sequence[str] | None = None) -> None:
        self.names = list(dict.fromkeys(list_algorithms() if names is None else names))
        self._chosen: dict[str, tuple[Algorithm, Config]] = {}
        self._refused: dict[str, str] = {}
        for name in self.names:
            try:
                self._chosen[name] = configured(run, name)
            except ValueError as error:
                if names is not None:
                    raise
                self._refused[name] = str(error)

    def __call__(self, split: str, records: list[Record]) -> tuple[list[TurnScores | None], dict[str, str]]:
        """For each trajectory its turns x `names`, None if not scored; and why a name has no numbers."""
        if not self.names:
            return [None] * len(records), {}
        impossible = dict(self._refused)
        scored = [
            one for one in records if one["turns"] and (split != "train" or one.get("trained") is not False)
        ]
        try:
            turns = to_turns(scored)
        except (KeyError, TypeError, ValueError) as error:
            lack = f"the records lack {error}" if isinstance(error, KeyError) else str(error)
            return [None] * len(records), dict.fromkeys(self.names, lack)
        columns = score(turns, self._chosen, impossible)
        nothing = np.full(len(turns), np.nan)
        table = np.stack([columns.get(name, nothing) for name in self.names], axis=1).tolist()
        found, start = dict[int, TurnScores](), 0
        for one in scored:
            stop = start + len(one["turns"])
            found[id(one)] = [[None if x != x else x for x in row] for row in table[start:stop]]
            start = stop
        return [found.get(id(one)) for one in records], impossible
