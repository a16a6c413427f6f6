"""What a recipe needs on GPUs: formulas against known sizes, fit, published times."""

import json

import pytest
from typer.testing import CliRunner

from verl_multiturn.cli import app
from verl_multiturn.critic.config import ArcherConfig, CriticConfig
from verl_multiturn.planning import formulas as of
from verl_multiturn.planning.archer import Archer, asked, reads
from verl_multiturn.planning.formulas import Shape
from verl_multiturn.planning.plan import (
    CHANGES,
    GB,
    Setup,
    calibrated,
    changes,
    data,
    errors,
    gpus,
    memory,
    memory_errors,
    problems,
    seconds,
    shape,
)
from verl_multiturn.recipes_index import list_recipes
from verl_multiturn.runs import RunWriter

pytestmark = pytest.mark.usefixtures("parsed_once")
TINY = Shape(layers=2, hidden=8, intermediate=16, heads=2, kv_heads=1, vocabulary=100, tied=True, bias=True)


def setup(model="Qwen2.5-7B-Instruct", kind="4xA100-80G", **more):
    count, gpu = gpus(kind)
    sizes = {"trajectories": 128, "turns": 25, "rows": 3200, "row_tokens": 1000, "utterance": 80}
    return Setup(model=shape(model), gpu=gpu, gpus=count, **(sizes | more))


@pytest.mark.parametrize(
    ("model", "count"),  # as the models' own weight files sum up
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Llama-3.1-8B-Instruct", 8_030_261_248),
        ("microsoft/Phi-3-mini-4k-instruct", 3_821_079_552),
        ("mistralai/Mistral-7B-Instruct-v0.2", 7_241_732_096),
        ("realtreetune/rho-1b-sft-GSM8K", 1_100_048_384),
        ("openai-community/gpt2", 124_439_808),
        ("roberta-base", 124_055_040),  # without the pooler, which no critic has
    ],
)
def test_parameters(model, count):
    assert of.parameters(shape(model)) == count


def test_a_bias_of_the_head_is_left_out():
    assert 1_418_270_720 - of.parameters(shape("microsoft/phi-1_5")) == 51200


def test_a_layer_by_hand():
    # q 8x8 + 8, k and v 8x4 + 4 each, o 8x8, three of 8x16, two norms
    assert of.layer_parameters(TINY) == 72 + 36 + 36 + 64 + 3 * 128 + 16
    assert of.parameters(TINY) == 2 * of.layer_parameters(TINY) + 800 + 8
    assert of.lora_parameters(TINY, 1) == 2 * (2 * 16 + 2 * 12 + 3 * 24)
    # a token: 4h, queries and attention's output 2 x 8, keys and values 2 x 4, 4i; two bytes each
    assert of.layer_activation_bytes(TINY, 1) == 2 * (32 + 16 + 8 + 64)
    assert of.activation_bytes(TINY, 1, checkpointing=False) == 2 * 240
    assert of.activation_bytes(TINY, 1, checkpointing=True) == 2 * 2 * 8 + 240
    assert of.logit_bytes(TINY, 3) == 3000
    assert of.kv_bytes_per_token(shape("Llama-3.1-8B-Instruct")) == 131_072
    assert of.vine_turns(turns=5, rollouts=9) == 9 * 2 and of.vine_turns(1, 9) == 0


def test_states_are_sharded():
    assert of.state_bytes(10, 10, 1) == (40, 40, 80)
    assert sum(of.state_bytes(8e9, 8e9, 4)) == 16 * 8e9 / 4
    one, four = memory(setup(kind="1xH100")), memory(setup(kind="4xH100"))
    assert one.optimizer == 4 * four.optimizer and one.activations == four.activations
    assert memory(setup(critic=True)).optimizer == 2 * memory(setup()).optimizer
    ((_, published, estimated),) = memory_errors()
    assert estimated == pytest.approx(published, rel=0.02)


