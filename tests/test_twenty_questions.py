"""Twenty Questions: every word can be guessed, every question has an answer, returns against exact ones."""

import json
import random
import re
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from environments.twenty_questions_parts import oracle
from environments.twenty_questions_parts.exact import BeliefModel, random_return, reference_returns
from environments.twenty_questions_parts.oracle import oracle_of
from environments.twenty_questions_parts.things import ALIASES, CLASSES, MASS, PLURAL, SUBSET, THINGS, TRUE
from environments.twenty_questions_parts.words import Cues, Names, stems
from verl_multiturn import endpoint
from verl_multiturn.check import check_env
from verl_multiturn.cli import app
from verl_multiturn.env import make
from verl_multiturn.exact import exact_values
from verl_multiturn.panel import FIRST_ID, Panel, check_disjoint
from verl_multiturn.policies import expert_policy, play, random_policy

TEN = {"words": 10, "questions": "listed"}
TWO_WORDS = ["soccer ball", "golf ball", "tennis ball", "tennis racket", "baseball bat", "watering can"]


def ask(question, hidden="dog", **kwargs):
    """(answer, valid, success) of one question."""
    env = make("twenty_questions", **kwargs)
    env.reset(hidden)
    text, _, _, _, info = env.step(question)
    return text.removeprefix("Questions:\n").removeprefix(question).strip(), info["valid"], info["success"]


@pytest.mark.parametrize("kwargs", [{}, TEN, {"words": 12, "full": False, "hold_out": True, "max_turns": 6}])
def test_contract(kwargs):
    report = check_env("twenty_questions", episodes=4, **kwargs)
    assert report.ok, str(report)


def test_the_list_and_the_facts():
    assert len(THINGS) == len(set(THINGS)) == 157 and len(CLASSES) == 17
    assert set(SUBSET) | {*TWO_WORDS, "lawn mower"} <= set(THINGS) and set(ALIASES) <= set(THINGS)
    assert MASS | PLURAL <= set(THINGS) and not MASS & PLURAL
    for question, (cues, true) in TRUE.items():
        assert cues and true and true < set(THINGS), question
    alike = Counter(tuple(thing in true for _, true in TRUE.values()) for thing in THINGS)
    assert max(alike.values()) <= 3  # a few more guesses find what no question tells apart
    env = make("twenty_questions")
    assert env.words[:10] == SUBSET and set(env.words) == set(THINGS)


@pytest.mark.parametrize("form", ["Is it {}?", "is it a {}", "I think it's the {}.", "{}", "ARE THEY {}s?"])
def test_every_word_and_alias_can_be_guessed(form):
    env = make("twenty_questions")
    for thing in THINGS:
        for name in [thing, *filter(None, ALIASES.get(thing, "").split(", "))]:
            if form.endswith("s?") and name.endswith("s"):
                continue
            env.reset(thing)
            _, reward, terminated, _, info = env.step(form.format(name))
            assert (reward, terminated, info["success"]) == (0.0, True, True), form.format(name)
            other = THINGS[THINGS.index(thing) - 1]
            env.reset(other)
            assert env.step(form.format(name))[1:3] == (-1.0, False)


@pytest.mark.parametrize(
    ("question", "hidden"),
    [
        ("Could it be a pair of pants?", "pants"),
        ("knives", "knife"),
        ("Is the hidden thing a battery?", "battery"),
        ("batteries?", "battery"),
        ("My guess is a piece of paper", "paper"),
        ("Is it potatoes, right?", "potato"),
    ],
)
def test_other_ways_to_guess(question, hidden):
    assert ask(question, hidden)[1:] == (True, True)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Is it alive?", "Yes."),
        ("IS IT  ALIVE", "Yes."),
        ("Is it a mammal", "Yes."),
        ("Is it an animal or a vehicle?", "Yes."),
        ("Is it an animal with stripes?", "No."),
        ("Is it not an animal?", "No."),
        ("Isn't it an animal?", "Yes."),
        ("Do you know whether it is food?", "No."),
        ("Is it a cat?", "No."),
        ("Is it a cat or a dog?", "Invalid question."),
        ("dog, cat", "Invalid question."),
        ("Is it a dog or an animal?", "Invalid question."),
        ("dog cat", "Invalid question."),
        ("What is it?", "Invalid question."),
        ("Is it bigger than a cat?", "Invalid question."),
        ("Is it an animal? " + "x" * 200, "Invalid question."),
    ],
)
def test_free_questions(question, answer):
    said, valid, success = ask(question)
    assert said.endswith(answer) and valid == (answer != "Invalid question.") and not success


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_has_an_answer(text):
    said, valid, success = ask(text)
    assert re.search(r"(Yes|No|Invalid question)\.$", said) and (valid or said.endswith("Invalid question."))
    assert not success or "dog" in text.lower()


