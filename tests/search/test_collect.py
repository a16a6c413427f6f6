"""Trees over a panel: the prompts of a run, costs, resuming after a kill, what is refused; and the pairs."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from verl_multiturn import endpoint
from verl_multiturn.cli import app
from verl_multiturn.play_settings import settings
from verl_multiturn.rollout.episode import Sample
from verl_multiturn.rollout.parsing import ActionFormat, parse
from verl_multiturn.rollout.prompts import View, prompt_policy
from verl_multiturn.search.collect import Collection
from verl_multiturn.search.pair_files import Counts, PairConfig, held_out, pairs_of, read_pairs, write_pairs
from verl_multiturn.search.scripted import Scripted, scripted
from verl_multiturn.search.tree_files import TreeFolder, read_trees
from verl_multiturn.tasks import training_tasks

SMALL = ("multiturn.search.iterations=6", "multiturn.search.width=3")


def call(*arguments, code=0):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result.output


def sentence(*arguments):
    """What is said of a mistake: the last line, the only one after progress."""
    return call(*arguments, code=2).splitlines()[-1]


def collected(folder, model=None, env="frozen_lake", limit=4, trees=64, overrides=SMALL, seed=1):
    config = settings(env, overrides=list(overrides))
    panel = training_tasks(config.multiturn, limit)
    Collection(config, panel, model or Scripted(0.5), "policy", folder, seed=seed, trees=trees).run()
    return list(read_trees(folder))


def nodes(root):
    return [root, *(one for child in root["children"] for one in nodes(child))]


def test_trees_hold_what_the_policy_read_and_what_it_cost(tmp_path):
    trees = collected(tmp_path / "a")
    assert len(trees) == 4 and {tree["env"] for tree in trees} == {"frozen_lake"}
    for tree in trees:
        found = nodes(tree["root"])
        for key in ("proposals", "env_steps", "prompt_tokens", "tokens"):
            assert sum(node[key] for node in found) == tree[key]
        assert tree["root"]["N"] == tree["iterations"] <= 6
        assert 0 < sum(node["seconds"] for node in found)
        for node in found:
            assert ("messages" in node) is bool(node["children"])
            assert len({child["action"] for child in node["children"]}) == len(node["children"]) <= 3
            for child in node["children"]:
                said = parse(child["text"], ActionFormat())
                assert said.valid and said.actions == (child["action"],)
        shown = tree["root"]["messages"][-1]["content"]
        assert tree["root"]["observation"] in shown and "Legal actions: " in shown


def test_an_answer_that_the_budget_of_steps_forbids_is_not_asked_for_and_not_charged(tmp_path):
    (tree,) = collected(tmp_path / "a", limit=1, overrides=(*SMALL, "multiturn.search.max_env_steps=4"))
    assert (tree["stopped"], tree["env_steps"]) == ("budget", 4)
    # 3 candidates of the root, and one answer for each step but those that carried a candidate out.
    executed = sum(node["executed"] for node in nodes(tree["root"])[1:])
    expanded = sum(bool(node["children"]) for node in nodes(tree["root"]))
    assert tree["proposals"] == 3 * expanded + 4 - executed


def test_same_seed_same_trees_whatever_runs_beside_them(tmp_path):
    def plain(folder, **keywords):
        trees = sorted(collected(folder, **keywords), key=lambda tree: tree["task"])
        for tree in trees:
            del tree["seconds"]
            for node in nodes(tree["root"]):
                del node["seconds"]
        return trees

    one = plain(tmp_path / "a")
    assert one == plain(tmp_path / "b", trees=1)
    assert one != plain(tmp_path / "c", seed=2)


class Fixed:
    """A model that says one thing after another, each with a text of its own; not seeded."""

    token_ids, eos = False, endpoint.END

    def __init__(self, answers):
        self.answers, self.texts, self.prompts = answers, endpoint.TextChat(), []

    def chat(self, **keywords):
        return self.texts

    def decode(self, ids):
        return self.texts.decode(ids)

    player, close = Scripted.player, Scripted.close

    async def __call__(self, prompt_ids, max_tokens, seed):
        self.prompts.append(self.texts.messages(prompt_ids))
        answer = random.Random(seed).choice(self.answers)
        return Sample([*self.texts.encode(answer), endpoint.END])


@pytest.mark.parametrize("row", ["turn", "trajectory"])
def test_a_models_prompts_are_those_of_a_run(tmp_path, row):
    form = "<think>{}</think><action>{}</action>"
    words = {"a": "up", "b": "down", "c": "right", "d": "left"}
    model = Fixed([*(form.format(*pair) for pair in words.items()), form.format("other", "Right "), "what?"])
    overrides = (*SMALL, f"multiturn.row={row}", "multiturn.search.iterations=20")
    trees = collected(tmp_path / "a", model, overrides=overrides)
    depths = []
    for tree in trees:
        for node in nodes(tree["root"]):
            for child in node["children"]:
                depths.append(len(child.get("messages", ())))
                if child.get("messages") and row == "trajectory":
                    said = {"role": "assistant", "content": child["text"]}
                    assert child["messages"][:-1] == [*node["messages"], said]
                if child.get("messages") and row == "turn":
                    assert f"[action] {child['action']}" in child["messages"][-1]["content"]
        asked = [node["messages"] for node in nodes(tree["root"]) if "messages" in node]
        assert all(messages in model.prompts for messages in asked)
        assert tree["prompt_tokens"] > 100 * tree["proposals"] and tree["tokens"] >= 5 * tree["proposals"]
    assert max(depths) > 4 if row == "trajectory" else max(depths) == 1  # messages of the deepest prompt
    wrong = [n for tree in trees for n in nodes(tree["root"]) if n.get("text") == "what?" and n["executed"]]
    assert wrong and all(n["action"] == "" and not n["valid"] and n["closed"] for n in wrong)
    merged = [n for tree in trees for n in nodes(tree["root"]) if n["votes"] > 1]
    assert merged


def test_waves_inside_a_tree_grow_the_same_tree_again(tmp_path):
    overrides = (*SMALL, "multiturn.search.parallel=4", "multiturn.search.iterations=12")
    trees = [collected(tmp_path / name, limit=2, overrides=overrides) for name in "ab"]
    shapes = [[[n["action"], n["N"], n["W"]] for t in ts for n in nodes(t["root"])] for ts in trees]
    assert sorted(shapes[0], key=str) == sorted(shapes[1], key=str)
    assert all(tree["iterations"] == tree["root"]["N"] for tree in trees[0])


SLOW = """
import time
from verl_multiturn.env import Env

