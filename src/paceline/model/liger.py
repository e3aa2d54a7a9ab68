"""Liger's fused kernels (RMSNorm, RoPE, SwiGLU or GeGLU) in a loaded module, on CUDA where the package is installed.

They are Triton kernels: no other device has them, and the module computes the same without. Where paceline's own fused
layers are in place (`model/fused/`) they would not be reached: those replace a whole layer's forward. What is left for
Liger are families without fused layers, and adapters. Its own loss is not used: the log-prob head does that work for
every role, in chunks.
"""

import importlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from paceline.config.errors import ConfigError
from paceline.model.fused.layers import FusedLayer
from paceline.model.loading import CausalModel

_FUSED = {"rope": True, "rms_norm": True, "swiglu": True, "geglu": True}
_OURS = {"cross_entropy": False, "fused_linear_cross_entropy": False}


@dataclass(frozen=True, slots=True)
class LigerUse:
    """Whether Liger's kernels are in the module, and why (not); both go into env.json."""

    is_used: bool
    reason: str


def apply_liger(model: CausalModel, wanted: Literal["auto", "on", "off"]) -> LigerUse:
    """Puts the kernels in where they can run; with `auto`, does without where they cannot.

    RoPE is replaced in the family's module of this process, and with it for every model of the family in it.

    Raises:
        ConfigError: they are asked for ("on") and cannot run.
    """
    if wanted == "off":
        return LigerUse(False, "switched off (sft.liger)")
    if (obstacle := _obstacle(model)) is not None:
        if wanted == "on":
            raise ConfigError("sft.liger", "on", obstacle, "auto")
        return LigerUse(False, obstacle)
    liger = importlib.import_module("liger_kernel.transformers")
    liger._apply_liger_kernel_to_instance(model=model.module, **_FUSED, **_OURS)
    return LigerUse(True, f"liger-kernel {version('liger-kernel')}")


def _obstacle(model: CausalModel) -> str | None:
    if model.device.type != "cuda":
        return f"its kernels are written for CUDA, and the model is on {model.device.type}"
    if any(isinstance(part.forward, FusedLayer) for part in model.module.modules()):
        return "fused layers are in place, which go round its kernels (train.preset: plain takes them out)"
    try:
        version("liger-kernel")
        patches: Any = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except (PackageNotFoundError, ImportError) as error:
        return f"liger-kernel cannot be imported ({error}): pip install 'paceline[liger]'"
    if model.family.model_type not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"liger-kernel has nothing for family {model.family.model_type}"
    return None