def test_rewards_end_and_observation():
    env = make("twenty_questions", words=10)
    text, info = env.reset("pen")
    assert text == "Questions: none yet." and info["task_type"] == "words-10" and "piano" in env.instruction
    assert env.step("Is it alive?")[:2] == ("Questions:\nIs it alive? No.", -1.0)
    key = env.state_key()
    assert env.step("nonsense")[0].endswith("\nnonsense Invalid question.") and env.state_key() == key
    env.step("is it alive")
    assert env.state_key() == key  # a repeat
    text, reward, terminated, truncated, info = env.step("Is it a pen?")
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, True)
    env = make("twenty_questions", max_turns=2, full=False)
    env.reset("pen")
    assert env.step("Is it alive?")[:3] == ("No.", -1.0, False)
    assert env.step("Is it a dog?")[1:4] == (-1.0, True, False)


def test_listed_questions_are_the_only_ones():
    env = make("twenty_questions", **TEN)
    env.reset("pen")
    legal = env.admissible()
    assert len(legal) == 32 and legal[-10:] == [env.table.guess(word) for word in SUBSET]
    for action in legal:
        env.reset("pen")
        assert env.step(f" {action.upper()} ")[4]["valid"], action
    env.reset("pen")
    assert not env.step("pen")[4]["valid"] and not env.step("Is it a pet?")[4]["valid"]
    splits = {tuple(env.table.questions[q][word] for word in SUBSET) for q in legal[:-10]}
    assert len(splits) == 22
    assert make("twenty_questions").admissible() is None


def test_exact_returns_of_ten_words():
    env = make("twenty_questions", **TEN)
    found = reference_returns(env)
    assert found == pytest.approx({"best": -2.8, "random": -14.571572174823})
    assert [play(env, expert_policy, word).episode_return for word in SUBSET] == [
        *(-2, -2, -2, -3, -3, -2, -3, -4, -3, -4)
    ]  # the expert is one of the best
    assert random_return(32, 2, gamma=0.5) == pytest.approx(-(31 / 32) - 0.5 * (31 / 32) ** 2)
    rng = random.Random(0)
    returns = [play(env, random_policy(rng), seed).episode_return for seed in range(2000)]
    mean = sum(returns) / 2000
    spread = (sum((one - mean) ** 2 for one in returns) / 1999 / 2000) ** 0.5
    assert abs(mean - found["random"]) < 4 * spread
    with pytest.raises(ValueError, match="at most 12 words, not 157"):
        reference_returns(make("twenty_questions"))


def test_exact_returns_by_hand_and_by_both_ways():
    two = make("twenty_questions", words=["dog", "pen"])
    assert reference_returns(two)["best"] == -0.5  # either guess is right half of the time
    five = make("twenty_questions", words=5)
    model = BeliefModel(type(five), five.words, 20)
    uniform = exact_values(model, "uniform").start
    assert uniform == pytest.approx(random_return(len(model.actions), 20))
    half = model.state_of(["dog", "banana"])
    assert model.transitions(half, "Is it a dog?") == [
        (0.5, model.state_of(["dog"]), 0.0, True),
        (0.5, model.state_of(["banana"]), -1.0, False),
    ]


def test_the_expert_finds_all_words():
    env = make("twenty_questions")
    episodes = [play(env, expert_policy, thing) for thing in THINGS]
    assert all(one.success for one in episodes) and max(one.turns for one in episodes) <= 16
    assert -8 < sum(one.episode_return for one in episodes) / 157 < -6


