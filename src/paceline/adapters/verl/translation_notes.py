"""Why a setting of verl's has no counterpart; "" where none is needed because it is always so here."""

import re

_ALWAYS_SO = ""

_REASONS: tuple[tuple[str, str], ...] = (
    (
        r"use_dynamic_bsz$|trainer\.balance_batch$|free_cache_engine$|use_torch_compile$|hybrid_engine$",
        _ALWAYS_SO,
    ),
    (r"actor_rollout_ref\.actor\.strategy$|critic\.strategy$|use_distributed_optimizer$", _ALWAYS_SO),
    (r"enable_chunked_prefill$|enable_prefix_caching$|calculate_log_probs$|rollout\.mode$", _ALWAYS_SO),
    (r"entropy_from_logits|entropy_checkpointing|use_fused_kernels", _ALWAYS_SO),
    (r"^trainer\.use_v1$|^data\.return_raw_chat$|reward_manager$|async_save$", _ALWAYS_SO),
    (
        r"param_offload|optimizer_offload|grad_offload",
        "optimiser states (train.optimizer_offload) and a reference's weights are offloaded here, trained ones are not",
    ),
    (
        r"^actor_rollout_ref\.rollout\.multi_turn",
        "tools are Python functions in agent.tools here (docs/agents.md); verl's tool files are not read",
    ),
    (
        r"^actor_rollout_ref\.rollout\.agent",
        "an agent's loop is a program of yours here: agent.program (docs/agents.md)",
    ),
    (
        r"^actor_rollout_ref\.rollout\.checkpoint_engine",
        "the native engine shares the trainer's weights: nothing is sent",
    ),
    (
        r"^actor_rollout_ref\.rollout\.",
        "a setting of vLLM or SGLang that section rollout does not have",
    ),
    (r"^reward_model\.|^reward\.", "a reward is a function (task.reward) or a source (reward.sources) here"),
    (r"override_transformer_config|\.megatron\.", "a setting of Megatron's"),
    (r"^critic\.", "the critic shares what is not in section critic with the actor"),
    (r"fsdp_config|wrap_policy", "a setting of FSDP's; sharding is under cluster and train"),
    (r"^global_profiler|\.profiler\.|_profiler", "profiling of this kind is not a setting here"),
    (r"^transfer_queue|^async_training|^trainer\.v1\.|^rollout\.", "belongs to an asynchronous schedule"),
    (r"^ray_kwargs|nccl_timeout|ray_wait", "no Ray here"),
    (r"^data\.(?:image|video|return_multi|custom_cls|sampler|datagen)", "text prompts only"),
    (r"dataloader_num_workers$", "prompts are tokenised once before training"),
    (r"use_liger$", "the actor's kernels are chosen by train.preset"),
    (r"^distillation", "no distillation here"),
    (
        r"logger|log_|rollout_data_dir|validation_data_dir",
        "every step's samples and metrics are written anyway",
    ),
)


def reason_for(key: str) -> str:
    """The reason, or "" when the setting needs no counterpart."""
    return next(
        (reason for pattern, reason in _REASONS if re.search(pattern, key)), "no setting like it here"
    )
