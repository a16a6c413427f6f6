import copy
import json
import re

import pytest
from typer.testing import CliRunner

from verl_multiturn import advantages, view
from verl_multiturn.cli import app
from verl_multiturn.run_files import SUFFIX
from verl_multiturn.runs import RunWriter, to_turns
from verl_multiturn.search.tree import Node
from verl_multiturn.stats import wilson
from verl_multiturn.view import build_view
from verl_multiturn.view_data import TRAJECTORY_FIELDS, TURN_FIELDS, pack_step
from verl_multiturn.view_page import MARK
from verl_multiturn.view_pieces import token_pieces
from verl_multiturn.view_trees import NODE, TEXTS, build_trees

NASTY = "</script><script>alert(1)</script><!-- & <b>bold</b> \u2028\u2029 {{script}} é"
ELEMENT = re.compile(r'<script type="application/json" id="([a-z]+)-?(\d*)">(.*?)</script>', re.S)


def turn(t, **fields):
    full = {
        "index": t, "observation": f"room {t}", "prompt": f"You are in room {t}", "prompt_ids": [1, 2, t],
        "action_ids": [100 + t, 9], "text": f"<a>go {t}</a>", "log_probs": [-0.5, -0.00004],
        "actions": ["go"],
        "valid": True, "reward": 0.5 * t, "anchor": f"state-{t % 2}", "value": None, "advantage": 1 - t,
        "row": t, "span": [0, 2], "generate_seconds": 0.25, "env_seconds": 0.125, "dropped_turns": 3,
    }  # fmt: skip
    return full | fields


def trajectory(step, group=0, sample=0, split="train", turns=3, **fields):
    full = {
        "split": split, "step": step, "group": f"{split}-{step}-{group}", "trajectory": sample, "env": "maze",
        "task": f"task-{group}", "task_type": "near", "panel": split, "seed": 7,
        "dynamics_seed": 938688886921172103, "instruction": "find the way",
        "return": 1.0 if sample == 0 else 0.0, "success": sample == 0,
        "terminated": True, "truncated": False, "truncation": None, "seconds": 1.5, "trained": True,
        "vine": {"rollouts": 6, "returns": {"0": [1.0, 0.0]}}, "turns": [turn(t) for t in range(turns)],
    }  # fmt: skip
    return full | fields


def write(folder, steps, metrics=True):
    config = {"multiturn": {"algorithm": "gigpo", "env": "maze", "seed": 3, "gigpo": {"gamma": 0.9}}}
    with RunWriter(folder, config) as writer:
        for (split, step), rows in steps.items():
            writer.trajectories(split, step, rows)
        for step in range(1, 6) if metrics else ():
            writer.metrics(step, {"multiturn/success/mean": step / 8, "multiturn/trajectories/mean": 8,
                                  "multiturn/return/mean": step, "actor/loss": float("nan")})  # fmt: skip
    return folder


@pytest.fixture
def run(tmp_path):
    steps = {("train", n): [trajectory(n, g, k) for g in range(2) for k in range(2)] for n in (1, 5, 30)}
    steps |= {("val", n): [trajectory(n, g, split="val") for g in range(3)] for n in (0, 5)}
    return write(tmp_path / "run", steps)


def read(path):
    """meta and the steps of a page, as the page reads them."""
    text = path.read_text(encoding="utf-8")
    parts = {(name, number): json.loads(data) for name, number, data in ELEMENT.findall(text)}
    meta = parts["meta", ""]
    steps = {}
    for n, one in enumerate(meta["steps"]):
        rows = unpack(parts["step", str(n)])
        steps[one["split"], one["step"]] = rows
        for record, turns in zip(rows, parts.get(("tokens", str(n)), {}).get("turns", ()), strict=False):
            strings = parts["tokens", str(n)]["strings"]
            for shown, (prompt, action, log_probs) in zip(record["turns"], turns, strict=True):
                shown |= {"prompt_ids": ids(strings, prompt), "action_ids": ids(strings, action)}
                shown["log_probs"] = log_probs
    return meta, steps


def ids(strings, code):
    return None if code is None else [int(one) for one in strings[code].split()]


def unpack(data):
    def fields(names, row):
        values = zip(names, row, strict=False)
        return {name: plain(kind, value) for (name, kind), value in values}

    def plain(kind, value):
        if value is None or kind not in ("text", "texts"):
            return value
        return data["strings"][value] if kind == "text" else [data["strings"][one] for one in value]

    return [
        fields(TRAJECTORY_FIELDS, row) | {"turns": [fields(TURN_FIELDS, one) for one in row[-1]]}
        for row in data["trajectories"]
    ]


