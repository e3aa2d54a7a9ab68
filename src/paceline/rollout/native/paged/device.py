"""A decoding batch on the device, in one block of memory: one copy brings it there, and a captured round reads it.

Shapes: R rows, P pages of the longest sequence, S tokens of a page.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.rollout.native.paged.attention import DecodeRows
from paceline.rollout.native.paged.batches import DecodeBatch
from paceline.rollout.native.sampling import draw_by_numbers

_PIECES = 5
"""int64 pieces of R entries: slots, seeds, counts, positions, temperatures and lengths (two 32-bit halves)."""


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Views of one block. `seeds_R` holds the bits of the unsigned seed; temperatures are float32, 0 for greedy."""

    slots_R: Tensor
    seeds_R: Tensor
    counts_R: Tensor
    positions_R: Tensor
    temperatures_R: Tensor
    lengths_R: Tensor
    page_table_RP: Tensor

    @classmethod
    def of_block(cls, block: Tensor, num_rows: int, num_pages: int) -> "DeviceRows":
        """Cuts an int64 block of `block_size` entries into its views."""
        slots, seeds, counts, positions, halves = block[: _PIECES * num_rows].view(_PIECES, num_rows)
        table = block[_PIECES * num_rows :].view(torch.int32)[: num_rows * num_pages]
        return cls(
            slots,
            seeds,
            counts,
            positions,
            halves.view(torch.float32)[:num_rows],
            halves.view(torch.int32)[num_rows:],
            table.view(num_rows, num_pages),
        )

    def decode_rows(self, page_tokens: int) -> DecodeRows:
        """For attention; the longest sequence is bounded by the table's width alone."""
        return DecodeRows(self.page_table_RP, self.lengths_R, self.page_table_RP.shape[1] * page_tokens)


def block_size(num_rows: int, num_pages: int) -> int:
    """int64 entries of a block."""
    return _PIECES * num_rows + -(-num_rows * num_pages // 2)


def fill_block(block: Tensor, batch: DecodeBatch, num_rows: int, num_pages: int, scratch_slot: int) -> None:
    """Writes a batch into a block on the host. Rows beyond the batch read and write the scratch slot and page."""
    rows = DeviceRows.of_block(block, num_rows, num_pages)
    used, draw = len(batch.positions_R), batch.draw
    columns: tuple[tuple[Tensor, np.ndarray, int], ...] = (
        (rows.slots_R, draw.slots_R, scratch_slot),
        (rows.seeds_R, draw.seeds_R.view(np.int64), 0),
        (rows.counts_R, draw.counts_R, 0),
        (rows.positions_R, batch.positions_R, 0),
        (rows.temperatures_R, draw.temperatures_R, 1),
        (rows.lengths_R, batch.positions_R + 1, 1),
    )
    for column, values, padding in columns:
        column.numpy()[:used] = values
        column.numpy()[used:] = padding
    table = rows.page_table_RP.numpy()
    table.fill(0)
    table[:used, : batch.page_table_RP.shape[1]] = batch.page_table_RP


def uniform_numbers_on_device(seeds_R: Tensor, counts_R: Tensor) -> Tensor:
    """`sampling.uniform_numbers` as tensor operations, bit for bit: float64 [R] from int64 bits and counts.

    Products and sums of int64 wrap around like those of unsigned numbers; only shifts have to drop the sign.
    """
    state = seeds_R + (counts_R + 1) * _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shift(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shift(state, 27)) * _signed(0x94D049BB133111EB)
    state = state ^ _shift(state, 31)
    return _shift(state, 11).double() * 2.0**-53


def draw_tokens(
    logits_RV: Tensor, rows: DeviceRows, last_tokens_S: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The reference of `triton_ops.draw_tokens`: the whole distribution, no wait for the host."""
    logits_RV = logits_RV.float()
    if softcap is not None:
        logits_RV = softcap * torch.tanh(logits_RV / softcap)
    is_greedy_R = rows.temperatures_R == 0.0
    log_p_RV = (logits_RV / torch.where(is_greedy_R, 1.0, rows.temperatures_R)[:, None]).log_softmax(dim=-1)
    drawn_R = draw_by_numbers(log_p_RV, uniform_numbers_on_device(rows.seeds_R, rows.counts_R).float())
    tokens_R = torch.where(is_greedy_R, log_p_RV.argmax(dim=-1), drawn_R)
    last_tokens_S[rows.slots_R] = tokens_R
    return tokens_R, log_p_RV.gather(-1, tokens_R[:, None]).squeeze(-1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(state: Tensor, bits: int) -> Tensor:
    return (state >> bits) & ((1 << (64 - bits)) - 1)
