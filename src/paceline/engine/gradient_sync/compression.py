"""What one replica sends of a flat gradient: nothing here communicates.

A compressor C turns a gradient g into a payload of fixed size, which stands for the gradient C(g). What is held back,
g - C(g), is added to the next gradient (replicas.py): no part of any gradient is lost, only delayed (Seide et al. 2014,
Stich et al. 2018, Karimireddy et al. 2019).

Shapes: N elements of the flat gradient, K of them kept, G blocks of `block` elements (the last may be shorter),
P payload bytes.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
"""Elements that share one int8 scale: 4 bytes of scale for 256 of values, 1.6 %."""

_LEVELS = 127


class Compressor(Protocol):
    """Payloads of equal gradient sizes have equal sizes, on every replica and in every update."""

    def encode(self, gradient_N: Tensor) -> Tensor:
        """The payload, uint8 [P], on the device of the gradient (float32, contiguous)."""
        ...

    def decode(self, payload_P: Tensor, num_elements: int) -> Tensor:
        """The gradient that a payload stands for, float32 [N]. Not finite where what was encoded was not."""
        ...

    def num_bytes(self, num_elements: int) -> int:
        """P for N elements."""
        ...


def quantise(values_N: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """int8 [N] and one float32 scale per block [G]; value = int8 x scale.

    scale = largest magnitude of the block / 127, rounding to nearest (ties to even), which is deterministic: the bias
    that nearest rounding has is what error feedback carries on. An element is off by at most scale / 2. A block of
    zeros has scale 0; a block that is not finite has a scale that is not, and decodes to NaN.
    """
    padded_GB = F.pad(values_N, (0, -len(values_N) % block)).view(-1, block)
    scale_G = padded_GB.abs().amax(dim=1) / _LEVELS
    divisor_G1 = torch.where(scale_G > 0, scale_G, torch.ones_like(scale_G))[:, None]
    # a scale below the least normal number loses digits, and 127 x scale is then less than the largest magnitude
    steps_GB = (padded_GB / divisor_G1).round_().clamp_(-_LEVELS, _LEVELS)
    steps_GB = steps_GB.nan_to_num_(nan=0.0)  # in a block that is not finite; its scale says so
    return steps_GB.flatten()[: len(values_N)].to(torch.int8), scale_G


def dequantise(steps_N: Tensor, scale_G: Tensor, block: int = BLOCK) -> Tensor:
    """What `quantise` made, as float32 [N]."""
    scale_N = scale_G.repeat_interleave(block)[: len(steps_N)]
    values_N = steps_N.to(torch.float32) * scale_N
    return torch.where(torch.isfinite(scale_N), values_N, torch.full_like(values_N, math.nan))


@dataclass(frozen=True, slots=True)
class Dense:
    """Everything, float32: C(g) = g. The reference of the others."""

    def encode(self, gradient_N: Tensor) -> Tensor:
        return _bytes_of(gradient_N)

    def decode(self, payload_P: Tensor, num_elements: int) -> Tensor:
        return payload_P.view(torch.float32)

    def num_bytes(self, num_elements: int) -> int:
        return 4 * num_elements


@dataclass(frozen=True, slots=True)
class Int8:
    """Every element in 8 bits, one float32 scale per `BLOCK` elements."""

    def encode(self, gradient_N: Tensor) -> Tensor:
        steps_N, scale_G = quantise(gradient_N)
        return _payload(scale_G, steps_N)

    def decode(self, payload_P: Tensor, num_elements: int) -> Tensor:
        scale_bytes = 4 * _num_blocks(num_elements)
        scale_G = payload_P[:scale_bytes].view(torch.float32)
        return dequantise(payload_P[scale_bytes : scale_bytes + num_elements].view(torch.int8), scale_G)

    def num_bytes(self, num_elements: int) -> int:
        return 4 * _num_blocks(num_elements) + _aligned(num_elements)


@dataclass(frozen=True, slots=True)
class TopK:
    """The `fraction` of elements of largest magnitude, exact (float32) or in 8 bits, with int32 positions.

    Kept elements lie in order of magnitude, so those that share a scale are alike. An element that is not finite counts
    as the largest, so it is always among those sent.
    """

    fraction: float
    in_int8: bool = False

    def num_kept(self, num_elements: int) -> int:
        """K: at least one element of any gradient that has one."""
        return min(num_elements, max(1, math.ceil(self.fraction * num_elements)))

    def encode(self, gradient_N: Tensor) -> Tensor:
        index_K = gradient_N.abs().topk(self.num_kept(len(gradient_N))).indices
        value_K = gradient_N[index_K]
        if not self.in_int8:
            return _payload(index_K.to(torch.int32), value_K)
        steps_K, scale_G = quantise(value_K)
        return _payload(index_K.to(torch.int32), scale_G, steps_K)

    def decode(self, payload_P: Tensor, num_elements: int) -> Tensor:
        kept = self.num_kept(num_elements)
        index_K = payload_P[: 4 * kept].view(torch.int32).long()
        rest_P = payload_P[4 * kept :]
        if self.in_int8:
            scale_bytes = 4 * _num_blocks(kept)
            steps_K = rest_P[scale_bytes : scale_bytes + kept].view(torch.int8)
            value_K = dequantise(steps_K, rest_P[:scale_bytes].view(torch.float32))
        else:
            value_K = rest_P.view(torch.float32)
        found_N = torch.zeros(num_elements, dtype=torch.float32, device=payload_P.device)
        found_N[index_K] = value_K  # positions are distinct
        return found_N

    def num_bytes(self, num_elements: int) -> int:
        kept = self.num_kept(num_elements)
        return 4 * kept + (4 * _num_blocks(kept) + _aligned(kept) if self.in_int8 else 4 * kept)


def _num_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK)


def _aligned(num_bytes: int) -> int:
    """A multiple of 4: payloads that follow one another can then be read as float32 in place."""
    return -(-num_bytes // 4) * 4


def _payload(*parts: Tensor) -> Tensor:
    """The parts' bytes one after the other; parts of single bytes come last."""
    joined_P = torch.cat([_bytes_of(part) for part in parts])
    return F.pad(joined_P, (0, _aligned(len(joined_P)) - len(joined_P)))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
