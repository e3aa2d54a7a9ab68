"""New tokens of many samples, as engines report them, to whole samples with their prefixes and versions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.rollout.protocol import RolloutRequest, SampleEvent, SamplingParams
from paceline.types import FinishReason, Sample


class Decoder(Protocol):
    """The part of a tokenizer that is needed."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str | list[str]:
        """Text of token ids."""
        ...


@dataclass(slots=True)
class _Partial:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)


class OpenRequest:
    """A request whose samples come in token by token."""

    def __init__(self, request_id: int, request: RolloutRequest, decoder: Decoder) -> None:
        self.request_id, self.request, self._decoder = request_id, request, decoder
        self._open = {index: self._begin(index) for index in range(len(request.seeds))}

    def _begin(self, index: int) -> _Partial:
        prefix = self.request.prefixes[index] if self.request.prefixes else None
        if prefix is None:
            return _Partial()
        versions = prefix.token_versions or (prefix.weight_version,) * len(prefix.token_ids)
        return _Partial(list(prefix.token_ids), list(prefix.logprobs), list(versions), list(prefix.loss_mask))

    @property
    def open_samples(self) -> list[int]:
        """Samples that have not ended."""
        return sorted(self._open)

    def restart(self, index: int) -> None:
        """Forgets what came for a sample that has not ended (its prefix stays)."""
        self._open[index] = self._begin(index)

    def extend(
        self,
        index: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        finish: FinishReason | None,
        version: int,
    ) -> SampleEvent | None:
        """Adds tokens sampled under `version`; None where the sample has ended already (a report that comes late)."""
        partial = self._open.get(index)
        if partial is None:
            return None
        partial.tokens += tokens
        partial.logprobs += logprobs
        partial.versions += [version] * len(tokens)
        partial.loss_mask += [1] * len(tokens)
        sample = None
        if finish is not None:
            sample = self._finished(index, partial, finish, version)
            del self._open[index]
        return SampleEvent(self.request_id, index, tuple(tokens), tuple(logprobs), sample)

    def _finished(self, index: int, partial: _Partial, finish: FinishReason, version: int) -> Sample:
        oldest = min(partial.versions, default=version)
        is_mixed = any(version != oldest for version in partial.versions)
        return Sample(
            prompt_id=self.request.prompt.prompt_id,
            sample_index=index,
            token_ids=tuple(partial.tokens),
            logprobs=tuple(partial.logprobs),
            loss_mask=tuple(partial.loss_mask),
            finish_reason=finish,
            weight_version=oldest,
            seed=self.request.seeds[index],
            text=str(self._decoder.decode(partial.tokens, skip_special_tokens=True)),
            token_versions=tuple(partial.versions) if is_mixed else (),
        )


def submit_order(request_id: int, request: RolloutRequest, params: SamplingParams) -> dict[str, object]:
    """A request as an engine's process reads it (`foreign/loop.py`)."""
    prefixes = request.prefixes or (None,) * len(request.seeds)
    return {
        "order": "submit",
        "id": request_id,
        "prompt": list(request.prompt.token_ids),
        "samples": [
            {
                "seed": seed,
                "prefix": list(prefix.token_ids) if prefix else [],
                "ended": _ended(prefix, request.max_new_tokens),
            }
            for seed, prefix in zip(request.seeds, prefixes, strict=True)
        ],
        "max_new_tokens": request.max_new_tokens,
        "temperature": params.temperature,
        "stop": sorted(params.stop_token_ids),
        "ignore_stop": params.ignore_stop,
    }


def _ended(prefix: Sample | None, max_new_tokens: int) -> FinishReason | None:
    """Why a sample has nothing left to do: its prefix is finished, or as long as it may be."""
    if prefix is None:
        return None
    if prefix.finish_reason != "abort":
        return prefix.finish_reason
    return "length" if len(prefix.token_ids) >= max_new_tokens else None