def present(record):
    return {name for name, value in record.items() if value is not None}


def sentence(call, *words):
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_everything_is_in_the_page(run):
    page = build_view(run)
    assert page.path == run / "view.html" and page.size == page.path.stat().st_size
    assert (page.trajectories, page.tokens) == (3 * 4 + 2 * 3, True)
    meta, steps = read(page.path)
    assert (meta["env"], meta["algorithm"], meta["gamma"], meta["seed"]) == ("maze", "gigpo", 0.9, 3)
    assert list(steps) == [("train", 1), ("train", 5), ("train", 30), ("val", 0), ("val", 5)]
    for (split, step), rows in steps.items():
        sampled = (
            [(g, k) for g in range(2) for k in range(2)] if split == "train" else [(g, 0) for g in range(3)]
        )
        assert [(one["group"], one["trajectory"]) for one in rows] == [
            (f"{split}-{step}-{g}", k) for g, k in sampled
        ]
    first = steps["train", 30][0]
    wanted = trajectory(30)
    for name, kind in TRAJECTORY_FIELDS:
        assert first[name] == (str(wanted[name]) if name.endswith("seed") else wanted[name]), (name, kind)
    for shown, recorded in zip(first["turns"], wanted["turns"], strict=True):
        for name in {*recorded} - {"anchor", "dropped_turns", "log_probs"}:
            assert shown[name] == recorded[name], name
        assert shown["log_probs"] == [-0.5, 0] and shown["extra"] == {"dropped_turns": 3}
    assert first["dynamics_seed"] == "938688886921172103"  # above 2**53, where JavaScript would round


def test_anchor_groups(run):
    _, steps = read(build_view(run).path)
    rows = steps["train", 1]
    codes = [[one["anchor"] for one in record["turns"]] for record in rows]
    assert codes[0] == codes[1] == [0, 1, 0]  # the same states of the same group
    assert codes[2] == codes[3] == [2, 3, 2]  # equal anchors of another group are other states


def test_steps_of_an_utterance(tmp_path):
    parts = [
        {"span": [0, 1], "value": 0.5, "advantage": None},
        {"span": [1, 2], "value": None, "advantage": 0.25},
    ]
    rows = [trajectory(1, turns=1)]
    rows[0]["turns"][0]["steps"] = parts
    _, steps = read(build_view(write(tmp_path / "run", {("train", 1): rows})).path)
    assert steps["train", 1][0]["turns"][0]["steps"] == parts
    rows[0]["turns"][0]["steps"] = [{"span": [0, 1], "value": "much"}]
    folder = write(tmp_path / "odd", {("train", 1): rows})
    sentence(lambda: build_view(folder), "turn 0", "steps")


def test_advantages_side_by_side(tmp_path):
    rows = [trajectory(1, g, k, trained=g == 0) for g in range(2) for k in range(3)]
    rows[1]["turns"][2]["reward"] = 3.0
    run = write(
        tmp_path / "run", {("train", 1): rows, ("val", 1): [trajectory(1, split="val", trained=False)]}
    )
    meta, steps = read(build_view(run, algorithms=["gigpo", "rloo", "turn_gae"]).path)
    assert meta["algorithms"] == ["gigpo", "rloo", "turn_gae"]
    turns = to_turns(rows[:3])  # what the filter left out is no part of it
    wanted = {name: advantages(name, turns, **k) for name, k in (("gigpo", {"gamma": 0.9}), ("rloo", {}))}
    shown = [one["scores"] for record in steps["train", 1][:3] for one in record["turns"]]
    assert [x[0] for x in shown] == pytest.approx(wanted["gigpo"], rel=1e-5)
    assert [x[1] for x in shown] == pytest.approx(wanted["rloo"], rel=1e-5)
    assert {x[2] for x in shown} == {None}
    assert [one["scores"] for record in steps["train", 1][3:] for one in record["turns"]] == [None] * 9
    assert [record["trained"] for record in steps["train", 1]] == [True] * 3 + [False] * 3
    assert [one["scores"][1] for one in steps["val", 1][0]["turns"]] == [0] * 3  # alone in its group
    page = build_view(run).path.read_text(encoding="utf-8")
    impossible = json.loads(dict((a + b, c) for a, b, c in ELEMENT.findall(page))["step0"])["impossible"]
    assert {*impossible} == {"turn_gae", "vineppo"} and "needs V(s_t)" in impossible["vineppo"]
    assert read(build_view(run, algorithms=[]).path)[0]["algorithms"] == []
    sentence(lambda: build_view(run, algorithms=["gigo"]), "Did you mean 'gigpo'")


