"""Environment variables of a run without an accelerator.

They must be set before ray, torch or verl is imported; Ray's processes inherit them.
"""

import os
import warnings

SETTINGS = {
    # verl's own switches: load the plug-in, use its platform, look engines up as on CUDA (verl
    # registers none for a CPU).
    "VERL_USE_EXTERNAL_MODULES": "verl_multiturn.cpu.plugin",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    # One OpenMP thread that does not spin: on two contended cores spinning costs a factor of six.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Without it vLLM turns the in-process executor back into one more process (15 s of imports).
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # vLLM's compiled sampler helpers cost 30 s of C++ build at the first generation.
    "TORCHDYNAMO_DISABLE": "1",
    # Ray starts its workers at niceness 15, where they starve beside any other busy process.
    "RAY_worker_niceness": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    # A model that exists only on this disk must not be looked for on a hub.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # The logs of a dozen processes would bury the progress line.
    "TQ_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VERL_LOGGING_LEVEL": "WARN",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
    "RAY_DEDUP_LOGS": "1",
    "GLOO_LOG_LEVEL": "ERROR",
}
# Of a Ray that has no other node: it then listens on 127.0.0.1 only, and what asks it for the node's address
# (verl's LLM server, TransferQueue) with it. Ray's default where clusters are not supported, hence the name.
ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
RENDEZVOUS = "VERL_MULTITURN_RENDEZVOUS"  # the folder where torch's process groups meet, see the plug-in


def apply(alone: str | None = None) -> None:
    """Set every variable of `SETTINGS` that the user has not set.

    Args:
        alone: a folder, where a Ray is started for this run, on this node only; nothing then listens beyond
            loopback.
    """
    for name, value in (SETTINGS | (ALONE if alone else {})).items():
        os.environ.setdefault(name, value)
    if alone:
        os.environ[RENDEZVOUS] = alone
    if os.environ["PYTHONWARNINGS"] == "ignore":
        warnings.simplefilter("ignore")  # this process read the variable when it started