def test_the_expert_goes_on_where_answers_contradict():
    env = make("twenty_questions", words=10)
    env.reset("dog")
    env.known = frozenset({("is it alive", "Yes."), ("is it food", "Yes.")})
    assert env.candidates() == env.words and env.expert()


def test_splits_hide_different_words():
    panels = [
        Panel.build("twenty_questions", {}, count(FIRST_ID[split]), split, n=size)
        for split, size in (("test", 31), ("val", 16), ("train", 110))
    ]
    check_disjoint(*panels)
    hidden = [{make_hidden({}, task.id) for task in panel.tasks} for panel in panels]
    assert sum(map(len, hidden)) == 157 == len(set().union(*hidden))
    # Few words are the same in all splits, each equally often, and told apart by their seeds.
    few = [Panel.build("twenty_questions", TEN, count(FIRST_ID[s]), s, n=20) for s in ("test", "train")]
    check_disjoint(*few)
    for panel in few:
        assert set(Counter(make_hidden(TEN, task.id) for task in panel.tasks).values()) == {2}
    assert make_hidden({"hold_out": False}, 3) == make_hidden({"hold_out": False}, 3 + 157)
    env = make("twenty_questions")
    assert env.peek(7)[0] == env.content(env.reset(7)[0])


def make_hidden(kwargs, seed):
    env = make("twenty_questions", **kwargs)
    env.reset(seed)
    return env.hidden


