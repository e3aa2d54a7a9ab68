"""Rounds that verify drafts: a sample's last token and its draft are computed side by side, and a token is drawn after
each of them.

Shapes: R rows (every token of every sample that a token is drawn after).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.rollout.native.paged.batches import ChunkRows, DrawRows, IntArray, PrefillBatch
from paceline.rollout.native.paged.scheduler import PagedScheduler, Round


@dataclass(frozen=True, slots=True)
class Verification:
    """The row to compute, after page copies; `drafts` by slot, in the order of the row's chunks (empty ones too)."""

    copies: list[tuple[int, int]]
    batch: PrefillBatch
    drafts: Mapping[int, tuple[int, ...]]


class VerifyingScheduler(PagedScheduler):
    """A `PagedScheduler` whose running samples can take several tokens in a round."""

    @property
    def is_tail(self) -> bool:
        """Whether only running samples are left."""
        return not self._waiting and not self._prefilling and bool(self.table.is_running.any())

    def running_slots(self) -> IntArray:
        """Slots that draw a token in the next round."""
        return self._decoding()

    def plan_verification(self, drafts: Mapping[int, tuple[int, ...]]) -> Verification | None:
        """A round for the running slots, `drafts` by slot, each shorter than what the sample may still draw. None where
        pages are too few; nothing has changed then. No token may be unread."""
        slots = self._decoding()
        table, size = self.table, self._page_tokens
        short = self._short_of_pages(slots)
        sizes = np.array([len(drafts.get(slot, ())) for slot in slots.tolist()])
        more = -(-(table.lengths[slots] + 1 + sizes) // size) - -(-(table.lengths[slots] + 1) // size)
        if len(short) + int(more.sum()) > self.pool.num_free:
            return None
        found = Round()
        for slot in short.tolist():
            self._give_page(slot, found)
        table.may_share[slots] = False
        for slot, count in zip(slots.tolist(), more.tolist(), strict=True):
            occupant = table.occupants[slot]
            assert occupant is not None
            pages = self.pool.take(count)
            table.set_pages(slot, len(occupant.pages), pages)
            occupant.pages += pages
        ordered = {slot: drafts.get(slot, ()) for slot in slots.tolist()}
        return Verification(found.copies, self._verification_batch(slots, ordered), ordered)

    def _verification_batch(self, slots: IntArray, drafts: Mapping[int, tuple[int, ...]]) -> PrefillBatch:
        table = self.table
        token_ids: list[int] = []
        chunks: list[ChunkRows] = []
        for slot, draft in drafts.items():
            occupant = table.occupants[slot]
            assert occupant is not None
            length, last = int(table.lengths[slot]), int(table.tokens[slot, table.counts[slot] - 1])
            token_ids += (last, *draft)
            num_pages = (length + len(draft)) // self._page_tokens + 1
            chunks.append(ChunkRows(length, 1 + len(draft), tuple(occupant.pages[:num_pages])))
        sizes = [chunk.length for chunk in chunks]
        slots_R = np.repeat(slots, sizes)
        counts_R = table.counts[slots_R] + np.concatenate([np.arange(size) for size in sizes])
        draw = DrawRows(slots_R, table.seeds[slots_R], counts_R, table.temperatures[slots_R])
        ids = np.asarray(token_ids, dtype=np.int64)
        return PrefillBatch(ids, tuple(chunks), np.arange(len(ids)), draw)

    def settle(self, slot: int, num_tokens: int) -> None:
        """A sample takes so many of the tokens that a verification drew for it; pages behind them are freed."""
        table = self.table
        table.lengths[slot] += num_tokens
        table.counts[slot] += num_tokens
        occupant = table.occupants[slot]
        assert occupant is not None
        num_pages = -(-int(table.lengths[slot]) // self._page_tokens)
        self._free_pages(occupant.pages[num_pages:])
        del occupant.pages[num_pages:]