def test_offload_frees_the_rollout_and_the_passes():
    plain, moments, both, states = (
        memory(setup(**more))
        for more in (
            {},
            {"optimizer_offload": True},
            {"optimizer_offload": True, "param_offload": True},
            {"cpu_states": True},
        )
    )
    assert moments.rollout == plain.rollout - plain.optimizer
    assert both.rollout == pytest.approx(plain.rollout - plain.optimizer - plain.weights)
    assert moments.update < plain.update and states.update < moments.update
    assert states.weights == states.optimizer == 0
    assert memory(setup(checkpointing=False)).update > plain.update
    assert memory(setup(free_engine=False)).update == pytest.approx(plain.update + 0.5 * 80 * GB)


def test_what_to_change():
    tight = setup(critic=True, reference=True, checkpointing=False)
    assert any(line.startswith("the update needs") for line in problems(tight))
    steps, fits = changes(tight)
    assert fits and steps[0] == CHANGES[0][0]
    assert changes(setup("Qwen2.5-0.5B-Instruct")) == ([], True)
    # Too small an engine, and states that only a CPU can hold.
    steps, fits = changes(setup(kind="1xRTX4090", critic=True))
    assert fits and "offload_policy" in steps[-3] and "gpu_memory_utilization=0.85" in steps[-1]
    assert not changes(setup("deepseek-math-7b-base", "1xRTX4090", max_tokens=100_000))[1]
    assert "the KV cache holds 0 tokens" in " ".join(problems(setup(kind="1xRTX4090")))


def test_seconds_against_published_figures():
    rates = calibrated()
    found = {name: estimated / published for name, published, estimated, _ in errors(rates)}
    first, *others = found.values()
    assert first == pytest.approx(1, abs=0.01)  # its own rates; forward passes are two means of one figure
    assert len(others) == len(data("published")["calibration"]) - 1
    assert all(found[name] == pytest.approx(1, abs=0.15) for name in found if name.startswith("RAGEN"))
    run = setup(kind="2xH100")
    assert seconds(setup(kind="4xH100"), rates).update == pytest.approx(seconds(run, rates).update / 2)
    assert seconds(setup(kind="2xH100", rollouts=9), rates).generation > seconds(run, rates).generation
    assert seconds(setup(kind="2xH100", checkpointing=False), rates).update == pytest.approx(
        seconds(run, rates).update * 6 / 8
    )


def test_unknown_things(tmp_path):
    assert gpus("2xa100-40G")[1].memory == 40e9 and gpus("8 x H200")[1].name == "H200-141G"
    for text, match in (
        ("four A100", "'four A100' is not a number of GPUs, such as 4xA100-80G"),
        ("4xA10", "unknown GPU 'A10'.*Did you mean 'A100'"),
        ("4xA100-60G", "unknown memory of A100 '60'; valid: 80, 40"),
    ):
        with pytest.raises(ValueError, match=match):
            gpus(text)
    with pytest.raises(
        ValueError, match=r"unknown model 'Qwen2.5-4B-Instruct'.*local folder with config.json"
    ):
        shape("Qwen/Qwen2.5-4B-Instruct")
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ValueError, match="it lacks 'num_hidden_layers'"):
        shape(str(tmp_path))
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 100, "tie_word_embeddings": True, "model_type": "qwen2"}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert shape(str(tmp_path)) == TINY
    sizes = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "gpt2", "n_inner": None}))
    assert shape(str(tmp_path)) == shape("gpt2")
    sizes = {"num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 51200}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": None, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "phi"}))
    assert shape(str(tmp_path)) == shape("phi-1_5")


def archer(encoder=TINY, **more):
    sizes = {"updates": 3, "batch": 10, "micro_batch": 5, "state": 20, "utterance": 4}
    sizes |= {"reads": (2.0, 1.0), "asked": 100, "judged": 50, "inflight": 256}
    return Archer(encoder, **(sizes | more))


