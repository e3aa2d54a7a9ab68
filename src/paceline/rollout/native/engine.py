"""Continuous batching on the trainer's own parameters: no second copy of the weights, no transfer.

One round (`step`): admit waiting groups into free slots and prefill a row of them (a prompt once per group, a prefix
common to all prompts once per row), decode one token for every running sample, let finished samples go. `generate`
submits everything and goes round until nothing is left.

Shapes: R running samples, T tokens of a prefill row, V vocabulary, E hidden size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from paceline.model.loading import CausalModel
from paceline.model.logprob_head import HeadSettings, scaled_logits
from paceline.model.packed_attention import packed_plan
from paceline.rollout.native.cache import DecodePlan, KVLayout, PrefillPlan, SlotCache
from paceline.rollout.native.events import RoundEvents, finished_sample
from paceline.rollout.native.prefill import PrefillRow, cut_rows, plan_row
from paceline.rollout.native.sampling import sample_tokens
from paceline.rollout.native.scheduler import Admission, RunningSample, Scheduler, Submission, start_sample
from paceline.rollout.native.weights import copy_weights
from paceline.rollout.protocol import OnSample, RolloutRequest, RolloutStats, SampleEvent, SamplingParams
from paceline.telemetry.flops import forward_flops
from paceline.telemetry.ledger import Ledger
from paceline.types import FinishReason, Sample

_CAPACITY_STEP = 32
"""Slot capacities are multiples of this many tokens, so that a cache fits the next call too."""

_HEAD_ROWS = 256
"""Rows of logits formed at once while sampling."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Slots decoded together, tokens of one prefill row, and memory for the cache in bytes (None: no bound)."""

    max_running: int
    prefill_token_budget: int
    max_cache_bytes: int | None = None


