"""Main of a process that runs the native engine on a copy of the trainer's weights: a replica behind a router."""

import socket
from typing import Any

import torch
from safetensors.torch import load_file

from paceline.config.schema import ModelSection
from paceline.model.exact import make_exact
from paceline.model.fused import fuse_for_device
from paceline.model.loading import load_model
from paceline.rollout.foreign.frames import Message
from paceline.rollout.foreign.loop import TokenRow, serve
from paceline.rollout.native.choice import open_native_engine
from paceline.rollout.native.engine import EngineLimits, NativeEngine
from paceline.rollout.native.paged import PagedEngine
from paceline.rollout.native.paged.drafts import DraftSettings
from paceline.rollout.protocol import RolloutRequest, SampleEvent, SamplingParams
from paceline.sync.fingerprint import fingerprint
from paceline.telemetry.ledger import Ledger
from paceline.types import FinishReason, Prompt, Sample


class _NoText:
    """Texts are made where the samples go."""

    def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
        return ""


class NativeWorker:
    """A `WorkerEngine` over the native engine."""

    def __init__(self, engine: NativeEngine | PagedEngine, model: Any) -> None:
        self._engine, self._model = engine, model
        self._orders: dict[int, int] = {}
        self._received: str | None = None
        self._counts = dict.fromkeys(
            (
                "num_prompt_tokens",
                "num_prefill_tokens",
                "num_generated_tokens",
                "num_decode_steps",
                "num_slot_steps",
                "num_preemptions",
                "num_preempted_tokens",
                "num_drafted_tokens",
                "num_accepted_drafts",
            ),
            0,
        )

    @property
    def version(self) -> int:
        """Weight version of the next token."""
        return self._engine.weight_version

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return self._engine.has_work

    def submit(self, order: Message) -> None:
        """Hands a request to the engine; prefixes stand for samples that were aborted elsewhere."""
        prompt = Prompt(str(order["id"]), tuple(order["prompt"]), "")
        prefixes = tuple(_prefix(sample, index) for index, sample in enumerate(order["samples"]))
        request = RolloutRequest(
            prompt,
            tuple(sample["seed"] for sample in order["samples"]),
            order["max_new_tokens"],
            prefixes if any(prefixes) else (),
        )
        params = SamplingParams(order["temperature"], frozenset(order["stop"]), order["ignore_stop"])
        self._orders[self._engine.submit(request, params)] = order["id"]

    def abort(self, request_id: int) -> list[TokenRow]:
        """Ends what has not finished."""
        own = next((mine for mine, theirs in self._orders.items() if theirs == request_id), None)
        return [] if own is None else self._rows(self._engine.abort(own))

    def step(self) -> list[TokenRow]:
        """One round."""
        return self._rows(self._engine.step())

    def _rows(self, events: list[SampleEvent]) -> list[TokenRow]:
        rows = []
        for event in events:
            finish = None if event.finished is None else event.finished.finish_reason
            order = self._orders[event.request_id]
            rows.append([order, event.sample_index, list(event.token_ids), list(event.logprobs), finish])
        return rows

    def call(self, name: str, arguments: Message) -> Any:
        """An order with an answer."""
        if name == "load":
            return self._load(arguments["paths"], arguments["version"])
        if name == "sleep":
            return self._engine.sleep()
        if name == "wake":
            return None  # the cache is taken by the next request
        if name == "stats":
            stats = self._engine.stats
            counts = {name: getattr(stats, name) for name in self._counts}
            return {**counts, "cache_bytes": stats.cache_bytes, "num_slots": stats.num_slots}
        raise ValueError(f"unknown order {name!r}")

    @torch.no_grad()
    def _load(self, paths: list[str], version: int) -> Message:
        own = dict(self._model.module.named_parameters())
        loaded: dict[str, torch.Tensor] = {}
        for path in paths:
            for name, tensor in load_file(path).items():
                if name not in own:
                    raise KeyError(f"the model has no parameter {name}")
                loaded[name] = tensor
        if missing := sorted(set(own) - set(loaded)):
            raise KeyError(f"{len(missing)} parameters were not sent, {missing[0]} among them")
        before, self._received = self._received, fingerprint(loaded.items())
        self._engine.load_weights(loaded.items(), version)
        return {
            "received": self._received,
            "received_before": before,
            "fingerprint": fingerprint(self._model.module.named_parameters()),
        }


def _prefix(sample: Message, index: int) -> Sample | None:
    """The prefix as far as sampling goes: log-probs, masks and versions are kept where the whole is put together."""
    tokens = tuple(sample["prefix"])
    if not tokens and sample["ended"] is None:
        return None
    size = len(tokens)
    ended: FinishReason = sample["ended"] or "abort"
    return Sample("", index, tokens, (0.0,) * size, (1,) * size, ended, 0, sample["seed"], "")


def main(fd: int, setup: Message) -> None:
    """Serves until the run closes its side of socket `fd`. `setup`: `model` (section), `device`, `cache`, `exact`,
    `drafts` (`DraftSettings` or None), `fused`, `limits`, `num_threads`, `seed`."""
    if setup["num_threads"]:
        torch.set_num_threads(setup["num_threads"])
    model = load_model(ModelSection(**setup["model"]), torch.device(setup["device"]), setup["seed"])
    if setup["exact"]:  # the same products as the trainer's
        make_exact(model)
    elif setup["fused"]:
        fuse_for_device(model.module, model.device)
    limits = EngineLimits(**setup["limits"])
    no_text: Any = _NoText()
    drafts = None if setup["drafts"] is None else DraftSettings(**setup["drafts"])
    engine = open_native_engine(model, no_text, setup["cache"], limits, Ledger(), drafts=drafts)
    with socket.socket(fileno=fd) as connection:
        serve(connection, NativeWorker(engine, model), {"engine": "native"})
