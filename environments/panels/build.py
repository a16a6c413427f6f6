"""Build the shipped panels, for the environments' default arguments: python environments/panels/build.py.

A panel is fixed once results are published on it: run this only to add an environment, or after a
change of an environment that `Panel.verify` reports and the change log names.
"""

from itertools import count
from pathlib import Path

from verl_multiturn.panel import FIRST_ID, Panel, check_disjoint

SIZES: dict[str, tuple[int | None, int | None]] = {  # test, val; None: all that is distinct
    "bandit": (None, None),
    "chain_sum": (512, 64),
    "frozen_lake": (512, 64),
    "guess_my_city": (None, None),
    "sokoban": (256, 64),
    "twenty_questions": (None, None),
}


def build(folder: Path) -> None:
    """Write `<env>-test.json` and `<env>-val.json` for each environment."""
    for env, (tests, vals) in SIZES.items():
        test = Panel.build(env, {}, count(FIRST_ID["test"]), "test", n=tests)
        val = Panel.build(env, {}, count(FIRST_ID["val"]), "val", exclude=test.hashes, n=vals)
        check_disjoint(test, val)
        for panel in (test, val):
            panel.save(folder / f"{panel.name}.json")


if __name__ == "__main__":
    build(Path(__file__).parent)