def test_records_that_cannot_be_scored_say_why(tmp_path):
    bare = {"group": "g", "trajectory": 0, "return": 1, "turns": [{"index": 0, "reward": 1}]}
    page = build_view(write(tmp_path / "run", {("train", 1): [bare]})).path.read_text(encoding="utf-8")
    impossible = json.loads(dict((a + b, c) for a, b, c in ELEMENT.findall(page))["step0"])["impossible"]
    assert impossible["rloo"] == "the records lack 'terminated'"


def grown():
    """A root with three candidates: visited twice, once, and never carried out."""
    root = Node(None, None, 0, 0, observation=NASTY, executed=True)
    for k, action in enumerate(("left", "right", NASTY)):
        root.children.append(Node(action, root, 1, k, executed=k < 2))
    root.children[0].backup(1.0)
    root.children[0].backup(0.0)
    root.children[1].backup(0.5)
    return root


def test_search_trees(tmp_path):
    record = {"hash": "x", "task": "t7", "task_type": "near", "success": True, "root": grown().to_dict()}
    lines = [json.dumps(record), json.dumps(grown().to_dict())]
    (tmp_path / "trees.jsonl").write_text("\n".join(lines) + "\n")
    page = build_trees(tmp_path)
    assert (page.path, page.trees, page.nodes) == (tmp_path / "view.html", 2, 8)
    text = page.path.read_text(encoding="utf-8")
    assert "<script>alert" not in text and text.count("<script") == 4
    parts = {a + b: json.loads(c) for a, b, c in ELEMENT.findall(text)}
    assert parts["meta"]["trees"][0] == {
        "task": "t7",
        "task_type": "near",
        "success": True,
        "N": 3,
        "nodes": 4,
    }
    data = parts["tree0"]
    nodes = [dict(zip(("parent", *NODE), row, strict=True)) for row in data["nodes"]]
    for node in nodes:
        node |= {name: None if node[name] is None else data["strings"][node[name]] for name in TEXTS}
    assert [(n["parent"], n["action"], n["N"], n["Q"], n["deviation"], n["executed"]) for n in nodes] == [
        (-1, None, 3, 0.5, pytest.approx((1 / 6) ** 0.5, rel=1e-5), True), (0, "left", 2, 0.5, 0.5, True),
        (0, "right", 1, 0.5, 0, True), (0, NASTY, 0, None, None, False),
    ]  # fmt: skip
    assert nodes[0]["observation"] == NASTY


@pytest.mark.parametrize(
    ("line", "words"),
    [("{", "not JSON"), ("[1]", "no root"), ('{"root": 3}', "no root"), ('{"children": []}', "lacks N, W"),
     ('{"N": 1, "W": 1, "children": [{"N": 1}]}', "lacks N, W")],
)  # fmt: skip
def test_files_that_hold_no_trees(tmp_path, line, words):
    file = tmp_path / "trees.jsonl"
    file.write_text(line)
    sentence(lambda: build_trees(file), "line 1", words)
    file.write_text("")
    sentence(lambda: build_trees(file), "holds no trees")
    assert not (tmp_path / "view.html").exists()


def test_curves(run):
    meta, _ = read(build_view(run, steps=[5]).path)
    train = {point[0]: point[1:] for point in meta["curves"]["success"]["train"]}
    assert list(train) == [1, 2, 3, 4, 5]
    assert train[2] == pytest.approx([*wilson(2, 8)], abs=1e-5)  # from the metrics
    assert train[5] == pytest.approx([*wilson(2, 4)], abs=1e-5)  # from its trajectories
    assert [point[0] for point in meta["curves"]["success"]["val"]] == [5]
    assert meta["curves"]["return"]["train"][0] == [1, 1, None, None]
    assert meta["metrics"] == {
        "steps": [1, 2, 3, 4, 5],
        "values": {
            "multiturn/return/mean": [1, 2, 3, 4, 5], "multiturn/success/mean": [n / 8 for n in range(1, 6)],
            "multiturn/trajectories/mean": [8] * 5,
        },
    }  # fmt: skip


def test_recorded_texts_cannot_leave_their_element(tmp_path):
    name = "<i>&{{script}}"
    rows = [trajectory(1, turns=1, task=NASTY, instruction=NASTY) | {"group": NASTY}]
    rows[0]["turns"][0] |= {"observation": NASTY, "text": NASTY, "actions": [NASTY, NASTY], "prompt": NASTY}
    page = build_view(write(tmp_path / name, {("train", 1): rows}))
    text = page.path.read_text(encoding="utf-8")
    assert "alert" in text and "<script>alert" not in text and "<b>" not in text and "\u2028" not in text
    assert text.count("</script>") == text.count("<script") == 4  # meta, step, tokens, ours
    assert "<title>&lt;i&gt;&amp;{{script}}</title>" in text
    _, steps = read(page.path)
    (shown,) = steps["train", 1]
    assert shown["task"] == shown["group"] == NASTY
    assert shown["turns"][0]["actions"] == [NASTY, NASTY]


