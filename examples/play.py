"""Play an environment in the terminal, yourself or by policy: `verl-multiturn play`, as a script.

    python examples/play.py frozen_lake
    python examples/play.py sokoban --policy expert --seed 7
    python examples/play.py examples/new_environment.py:GuessNumber --policy random --episodes 20

Type an action or its number; an empty line asks the scripted expert, q ends the game.
"""

import sys

from verl_multiturn.cli import app

if __name__ == "__main__":
    app(["play", *sys.argv[1:]])
