"""Evaluation of models: batched sampling, checkpoints, endpoints, what is recorded, what is refused."""

import asyncio
import json
import math
import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from verl_multiturn import checkpoints, endpoint
from verl_multiturn.checkpoints import Found, find
from verl_multiturn.cli import app
from verl_multiturn.runs import Run, RunWriter, to_turns

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("verl")
pytest.importorskip("httpx")

# The prompts of the small model; the defaults are for chat models.
PLAIN = (
    "multiturn.prompt.first='{observation}'", "multiturn.prompt.turn='{observation}'",
    "multiturn.prompt.next='{observation}'", "multiturn.prompt.format=''", "multiturn.prompt.history=0",
    "multiturn.action.tag=answer", "multiturn.action.think=false", "multiturn.max_action_tokens=12",
)  # fmt: skip


def call(*arguments, code=0):
    result = CliRunner().invoke(app, ["eval", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def sentence(*arguments, started=False):
    """What is said of a mistake: one line, after the opening one where playing had begun."""
    output = call(*arguments, code=2)
    lines = [line for line in output.splitlines() if " ETA " not in line]
    assert "Traceback" not in output and len(lines) == 1 + started, output
    return lines[-1]


def save(folder, vocabulary=0, template=True):
    """A chat model of 20 thousand parameters with the small model's tokenizer, never trained."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from verl_multiturn import small_model
    from verl_multiturn.demonstrations import Plan
    from verl_multiturn.rollout.parsing import ActionFormat
    from verl_multiturn.rollout.prompts import Templates

    plain = Templates(first="{observation}", turn="{observation}", next="{observation}", history=0)
    plan = Plan(
        env="frozen_lake", env_kwargs={}, row="turn", templates=plain, policy=None,
        form=ActionFormat(tag="answer", think=False), max_tokens=1024, vocabulary=512, width=32,
        layers=1, steps=2,
        noise=0.4, mistakes=0.0, imitate="played", prompt_weight=0.0, episodes=None,
        batch=4, mixed=1, lr=3e-3, seed=1,
    )  # fmt: skip
    tokens = small_model.tokenizer(plan, episodes=5)
    if not template:
        tokens.chat_template = None
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokens) + vocabulary, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1, eos_token_id=tokens.eos_token_id,
            pad_token_id=tokens.pad_token_id, initializer_range=0.3,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    save(path)
    return path


@pytest.fixture(scope="module")
def sampler(folder):
    from verl_multiturn.samplers import Sampler

    return Sampler(str(folder), {"temperature": 1.0})


def ask(sampler, *requests):
    async def all_of_them():
        return await asyncio.gather(*(sampler(ids, 6, seed) for ids, seed in requests))

    return asyncio.run(all_of_them())


# ---------------------------------------------------------------------- sampling


def test_a_batch_says_what_its_requests_say_alone(sampler):
    requests = [([5, 6, 7, 8], 1), ([9], 2), ([9], 3), ([5, 6], 1)]
    with sampler.player(), sampler.player(), sampler.player(), sampler.player():
        together = ask(sampler, *requests)
    alone = [ask(sampler, request)[0] for request in requests]
    assert [one.ids for one in together] == [one.ids for one in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    assert len({tuple(one.ids) for one in together}) > 1


def test_recorded_log_probs_are_the_models(sampler):
    prompt = [5, 6, 7]
    (said,) = ask(sampler, (prompt, 4))
    with torch.inference_mode():
        logits = sampler.model(torch.tensor([[*prompt, *said.ids]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(said.ids)[:, None])[:, 0]
    assert said.log_probs == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_batch_waits_for_every_player(sampler, monkeypatch):
    sizes = []
    generate = sampler.generate
    monkeypatch.setattr(sampler, "generate", lambda batch: (sizes.append(len(batch)), generate(batch))[1])

    async def play(pause, turns):
        with sampler.player():
            for turn in range(turns):
                await asyncio.sleep(pause)
                await sampler([5], 2, turn)

    async def main():
        await asyncio.gather(play(0.0, 3), play(0.05, 2), play(0.02, 1))

    asyncio.run(main())
    assert sizes == [3, 2, 1]


def test_an_error_reaches_everyone_who_asked(sampler, monkeypatch):
    def fail(batch):
        raise ZeroDivisionError

    monkeypatch.setattr(sampler, "generate", fail)
    with sampler.player(), sampler.player(), pytest.raises(ZeroDivisionError):
        ask(sampler, ([5], 1), ([6], 2))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"temperature": 1.0}, [0.1, 0.2, 0.3, 0.4]),
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ({"top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.5}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.3}, [0, 0, 0, 1]),
        ({"temperature": 0}, [0, 0, 0, 1]),
        ({"do_sample": False}, [0, 0, 0, 1]),
    ],
)
def test_draws_follow_the_distribution(sampling, expected):
    from verl_multiturn.samplers import Draw

    n = 8000
    draw = Draw(list(range(n)), sampling)
    scores = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(n, 4)
    drawn = draw(None, scores).argmax(-1)
    shares = torch.bincount(drawn, minlength=4) / n
    assert shares.tolist() == pytest.approx(expected, abs=0.025)
    if not draw.greedy:
        known = torch.tensor(expected)[drawn].log()
        assert torch.allclose(draw.log_probs[0], known, atol=1e-5)


# ---------------------------------------------------------------------- the command, with a model here


@pytest.mark.parametrize("row", ["turn", "trajectory"])
def test_eval_of_a_folder(folder, tmp_path, row):
    arguments = (folder, *PLAIN, f"multiturn.row={row}", "--panel", "frozen_lake-test", "--limit", 6)
    output = call(*arguments, "--samples", 2, "--out", tmp_path / "a")
    assert "12/12 episodes" in output and "95 %" in output
    run = Run(tmp_path / "a")
    records = run.trajectories("eval", 0)
    assert [(r["task"], r["trajectory"]) for r in records] == [(str(t), s) for t in range(6) for s in (0, 1)]
    assert run.config["eval"]["panel"] == "frozen_lake-test"
    assert run.metrics.loc[0, "eval/episodes"] == 12 and run.metrics.loc[0, "eval/failed"] == 0
    turns = [turn for record in records for turn in record["turns"]]
    assert all(len(turn["action_ids"]) == len(turn["log_probs"]) <= 12 for turn in turns)
    assert to_turns(records).reward.shape == (len(turns),)
    call(*arguments, "--samples", 2, "--out", tmp_path / "b", "--concurrency", 5)
    again = Run(tmp_path / "b").trajectories("eval", 0)
    assert [[t["text"] for t in r["turns"]] for r in records] == [
        [t["text"] for t in r["turns"]] for r in again
    ]


def test_greedy_samples_are_equal_and_nothing_is_overwritten(folder, tmp_path):
    arguments = (folder, *PLAIN, "--env", "frozen_lake", "--limit", 2, "--out", tmp_path / "run")
    call(*arguments, "--samples", 2, "--temperature", 0)
    records = Run(tmp_path / "run").trajectories("eval", 0)
    first = [record["turns"][0]["text"] for record in records]
    assert first[0] == first[1] and first[2] == first[3]
    assert "nothing is overwritten" in sentence(*arguments)


def test_the_record_can_be_replayed_and_viewed(folder, tmp_path):
    call(folder, *PLAIN, "--env", "frozen_lake", "--limit", 2, "--out", tmp_path / "run")
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "run"), "--split", "eval", "--all"])
    assert result.exit_code == 0 and "2 of 2 trajectories are as recorded" in result.output
    assert CliRunner().invoke(app, ["view", str(tmp_path / "run")]).exit_code == 0


def test_failing_episodes_are_listed_and_do_not_count(folder, tmp_path):
    (tmp_path / "odd.py").write_text(
        "from verl_multiturn.env import Env\n\n"
        "class Odd(Env):\n"
        "    instruction, max_turns = 'go', 2\n"
        "    def _reset(self, seed):\n"
        "        self.seed = seed\n"
        "        return f'task {seed}', {'task_type': 'odd'}\n"
        "    def _step(self, action):\n"
        "        if self.seed % 2 or self.instruction == 'broken':\n"
        "            raise KeyError('lost')\n"
        "        return 'on', 1.0, True, {'valid': True, 'success': True}\n"
        "    def admissible(self):\n"
        "        return ['go']\n"
    )
    arguments = (folder, *PLAIN, "--env", f"{tmp_path}/odd.py:Odd", "--out", tmp_path / "run")
    output = call(*arguments, "--limit", 4)
    assert "2 failed" in output and "2 episodes failed and do not count" in output
    run = Run(tmp_path / "run")
    assert len(run.failures) == 2 and "KeyError" in run.failures[0]["error"]
    assert all(record["success"] for record in run.trajectories("eval", 0))
    assert run.metrics.loc[0, "eval/failed"] == 2


# ---------------------------------------------------------------------- what is refused


def test_broken_folders(folder, tmp_path):
    given = ("--env", "frozen_lake", "--out", tmp_path / "run")
    copy = tmp_path / "copy"

    def again():
        copy.mkdir(exist_ok=True)
        for one in folder.iterdir():
            (copy / one.name).write_bytes(one.read_bytes())

    again()
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer_config.json").unlink()
    assert "has no tokenizer" in sentence(copy, *given)
    again()
    config = json.loads((copy / "config.json").read_text())
    two_layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    (copy / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    assert "cannot load the model in" in sentence(copy, *given)
    (copy / "config.json").write_text(json.dumps(config | two_layers))
    assert "is not the whole model" in sentence(copy, *given)
    assert "no model folder" in sentence(tmp_path / "nowhere", *given)
    (tmp_path / "empty").mkdir()
    assert "has no model: neither config.json" in sentence(tmp_path / "empty", *given)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_of_another_model_or_without_template(tmp_path):
    given = ("--env", "frozen_lake", "--out", tmp_path / "run")
    save(tmp_path / "small", vocabulary=-9)
    assert "they are of two models" in sentence(tmp_path / "small", *given)
    save(tmp_path / "mute", template=False)
    assert "has no chat template" in sentence(tmp_path / "mute", *given)


def test_names_that_are_wrong(folder):
    assert "unknown panel 'frozen_lake-tset'" in sentence(folder, "--panel", "frozen_lake-tset")
    assert "Did you mean 'frozen_lake'?" in sentence(folder, "--env", "frozen_lak")
    assert "no environment" in sentence(folder)
    assert "unknown recipe 'gigpo'" in sentence(folder, "--recipe", "gigpo")
    assert "is of frozen_lake" in sentence(folder, "--env", "sokoban", "--panel", "frozen_lake-test")
    assert "unknown config key in multiturn: 'rwo'" in sentence(
        folder, "multiturn.rwo=turn", "--env", "frozen_lake"
    )


# ---------------------------------------------------------------------- checkpoints of verl


def checkpoint(run, folder, step=7):
    """What verl leaves of one rank, for the model in `folder`; the run's configuration with it."""
    from transformers import AutoModelForCausalLM

    actor = run / "checkpoints" / f"global_step_{step}" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    for one in folder.iterdir():
        if not one.name.endswith("safetensors"):
            (actor / "huggingface" / one.name).write_bytes(one.read_bytes())
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    torch.save(dict(weights), actor / "model_world_size_1_rank_0.pt")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))
    return actor


