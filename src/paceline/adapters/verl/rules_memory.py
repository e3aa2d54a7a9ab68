"""Rules about device memory."""

from collections.abc import Iterator

from paceline.adapters.verl.defaults import ACTOR, MODEL, REF, ROLLOUT
from paceline.adapters.verl.findings import GUIDE, Hit, Rule
from paceline.adapters.verl.launch import VerlLaunch

LONG_RESPONSE = 8 * 1024
"""Response length from which the entropy's logits are a large part of peak memory."""
CHUNK = 2048
BYTES_PER_LOGIT = 7
"""Of the entropy: 4 (float32) + 2 (autocast) + 1 (softmax output), by the tuning guide."""
GIB = 2**30


def _offload_key(launch: VerlLaunch) -> str:
    return f"{ACTOR}.megatron" if launch.uses_megatron else f"{ACTOR}.fsdp_config"


def memory_share_leaves_room(launch: VerlLaunch) -> Iterator[Hit]:
    key, section = f"{ROLLOUT}.gpu_memory_utilization", _offload_key(launch)
    share = launch.number(key)
    if share is None or share <= 0.7 or launch.is_separate:
        return
    missing = [
        name for name in ("param_offload", "optimizer_offload") if not launch.flag(f"{section}.{name}")
    ]
    if missing:
        why = f"training state stays on the device beside an engine that takes {share:.0%} of it"
        yield Hit(key, share, f"0.5 to 0.7, or {section}.{missing[0]}=True", why)


