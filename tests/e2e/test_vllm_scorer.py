"""The two scorers of a Q model agree: transformers with a shared prefix, vLLM's prompt log-probabilities."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
pytest.importorskip("vllm")

REPOSITORY = Path(__file__).parents[2]
TIMEOUT = 600
CODE = """
import json, sys
from verl_multiturn.cpu import settings
settings.apply()
from verl_multiturn.search.scorers import TransformersLogProbs, VLLMLogProbs
from transformers import AutoModelForCausalLM
folder = sys.argv[1]
prompts = [list(range(3, 40)), [7, 8, 9], list(range(3, 40))]
answers = [[5, 6, 7, 2], [9], [11, 12, 13, 14, 15, 16, 2], [5, 6, 8, 2], [5]]
model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
ours = TransformersLogProbs(model)
theirs = VLLMLogProbs(
    folder, dtype="float32", enforce_eager=True, max_model_len=96, max_num_seqs=8, skip_tokenizer_init=True,
    distributed_executor_backend="uni", gpu_memory_utilization=0.2,
)
print("SCORES", json.dumps([[score(p, answers) for p in prompts] for score in (ours, theirs)]))
"""


def test_they_agree_to_a_thousandth(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.2, eos_token_id=2,
        pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    command = [sys.executable, "-c", CODE, str(tmp_path / "model")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = (one for one in done.stdout.splitlines() if one.startswith("SCORES"))
    ours, theirs = json.loads(line.removeprefix("SCORES "))
    assert len(ours) == len(theirs) == 3
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert a == pytest.approx(b, abs=1e-3)
    # asked again, with another prompt between, vLLM says the same: nothing is read from a cache
    for a, b in zip(theirs[0], theirs[2], strict=True):
        assert a == pytest.approx(b, abs=1e-6)
    assert max(max(map(abs, one)) for one in ours[0]) > 1
