"""Which runner an engine gets."""

from typing import Literal

from paceline.model.loading import CausalModel
from paceline.rollout.native.cache import KVLayout
from paceline.rollout.native.paged.attention import GatheringAttention
from paceline.rollout.native.paged.device_runner import DeviceRunner
from paceline.rollout.native.paged.kernels import round_kernels
from paceline.rollout.native.paged.runner import EagerRunner

RunnerKind = Literal["auto", "eager", "device"]
_EAGER_PAGE_TOKENS = 16


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
        return DeviceRunner(model, kernels, layout, num_slots, captures and model.device.type == "cuda")
    return EagerRunner(model, GatheringAttention(), layout, page_tokens or _EAGER_PAGE_TOKENS, num_slots)
