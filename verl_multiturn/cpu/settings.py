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


def apply() -> None:
    """Set every variable of `SETTINGS` that the user has not set."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if os.environ["PYTHONWARNINGS"] == "ignore":
        warnings.simplefilter("ignore")  # this process read the variable when it started
