"""Which implementation of the fused element-wise work a device gets. Decided once per model."""

import importlib
from typing import cast

import torch

from paceline.model.fused.elementwise import Elementwise
from paceline.model.fused.reference import ReferenceElementwise
from paceline.model.triton_support import has_triton


def elementwise_for(device: torch.device) -> Elementwise:
    """Triton kernels on CUDA, plain torch elsewhere."""
    if device.type == "cuda" and has_triton():
        # by name, because the module defines kernels on import and cannot be imported without Triton
        module = importlib.import_module("paceline.model.fused.triton_ops")
        return cast(Elementwise, module.TritonElementwise(device))
    return ReferenceElementwise()
