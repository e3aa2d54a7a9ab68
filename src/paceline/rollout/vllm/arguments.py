"""From the run's settings to vLLM's engine arguments and its process's environment. Torch-free."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.engine_schema import VllmSection

FOREIGN = Path(__file__).parents[1] / "foreign"
"""Folder with the worker extension, for vLLM's import path."""

EXTENSION = "vllm_extension.PacelineWeights"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What vLLM is to serve: config and tokenizer from `path`, weights from the trainer."""

    path: str
    dtype: str
    max_model_len: int
    seed: int
    on_cpu: bool
    revision: str | None = None
    trust_remote_code: bool = False


def engine_arguments(settings: VllmSection, model: ServedModel) -> dict[str, Any]:
    """vLLM's engine arguments by vLLM's names.

    Weights are not read (`load_format: dummy`): version 0 is loaded from the trainer like every later one, so that no
    sample comes from anything else. Log-probs are those of the distribution sampled from, temperature included.
    """
    arguments: dict[str, Any] = {
        "model": model.path,
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "dtype": model.dtype if settings.dtype == "auto" else settings.dtype,
        "max_model_len": model.max_model_len,
        "seed": model.seed % 2**31,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": False,
        "worker_extension_cls": EXTENSION,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "enable_chunked_prefill": settings.enable_chunked_prefill,
        "kv_cache_dtype": settings.kv_cache_dtype,
    }
    if model.on_cpu:
        arguments["kv_cache_memory_bytes"] = int(settings.kv_cache_gb * 2**30)
    else:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
    if settings.block_size is not None:
        arguments["block_size"] = settings.block_size
    if settings.async_scheduling is not None:
        arguments["async_scheduling"] = settings.async_scheduling
    if settings.cudagraph_capture_sizes:
        arguments["compilation_config"] = {
            "cudagraph_capture_sizes": sorted(settings.cudagraph_capture_sizes)
        }
    return {**arguments, **settings.engine_args}


def process_environment(settings: VllmSection, devices: tuple[str, ...] = ()) -> Mapping[str, str]:
    """Variables of vLLM's process: the extension's import path, the devices, no usage reports, and what the config
    adds."""
    path = os.pathsep.join([str(FOREIGN), *filter(None, [os.environ.get("PYTHONPATH")])])
    # in one process: one thing to kill, and one place where weights go
    found = {"PYTHONPATH": path, "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if devices:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return {**found, **settings.environment}
