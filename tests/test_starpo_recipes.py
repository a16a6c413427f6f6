"""StarPO's recipes play the papers' games, prompts say what settings allow, and starpo.md says what works."""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from verl_multiturn.compose import CONFIG, FREE, _freed, compose, plain
from verl_multiturn.configure import prepare
from verl_multiturn.env import derive_seed, make
from verl_multiturn.play_settings import settings
from verl_multiturn.rollout.prompts import View, prompt_policy
from verl_multiturn.runs import RunWriter
from verl_multiturn.tables.published import load_table

RECIPES = Path(__file__).parents[1] / "recipes"
PAGE = (RECIPES / "starpo.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line, comments=True) for line in re.findall(r"^    (\w.*)$", PAGE, re.MULTILINE)]
RUNS = [(Path(words[1]).stem, *words[2:]) for words in COMMANDS if words[0] == "bash"]
EVALUATIONS = [words[2:] for words in COMMANDS if words[:2] == ["verl-multiturn", "eval"]]
LAKE = {"hole_prob": 0.2, "slip": 0.6667, "min_distance": 1, "max_distance": 10}
GAMES = {
    "frozenlake": LAKE | {"coordinates": False, "max_turns": 10},
    "sokoban": {"coordinates": False, "min_solution": 1, "max_turns": 10},
    "bandit": {"low_reward": 0.15},
    "countdown": {},
}


@cache
def composed(recipe, *overrides):
    return compose(recipe, list(overrides))


def line(recipe, *overrides):
    """What a line comes to; a recipe is composed once, and hydra puts the line's values on top."""
    if any(one.startswith("credit=") or one == "multiturn.env_kwargs=null" for one in overrides):
        return compose(recipe, list(overrides))
    config = composed(recipe).copy()
    freed = [part for one in overrides for part in _freed(one)]
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(freed), config)
    return config


def game(name):
    """The settings of a game on GPUs, without an algorithm."""
    files = (CONFIG / "multiturn.yaml", RECIPES / "ragen.yaml", RECIPES / f"ragen_{name}.yaml")
    return plain(OmegaConf.merge(*(OmegaConf.load(file).multiturn for file in files), {"run": "unnamed"}))


def said(block, view):
    """First and second message of an episode."""
    policy = prompt_policy(block)
    first = policy.messages(view, 0, None)[-1]["content"]
    view.past.append((view.observation, "up"))
    return first, policy.follow_up(view)["content"]


def test_the_page_has_lines_to_test():
    assert len(COMMANDS) == len(RUNS) + len(EVALUATIONS) and len(RUNS) >= 20 and len(EVALUATIONS) == 3
    (method,) = [one for one in load_table("starpo-main").methods if one.name == "StarPO-S, no thinking"]
    assert ("starpo_s_sokoban", *method.set) in RUNS


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_each_line_of_the_page_can_be_run(words):
    """It composes, contradicts nothing, and its environment, turns and prompts allow the same budget."""
    config = prepare(line(*words))
    block = plain(config.multiturn)
    env = make(block["env"], **block["env_kwargs"])
    assert block["max_actions"] <= env.max_turns
    assert block["max_turns"] * block["action"]["max_actions"] >= block["max_actions"]
    limits = f"turns {block['max_turns']}, actions {block['max_actions']}."
    first, _ = said(block, View(env.instruction, env.reset(500000)[0]))
    most = min(block["max_actions"], block["action"]["max_actions"])
    assert limits in first and (f"up to {most} actions, separated by ||" in first) == (most > 1)
    assert all("first_seed" in block[split] for split in ("val", "test"))  # of whatever environment