def test_archer_asks_and_learns_beside_the_actor():
    p, block = of.parameters(TINY), 2 * of.layer_parameters(TINY)
    # weights, gradients, two moments and the target's weights; all tensors of 5 x 24 tokens; in float32
    assert archer().held() == 20 * p
    assert archer().activations() == 2 * 120 * 2 * 240
    # three updates of ten transitions: 24 tokens there and back, 44 for the targets; 50 utterances judged
    flops = 3 * 10 * (6 * block * 24 + 2 * block * 44) + 2 * block * 50 * 44
    h100 = gpus("1xH100")[1]
    assert archer().seconds(h100, of.Rates(compute=0.5)) == pytest.approx(flops / (989e12 / 16 * 0.5))
    assert archer(None).held() == archer(None).seconds(h100, of.Rates()) == 0
    without, beside = setup("gpt2"), setup("gpt2", archer=archer(shape("roberta-base")))
    extra = 20 * of.parameters(shape("roberta-base"))
    assert memory(beside).rollout == memory(without).rollout + extra
    assert memory(beside).update >= memory(without).update + extra
    rates = of.Rates()
    assert seconds(without, rates).asking == 0 < seconds(beside, rates).asking
    asks_more = setup("gpt2", archer=archer(asked=10_000))
    assert seconds(asks_more, rates).asking > 10 * seconds(beside, rates).asking
    whole = seconds(beside, rates)
    assert (
        whole.step == whole.generation + whole.forward + whole.update + whole.asking + whole.utterance_critic
    )


def test_utterances_asked():
    # 12,800 draws of 10,000 hit 1 - e^-1.28 of them; the actor's in-silico states come on top
    paper = asked(ArcherConfig(mode="in_silico", states=768), CriticConfig())
    assert paper == pytest.approx(768 + 10_000 * (1 - 0.27803), abs=1)
    assert asked(ArcherConfig(), CriticConfig(v_target="sarsa")) == 0
    assert reads("policy", 3) == (2, 3) and reads("expectile", 3) == (2, 1) and reads("mc", 3) == (0, 0)
    assert of.distinct_draws(1, 7) == pytest.approx(1)


def call(*arguments, code=0):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command(tmp_path):
    pytest.importorskip("verl")
    text = call("starpo_sokoban", "--gpus", "1xH100-80G")
    assert "fits" in text and "assumed: 50% of the recipe's limits" in text and "200 steps" in text
    assert all(paper in text for paper in ("GiGPO", "StarPO", "VinePPO", "ArCHer", "Q models", "unknown"))
    with RunWriter(tmp_path) as writer:
        means = {"multiturn/turns/mean": 4.0, "prompt_length/mean": 100.0, "response_length/mean": 800.0}
        writer.metrics(1, means)
    model = "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct"
    arguments = ("starpo_sokoban", model, "--gpus", "1xH100", "--rates", tmp_path, "--json")
    numbers = json.loads(call(*arguments, code=1))
    assert not numbers["fits"] and numbers["change"]
    assert numbers["memory_gb"]["weights"] == pytest.approx(2 * 4 * 7.615616512)
    assert "hardware=cpu needs no plan" in call("starpo_sokoban", "hardware=cpu", code=2)


def test_a_q_models_stages():
    """The spec's bound: WebShop 30 (5 + 10) calls a tree, of 1,000 tasks."""
    pytest.importorskip("verl")
    text = call("qvalue_webshop", "--gpus", "1xH100-80G", code=1)
    assert "1,000 x 450 calls" in text and "450,000 calls" in text and "10,000 pairs x 2 epochs" in text
    assert "does not fit: set multiturn.fit.micro=1" in text
    numbers = json.loads(call("qvalue_webshop", "multiturn.fit.micro=2", "--json"))
    assert numbers["fits"] and numbers["calls"] == 450_000 and numbers["seconds"]["trees"] > 0
    # 16 bytes a parameter, and what a micro-batch keeps
    assert 16 * 1.418 < numbers["memory_gb"]["fit"] < 73.6
    assert "hardware=cpu needs no plan" in call("qvalue_webshop", "hardware=cpu", code=2)
    assert "--rates is of a training run" in call("qvalue_webshop", "--rates", "runs/mine", code=2)


@pytest.mark.parametrize("recipe", sorted(list_recipes()))
def test_every_recipe_has_a_plan(recipe, monkeypatch, tmp_path):
    pytest.importorskip("verl")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["plan", recipe, "--gpus", "8xH100-80G", "--json"])
    assert result.exit_code in (0, 1), result.output
    numbers = json.loads(result.output)
    assert 0 < sum(numbers["seconds"].values()) < 1e6 and numbers["memory_gb"]
    assert ("calls" in numbers) is recipe.startswith("qvalue_")
    assert (numbers["seconds"].get("asking", 0) > 0) is recipe.startswith("archer_")