def test_find(folder, tmp_path):
    with RunWriter(tmp_path / "run", {"multiturn": {}}):
        pass
    with pytest.raises(ValueError, match="has no checkpoint"):
        find(str(tmp_path / "run"))
    actor = checkpoint(tmp_path / "run", folder)
    expected = Found(str(actor.parent / "merged"), actor, 7, tmp_path / "run")
    for name in (tmp_path / "run", actor.parent, actor):
        assert find(str(name)) == expected
    assert find("Qwen/Qwen2.5-0.5B-Instruct") == Found("Qwen/Qwen2.5-0.5B-Instruct")
    assert find(str(folder)).path == str(folder)


def merger(monkeypatch, folder, fails=""):
    """verl's merger without its imports, which take seconds; the real one is tried below."""
    from pathlib import Path

    calls, other = [], subprocess.run

    def run(command, **options):
        if "--target_dir" not in command:  # a record asks git for the commit, too
            return other(command, **options)
        calls.append(command)
        target = Path(command[command.index("--target_dir") + 1])
        target.mkdir()
        for one in folder.iterdir():
            (target / one.name).write_bytes(one.read_bytes())
        return SimpleNamespace(returncode=bool(fails), stderr=fails)

    monkeypatch.setattr("verl_multiturn.checkpoints.subprocess.run", run)
    return calls


