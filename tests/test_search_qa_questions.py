"""Search QA's questions and scores: SQuAD's normalisation, files, splits, the generated world."""

import json
import re
from collections import Counter

import numpy as np
import pytest

from environments.retrieval_parts.questions import Question, Questions, read_questions
from environments.retrieval_parts.scoring import exact_match, f1, normalise
from environments.retrieval_parts.world import RELATIONS, generate


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_answers_are_normalised_as_squad_does():
    assert normalise("The  Eiffel-Tower, a!") == "eiffeltower"
    assert normalise("An apple, theatre") == "apple theatre"


def test_exact_match_and_f1():
    assert exact_match("the Beatles.", ["Stones", "Beatles"]) == 1
    assert exact_match("Beatles band", ["Beatles"]) == 0
    assert f1("the quick brown fox", ["brown fox jumps"]) == pytest.approx(2 * 2 / (3 + 3))
    assert f1("new new York", ["new new city"]) == pytest.approx(2 * 2 / (3 + 3))
    assert f1("york", ["new york city", "york city"]) == pytest.approx(2 / 3)  # the better one
    assert f1("paris", ["london"]) == f1("the", ["london"]) == f1("x", []) == 0
    assert f1("the", ["a"]) == 1  # nothing is left of both


@pytest.mark.parametrize("size", [60, 500])
def test_every_generated_question_has_one_answer_which_its_passages_hold(size):
    world = generate(size, 3)
    texts = {passage.title: passage.text for passage in world.passages}
    assert len(texts) == len(world.passages) == size
    answers = {}
    for question in world.questions:
        assert answers.setdefault(question.content, question.answers) == question.answers
        assert len(question.answers) == 1 and question.answers[0] in texts[question.chain[-1]]
        assert question.chain[0] in question.text and question.answers[0] not in question.text
        if len(question.chain) == 2:  # the first hop leads on, and gives neither answer nor shortcut
            assert question.chain[1] in texts[question.chain[0]] and question.chain[1] not in question.text
            assert question.answers[0] not in texts[question.chain[0]]
    kinds = Counter(question.source for question in world.questions)
    assert len(answers) == kinds.total() and kinds["single-hop"] > size and kinds["multi-hop"] > size
    asked = {question.text.replace(question.chain[0], "{}") for question in world.questions}
    assert {relation.asks for relation in RELATIONS} <= asked
    assert generate(size, 3) == world != generate(size, 4)


def test_capitals_lie_in_their_regions():
    world = generate(300, 1)
    answer = {question.text: question.answers[0] for question in world.questions}
    capitals = {q: a for q, a in answer.items() if re.fullmatch(r"What is the capital of \w+\?", q)}
    assert len(capitals) == 15
    for question, city in capitals.items():
        assert answer[f"In which region is {city}?"] == question.removesuffix("?").split()[-1]


def test_question_files_in_every_layout(tmp_path):
    pd = pytest.importorskip("pandas")
    search_r1 = {  # PeterJinGo/nq_hotpotqa_train
        "id": ["train_0", "train_1"],
        "question": ["who wrote it?", "where is it?"],
        "golden_answers": [np.array(["Ann", "A. Lee"]), np.array(["here"])],
        "data_source": ["nq", "hotpotqa"],
        "prompt": [np.array([{"role": "user", "content": "..."}])] * 2,
        "reward_model": [{"ground_truth": {"target": np.array(["Ann"])}, "style": "rule"}] * 2,
        "extra_info": [{"index": 0, "split": "train"}, {"index": 1, "split": "test"}],
    }
    pd.DataFrame(search_r1).to_parquet(tmp_path / "a.parquet")
    verl_agent = {
        "data_source": ["searchR1_nq"],
        "env_kwargs": [{"question": "how many?", "ground_truth": {"target": np.array(["3"])}}],
        "split": [None],
    }
    pd.DataFrame(verl_agent).to_parquet(tmp_path / "b.parquet")
    plain = [
        {"question": " what\n is it? ", "answer": "a box"},
        {"question": "x y?", "answers": ["1"], "split": "dev"},
    ]
    paths = [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet"), write(tmp_path / "c.jsonl", plain)]
    assert list(read_questions(paths)) == [
        Question("who wrote it?", ("Ann", "A. Lee"), "nq", "train"),
        Question("where is it?", ("here",), "hotpotqa", "test"),
        Question("how many?", ("3",), "nq"),
        Question("what is it?", ("a box",), "default"),
        Question("x y?", ("1",), "default", "val"),
    ]


@pytest.mark.parametrize(
    ("name", "row", "sentence"),
    [
        ("q.jsonl", {"answer": "a"}, r"q.jsonl, row 1: no question in \['answer'\]; a row has question"),
        ("q.jsonl", {"question": "why?"}, "no answer in"),
        ("q.jsonl", {"question": "?!", "answer": "a"}, "no question in"),
        ("q.jsonl", {"question": "why?", "answer": ["", 3]}, "no answer in"),
        ("q.jsonl", {"question": "why?", "answer": "a", "split": "tests"}, "unknown split 'tests'.*'test'"),
        ("q.jsonl", ["why?"], "is not a row"),
        ("q.csv", {}, r"unknown kind of question file .*valid: \*\.jsonl, \*\.parquet"),
    ],
)
def test_malformed_question_files_are_named(tmp_path, name, row, sentence):
    with pytest.raises(ValueError, match=sentence):
        list(read_questions([write(tmp_path / name, [row])]))
    with pytest.raises(ValueError, match="no file"):
        list(read_questions([str(tmp_path / "nowhere.parquet")]))


def ask(*texts, split=None):
    return [Question(text, ("a",), split=split) for text in texts]


def test_splits_hold_whatever_is_added_or_reordered():
    some = ask(*(f"question number {n}" for n in range(500)))
    more = ask(*(f"another question {n}" for n in range(500)))
    splits = ("train", "val", "test")
    few, many = Questions(some), Questions([*more, *reversed(some)])
    for split in splits:
        assert set(few.tasks(split)) <= set(many.tasks(split)) and few.tasks(split) == sorted(
            few.tasks(split)
        )
    sizes = [len(many.tasks(split)) for split in splits]
    assert sum(sizes) == len(many) == 1000 and all(70 < size < 130 for size in sizes[1:])
    assert len(Questions([*some, *ask("Question  number 7?!")])) == 500, "the same words, the same task"


def test_splits_that_the_file_names():
    train = ask(*(f"question {n}" for n in range(300)), split="train")
    test = ask(*(f"question {n}" for n in range(290, 310)), split="test")
    questions = Questions([*train, *test])
    assert set(questions.tasks("test")) == {question.key for question in test}, "held out, not trained on"
    assert len(questions) == 310 and 15 < len(questions.tasks("val")) < 50
    only = Questions(test)
    assert not only.tasks("train") and only.find(3).split == "test"
    with pytest.raises(
        ValueError, match=r"seed 1000000 draws from split 'train', which is empty: all 20 .* test"
    ):
        only.find(1_000_000)
    with pytest.raises(ValueError, match="there are no questions"):
        Questions([])
