"""Makes one TextWorld game: run as a program, with its description as JSON in the only argument.

A process of its own, with a fixed PYTHONHASHSEED: TextWorld's makers draw from global generators, and
the cooking games also from the order of sets.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

CHALLENGES = {
    "coin": "tw-coin_collector",
    "treasure": "tw-treasure_hunter",
    "cooking": "tw-cooking",
    "simple": "tw-simple",
}
FOODS = {"train": "train", "val": "valid", "test": "test"}  # the cooking games' own word for each split


def build(kind: str, settings: dict[str, Any], split: str, seed: int, folder: str) -> None:
    """Write game.z8, game.json and meta.json into `folder`."""
    import textworld
    from textworld.generator import compile_game, make_game
    from textworld.generator.inform7 import generate_inform7_source

    options = textworld.GameOptions()
    options.seeds = seed
    options.path = str(Path(folder) / "game.z8")
    options.grammar.only_last_action = settings.pop("only_last_action", False)
    held_out = settings.pop("held_out", False)
    if kind == "custom":
        options.nb_rooms, options.nb_objects = settings["world_size"], settings["nb_objects"]
        options.nb_parallel_quests = settings["nb_parallel_quests"]
        options.quest_length, options.quest_breadth = settings["quest_length"], settings["quest_breadth"]
        options.grammar.theme = settings["theme"]
        game = make_game(options)
    else:
        from textworld.challenges import CHALLENGES as makers

        if kind == "cooking":
            settings |= {"recipe_seed": 0, "split": FOODS[split] if held_out else None}
        elif kind == "simple":
            settings["test"] = held_out and split != "train"
        game = makers[CHALLENGES[kind]][1](settings=settings, options=options)
    compile_game(game, options)
    (Path(folder) / "game.ni").unlink()
    source = generate_inform7_source(game)
    meta = {
        "digest": hashlib.blake2b(source.encode(), digest_size=16).hexdigest(),
        "objective": " ".join(game.objective.split()),
        "max_score": game.max_score,
        "walkthrough": game.metadata.get("walkthrough"),
    }
    (Path(folder) / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


if __name__ == "__main__":
    os.nice(5)  # whoever trains beside it goes first
    build(**json.loads(sys.argv[1]))
