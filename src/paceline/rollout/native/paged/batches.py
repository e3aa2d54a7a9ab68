"""What the host hands to the device for one round, and what comes back.

Shapes: R rows (running samples), T tokens of the prefill row, C chunks of it, P pages of the longest sequence.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DrawRows:
    """Rows a token is drawn for: slot, seed, how many tokens the sample has, temperature (0: greedy)."""

    slots_R: IntArray
    seeds_R: npt.NDArray[np.uint64]
    counts_R: IntArray
    temperatures_R: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One new token for each of R samples. The token itself is on the device, in the slot's entry of `last_tokens`;
    its keys and values go to `positions_R`. `page_table_RP` covers that position."""

    draw: DrawRows
    positions_R: IntArray
    page_table_RP: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """A part of a sequence's known tokens: positions [start, start + length), which see all before them."""

    start: int
    length: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """C chunks side by side in one row. Row r of `draw` continues the token at `sources_R` of the row."""

    token_ids_T: IntArray
    chunks: tuple[ChunkRows, ...]
    sources_R: IntArray
    draw: DrawRows


class Drawn(Protocol):
    """Tokens a round has drawn, which may still be under way."""

    def read(self) -> tuple[IntArray, FloatArray]:
        """Waits for them: token ids [R] and log-probabilities [R]."""
        ...
