"""What a recipe needs on GPUs: formulas against known sizes, fit, published times."""

import json

import pytest
from typer.testing import CliRunner

from verl_multiturn.cli import app
from verl_multiturn.planning import formulas as of
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
from verl_multiturn.runs import RunWriter

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
    ],
)
def test_parameters(model, count):
    assert of.parameters(shape(model)) == count


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