def test_eval_of_a_run_merges_once_and_uses_its_settings(folder, tmp_path, monkeypatch):
    calls = merger(monkeypatch, folder)
    call(folder, *PLAIN, "--panel", "frozen_lake-val", "--limit", 1, "--out", tmp_path / "run")
    checkpoint(tmp_path / "run", folder)
    for n in range(2):
        call(tmp_path / "run", "--panel", "frozen_lake-test", "--limit", 2, "--out", tmp_path / f"eval{n}")
    assert len(calls) == 1 and calls[0][1:4] == ["-m", "verl.model_merger", "merge"]
    run = Run(tmp_path / "eval1")
    assert run.steps("eval") == [7] and run.config["multiturn"]["action"]["tag"] == "answer"
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints" / "global_step_7").iterdir())
    assert left == ["actor", "merged"]


@pytest.mark.e2e
def test_verls_own_merger(folder, tmp_path):
    """Its weights are those of the shards, rounded to bfloat16 as verl does."""
    from transformers import AutoModelForCausalLM

    actor = checkpoint(tmp_path / "run", folder)
    merged = AutoModelForCausalLM.from_pretrained(checkpoints.merged(find(str(actor)))).state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        assert torch.equal(merged[name].float(), weight.bfloat16().float()), name
    (actor / "fsdp_config.json").unlink()
    os.utime(actor / "model_world_size_1_rank_0.pt")
    os.utime(actor.parent / "merged", (0, 0))
    with pytest.raises(ValueError, match=r"verl cannot merge the checkpoint .*fsdp_config.json"):
        checkpoints.merged(find(str(actor)))


