"""Search QA over HTTP, against a real server: Search-R1's protocol, errors, time-outs, several addresses."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from environments.retrieval_parts.bm25 import Index
from environments.retrieval_parts.passages import Passage, to_passage
from environments.retrieval_parts.remote import HTTPRetriever, RetrieverDown
from environments.retrieval_parts.world import generate
from verl_multiturn.env import make
from verl_multiturn.policies import expert_policy, play

for package in ("bm25s", "Stemmer"):
    pytest.importorskip(package, reason='needs pip install "verl-multiturn[search]"')


TEXTS = ["red fox runs", "red red dog", "the dog sleeps and the fox runs away", "green tree", "dog"]
PASSAGES = [Passage(str(number), text) for number, text in enumerate(TEXTS)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class Server(ThreadingHTTPServer):
    """Search-R1's protocol over an index; `plan` says what the next requests meet, then all is well."""

    daemon_threads = True

    def __init__(self, index, *plan):
        super().__init__(("127.0.0.1", 0), Handler)
        self.index, self.plan, self.bodies = index, list(plan), []
        self.url = f"http://127.0.0.1:{self.server_port}/retrieve"

    def __enter__(self):
        Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet, else each reply waits 40 ms for an acknowledgement

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        meets = self.server.plan.pop(0) if self.server.plan else "ok"
        if meets == "hang":
            time.sleep(0.6)
        status, reply = meets if isinstance(meets, tuple) else (200, self.found(body))
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def found(self, body):
        lists = self.server.index.search(body["queries"], body["topk"])
        result = [
            [{"document": {"id": "0", "contents": f'"{p.title}"\n{p.text}'}, "score": 1.5} for p in passages]
            for passages in lists
        ]
        return json.dumps({"result": result}).encode()

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return Index.cached("texts", lambda: PASSAGES, root=tmp_path_factory.mktemp("index"))


def test_http_asks_as_search_r1_does_and_finds_what_the_index_finds(index):
    with Server(index) as server:
        retriever = HTTPRetriever([server.url])
        assert retriever.search(["red dog", "zebra", "tree"], 2) == index.search(
            ["red dog", "zebra", "tree"], 2
        )
        assert server.bodies == [{"queries": ["red dog", "zebra", "tree"], "topk": 2, "return_scores": True}]
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda query: retriever.search([query], 2), ["dog", "fox"] * 20))
        assert found == [index.search([query], 2) for query in ["dog", "fox"] * 20]


def test_http_goes_round_the_addresses(index):
    with Server(index) as one, Server(index) as two, Server(index) as three:
        retriever = HTTPRetriever([one.url, two.url, three.url])
        for _ in range(9):
            retriever.search(["dog"], 1)
        assert [len(server.bodies) for server in (one, two, three)] == [3, 3, 3]


def test_http_tries_again_after_an_error_or_a_time_out(index):
    with Server(index, (500, b"out of memory"), (503, b"busy"), "hang") as server:
        retriever = HTTPRetriever([server.url], timeout=0.2, tries=4, wait=0.05)
        start = time.monotonic()
        assert retriever.search(["tree"], 1) == [[PASSAGES[3]]]
        # waits of 0.05, 0.1 and 0.2 s, and a time-out of 0.2 s
        assert 0.55 <= time.monotonic() - start < 3 and len(server.bodies) == 4


def test_http_leaves_an_address_that_is_down(index):
    with Server(index) as gone:
        pass
    with Server(index) as server:
        retriever = HTTPRetriever([gone.url, server.url], timeout=1, tries=2, wait=0)
        assert [retriever.search(["tree"], 1) for _ in range(3)] == [[[PASSAGES[3]]]] * 3
        with pytest.raises(
            RetrieverDown, match=r"no reply from the retriever after 3 requests, the last to http.*Conn"
        ):
            HTTPRetriever([gone.url], timeout=1, tries=3, wait=0).search(["tree"], 1)


@pytest.mark.parametrize(
    ("status", "reply", "sentence"),
    [
        (404, b"not here", r"refuses the request, http://\S+: HTTP 404 'not here'"),
        (200, b"<html>", r"replied '<html>', not \{\"result\""),
        (200, b'{"results": []}', r"replied .* \('result'\)"),
        (200, b'{"result": [[{"document": {"body": "x"}}]]}', "not a passage"),
        (200, b'{"result": [[null]]}', "replied"),
        (200, b'{"result": []}', "answered 0 queries of 1"),
    ],
)
def test_http_names_a_reply_it_cannot_use_and_does_not_repeat(index, status, reply, sentence):
    with Server(index, (status, reply)) as server:
        with pytest.raises(RetrieverDown, match=sentence):
            HTTPRetriever([server.url]).search(["tree"], 1)
        assert len(server.bodies) == 1


def test_http_replies_without_scores(index):
    with Server(
        index, (200, b'{"result": [[{"contents": "\\"T\\"\\nx"}, {"title": "U", "text": "y"}]]}')
    ) as server:
        assert HTTPRetriever([server.url]).search(["q"], 1) == [[Passage("T", "x")]]


def test_addresses_are_checked():
    with pytest.raises(ValueError, match="'localhost:8000' is not an address"):
        HTTPRetriever(["localhost:8000"])
    with pytest.raises(ValueError, match="needs an address, timeout > 0"):
        HTTPRetriever([])
    with pytest.raises(ValueError, match="not a passage"):
        to_passage("text")


def rows(world):
    return [
        {"question": q.text, "golden_answers": list(q.answers), "data_source": q.source}
        for q in world.questions
    ]


@pytest.fixture
def over(tmp_path, monkeypatch):
    """A world, its questions in a file, and an index of it."""
    monkeypatch.setenv("VERL_MULTITURN_CACHE", str(tmp_path / "cache"))
    world = generate(60, 5)
    index = Index.cached("world", lambda: world.passages, root=tmp_path)
    return write(tmp_path / "q.jsonl", rows(world)), index


def test_the_environment_over_http(over):
    questions, index = over
    with Server(index, (500, b"")) as server:
        env = make("search_qa", questions=questions, retriever=[server.url], timeout=5.0)
        assert all(play(env, expert_policy, seed).success for seed in range(20))
        here = make("search_qa", passages=60, world_seed=5)
        task = here.tasks("train")[0]
        here.reset(task), env.reset(task)
        search = f"<search>{here.question.chain[0]}</search>"
        assert env.step(search)[0] == here.step(search)[0]
        server.plan = [(503, b"")]
        env = make("search_qa", questions=questions, retriever=server.url, tries=1)
        env.reset(1)
        with pytest.raises(RetrieverDown, match="no reply from the retriever after 1 requests"):
            env.step("<search>x</search>")


def test_a_retriever_of_the_users_own(over, tmp_path, monkeypatch):
    questions, _ = over
    (tmp_path / "my_dense.py").write_text(
        "from environments.retrieval_parts.passages import Passage\n"
        "class Dense:\n"
        "    def search(self, queries, k):\n"
        "        return [[Passage('T', query)] * k for query in queries]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    env = make("search_qa", questions=questions, retriever="my_dense:Dense", topk=1)
    env.reset(0)
    assert env.step("<search>hello</search>")[0].endswith("\nDoc 1 (Title: T) hello\n</information>")
    for wrong in ("my_dense:Dens", "my_dens:Dense", "localhost"):
        with pytest.raises(ValueError, match=rf"retriever '{wrong}' is no address"):
            make("search_qa", questions=questions, retriever=wrong)


def test_the_module_imports_without_its_packages():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('bm25s', 'Stemmer', 'httpx', 'pandas')))\n"
        "import environments.search_qa"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})
