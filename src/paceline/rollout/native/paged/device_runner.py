"""Decoding rounds as one block of input and one captured graph per batch size; prefill runs operation by operation.

A round's body reads its inputs from a static block and its tokens from the device, so the host copies one block,
launches one graph, and asks for the drawn tokens later. Without capturing (CPUs, weights that move) the same body runs
as it is written: that is what the CPU tests compare with `EagerRunner`.

Shapes: R rows of the block, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.model.loading import CausalModel
from paceline.rollout.native.cache import KVLayout
from paceline.rollout.native.paged.batches import DecodeBatch, Drawn, DrawRows, FloatArray, IntArray
from paceline.rollout.native.paged.cache import PagedCache, PagedPlan
from paceline.rollout.native.paged.decoder import can_decode_fused, fused_hidden
from paceline.rollout.native.paged.device import DeviceRows, block_size, fill_block
from paceline.rollout.native.paged.kernels import RoundKernels
from paceline.rollout.native.paged.runner import EagerRunner

_RING = 4
"""Host buffers in turn: two rounds may be under way, each with a decoding and a prefill draw."""


def batch_sizes(max_running: int) -> tuple[int, ...]:
    """Batch sizes that rounds are captured at: close together where a row more costs most, at most 32 apart."""
    sizes = {1, 2, 4, 8, 16, 24, *range(32, max_running, 16 if max_running <= 128 else 32), max_running}
    return tuple(sorted(size for size in sizes if size <= max_running))


@dataclass(slots=True)
class DeviceDrawn:
    """Tokens on their way to host memory. `event` is None where the copy is done already."""

    tokens_R: Tensor
    logprobs_R: Tensor
    event: torch.cuda.Event | None

    def read(self) -> tuple[IntArray, FloatArray]:
        if self.event is not None:
            self.event.synchronize()
        return self.tokens_R.numpy().copy(), self.logprobs_R.numpy().copy()


@dataclass(slots=True)
class _Round:
    """One batch size: the static block, its host copies in turn, and the captured graph with its results."""

    num_rows: int
    block: Tensor
    rows: DeviceRows
    hosts: list[Tensor]
    copied: list[torch.cuda.Event | None] = field(default_factory=lambda: [None] * _RING)
    turn: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    results: tuple[Tensor, Tensor] | None = None


class DeviceRunner(EagerRunner):
    """See the module's docstring. `captures`: replay graphs; needs CUDA and parameters that keep their memory."""

    def __init__(
        self, model: CausalModel, kernels: RoundKernels, layout: KVLayout, num_slots: int, captures: bool
    ) -> None:
        # one entry more: rows that fill a batch up draw for the scratch slot
        super().__init__(model, kernels.attention, layout, kernels.page_tokens, num_slots + 1)
        self._kernels, self._num_slots, self._captures = kernels, num_slots, captures
        self._sizes = batch_sizes(num_slots)
        self._on_device = model.device.type == "cuda"
        self._pages_per_sample = 1
        self._rounds: dict[int, _Round] = {}
        self._pool: Any = None  # torch's handle, of no public type

    @property
    def is_captured(self) -> bool:
        """Whether rounds are replayed from a capture."""
        return self._captures

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes of rounds, small ones first."""
        return self._sizes

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Batch sizes captured until now."""
        return tuple(sorted(size for size, found in self._rounds.items() if found.graph is not None))

    def take_cache(self, num_pages: int, pages_per_sample: int) -> None:
        """See `EagerRunner.take_cache`. A cache that moves, or longer samples, end all captures."""
        grows, before = pages_per_sample > self._pages_per_sample, self._cache
        if grows:
            self._pages_per_sample = max(pages_per_sample, 2 * self._pages_per_sample)
        super().take_cache(num_pages, pages_per_sample)
        if grows or self._cache is not before:
            self._forget_rounds()

    def release_cache(self) -> None:
        """Gives the cache's memory back, and the graphs' that point into it."""
        self._forget_rounds()
        super().release_cache()

    def capture(self, sizes: Sequence[int] = ()) -> None:
        """Captures batch sizes ahead of use (default: all), large ones first: small ones fit into their memory."""
        for size in sorted(sizes or self._sizes, reverse=True):
            self._round(size)

    def decode(self, batch: DecodeBatch) -> Drawn:
        """One more token for every sample of the batch, in the smallest round that holds it."""
        num_rows = len(batch.positions_R)
        found = self._round(next(size for size in self._sizes if size >= num_rows))
        self._bring(found, batch)
        if found.graph is None:
            found.results = self._body(found.rows)
        else:
            found.graph.replay()
        assert found.results is not None
        return self._take_home(found.results, num_rows)

    def _round(self, num_rows: int) -> _Round:
        """The round of a batch size, captured the first time."""
        if num_rows not in self._rounds:
            width = self._pages_per_sample
            size = block_size(num_rows, width)
            block = torch.empty(size, dtype=torch.int64, device=self._model.device)
            hosts = [torch.empty(size, dtype=torch.int64, pin_memory=self._on_device) for _ in range(_RING)]
            found = _Round(num_rows, block, DeviceRows.of_block(block, num_rows, width), hosts)
            self._rounds[num_rows] = found
            if self._captures:
                self._capture(found)
        return self._rounds[num_rows]

    def _capture(self, found: _Round) -> None:
        """Runs the body on padding alone until everything is compiled, then captures it."""
        self._bring(found, _no_rows())
        side = torch.cuda.Stream(self._model.device)
        side.wait_stream(torch.cuda.current_stream(self._model.device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self._body(found.rows)
        torch.cuda.current_stream(self._model.device).wait_stream(side)
        torch.cuda.synchronize(self._model.device)
        graph = torch.cuda.CUDAGraph()
        # this thread's: elsewhere in the process a trainer may take memory and NCCL ask its events meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            found.results = self._body(found.rows)
        found.graph = graph
        self._pool = self._pool or graph.pool()

    def _bring(self, found: _Round, batch: DecodeBatch) -> None:
        """Fills the next host block, waiting for its last copy if need be, and copies it to the static one."""
        turn = found.turn
        found.turn = (turn + 1) % _RING
        if (event := found.copied[turn]) is not None:
            event.synchronize()
        host = found.hosts[turn]
        fill_block(host, batch, found.num_rows, self._pages_per_sample, self._num_slots)
        found.block.copy_(host, non_blocking=True)
        if self._on_device:
            found.copied[turn] = event = torch.cuda.Event()
            event.record()

    def _body(self, rows: DeviceRows) -> tuple[Tensor, Tensor]:
        """Forward pass and draw of a round."""
        tokens_R = self._last_tokens[rows.slots_R]
        model, cache = self._model, self._held()
        if self._kernels.rotate_and_store is not None and can_decode_fused(model):
            hidden_RE = fused_hidden(
                model, tokens_R, rows, cache, self.attention, self._kernels.rotate_and_store
            )
        else:
            plan = PagedPlan(cache, self.attention, _places(rows, cache), rows.decode_rows(cache.page_tokens))
            hidden_RE = model.hidden(tokens_R[None], rows.positions_R[None], plan)
        return self._draw_on_device(hidden_RE, rows)

    def _draw_on_device(self, hidden_RE: Tensor, rows: DeviceRows) -> tuple[Tensor, Tensor]:
        model = self._model
        logits_RV = torch.nn.functional.linear(hidden_RE, model.head_weight_VE, model.head_bias_V)
        return self._kernels.draw(logits_RV, rows, self._last_tokens, model.logit_softcap)

    def _draw(self, hidden_RE: Tensor, rows: DrawRows) -> Drawn:
        """The next token of sequences whose known tokens have just been computed."""
        num_rows = len(rows.slots_R)
        batch = DecodeBatch(rows, np.zeros(num_rows, dtype=np.int64), np.zeros((num_rows, 1), dtype=np.int32))
        host = torch.empty(block_size(num_rows, 1), dtype=torch.int64, pin_memory=self._on_device)
        fill_block(host, batch, num_rows, 1, self._num_slots)
        block = host.to(hidden_RE.device, non_blocking=True)
        results = self._draw_on_device(hidden_RE, DeviceRows.of_block(block, num_rows, 1))
        return self._take_home(results, num_rows)

    def _take_home(self, results: tuple[Tensor, Tensor], num_rows: int) -> DeviceDrawn:
        """Starts the copy of what was drawn to host memory."""
        tokens_R, logprobs_R = (part[:num_rows] for part in results)
        if not self._on_device:
            return DeviceDrawn(tokens_R.clone(), logprobs_R.clone(), None)
        hosts = [torch.empty_like(part, device="cpu", pin_memory=True) for part in (tokens_R, logprobs_R)]
        hosts[0].copy_(tokens_R, non_blocking=True)
        hosts[1].copy_(logprobs_R, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return DeviceDrawn(hosts[0], hosts[1], event)

    def _forget_rounds(self) -> None:
        if self._on_device and self._rounds:
            torch.cuda.synchronize(self._model.device)  # a graph must not be freed while it runs
        self._rounds.clear()
        self._pool = None


def _places(rows: DeviceRows, cache: PagedCache) -> Tensor:
    size = cache.page_tokens
    page_R = rows.page_table_RP.gather(1, rows.positions_R[:, None] // size).squeeze(1).long()
    return page_R * size + rows.positions_R % size


def _no_rows() -> DecodeBatch:
    ints, table = np.zeros(0, dtype=np.int64), np.zeros((0, 1), dtype=np.int32)
    return DecodeBatch(DrawRows(ints, ints.astype(np.uint64), ints, ints.astype(np.float64)), ints, table)
