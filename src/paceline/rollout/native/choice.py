"""Which cache the native engine gets, and with it which engine. Decided once per run."""

from typing import Literal

from transformers import PreTrainedTokenizerBase

from paceline.model.loading import CausalModel
from paceline.rollout.native.engine import EngineLimits, NativeEngine
from paceline.rollout.native.paged import PagedEngine, PagedLimits
from paceline.telemetry.ledger import Ledger

CacheKind = Literal["auto", "slots", "paged"]


def open_native_engine(
    model: CausalModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: CacheKind,
    limits: EngineLimits,
    ledger: Ledger,
    weights_stay: bool = True,
) -> NativeEngine | PagedEngine:
    """The engine for `rollout.cache`: pages on CUDA, slots on a CPU, unless the setting says which.

    `weights_stay`: every parameter keeps its memory between rollouts, so that rounds may be captured.
    """
    if cache == "slots" or (cache == "auto" and model.device.type != "cuda"):
        return NativeEngine(model, tokenizer, limits, ledger)
    paged = PagedLimits(
        limits.max_running,
        limits.prefill_token_budget,
        limits.max_cache_bytes,
        captures=weights_stay and not model.is_exact,
    )
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
    }