def test_the_page_loads_nothing(run):
    text = build_view(run).path.read_text(encoding="utf-8")
    assert "default-src 'none'" in text and "unsafe" not in text
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
    script = text[text.rindex("<script>") :]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(", script)


def test_steps_and_splits(run):
    def chosen(**which):
        return list(read(build_view(run, **which).path)[1])

    assert chosen(steps=[30, 0]) == [("train", 30), ("val", 0)]
    assert chosen(last=1) == [("train", 30), ("val", 5)]
    assert chosen(split="val", last=9) == [("val", 0), ("val", 5)]
    sentence(lambda: build_view(run, steps=[2]), "unknown step '2'", "0, 1, 5, 30")
    sentence(lambda: build_view(run, steps=[30], split="val"), "unknown step '30'")
    sentence(lambda: build_view(run, split="vall"), "Did you mean 'val'")
    sentence(lambda: build_view(run, steps=[1], last=1), "exclude")
    sentence(lambda: build_view(run, last=0), "at least 1")
    sentence(lambda: view.parse_steps("1,x"), "1,5,30")


def test_only_our_own_page_is_replaced(run, tmp_path):
    ours, foreign = run / "view.html", tmp_path / "thesis.html"
    build_view(run, last=1)
    before = ours.read_bytes()
    build_view(run)
    assert MARK in ours.read_bytes() != before
    foreign.write_text("<html>my thesis</html>")
    sentence(lambda: build_view(run, foreign), str(foreign), "not replaced")
    sentence(lambda: build_view(run, tmp_path), "is a folder")
    assert foreign.read_text() == "<html>my thesis</html>"
    assert not list(run.glob("*.tmp"))


def test_missing_fields_are_absent(tmp_path):
    bare = {"group": 4, "trajectory": 0, "return": 1, "turns": [{"index": 0, "reward": 1}]}
    other = copy.deepcopy(bare) | {"success": None, "config": {"a": 1}, "trajectory": 1, "task": 17}
    other["turns"][0] |= {
        "log_probs": [None, -1],
        "observation": {"grid": [1]},
        "actions": "up",
        "value": 2.5,
    }
    page = build_view(write(tmp_path / "run", {("train", 1): [bare, other]}, metrics=False))
    assert page.tokens
    meta, steps = read(page.path)
    first, second = steps["train", 1]
    assert {name for name, value in first.items() if value is not None} == {
        "group",
        "trajectory",
        "return",
        "turns",
    }
    assert {name for name, value in first["turns"][0].items() if value is not None} == {"index", "reward"}
    assert second["turns"][0]["log_probs"] == [None, -1] and second["turns"][0]["value"] == 2.5
    assert second["turns"][0]["observation"] == '{"grid":[1]}' and second["turns"][0]["actions"] == ["up"]
    assert second["task"] == "17"
    assert meta["curves"]["success"] == {} and meta["metrics"] == {"steps": [], "values": {}}


def test_no_tokens_recorded(tmp_path):
    bare = {"group": "g", "trajectory": 0, "return": 1, "turns": [{"index": 0, "reward": 1}]}
    assert not build_view(write(tmp_path / "run", {("train", 1): [bare]}), tokens=True).tokens


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: one.pop("group"), "lacks group"),
        (lambda one: one.pop("return"), "lacks return"),
        (lambda one: one.update(turns=None), "lacks turns"),
        (lambda one: one.update(turns=3), "turns are no list"),
        (lambda one: one.update({"return": "high"}), "return is not a number"),
        (lambda one: one.update(group=[1]), "group or trajectory"),
        (lambda one: one["turns"][1].pop("reward"), "turn 1 lacks index or reward"),
        (lambda one: one["turns"][2].update(anchor=[1]), "turn 2: its anchor"),
        (lambda one: one["turns"][0].update(log_probs=["a"]), "turn 0: its log_probs"),
        (lambda one: one["turns"][0].update(action_ids=[1.5]), "turn 0: its action_ids"),
    ],
)
def test_records_that_cannot_be_shown(tmp_path, change, words):
    broken = trajectory(1, sample=1)
    change(broken)
    run = write(tmp_path / "run", {("train", 1): [trajectory(1), broken]})
    sentence(lambda: build_view(run), f"1{SUFFIX}, line 2", words)
    assert not (run / "view.html").exists()


