"""The paged engine: host logic over a runner. One round plans from lengths alone, launches, and reads tokens.

With `overlap`, a round is launched before the tokens of the round before it are read, so that the host's work hides
behind the device's. A stop token is then seen one round late: the extra token drawn for that sample is dropped and is
counted nowhere. Samples are the same either way.

Shapes: R rows (samples a token is drawn for).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from paceline.model.loading import CausalModel
from paceline.rollout.native.cache import KVLayout
from paceline.rollout.native.paged.batches import Drawn, DrawRows, FloatArray, IntArray
from paceline.rollout.native.paged.events import Inbox
from paceline.rollout.native.paged.make_runner import RunnerKind, make_runner
from paceline.rollout.native.paged.runner import EagerRunner
from paceline.rollout.native.paged.scheduler import PagedScheduler, Round
from paceline.rollout.native.paged.sizing import pages_for, wanted_pages
from paceline.rollout.native.paged.slots import ActiveRequest, Ended, Progress, ended_already
from paceline.rollout.native.paged.work import decode_flops, prefill_flops
from paceline.rollout.native.weights import copy_weights
from paceline.rollout.protocol import OnSample, RolloutRequest, RolloutStats, SampleEvent, SamplingParams
from paceline.telemetry.ledger import Ledger
from paceline.types import FinishReason, Sample


@dataclass(frozen=True, slots=True)
class PagedLimits:
    """Samples decoded together, tokens of known text computed per round, memory of the cache in bytes (None: what is
    needed) and of a page in tokens (None: what the kernel likes), whether rounds overlap (None: on CUDA), and whether
    rounds may be captured, which needs parameters that keep their memory."""

    max_running: int
    prefill_token_budget: int
    max_cache_bytes: int | None = None
    page_tokens: int | None = None
    overlap: bool | None = None
    captures: bool = True
    runner: RunnerKind = "auto"


@dataclass(frozen=True, slots=True)
class _Launched:
    """Tokens under way: for which rows, by which version."""

    drawn: Drawn
    rows: DrawRows
    serials_R: IntArray
    version: int


class PagedEngine:
    """`RolloutEngine` and `StreamingEngine` on pages; see the module's docstring.

    Weights may change between rounds: running samples go on from the keys and values of the old ones, and their tokens
    say which version sampled them. New requests share no page that the old weights have filled. To have running samples
    recomputed, `abort` and submit again with the aborted samples as prefixes.
    """

    def __init__(
        self, model: CausalModel, tokenizer: PreTrainedTokenizerBase, limits: PagedLimits, ledger: Ledger
    ) -> None:
        self._version = 0
        self._model, self._tokenizer, self._limits, self._ledger = model, tokenizer, limits, ledger
        shape = model.shape
        self.layout = KVLayout(
            shape.num_layers, shape.num_kv_heads, shape.head_dim, model.dtype, model.device
        )
        self.runner: EagerRunner = make_runner(
            model, self.layout, limits.max_running, limits.page_tokens, limits.runner, limits.captures
        )
        self._page_tokens = self.runner.page_tokens
        self._scheduler = PagedScheduler(limits.max_running, self._page_tokens, limits.prefill_token_budget)
        self._overlaps = model.device.type == "cuda" if limits.overlap is None else limits.overlap
        self._launched: list[_Launched] = []
        self._actives: dict[int, ActiveRequest] = {}
        self._ids = count()
        self._inbox = Inbox()
        self._stats = RolloutStats()
        self._needs_sizing = False

    # the protocol -----------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """Tags the tokens drawn from now on. Setting it says that the weights have changed in place."""
        return self._version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        if version != self._version:
            self._scheduler.index.clear()
        self._version = version

    @property
    def stats(self) -> RolloutStats:
        """Counts since the last `generate` began."""
        return self._stats

    def begin_stats(self) -> None:
        """Counts from here on, for work that comes in single rounds."""
        self._stats = RolloutStats()

    @property
    def has_work(self) -> bool:
        """See `StreamingEngine.has_work`. Events that are still to be handed over count."""
        return bool(self._scheduler.has_work or self._launched or self._inbox)

    @property
    def is_exact(self) -> bool:
        """Whether log-probs do not depend on what runs beside a sample (`rollout.exact`)."""
        return self._model.is_exact

    @property
    def num_running(self) -> int:
        """Samples that hold a slot."""
        return self._scheduler.num_running

    @property
    def num_held_pages(self) -> int:
        """Pages that unfinished samples refer to; 0 when there are none."""
        return self._scheduler.pool.num_held

    def submit(self, request: RolloutRequest, params: SamplingParams) -> int:
        """See `StreamingEngine.submit`. Samples whose prefix is finished already are handed over by the next round.

        Raises:
            ValueError: the request does not fit the model's context, or one sample of it the memory bound.
        """
        self._check(request)
        active = ActiveRequest(next(self._ids), request, params, set(range(len(request.seeds))))
        self._actives[active.request_id] = active
        for index, prefix in enumerate(request.prefixes):
            reason = None if prefix is None else ended_already(prefix, request, params)
            if prefix is not None and reason is not None:
                self._deliver(Ended(active, index, Progress.of_sample(prefix), reason))
        self._scheduler.submit(active)
        self._needs_sizing = True
        return active.request_id

    def step(self) -> list[SampleEvent]:
        """See `StreamingEngine.step`. Where rounds overlap, a token is handed over one round after it was launched."""
        self._round()
        return self._inbox.take()

    @torch.inference_mode()
    def abort(self, request_id: int) -> list[SampleEvent]:
        """See `StreamingEngine.abort`. Nothing where the request is unknown or was handed over."""
        if request_id in self._actives:
            self._read_all()
            for ended in self._scheduler.abort(request_id):
                self._deliver(ended)
        return self._inbox.take(request_id)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copies tensors into the model's parameters of those names, and takes the version once all of them fit.

        Raises:
            ValueError: as `copy_weights`; the version stays as it was.
        """
        self._read_all()
        copy_weights(self._model.module, weights)
        self.weight_version = version

    def generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, on_sample: OnSample | None = None
    ) -> list[tuple[Sample, ...]]:
        """See `RolloutEngine.generate`.

        Raises:
            ValueError: a request does not fit the model's context, or one sample of it the memory bound.
            RuntimeError: submitted requests are in progress.
        """
        if self.has_work:
            raise RuntimeError("generate needs an engine without work; step until has_work is false")
        for request in requests:
            self._check(request)  # all or none
        self._stats = RolloutStats()
        finished: dict[tuple[int, int], Sample] = {}
        numbers = {self.submit(request, params): index for index, request in enumerate(requests)}
        self._inbox.keeps_tokens = False
        try:
            while self.has_work:
                self._round()
                for request_id, sample in self._inbox.take_finished():
                    finished[numbers[request_id], sample.sample_index] = sample
                    if on_sample is not None:
                        on_sample(numbers[request_id], sample)
        finally:
            self._inbox.keeps_tokens = True
            for request_id in numbers:  # nothing to do unless an error ended the loop
                self.abort(request_id)
        return [
            tuple(finished[index, sample] for sample in range(len(request.seeds)))
            for index, request in enumerate(requests)
        ]

    def sleep(self) -> None:
        """Gives the cache's memory back. What runs waits with its tokens, and is computed again after `wake`."""
        self._read_all()
        self._scheduler.requeue_all()
        self._scheduler.reset_pool()
        self.runner.release_cache()
        self._needs_sizing = self._scheduler.has_work

    def reserve(self, requests: Sequence[RolloutRequest]) -> None:
        """Takes the cache for requests that are still to come, as `generate` would."""
        self._fit_cache(requests)

    def wake(self) -> None:
        """Takes the cache's memory again for what waits; rounds do so by themselves. After a failure, such as too
        little memory, nothing is held and it may be called again."""
        self._fit_cache()

    # rounds -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _round(self) -> None:
        """Plans and launches a round, and reads the tokens of the one before (overlapping) or of this one."""
        self._fit_cache()
        if self._launched and self._scheduler.needs_preemption():
            self._read_all()  # a preempted sample takes its tokens along
        waiting, self._launched = self._launched, []
        if self._scheduler.has_work:
            self._launch(self._scheduler.plan())
        if self._overlaps:
            launched, self._launched = self._launched, waiting
            self._read_all()
            self._launched = launched
        else:
            self._read_all()

    def _launch(self, planned: Round) -> None:
        if planned.copies:
            self.runner.copy_pages(planned.copies)
        if (decode := planned.decode) is not None:
            with self._ledger.span("rollout", "decode"):
                self._under_way(self.runner.decode(decode), decode.draw)
            self._stats += RolloutStats(
                num_decode_steps=1,
                num_slot_steps=len(decode.positions_R),
                flops=decode_flops(self._model.shape, decode.positions_R),
            )
        if (prefill := planned.prefill) is not None:
            with self._ledger.span("rollout", "prefill"):
                drawn = self.runner.prefill(prefill)
            if drawn is not None:
                self._under_way(drawn, prefill.draw)
            self._stats += RolloutStats(
                num_prefill_tokens=len(prefill.token_ids_T),
                num_prompt_tokens=planned.num_prompt_tokens,
                flops=prefill_flops(self._model.shape, prefill),
            )
        counts = self._scheduler.take_counts()
        self._stats += RolloutStats(
            num_preemptions=counts.num_preemptions, num_preempted_tokens=counts.num_preempted_tokens
        )

    def _under_way(self, drawn: Drawn, rows: DrawRows) -> None:
        serials_R = self._scheduler.table.serials[rows.slots_R]
        self._launched.append(_Launched(drawn, rows, serials_R, self._version))

    def _read_all(self) -> None:
        launched, self._launched = self._launched, []
        if launched:
            with self._ledger.span("rollout", "read tokens"):
                for one in launched:
                    self._read(one)

    def _read(self, launched: _Launched) -> None:
        """Stores a launch's tokens and retires what they end. Rows whose sample has ended since are dropped."""
        table, rows = self._scheduler.table, launched.rows
        tokens_R, logprobs_R = launched.drawn.read()
        lives = table.serials[rows.slots_R] == launched.serials_R
        slots_R, counts_R = rows.slots_R[lives], rows.counts_R[lives]
        tokens_R, logprobs_R = tokens_R[lives], logprobs_R[lives]
        self._scheduler.accept(slots_R, counts_R, tokens_R, logprobs_R, launched.version)
        self._stats += RolloutStats(num_generated_tokens=len(slots_R))
        if self._inbox.keeps_tokens:
            self._note_tokens(slots_R, tokens_R, logprobs_R)
        at_limit = counts_R + 1 >= table.limits[slots_R]
        may_stop = np.isin(tokens_R, self._stop_tokens()) & ~table.ignores_stop[slots_R]
        for row in np.flatnonzero(at_limit | may_stop).tolist():
            slot, token = int(slots_R[row]), int(tokens_R[row])
            stops = bool(may_stop[row]) and token in table.occupant(slot).active.params.stop_token_ids
            if stops or at_limit[row]:
                reason: FinishReason = "stop" if stops else "length"
                self._deliver(self._scheduler.finish(slot, int(counts_R[row]) + 1, reason))

    def _note_tokens(self, slots_R: IntArray, tokens_R: IntArray, logprobs_R: FloatArray) -> None:
        rows = zip(slots_R.tolist(), tokens_R.tolist(), logprobs_R.tolist(), strict=True)
        for slot, token, logprob in rows:
            occupant = self._scheduler.table.occupant(slot)
            self._inbox.add(occupant.active.request_id, occupant.sample_index, token, logprob)

    def _stop_tokens(self) -> IntArray:
        """All tokens that end some unfinished sample."""
        sets = {id(a.params.stop_token_ids): a.params.stop_token_ids for a in self._actives.values()}
        return np.fromiter(set().union(*sets.values()), dtype=np.int64)

    def _deliver(self, ended: Ended) -> Sample:
        active, progress = ended.active, ended.progress
        versions = set(progress.versions) or {self._version}
        sample = Sample(
            prompt_id=active.request.prompt.prompt_id,
            sample_index=ended.sample_index,
            token_ids=tuple(progress.tokens),
            logprobs=tuple(progress.logprobs),
            loss_mask=tuple(progress.masks),
            finish_reason=ended.reason,
            weight_version=min(versions),
            seed=active.request.seeds[ended.sample_index],
            text=str(self._tokenizer.decode(progress.tokens, skip_special_tokens=True)),
            token_versions=tuple(progress.versions) if len(versions) > 1 else (),
        )
        active.unfinished.discard(ended.sample_index)
        if not active.unfinished:
            del self._actives[active.request_id]
        self._inbox.finish(active.request_id, sample)
        return sample

    # memory -----------------------------------------------------------------------------------------------------

    def _check(self, request: RolloutRequest) -> None:
        prompt = request.prompt
        total = len(prompt.token_ids) + request.max_new_tokens
        if total > self._model.max_context:
            raise ValueError(
                f"prompt {prompt.prompt_id}: {len(prompt.token_ids)} + {request.max_new_tokens} "
                f"tokens exceed the context of {self._model.max_context}"
            )
        needed, bound = pages_for(total - 1, self._page_tokens) + 1, self._max_pages()
        if bound is not None and needed > bound:
            raise ValueError(
                f"one sample of {total} tokens takes {needed} pages of {self._page_bytes} bytes, more than the "
                f"bound of {self._limits.max_cache_bytes} on the KV cache"
            )

    @property
    def _page_bytes(self) -> int:
        return self._page_tokens * self.layout.bytes_per_token

    def _longest(self, requests: Iterable[RolloutRequest]) -> int:
        """Pages of the longest sample there is."""
        longest = max((len(r.prompt.token_ids) + r.max_new_tokens - 1 for r in requests), default=1)
        return pages_for(longest, self._page_tokens)

    def _max_pages(self) -> int | None:
        """Pages within the bound, the scratch page included."""
        bound = self._limits.max_cache_bytes
        return None if bound is None else bound // self._page_bytes

    def _most_pages(self) -> int | None:
        """Pages that the cache may have: within its bound, or else within the memory that is free; None: any number."""
        if (bound := self._max_pages()) is not None:
            return bound
        room = self.runner.room_bytes()
        return None if room is None else max(self.runner.num_pages, room // self._page_bytes)

    def _fit_cache(self, expected: Sequence[RolloutRequest] = ()) -> None:
        """Takes pages for what was submitted since, within the bound. What finds none free waits or is preempted."""
        if not self._needs_sizing and not expected:
            return
        requests = [*(active.request for active in self._actives.values()), *expected]
        held, most, is_empty = self.runner.num_pages, self._most_pages(), not self._scheduler.pool.num_held
        wanted = 1 + wanted_pages(requests, self._page_tokens, self._limits.max_running)
        if held and wanted > held:
            wanted = max(wanted, 2 * held)  # requests that come one by one do not copy the cache each time
        wanted = wanted if most is None else min(wanted, most)
        if wanted > held and is_empty:
            self.runner.release_cache()  # give the old one back before the new one is taken
            self._scheduler.reset_pool()
        elif most is not None:
            wanted = min(wanted, most - held)  # both are there while pages move: else wait until all is done
        num_pages = max(held, wanted)
        self.runner.take_cache(num_pages, self._longest(requests))  # may fail: then nothing else has changed
        self._scheduler.pool.grow(num_pages)
        may_grow_later = num_pages == held != most and not is_empty
        self._needs_sizing = may_grow_later and self._scheduler.has_waiting
        self._scheduler.may_grow = self._needs_sizing
        self._stats = replace(
            self._stats, num_slots=self._limits.max_running, cache_bytes=self.runner.cache_bytes
        )