@pytest.mark.parametrize("name", GAMES)
def test_the_papers_game_is_played_and_can_be_won(name):
    block, tasks = game(name), 8 if name == "bandit" else 256
    assert block["env_kwargs"] == GAMES[name]
    assert block["val"] == {"first_seed": 500000, "size": tasks}
    env, won = make(block["env"], **block["env_kwargs"]), 0
    assert env.max_turns == block["max_actions"]
    for task in range(500000, 500016):
        env.reset(task, derive_seed(task, 0))
        over = False
        while not over:
            _, _, terminated, truncated, info = env.step(env.expert())
            over = terminated or truncated
        won += info["success"]
    assert won >= (4 if name == "frozenlake" else 16)  # its ice is slippery


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_who_says_ragens_game_plays_it(path):
    head, config = path.read_text(encoding="utf-8").partition("\n")[0], OmegaConf.load(path)
    name = path.stem.rpartition("_")[2]
    if "recipe" in config and ("RAGEN's" in head or path.stem.startswith("starpo")) and name in GAMES:
        assert config.defaults[0] == f"ragen_{name}"
        assert "Figures 5 and 9" in head or "RAGEN-2" in head or f"as in starpo_{name}" in head
    else:
        assert "Figures 5 and 9" not in head


@pytest.mark.parametrize(
    ("recipe", "env"), [("starpo_s_frozenlake", "frozen_lake"), ("archer_sokoban", "sokoban")]
)
def test_on_the_cpu_our_panels(recipe, env):
    block = plain(composed(recipe, "hardware=cpu").multiturn)
    assert (block["env_kwargs"], block["val"], block["test"]) == ({}, f"{env}-val", f"{env}-test")
    assert (block["max_turns"], block["max_actions"], block["action"]["max_actions"]) == (10, None, 1)


@pytest.mark.parametrize("most", range(1, 8))
def test_prompts_of_table_3(most):
    """Actions per turn 1 to 7: what the policy reads is what is executed, and turns count from 1."""
    block = game("sokoban")
    block["action"]["max_actions"] = most
    first, second = said(block, View("Push.", "a room"))
    assert first.startswith("Push.\nLimits of an episode: turns 5, actions 10.\n\nTurn 1:\nState:\na room")
    assert second.startswith("Turn 2:\nState:\na room")
    for text in (first, second):
        assert ("||" in text) == (most > 1)
        assert re.findall(r"up to (\d) actions", text) == ([str(most)] if most > 1 else [])


def test_turn_rows_say_it_as_well():
    view = View("Push.", "now", past=[("a", "up || left"), ("b", "down")])
    (message,) = prompt_policy(game("sokoban")).messages(view, 2, None)
    shown = "Turn 1:\na\nYour answer: up || left\nTurn 2:\nb\nYour answer: down\n\nTurn 3:\n"
    assert shown in message["content"]
    assert "turns 5, actions 10" in message["content"] and "up to 5 actions" in message["content"]


def keys():
    """The names in the second column of the table of RAGEN's keys; `.b` beside `x.a` is x.b."""
    for row in re.findall(r"^\| `.*$", PAGE, re.MULTILINE):
        ours, above = row.strip("| ").split(" | ")[1], ""
        for word in " ".join(re.findall(r"`([^`]+)`", ours)).split():
            key = re.split(r"[:=]", word)[0]
            for stem, ends in re.findall(r"^([\w.]+)\.\{([\w,]+)\}$", word):
                yield from (f"{stem}.{end}" for end in ends.split(","))
            if "." in key and re.fullmatch(r"\.?[a-z_]\w*(\.\w+)*", key):
                yield above + key if key.startswith(".") else key
                above = above if key.startswith(".") else key.rpartition(".")[0]


def test_every_key_of_ours_in_the_table_exists():
    config, named, unset = composed("starpo_s_sokoban"), sorted(set(keys())), object()
    assert len(named) > 40 and {"multiturn.filter.value", "multiturn.normalize.method"} <= set(named)
    absent = [key for key in named if OmegaConf.select(config, key, default=unset) is unset]
    assert [key for key in absent if not key.startswith(FREE)] == []


@pytest.mark.parametrize("words", EVALUATIONS, ids=" ".join)
def test_a_recorded_run_can_be_evaluated_on_other_variants(words, tmp_path):
    recorded = game(words[0].rpartition("_")[2])
    with RunWriter(tmp_path / "run", {"multiturn": recorded}):
        pass
    block = plain(settings(run=tmp_path / "run", overrides=words[1:]).multiturn)
    assert block["env_kwargs"].items() > recorded["env_kwargs"].items()
    make(block["env"], **block["env_kwargs"]).reset(block["test"]["first_seed"])
