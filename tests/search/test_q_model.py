"""Q models: what is fitted is what is scored, on the same tokens; early stopping, baselines, refusals."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

import verl_multiturn as vm
from verl_multiturn.rollout.prompts import PromptTooLong
from verl_multiturn.search.fit import FitConfig, Fitting, answer_log_probs, fit
from verl_multiturn.search.q_model import QModel, QSpec, Tokens, aggregated, load_q_model, read_spec
from verl_multiturn.search.scorers import TransformersLogProbs
from verl_multiturn.search.step_value import ModelValue, Step

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "qvalue_vectors.json").read_text())
FAST = {"lr": 3e-3, "epochs": 12, "batch": 16, "warmup": 0.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory, save_chat_model):
    folder = tmp_path_factory.mktemp("models") / "base"
    save_chat_model(folder)
    return str(folder)


def pair(good, bad, where, split="train", **more):
    """At `where` one move is good: what a Q model has to learn."""
    prompt = [{"role": "user", "content": f"start {where}"}]
    return {"prompt": prompt, "win": good, "lose": bad, "gap": 1.0, "q_win": 1.0, "q_lose": 0.0,
            "split": split, "invalid": False, "weight": 1.0, **more}  # fmt: skip


def separable(n=64):
    """Right of a hole, left of the goal; some of the losers are longer than the winners."""
    rng, pairs = random.Random(0), []
    for k in range(n):
        where, good = rng.choice([("hole ice", "right"), ("ice goal", "left"), ("goal ice", "up")])
        bad = rng.choice([move for move in ("left", "right", "up", "down") if move != good])
        longer = bad + " " + bad if k % 3 == 0 else bad
        split = "held_out" if k % 4 == 0 else "train"
        pairs.append(pair(good, longer, where, split, invalid=k % 3 == 0))
    return pairs


def write(path, pairs):
    path.write_text("".join(json.dumps(one) + "\n" for one in pairs))
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", separable())


@pytest.fixture(scope="module")
def fitted(base, pairs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("q") / "model"
    return folder, fit(pairs, base, folder, FitConfig(**FAST, patience=None))


# ------------------------------------------------------------------ scoring


def test_a_shared_prefix_changes_nothing(base):
    """The prompt is read once; each answer's numbers are those of prompt and answer read alone."""
    from verl_multiturn.samplers import load_model, load_tokenizer

    model = load_model(base, load_tokenizer(base))[0]
    prompt, answers = [3, 4, 5, 6, 7], [[8], [9, 10, 11, 1], [4, 1], [8]]
    found = TransformersLogProbs(model)(prompt, answers)
    assert [len(one) for one in found] == [1, 4, 2, 1]
    for answer, log_probs in zip(answers, found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        alone = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert log_probs == pytest.approx(alone.tolist(), abs=1e-5)
    assert TransformersLogProbs(model)(prompt, [[8], [9]])[0] == pytest.approx(found[0], abs=1e-5)
    assert TransformersLogProbs(model)(prompt, []) == []
    for aggregate in ("sum", "mean"):  # what the loss is made of
        summed = answer_log_probs(model, [(prompt, answer) for answer in answers], aggregate)
        assert summed.tolist() == pytest.approx([aggregated(one, aggregate) for one in found], abs=1e-4)


class Table:
    """Log-probabilities by answer."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __call__(self, prompt, answers):
        return [self.numbers[tuple(answer)] for answer in answers]


class Digits(Tokens):
    """Each digit of an answer is a token."""

    def answer(self, text):
        return [int(letter) for letter in text]

    def prompt(self, messages, room):
        return [0]


def q_of(policy, reference, **spec):
    return QModel(QSpec("somewhere", **spec), Digits(None, 9), Table(policy), Table(reference))


def test_the_score_is_the_log_ratio_of_the_answer():
    v = VECTORS["V7_implicit_q"]
    policy, reference = {(0, 1): v["policy_logp"]}, {(0, 1): v["ref_logp"]}
    assert q_of(policy, reference)([], ["01"]) == pytest.approx([v["q_beta0p1"]])
    assert q_of(policy, reference, beta=1.0)([], ["01"]) == pytest.approx([v["q_sum"]])
    assert q_of(policy, reference, beta=1.0, aggregate="mean")([], ["01"]) == pytest.approx([v["q_mean"]])


def test_the_authors_score_would_rank_otherwise():
    """It is the mean of log_softmax(z_pi - z_ref), not of the log-ratio that was fitted."""
    v = VECTORS["V7_implicit_q"]
    z = torch.tensor(v["policy_logits"]) - torch.tensor(v["ref_logits"])
    theirs = z.log_softmax(-1)[range(2), v["action"]]
    assert theirs.tolist() == pytest.approx(v["repo_tokens"], abs=1e-6)
    assert float(theirs.mean()) == pytest.approx(v["repo_mean"], abs=1e-6)
    assert v["q_mean"] > 0 > v["repo_mean"]


@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_sum_and_mean_rank_answers_of_different_lengths_differently(aggregate):
    v = VECTORS["V8_ranking"]
    answers = {"12": "a", "1234": "b", "1": "c"}
    ratios = {tuple(map(int, ids)): v["per_token_log_ratio"][name] for ids, name in answers.items()}
    zeros = {ids: [0.0] * len(ids) for ids in ratios}
    scores = q_of(ratios, zeros, aggregate=aggregate)([], list(answers))
    ranked = sorted(zip(scores, answers.values(), strict=True), reverse=True)
    assert [name for _, name in ranked] == v[f"by_{aggregate}"]


def test_a_long_chat_loses_whole_turns_from_its_beginning(base):
    from verl_multiturn.samplers import load_tokenizer

    tokenizer = load_tokenizer(base)
    turn = [{"role": "user", "content": "ice ice"}, {"role": "assistant", "content": "left"}]
    system, last = {"role": "system", "content": "goal"}, {"role": "user", "content": "hole up"}
    chat = [system, *turn, *turn, *turn, last]

    def read(max_tokens, room=2):
        ids = Tokens(tokenizer, max_tokens).prompt(chat, room)
        assert len(ids) + room <= max_tokens
        return tokenizer.decode(ids)

    one = "user ice ice <end> assistant left <end> "
    whole = f"system goal <end> {one * 3}user hole up <end> assistant"
    assert read(64) == whole and read(31) == whole  # exactly as many as there is room for
    assert read(30) == f"system goal <end> {one * 2}user hole up <end> assistant"
    assert read(13) == "system goal <end> user hole up <end> assistant"
    assert read(14, room=6) == "system goal <end> user hole up <end> assistant"
    with pytest.raises(ValueError, match="a prompt has 8 tokens without any earlier turn and the answer 2"):
        read(9)


def test_a_prompt_that_fits_is_the_first_of_several(base):
    from verl_multiturn.samplers import load_tokenizer

    tokens = Tokens(load_tokenizer(base), 12)
    chats = [[{"role": "user", "content": " ".join(["ice"] * n)}] for n in (9, 7, 5)]
    assert tokens.readable(chats, 2) == tokens.whole(chats[1]) and len(tokens.whole(chats[1])) == 10
    assert tokens.readable(chats, 4) == tokens.whole(chats[2])
    with pytest.raises(PromptTooLong, match="more than max_tokens=12"):
        tokens.readable(chats, 9)


@pytest.mark.parametrize("lora", [False, True])
def test_model_and_reference_are_read_in_one_precision(base, fitted, pairs, tmp_path, monkeypatch, lora):
    """On a GPU a model comes in the precision of its folder, and the fitted one is saved in float32."""
    if lora:
        pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    asked, load = [], AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *a, **k: asked.append(k["dtype"]) or load(*a, **k)
    )
    folder = fitted[0]
    if lora:
        folder = tmp_path / "q"
        fit(pairs, base, folder, FitConfig(lora_rank=2, **{**FAST, "epochs": 1}))
    q = load_q_model(folder)
    assert set(asked) == {"float32"}
    assert {p.dtype for m in (q.policy.model, q.reference.model) for p in m.parameters()} == {torch.float32}


def test_both_scorers_of_a_folder(fitted, monkeypatch):
    """vLLM itself is tried in tests/e2e/test_vllm_scorer.py."""
    from verl_multiturn.search import q_model
    from verl_multiturn.search.rules import Rules

    made = []
    monkeypatch.setattr(q_model, "VLLMLogProbs", lambda folder, **engine: made.append((folder, engine)))
    assert isinstance(Rules(["argmax"], 5, str(fitted[0])).score().policy, TransformersLogProbs)
    q = Rules(["argmax"], 5, str(fitted[0]), scorer="vllm").score()
    engine = {"dtype": "float32", "gpu_memory_utilization": 0.3}
    assert made == [(str(fitted[0]), engine), (q.spec.reference, engine)]
    assert q.tokens.max_tokens == q.spec.max_tokens - 1  # vLLM always writes a token
    with pytest.raises(ValueError, match="unknown scorer of a Q model 'vlm'; valid: engine, vllm"):
        Rules(["argmax"], 5, "q", scorer="vlm")


# ------------------------------------------------------------------ fitting


def test_separable_pairs_are_separated(fitted, base):
    folder, kept = fitted
    assert kept["accuracy_all"] >= 0.95 and kept["pairs_all"] == 16
    assert kept["pairs_valid"] + kept["pairs_invalid"] == 16 and kept["pairs_invalid"] > 0
    assert kept["accuracy_invalid"] is not None
    q = load_q_model(folder)
    moves = ["left", "right", "up", "down"]
    ranked = {
        where: moves[int(np.argmax(q([{"role": "user", "content": f"start {where}"}], moves)))]
        for where in ("hole ice", "ice goal", "goal ice")
    }
    assert ranked == {"hole ice": "right", "ice goal": "left", "goal ice": "up"}
    assert read_spec(folder) == QSpec(base, max_tokens=64)


def test_the_recorded_loss_is_the_public_one(fitted, pairs, base):
    """Loss and accuracy of the kept weights, computed again by scoring the held-out pairs."""
    folder, kept = fitted
    q = load_q_model(folder)
    held_out = [one for one in separable() if one["split"] == "held_out"]
    scores = np.array([q(one["prompt"], [one["win"], one["lose"]]) for one in held_out]) / 0.1
    zeros = np.zeros(len(held_out))
    assert vm.dpo_loss(scores[:, 0], scores[:, 1], zeros, zeros, 0.1) == pytest.approx(kept["loss"], abs=1e-5)
    assert np.mean(scores[:, 0] > scores[:, 1]) == kept["accuracy_all"]


def test_before_the_first_update_nothing_is_known(fitted):
    folder, _ = fitted
    first, *rest = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert first["update"] == 0 and first["train_loss"] is None
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6) and first["accuracy_all"] == 0.5
    assert len(rest) == 10 and rest[-1]["update"] == 36 and rest[0]["train_loss"] > rest[-1]["train_loss"]
    best = max([first, *rest], key=lambda one: (one["accuracy_valid"], -one["loss"]))
    assert [one for one in [first, *rest] if one["kept"]][-1] == best


def test_pairs_that_are_too_long_lose_history_or_are_left_out(base, tmp_path):
    long = {"prompt": [{"role": "user", "content": "start " + "ice " * 70 + "hole ice"}]}
    less = [[{"role": "user", "content": "start ice ice hole ice"}], [{"role": "user", "content": "start"}]]
    whole = separable()
    pairs = [
        *whole,
        *(one | long | {"shorter": less} for one in whole[:3]),
        *(one | long for one in whole[:2]),
    ]
    said = []
    fitting = Fitting(write(tmp_path / "p", pairs), base, tmp_path / "q", FitConfig(**FAST), said.append)
    assert said == [
        "longer than max_tokens=64, of 69 pairs; 3 are read with less history than the policy read, 2 are "
        "left out: they are too long without any"
    ]
    rows = [row for split in fitting.rows.values() for row in split]
    assert len(rows) == 67
    assert sum(row.prompt == fitting.tokens.whole(less[0]) for row in rows) == 3
    fitting.run()
    first = json.loads((tmp_path / "q" / "metrics.jsonl").read_text().splitlines()[0])
    assert (first["shortened"], first["left_out"]) == (3, 2)
    only = write(tmp_path / "p2", [one | long for one in whole])
    with pytest.raises(ValueError, match="has no train pairs of at most max_tokens=64 tokens: search more"):
        fit(only, base, tmp_path / "q2", FitConfig())


def test_a_fit_that_was_stopped_starts_over(base, pairs, tmp_path, fitted):
    """Its folder holds weights and metrics of a part; the same command makes what an unhindered one makes."""
    config, lines = FitConfig(**FAST, patience=None), []

    def stop(line):
        lines.append(line)
        if len(lines) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(pairs, base, tmp_path / "q", config, stop)
    assert {"unfinished", "model.safetensors", "metrics.jsonl"} <= {
        one.name for one in (tmp_path / "q").iterdir()
    }
    kept = fit(pairs, base, tmp_path / "q", config)
    assert kept | {"seconds": 0} == fitted[1] | {"seconds": 0}
    assert not (tmp_path / "q" / "unfinished").exists()
    assert len((tmp_path / "q" / "metrics.jsonl").read_text().splitlines()) == 11
    with pytest.raises(ValueError, match="holds something: nothing is overwritten"):
        fit(pairs, base, tmp_path / "q", config)


def test_two_fits_cannot_share_a_folder(base, pairs, tmp_path):
    from verl_multiturn.search.fit_folder import fitting

    with fitting(tmp_path / "q"), pytest.raises(ValueError, match="another process is fitting in"):
        fit(pairs, base, tmp_path / "q", FitConfig(**{**FAST, "epochs": 1}))


@pytest.mark.parametrize("loss", ["dpo", "regression"])
def test_success_decides_before_accuracy(base, pairs, tmp_path, loss):
    """The weights with the highest success are kept, though others rank more pairs rightly."""
    prompt, seen = [{"role": "user", "content": "start hole ice"}], []

    def success(score):
        seen.append(score(prompt, ["left", "right"]))
        return 1.0 if len(seen) == 3 else 0.5

    config = FitConfig(loss=loss, evaluations=4, patience=None, **FAST)
    kept = fit(pairs, base, tmp_path / "q", config, success=success)
    found = list(map(json.loads, (tmp_path / "q" / "metrics.jsonl").read_text().splitlines()))
    assert [one["success"] for one in found] == [0.5, 0.5, 1.0, 0.5, 0.5]
    assert kept == found[2] and not any(one["kept"] for one in found[3:])
    assert seen[0] == pytest.approx([0, 0], abs=1e-5)  # against the model that it started from
    assert load_q_model(tmp_path / "q")(prompt, ["left", "right"]) == pytest.approx(seen[2], abs=1e-4)


def test_the_size_of_forward_passes_changes_nothing(base, pairs, tmp_path):
    found = [
        fit(pairs, base, tmp_path / str(micro), FitConfig(micro=micro, **{**FAST, "epochs": 1}))
        for micro in (1, 5)
    ]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], abs=1e-5)


def test_the_reference_is_computed_once(base, pairs, tmp_path, monkeypatch):
    config = FitConfig(**{**FAST, "epochs": 1})
    first = Fitting(pairs, base, tmp_path / "q", config)
    calls = []
    monkeypatch.setattr("verl_multiturn.search.fit.answer_log_probs", lambda *a: calls.append(a))
    second = Fitting(pairs, base, tmp_path / "q", config)
    assert not calls and (first.reference["train"] == second.reference["train"]).all()
    with pytest.raises(AttributeError):  # another aggregate is another reference
        Fitting(pairs, base, tmp_path / "q", FitConfig(aggregate="mean"))
    assert calls


def test_mean_changes_loss_and_score_together(base, pairs, tmp_path):
    kept = fit(pairs, base, tmp_path / "q", FitConfig(aggregate="mean", beta=1.0, **FAST))
    q = load_q_model(tmp_path / "q")
    held_out = [one for one in separable() if one["split"] == "held_out"]
    margins = [a - b for a, b in (q(one["prompt"], [one["win"], one["lose"]]) for one in held_out)]
    assert q.spec.aggregate == "mean" and kept["accuracy_all"] >= 0.9
    assert np.mean(np.logaddexp(0, -np.array(margins))) == pytest.approx(kept["loss"], abs=1e-5)


def test_a_lora_holds_one_model(base, pairs, tmp_path):
    pytest.importorskip("peft")
    kept = fit(pairs, base, tmp_path / "q", FitConfig(lora_rank=8, **{**FAST, "lr": 1e-2}))
    assert kept["accuracy_all"] >= 0.9 and not (tmp_path / "q" / "model.safetensors").exists()
    q = load_q_model(tmp_path / "q")
    assert q.policy.model is q.reference.model
    again = [q(one["prompt"], [one["win"], one["lose"]]) for one in separable() if one["split"] == "held_out"]
    assert np.mean([a > b for a, b in again]) == kept["accuracy_all"]


@pytest.mark.parametrize("loss", ["bradley_terry", "regression"])
def test_baselines_on_the_same_pairs(loss, base, pairs, tmp_path):
    kept = fit(pairs, base, tmp_path / "q", FitConfig(loss=loss, **FAST))
    assert kept["accuracy_all"] >= 0.9
    q = load_q_model(tmp_path / "q")
    scores = q([{"role": "user", "content": "start hole ice"}], ["right", "left"])
    assert scores[0] > scores[1] + 0.2
    if loss == "regression":  # it knows the scale, too
        assert abs(scores[0] - 1) < 0.5


def test_fitting_ends_when_nothing_gets_better(base, pairs, tmp_path):
    said = []
    config = FitConfig(lr=1e-12, epochs=30, batch=48, evaluations=30, patience=2)
    fit(pairs, base, tmp_path / "q", config, said.append)
    assert said[-1] == "stopped: 2 evaluations without a better one" and len(said) < 12


def test_losers_that_are_invalid_may_count_less(base, tmp_path):
    path = write(tmp_path / "pairs.jsonl", separable())
    fitting = Fitting(path, base, tmp_path / "q", FitConfig(invalid_weight=0.0))
    weights = {(row.invalid, row.weight) for row in fitting.rows["train"]}
    assert weights == {(True, 0.0), (False, 1.0)}


def test_a_q_model_is_a_step_value(fitted):
    """The interface of vine means, critics, groups and trees."""
    prompt = [{"role": "user", "content": "start hole ice"}]
    steps = [Step(0, "right", prompt=prompt, others=("left",)), Step(0, "left", prompt=prompt)]
    found = ModelValue(load_q_model(fitted[0])).values(steps)
    assert found.Q[0] > found.V[0] > found.Q[1] and found.V[0] == found.V[1]


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "has no train pairs: search more tasks, or set another share with pairs held_out=0.2"),
        ([pair("left", "up", "ice")], "has no held_out pairs"),
        ([{"win": "left"}], "line 1 is no pair: it needs prompt, win, lose and split"),
        ([pair("left", "up", "ice", "test")], "'test'; valid: train, held_out"),
    ],
)
def test_bad_pairs_are_named(lines, said, base, tmp_path):
    path = write(tmp_path / "pairs.jsonl", lines)
    with pytest.raises(ValueError) as error:
        fit(path, base, tmp_path / "q", FitConfig())
    assert said in str(error.value) and not (tmp_path / "q").exists()


def test_other_refusals(base, pairs, fitted, tmp_path):
    for settings, said in (
        ({"learning_rate": 1}, "unknown key of fit-q 'learning_rate'"),
        ({"beta": 0}, "FitConfig.beta must be at least"),
        ({"aggregate": "max"}, "unknown FitConfig.aggregate 'max'; valid: sum, mean"),
        ({"patience": 0}, "FitConfig.patience must be at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            FitConfig.of(settings)
    with pytest.raises(ValueError, match=r"no pairs at .*gone.jsonl: write them with verl-multiturn pairs"):
        fit(tmp_path / "gone.jsonl", base, tmp_path / "q", FitConfig())
    with pytest.raises(ValueError, match="holds something: nothing is overwritten"):
        fit(pairs, base, fitted[0], FitConfig())
    with pytest.raises(ValueError, match="holds no Q model: fit one with verl-multiturn fit-q"):
        load_q_model(base)
    with pytest.raises(ValueError, match="unknown scorer of a Q model 'vlm'; valid: engine, vllm"):
        load_q_model(fitted[0], "vlm")
    unvalued = write(tmp_path / "p.jsonl", [{**one, "q_win": None} for one in separable()])
    unvalued.write_text(unvalued.read_text().replace('"q_win": null, ', ""))
    with pytest.raises(ValueError, match="has no q_win and q_lose, which loss=regression is fitted to"):
        fit(unvalued, base, tmp_path / "q", FitConfig(loss="regression"))
