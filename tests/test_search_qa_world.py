"""Search QA without data: the generated world as tasks, panels, processes and arguments see it."""

import os
import subprocess
import sys

import pytest

from verl_multiturn.check import check_env
from verl_multiturn.env import list_envs, make
from verl_multiturn.panel import Panel, check_disjoint, content_hash
from verl_multiturn.policies import evaluate, expert_policy, play

for package in ("bm25s", "Stemmer"):
    pytest.importorskip(package, reason='needs pip install "verl-multiturn[search]"')


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_MULTITURN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize("kwargs", [{}, {"metric": "f1", "topk": 1, "offer": True, "passages": 60}])
def test_contract(kwargs):
    report = check_env("search_qa", **kwargs)
    assert report.ok, str(report)
    assert "searching" in list_envs()["search_qa"]


def keys_after(env, *queries):
    child = env.fork()
    texts = [
        child.step(query if query.startswith("<") else f"<search>{query}</search>")[0] for query in queries
    ]
    return child.state_key(), texts[-1]


def test_similarity_groups_equal_states_and_no_others():
    pytest.importorskip("rapidfuzz", reason='needs pip install "verl-multiturn[similarity]"')
    import numpy as np

    from verl_multiturn.algorithms.similarity import alike

    env = make("search_qa")
    env.reset(1_000_000)
    one, two = env.library.questions.find(1_000_000).chain[0], "novel set in University"
    texts = [
        env.reset(1_000_000)[0],
        keys_after(env, one)[1],
        keys_after(env, one, "nothing of the kind")[1],  # the same passages, and a line more
        keys_after(env, two)[1],
        keys_after(env, two, one)[1],
    ]
    codes = alike(np.array(texts, object), np.zeros(5, np.int64), 0.9)
    assert codes[1] == codes[2] == codes[4] and len(set(codes.tolist())) == 3


def test_the_expert_searches_hop_by_hop():
    env = make("search_qa")
    kinds = {"single-hop": 2, "multi-hop": 3}  # turns
    for seed in range(1_000_000, 1_000_200):
        env.reset(seed)
        question, texts = env.question, []
        while len(texts) < 4:
            action = env.expert()
            text, _, over, _, info = env.step(action)
            if over:
                break
            texts.append(text)
        assert info["success"] and env.turn == kinds[question.source] == len(question.chain) + 1
        assert question.answers[0] in texts[-1], "the answer stands in what the expert found"
    played = [play(env, expert_policy, seed) for seed in range(1_000_000, 1_000_200)]
    assert all(episode.success and episode.invalid == 0 for episode in played)


def test_tasks_are_questions():
    env = make("search_qa")
    splits = {split: env.tasks(split) for split in ("train", "val", "test")}
    every = [task for tasks in splits.values() for task in tasks]
    assert len(set(every)) == len(every) == len(env.library.questions) > 5000
    assert 0.08 < len(splits["val"]) / len(every) < 0.12
    for seed in (0, 500_000, 1_000_000, 2_000_000_003, -1, splits["val"][0]):
        observation, info = env.reset(seed)
        content, task_type = env.peek(seed)
        assert (content, task_type) == (env.content(observation), info["task_type"])
        assert task_type in ("single-hop", "multi-hop")
    for first, split in ((0, "test"), (500_000, "val"), (1_000_000, "train"), (2_000_000_000, "train")):
        drawn = {env.library.questions.find(seed).key for seed in range(first, first + 300)}
        assert drawn <= set(splits[split]) and len(drawn) > 150
    with pytest.raises(ValueError, match=r"unknown split 'dev'; valid: test, val, train"):
        env.tasks("dev")
    with pytest.raises(ValueError, match="no question has the id 'abc'"):
        env.reset("abc")


def test_panels_are_apart_by_question():
    kwargs = {"passages": 60}
    env = make("search_qa", **kwargs)
    panels = [Panel.build("search_qa", kwargs, env.tasks(split), split) for split in ("train", "val", "test")]
    panels.append(Panel.build("search_qa", kwargs, range(2_000_000_000, 2_000_000_300), "demonstrations"))
    check_disjoint(*panels[:3])
    check_disjoint(panels[1], panels[2], panels[3])
    panels[1].verify()
    assert content_hash(env, env.reset(panels[1].tasks[0].id)[0]) == panels[1].tasks[0].hash
    assert all(episode.success for episode in evaluate(panels[2], expert_policy))


SHOW = """
from verl_multiturn.env import make
env = make("search_qa", passages=300, world_seed=7)
print(env.tasks("val")[:3], [env.reset(s)[0] + env.step(f"<search>{env.question.text}</search>")[0]
                             for s in range(1_000_000, 1_000_020)])
"""


def test_a_world_is_its_seed_in_every_process(tmp_path):
    shown = set()
    for hashes in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hashes, "VERL_MULTITURN_CACHE": str(tmp_path / hashes)}
        run = subprocess.run(
            [sys.executable, "-c", SHOW], capture_output=True, text=True, check=True, env=env
        )
        shown.add(run.stdout)
    assert len(shown) == 1 and "Doc 3" in shown.pop()
    ids = {tuple(make("search_qa", passages=60, world_seed=seed).tasks("train")) for seed in (0, 1)}
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"topk": 0}, "topk, max_turns and passage_chars must be at least 1, not 0, 4, 1200"),
        ({"metric": "f2"}, "unknown metric of search_qa 'f2'; valid: em, f1. Did you mean"),
        ({"passages": 10}, "passages must be at least 60, not 10"),
        ({"questions": "q.jsonl"}, "also give corpus=PATH or retriever=URL"),
        ({"corpus": "c.jsonl"}, "also give questions=PATH"),
        ({"questions": "q.jsonl", "corpus": "c", "retriever": "http://x"}, "not both"),
        ({"questions": "q.jsonl", "retriever": "http://x"}, "no file 'q.jsonl'"),
        ({"question": "q.jsonl"}, "Did you mean 'questions'"),
    ],
)
def test_wrong_arguments_are_named(kwargs, sentence):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        make("search_qa", **kwargs)