def test_a_checkpoint_that_verl_cannot_merge(folder, tmp_path, monkeypatch):
    merger(monkeypatch, folder, fails="Traceback\nKeyError: 'lm_head'\n")
    actor = checkpoint(tmp_path / "run", folder)
    said = sentence(actor, "--env", "frozen_lake")
    assert "verl cannot merge the checkpoint" in said and said.endswith("KeyError: 'lm_head'")
    assert [path.name for path in actor.parent.iterdir()] == ["actor"]


# ---------------------------------------------------------------------- endpoints


class Handler(BaseHTTPRequestHandler):
    """A tiny OpenAI-compatible server: the model of a sampler behind HTTP, with troubles on demand."""

    def log_message(self, *arguments):
        pass

    def reply(self, code, body):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.reply(200, {"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            code = server.troubles.pop(0) if server.troubles else server.trouble
        if code != 200:
            return self.reply(code, {"error": {"message": "maximum context length is 8 tokens"}})
        text, cut = server.answer(body)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}}
        self.reply(200, {"choices": [choice | {"finish_reason": "length" if cut else "stop"}]})


@pytest.fixture
def serve(sampler, monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.01)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *arguments: None  # a client that gave up
    server.lock, server.bodies, server.troubles, server.trouble = threading.Lock(), [], [], 200
    tokens = sampler.tokenizer

    def answer(body):
        prompt = tokens.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        with server.lock:
            (said,) = ask(sampler, (list(prompt), body["seed"]))
        return sampler.decode(said.ids), said.ids[-1] != tokens.eos_token_id

    server.answer = answer
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.address = f"http://127.0.0.1:{server.server_port}/v1#tiny"
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("row", ["turn", "trajectory"])
def test_eval_of_an_endpoint(serve, folder, tmp_path, row):
    serve.troubles = [503, 429]  # troubles that pass are not seen
    arguments = (*PLAIN, f"multiturn.row={row}", "--panel", "frozen_lake-test", "--limit", 4)
    call(serve.address, *arguments, "--temperature", 1, "--out", tmp_path / "far")
    records = Run(tmp_path / "far").trajectories("eval", 0)
    turns = [turn for record in records for turn in record["turns"]]
    assert all(turn["action_ids"] == turn["prompt_ids"] == [] for turn in turns)
    assert turns[0]["log_probs"] is None and to_turns(records).tokens.sum() == 0
    body = serve.bodies[-1]
    assert body["model"] == "tiny" and body["max_tokens"] == 12 and body["temperature"] == 1.0
    longest = max(len(body["messages"]) for body in serve.bodies)
    assert longest == 1 if row == "turn" else longest > 1
    if row == "turn":  # served or loaded, the same model plays the same episodes
        call(
            folder,
            *arguments,
            "multiturn.max_action_tokens=6",
            "--temperature",
            1,
            "--out",
            tmp_path / "near",
        )
        near = Run(tmp_path / "near").trajectories("eval", 0)
        said = [[[turn["text"] for turn in record["turns"]] for record in some] for some in (records, near)]
        assert said[0] == said[1]


