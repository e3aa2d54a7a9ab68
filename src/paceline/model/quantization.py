"""Weights in 8 or 4 bits, read only, through bitsandbytes, which has kernels for CUDA, ROCm, XPU and x86 CPUs."""

import importlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from paceline.config.errors import ConfigError
from paceline.config.reward_schema import Quantization

PROBE_SIZE = 64
"""Rows and columns of the matrix by which a platform's kernels are tried; a multiple of every block size."""


def quantization_options(
    kind: Quantization, device: torch.device, dtype: torch.dtype, keep: Sequence[str], key: str
) -> dict[str, Any]:
    """What `from_pretrained` needs to quantise linear layers while it loads them; nothing for "none".

    `keep` are modules left in `dtype`, which is also what is computed in; `key` is the setting a refusal names.

    Raises:
        ConfigError: the library is missing, or has no kernels for this device.
    """
    if kind == "none":
        return {}
    _check_platform(kind, device, dtype, key)
    # it says with every product that inputs are cast to 16 bits, which is what 8-bit products do
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    settings = BitsAndBytesConfig(
        load_in_8bit=kind == "int8",
        load_in_4bit=kind == "nf4",
        llm_int8_skip_modules=list(keep),
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": settings, "device_map": {"": device}}


@torch.no_grad()
def check_quantized(module: nn.Module, kind: Quantization, device: torch.device, key: str) -> None:
    """Multiplies by one layer of every shape: some kernels take only certain sizes, and say so when they run.

    Raises:
        ConfigError: a layer cannot be computed with.
    """
    if kind == "none":
        return
    library = importlib.import_module("bitsandbytes.nn")
    tried: set[tuple[int, int]] = set()
    for name, layer in module.named_modules():
        if not isinstance(layer, library.Linear8bitLt | library.Linear4bit):
            continue
        shape = (layer.out_features, layer.in_features)
        if shape in tried:
            continue
        tried.add(shape)
        try:
            layer(torch.zeros(1, layer.in_features, device=device))
        except Exception as error:  # a kernel raises whatever its author chose, assertions included
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            rule = f"bitsandbytes cannot compute with {name} of {shape[0]} x {shape[1]} on {device.type} ({text})"
            raise ConfigError(key, kind, rule, "int8" if kind == "nf4" else "none") from error


def _check_platform(kind: Quantization, device: torch.device, dtype: torch.dtype, key: str) -> None:
    """Quantises and multiplies one small matrix: what the library supports differs by device, build and version."""
    for package in ("bitsandbytes", "accelerate"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            rule = f"needs {package}, which cannot be imported ({error}): pip install 'paceline[quantized]'"
            raise ConfigError(key, kind, rule, "none") from error
    library = importlib.import_module("bitsandbytes.nn")
    size = PROBE_SIZE
    layer = (
        library.Linear8bitLt(size, size, bias=False, has_fp16_weights=False)
        if kind == "int8"
        else library.Linear4bit(size, size, bias=False, compute_dtype=dtype, quant_type="nf4")
    )
    try:
        with torch.no_grad():
            product = layer.to(device)(torch.ones(2, size, device=device, dtype=dtype))
    except Exception as error:  # a missing kernel shows as whatever loader or dispatcher raise
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        rule = f"bitsandbytes has no kernels for it on {device.type} here ({text})"
        raise ConfigError(key, kind, rule, "none") from error
    if product.shape != (2, size) or not bool(product.isfinite().all()):
        raise ConfigError(key, kind, f"bitsandbytes computes nonsense on {device.type} here", "none")