@pytest.mark.parametrize("spoil", [lambda data: data[:-20], lambda data: b"hello", lambda data: b""])
def test_spoilt_files(run, spoil):
    build_view(run)
    before = (run / "view.html").read_bytes()
    path = run / "trajectories" / "train" / f"5{SUFFIX}"
    path.write_bytes(spoil(path.read_bytes()))
    sentence(lambda: build_view(run), str(path), "cannot be read")
    assert (run / "view.html").read_bytes() == before


def test_foreign_folders(run, tmp_path):
    sentence(lambda: build_view(tmp_path), "not a recorded run", str(run))
    empty = write(tmp_path / "empty", {})
    sentence(lambda: build_view(empty), "no recorded trajectories")
    (run / "metrics.jsonl").write_text('{"loss": 1}\n')
    sentence(lambda: build_view(run), "metrics.jsonl", "metrics of a run")
    (run / "config.yaml").write_text("a: [1")
    sentence(lambda: build_view(run), "config.yaml cannot be used", "gives it again")
    (run / "trajectories" / "train" / f"best{SUFFIX}").write_bytes(b"")
    sentence(lambda: build_view(run), "not named by a step")


def test_large_pages(run, monkeypatch):
    full = build_view(run)
    bare = build_view(run, tokens=False)
    assert bare.size < full.size and not bare.tokens and "prompt_ids" not in str(read(bare.path)[1])
    monkeypatch.setattr(view, "TOKENS_BYTES", 1000)
    assert build_view(run).size <= bare.size + 10 and build_view(run, tokens=True).tokens
    monkeypatch.setattr(view, "MAX_BYTES", 9_000)
    sentence(lambda: build_view(run), "larger than 0 MB", "--last 2")
    assert build_view(run, last=2).trajectories == 14
    monkeypatch.setattr(view, "MAX_BYTES", 100)
    sentence(lambda: build_view(run, tokens=True), "--split", "--no-tokens")


def test_pieces_of_tokens(tmp_path):
    vocabulary = {"Ġup": 3, "Ã©": 4, "Ã": 5, "x": 6}
    tokenizer = {"model": {"vocab": vocabulary}, "decoder": {"type": "ByteLevel"},
                 "added_tokens": [{"id": 9, "content": "<|im_end|>"}]}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    pieces = {3: " up", 4: "é", 5: "\ufffd", 9: "<|im_end|>"}
    assert token_pieces([tmp_path / "none", tmp_path], [3, 4, 5, 9, 77]) == pieces
    tokenizer = {"model": {"vocab": {"▁up": 3, "<0x0A>": 4}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert token_pieces([tmp_path], [3, 4]) == {3: " up", 4: "\n"}
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": [["a", 1]]}}')
    assert token_pieces([tmp_path], [1]) == {}


def test_the_command(run, tmp_path):
    def call(*arguments, code=0):
        result = CliRunner().invoke(app, ["view", *map(str, arguments)])
        assert result.exit_code == code, result.output
        return result.output

    out = tmp_path / "pages" / "page.html"
    assert "14 trajectories" in call(run, "--out", out, "--steps", "5,30,0", "--no-tokens")
    assert "without tokens" in call(run, "--last", 1, "--split", "val", "--no-tokens")
    assert out.exists() and (run / "view.html").exists()
    assert "not a recorded run" in call(tmp_path, code=2)
    assert len(call(run, "--steps", "1;2", code=2).splitlines()) == 1
    call(run, "--with", "rloo, gigpo", "--last", 1)
    assert "unknown algorithm" in call(run, "--with", "best", code=2)
    trees = tmp_path / "trees.jsonl"
    trees.write_text(json.dumps(grown().to_dict()))
    assert "1 trees, 4 nodes" in call(trees) and "1 trees" in call(tmp_path, "--out", out)
    assert "only --out" in call(trees, "--last", 1, code=2)


def test_the_curves_leave_out_what_is_validated_beside(tmp_path):
    """A panel of `multiturn.also` is in the page, but not in the run's own success."""
    own = [trajectory(2, sample=n, split="val") for n in range(4)]  # one of four
    seen = [trajectory(2, group=1, sample=0, split="val", panel="seen") for _ in range(4)]
    write(tmp_path, {("val", 2): own + seen})
    packed = pack_step(tmp_path, "val", 2)
    assert packed.size == 8 and packed.successes == [True, False, False, False] and len(packed.returns) == 4