def test_words():
    assert stems("knives") >= {"knife"} and stems("glass") == {"glass"} and "pea" in stems("peas")
    with pytest.raises(ValueError, match="pant and pants may both be called"):
        Names({"pants": ["pants"], "pant": ["pant"]})
    with pytest.raises(ValueError, match="'red' asks for 'b' and for 'a'"):
        Cues({"a": ["red"], "b": ["Red"]})


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"words": 1}, "needs 2 to 157 words, not 1"),
        ({"words": ["dog", "dgo"]}, "Did you mean 'dog'"),
        ({"words": ["dog", "dog"]}, "each once"),
        ({"words": "dog"}, "not the text 'dog'"),
        ({"questions": "list"}, "Did you mean 'listed'"),
        ({"oracle": "rule"}, "Did you mean 'rules'.*or a model's folder"),
        ({"oracle": "http://127.0.0.1:9/v1#none"}, "no endpoint answers"),
        ({"words": 2, "hold_out": True}, "falls to split"),
        ({"max_turns": 0}, "max_turns of at least 1"),
    ],
)
def test_wrong_arguments(kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        make("twenty_questions", **kwargs)


class Handler(BaseHTTPRequestHandler):
    """An oracle that knows about dogs, in an OpenAI-compatible server."""

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.reply({"data": [{"id": "oracle"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        self.server.prompts.append((prompt, body["temperature"]))
        said = "I do not know." if "know" in prompt.split("Question:")[1] else "yes, it does"
        self.reply({"choices": [{"index": 0, "message": {"content": said}, "finish_reason": "stop"}]})

    def reply(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_an_endpoint_as_oracle():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.prompts = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kwargs = {"oracle": f"http://127.0.0.1:{server.server_port}/v1#oracle"}
    try:
        assert ask("Does it bark?", **kwargs)[:2] == ("Yes.", True)
        assert ask("Does it bark?", **kwargs)[:2] == ("Yes.", True) and len(server.prompts) == 1
        ((prompt, temperature),) = server.prompts
        assert "dog" in prompt and prompt.endswith("Question: Does it bark?\nAnswer:") and temperature == 0
        assert ask("Do you know it?", **kwargs)[:2] == ("Invalid question.", False)  # "know" is not "no"
        assert ask("Is it a dog?", **kwargs)[2] and len(server.prompts) == 2  # guesses are not asked
        report = check_env("twenty_questions", episodes=1, words=10, max_turns=4, **kwargs)
        assert report.ok, str(report)
    finally:
        server.shutdown()


def said(content):
    return json.dumps({"choices": [{"message": {"content": content}, "finish_reason": "stop"}]})


BAD = {  # what an oracle replies -> the answer shown, or what the error says
    "empty": (200, said(""), None),
    "null": (200, said(None), None),
    "neither": (200, said("Perhaps; it knows nothing."), None),
    "a list": (200, said(["yes"]), "sent no chat completion"),
    "HTML": (200, "<html><body>yes</body></html>", "sent no chat completion: <html>"),
    "no choices": (200, '{"choices": []}', "sent no chat completion"),
    "choices of texts": (200, '{"choices": ["yes"]}', "sent no chat completion"),
    "nested": (200, "[" * 50_000, "sent no chat completion"),
    "not UTF-8": (200, b"\xff\xfe{", "sent no chat completion"),
    "500": (500, "out of memory", "gave no answer in 5 attempts; the last: HTTP 500: out of memory"),
    "400": (400, "too long", "refuses a request: HTTP 400: too long"),
    "trickling": (None, said("yes"), "gave no answer in 5 attempts; the last: not whole after 0.2 s"),
    "cut off": (-1, said("yes"), "gave no answer in 5 attempts; the last: RemoteProtocolError"),
}


class BadOracle(Handler):
    """Replies as `server.bad` says."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        code, text, _ = BAD[self.server.bad]
        data = text if isinstance(text, bytes) else text.encode()
        self.send_response(200 if code in (None, -1) else code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if code is None:  # a byte now and then: never silent for long
            for n in range(20):
                self.wfile.write(data[n : n + 1])
                time.sleep(0.05)
        else:
            self.wfile.write(data[:-5] if code == -1 else data)


@pytest.mark.parametrize("bad", BAD)
def test_an_oracle_that_replies_badly(bad, monkeypatch):
    """No yes or no is an invalid question; what is no reply at all is one sentence, also in the command."""
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.001)
    if bad == "trickling":
        monkeypatch.setattr(oracle, "SECONDS", 0.2)
    server = ThreadingHTTPServer(("127.0.0.1", 0), BadOracle)
    server.bad, server.handle_error = bad, lambda *arguments: None  # a client that gave up
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/v1#oracle"
    wrong = BAD[bad][2]
    try:
        if wrong is None:
            answer, valid, _ = ask("Does it bark?", oracle=address)
            assert (answer, valid) == ("Invalid question.", False)
            return
        with pytest.raises(ValueError) as caught:
            ask("Does it bark?", oracle=address)
        assert wrong in str(caught.value) and address.partition("#")[0] in str(caught.value)
        assert "\n" not in str(caught.value)
        arguments = ["play", "twenty_questions", f"oracle={address}", "words=4", "hold_out=false"]
        done = CliRunner().invoke(app, [*arguments, "--policy", "random", "--episodes", "3"])
        assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
        assert "Traceback" not in done.output
    finally:
        server.shutdown()
        server.server_close()


def test_a_local_model_as_oracle(tmp_path):
    pytest.importorskip("torch", reason="needs torch and transformers")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "</s>", "<unk>", "Yes", "No", "dog", "Answer:"]
    raw = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    t5 = transformers.T5Config(
        vocab_size=7, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    gpt = transformers.GPT2Config(vocab_size=7, n_embd=8, n_layer=1, n_head=2, eos_token_id=1, bos_token_id=1)
    kinds = {
        "t5": transformers.T5ForConditionalGeneration(t5),
        "gpt": transformers.GPT2LMHeadModel(gpt),
    }
    for name, model in kinds.items():
        model.save_pretrained(tmp_path / name)
        tokens.save_pretrained(tmp_path / name)
        said = oracle_of(str(tmp_path / name))("{name} {question} Answer:", "dog", "Yes")
        assert said == oracle_of(str(tmp_path / name))("{name} {question} Answer:", "dog", "Yes")
        assert set(said.split()) <= set(words)
        answer, valid, _ = ask("Does it bark?", oracle=str(tmp_path / name))
        assert (answer, valid) in [("Yes.", True), ("No.", True), ("Invalid question.", False)]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="cannot load the oracle in"):
        oracle_of(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("said", "answer"),
    [("Yes.", "Yes."), ("no, never", "No."), ("I know", None), ("not sure", None), ("Oh yes. No.", "Yes.")],
)
def test_what_a_model_says(said, answer):
    assert make("twenty_questions").table.read("dog", said) == answer
