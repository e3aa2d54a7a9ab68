"""Which cache the native engine gets, and with it which engine. Decided once per run."""

from typing import Literal

from transformers import PreTrainedTokenizerBase

from paceline.model.loading import CausalModel
from paceline.rollout.native.engine import EngineLimits, NativeEngine
from paceline.rollout.native.paged import PagedEngine, PagedLimits
from paceline.rollout.native.paged.drafts import DraftSettings
from paceline.rollout.native.paged.speculation import SpeculativeEngine
from paceline.telemetry.ledger import Ledger

CacheKind = Literal["auto", "slots", "paged"]


def open_native_engine(
    model: CausalModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: CacheKind,
    limits: EngineLimits,
    ledger: Ledger,
    weights_stay: bool = True,
    drafts: DraftSettings | None = None,
) -> NativeEngine | PagedEngine:
    """The engine for `rollout.cache`: pages on CUDA, slots on a CPU, unless the setting says which.

    `weights_stay`: every parameter keeps its memory between rollouts, so that rounds may be captured. `drafts` need
    pages, and get them.
    """
    if cache == "slots" or (cache == "auto" and model.device.type != "cuda" and drafts is None):
        return NativeEngine(model, tokenizer, limits, ledger)
    paged = PagedLimits(
        limits.max_running,
        limits.prefill_token_budget,
        limits.max_cache_bytes,
        captures=weights_stay and not model.is_exact,
    )
    if drafts is not None:
        return SpeculativeEngine(model, tokenizer, paged, ledger, drafts)
    return PagedEngine(model, tokenizer, paged, ledger)


def engine_features(engine: NativeEngine | PagedEngine) -> dict[str, str | int | bool]:
    """What env.json says about the engine."""
    if isinstance(engine, NativeEngine):
        return {"rollout_cache": "slots", "rollout_attention": "dense"}
    return {
        "rollout_cache": "paged",
        "rollout_attention": engine.runner.attention.name,
        "rollout_page_tokens": engine.runner.page_tokens,
        "rollout_exact": engine.is_exact,
        "rollout_captured": engine.runner.is_captured,
        "rollout_speculation": isinstance(engine, SpeculativeEngine),
    }
