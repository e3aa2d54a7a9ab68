"""Ulysses sequence parallelism (Jacobs et al. 2023): every rank computes a slice of a row's tokens, and in attention a
slice of the heads over all tokens.

Two all-to-alls per layer turn [all heads, own tokens] into [own heads, all tokens] and back, so the attention plan of
the whole row runs unchanged on fewer heads. A row's tokens are padded to a multiple of the ranks behind the plan's
back: padding is cut off before the plan and never attends or is attended to.

Shapes: B rows, T tokens of the whole row, t = ceil(T / S) tokens of a rank, S ranks, H query heads, K kv heads,
N heads of any kind per rank, D head width, R response tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.model.attention import AttentionArgs, AttentionPlan
from paceline.model.parallel.groups import Peers


class UlyssesPlan:
    """A plan over the whole row, computed by ranks that each hold `t` tokens of it.

    kv heads are repeated where there are fewer of them than ranks, so that every rank has the one its query heads
    attend to.
    """

    def __init__(self, whole: AttentionPlan, num_tokens: int, peers: Peers) -> None:
        """`num_tokens` is what `whole` was made for: the row without the padding to a multiple of the ranks."""
        self._whole, self._num_tokens, self._peers = whole, num_tokens, peers

    def attend(self, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, args: AttentionArgs) -> Tensor:
        """Own tokens in, own tokens out: [B, H, t, D] to [B, t, H, D]."""
        size = self._peers.size
        heads = [query_BHTD, *(_repeat_heads(tensor, size) for tensor in (key_BKTD, value_BKTD))]
        query, key, value = self._to_heads(heads)
        out_BTND = self._whole.attend(query, key, value, args)
        return self._to_tokens(out_BTND)

    def _to_heads(self, tensors: list[Tensor]) -> list[Tensor]:
        """[B, heads, t, D] of own tokens to [B, heads / S, T, D], all tensors in one exchange."""
        size = self._peers.size
        counts = [tensor.shape[1] // size for tensor in tensors]
        # the head dimension is split so that part s of it goes to rank s
        split = [tensor.unflatten(1, (size, -1)) for tensor in tensors]
        sent_SBNtD = torch.cat(split, dim=2).transpose(0, 1).contiguous()
        received_SBNtD = _exchange(sent_SBNtD, self._peers)
        row_BNTD = received_SBNtD.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self._num_tokens]
        return list(row_BNTD.split(counts, dim=1))

    def _to_tokens(self, out_BTND: Tensor) -> Tensor:
        """[B, T, heads / S, D] to [B, t, heads, D] of own tokens."""
        size = self._peers.size
        missing = -self._num_tokens % size
        if missing:
            out_BTND = F.pad(out_BTND, (0, 0, 0, 0, 0, missing))
        sent_SBtND = out_BTND.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
        received_SBtND = _exchange(sent_SBtND, self._peers)
        return received_SBtND.permute(1, 2, 0, 3, 4).flatten(2, 3)


@dataclass(frozen=True, slots=True)
class RowSlice:
    """A rank's part of every row: columns [start, start + length), and the response tokens predicted from there.

    `own_R` indexes the response tokens of all ranks, `source_R` the flattened [B * length] hidden states of this one.
    """

    start: int
    length: int
    own_R: Tensor
    source_R: Tensor


def slice_rows(width: int, source_R: Tensor, peers: Peers) -> RowSlice:
    """The part of rank `peers.index`, for rows of `width` columns and sources into their flattened [B * width].

    Sources say which position predicts which label; they are made from whole rows, so a label whose predictor is the
    last token of a slice goes with that token, not with the next slice.

    Raises:
        ValueError: the width is not a multiple of the ranks.
    """
    if width % peers.size:
        raise ValueError(
            f"rows of {width} tokens cannot be cut into {peers.size} equal parts; pad them first"
        )
    length = width // peers.size
    column_R = source_R % width
    own_R = (column_R // length == peers.index).nonzero().squeeze(-1)
    start = peers.index * length
    local_R = source_R[own_R] // width * length + column_R[own_R] - start
    return RowSlice(start, length, own_R, local_R)


def spread(values: Tensor, own_R: Tensor, num_values: int, peers: Peers) -> Tensor:
    """Values of this rank's response tokens to those of all ranks, [R], equal on all.

    Every rank then computes the same loss, and the backward pass gives each the gradient of its own values only:
    gradients of the ranks add up to that of the row.
    """
    found: Tensor = _Spread.apply(values, own_R, num_values, peers)
    return found


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, own_R: Tensor, num_values: int, peers: Peers) -> Tensor:
        ctx.save_for_backward(own_R)
        found_R = values.new_zeros(num_values)
        found_R[own_R] = values
        dist.all_reduce(found_R, group=peers.group)
        return found_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (own_R,) = ctx.saved_tensors
        return grads[0][own_R], None, None, None


def _repeat_heads(tensor_BKTD: Tensor, size: int) -> Tensor:
    num_heads = tensor_BKTD.shape[1]
    return tensor_BKTD if num_heads >= size else tensor_BKTD.repeat_interleave(size // num_heads, dim=1)


def _exchange(sent: Tensor, peers: Peers) -> Tensor:
    """Part s of the first dimension goes to rank s; what comes back is ordered by sender."""
    received: Tensor = _Exchange.apply(sent, peers)
    return received


class _Exchange(torch.autograd.Function):
    """An all-to-all with equal parts is its own transpose, so its backward pass is the same exchange."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=peers.group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        received = torch.empty_like(grads[0], memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, grads[0].contiguous(), group=ctx.peers.group)
        return received, None
