"""The paged engine with drafts: where few samples are left, a round can bring each of them several tokens.

Rounds do not overlap then: a draft goes on from the last token, so that has to be read first.
"""

from collections.abc import Sequence
from time import perf_counter

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from paceline.model.loading import CausalModel
from paceline.rollout.native.paged.batches import FloatArray, IntArray
from paceline.rollout.native.paged.drafts import Drafter, DraftGauge, DraftSettings
from paceline.rollout.native.paged.engine import PagedEngine, PagedLimits
from paceline.rollout.native.paged.slots import Ended
from paceline.rollout.native.paged.verifying import Verification, VerifyingScheduler
from paceline.rollout.native.paged.work import prefill_flops
from paceline.rollout.protocol import RolloutStats
from paceline.telemetry.ledger import Ledger
from paceline.types import FinishReason, Sample


class SpeculativeEngine(PagedEngine):
    """See the module's docstring. Samples are the paged engine's, token for token, up to the rounding of products over
    more rows (none in exact mode)."""

    def __init__(
        self,
        model: CausalModel,
        tokenizer: PreTrainedTokenizerBase,
        limits: PagedLimits,
        ledger: Ledger,
        drafts: DraftSettings,
    ) -> None:
        super().__init__(model, tokenizer, limits, ledger)
        self._scheduler = self._verifying = VerifyingScheduler(
            limits.max_running, self._page_tokens, limits.prefill_token_budget
        )
        self._drafts = drafts
        self._drafter = Drafter(drafts)
        self._gauge = DraftGauge(always=drafts.mode == "on")

    @torch.inference_mode()
    def _round(self) -> None:
        started = perf_counter()
        few = self._verifying.is_tail and self._verifying.num_running <= self._drafts.max_running
        if not few:
            super()._round()
            return
        if not self._gauge.is_due or not self._verify(started):
            super()._round()
            self._gauge.plain(perf_counter() - started)

    def _verify(self, started: float) -> bool:
        """Runs a round that verifies drafts. False: there is nothing to verify, and no round was run."""
        self._fit_cache()
        self._read_all()
        drafts = self._draft()
        planned = self._verifying.plan_verification(drafts) if any(drafts.values()) else None
        if planned is None:
            self._gauge.wait()
            return False
        if planned.copies:
            self.runner.copy_pages(planned.copies)
        with self._ledger.span("rollout", "verify drafts"):
            drawn = self.runner.prefill(planned.batch)
            assert drawn is not None
            tokens_R, logprobs_R = drawn.read()
        num_kept = self._take(planned, tokens_R, logprobs_R)
        num_running = len(planned.drafts)
        self._gauge.verified(perf_counter() - started, num_kept / num_running)
        self._count(planned, num_kept)
        return True

    def _draft(self) -> dict[int, tuple[int, ...]]:
        table = self._verifying.table
        found: dict[int, tuple[int, ...]] = {}
        for slot in self._verifying.running_slots().tolist():
            occupant, count = table.occupants[slot], int(table.counts[slot])
            assert occupant is not None
            prompt = occupant.active.request.prompt
            found[slot] = self._drafter.draft(
                occupant.active.request_id,
                occupant.sample_index,
                prompt.prompt_id,
                prompt.token_ids,
                table.tokens[slot, :count].tolist(),
                int(table.limits[slot]) - count - 1,
            )
        return found

    def _take(self, planned: Verification, tokens_R: IntArray, logprobs_R: FloatArray) -> int:
        """Every sample takes the tokens drawn after a context that turned out to be its own; returns how many."""
        row = num_kept = 0
        last: dict[int, int] = {}
        for slot, draft in planned.drafts.items():
            rows = slice(row, row + 1 + len(draft))
            row = rows.stop
            kept = self._agreement(slot, draft, tokens_R[rows].tolist())
            num_kept += kept
            rows = slice(rows.start, rows.start + kept)
            reason = self._store(slot, tokens_R[rows], logprobs_R[rows])
            if reason is not None:
                count = int(self._verifying.table.counts[slot])
                self._deliver(self._verifying.finish(slot, count, reason))
            else:
                last[slot] = int(tokens_R[rows.stop - 1])
        self.runner.set_last_tokens(np.array([*last], dtype=np.int64), np.array([*last.values()], np.int64))
        return num_kept

    def _agreement(self, slot: int, draft: Sequence[int], drawn: Sequence[int]) -> int:
        kept = 1
        while (
            kept <= len(draft)
            and draft[kept - 1] == drawn[kept - 1]
            and not self._stops(slot, drawn[kept - 1])
        ):
            kept += 1
        return kept

    def _store(self, slot: int, tokens: IntArray, logprobs: FloatArray) -> FinishReason | None:
        """Keeps a sample's tokens; why it ends with them, if it does."""
        table = self._verifying.table
        counts = table.counts[slot] + np.arange(len(tokens))
        slots = np.full(len(tokens), slot)
        self._verifying.accept(slots, counts, tokens, logprobs, self._version)
        self._verifying.settle(slot, len(tokens))
        if self._inbox.keeps_tokens:
            self._note_tokens(slots, tokens, logprobs)
        if self._stops(slot, int(tokens[-1])):
            return "stop"
        return "length" if table.counts[slot] >= table.limits[slot] else None

    def _stops(self, slot: int, token: int) -> bool:
        occupant = self._verifying.table.occupants[slot]
        assert occupant is not None
        params = occupant.active.params
        return token in params.stop_token_ids and not params.ignore_stop

    def _count(self, planned: Verification, num_kept: int) -> None:
        num_running = len(planned.drafts)
        self._stats += RolloutStats(
            num_decode_steps=1,
            num_slot_steps=num_running,
            num_generated_tokens=num_kept,
            num_drafted_tokens=sum(map(len, planned.drafts.values())),
            num_accepted_drafts=num_kept - num_running,
            flops=prefill_flops(self._model.shape, planned.batch),
        )

    def _deliver(self, ended: Ended) -> Sample:
        sample = super()._deliver(ended)
        self._drafter.remember(ended.active.request_id, sample)
        return sample