class NativeEngine:
    """`RolloutEngine` and `StreamingEngine` in the trainer's process; see the module's docstring.

    Weights may change between rounds: running samples then go on from the keys and values of the old ones, and their
    tokens say which version sampled them. To have them recomputed, `abort` and submit again with the aborted samples as
    prefixes.
    """

    def __init__(
        self, model: CausalModel, tokenizer: PreTrainedTokenizerBase, limits: EngineLimits, ledger: Ledger
    ) -> None:
        self.weight_version = 0
        self._model, self._tokenizer, self._limits, self._ledger = model, tokenizer, limits, ledger
        shape = model.shape
        self.layout = KVLayout(
            shape.num_layers, shape.num_kv_heads, shape.head_dim, model.dtype, model.device
        )
        self._cache: SlotCache | None = None
        self._scheduler = Scheduler()
        self._running: list[RunningSample] = []
        self._submissions: dict[int, Submission] = {}
        self._unfinished: dict[int, set[int]] = {}
        self._ids = count()
        self._events = RoundEvents()
        self._stats = RolloutStats()

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
        return bool(self._running or self._scheduler.has_waiting or self._events)

    @property
    def num_running(self) -> int:
        """Samples that hold a slot."""
        return len(self._running)

    def sleep(self) -> None:
        """Frees the KV cache.

        Raises:
            RuntimeError: samples are running in it.
        """
        if self._running:
            raise RuntimeError(f"{len(self._running)} samples run in the cache; abort them before sleeping")
        self._cache = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copies tensors into the model's parameters of those names, and takes the version once all of them fit.

        Raises:
            ValueError: as `copy_weights`; the version stays as it was.
        """
        copy_weights(self._model.module, weights)
        self.weight_version = version

    def generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, on_sample: OnSample | None = None
    ) -> list[tuple[Sample, ...]]:
        """See `RolloutEngine.generate`.

        Raises:
            ValueError: a request does not fit the model's context, or not one slot fits the memory bound.
            RuntimeError: submitted requests are in progress.
        """
        if self.has_work:
            raise RuntimeError("generate needs an engine without work; step until has_work is false")
        self._stats = RolloutStats()
        for request in requests:
            self._capacity(request)  # all or none
        numbers = {self.submit(request, params): index for index, request in enumerate(requests)}
        finished: dict[tuple[int, int], Sample] = {}
        try:
            while self.has_work:
                for event in self._round(max_rows=None):
                    if event.finished is not None:
                        index = numbers[event.request_id]
                        finished[index, event.sample_index] = event.finished
                        if on_sample is not None:
                            on_sample(index, event.finished)
        finally:
            for request_id in numbers:  # nothing to do unless an error ended the loop
                self.abort(request_id)
        return [
            tuple(finished[index, sample] for sample in range(len(request.seeds)))
            for index, request in enumerate(requests)
        ]

    def submit(self, request: RolloutRequest, params: SamplingParams) -> int:
        """See `StreamingEngine.submit`. Samples whose prefix is finished already are handed over by the next round.

        Raises:
            ValueError: the request does not fit the model's context, or one slot of its size the memory bound.
        """
        submission = Submission(next(self._ids), request, params, self._capacity(request))
        self._submissions[submission.request_id] = submission
        self._unfinished[submission.request_id] = set(range(len(request.seeds)))
        waiting = []
        for index in range(len(request.seeds)):
            if reason := _ended(submission, index):
                self._finish(start_sample(submission, index), reason)
            else:
                waiting.append(index)
        self._scheduler.add(submission, tuple(waiting))
        return submission.request_id

    def step(self) -> list[SampleEvent]:
        """See `StreamingEngine.step`."""
        return self._round(max_rows=1)

    @torch.inference_mode()
    def abort(self, request_id: int) -> list[SampleEvent]:
        """See `StreamingEngine.abort`. Nothing where the request is unknown or finished."""
        submission = self._submissions.get(request_id)
        if submission is None:
            return []
        aborted = RoundEvents()
        pending, self._events = self._events, aborted
        self._scheduler.remove(request_id)
        self._retire({id(s): "abort" for s in self._running if s.request_id == request_id})
        # what waited, or was lost in a round that raised
        for index in sorted(self._unfinished.get(request_id, ())):
            self._finish(start_sample(submission, index), "abort")
        self._events = pending
        return [*pending.take(request_id), *aborted.take()]

    @torch.inference_mode()
    def _round(self, max_rows: int | None) -> list[SampleEvent]:
        """Admissions, at most `max_rows` prefill rows, one token for every running sample."""
        self._fit_cache()
        if self._cache is not None:
            cache = self._cache
            admitted = self._scheduler.admit(len(self._running), cache.num_slots, cache.capacity)
            rows = cut_rows(admitted, self._limits.prefill_token_budget)
            self._scheduler.put_back([a for row in rows[max_rows:] for a in row] if max_rows else [])
            if admitted:
                with self._ledger.span("rollout", "prefill"):
                    for row in rows[:max_rows]:
                        self._prefill(row, cache)
            if self._running:
                with self._ledger.span("rollout", "decode"):
                    self._decode(cache)
        return self._events.take()

    def _capacity(self, request: RolloutRequest) -> int:
        """Slot tokens that a sample of `request` needs; refuses what can never fit."""
        prompt = request.prompt
        total = len(prompt.token_ids) + request.max_new_tokens
        if total > self._model.max_context:
            raise ValueError(
                f"prompt {prompt.prompt_id}: {len(prompt.token_ids)} + {request.max_new_tokens} "
                f"tokens exceed the context of {self._model.max_context}"
            )
        capacity = -(-(total - 1) // _CAPACITY_STEP) * _CAPACITY_STEP  # nothing follows the last token
        slot_bytes = capacity * self.layout.bytes_per_token
        if self._limits.max_cache_bytes is not None and slot_bytes > self._limits.max_cache_bytes:
            raise ValueError(
                f"one KV cache slot of {capacity} tokens takes {slot_bytes} bytes, more than the bound of "
                f"{self._limits.max_cache_bytes}"
            )
        return capacity

    def _fit_cache(self) -> None:
        """Takes a cache that fits what waits. While samples run in it, it grows only where the old and the new one
        fit the bound together; else what does not fit waits until they are done."""
        waiting = list(self._scheduler.waiting())
        if not waiting:
            return
        old = self._cache if self._running else None
        capacity = max(submission.capacity for submission, _ in waiting)
        capacity = max(capacity, old.capacity if old else 0)
        wanted = min(self._limits.max_running, len(self._running) + sum(number for _, number in waiting))
        num_slots = min(wanted, self._slots_within_bound(capacity, beside=0))
        cache = self._cache
        if cache is None or cache.capacity < capacity or cache.num_slots < num_slots:
            if old is None:
                self._cache = cache = None  # give the old one back before the new one is taken
                cache = SlotCache(self.layout, num_slots, capacity)
            else:
                # doubling: requests that come one by one do not copy the cache each time
                num_slots = max(num_slots, min(self._limits.max_running, 2 * old.num_slots))
                num_slots = min(num_slots, self._slots_within_bound(capacity, beside=old.num_bytes))
                cache = old.grown(num_slots, capacity) if num_slots >= old.num_slots else old
            self._cache = cache
        self._stats = replace(self._stats, num_slots=cache.num_slots, cache_bytes=cache.num_bytes)

    def _slots_within_bound(self, capacity: int, beside: int) -> int:
        """Slots of `capacity` tokens for which there is memory beside `beside` bytes."""
        bound = self._limits.max_cache_bytes
        if bound is None:
            return self._limits.max_running
        return (bound - beside) // (capacity * self.layout.bytes_per_token)

    def _prefill(self, admissions: Sequence[Admission], cache: SlotCache) -> None:
        """Computes the admitted prompts and prefixes and draws every sample's next token."""
        row = plan_row(admissions, first_slot=len(self._running))
        device = self._model.device
        position_ids_T = torch.from_numpy(row.pack.position_ids).to(device)
        plan = PrefillPlan(packed_plan(row.pack.segments, position_ids_T), cache, row.targets)
        input_ids_T = torch.from_numpy(row.pack.token_ids).to(device)
        hidden_TE = self._model.hidden(input_ids_T[None], position_ids_T[None], plan)
        hidden_RE = hidden_TE[torch.tensor(row.last_tokens, device=device)]
        self._running.extend(row.samples)
        self._count_prefill(row, admissions)
        self._draw(hidden_RE, row.samples)

    def _count_prefill(self, row: PrefillRow, admissions: Sequence[Admission]) -> None:
        self._stats += RolloutStats(
            num_prefill_tokens=len(row.pack.token_ids),
            num_prompt_tokens=sum(len(a.submission.request.prompt.token_ids) for a in admissions),
            flops=forward_flops(self._model.shape, row.lengths, len(row.samples)),
        )

    def _decode(self, cache: SlotCache) -> None:
        """One more token for every running sample."""
        device = self._model.device
        positions = [sample.next_position for sample in self._running]
        input_ids = torch.tensor([[sample.tokens[-1] for sample in self._running]], device=device)
        plan = DecodePlan(cache, positions)
        hidden_RE = self._model.hidden(input_ids, torch.tensor([positions], device=device), plan)
        for sample in self._running:
            sample.next_position += 1
        lengths = [(1, position) for position in positions]
        self._stats += RolloutStats(
            num_decode_steps=1,
            num_slot_steps=len(positions),
            flops=forward_flops(self._model.shape, lengths, len(positions)),
        )
        self._draw(hidden_RE, list(self._running))

    def _draw(self, hidden_RE: Tensor, samples: Sequence[RunningSample]) -> None:
        """Samples a token for each of `samples` and retires those that are finished."""
        temperatures = [self._submissions[s.request_id].params.temperature for s in samples]
        drawn: dict[int, tuple[int, float]] = {}
        for temperature in dict.fromkeys(temperatures):
            rows = [row for row, found in enumerate(temperatures) if found == temperature]
            some_RE = hidden_RE if len(rows) == len(samples) else hidden_RE[rows]
            drawn |= zip(
                rows, self._sampled(some_RE, [samples[row] for row in rows], temperature), strict=True
            )
        ended: dict[int, FinishReason] = {}
        for row, sample in enumerate(samples):
            token, logprob = drawn[row]
            params = self._submissions[sample.request_id].params
            reason = sample.append(token, logprob, params, self.weight_version)
            self._events.add(sample.request_id, sample.sample_index, token, logprob)
            if reason:
                ended[id(sample)] = reason
        self._stats += RolloutStats(num_generated_tokens=len(samples))
        self._retire(ended)

    def _sampled(
        self, hidden_RE: Tensor, samples: Sequence[RunningSample], temperature: float
    ) -> list[tuple[int, float]]:
        """Token and log-prob for each row."""
        head = HeadSettings(temperature or 1.0, self._model.logit_softcap, _HEAD_ROWS)
        drawn: list[tuple[int, float]] = []
        for start in range(0, len(samples), _HEAD_ROWS):
            rows = slice(start, start + _HEAD_ROWS)
            logits_RV = scaled_logits(
                hidden_RE[rows], self._model.head_weight_VE, self._model.head_bias_V, head
            )
            tokens_R, logprobs_R = sample_tokens(
                logits_RV,
                [s.seed for s in samples[rows]],
                [len(s.tokens) for s in samples[rows]],
                greedy=temperature == 0.0,
            )
            drawn += zip(tokens_R.tolist(), logprobs_R.tolist(), strict=True)
        return drawn

    def _retire(self, ended: dict[int, FinishReason]) -> None:
        """Takes finished samples out; the last running samples move into the slots they leave."""
        slot = 0
        while slot < len(self._running):
            reason = ended.get(id(self._running[slot]))
            if reason is None:
                slot += 1
                continue
            self._finish(self._running[slot], reason)
            last = self._running.pop()
            if slot < len(self._running):
                assert self._cache is not None
                self._cache.move(len(self._running), slot, last.next_position)
                self._running[slot] = last

    def _finish(self, running: RunningSample, reason: FinishReason) -> None:
        request_id = running.request_id
        prompt_id = self._submissions[request_id].request.prompt.prompt_id
        text = str(self._tokenizer.decode(running.tokens, skip_special_tokens=True))
        sample = finished_sample(running, prompt_id, reason, self.weight_version, text)
        self._events.finish(request_id, running.sample_index, sample)
        self._unfinished[request_id].discard(running.sample_index)
        if not self._unfinished[request_id]:
            del self._unfinished[request_id], self._submissions[request_id]


def _ended(submission: Submission, index: int) -> FinishReason | None:
    """Why a sample has nothing left to do when it is submitted: its prefix is finished, or as long as it may be."""
    prefix = submission.prefix(index)
    if prefix is None:
        return None
    if prefix.finish_reason != "abort":
        return prefix.finish_reason
    return "length" if len(prefix.token_ids) >= submission.request.max_new_tokens else None
