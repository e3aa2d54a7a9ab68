"""Which runner an engine gets."""

from collections.abc import Mapping
from typing import Any, Literal

from paceline.model.loading import CausalModel
from paceline.rollout.native.cache import KVLayout
from paceline.rollout.native.paged.attention import GatheringAttention
from paceline.rollout.native.paged.device_runner import DeviceRunner
from paceline.rollout.native.paged.kernels import round_kernels
from paceline.rollout.native.paged.runner import EagerRunner

RunnerKind = Literal["auto", "eager", "device"]
_EAGER_PAGE_TOKENS = 16


def has_fixed_rotation(config: Mapping[str, Any]) -> bool:
    """Whether rotary frequencies stay as they are: where they follow the longest position so far, it is read back to
    the host in every forward pass, which cannot be captured."""
    found = config.get("rope_parameters") or {}
    kinds = [found, *(part for part in found.values() if isinstance(part, Mapping))]
    return not any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)


def make_runner(
    model: CausalModel,
    layout: KVLayout,
    num_slots: int,
    page_tokens: int | None,
    kind: RunnerKind,
    captures: bool,
) -> EagerRunner:
    """`auto`: rounds on the device's kernels on CUDA, captured where `captures` allows; operation by operation on a
    CPU and in exact mode, which those kernels do not offer."""
    if kind == "device" or (kind == "auto" and model.device.type == "cuda" and not model.is_exact):
        kernels = round_kernels(model.device, layout.head_dim, page_tokens)
        can_capture = model.device.type == "cuda" and has_fixed_rotation(model.module.config.to_dict())
        return DeviceRunner(model, kernels, layout, num_slots, captures and can_capture)
    return EagerRunner(model, GatheringAttention(), layout, page_tokens or _EAGER_PAGE_TOKENS, num_slots)
