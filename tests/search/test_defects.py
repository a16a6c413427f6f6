"""The defects of the original's public code (B1 to B25 in our notes), each as a test of what is done instead.

In test_q_model.py: B8 (another score than the fitted one), B18 (a prompt cut at its end). Not tested, because
there is nothing of the kind: B6 and B9 (functions that return other shapes than their callers unpack), B11
(prompts read from files), B24 (a device in the code), B25 (a key in it).
"""

import ast
import asyncio
import json
import math
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

import verl_multiturn as vm
from verl_multiturn.base_env import Env
from verl_multiturn.cli import app
from verl_multiturn.endpoint import TextChat
from verl_multiturn.panel import Panel, check_disjoint
from verl_multiturn.play_settings import settings
from verl_multiturn.rollout.episode import Sample
from verl_multiturn.search import mcts
from verl_multiturn.search.collect import Collection
from verl_multiturn.search.fit import Fitting, fit
from verl_multiturn.search.fit_data import FitConfig, Lengths, rows_of
from verl_multiturn.search.guided import Guide
from verl_multiturn.search.mcts import PRESETS, SearchConfig, search
from verl_multiturn.search.pair_files import read_pairs, write_pairs
from verl_multiturn.search.q_model import QModel, QSpec, Tokens, load_q_model
from verl_multiturn.search.scorers import TransformersLogProbs
from verl_multiturn.search.scripted import Scripted
from verl_multiturn.search.tree_files import TreeFolder, config_of, read_trees
from verl_multiturn.tasks import training_tasks

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "qvalue_vectors.json").read_text())


class Case(Env):
    """Letters; the path so far decides. `ENDS` maps a path to (reward, success)."""

    ENDS = {}
    max_turns = 20
    steps = 0

    def _reset(self, seed):
        self.path, self.page, self.answered = "", "none", False
        return "at:", {}

    def _step(self, action):
        type(self).steps += 1
        if action == "?":
            return self._observation, 0.0, False, {"valid": False}
        if action.startswith("open"):
            self.page = action[5:]
        self.answered = self.answered or action == "answer"
        self.path += action
        reward, success = self.ENDS.get(self.path, (0.0, False))
        over = self.path in self.ENDS
        return f"{self.page} {self.answered}", reward, over, {"success": success}


def case(ends, **attributes):
    env = type("Case", (Case,), {"ENDS": ends, "steps": 0} | attributes)()
    return env, env.reset(0)[0]


def always(*actions):
    return lambda observation, history, n, rng: list(actions[:n])


def by_path(tree):
    return {"".join(str(n.action) for n in node.path[1:]): node for node in tree.nodes()}


def path_of(node):
    return [one.action for one in node.path[1:]]


def test_b1_the_mean_is_divided_by_the_visits_once():
    given = VECTORS["V2_uct_repo_double_division"]
    W = [q * n for q, n in zip(given["q"], given["n"], strict=True)]
    assert vm.uct(W, given["n"], given["n_parent"]) == pytest.approx(given["ref"], abs=1e-9)
    assert [name for name, one in PRESETS.items() if one.divide_twice] == ["repo_compat"]


def test_b2_a_jump_restores_the_state():
    tree = search(
        *case({}), always("open a", "open b", "look"), config=SearchConfig(iterations=60, max_depth=3)
    )
    looked = [node for node in tree.nodes() if node.executed and node.action == "look"]
    assert len(looked) > 5
    for node in looked:
        opened = [n.action[5:] for n in node.path[1:] if n.action.startswith("open")]
        assert node.observation == f"{opened[-1] if opened else 'none'} False"


def test_b2_a_right_answer_in_one_branch_does_not_reward_the_others():
    tree = search(
        *case({"answer": (1.0, True)}), always("answer", "look"), config=SearchConfig(iterations=30)
    )
    apart = [node for node in tree.nodes() if node.parent and node.executed and "answer" not in path_of(node)]
    assert len(apart) > 2
    assert all(node.observation.endswith("False") and node.reward == 0 for node in apart)


