"""A round on the device, operation by operation: the reference for captured rounds, and what CPUs run.

Shapes: R rows, T tokens of the prefill row, E hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.model.loading import CausalModel
from paceline.model.logprob_head import HeadSettings, scaled_logits
from paceline.model.transfer import to_device
from paceline.rollout.native.cache import KVLayout
from paceline.rollout.native.paged.attention import (
    DecodeRows,
    PagedAttention,
    PrefillChunks,
)
from paceline.rollout.native.paged.batches import (
    DecodeBatch,
    Drawn,
    DrawRows,
    FloatArray,
    IntArray,
    PrefillBatch,
)
from paceline.rollout.native.paged.cache import PagedCache, PagedPlan
from paceline.rollout.native.sampling import sample_tokens

_ROOM_SHARE = 0.85
"""Of a device's free memory, what a cache without a bound takes at most; prefill and logits need the rest."""

_HEAD_ROWS = 256
"""Rows of logits formed at once while sampling."""


@dataclass(frozen=True, slots=True)
class EagerDrawn:
    """Tokens on the device; reading them waits."""

    tokens_R: Tensor
    logprobs_R: Tensor

    def read(self) -> tuple[IntArray, FloatArray]:
        return self.tokens_R.cpu().numpy(), self.logprobs_R.cpu().numpy()


