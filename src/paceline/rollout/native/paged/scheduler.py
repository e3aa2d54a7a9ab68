"""What a round computes: which samples decode, which prompts are (partly) computed, who is preempted for whom.

First come, first served. A group is one entry whose prompt is computed once; a sample that goes on from a prefix (it
was aborted, or preempted here) is an entry of its own, whose known tokens are computed again. Where decoding needs a
page and none is free, the sample that came last gives its pages up and waits with its tokens as its prefix: the one
that came first always goes on, so every sample ends.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.rollout.native.paged.batches import (
    ChunkRows,
    DecodeBatch,
    DrawRows,
    FloatArray,
    PrefillBatch,
)
from paceline.rollout.native.paged.pages import PagePool, PrefixIndex
from paceline.rollout.native.paged.slots import ActiveRequest, Ended, IntArray, Occupant, Progress, SlotTable
from paceline.types import FinishReason


@dataclass(slots=True)
class Entry:
    """Samples of one request that wait to start together after `known` tokens.

    `progress` is that of the only sample of an entry that goes on; None for samples that begin at the prompt.
    """

    active: ActiveRequest
    sample_indices: tuple[int, ...]
    progress: Progress | None
    known: tuple[int, ...]

    @property
    def order(self) -> tuple[int, int]:
        """Who came first."""
        return self.active.request_id, self.sample_indices[0]


@dataclass(slots=True)
class Prefilling:
    """An admitted entry of whose known tokens `num_done` are computed (or launched)."""

    entry: Entry
    slots: list[int]
    pages: list[int]
    num_done: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Samples that were preempted, and the tokens of theirs that have to be computed again."""

    num_preemptions: int = 0
    num_preempted_tokens: int = 0


@dataclass(slots=True)
class Round:
    """What one round runs, in this order: page copies (source, target), one token per sample, the prefill row."""

    copies: list[tuple[int, int]] = field(default_factory=list)
    decode: DecodeBatch | None = None
    prefill: PrefillBatch | None = None
    num_prompt_tokens: int = 0
    """Known tokens of the entries admitted in this round, shared pages included."""