def test_b3_the_success_that_ends_the_search_has_its_value():
    ends = {"aa": (0.0, False), "ab": (1.0, True)}
    config = SearchConfig(width=2, stop_on_success=True)
    tree = search(*case(ends), always("a", "b"), always("c"), config)
    assert tree.stopped == "success" and (by_path(tree)["ab"].N, by_path(tree)["ab"].W) == (1, 1.0)
    (pair,) = [p for p in vm.preference_pairs(tree.to_dict(), win="argmax") if p["path"] == ["a"]]
    assert (pair["win"], pair["lose"]) == ("b", "a")


def test_b4_a_node_with_ended_children_stays_in_the_tree():
    ends = {"aa": (1.0, True), "ab": (0.0, False), "b": (0.0, False)}
    tree = search(*case(ends), always("a", "b"), config=SearchConfig(width=2))
    assert tree.stopped == "closed" and tree.success and by_path(tree)["aa"].success


def test_b5_a_root_whose_children_have_ended_ends_the_search():
    tree = search(
        *case(dict.fromkeys("abc", (0.0, False))), always(*"abc"), config=SearchConfig(iterations=999)
    )
    assert (tree.stopped, tree.iterations) == ("closed", 3)


class Letters:
    """A tokenizer: each letter is a token, each message a line."""

    eos_token_id = 0

    def encode(self, text, add_special_tokens):
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return "".join(f"{one['role']}: {one['content']}\n" for one in messages)


class Wanderer:
    """A policy that moves at random, in the form of a run."""

    token_ids, eos, player, close = False, 0, Scripted.player, Scripted.close

    def __init__(self):
        self.texts = TextChat()

    def chat(self, **kwargs):
        return self.texts

    def decode(self, ids):
        return self.texts.decode(ids)

    async def __call__(self, prompt_ids, max_tokens, seed):
        move = random.Random(seed).choice(["up", "down", "left", "right"])
        return Sample([*self.texts.encode(f"<think>so</think><action>{move}</action>"), 0])


def test_b7_what_is_fitted_is_what_is_scored(tmp_path):
    """Worked examples included: the tokens of a pair are those that the Q model reads when an agent plays."""
    pytest.importorskip("verl")
    from verl_multiturn.evaluate import Evaluation

    example = "Example: P is left of G, so <action>right</action>."
    config = settings(
        "frozen_lake",
        overrides=[
            f"multiturn.prompt.system='{example}'",
            "multiturn.search.iterations=30",
            "multiturn.row=turn",
        ],
    )
    panel = training_tasks(config.multiturn, 6)
    Collection(config, panel, Wanderer(), "wanderer", tmp_path / "trees").run()
    write_pairs(tmp_path / "trees", tmp_path / "pairs", {"held_out": 0.5})
    tokens, scored = Tokens(Letters(), 10**6), []

    def log_probs(prompt, answers):
        scored.append((prompt, answers))
        return [[0.0] * len(answer) for answer in answers]

    q = QModel(QSpec("somewhere"), tokens, log_probs, log_probs)
    rows = rows_of(tmp_path / "pairs", tokens, FitConfig(), Lengths())
    pairs = [pair for split in rows for pair in read_pairs(tmp_path / "pairs") if pair["split"] == split]
    both = list(zip(pairs, [row for split in rows.values() for row in split], strict=True))
    evaluation = Evaluation(config, panel, Wanderer(), tmp_path / "eval", guide=Guide("argmax", 5, q))
    evaluation.run()
    read = [prompt for prompt, _ in scored]
    first = [row.prompt for pair, row in both if pair["index"] == 0]
    assert first and all(prompt in read for prompt in first)
    assert all(example in "".join(map(chr, prompt)) for prompt in (*read, *first))
    for pair, row in both:
        scored.clear()
        q(pair["prompt"], [pair["win"], pair["lose"]])
        assert scored == [(row.prompt, [row.win, row.lose])] * 2


