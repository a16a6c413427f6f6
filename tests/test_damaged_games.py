"""ALFWorld's files, damaged: the sentence names the file; the engine and its process live on."""

import importlib.util
import json
import random
import shutil
from pathlib import Path

import pytest

pytest.importorskip("alfworld", reason="needs the extra alfworld")
pytest.importorskip("textworld.envs.pddl.pddl", reason="needs the extra alfworld")

from environments.alfworld_parts import library
from environments.alfworld_parts.games import Request, write_games
from verl_multiturn.env import make

spec = importlib.util.spec_from_file_location("fuzz", Path(__file__).parent / "bench" / "fuzz.py")
fuzz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz)


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    out = tmp_path_factory.mktemp("games") / "out"
    write_games(out, Request({"train": 2}, 3, 8, 10, workers=1), quiet=True)
    (out / "generated.json").unlink()  # as a download: every file is looked at
    return out


@pytest.fixture
def folder(games, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_MULTITURN_CACHE", str(tmp_path / "cache"))
    shutil.copytree(games, tmp_path / "data")
    yield tmp_path / "data"
    library.games.cache_clear()


def played(folder):
    """Both games of the folder, three steps each."""
    library.games.cache_clear()
    env = make("alfworld", data=str(folder))
    try:
        for seed in (0, 1):
            env.reset(seed)
            for _ in range(3):
                env.step(env.expert())
    finally:
        env.close()


@pytest.mark.parametrize("name", ["game.tw-pddl", "traj_data.json"])
def test_a_damaged_game(folder, name):
    path, rng, refused = sorted(folder.rglob(name))[0], random.Random(5), 0
    good = path.read_bytes()
    variants = [*fuzz.damaged(good, rng, flips=3), *fuzz.changed(good, rng, 3)]
    pddl = json.loads(good)
    for key in ("pddl_problem", "grammar", "solvable", "pddl_domain", "pddl_params", "task_type"):
        if key in pddl:
            variants.append(json.dumps({name: value for name, value in pddl.items() if name != key}).encode())
            if isinstance(pddl[key], str):  # cut inside a text: JSON, but no game
                variants.append(json.dumps(pddl | {key: pddl[key][: len(pddl[key]) // 2]}).encode())
    for data in variants:
        path.write_bytes(data)
        try:
            played(folder)
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error) and "alfworld-download -f" in str(error)
            refused += 1
    path.write_bytes(good)
    played(folder)
    assert refused > len(variants) // 2


def test_a_damaged_list_of_games(folder, tmp_path):
    """The manifest in the cache: what it holds may be written again."""
    played(folder)
    (path,) = (tmp_path / "cache/alfworld/manifests").glob("*.json")
    good = path.read_bytes()
    for data in fuzz.damaged(good, random.Random(6), flips=2):
        path.write_bytes(data)
        try:
            played(folder)
        except ValueError as error:
            # Flipped, a game may have another name or type: then there is none such.
            assert str(path) in str(error) or str(folder) in str(error), error


def test_damaged_results_of_the_engine(folder, tmp_path):
    """What was computed once and kept: cut or flipped, it names itself and says what to do."""
    from environments.alfworld_parts import engine

    engine.translated.cache_clear()
    played(folder)
    kept = (tmp_path / "cache/alfworld/sas").rglob("*")
    good = {path: path.read_bytes() for path in kept if path.is_file() and path.stat().st_size}
    assert len(good) == 2
    for cut in (slice(0), slice(100), slice(-3), slice(1, None)):
        for path, data in good.items():
            path.write_bytes(data[cut])
        engine.translated.cache_clear()
        with pytest.raises(ValueError, match="delete it, it is computed again"):
            played(folder)
    for path, data in good.items():
        path.write_bytes(data)
    engine.translated.cache_clear()
    played(folder)