class EagerRunner:
    """Runs batches on the model's own parameters; holds the cache and the last token of every slot."""

    def __init__(
        self,
        model: CausalModel,
        attention: PagedAttention,
        layout: KVLayout,
        page_tokens: int,
        num_slots: int,
    ) -> None:
        self.attention, self.page_tokens = attention, page_tokens
        self._model, self._layout, self._page_tokens = model, layout, page_tokens
        self._last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=model.device)
        self._cache: PagedCache | None = None

    @property
    def is_captured(self) -> bool:
        """Whether rounds are replayed from a capture."""
        return False

    @property
    def cache_bytes(self) -> int:
        """Memory of the cache now."""
        return 0 if self._cache is None else self._cache.num_bytes

    @property
    def num_pages(self) -> int:
        """Pages of the cache now, the scratch page included."""
        return 0 if self._cache is None else self._cache.num_pages

    def room_bytes(self) -> int | None:
        """Memory that the cache may take on a device without another bound, what it holds included; None on a CPU."""
        device = self._model.device
        if device.type != "cuda":
            return None
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(_ROOM_SHARE * (torch.cuda.mem_get_info(device)[0] + unused)) + self.cache_bytes

    def take_cache(self, num_pages: int, pages_per_sample: int) -> None:
        """Makes the cache at least this large; what it holds stays. No sample needs more than `pages_per_sample`."""
        old = self._cache
        if old is not None and old.num_pages >= num_pages:
            return
        self._cache = PagedCache(self._layout, self._page_tokens, num_pages)
        if old is not None:
            self._cache.copy_from(old)

    def release_cache(self) -> None:
        """Gives the cache's memory back."""
        self._cache = None

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages (source, target)."""
        self._held().copy(pairs)

    def prefill(self, batch: PrefillBatch) -> Drawn | None:
        """Computes the row; draws the next token of every sequence whose known tokens end in it."""
        device = self._model.device
        positions_T = np.concatenate([np.arange(c.start, c.start + c.length) for c in batch.chunks])
        places_T = np.concatenate(
            [self._places(np.asarray(c.pages), c.start, c.length) for c in batch.chunks]
        )
        plan = self._plan(places_T, prefill_chunks(batch, device))
        hidden_TE = self._hidden(to_device(torch.from_numpy(batch.token_ids_T), device), positions_T, plan)
        if not len(batch.sources_R):
            return None
        return self._draw(hidden_TE[to_device(torch.from_numpy(batch.sources_R), device)], batch.draw)

    def decode(self, batch: DecodeBatch) -> Drawn:
        """One more token for every sample of the batch."""
        device = self._model.device
        page_R = batch.page_table_RP[
            np.arange(len(batch.positions_R)), batch.positions_R // self._page_tokens
        ]
        places_R = page_R * np.int64(self._page_tokens) + batch.positions_R % self._page_tokens
        rows = DecodeRows(
            torch.from_numpy(batch.page_table_RP).to(device),
            torch.from_numpy(batch.positions_R + 1).to(device, torch.int32),
            int(batch.positions_R.max()) + 1,
        )
        slots_R = torch.from_numpy(batch.draw.slots_R).to(device)
        hidden_RE = self._hidden(self._last_tokens[slots_R], batch.positions_R, self._plan(places_R, rows))
        return self._draw(hidden_RE, batch.draw)

    def set_last_tokens(self, slots_R: IntArray, tokens_R: IntArray) -> None:
        """The tokens that the samples in these slots go on from."""
        device = self._model.device
        self._last_tokens[torch.from_numpy(slots_R).to(device)] = torch.from_numpy(tokens_R).to(device)

    def _hidden(self, input_ids_T: Tensor, positions_T: IntArray, plan: PagedPlan) -> Tensor:
        positions = to_device(torch.from_numpy(positions_T), self._model.device)
        return self._model.hidden(input_ids_T[None], positions[None], plan)

    def _plan(self, places_T: IntArray, rows: DecodeRows | PrefillChunks) -> PagedPlan:
        places = to_device(torch.from_numpy(places_T), self._model.device)
        return PagedPlan(self._held(), self.attention, places, rows)

    def _held(self) -> PagedCache:
        assert self._cache is not None, "take_cache() comes before any round"
        return self._cache

    def _places(self, pages_P: IntArray, start: int, length: int) -> IntArray:
        positions = np.arange(start, start + length)
        places: IntArray = pages_P[positions // self._page_tokens] * self._page_tokens
        return places + positions % self._page_tokens

    def _draw(self, hidden_RE: Tensor, rows: DrawRows) -> Drawn:
        """Samples one token per row; rows of one temperature are drawn together, as the slot engine does."""
        tokens_R = torch.empty(len(rows.slots_R), dtype=torch.int64, device=hidden_RE.device)
        logprobs_R = torch.empty(len(rows.slots_R), dtype=torch.float32, device=hidden_RE.device)
        for temperature in np.unique(rows.temperatures_R).tolist():
            same = np.flatnonzero(rows.temperatures_R == temperature)
            for start in range(0, len(same), _HEAD_ROWS):
                part = same[start : start + _HEAD_ROWS]
                at = torch.from_numpy(part).to(hidden_RE.device)
                tokens_R[at], logprobs_R[at] = self._draw_part(hidden_RE[at], rows, part, temperature)
        self._last_tokens[torch.from_numpy(rows.slots_R).to(hidden_RE.device)] = tokens_R
        return EagerDrawn(tokens_R, logprobs_R)

    def _draw_part(
        self, hidden_RE: Tensor, rows: DrawRows, part: IntArray, temperature: float
    ) -> tuple[Tensor, Tensor]:
        model = self._model
        head = HeadSettings(temperature or 1.0, model.logit_softcap, _HEAD_ROWS, exact=model.is_exact)
        logits_RV = scaled_logits(hidden_RE, model.head_weight_VE, model.head_bias_V, head)
        seeds, counts = rows.seeds_R[part].tolist(), rows.counts_R[part].tolist()
        return sample_tokens(logits_RV, seeds, counts, greedy=temperature == 0.0)


def prefill_chunks(batch: PrefillBatch, device: torch.device) -> PrefillChunks:
    """The chunks of a row on the device."""
    lengths = [chunk.length for chunk in batch.chunks]
    ends = np.cumsum(lengths)
    longest = max(len(chunk.pages) for chunk in batch.chunks)
    table_CP = np.zeros((len(batch.chunks), longest), dtype=np.int32)
    for row, chunk in enumerate(batch.chunks):
        table_CP[row, : len(chunk.pages)] = chunk.pages
    totals = [chunk.start + chunk.length for chunk in batch.chunks]
    return PrefillChunks(
        offsets_C=to_device(torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)), device),
        page_table_CP=to_device(torch.from_numpy(table_CP), device),
        lengths_C=to_device(torch.tensor(totals, dtype=torch.int32), device),
        longest_query=max(lengths),
        spans=tuple(
            (int(end) - length, length, total)
            for end, length, total in zip(ends, lengths, totals, strict=True)
        ),
    )