def test_b10_a_base_model_without_a_chat_template(tmp_path, save_chat_model):
    """It is asked for where fitting begins, and kept with the Q model: scoring needs to be told nothing."""
    save_chat_model(tmp_path / "base", template=None)
    with pytest.raises(
        ValueError, match=r"has no chat template: .* or give one in multiturn.fit.chat_template"
    ):
        fit(one_pair(tmp_path), str(tmp_path / "base"), tmp_path / "q", FitConfig())
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    config = FitConfig(chat_template=template, epochs=1)
    fit(one_pair(tmp_path), str(tmp_path / "base"), tmp_path / "q", config)
    q = load_q_model(tmp_path / "q")
    known = ("left", "right", "goal", "ice")
    ids = dict(zip(known, q.tokens.tokenizer.convert_tokens_to_ids(known), strict=True))
    assert q.tokens.prompt([{"role": "user", "content": "goal ice"}], 2) == [ids["goal"], ids["ice"]]
    assert len(q([{"role": "user", "content": "goal ice"}], ["left", "right"])) == 2


def one_pair(folder):
    """A file of one pair to train on and one held out."""
    pair = {"prompt": [{"role": "user", "content": "goal ice"}], "win": "left", "lose": "left left"}
    lines = [json.dumps(pair | {"split": split}) for split in ("train", "held_out")]
    (folder / "pairs").write_text("\n".join(lines))
    return folder / "pairs"


def test_b17_the_tokens_of_an_answer_are_found_whatever_stands_before_it(tmp_path, save_chat_model):
    """As one text, prompt and answer are other tokens: looking for the answer there would mask all of it."""
    save_chat_model(tmp_path / "base")
    fitting = Fitting(
        one_pair(tmp_path), str(tmp_path / "base"), tmp_path / "q", FitConfig(lr=1e-2, epochs=9)
    )
    (row,) = fitting.rows["train"]
    tokenizer = fitting.tokenizer
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "goal ice"}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.encode(text + "left") != [*row.prompt, *row.win[:-1]]
    loss, _ = fitting._losses([row], fitting.reference["train"])
    assert loss.tolist() == pytest.approx([math.log(2)], abs=1e-6)  # nothing is fitted yet
    loss.sum().backward()
    moved = sum(float(one.grad.abs().sum()) for one in fitting.model.parameters() if one.grad is not None)
    assert moved > 0.01
    fitting.model.zero_grad()
    assert fitting.run()["loss"] < 0.9 * math.log(2)