class PagedScheduler:
    """Holds every unfinished sample: waiting, prefilling or in a slot. `plan` must not find tokens unread when it has
    to preempt, so `needs_preemption` is asked first."""

    def __init__(self, num_slots: int, page_tokens: int, prefill_budget: int) -> None:
        self.table = SlotTable(num_slots)
        self.pool = PagePool(1)
        self.index = PrefixIndex(page_tokens)
        self.counts = Counts()
        self.may_grow = False
        """Whether the pool gets larger once nobody holds a page of it."""
        self._page_tokens, self._prefill_budget = page_tokens, prefill_budget
        self._waiting: deque[Entry] = deque()
        self._prefilling: list[Prefilling] = []

    @property
    def has_work(self) -> bool:
        """Whether any sample waits, prefills or runs."""
        return bool(self._waiting or self._prefilling or self.table.is_running.any())

    @property
    def has_waiting(self) -> bool:
        """Whether any sample waits."""
        return bool(self._waiting)

    @property
    def num_running(self) -> int:
        """Samples in slots that decode."""
        return int(self.table.is_running.sum())

    def submit(self, active: ActiveRequest) -> None:
        """Takes a request's unfinished samples: those that begin at the prompt in parts of at most all slots, each that
        goes on from a prefix by itself."""
        request = active.request
        prompt = request.prompt.token_ids
        prefixes = {i: p for i, p in enumerate(request.prefixes) if p is not None and p.token_ids}
        fresh = [i for i in sorted(active.unfinished) if i not in prefixes]
        for start in range(0, len(fresh), self.table.num_slots):
            part = tuple(fresh[start : start + self.table.num_slots])
            self._waiting.append(Entry(active, part, None, prompt))
        for index in sorted(active.unfinished & prefixes.keys()):
            progress = Progress.of_sample(prefixes[index])
            self._waiting.append(Entry(active, (index,), progress, (*prompt, *progress.tokens)))

    def needs_preemption(self) -> bool:
        """Whether the next round's decoding needs more pages than are free."""
        return len(self._short_of_pages(self._decoding())) > self.pool.num_free

    def plan(self) -> Round:
        """The next round. Lengths and counts of samples are advanced as if it had run."""
        found = Round()
        before = self.counts
        found.decode = self._decode_batch(self._with_pages(found))
        if self.counts is before:  # who has just been preempted would take its pages back at once
            self._admit(found)
        found.prefill = self._prefill_batch()
        return found

    # decoding ---------------------------------------------------------------------------------------------------

    def _decoding(self) -> IntArray:
        """Slots that draw a token this round: running, and not at their limit with what is launched."""
        table = self.table
        slots: IntArray = np.flatnonzero(table.is_running & (table.counts < table.limits))
        return slots

    def _short_of_pages(self, slots: IntArray) -> IntArray:
        """Those of `slots` whose next token needs a page: a new one, or a copy of a shared one that it writes into."""
        table = self.table
        is_new = table.lengths[slots] % self._page_tokens == 0
        is_copy = np.zeros(len(slots), dtype=bool)
        claimed: dict[int, int] = {}
        for at in np.flatnonzero(table.may_share[slots] & ~is_new):
            page = table.occupant(slots[at]).pages[-1]
            claimed[page] = claimed.get(page, 0) + 1
            # the last holder writes into the page itself
            is_copy[at] = self.pool.is_shared(page) and claimed[page] < self.pool.num_holders(page)
        short: IntArray = slots[is_new | is_copy]
        return short

    def _with_pages(self, found: Round) -> IntArray:
        """The slots that decode, with a page for every next token; preempts until there are enough."""
        while True:
            slots = self._decoding()
            short = self._short_of_pages(slots)
            if len(short) <= self.pool.num_free:
                break
            self._preempt_last()
        for slot in short.tolist():
            self._give_page(slot, found)
        self.table.may_share[slots] = False
        return slots

    def _give_page(self, slot: int, found: Round) -> None:
        occupant = self.table.occupant(slot)
        (page,) = self.pool.take(1)
        if self.table.lengths[slot] % self._page_tokens == 0:
            occupant.pages.append(page)
        else:
            shared = occupant.pages[-1]
            found.copies.append((shared, page))
            self.index.forget(self.pool.release([shared]))
            occupant.pages[-1] = page
        self.table.set_pages(slot, len(occupant.pages) - 1, [page])

    def _decode_batch(self, slots: IntArray) -> DecodeBatch | None:
        if not len(slots):
            return None
        table = self.table
        positions = table.lengths[slots]
        num_pages = int(positions.max()) // self._page_tokens + 1
        batch = DecodeBatch(self._draw_rows(slots), positions, table.page_table[slots, :num_pages])
        table.lengths[slots] += 1
        table.counts[slots] += 1
        return batch

    def _draw_rows(self, slots: IntArray) -> DrawRows:
        table = self.table
        return DrawRows(slots, table.seeds[slots], table.counts[slots], table.temperatures[slots])

    # preemption -------------------------------------------------------------------------------------------------

    def _preempt_last(self) -> None:
        """Frees the pages of whoever came last; its tokens wait at the front."""
        if self._prefilling:
            self._requeue_prefilling(self._prefilling.pop())
            return
        running = [(o.order, slot) for slot, o in enumerate(self.table.occupants) if o is not None]
        if len(running) < 2 and not self.may_grow:
            raise RuntimeError("one sample alone does not fit the cache; submit() checks that it does")
        self._requeue_running(max(running)[1])

    def _requeue_prefilling(self, prefilling: Prefilling) -> None:
        if prefilling.num_done:
            self._count_preemption(len(prefilling.entry.sample_indices), prefilling.num_done)
        self._free_pages(prefilling.pages)
        self.table.give_back(prefilling.slots)
        self._wait_in_order(prefilling.entry)

    def _requeue_running(self, slot: int) -> None:
        progress = self.table.progress(slot, int(self.table.counts[slot]))
        self._count_preemption(1, int(self.table.lengths[slot]))
        occupant = self.table.leave(slot)
        self._free_pages(occupant.pages)
        prompt = occupant.active.request.prompt.token_ids
        entry = Entry(occupant.active, (occupant.sample_index,), progress, (*prompt, *progress.tokens))
        self._wait_in_order(entry)

    def reset_pool(self) -> None:
        """The cache is gone: no page is left. Nobody may hold one."""
        assert not self.pool.num_held, f"{self.pool.num_held} pages are still held"
        self.pool = PagePool(1)
        self.index.clear()

    def requeue_all(self) -> None:
        """Everything that holds pages waits again, tokens kept: the cache is about to be given back."""
        while self._prefilling:
            self._requeue_prefilling(self._prefilling.pop())
        for slot in np.flatnonzero(self.table.is_running).tolist():
            self._requeue_running(slot)

    def _wait_in_order(self, entry: Entry) -> None:
        at = 0
        while at < len(self._waiting) and self._waiting[at].order < entry.order:
            at += 1
        self._waiting.insert(at, entry)

    def _count_preemption(self, num_samples: int, num_tokens: int) -> None:
        self.counts = Counts(
            self.counts.num_preemptions + num_samples, self.counts.num_preempted_tokens + num_tokens
        )

    def take_counts(self) -> Counts:
        """Preemptions since the last call."""
        taken, self.counts = self.counts, Counts()
        return taken

    # admission and prefill --------------------------------------------------------------------------------------

    def _admit(self, found: Round) -> None:
        """Moves waiting entries to prefill, in order, while slots and pages last and the round has tokens to give."""
        left = self._prefill_budget - sum(len(p.entry.known) - p.num_done for p in self._prefilling)
        while self._waiting and left > 0:
            entry = self._waiting[0]
            shared = self.index.find(entry.known)
            needed = -(-len(entry.known) // self._page_tokens) - len(shared)
            if (
                len(entry.sample_indices) > self.table.num_free
                or needed + self._reserve(entry) > self.pool.num_free
            ):
                return
            self._waiting.popleft()
            self.pool.share(shared)
            pages = shared + self.pool.take(needed)
            num_shared = len(shared) * self._page_tokens
            found.num_prompt_tokens += len(entry.known)
            # known before it is computed: who shares it comes later in the same order, and never before it
            self.index.add(entry.known, pages, len(shared), len(entry.known) // self._page_tokens)
            slots = self.table.reserve(len(entry.sample_indices))
            self._prefilling.append(Prefilling(entry, slots, pages, num_shared))
            left -= len(entry.known) - num_shared

    def _reserve(self, entry: Entry) -> int:
        """Pages that admission leaves free: those the new samples write into next, and some for the ones that run, or
        every round would preempt what the round before admitted. None where nothing else holds pages."""
        num_running = self.num_running
        if not num_running and not self._prefilling:
            return 0
        return len(entry.sample_indices) + num_running // 4

    def _prefill_batch(self) -> PrefillBatch | None:
        left = self._prefill_budget
        token_ids: list[int] = []
        chunks: list[ChunkRows] = []
        sources: list[int] = []
        slots: list[int] = []
        still: list[Prefilling] = []
        for prefilling in self._prefilling:
            known, start = prefilling.entry.known, prefilling.num_done
            end = min(len(known), start + left)
            if end > start:
                num_pages = -(-end // self._page_tokens)
                chunks.append(ChunkRows(start, end - start, tuple(prefilling.pages[:num_pages])))
                token_ids += known[start:end]
                prefilling.num_done = end
                left -= end - start
            if prefilling.num_done == len(known):
                sources += [len(token_ids) - 1] * len(prefilling.slots)
                slots += self._start(prefilling)
            else:
                still.append(prefilling)
        self._prefilling = still
        if not chunks:
            return None
        draw = self._draw_rows(np.asarray(slots, dtype=np.int64))
        self.table.counts[slots] += 1
        ids = np.asarray(token_ids, dtype=np.int64)
        return PrefillBatch(ids, tuple(chunks), np.asarray(sources, dtype=np.int64), draw)

    def _start(self, prefilling: Prefilling) -> list[int]:
        """The samples of an entry whose known tokens are all launched take their slots; returns them."""
        entry = prefilling.entry
        self.pool.share(prefilling.pages, len(prefilling.slots) - 1)
        for slot, index in zip(prefilling.slots, entry.sample_indices, strict=True):
            progress = entry.progress or Progress()
            occupant = Occupant(entry.active, index, list(prefilling.pages), progress.masks)
            self.table.start(slot, occupant, progress, len(entry.known))
        return prefilling.slots

    # tokens that have been read ---------------------------------------------------------------------------------

    def accept(
        self, slots_R: IntArray, counts_R: IntArray, tokens_R: IntArray, logprobs_R: FloatArray, version: int
    ) -> None:
        """Stores tokens drawn for slots whose occupants are still those they were drawn for."""
        table = self.table
        table.tokens[slots_R, counts_R] = tokens_R
        table.logprobs[slots_R, counts_R] = logprobs_R
        table.versions[slots_R, counts_R] = version

    def finish(self, slot: int, count: int, reason: FinishReason) -> Ended:
        """Ends the sample in a slot after `count` tokens and frees its pages."""
        progress = self.table.progress(slot, count)
        occupant = self.table.leave(slot)
        self._free_pages(occupant.pages)
        return Ended(occupant.active, occupant.sample_index, progress, reason)

    def abort(self, request_id: int) -> list[Ended]:
        """Ends all unfinished samples of a request, wherever they are. No token of theirs may be unread."""
        ended: list[Ended] = []
        # prefilling ones behind it may rely on pages that nobody will compute now
        while any(p.entry.active.request_id == request_id for p in self._prefilling):
            self._requeue_prefilling(self._prefilling.pop())
        for entry in [e for e in self._waiting if e.active.request_id == request_id]:
            self._waiting.remove(entry)
            ended += _aborted(entry)
        for slot, occupant in enumerate(self.table.occupants):
            if occupant is not None and occupant.active.request_id == request_id:
                ended.append(self.finish(slot, int(self.table.counts[slot]), "abort"))
        return ended

    def _free_pages(self, pages: Sequence[int]) -> None:
        self.index.forget(self.pool.release(pages))


def _aborted(entry: Entry) -> list[Ended]:
    return [
        Ended(entry.active, index, entry.progress or Progress(), "abort") for index in entry.sample_indices
    ]
