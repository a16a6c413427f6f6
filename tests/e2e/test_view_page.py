"""The page of a run in a real browser: what it shows for an address, without errors."""

import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser

import matplotlib.image
import orjson
import pytest

from verl_multiturn.runs import RunWriter
from verl_multiturn.search.tree import Node
from verl_multiturn.view import build_view
from verl_multiturn.view_trees import build_trees

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars
 --disable-background-networking --disable-component-update --disable-sync --enable-logging=stderr
 --run-all-compositor-stages-before-draw --virtual-time-budget=5000""".split()
NASTY = "<img src=x onerror=\"document.title='broken'\"></script><script>document.title='broken'</script>"
GAMMA = 0.5
GROUPS, SAMPLES = 6, 4

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(BROWSER is None, reason=f"needs a browser on PATH: {', '.join(NAMES)}"),
]


def turn(t, group, sample):
    return {
        "index": t, "observation": f"{NASTY} room {t}", "prompt": f"You are in room {t} of {group}",
        "prompt_ids": [1, t], "action_ids": [40 + sample, 9], "text": f"<a>go {sample}</a>", "valid": t != 1,
        "log_probs": [-0.25, -2], "actions": [f"go {sample}"], "reward": float(sample == 0 and t == 2),
        "anchor": f"room {t}" if sample < 3 else f"hall {t}", "value": 0.5, "advantage": sample - 1.25,
        "row": t, "span": [0, 2], "generate_seconds": 0.5, "env_seconds": 0.25,
    }  # fmt: skip


def trajectory(split, step, group, sample):
    return {
        "split": split, "step": step, "group": f"g{group}", "trajectory": sample, "env": "maze",
        "task": f"task-{group}", "task_type": "near", "seed": 7, "dynamics_seed": 2**60 + 1,
        "instruction": NASTY, "return": float(sample == 0), "success": sample == 0, "terminated": True,
        "truncated": False, "truncation": None, "seconds": 1.5, "trained": group < 5,
        "vine": {"rollouts": 2, "failed": 0, "returns": {"1": [1.0, 0.0]}},
        "turns": [turn(t, f"g{group}", sample) for t in range(3)],
    }  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = {"multiturn": {"algorithm": "gigpo", "env": "maze", "seed": 3, "gigpo": {"gamma": GAMMA}}}
    with RunWriter(folder, config) as writer:
        for step in (1, 2, 3):
            rows = [trajectory("train", step, g, k) for g in range(GROUPS) for k in range(SAMPLES)]
            writer.trajectories("train", step, rows)
            writer.metrics(step, {"actor/entropy": 1 / step, "multiturn/turns/mean": 3})
        writer.trajectories("val", 3, [trajectory("val", 3, g, 0) for g in range(GROUPS)])
    return build_view(folder).path


def browse(page, address, tmp_path, *more):
    """What the browser writes to stdout; fails on anything it says in its console."""
    command = [
        BROWSER,
        *FLAGS,
        f"--user-data-dir={tmp_path / 'profile'}",
        *more,
        f"{page.as_uri()}#{address}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


class Tree(HTMLParser):
    """Texts of the elements with an id, and of table rows."""

    def __init__(self, dom):
        super().__init__()
        self.open, self.texts, self.attributes, self.rows, self.tags = [], {}, {}, {}, Counter()
        self.feed(dom)

    def handle_starttag(self, tag, attributes):
        if tag in ("meta", "input", "img", "br", "link"):  # these have no end
            self.tags[tag] += 1
            return
        attributes = dict(attributes)
        self.tags[tag] += 1
        self.open.append((tag, attributes.get("id")))
        if name := attributes.get("id"):
            self.attributes[name] = attributes
        if tag == "tr":
            table = next(name for tag, name in reversed(self.open) if tag == "table")
            self.rows.setdefault(table, []).append((attributes, []))
            self.current = self.rows[table][-1][1]
        if tag == "td":
            self.current.append("")

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for _, name in self.open:
            if name:
                self.texts[name] = self.texts.get(name, "") + data
        if any(tag == "td" for tag, _ in self.open):
            self.current[-1] += data


def show(page, address, tmp_path):
    return Tree(browse(page, address, tmp_path, "--dump-dom"))


def test_an_address_opens_its_turn(page, tmp_path):
    tree = show(page, "split=train&step=2&group=g4&trajectory=1&turn=1", tmp_path)
    shown = tree.attributes["shown"]
    assert (shown["data-group"], shown["data-trajectory"]) == ("g4", "1")
    assert tree.attributes["turn-1"]["class"] == "turn current"
    assert "24 of 24 trajectories" in tree.texts["count"]
    assert "go 1" in tree.texts["turn-1"] and "not valid" in tree.texts["turn-1"]
    group = [cells for _, cells in tree.rows["group"][1:]]
    assert group == [["✓", "0", "1", "3", ""]] + [["✗", str(k), "0", "3", ""] for k in (1, 2, 3)]
    # the first three samples of the group were in this room at t = 1; G_1 = γ r_2
    anchors = tree.rows["anchors"][1:]
    assert [cells for _, cells in anchors] == [
        ["0", "1", "go 0", str(GAMMA), "−1.25"], ["1", "1", "go 1", "0", "−0.25"],
        ["2", "1", "go 2", "0", "+0.75"],
    ]  # fmt: skip
    assert [attributes.get("aria-current") for attributes, _ in anchors] == [None, "true", None]


def test_credit_turn_by_turn(page, tmp_path):
    tree = show(page, "split=train&step=2&group=g4&trajectory=0&turn=1&tokens=1", tmp_path)
    head, *rows = [cells for _, cells in tree.rows["credit"]]
    assert head == [] and len(rows) == 3
    # t, action, r, G, V, recorded; gigpo, then grpo, reinforce, rloo, turn_gae, vineppo: one of four won
    assert rows[2][:6] == ["2", "go 0", "1", "1", "0.5", "−1.25"]
    assert rows[2][7:] == ["+1.5", "+0.75", "+1", "+0.5", "+0.5"]
    assert "2 continuations from here, mean 0.5: 10" in tree.texts["turn-1"]
    assert [cells[1:] for _, cells in tree.rows["states"][1:]] == [["3 turns", "3"]] * 3
    left = show(page, "split=train&step=2&group=g5&trajectory=0", tmp_path)
    assert (
        "left out by the filter" in left.texts["reader"]
        and "no algorithm has scored it" in left.texts["reader"]
    )
    assert [attributes["data-left"] for attributes, _ in left.rows["group"][1:]] == ["out"] * 4
    assert ", trained" in tree.texts["turn-0"] and ", trained" not in left.texts["turn-0"]


def test_a_search_tree(tmp_path):
    root = Node(None, None, 0, 0, observation=NASTY, executed=True)
    root.children = [Node(name, root, 1, 0, executed=True) for name in ("left", "right")]
    deep = Node(NASTY, root.children[1], 2, 0, executed=True)
    root.children[1].children = [deep]
    deep.backup(1.0)
    root.children[0].backup(0.0)
    (tmp_path / "trees.jsonl").write_bytes(2 * (orjson.dumps({"task": "t7", "root": root.to_dict()}) + b"\n"))
    page = build_trees(tmp_path).path
    tree = show(page, "tree=1&node=3", tmp_path)
    assert "2 of 2 trees" in tree.texts["count"] and tree.tags["img"] == 0
    assert NASTY in tree.texts["tree"] and NASTY in tree.texts["side"]
    assert [cells for _, cells in tree.rows["node"]][:2] == [["1"], ["1"]]  # N, Q


def test_recorded_markup_stays_text(page, tmp_path):
    tree = show(page, "split=train&step=1&group=g0&trajectory=0", tmp_path)
    assert tree.tags["img"] == 0 and NASTY in tree.texts["turn-0"]
    assert tree.texts["title"] == "maze, gigpo"


def test_filters_and_tokens_in_the_address(page, tmp_path):
    tree = show(page, "split=train&step=3&success=good&task=TASK-5&tokens=1&gamma=1", tmp_path)
    assert "1 of 24" in tree.texts["count"]
    assert tree.attributes["shown"]["data-group"] == "g5"
    assert "2 tokens" in tree.texts["turn-0"] and "G 1" in tree.texts["turn-0"]
    nothing = show(page, "split=train&step=3&task=none", tmp_path)
    assert "0 of 24" in nothing.texts["count"] and "No trajectory matches" in nothing.texts["reader"]


def test_an_address_of_elsewhere_opens_the_last_step(page, tmp_path):
    tree = show(page, "split=test&step=99&group=x&turn=7&metric=none&gamma=y", tmp_path)
    assert tree.attributes["shown"]["data-group"] == "g0"
    assert tree.texts["about"].count("4 steps with 78 trajectories") == 1
    assert re.search(r"train 0\.25", tree.texts["charts"]) and "actor/entropy" in tree.texts["charts"]


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("dark", [False, True])
def test_something_is_painted(page, tmp_path, width, dark):
    image = tmp_path / "page.png"
    browse(page, "split=train&step=2", tmp_path, f"--screenshot={image}", f"--window-size={width},900",
           *(["--blink-settings=preferredColorScheme=0"] if dark else []))  # fmt: skip
    pixels = (matplotlib.image.imread(image)[..., :3] * 255).astype(int)
    colours = Counter(map(tuple, pixels.reshape(-1, 3)))
    (background, count), *_ = colours.most_common(1)
    assert (sum(background) < 200) == dark
    assert count / colours.total() < 0.95
