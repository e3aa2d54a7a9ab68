"""Decoder layers and the log-prob head as few, fused operations, for the Llama-like families.

`layers.py` replaces a decoder layer's forward by two differentiable functions around its attention; what they compute
between matrix multiplications is an `Elementwise` implementation: `reference.py` in plain torch (every device, the
slow reference), `triton_ops.py` on CUDA.
"""

import torch
from transformers import PreTrainedModel

from paceline.model.fused.kernels import elementwise_for
from paceline.model.fused.layers import FusionOutcome, fuse_layers
from paceline.model.triton_support import has_triton
from paceline.telemetry.flops import ModelShape

__all__ = ["FusionOutcome", "fuse_for_device", "fuse_layers"]


def fuse_for_device(module: PreTrainedModel, device: torch.device, adjacent: bool = True) -> FusionOutcome:
    """Fuses the layers where kernels make that faster: on CUDA with Triton. Adapters must be in place before."""
    if device.type != "cuda":
        return FusionOutcome(0, f"no fused kernels for {device.type}")
    if not has_triton():
        return FusionOutcome(0, "Triton is not installed")
    if not _fits_the_kernels(module):
        return FusionOutcome(0, "the kernels take heads whose width is a power of two from 16")
    return fuse_layers(module, elementwise_for(device), adjacent)


def _fits_the_kernels(module: PreTrainedModel) -> bool:
    shape = ModelShape.from_hf_config(module.config.to_dict())
    return shape.head_dim >= 16 and shape.head_dim & (shape.head_dim - 1) == 0