class Slow(Env):
    instruction, max_turns = "add", 4
    def _reset(self, seed):
        self.total = seed
        return f"task {seed}", {"task_type": "slow"}
    def _step(self, action):
        time.sleep(0.01)
        self.total += int(action)
        return f"total {self.total}", float(self.total % 3 == 0), self.total % 3 == 0, {"success": True}
    def admissible(self):
        return ["1", "2", "4"]
    def expert(self):
        return str((-self.total) % 3 or 1)
"""


def test_a_killed_collection_goes_on_and_does_no_task_twice(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    out, n = tmp_path / "trees", 24
    given = ["--env", f"{tmp_path}/slow.py:Slow", "--model", "expert:0.7", "--limit", n, "--out", out, *SMALL]
    command = [sys.executable, "-m", "verl_multiturn.cli", "search", *map(str, given), "--trees", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    deadline = time.monotonic() + 120
    while not (out / "trees.jsonl").exists() or (out / "trees.jsonl").read_bytes().count(b"\n") < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = (out / "trees.jsonl").read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    assert 3 <= whole.count(b"\n") < n
    with (out / "trees.jsonl").open("wb") as file:  # as if it had been killed inside a write
        file.write(whole + whole[: len(whole) // whole.count(b"\n") // 2])
    with pytest.raises(
        ValueError, match=rf"line {whole.count(10) + 1} is cut off: .* run the same search again"
    ):
        list(read_trees(out))
    said = call("search", *given)
    assert f"{n} of {n} trees ({whole.count(10)} were there)" in said
    after = (out / "trees.jsonl").read_bytes()
    assert after.startswith(whole)
    tasks = [tree["task"] for tree in read_trees(out)]
    assert len(tasks) == len(set(tasks)) == n
    assert "0 of 0 new ones solved" in call("search", *given)  # a third time there is nothing to do
    assert (out / "trees.jsonl").read_bytes() == after


def test_a_damaged_tree_is_named(tmp_path):
    collected(tmp_path / "a")
    path = tmp_path / "a" / "trees.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"N":', b'"M":', 1))
    said = sentence("pairs", tmp_path / "a", "--out", tmp_path / "p")
    assert "trees.jsonl, line 1 is damaged: its content does not match its hash" in said
    assert not (tmp_path / "p").exists()
    with pytest.raises(ValueError, match="line 1 is damaged"):  # nor does the search go on over it
        collected(tmp_path / "a")


def test_a_folder_belongs_to_one_search_and_one_process(tmp_path):
    given = ("search", "--env", "chain_sum", "--limit", 2, "--out", tmp_path / "a")
    call(*given, "--model", "expert:0.5")
    assert "holds trees of another search: width was 5, is 3" in sentence(
        *given, "--model", "expert:0.5", SMALL[1]
    )
    assert "model was 'expert:0.5', is 'random'" in sentence(*given, "--model", "random")
    config = json.loads(json.dumps({"multiturn": {}}))
    about = {"seed": 1}
    with (
        TreeFolder(tmp_path / "b", config, about),
        pytest.raises(ValueError, match="another process is writing"),
    ):
        TreeFolder(tmp_path / "b", config, about)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.tex").touch()
    assert "holds something else than trees" in sentence(*given[:-1], tmp_path / "c", "--model", "random")
    with pytest.raises(ValueError, match="is no folder of trees"):
        write_pairs(tmp_path / "c", tmp_path / "p")


def test_names_that_are_wrong(tmp_path):
    given = ("search", "--out", tmp_path / "a")
    assert "unknown search preset 'paper'" in sentence(
        *given, "--env", "chain_sum", "--model", "random", "multiturn.search.preset=paper"
    )
    assert "unknown config key in multiturn.search: 'widht'" in sentence(
        *given, "--env", "chain_sum", "--model", "random", "multiturn.search.widht=2"
    )
    assert "unknown recipe 'qvalue_webshup'" in sentence(*given, "qvalue_webshup")
    assert "no model: give --model" in sentence(*given, "--env", "chain_sum")
    assert "share of random actions must be in [0, 1]" in sentence(
        *given, "--env", "chain_sum", "--model", "expert:7"
    )
    assert "no endpoint answers at http://127.0.0.1:9/v1" in sentence(
        *given, "--env", "chain_sum", "--model", "http://127.0.0.1:9/v1#x"
    )
    assert not (tmp_path / "a").exists()
    assert scripted("expert").noise == 0.5 and scripted("random").noise == 1.0 and scripted("Qwen/x") is None


# ---------------------------------------------------------------------- an endpoint


@pytest.fixture
def server():
    """An OpenAI-compatible endpoint that answers "up" to "right"; after `dies` requests it is gone."""
    state = SimpleNamespace(asked=[], dies=None)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"data": [{"id": "tiny"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.asked.append(body)
            if state.dies is not None and len(state.asked) > state.dies:
                self.send_error(500, "gone")
                return
            move = random.Random(body["seed"]).choice(["up", "down", "left", "right"])
            text = f"<think>so</think><action>{move}</action>"
            self.answer({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})

        def answer(self, what):
            data = json.dumps(what).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request, client_address):
            """A client that hangs up is none of the command's output."""

    httpd = Quiet(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    state.url = f"http://127.0.0.1:{httpd.server_port}/v1"
    yield state
    httpd.shutdown()


def test_an_endpoint(server, tmp_path):
    given = ("search", "--env", "frozen_lake", "--model", f"{server.url}#tiny", "--limit", 2, *SMALL)
    said = call(*given, "--out", tmp_path / "a")
    trees = list(read_trees(tmp_path / "a"))
    assert len(trees) == 2 and len(server.asked) == sum(tree["proposals"] for tree in trees)
    assert f"{len(server.asked)} calls" in said
    root = trees[0]["root"]
    assert root["messages"] in [body["messages"] for body in server.asked]
    assert {body["temperature"] for body in server.asked} == {1.0}  # as in training
    assert "unknown model at" in sentence(*given[:3], "--model", f"{server.url}#tny", "--out", tmp_path / "b")


def test_an_endpoint_that_dies_keeps_what_was_finished(server, tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.001)
    server.dies = 60
    given = ("search", "--env", "frozen_lake", "--model", f"{server.url}#tiny", "--limit", 12, *SMALL)
    given = (*given, "--trees", 2, "--out", tmp_path / "a")
    assert "gave no answer in 5 attempts; the last: HTTP 500" in sentence(*given)
    done = len(list(read_trees(tmp_path / "a")))
    assert 1 <= done < 12
    server.dies = None
    assert f"12 of 12 trees ({done} were there)" in call(*given)


def test_a_broken_environment_costs_its_tree(tmp_path):
    (tmp_path / "odd.py").write_text(SLOW.replace("self.total += int(action)", "1 / (self.total % 2)"))
    given = ("search", "--env", f"{tmp_path}/odd.py:Slow", "--model", "random", "--limit", 4, *SMALL)
    said = call(*given, "--out", tmp_path / "a")
    assert "2 trees failed" in said and "2 of 4 trees" in said
    failures = [json.loads(line) for line in (tmp_path / "a" / "failures.jsonl").read_text().splitlines()]
    assert len(failures) == 2 and all("ZeroDivisionError" in failure["error"] for failure in failures)


# ---------------------------------------------------------------------- pairs


def test_pairs_from_the_command(tmp_path):
    overrides = (*SMALL, "multiturn.search.iterations=30", "multiturn.pairs.held_out=0.5")
    given = ("search", "--env", "chain_sum", "--model", "expert:0.5", "--limit", 12, *overrides)
    call(*given, "--out", tmp_path / "a")
    said = call("pairs", tmp_path / "a", "--out", tmp_path / "pairs.jsonl")
    pairs = list(read_pairs(tmp_path / "pairs.jsonl"))
    by_split = {split: {p["group"] for p in pairs if p["split"] == split} for split in ("train", "held_out")}
    assert by_split["train"] and by_split["held_out"] and not by_split["train"] & by_split["held_out"]
    assert f"{sum(p['split'] == 'train' for p in pairs)} pairs to train on" in said
    trees = {tree["task"]: tree["root"] for tree in read_trees(tmp_path / "a")}
    for pair in pairs:
        assert pair["gap"] == pytest.approx(pair["q_win"] - pair["q_lose"]) and pair["gap"] > 0
        assert pair["prompt"] in [node.get("messages") for node in nodes(trees[pair["task"]])]
        assert pair["win"] == f"<think></think><action>{pair['win_action']}</action>"
        assert pair["visits"] >= [1, 1] and pair["invalid"] is False and pair["weight"] == 1
    assert "nothing is overwritten" in sentence("pairs", tmp_path / "a", "--out", tmp_path / "pairs.jsonl")
    assert "unknown key of pairs 'wim'" in sentence(
        "pairs", tmp_path / "a", "wim=argmax", "--out", tmp_path / "q"
    )
    assert "unknown PairConfig.win 'best'" in sentence(
        "pairs", tmp_path / "a", "win=best", "--out", tmp_path / "q"
    )


@pytest.mark.parametrize("row", ["turn", "trajectory"])
def test_a_pair_knows_its_prompt_with_less_history(tmp_path, row):
    overrides = (
        *SMALL,
        "multiturn.search.iterations=30",
        "multiturn.prompt.history=3",
        f"multiturn.row={row}",
    )
    trees = collected(tmp_path / "a", env="chain_sum", overrides=overrides)
    write_pairs(tmp_path / "a", tmp_path / "p")
    policy = prompt_policy(settings("chain_sum", overrides=list(overrides)).multiturn)
    roots, seen = {tree["task"]: tree["root"] for tree in trees}, set()
    for pair in read_pairs(tmp_path / "p"):
        node, past = roots[pair["task"]], []
        instruction = node["instruction"]
        while node.get("messages") != pair["prompt"]:
            (child,) = [
                one
                for one in node["children"]
                if any(n.get("messages") == pair["prompt"] for n in nodes(one))
            ]
            past, node = [*past, (node["observation"], child["action"])], child
        if row == "trajectory" and past:  # one chat: the Q model drops its first messages itself
            assert "shorter" not in pair and len(pair["prompt"]) > 1
            continue
        view = View(instruction, node["observation"], node.get("admissible"), past)
        window = min(3, len(past))
        assert policy.messages(view, window, view.admissible) == pair["prompt"]
        expected = [policy.messages(view, shown, view.admissible) for shown in range(window - 1, -1, -1)]
        assert pair.get("shorter", [])[:window] == expected
        seen.add(window)
    assert len(seen) > 1 or row == "trajectory"


def test_pairs_for_trl(tmp_path):
    collected(tmp_path / "a", env="chain_sum", overrides=(*SMALL, "multiturn.search.iterations=30"))
    call("pairs", tmp_path / "a", "--out", tmp_path / "own")
    call("pairs", tmp_path / "a", "--out", tmp_path / "trl", "--format", "trl")
    lines = [json.loads(line) for line in (tmp_path / "trl").read_text().splitlines()]
    own = list(read_pairs(tmp_path / "own"))
    assert len(lines) == len(own) > 0
    for line, pair in zip(lines, own, strict=True):
        assert line == {
            "prompt": pair["prompt"],
            "chosen": [{"role": "assistant", "content": pair["win"]}],
            "rejected": [{"role": "assistant", "content": pair["lose"]}],
            "split": pair["split"],
        }
    assert "unknown format of pairs 'tlr'; valid: own, trl" in sentence(
        "pairs", tmp_path / "a", "--out", tmp_path / "x", "--format", "tlr"
    )
    with pytest.raises(ValueError, match="is in TRL's format: write the pairs again without --format trl"):
        list(read_pairs(tmp_path / "trl"))


def test_an_empty_pair_set_is_an_error(tmp_path):
    given = (
        "search",
        "--env",
        "chain_sum",
        "--model",
        "random",
        "--limit",
        2,
        *SMALL,
        "--out",
        tmp_path / "a",
    )
    call(*given)
    said = sentence("pairs", tmp_path / "a", "--out", tmp_path / "p")
    assert "gives no pair: 2 trees, no tree found a reward above 0" in said
    assert not (tmp_path / "p").exists()


def node(action, Q=0.0, N=4, children=(), reward=0.0, **more):
    record = {
        "action": action,
        "N": N,
        "W": Q * N,
        "W2": Q * Q * N,
        "reward": reward,
        "text": f"say {action}",
    }
    return record | {"children": list(children)} | more


def tree():
    children = [
        node("good", 0.9, 6, reward=1.0),
        node("bad", 0.1, 3),
        node("", -1.0, 1, valid=False),
        node("new", N=0),
    ]
    root = node(None, 0.5, 10, children, messages=[{"role": "user", "content": "go"}])
    return {"root": root, "task": 7, "content": "c", "env": "e"}


def chosen(**keywords):
    counts = Counts()
    return [
        (p["win"], p["lose"], p["invalid"]) for p in pairs_of(tree(), PairConfig(**keywords), counts)
    ], counts


def test_losers_that_are_no_actions_are_marked_and_counted():
    assert chosen() == ([("say good", "say ", True)], Counts(1, 0, 1, 0, invalid=1))
    pairs, counts = chosen(lose="all_below_gap")
    assert pairs == [("say good", "say bad", False), ("say good", "say ", True)] and counts.invalid == 1
    pairs, counts = chosen(lose="all_below_gap", invalid="drop")
    assert pairs == [("say good", "say bad", False)] and (counts.invalid, counts.train) == (1, 1)
    assert chosen(invalid="drop")[0] == []


def test_minimum_visits_caps_and_gaps():
    assert chosen(lose="all_below_gap", min_visits=0)[0][-1] == ("say good", "say new", False)
    assert chosen(lose="all_below_gap", min_visits=3)[0] == [("say good", "say bad", False)]
    pairs, counts = chosen(lose="all_below_gap", max_per_task=1)
    assert pairs == [("say good", "say ", True)] and counts.capped == 1  # the largest gap
    assert chosen(min_gap=1.95)[0] == [] and chosen(min_gap=1.95)[1].without == 1


def test_weights():
    def weights(rule):
        config = PairConfig(lose="all_below_gap", weight=rule)
        return [pair["weight"] for pair in pairs_of(tree(), config, Counts())]

    assert weights("none") == [1, 1] and weights("gap") == pytest.approx([0.8, 1.9])
    wide, narrow = weights("gap_se")
    assert narrow / wide < 1.9 / 0.8  # the invalid one was visited once


def test_the_split_follows_from_the_content_alone():
    share = sum(held_out(str(n), 0.25) for n in range(2000)) / 2000
    assert abs(share - 0.25) < 0.03
    assert not held_out("a", 0.0) and held_out("a", 1.0)
    assert all(held_out(str(n), 0.5) for n in range(200) if held_out(str(n), 0.25))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"max_per_task": 0}, "max_per_task must be at least 1"),
        ({"held_out": 2}, r"held_out must be in \[0, 1\]"),
        ({"min_gap": -1}, "min_gap must be at least 0"),
        ({"weight": "gaps"}, "unknown PairConfig.weight 'gaps'"),
    ],
)
def test_pair_configs_that_are_wrong(keywords, words):
    with pytest.raises(ValueError, match=words):
        PairConfig(**keywords)


def test_a_file_that_holds_no_pairs(tmp_path):
    with pytest.raises(ValueError, match="no pairs at"):
        list(read_pairs(tmp_path / "none"))
    (tmp_path / "p").write_text('{"prompt": []}\n')
    with pytest.raises(ValueError, match="line 1 is no pair: it needs prompt, win"):
        list(read_pairs(tmp_path / "p"))
    (tmp_path / "p").write_text("{")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        list(read_pairs(tmp_path / "p"))
