"""Files that a disk or a download has damaged: one sentence that names the file and what to do.

Each file is cut at random places, bits are flipped, whole values taken out. It is read as if nothing had
happened, or refused with a ValueError; no other exception leaves a reader.
"""

import importlib.util
import json
import random
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from verl_multiturn import checkpoints, heartbeat
from verl_multiturn.cli import app
from verl_multiturn.errors import RunStopped, intact
from verl_multiturn.runs import Run, RunWriter

spec = importlib.util.spec_from_file_location("fuzz", Path(__file__).parent / "bench" / "fuzz.py")
fuzz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz)


def refusals(path, read, named=None, changes=0, seed=0):
    """Read the file damaged in many ways; how many were refused. `named`: what the sentence must name."""
    good, rng, refused = path.read_bytes(), random.Random(seed), 0
    variants = list(fuzz.damaged(good, rng, flips=6))
    variants += fuzz.changed(good, rng, changes) if changes else []
    for data in variants:
        path.write_bytes(data)
        try:
            read()
        except ValueError as error:
            said = str(error)
            assert str(named or path) in said and "\n" not in said and len(said) < 1000, said
            refused += 1
    path.write_bytes(good)
    read()
    assert refused > 4, "nothing was damaged"
    return refused


def test_what_a_parser_raises_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"file cannot be used \(EOFError: a b\): write it again"):
        with intact(tmp_path / "file", "write it again"):
            raise EOFError("a\nb")
    for error in (ImportError("pip install x"), RunStopped("why"), ValueError(f"{tmp_path}/file, line 3")):
        with pytest.raises(type(error)) as caught, intact(tmp_path / "file", "write it again"):
            raise error
        assert caught.value is error


# ------------------------------------------------------------------------------- WebShop


@pytest.fixture
def shop(tmp_path, monkeypatch):
    for package in ("bm25s", "Stemmer", "thefuzz"):
        pytest.importorskip(package, reason="WebShop's packages are not installed")
    from environments.webshop_parts import catalogue
    from environments.webshop_parts.generate import generate

    monkeypatch.setenv("VERL_MULTITURN_CACHE", str(tmp_path / "cache"))
    items, made, human = generate(6, 1)
    names = ("items_shuffle.json", "items_ins_v2.json", "items_human_ins.json")
    (tmp_path / "data").mkdir()
    for name, content in zip(names, (items, made, human), strict=True):
        (tmp_path / "data" / name).write_text(json.dumps(content))

    def read():
        catalogue._open.cache_clear()
        opened = catalogue.open_shop(catalogue.Source(str(tmp_path / "data"), None, 0), "synthetic")
        list(opened.products)
        list(opened.goals)
        opened.search.find("shirt and chair")
        opened.split("test")

    yield read
    catalogue._open.cache_clear()


@pytest.mark.parametrize("name", ["items_shuffle.json", "items_ins_v2.json", "items_human_ins.json"])
def test_webshop_products(shop, tmp_path, name):
    refusals(tmp_path / "data" / name, shop, tmp_path / "data", changes=15)


def test_webshop_catalogue_in_the_cache(shop, tmp_path):
    shop()
    (folder,) = (path for path in (tmp_path / "cache/webshop").iterdir() if path.is_dir())
    files = [path for path in folder.rglob("*") if path.is_file() and "human" not in path.name]
    assert len(files) > 8
    for path in files:
        try:
            refusals(path, shop, folder)
        except AssertionError as error:  # an array's numbers have no wrong value, a name none is read
            assert str(error).startswith("nothing was damaged"), (path, error)


# ------------------------------------------------------------------------------- retrieval