def test_an_endpoint_that_is_down_or_says_no(serve, tmp_path):
    given = ("--env", "frozen_lake", "--limit", 2, "--out", tmp_path / "run")
    assert "no endpoint answers at http://127.0.0.1:9/v1" in sentence("http://127.0.0.1:9/v1#tiny", *given)
    assert "names no model" in sentence(serve.address.partition("#")[0], *given)
    wrong = serve.address.replace("#tiny", "#tinny")
    assert "Did you mean 'tiny'?" in sentence(wrong, *given)
    assert not (tmp_path / "run").exists()
    serve.trouble = 401
    assert "refuses tiny: HTTP 401" in sentence(serve.address, *given, started=True)
    serve.trouble = 500
    assert "gave no answer in 5 attempts; the last: HTTP 500" in sentence(
        serve.address, *given[:-1], tmp_path / "run2", started=True
    )
    serve.trouble = 400  # of one prompt only, as far as one can know
    said = sentence(serve.address, *given[:-1], tmp_path / "run3", started=True)
    assert "all 2 episodes failed" in said
    assert "maximum context length" in Run(tmp_path / "run3").failures[0]["error"]


def test_what_was_played_before_an_end_is_recorded(serve, tmp_path):
    serve.troubles, serve.trouble = [200] * 30, 500
    out = tmp_path / "run"
    arguments = (*PLAIN, "--panel", "frozen_lake-test", "--limit", 64, "--concurrency", 1, "--out", out)
    sentence(serve.address, *arguments, started=True)
    recorded = Run(out).trajectories("eval", 0)
    assert 0 < len(recorded) < 64
    assert Run(out).metrics.loc[0, "eval/episodes"] == len(recorded)


def test_chats_survive_as_ids():
    chat = endpoint.TextChat()
    messages = [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "Grid:\n_ _ P\n\u00e9\u4e2d\U0001f600 2048 <action>"},
    ]
    ids = chat.build_initial_tokens(messages)
    assert chat.messages(ids) == messages
    said = [*chat.encode("<action>left</action>"), endpoint.END]
    more = [*messages, {"role": "assistant", "content": "<action>left</action>"}]
    updated = [*more, {"role": "user", "content": "next"}]
    whole = chat.merge_context_tokens(more, updated, [*ids, *said]).token_ids
    assert whole[: len(ids) + len(said)] == [*ids, *said] and chat.messages(whole) == updated
    text = "The quick brown fox jumps over the lazy dog near the river. " * 20
    assert 0.6 < len(chat.encode(text)) / (len(text) / 4) < 1.6
    assert math.isclose(len(chat.encode("_ _ P\n" * 4)), 24, abs_tol=6)


