"""The pool's memory and the attention plan that stores into it.

Shapes: L layers, N pages, S tokens of a page, K kv heads, D head width, T tokens of the row, H query heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.model.attention import AttentionArgs
from paceline.model.transfer import to_device
from paceline.rollout.native.cache import KVLayout
from paceline.rollout.native.paged.attention import DecodeRows, LayerPages, PagedAttention, PrefillChunks


class PagedCache:
    """Keys and values in pages, [L, 2, N, S, K, D]. Page 0 is scratch."""

    def __init__(self, layout: KVLayout, page_tokens: int, num_pages: int) -> None:
        self.layout, self.page_tokens, self.num_pages = layout, page_tokens, num_pages
        size = (layout.num_layers, 2, num_pages, page_tokens, layout.num_kv_heads, layout.head_dim)
        # zeros: a masked position still meets a weight of 0, and 0 times an uninitialised NaN is NaN
        self.data = torch.zeros(size, dtype=layout.dtype, device=layout.device)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self.data.numel() * self.data.element_size()

    def layer(self, index: int) -> LayerPages:
        """One layer's pages."""
        return LayerPages(self.data[index, 0], self.data[index, 1])

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages over others, all layers; no page is a source and a target."""
        sources, targets = to_device(torch.tensor(pairs), self.data.device).unbind(1)
        for pages in self.data:  # layer by layer: the copies of all at once would take memory of their own
            pages[:, targets] = pages[:, sources]

    def copy_from(self, smaller: "PagedCache") -> None:
        """Takes over the pages of a smaller cache, under the same numbers."""
        self.data[:, :, : smaller.num_pages] = smaller.data


class PagedPlan:
    """Stores a row's keys and values at `places_T` (page * S + offset), then attends from the pages."""

    def __init__(
        self, cache: PagedCache, attention: PagedAttention, places_T: Tensor, rows: DecodeRows | PrefillChunks
    ) -> None:
        self._cache, self._attention, self._places_T, self._rows = cache, attention, places_T, rows

    def attend(self, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, args: AttentionArgs) -> Tensor:
        pages = self._cache.layer(args.layer)
        pages.keys.flatten(0, 1)[self._places_T] = key_BKTD[0].transpose(0, 1)
        pages.values.flatten(0, 1)[self._places_T] = value_BKTD[0].transpose(0, 1)
        query_THD = query_BHTD[0].transpose(0, 1).contiguous()
        if isinstance(self._rows, DecodeRows):
            return self._attention.decode(query_THD, pages, self._rows, args)[None]
        return self._attention.prefill(query_THD, pages, self._rows, args)[None]
