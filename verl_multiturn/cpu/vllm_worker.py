"""vLLM worker extension for the CPU backend (`engine_kwargs.vllm.worker_extension_cls`)."""

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CPUWorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Keep the weights in the layout they were loaded in.

    vLLM's CPU kernels repack weights once at load time; verl's weight sync would then write into
    tensors that nobody reads, and the rollout policy would never change.
    """

    def __new__(cls, **kwargs: Any) -> "CPUWorkerExtension":
        """Patch the two switches before vLLM loads a weight."""
        import vllm._custom_ops as custom_ops
        import vllm.model_executor.layers.utils as layer_utils

        custom_ops._supports_onednn = False
        layer_utils.check_cpu_sgl_kernel = lambda *args, **kwargs: False
        return super().__new__(cls, **kwargs)