# ---------------------------------------------------------------------- trees of a model here


def test_search_with_a_folder(folder, tmp_path):
    from verl_multiturn.search.tree_files import read_trees

    arguments = ("search", *PLAIN, "--model", folder, "--env", "frozen_lake", "--limit", 3)
    # an untrained model has no form: all that it says is the action
    arguments += ("multiturn.search.iterations=5", "multiturn.search.width=3", "multiturn.action.tag=null")
    roots = []
    for name, trees in (("a", 3), ("b", 1)):  # in one batch, and one by one
        result = CliRunner().invoke(
            app, [*map(str, arguments), "--out", str(tmp_path / name), "--trees", str(trees)]
        )
        assert result.exit_code == 0, (result.output, result.exception)
        found = sorted(read_trees(tmp_path / name), key=lambda tree: tree["task"])
        assert all(tree["prompt_tokens"] > tree["proposals"] and tree["tokens"] > 0 for tree in found)
        roots.append([[child["text"] for child in tree["root"]["children"]] for tree in found])
    assert roots[0] == roots[1] and any(len(texts) > 1 for texts in roots[0])


@pytest.mark.parametrize("row", ["turn", "trajectory"])
def test_policies_without_a_model_are_recorded(tmp_path, row):
    """Random and expert with the budget of a model that says up to two actions a turn: three in all."""
    words = ("multiturn.max_turns=2", "multiturn.action.max_actions=2", "multiturn.max_actions=3")
    # A model would have no room for a second turn.
    words = (*words, "multiturn.action.separator='||'", f"multiturn.row={row}", "data.max_response_length=12")
    words = (*PLAIN, *words)
    chosen = ("--env", "sokoban", "--panel", "sokoban-val", "--limit", 12)
    shares = {}
    for name in ("random", "expert"):
        call(name, *words, *chosen, "--out", tmp_path / name)
        run = Run(tmp_path / name)
        records = run.trajectories("eval", 0)
        assert run.config["eval"]["model"] == name and len(records) == 12
        assert run.config["multiturn"]["action"]["max_actions"] == 1
        assert max(len(record["turns"]) for record in records) == 3
        assert {len(turn["actions"]) for record in records for turn in record["turns"]} == {1}
        assert any(record["truncation"] == "turns" for record in records)
        shares[name] = sum(record["success"] for record in records)
    assert shares["expert"] > shares["random"]
    again = tmp_path / "again"
    call("random", *words, *chosen, "--out", again)
    said, first = (
        [[turn["actions"] for turn in one["turns"]] for one in Run(folder).trajectories("eval", 0)]
        for folder in (again, tmp_path / "random")
    )
    assert said == first
    assert "random has no answers to choose from" in sentence("random", *chosen, "--select", "greedy")


def test_the_panel_of_a_role(tmp_path):
    from verl_multiturn.eval_records import choose_panel
    from verl_multiturn.play_settings import settings

    tasks = ["multiturn.val={first_seed: 7, size: 5}", "multiturn.val_size=3"]
    config = settings("frozen_lake", {}, None, None, tasks)
    panel = choose_panel(config, only="val")
    assert panel.split == "val" and len(panel.tasks) == 3 and panel.tasks[0].id == 7
    with pytest.raises(ValueError, match=r"no test panel: the run or recipe has multiturn\.test=null"):
        choose_panel(config, only="test")
    with pytest.raises(ValueError, match="unknown --split 'train'; valid: test, val"):
        choose_panel(config, only="train")
    assert "give either --panel or --split" in sentence("random", "--panel", "sokoban-val", "--split", "val")
