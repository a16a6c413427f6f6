"""Search QA as it is played: actions, observations, rewards, state keys, the expert on files."""

import json
import pickle
import random
import subprocess
import sys

import pytest

from verl_multiturn.check import check_env
from verl_multiturn.env import make
from verl_multiturn.policies import play, random_policy
from verl_multiturn.rollout.parsing import ActionFormat, parse

for package in ("bm25s", "Stemmer"):
    pytest.importorskip(package, reason='needs pip install "verl-multiturn[search]"')

CORPUS = [
    {"id": "0", "contents": '"Mina Vole"\nMina Vole was born in Karst. She paints.'},
    {"id": "1", "contents": '"Karst"\nKarst is a town on the river Orm.'},
    {"id": "2", "contents": '"Orm"\nThe Orm is a river\nof 80 kilometres.'},
    {"title": "Karst Fair", "text": "The fair of Karst opens in May."},
    {"title": "Vole (animal)", "text": "A vole is a small rodent."},
]
BORN = "where was Mina Vole born?"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_MULTITURN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Keywords for a corpus of five passages and 60 questions, one of which is asked in the tests."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {"question": f"what is {n} plus one?", "answer": str(n + 1), "data_source": "nq"} for n in range(60)
    ]
    rows.append(
        {"question": BORN, "golden_answers": ["Karst", "the town of Karst"], "data_source": "hotpotqa"}
    )
    return {"corpus": write(folder / "c.jsonl", CORPUS), "questions": write(folder / "q.jsonl", rows)}


@pytest.fixture
def env(files):
    env = make("search_qa", **files)
    (seed,) = (t for split in ("train", "val", "test") for t in env.tasks(split) if "mina" in env.peek(t)[0])
    assert env.reset(seed) == (f"Question: {BORN}", {"task_type": "hotpotqa"})
    return env


KARST = """Question: where was Mina Vole born?
<information>
Doc 1 (Title: Karst) Karst is a town on the river Orm.
Doc 2 (Title: Karst Fair) The fair of Karst opens in May.
Doc 3 (Title: Mina Vole) Mina Vole was born in Karst. She paints.
</information>"""


def test_contract_on_files(files):
    report = check_env("search_qa", **files)
    assert report.ok, str(report)


def test_a_search_shows_the_best_passages(env):
    text, reward, terminated, truncated, info = env.step("<search>karst</search>")
    assert text == KARST and (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"valid": True, "success": False, "em": 0.0, "f1": 0.0, "searches": 1}
    text = env.step("<search>the Orm in kilometres</search>")[0]
    assert "Doc 1 (Title: Orm) The Orm is a river of 80 kilometres.\n" in text  # one line a passage
    assert "Mina Vole was born" not in text


@pytest.mark.parametrize(
    "action",
    [
        "<search>orm</search>",
        "I want to know.\n<search> orm\n</search> And then?",
        "<think>or <answer>Karst</answer> at once?</think><search>orm</search>",
    ],
)
def test_one_block_is_an_action(env, action):
    text, *_, info = env.step(action)
    assert info["valid"] and info["searches"] == 1 and "Title: Orm" in text


def test_an_utterance_without_an_action_tag_reaches_the_environment_whole(env):
    said = "<think>Is <answer>Karst</answer> right?</think>\nLet me see: <search>orm</search>"
    for form in (ActionFormat(tag=None, think=True), ActionFormat(tag=None, think=False)):
        (action,) = parse(said, form).actions
        assert env.fork().step(action)[0] == env.fork().step("<search>orm</search>")[0]


@pytest.mark.parametrize(
    "action",
    [
        "",
        "orm",
        "<search>orm",
        "orm</search>",
        "<search> \n</search>",
        "<answer></answer>",
        "<search>orm</answer>",
        "</search>orm<search>",
        "<search>orm</search><answer>Karst</answer>",
        "<search>orm</search><search>karst</search>",
        "<search>a<search>orm</search></search>",
        "<answer>Karst</answer><answer>Karst</answer>",
        "<think>hm</think>",
        "<think><search>orm</search></think>",
        "<SEARCH>orm</SEARCH>",
    ],
)
def test_anything_else_is_invalid_and_changes_nothing(env, action):
    env.step("<search>karst</search>")
    key = env.state_key()
    text, reward, terminated, _, info = env.step(action)
    assert (info["valid"], info["searches"], reward, terminated) == (False, 1, 0.0, False)
    head, _, rest = text.partition("\n")
    assert head + "\n" + rest.partition("\n")[2] == KARST and rest.startswith("That was no action")
    assert env.state_key() == key