@pytest.fixture
def search(tmp_path, monkeypatch):
    for package in ("bm25s", "Stemmer"):
        pytest.importorskip(package, reason='needs pip install "verl-multiturn[search]"')
    from environments.retrieval_parts import library

    monkeypatch.setenv("VERL_MULTITURN_CACHE", str(tmp_path / "cache"))
    passages = [{"title": f"t{n}", "text": f"red fox {n} runs over the hills"} for n in range(8)]
    questions = [{"question": f"Who is {n}?", "golden_answers": [f"fox {n}"]} for n in range(8)]
    for name, rows in (("corpus", passages), ("questions", questions)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def read(questions="questions.jsonl"):
        made = (str(tmp_path / questions),), str(tmp_path / "corpus.jsonl"), (), 0, 0, 1.0, 1
        opened = library.Library(library.Source(*made))
        opened.retriever.search(["fox hills"], 3)

    return read


@pytest.mark.parametrize("name", ["corpus.jsonl", "questions.jsonl"])
def test_search_qa_texts(search, tmp_path, name):
    refusals(tmp_path / name, search, tmp_path / name)


def test_search_qa_questions_as_parquet(search, tmp_path):
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    import pandas as pd

    rows = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    pd.DataFrame(rows).to_parquet(tmp_path / "questions.parquet")
    refusals(tmp_path / "questions.parquet", lambda: search("questions.parquet"))


def test_search_qa_index_in_the_cache(search, tmp_path):
    search()
    (folder,) = (path for path in (tmp_path / "cache/retrieval").iterdir() if path.is_dir())
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        try:
            refusals(path, search, folder)
        except AssertionError as error:
            assert str(error).startswith("nothing was damaged"), (path, error)


def test_hotpotqa(tmp_path):
    from environments.hotpotqa_parts.library import Library, Source

    pages = [["Mina Vole", ["Mina Vole is a painter.", "She was born in Karst."]], ["Karst", ["A town."]]]
    records = [
        {"question": f"Is {n} a town?", "answer": "no", "type": "bridge", "context": pages,
         "supporting_facts": [["Karst", 0]]}
        for n in range(5)
    ]  # fmt: skip
    path = tmp_path / "train.json"
    path.write_text(json.dumps(records))
    source = Source(((None, str(path)),), 0, 0)

    def read():
        opened = Library(source)
        opened.pages.find("Karst")
        opened.pages.similar("Mina")

    refusals(path, read, changes=60)


# ------------------------------------------------------------------------------- checkpoints


@pytest.fixture
def critic():
    pytest.importorskip("torch", reason="needs torch")
    from verl_multiturn.critic.config import CriticConfig

    return CriticConfig(
        encoder="ngrams", max_tokens=32, hidden=8, batch=4, micro_batch=4, capacity=8, min_size=2
    )


def arrays(path, read):
    """Damage to an archive of arrays as a whole, and one array at a time missing or of another shape."""
    good = dict(np.load(path))
    refusals(path, read)
    for name in random.Random(0).sample(sorted(good), 8):
        kept = {key: value for key, value in good.items() if key != name}
        for more in ({}, {name: np.zeros((3, 5))}, {name: np.array("text")}):
            np.savez(path, **kept | more)
            try:
                read()
            except ValueError as error:
                assert str(path) in str(error) and "\n" not in str(error)
    np.savez(path, **good)
    read()


def test_the_critics_part_of_a_checkpoint(critic, tmp_path):
    from verl_multiturn.critic.actor import FILE, CriticActor
    from verl_multiturn.critic.config import ArcherConfig
    from verl_multiturn.critic.replay import Transition

    actor = CriticActor(critic, ArcherConfig(updates=1))
    rows = [Transition(f"s{k}", f"a{k}", -1.0, f"s{k + 1}", False, -1.0, 0, f"t{k}") for k in range(4)]
    actor.add(rows, {f"s{k}": [k] for k in range(4)})
    actor.heard({f"s{k}": ["a"] for k in range(5)})
    actor.train()
    path = tmp_path / FILE
    actor.save(str(path))
    arrays(path, lambda: actor.load(str(path)))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"trainer\.resume_from_path=FOLDER"):
        actor.load(str(path))


