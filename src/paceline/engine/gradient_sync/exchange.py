"""The sum of all replicas' gradients from compressed payloads, and what stays behind.

Every replica gathers every payload and adds them up in order of ranks, so that the sum is bit-equal everywhere. With n
replicas each sends its payload n - 1 times; in a ring all-reduce of float32 it sends 8 N (n - 1) / n bytes. int8 (about
N bytes) therefore stops paying at 8 replicas, top-k of a fraction f (8 f N bytes) at 1 / f.

Shapes: N elements of the flat gradient, P payload bytes, S replicas.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.engine.gradient_sync.compression import Compressor


@dataclass(frozen=True, slots=True)
class Exchanged:
    """`sum_N` over replicas; `held_back_N`, what this replica did not send; `num_bytes` that it sent to others."""

    sum_N: Tensor
    held_back_N: Tensor
    num_bytes: int


def exchange(gradient_N: Tensor, compressor: Compressor, group: dist.ProcessGroup) -> Exchanged:
    """Sum over the replicas of what each sends of its `gradient_N` (float32). All replicas must call it.

    sent + held back = gradient, exactly: an int8 element that was sent is within a factor of two of the gradient, so
    their difference has no rounding, and everything else is sent or held back whole.
    """
    payload_P = compressor.encode(gradient_N)
    assert len(payload_P) == compressor.num_bytes(len(gradient_N))
    gathered = payload_P.new_empty(group.size() * len(payload_P))
    dist.all_gather_into_tensor(gathered, payload_P, group=group)
    sum_N = torch.zeros_like(gradient_N)
    held_back_N = gradient_N
    for replica, payload in enumerate(gathered.view(group.size(), -1)):
        decoded_N = compressor.decode(payload, len(gradient_N))
        sum_N += decoded_N
        if replica == group.rank():
            held_back_N = gradient_N - decoded_N
    return Exchanged(sum_N, held_back_N, len(payload_P) * (group.size() - 1))


def ring_bytes(num_elements: int, num_replicas: int) -> int:
    """Bytes that one replica sends in an exact ring all-reduce of float32."""
    return round(8 * num_elements * (num_replicas - 1) / num_replicas)