def memory_share_feeds_the_cache(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{ROLLOUT}.gpu_memory_utilization"
    share = launch.number(key)
    if share is not None and share < 0.5:
        why = "little KV cache: few samples decode at a time, and some are preempted and computed again"
        yield Hit(key, share, 0.6, why)


def activations_are_recomputed(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{MODEL}.enable_gradient_checkpointing"
    if not launch.uses_megatron and launch.get(key) is False:
        why = "all activations are kept; recomputing them makes room for larger micro-batches"
        yield Hit(
            key,
            False,
            True,
            why,
            "about a third more compute in update_actor, for most of the activation memory",
        )


def activations_move_out_for_long_samples(launch: VerlLaunch) -> Iterator[Hit]:
    key, longest = f"{MODEL}.enable_activation_offload", launch.longest
    if not launch.uses_megatron and longest and longest > 16 * 1024 and not launch.flag(key):
        yield Hit(
            key,
            False,
            True,
            f"samples of up to {longest} tokens: with checkpointing it allows larger micro-batches",
        )


def no_generation_cache_while_training(launch: VerlLaunch) -> Iterator[Hit]:
    for section in (MODEL, "critic.model"):
        key = f"{section}.override_config.use_cache"
        if launch.flag(key) and launch.flag(f"{section}.enable_gradient_checkpointing"):
            why = "keys and values are kept for a generation that training does not do, and checkpointing excludes it"
            yield Hit(key, True, False, why)


def engine_frees_its_cache(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{ROLLOUT}.free_cache_engine"
    if launch.get(key) is False and not launch.is_separate:
        why = "the engine keeps its KV cache while the same device trains"
        share = launch.number(f"{ROLLOUT}.gpu_memory_utilization") or 0.5
        yield Hit(key, False, True, why, f"up to {share:.0%} of the device is not there for training")


def _logit_bytes(launch: VerlLaunch, tokens: int) -> str | None:
    model = launch.model
    if model is None or not model.vocabulary:
        return None
    whole, chunk = (size * model.vocabulary * BYTES_PER_LOGIT / GIB for size in (tokens, min(tokens, CHUNK)))
    return f"up to {whole:.1f} GiB at {tokens} tokens becomes {chunk:.1f} GiB at {CHUNK}"


def _is_long(launch: VerlLaunch) -> bool:
    return (launch.integer("data.max_response_length") or 0) >= LONG_RESPONSE


def entropy_is_chunked(launch: VerlLaunch) -> Iterator[Hit]:
    if not _is_long(launch) or launch.flag(f"{MODEL}.use_fused_kernels"):
        return
    for section in (ACTOR, *([REF] if launch.uses_reference else [])):
        key = f"{section}.entropy_from_logits_with_chunking"
        if not launch.flag(key):
            tokens = launch.integer(f"{ACTOR}.ppo_max_token_len_per_gpu") or launch.longest or 0
            why = "the entropy of every token at once holds several copies of tokens x vocabulary"
            yield Hit(key, False, True, why, _logit_bytes(launch, tokens))


def entropy_is_recomputed(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{ACTOR}.entropy_checkpointing"
    computes = (launch.number(f"{ACTOR}.entropy_coeff") or 0) != 0 or launch.flag(
        f"{ACTOR}.calculate_entropy"
    )
    if (
        _is_long(launch)
        and computes
        and not launch.flag(key)
        and not launch.flag(f"{MODEL}.use_fused_kernels")
    ):
        why = "the entropy is in the loss, and gradient checkpointing does not cover it: its logits are kept"
        yield Hit(key, False, True, why)


def chunked_entropy_has_packed_rows(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{ACTOR}.entropy_from_logits_with_chunking"
    if not launch.uses_megatron and launch.flag(key) and not launch.flag(f"{MODEL}.use_remove_padding"):
        why = "has no effect on padded rows: only the packed path cuts the entropy into chunks"
        yield Hit(key, True, f"{MODEL}.use_remove_padding=True", why)


def head_is_fused_for_long_samples(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{MODEL}.use_fused_kernels"
    if _is_long(launch) and not launch.uses_megatron and not launch.flag(key):
        yield Hit(key, False, True, "log-prob and entropy from the hidden states, without the full logits")


def graph_sizes_are_used(launch: VerlLaunch) -> Iterator[Hit]:
    key = f"{ROLLOUT}.cudagraph_capture_sizes"
    if launch.get(key) is not None and launch.flag(f"{ROLLOUT}.enforce_eager"):
        yield Hit(
            key, launch.get(key), f"{ROLLOUT}.enforce_eager=False", "has no effect: no graph is captured"
        )


def graphs_leave_memory(launch: VerlLaunch) -> Iterator[Hit]:
    key, share = f"{ROLLOUT}.cudagraph_capture_sizes", launch.number(f"{ROLLOUT}.gpu_memory_utilization")
    captures = not launch.flag(f"{ROLLOUT}.enforce_eager")
    if captures and share and share > 0.8 and launch.get(key) is None and not launch.is_separate:
        why = "captured graphs stay on the device while the actor trains; fewer sizes leave it more"
        yield Hit(key, None, "[1,2,4,8,16,32]", why)


RULES = (
    Rule("memory/share-without-offload", "warning", "B5", f"{GUIDE}, rollout", memory_share_leaves_room),
    Rule("memory/share-low", "advice", "B11", f"{GUIDE}, rollout", memory_share_feeds_the_cache),
    Rule(
        "memory/no-checkpointing", "warning", "B5", f"{GUIDE}, batch sizes, tip 1", activations_are_recomputed
    ),
    Rule(
        "memory/activation-offload",
        "advice",
        "B5",
        f"{GUIDE}, batch sizes, tip 5",
        activations_move_out_for_long_samples,
    ),
    Rule(
        "memory/cache-with-checkpointing",
        "warning",
        "A9",
        "go-live checklist",
        no_generation_cache_while_training,
    ),
    Rule("memory/engine-keeps-cache", "warning", "B8", "verl#632", engine_frees_its_cache),
    Rule("memory/entropy-chunking", "warning", "B5", f"{GUIDE}, entropy", entropy_is_chunked),
    Rule("memory/entropy-checkpointing", "warning", "B5", f"{GUIDE}, entropy", entropy_is_recomputed),
    Rule(
        "memory/chunking-unpacked",
        "warning",
        "B5",
        "verl entropy on padded rows",
        chunked_entropy_has_packed_rows,
    ),
    Rule(
        "memory/fused-head", "advice", "B7", f"{GUIDE}, Liger (fused kernels)", head_is_fused_for_long_samples
    ),
    Rule("memory/graph-sizes-eager", "warning", "B11", f"{GUIDE}, rollout", graph_sizes_are_used),
    Rule("memory/graph-sizes", "advice", "B11", f"{GUIDE}, rollout", graphs_leave_memory),
)