def test_b19_each_command_reads_what_the_one_before_wrote(tmp_path, save_chat_model, monkeypatch):
    """By default names, in one folder."""
    save_chat_model(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    bare = [f"multiturn.prompt.{name}='{{observation}}'" for name in ("first", "turn", "next")]
    bare += ["multiturn.prompt.format=''", "multiturn.action.tag=null", "multiturn.action.think=false"]
    bare += ["multiturn.prompt.history=0", "multiturn.search.iterations=20", "multiturn.pairs.held_out=0.5"]
    for arguments in (
        ["search", "--env", "frozen_lake", "--model", "expert:0.5", "--limit", "8", *bare],
        ["pairs", "trees"],
        ["fit-q", "pairs.jsonl", "epochs=1", "--model", "base"],
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, (result.output, result.exception)
    assert len(load_q_model("q_model")([{"role": "user", "content": "ice"}], ["left", "right"])) == 2


def test_b12_an_action_with_colons_stays_whole(tmp_path):
    ends = {"click[size: 9: wide]": (1.0, True), "click[size: 9: slim]": (0.0, False)}
    tree = search(*case(ends), always(*ends), config=SearchConfig())
    (pair,) = vm.preference_pairs(tree.to_dict())
    assert (pair["win"], pair["lose"]) == tuple(ends)


def test_b13_a_failed_rollout_is_an_error_not_a_return():
    def broken(observation, history, n, rng):
        raise OSError("the server is gone")

    with pytest.raises(OSError, match="the server is gone"):
        search(*case({}), always("a"), broken)


@pytest.mark.parametrize("file", sorted(Path(mcts.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_b13_b14_nothing_catches_everything(file):
    """The original hides wrong calls behind bare excepts."""
    for one in ast.walk(ast.parse(file.read_text())):
        if isinstance(one, ast.ExceptHandler) and (
            one.type is None or (isinstance(one.type, ast.Name) and one.type.id == "BaseException")
        ):
            assert isinstance(one.body[-1], ast.Raise) and one.body[-1].exc is None, f"{file}:{one.lineno}"


def test_b15_a_depth_limit_truncates():
    config = SearchConfig(iterations=9, width=1, max_depth=3, timeout_return=-0.5)
    deepest = by_path(search(*case({}), always("a"), config=config))["aaa"]
    assert deepest.truncated and not deepest.terminal and deepest.Q == -0.5


def test_b16_equal_candidates_are_merged_before_the_environment_sees_them():
    env, observation = case({})
    config = SearchConfig(iterations=2, max_depth=3)
    tree = search(env, observation, always("a", "A ", "a", "b", " B"), always("s"), config)
    assert [(child.action, child.votes) for child in tree.root.children] == [("a", 3), ("b", 2)]
    assert type(env).steps == tree.env_steps == 2 * 3  # an action and two turns of rollout, twice


def trees(folder, seed=1, size=4):
    config = settings("chain_sum", overrides=["multiturn.search.iterations=20"])
    panel = training_tasks(config.multiturn, size)
    Collection(config, panel, Scripted(0.3), "expert", folder, seed=seed, trees=2).run()
    return {tree["task"]: tree["root"] for tree in read_trees(folder)}


def stripped(root):
    kept = {key: value for key, value in root.items() if key not in ("seconds", "children")}
    return kept | {"children": [stripped(child) for child in root["children"]]}


def test_b20_pairs_do_not_depend_on_the_order_of_the_trees(tmp_path):
    trees(tmp_path / "a")
    config = {"multiturn": config_of(tmp_path / "a")["multiturn"]}
    with TreeFolder(tmp_path / "b", config, {"seed": 1}) as folder:
        for tree in reversed(list(read_trees(tmp_path / "a"))):
            folder.append(tree)
    write_pairs(tmp_path / "a", tmp_path / "a.jsonl", {"held_out": 0.0})
    write_pairs(tmp_path / "b", tmp_path / "b.jsonl", {"held_out": 0.0})
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_b21_same_seed_same_trees(tmp_path):
    found = [
        {k: stripped(v) for k, v in trees(tmp_path / n, seed).items()}
        for n, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert found[0] == found[1] != found[2]


def test_b22_training_tasks_leave_out_those_of_the_other_panels(tmp_path):
    config = settings("bandit", overrides=["multiturn.val={first_seed: 0, size: 3}"])
    val = Panel.build("bandit", {}, range(3), "val", n=3, fewer=True)
    config.multiturn.train = {"first_seed": 0, "size": 5}  # the same seeds
    check_disjoint(training_tasks(config.multiturn), val)


def test_b23_candidates_are_scored_together(tmp_path, save_chat_model):
    """Two forward passes of each model, whatever the number: the prompt, read once, and the answers."""
    from verl_multiturn.samplers import load_model, load_tokenizer

    save_chat_model(tmp_path / "base")
    tokenizer, passes = load_tokenizer(str(tmp_path / "base")), []
    model = load_model(str(tmp_path / "base"), tokenizer)[0]
    model.register_forward_pre_hook(lambda module, inputs: passes.append(tuple(inputs[0].shape)))
    one = TransformersLogProbs(model)
    q = QModel(QSpec("base", max_tokens=64), Tokens(tokenizer, 64), one, one)
    answers = ["left", "right", "up up", "down", "left left left"]
    assert q([{"role": "user", "content": "goal ice"}], answers) == [0.0] * 5  # the same model twice
    assert passes == [(1, 5), (5, 3)] * 2  # user goal ice <end> assistant; the last answer without its end


def test_b23_what_a_turn_needs_is_asked_at_once():
    """The n candidates of a node, and the visits of a wave: see tests/search/test_waves.py for the latter."""
    from verl_multiturn.search.branches import at_once

    waiting, most = 0, 0

    async def ask(i):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0.001)
        waiting -= 1
        return i

    assert asyncio.run(at_once([ask(i) for i in range(5)])) == [0, 1, 2, 3, 4]
    assert most == 5
