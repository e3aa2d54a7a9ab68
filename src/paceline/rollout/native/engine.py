"""Continuous batching on the trainer's own parameters: no second copy of the weights, no transfer.

One `generate` call: admit waiting groups into free slots and prefill them (a prompt once per group, a prefix common
to all prompts once per row), decode one token for every running sample, let finished samples go, repeat.

Shapes: R running samples, V vocabulary, E hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from paceline.batching.prefixes import PackItem, build_pack
from paceline.model.loading import CausalModel
from paceline.model.logprob_head import HeadSettings, scaled_logits
from paceline.model.packed_attention import packed_plan
from paceline.rollout.native.cache import DecodePlan, KVLayout, PrefillPlan, PrefillTarget, SlotCache
from paceline.rollout.native.sampling import sample_tokens
from paceline.rollout.native.scheduler import Admission, RunningSample, Scheduler
from paceline.rollout.protocol import OnSample, RolloutRequest, RolloutStats, SamplingParams
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
    """`RolloutEngine` in the trainer's process; see the module's docstring."""

    def __init__(
        self, model: CausalModel, tokenizer: PreTrainedTokenizerBase, limits: EngineLimits, ledger: Ledger
    ) -> None:
        self.weight_version = 0
        self._model, self._tokenizer, self._limits, self._ledger = model, tokenizer, limits, ledger
        shape = model.shape
        self._layout = KVLayout(
            shape.num_layers, shape.num_kv_heads, shape.head_dim, model.dtype, model.device
        )
        self._cache: SlotCache | None = None
        self._running: list[RunningSample] = []
        self._stats = RolloutStats()

    @property
    def stats(self) -> RolloutStats:
        """Counts of the last `generate`."""
        return self._stats

    def sleep(self) -> None:
        """Frees the KV cache."""
        self._cache = None

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, on_sample: OnSample | None = None
    ) -> list[tuple[Sample, ...]]:
        """See `RolloutEngine.generate`.

        Raises:
            ValueError: a request does not fit the model's context, or not one slot fits the memory bound.
        """
        if not requests:  # a rank without a share of the samples
            self._stats = RolloutStats()
            return []
        self._check(requests)
        cache = self._take_cache(requests)
        run = _Run(self, requests, params, on_sample, cache)
        scheduler = Scheduler(requests, cache.num_slots)
        self._stats = RolloutStats(num_slots=cache.num_slots, cache_bytes=cache.num_bytes)
        while scheduler.has_waiting or run.running:
            if admitted := scheduler.admit(len(run.running)):
                with self._ledger.span("rollout", "prefill"):
                    run.prefill(admitted)
            if run.running:
                with self._ledger.span("rollout", "decode"):
                    run.decode()
        return run.results()

    def _check(self, requests: Sequence[RolloutRequest]) -> None:
        for request in requests:
            total = len(request.prompt.token_ids) + request.max_new_tokens
            if total > self._model.max_context:
                raise ValueError(
                    f"prompt {request.prompt.prompt_id}: {len(request.prompt.token_ids)} + {request.max_new_tokens} "
                    f"tokens exceed the context of {self._model.max_context}"
                )

    def _take_cache(self, requests: Sequence[RolloutRequest]) -> SlotCache:
        # the last token's keys are never written: nothing follows it
        longest = max(len(r.prompt.token_ids) + r.max_new_tokens - 1 for r in requests)
        capacity = -(-longest // _CAPACITY_STEP) * _CAPACITY_STEP
        num_slots = min(self._limits.max_running, sum(len(r.seeds) for r in requests))
        if self._limits.max_cache_bytes is not None:
            slot_bytes = capacity * self._layout.bytes_per_token
            num_slots = min(num_slots, self._limits.max_cache_bytes // slot_bytes)
            if num_slots < 1:
                raise ValueError(
                    f"one KV cache slot of {capacity} tokens takes {slot_bytes} bytes, more than the bound of "
                    f"{self._limits.max_cache_bytes}"
                )
        if self._cache is None or self._cache.capacity < capacity or self._cache.num_slots < num_slots:
            self._cache = None  # give the old one back before the new one is taken
            self._cache = SlotCache(self._layout, num_slots, capacity)
        return self._cache


class _Run:
    """State of one `generate` call."""

    def __init__(
        self,
        engine: NativeEngine,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        on_sample: OnSample | None,
        cache: SlotCache,
    ) -> None:
        self._engine, self._model = engine, engine._model
        self._requests, self._params, self._on_sample, self._cache = requests, params, on_sample, cache
        self.running: list[RunningSample] = []
        self._finished: dict[tuple[int, int], Sample] = {}
        self._head = HeadSettings(params.temperature or 1.0, self._model.logit_softcap, _HEAD_ROWS)

    def prefill(self, admitted: Sequence[Admission]) -> None:
        """Computes the prompts of the admitted groups and draws every sample's first token."""
        for row in self._rows(admitted):
            self._prefill_row(row)

    def _rows(self, admitted: Sequence[Admission]) -> list[list[Admission]]:
        """Cuts admissions into rows of at most the prefill budget (a longer prompt gets a row of its own)."""
        rows: list[list[Admission]] = []
        used = 0
        for admission in admitted:
            length = len(self._requests[admission.request_index].prompt.token_ids)
            if not rows or used + length > self._engine._limits.prefill_token_budget:
                rows.append([])
                used = 0
            rows[-1].append(admission)
            used += length
        return rows

    def _prefill_row(self, row: Sequence[Admission]) -> None:
        prompts = [self._requests[a.request_index].prompt.token_ids for a in row]
        pack = build_pack([PackItem(prompt, ()) for prompt in prompts], share_prefixes=True)
        device = self._model.device
        position_ids = torch.from_numpy(pack.position_ids).to(device)
        targets, last_tokens, samples = [], [], []
        header = pack.segments[0] if pack.segments[0].kind == "header" else None
        first_slot = len(self.running)
        bodies = [segment for segment in pack.segments if segment.kind != "header"]
        for admission, segment in zip(row, bodies, strict=True):
            last_slot = first_slot + len(admission.sample_indices)
            offset = header.length if header else 0
            targets.append(PrefillTarget(segment.start, segment.length, offset, first_slot, last_slot))
            last_tokens.append(segment.start + segment.length - 1)
            samples.append([self._new_sample(admission.request_index, i) for i in admission.sample_indices])
            first_slot = last_slot
        if header:
            targets.append(PrefillTarget(header.start, header.length, 0, len(self.running), first_slot))
        plan = PrefillPlan(packed_plan(pack.segments, position_ids), self._cache, targets)
        input_ids = torch.from_numpy(pack.token_ids).to(device)
        hidden_TE = self._model.hidden(input_ids[None], position_ids[None], plan)
        counts = torch.tensor([len(group) for group in samples], device=device)
        hidden_RE = hidden_TE[torch.tensor(last_tokens, device=device).repeat_interleave(counts)]
        new = [sample for group in samples for sample in group]
        self.running.extend(new)
        lengths = [(segment.length, int(pack.position_ids[segment.start])) for segment in pack.segments]
        self._count(
            num_prefill_tokens=len(pack.token_ids),
            num_prompt_tokens=sum(map(len, prompts)),
            flops=forward_flops(self._model.shape, lengths, len(new)),
        )
        self._draw(hidden_RE, new)

    def _new_sample(self, request_index: int, sample_index: int) -> RunningSample:
        request = self._requests[request_index]
        return RunningSample(
            request_index,
            sample_index,
            request.seeds[sample_index],
            request.max_new_tokens,
            len(request.prompt.token_ids),
        )

    def decode(self) -> None:
        """One more token for every running sample."""
        device = self._model.device
        positions = [sample.next_position for sample in self.running]
        input_ids = torch.tensor([[sample.tokens[-1] for sample in self.running]], device=device)
        plan = DecodePlan(self._cache, positions)
        hidden_RE = self._model.hidden(input_ids, torch.tensor([positions], device=device), plan)
        for sample in self.running:
            sample.next_position += 1
        flops = forward_flops(self._model.shape, [(1, position) for position in positions], len(positions))
        self._count(num_decode_steps=1, num_slot_steps=len(self.running), flops=flops)
        self._draw(hidden_RE, list(self.running))

    def _draw(self, hidden_RE: Tensor, samples: Sequence[RunningSample]) -> None:
        """Samples a token for each of `samples` and retires those that are finished."""
        tokens, logprobs = [], []
        for start in range(0, len(samples), _HEAD_ROWS):
            rows = slice(start, start + _HEAD_ROWS)
            logits_RV = scaled_logits(
                hidden_RE[rows], self._model.head_weight_VE, self._model.head_bias_V, self._head
            )
            tokens_R, logprobs_R = sample_tokens(
                logits_RV,
                [s.seed for s in samples[rows]],
                [len(s.tokens) for s in samples[rows]],
                greedy=self._params.temperature == 0.0,
            )
            tokens += tokens_R.tolist()
            logprobs += logprobs_R.tolist()
        ended: dict[int, FinishReason] = {}
        for sample, token, logprob in zip(samples, tokens, logprobs, strict=True):
            if reason := sample.append(token, logprob, self._params):
                ended[id(sample)] = reason
        self._count(num_generated_tokens=len(samples))
        self._retire(ended)

    def _retire(self, ended: dict[int, FinishReason]) -> None:
        """Takes finished samples out; the last running samples move into the slots they leave."""
        slot = 0
        while slot < len(self.running):
            reason = ended.get(id(self.running[slot]))
            if reason is None:
                slot += 1
                continue
            self._finish(self.running[slot], reason)
            last = self.running.pop()
            if slot < len(self.running):
                self._cache.move(len(self.running), slot, last.next_position)
                self.running[slot] = last

    def _finish(self, running: RunningSample, reason: FinishReason) -> None:
        request = self._requests[running.request_index]
        sample = Sample(
            prompt_id=request.prompt.prompt_id,
            sample_index=running.sample_index,
            token_ids=tuple(running.tokens),
            logprobs=tuple(running.logprobs),
            loss_mask=(1,) * len(running.tokens),
            finish_reason=reason,
            weight_version=self._engine.weight_version,
            seed=running.seed,
            text=str(self._engine._tokenizer.decode(running.tokens, skip_special_tokens=True)),
        )
        self._finished[running.request_index, running.sample_index] = sample
        if self._on_sample is not None:
            self._on_sample(running.request_index, sample)

    def results(self) -> list[tuple[Sample, ...]]:
        """Finished samples by request, in order of their seeds."""
        return [
            tuple(self._finished[index, sample] for sample in range(len(request.seeds)))
            for index, request in enumerate(self._requests)
        ]

    def _count(self, **counts: float) -> None:
        stats = self._engine._stats
        self._engine._stats = replace(
            stats, **{name: getattr(stats, name) + value for name, value in counts.items()}
        )
