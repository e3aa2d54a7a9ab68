"""The ranks that compute one forward pass together."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Peers:
    """A group of ranks and this rank's place in it; the default is this rank alone."""

    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class ModelPeers:
    """`sequence`: ranks that share the tokens of every row (Ulysses). `tensor`: ranks that share every matrix product
    and the vocabulary; their activations are equal."""

    sequence: Peers
    tensor: Peers


ALONE = ModelPeers(Peers(), Peers())
