"""Search QA's passages and their BM25 index: ranks, cache, processes, threads, corpora."""

import json
import math
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from environments.retrieval_parts.bm25 import Index
from environments.retrieval_parts.passages import Passage, read_corpus
from environments.retrieval_parts.world import generate

for package in ("bm25s", "Stemmer"):
    pytest.importorskip(package, reason='needs pip install "verl-multiturn[search]"')


TEXTS = [
    "red fox runs",
    "red red dog",
    "the dog sleeps and the fox runs away",
    "green tree",
    "dog",
    "snow on green fields",
    "snow falls over the hills and snow lies below us until march ends",
]
PASSAGES = [Passage(str(number), text) for number, text in enumerate(TEXTS)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


STOP = ("the", "and", "on")


def by_the_formula(query, k1=0.9, b=0.4):
    """Ranks of TEXTS by BM25 with Lucene's idf; no stop words, no stems."""
    docs = [re.findall(r"\w\w+", text) for text in TEXTS]
    docs = [[word for word in doc if word not in STOP] for doc in docs]
    mean = sum(map(len, docs)) / len(docs)
    scores = [0.0] * len(docs)
    for word in query.split():
        df = sum(word in doc for doc in docs)
        idf = math.log(1 + (len(docs) - df + 0.5) / (df + 0.5))
        for number, doc in enumerate(docs):
            tf = Counter(doc)[word]
            scores[number] += idf * tf / (tf + k1 * (1 - b + b * len(doc) / mean))
    return [n for n in sorted(range(len(docs)), key=lambda n: (-scores[n], n)) if scores[n] > 0]


@pytest.mark.parametrize("query", ["dog", "red", "red dog", "fox dog tree", "red red fox", "snow"])
def test_the_index_ranks_by_bm25(tmp_path, query):
    index = Index.cached("texts", lambda: PASSAGES, 7, tmp_path)
    expected = by_the_formula(query)
    assert query != "snow" or expected != by_the_formula(query, 1.5, 0.75), "bm25s's defaults rank otherwise"
    assert index.numbers(query, 7) == expected and len(index) == 7
    assert index.numbers(query, 2) == expected[:2]
    assert index.search([query, "zebra"], 1) == [[PASSAGES[expected[0]]], []]


def test_stems_ties_and_empty_queries(tmp_path):
    index = Index.cached("texts", lambda: PASSAGES, root=tmp_path)
    assert index.numbers("Dogs", 3) == index.numbers("dog", 3)
    assert index.numbers("the and ! \N{SNOWMAN}", 3) == index.numbers("", 3) == []
    same = Index.cached("same", lambda: [Passage("", "one two")] * 50, root=tmp_path)
    assert same.numbers("two", 7) == list(range(7)), "ties keep the order of the corpus"
    pairs = Index.cached("pairs", lambda: [Passage("", "one"), Passage("", "one one")] * 300, root=tmp_path)
    assert pairs.numbers("one", 400) == [*range(1, 600, 2), *range(0, 200, 2)]


def test_the_index_is_built_once_and_mapped(tmp_path):
    Index.cached("texts", lambda: PASSAGES, root=tmp_path)
    again = Index.cached("texts", lambda: pytest.fail("built again"), 7, tmp_path)
    assert isinstance(again._bm25.scores["data"], np.memmap) and isinstance(again._bytes, np.memmap)
    with pytest.raises(ValueError, match=r"does not fit its corpus \(documents: 6, 7\): delete"):
        Index.cached("texts", list, 6, tmp_path)
    about = again.folder / "about.json"
    about.write_text('{"documents": 4}')
    with pytest.raises(ValueError, match=r"\(documents: 4, 7\)"):
        Index.cached("texts", list, root=tmp_path)
    for digest, empty in (("no passages", []), ("no words", [Passage("", "the !")])):
        with pytest.raises(ValueError, match="the corpus"):
            Index.cached(digest, lambda empty=empty: empty, root=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == [again.folder.name], (
        "nothing half done"
    )


RACE = """
import sys, time, pathlib
from environments.retrieval_parts.bm25 import Index
from environments.retrieval_parts.passages import Passage
root = pathlib.Path(sys.argv[1])
def passages():
    with open(root / "log", "a") as log:
        log.write("built\\n")
    time.sleep(0.3)
    return [Passage(str(n), f"text number {n}") for n in range(100)]
print(len(Index.cached("race", passages, 100, root)))
"""


def test_processes_that_start_together_build_it_once(tmp_path):
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [run.communicate(timeout=60)[0] for run in runs] == ["100\n"] * 3
    assert (tmp_path / "log").read_text() == "built\n"


def test_threads_share_an_index(tmp_path):
    world = generate(200, 0)
    index = Index.cached("world", lambda: world.passages, 200, tmp_path)
    queries = [passage.title for passage in world.passages]
    alone = [index.numbers(query, 3) for query in queries]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda query: index.numbers(query, 3), queries * 5)) == alone * 5


def test_corpora_of_both_layouts(tmp_path):
    rows = [{"id": "7", "contents": '"A title"\nLine one.\nLine two.'}, {"title": "B", "text": "Text."}]
    path = write(tmp_path / "c.jsonl", [*rows, {"text": "no title"}])
    assert list(read_corpus(path)) == [
        Passage("A title", "Line one.\nLine two."), Passage("B", "Text."), Passage("", "no title"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"bad.jsonl, line 2: not a passage: .*'body'"):
        list(read_corpus(write(tmp_path / "bad.jsonl", [{"text": "x"}, {"body": "x"}])))
    (tmp_path / "worse.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"worse.jsonl, line 1: not JSON"):
        list(read_corpus(str(tmp_path / "worse.jsonl")))
    with pytest.raises(ValueError, match=r"no file 'nowhere.jsonl'"):
        list(read_corpus("nowhere.jsonl"))
