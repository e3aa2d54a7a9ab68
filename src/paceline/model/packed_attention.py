"""Attention over one packed row: independent sequences, or a tree of shared prefixes.

The row is cut into *pieces*; the queries of a piece attend to the pieces it has as context (its ancestors, whole)
and to itself under a causal or tree mask. Pieces come from `torch.split`, whose backward is one concatenation, so no
piece costs a gradient of the whole row's size.

Shapes: T tokens of the row, H query heads, K kv heads, D head width, Q/C queries and keys of one piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.batching.prefixes import Segment
from paceline.model.attention import AttentionArgs, additive_bias, attend_dense, attend_sequences
from paceline.model.flash_attention import FlashPlan
from paceline.model.flash_kernels import kernel_for

_SMALL_PIECE = 256
"""Tokens up to which a prompt and its responses are one masked piece even if most of the square is masked: below
this, launching more kernels costs more than the masked work."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, start + length) of the row. `context`: indices of earlier pieces seen whole.

    `member_Q` numbers the segment of every token inside the piece (0 = the shared prompt), None when the piece is
    one segment.
    """

    start: int
    length: int
    context: tuple[int, ...]
    member_Q: Tensor | None


class PackedPlan:
    """Attention for a packed row, by pieces; runs on every device and is the reference for faster plans."""

    def __init__(self, segments: Sequence[Segment], position_ids_T: Tensor) -> None:
        self._segments = tuple(segments)
        self._pieces = cut_pieces(segments)
        self._sizes = [piece.length for piece in self._pieces]
        self._positions = position_ids_T.split(self._sizes)
        self._biases: dict[tuple[int, int | None, torch.dtype], Tensor | None] = {}

    def attend(self, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, args: AttentionArgs) -> Tensor:
        if args.exact:
            return self._attend_exact(query_BHTD, key_BKTD, value_BKTD, args)
        queries = query_BHTD.split(self._sizes, dim=2)
        keys = key_BKTD.split(self._sizes, dim=2)
        values = value_BKTD.split(self._sizes, dim=2)
        outputs = []
        for index, piece in enumerate(self._pieces):
            key, value = keys[index], values[index]
            if piece.context:
                key = torch.cat([*(keys[c] for c in piece.context), key], dim=2)
                value = torch.cat([*(values[c] for c in piece.context), value], dim=2)
            bias = self._bias(index, args.window, key.dtype)
            outputs.append(attend_dense(queries[index], key, value, bias, bias is None, args))
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def _attend_exact(
        self, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, args: AttentionArgs
    ) -> Tensor:
        """Every segment against its ancestors and itself, as one sequence from its first token."""
        lengths = [segment.length for segment in self._segments]
        queries, keys, values = (part.split(lengths, dim=2) for part in (query_BHTD, key_BKTD, value_BKTD))
        outputs = []
        for index, segment in enumerate(self._segments):
            path = [index]
            while (parent := self._segments[path[0]].parent) >= 0:
                path.insert(0, parent)
            key, value = (torch.cat([parts[i] for i in path], dim=2) for parts in (keys, values))
            first_position = key.shape[2] - segment.length
            outputs.append(attend_sequences(queries[index], key, value, first_position, args))
        return torch.cat(outputs, dim=2).transpose(1, 2)

    def _bias(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [Q, C] of a piece; None where plain causal attention says the same."""
        key = (index, window, dtype)
        if key not in self._biases:
            self._biases[key] = self._build_bias(index, window, dtype)
        return self._biases[key]

    def _build_bias(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        piece = self._pieces[index]
        positions_Q = self._positions[index]
        fits = window is None or int(positions_Q.max()) < window
        if not piece.context and piece.member_Q is None and fits:
            return None
        device = positions_Q.device
        own = torch.ones(piece.length, piece.length, dtype=torch.bool, device=device).tril()
        if piece.member_Q is not None:
            member_Q = piece.member_Q.to(device)
            own &= (member_Q[:, None] == member_Q[None, :]) | (member_Q[None, :] == 0)
        num_context = sum(self._sizes[c] for c in piece.context)
        visible = torch.cat(
            [torch.ones(piece.length, num_context, dtype=torch.bool, device=device), own], dim=1
        )
        if not fits:
            assert window is not None
            positions_C = torch.cat([*(self._positions[c] for c in piece.context), positions_Q])
            visible &= positions_Q[:, None] - positions_C[None, :] < window
        return additive_bias(visible, dtype)


def cut_pieces(segments: Sequence[Segment]) -> list[Piece]:
    """Cuts a row's segments into pieces: a prompt with its responses becomes one piece where that wastes little."""
    pieces: list[Piece] = []
    piece_of_segment: dict[int, int] = {}
    parents = {segment.parent for segment in segments}
    index = 0
    while index < len(segments):
        segment = segments[index]
        num_children = _num_leaf_children(segments, index, parents)
        context = _ancestor_pieces(segments, index, piece_of_segment)
        members = segments[index : index + 1 + num_children]
        if num_children and _merging_pays([m.length for m in members]):
            member_Q = torch.cat([torch.full((m.length,), number) for number, m in enumerate(members)])
            pieces.append(Piece(segment.start, len(member_Q), context, member_Q))
            piece_of_segment.update({index + k: len(pieces) - 1 for k in range(len(members))})
            index += len(members)
        else:
            pieces.append(Piece(segment.start, segment.length, context, None))
            piece_of_segment[index] = len(pieces) - 1
            index += 1
    return pieces


def _num_leaf_children(segments: Sequence[Segment], index: int, parents: set[int]) -> int:
    """How many segments right after `index` are its children and have no children themselves."""
    count = 0
    while (
        index + 1 + count < len(segments)
        and segments[index + 1 + count].parent == index
        and index + 1 + count not in parents
    ):
        count += 1
    return count


def _merging_pays(lengths: Sequence[int]) -> bool:
    total = sum(lengths)
    prompt, responses = lengths[0], lengths[1:]
    needed = prompt * prompt + sum(length * (prompt + length) for length in responses)
    return total <= _SMALL_PIECE or total * total <= 2 * needed


def _ancestor_pieces(
    segments: Sequence[Segment], index: int, piece_of_segment: dict[int, int]
) -> tuple[int, ...]:
    ancestors: list[int] = []
    parent = segments[index].parent
    while parent >= 0:
        ancestors.append(piece_of_segment[parent])
        parent = segments[parent].parent
    return tuple(reversed(ancestors))


def packed_plan(segments: Sequence[Segment], position_ids_T: Tensor) -> PackedPlan | FlashPlan:
    """The plan for a packed row on the device of `position_ids_T`: variable-length kernels where they apply."""
    pieces = PackedPlan(segments, position_ids_T)
    kernel = kernel_for(position_ids_T.device)
    return pieces if kernel is None else FlashPlan(segments, kernel, pieces, position_ids_T.device)
