"""HotPotQA as it is played: pages, lookups, answers; and what the authors' environment lets leak."""

import json
import pickle
import random
from collections import Counter

import pytest

from environments.hotpotqa_parts.docstore import Docstore, Page
from environments.hotpotqa_parts.library import files
from verl_multiturn.check import check_env
from verl_multiturn.env import make
from verl_multiturn.panel import Panel, check_disjoint
from verl_multiturn.policies import expert_policy, play

VOLE = ["Mina Vole", ["Mina Vole is a painter.", " She was born in Karst.", "A vole sleeps on her easel."]]
KARST = [
    "Karst",
    ["Karst is a town.", "It lies on the river Orm.", "The Orm floods Karst.", "It has a fair."],
]
FAIR = ["Karst Fair", ["The fair of Karst opens in May."]]
ORM = ["Orm (river)", ["The Orm is a river [80 km]."]]
RIVER = "Which river floods the town where Mina Vole was born?"
YES = "Are Karst and Orm both towns?"


def record(question, answer, *pages, facts=(), kind="bridge"):
    facts = [[title, 0] for title in facts]
    return {"question": question, "answer": answer, "type": kind, "context": pages, "supporting_facts": facts}


RECORDS = [
    record(RIVER, "the Orm", VOLE, KARST, facts=("Mina Vole", "Karst", "Mina Vole")),
    record(YES, "no", FAIR, ORM, KARST, facts=("Karst", "Orm (river)"), kind="comparison"),
    *(record(f"What is {n} plus one?", str(n + 1), FAIR) for n in range(60)),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("hotpotqa") / "train.json"
    path.write_text(json.dumps(RECORDS))
    return str(path)


def started(data, words="mina", **kwargs):
    env = make("hotpotqa", data=data, **kwargs)
    (seed,) = (t for split in ("train", "val", "test") for t in env.tasks(split) if words in env.peek(t)[0])
    env.reset(seed)
    return env


@pytest.fixture
def env(data):
    return started(data)


def says(env, action):
    """The observation without the question, which it begins with."""
    observation = env.step(action)[0]
    assert observation.startswith(f"Question: {RIVER}\n")
    return observation.partition("\n")[2]


@pytest.mark.parametrize("kwargs", [{}, {"offer": True, "metric": "f1"}])
def test_contract_on_the_generated_world(kwargs):
    report = check_env("hotpotqa", passages=100, **kwargs)
    assert report.ok, str(report)


def test_contract_on_a_file(data):
    report = check_env("hotpotqa", data=data)
    assert report.ok, str(report)


# ------------------------------------------------------------------ actions


def test_search_shows_the_beginning_of_a_page(data):
    env = started(data, sentences=2)
    assert says(env, "search[Mina Vole]") == "Mina Vole is a painter. She was born in Karst."
    assert says(env, " Search [ the  mina vole! ] ") == "Mina Vole is a painter. She was born in Karst."


def test_an_unknown_title_names_similar_ones_and_leaves_the_page_open(env):
    says(env, "search[Karst]")
    assert says(env, "search[fair of Karst]") == "Could not find [fair of Karst]. Similar: Karst Fair, Karst."
    assert says(env, "lookup[fair]") == "(Result 1 / 1) It has a fair."
    assert says(env, "search[Xyz]") == "Could not find [Xyz]. Similar: nothing."


def test_lookup_goes_through_the_page(env):
    says(env, "search[Karst]")
    assert says(env, "lookup[ORM]") == "(Result 1 / 2) It lies on the river Orm."
    assert says(env, "lookup[Orm]") == "(Result 2 / 2) The Orm floods Karst."
    assert says(env, "lookup[orm]") == "No more results."
    assert says(env, "lookup[town]") == "(Result 1 / 1) Karst is a town."
    assert says(env, "lookup[orm]") == "(Result 1 / 2) It lies on the river Orm."  # other words: anew
    assert says(env, "lookup[sea]") == "The page does not mention [sea]."


def test_the_cursor_ends_with_its_page(env):
    """In other wrappers it survives a change of page."""
    says(env, "search[Mina Vole]")
    assert says(env, "lookup[vole]") == "(Result 1 / 2) Mina Vole is a painter."
    says(env, "search[Karst]")
    says(env, "search[Mina Vole]")
    assert says(env, "lookup[vole]") == "(Result 1 / 2) Mina Vole is a painter."


@pytest.mark.parametrize(
    ("answer", "em", "f1"),
    [("Orm", 1.0, 1.0), ("the river Orm!", 0.0, 2 / 3), ("Karst", 0.0, 0.0)],
)
def test_an_answer_ends_the_task(data, answer, em, f1):
    for metric, reward in (("em", em), ("f1", f1)):
        env = started(data, metric=metric)
        text, got, terminated, truncated, info = env.step(f"finish[{answer}]")
        assert (text, got, terminated, truncated) == (f"You answered: {answer}", reward, True, False)
        assert info == {"valid": True, "success": em == 1, "em": em, "f1": f1, "answers": ["the Orm"]}


def test_an_argument_reaches_to_the_last_bracket(env):
    """The authors' code cuts an action at its second colon."""
    assert says(env, "search[Orm [80 km]: a river]").startswith("Could not find [Orm [80 km]: a river].")
    says(env, "search[Orm (river)]")
    assert says(env, "lookup[[80 km]]") == "(Result 1 / 1) The Orm is a river [80 km]."


@pytest.mark.parametrize("action", ["", "search", "search[]", "open[Karst]", "I search[Karst]", "lookup[x]"])
def test_an_invalid_action_changes_nothing(env, action):
    key = env.state_key()
    observation, reward, terminated, _, info = env.step(action)
    assert (reward, terminated, info["valid"], env.state_key()) == (0.0, False, False, key)
    said = "There is no open page" if action == "lookup[x]" else "That was no action"
    assert said in observation


# ------------------------------------------------------------------ what must not leak


def test_siblings_read_their_own_pages(env):
    """The authors' search never puts the environment back: a lookup acts on the page opened last."""
    says(env, "search[Karst]")
    says(env, "lookup[orm]")
    start = env.snapshot()
    branch = env.fork()
    says(branch, "search[Mina Vole]")
    assert says(branch, "lookup[vole]") == "(Result 1 / 2) Mina Vole is a painter."
    assert says(env, "lookup[orm]") == "(Result 2 / 2) The Orm floods Karst."
    for one in (env, branch):
        one.restore(start)
        assert says(one, "lookup[orm]") == "(Result 2 / 2) The Orm floods Karst."  # the cursor went along


def test_a_right_answer_rewards_its_own_branch_alone(env):
    """In the authors' first version every step after a right answer, in any branch, was worth 1."""
    start = env.snapshot()
    assert env.step("finish[Orm]")[1] == 1.0
    env.restore(start)
    for action in ("search[Karst]", "lookup[orm]", "nonsense", "finish[Karst]"):
        assert env.step(action)[1] == 0.0


def test_the_next_task_begins_without_a_page(env):
    seed = env.question.key
    says(env, "search[Karst]")
    env.reset(seed)
    assert not env.step("lookup[orm]")[4]["valid"]


def test_a_snapshot_holds_no_pages(env):
    assert b"painter" not in env.snapshot()
    assert pickle.loads(pickle.dumps(env)).library is env.library


def test_equal_keys_are_equal_states(env):
    keys = [env.state_key()]
    for action in ("search[Karst]", "lookup[orm]", "lookup[orm]", "lookup[town]"):
        env.step(action)
        keys.append(env.state_key())
    env.step("search[Karst]")
    assert len(set(keys)) == len(keys) and env.state_key() == keys[1]


# ------------------------------------------------------------------ questions and pages


def test_the_expert_reads_what_supports_the_answer(data):
    env = started(data)
    seed, said = env.question.key, []

    def policy(env, observation):
        said.append(env.expert())
        return said[-1]

    assert play(env, policy, seed).success
    assert said == ["search[Mina Vole]", "search[Karst]", "finish[the Orm]"]
    short = started(data, max_turns=1)
    assert play(short, expert_policy, seed).success


def test_the_expert_opens_pages_by_the_titles_they_have(tmp_path):
    path = tmp_path / "train.json"
    facts = ("Mina  Vole", "karst", "Karst")  # spelt otherwise than the pages, and one twice
    path.write_text(json.dumps([record(RIVER, "the Orm", VOLE, KARST, facts=facts), *RECORDS[2:]]))
    env, said = started(str(path)), []

    def policy(env, observation):
        said.append(env.expert())
        return said[-1]

    assert play(env, policy, env.question.key).success
    assert said == ["search[Mina Vole]", "search[Karst]", "finish[the Orm]"]


def test_the_expert_always_wins_in_the_generated_world():
    env = make("hotpotqa", passages=100)
    episodes = [play(env, expert_policy, seed) for seed in env.tasks("val")[:50]]
    assert all(one.success for one in episodes)
    assert Counter(one.task_type for one in episodes).keys() == {"single-hop", "multi-hop"}


def test_what_is_offered(data):
    env = started(data, offer=True)
    assert env.admissible() == ["search[Mina Vole]", "finish[Mina Vole]"]
    says(env, "search[town of Karst]")
    assert env.admissible()[:3] == ["search[Mina Vole]", "search[Karst]", "search[Karst Fair]"]
    says(env, "search[Karst]")
    offered = env.admissible()
    assert "finish[Orm]" in offered and "lookup[floods]" in offered and "search[Karst]" not in offered
    assert all(env.fork().step(action)[4]["valid"] for action in offered)
    assert started(data, "both").candidates()[-2:] == ["finish[yes]", "finish[no]"]
    assert started(data).admissible() is None


def test_panels_are_disjoint_by_content(data, tmp_path):
    """A question that the training file repeats counts once, held out."""
    test = tmp_path / "dev.json"
    test.write_text(json.dumps([RECORDS[0] | {"question": RIVER.lower()}, *RECORDS[2:5]]))
    env = make("hotpotqa", data={"train": data, "test": str(test)})
    splits = {split: env.tasks(split) for split in ("train", "val", "test")}
    assert {split: len(tasks) for split, tasks in splits.items()} | {"val": 0, "train": 0} == {
        "train": 0, "val": 0, "test": 4,
    }  # fmt: skip
    assert len(splits["train"]) + len(splits["val"]) == 58 and splits["val"]
    kwargs = {"data": {"train": data, "test": str(test)}}
    panels = [Panel.build("hotpotqa", kwargs, split, split) for split in splits]
    check_disjoint(*panels)
    assert len({task.hash for panel in panels for task in panel.tasks}) == 62


def test_the_layout_of_hugging_face(tmp_path):
    """`datasets` stores lists of structs as structs of lists."""
    pd = pytest.importorskip("pandas")
    row = RECORDS[0] | {
        "context": {"title": ["Mina Vole", "Karst"], "sentences": [VOLE[1], KARST[1]]},
        "supporting_facts": {"title": ["Mina Vole", "Karst"], "sent_id": [1, 2]},
    }
    path = tmp_path / "train.parquet"
    pd.DataFrame([row]).to_parquet(path)
    env = make("hotpotqa", data=[str(path)])
    env.reset(next(t for split in ("train", "val", "test") for t in env.tasks(split)))
    assert says(env, env.expert()).startswith("Mina Vole is a painter. She was born")
    assert env.expert() == "search[Karst]"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "not a list of records"),
        ("[1", "not JSON"),
        (json.dumps([RECORDS[0], {"question": "?"}]), "record 2: no 'answer'; a record of HotPotQA has"),
        (json.dumps([RECORDS[0] | {"answer": " "}]), "record 1: question and answer must be texts"),
        (json.dumps([RECORDS[0] | {"context": [["only a title"]]}]), "record 1: not enough values"),
        (json.dumps([RECORDS[0] | {"context": []}]), "there are no pages"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, said):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ValueError) as error:
        make("hotpotqa", data=str(path))
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"data": "gone.json"}, "no file 'gone.json'"),
        (
            {"data": "questions.csv"},
            "unknown kind of HotPotQA file 'questions.csv'; valid: *.json, *.parquet",
        ),
        ({"data": {"trian": "a.json"}}, "unknown split of data 'trian'"),
        ({"data": [3]}, "data names files, 3 is none"),
        ({"metric": "rouge"}, "unknown metric of hotpotqa 'rouge'; valid: em, f1."),
        ({"sentences": 0}, "must be at least 1, not 0, 7"),
        ({"passages": 5}, "passages must be at least 60, not 5"),
    ],
)
def test_wrong_arguments_are_named(kwargs, said):
    with pytest.raises(ValueError) as error:
        make("hotpotqa", **kwargs)
    assert said in str(error.value)


def test_splits_of_files_have_the_usual_names():
    assert files({"dev": "a.json", "train": "b.json"}) == (("val", "a.json"), ("train", "b.json"))


def test_similar_titles_are_ranked_by_shared_words():
    pages = [Page(title, ("x",)) for title in ("The Orm", "Orm Valley", "Valley of the Orm Lake", "Sea")]
    store = Docstore([*pages, Page("Orm Valley", ("another",))])
    assert len(store) == 4 and store.find("orm valley!").sentences == ("x",)
    assert store.similar("orm valley school") == ["Orm Valley", "Valley of the Orm Lake", "The Orm"]
    assert store.similar("orm valley school", k=1) == ["Orm Valley"]
    rng = random.Random(1)
    assert all(store.find(page.title) is not None for page in rng.sample(pages, 3))