@pytest.mark.parametrize(
    ("answer", "em", "f1"),
    [
        ("Karst", 1, 1),
        ("the town of karst!", 1, 1),
        ("a  KARST.", 1, 1),
        ("Karst town", 0, 0.8),  # of "town of Karst": 2 words shared, 2 said, 3 right
        ("in Karst", 0, 2 / 3),
        ("Orm", 0, 0),
    ],
)
def test_the_answer_is_scored(env, files, answer, em, f1):
    for metric, paid in (("em", em), ("f1", f1)):
        other = make("search_qa", metric=metric, **files)
        other.restore(env.snapshot())
        other.metric = metric
        _, reward, terminated, _, info = other.step(f"<answer>{answer}</answer>")
        assert reward == pytest.approx(paid) and terminated
        assert info["success"] is bool(em) and info["em"] == em and info["f1"] == pytest.approx(f1)
        assert info["answers"] == ["Karst", "the town of Karst"] and info["searches"] == 0


def test_four_turns_without_an_answer_are_cut(env):
    ends = [env.step("<search>karst</search>")[2:4] for _ in range(4)]
    assert ends == [(False, False)] * 3 + [(False, True)]


def keys_after(env, *queries):
    child = env.fork()
    texts = [
        child.step(query if query.startswith("<") else f"<search>{query}</search>")[0] for query in queries
    ]
    return child.state_key(), texts[-1]


def test_the_state_is_what_has_been_found(env):
    start = env.state_key()
    karst, orm = keys_after(env, "karst")[0], keys_after(env, "rodent")[0]
    assert len({start, karst, orm}) == 3
    assert keys_after(env, "karst", "rodent")[0] == keys_after(env, "rodent", "karst")[0] != karst
    assert keys_after(env, "karst", "karst")[0] == karst  # nothing new
    assert keys_after(env, "zzz")[0] == start
    # a path through another state to the same passages: the same observation, another state
    assert keys_after(env, "rodent", "karst")[1] == keys_after(env, "karst")[1] == KARST


def test_turns_that_bring_nothing_do_not_merge_states(env):
    """The observation after such a turn still shows the state: anchors by observation stay apart too."""
    for action in ("<answer>", "zzz"):  # malformed; a search without a result
        seen = {query: keys_after(env, query, action) for query in ("karst", "rodent")}
        assert seen["karst"][0] != seen["rodent"][0] and seen["karst"][1] != seen["rodent"][1]
        assert keys_after(env, action)[1] not in (seen["karst"][1], seen["rodent"][1])
        assert KARST.partition("\n")[2] in seen["karst"][1]


def test_the_expert_goes_on_from_any_state_and_knows_only_the_answer_on_files(env):
    assert env.expert() == f"<search>{BORN}</search>"
    env.step("<search>zzz</search>")
    assert env.expert() == f"<search>{BORN}</search>"
    env.step(env.expert())
    assert env.expert() == "<answer>Karst</answer>"
    world = make("search_qa")
    world.reset(next(seed for seed in range(99) if world.peek(seed)[1] == "multi-hop"))
    world.step(f"<search>{world.question.text}</search>")  # finds the first passage, by another query
    assert world.question.chain[0] in world.titles
    assert world.expert() == f"<search>{world.question.chain[1]}</search>"
    world = make("search_qa", max_turns=1)
    world.reset(0)
    assert world.expert().startswith("<answer>") and world.step(world.expert())[4]["success"]


def test_random_play_has_candidates(env, files):
    assert env.admissible() is None
    assert env.candidates() == [
        f"<search>{BORN}</search>", "<search>Mina Vole</search>", "<answer>Mina Vole</answer>",
    ]  # fmt: skip
    env.step("<search>paints</search>")
    assert env.candidates()[-1] == "<answer>Karst</answer>"  # "She" only begins a sentence
    offered = make("search_qa", offer=True, **files)
    offered.reset(0)
    assert offered.admissible() == offered.candidates()
    world, rng = make("search_qa"), random.Random(0)
    won = sum(play(world, random_policy(rng), seed).success for seed in range(400))
    assert 4 < won < 200


def test_instances_share_the_library(env, files):
    assert make("search_qa", **files).library is env.library
    env.step("<search>karst</search>")
    saved = pickle.dumps(env)
    assert len(saved) < 20_000 and len(env.snapshot()) < 20_000
    assert pickle.loads(saved).library is env.library
    code = f"import pickle; env = pickle.loads({saved!r}); print(env.step('<search>karst</search>')[0])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == KARST


def test_passages_are_cut(files):
    env = make("search_qa", passage_chars=12, **files)
    env.reset(0)
    assert "Doc 1 (Title: Orm) The Orm is a …\n" in env.step("<search>river of kilometres</search>")[0]