def test_a_critic_that_reranks(critic, tmp_path):
    from verl_multiturn.critic.rerank import load_critic, save_critic
    from verl_multiturn.critic.utterance import UtteranceCritic

    save_critic(UtteranceCritic(critic), 100, tmp_path)
    refusals(tmp_path / "critic.json", lambda: load_critic(tmp_path), tmp_path)
    refusals(tmp_path / "critic.npz", lambda: load_critic(tmp_path))
    (tmp_path / "critic.json").write_text("{}")
    with pytest.raises(ValueError, match="verl-multiturn offline writes it again"):
        load_critic(tmp_path)


def test_a_q_models_folder(tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    from safetensors.torch import save_file

    from verl_multiturn.search.q_model import HEAD, QSpec, load_head, new_head, read_spec, write_spec

    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=4))
    model = SimpleNamespace(config=config, device="cpu")
    save_file(new_head(model).state_dict(), tmp_path / HEAD)
    write_spec(tmp_path, QSpec(reference="base"))
    refusals(tmp_path / HEAD, lambda: load_head(tmp_path, model))
    refusals(tmp_path / "q_model.json", lambda: read_spec(tmp_path), changes=20)
    assert read_spec(tmp_path) == QSpec(**asdict(QSpec(reference="base")))


def test_the_best_checkpoint(tmp_path):
    for step in (1, 2):
        (tmp_path / f"global_step_{step}").mkdir()
    checkpoints.keep_best(tmp_path, 1, 0.5)
    note = tmp_path / "best/success.json"
    refusals(note, lambda: checkpoints.keep_best(tmp_path, 2, -1.0), changes=10)
    assert (tmp_path / "best/global_step_1").is_dir()  # nothing is thrown away for a note that cannot be read


# ------------------------------------------------------------------------------- runs


@pytest.fixture
def run(tmp_path):
    turn = {"index": 0, "observation": "o", "actions": ["left"], "reward": 0.0, "valid": True, "anchor": "a",
            "value": None, "action_ids": [1], "text": "left", "advantage": None}  # fmt: skip
    record = {"split": "train", "step": 1, "group": "g", "trajectory": 0, "task": "0", "seed": 0,
              "dynamics_seed": 0, "instruction": "i", "return": 0.0, "terminated": True, "truncated": False,
              "truncation": None, "success": False, "turns": [turn]}  # fmt: skip
    with RunWriter(tmp_path / "run", {"multiturn": {"env": "frozen_lake", "env_kwargs": {}}}) as writer:
        for step in (1, 2, 3):
            writer.metrics(step, {"loss": 1.0 / step})
        writer.failure({"step": 1, "error": "x"})
        writer.trajectories("train", 1, [record])
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("name", "part"),
    [("config.yaml", "config"), ("metrics.jsonl", "metrics"), ("failures.jsonl", "failures")],
)
def test_the_files_of_a_run(run, name, part):
    path = run / name
    good, rng = path.read_bytes(), random.Random(3)
    for data in fuzz.damaged(good, rng):
        path.write_bytes(data)
        try:
            getattr(Run(run), part)
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error).strip()


@pytest.mark.filterwarnings("ignore:.*skipped the last line")
@pytest.mark.parametrize("command", ["report", "replay"])
def test_a_command_shows_no_traceback(run, command):
    more = ["--all"] if command == "replay" else []
    for name in ("config.yaml", "metrics.jsonl", "trajectories/train/1.jsonl.zst"):
        good = (run / name).read_bytes()
        for data in fuzz.damaged(good, random.Random(4), flips=3):
            (run / name).write_bytes(data)
            done = CliRunner().invoke(app, [command, str(run), *more])
            assert isinstance(done.exception, SystemExit | None), (name, data[:60], done.exception)
        (run / name).write_bytes(good)


def test_a_heartbeat(tmp_path):
    beat = heartbeat.Heartbeat(tmp_path)
    beat.enter("rollout", 1)
    beat.close("done")
    refusals(tmp_path / heartbeat.NAME, lambda: heartbeat.read(tmp_path), changes=10)
