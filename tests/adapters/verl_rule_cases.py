"""For every lint rule: settings that it finds, and settings beside them that it does not."""

from dataclasses import dataclass, field

A, R, F, M = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model"))

# a launch on one node that no rule finds anything about
CLEAN = {
    "algorithm.adv_estimator": "grpo",
    "data.train_files": "train.parquet",
    "data.train_batch_size": "256",
    "data.max_prompt_length": "1024",
    "data.max_response_length": "3072",
    f"{M}.path": "Qwen/Qwen2.5-7B-Instruct",
    f"{M}.use_liger": "True",
    f"{A}.strategy": "fsdp2",
    f"{A}.ppo_mini_batch_size": "64",
    f"{A}.use_dynamic_bsz": "True",
    f"{A}.ppo_max_token_len_per_gpu": "8192",
    f"{A}.use_kl_loss": "True",
    f"{R}.name": "vllm",
    f"{R}.n": "8",
    f"{R}.tensor_model_parallel_size": "1",
    f"{R}.gpu_memory_utilization": "0.6",
    f"{R}.disable_log_stats": "False",
    f"{R}.log_prob_max_token_len_per_gpu": "16384",
    f"{F}.log_prob_max_token_len_per_gpu": "16384",
    "trainer.nnodes": "1",
    "trainer.n_gpus_per_node": "8",
    "trainer.save_freq": "20",
    "trainer.test_freq": "20",
}

FIXED = {
    f"{A}.use_dynamic_bsz": "False",
    f"{A}.ppo_micro_batch_size_per_gpu": "4",
    f"{R}.log_prob_micro_batch_size_per_gpu": "8",
    f"{F}.log_prob_micro_batch_size_per_gpu": "8",
}
CRITIC = {"algorithm.adv_estimator": "gae", "critic.model.use_remove_padding": "True"}
LONG = {
    "data.max_prompt_length": "2048",
    "data.max_response_length": "30720",
    f"{A}.ppo_max_token_len_per_gpu": "65536",
}
MEGATRON = {f"{A}.strategy": "megatron", f"{A}.checkpoint.async_save": "True"}
MOE = {**MEGATRON, f"{M}.path": "Qwen3-30B-A3B", f"{A}.megatron.expert_model_parallel_size": "4"}
OVERRIDE = f"+{A}.megatron.override_transformer_config"
ASCEND = {
    **MEGATRON,
    "trainer.device": "npu",
    f"{OVERRIDE}.use_flash_attn": "True",
    f"{OVERRIDE}.use_fused_rmsnorm": "True",
    f"{OVERRIDE}.use_fused_swiglu": "True",
    f"{OVERRIDE}.apply_rope_fusion": "True",
    f"{OVERRIDE}.use_fused_rotary_pos_emb": "True",
    f"{OVERRIDE}.use_distributed_optimizer": "True",
}
JEMALLOC = {"LD_PRELOAD": "/usr/lib/aarch64-linux-gnu/libjemalloc.so.2"}


@dataclass(frozen=True)
class Case:
    """Changes to CLEAN that the rule finds (`bad`), the setting it names, and changes it has nothing to say about."""

    bad: dict[str, str]
    key: str
    good: dict[str, str] = field(default_factory=dict)
    suggested: str | None = None
    bad_environment: dict[str, str] = field(default_factory=dict)
    good_environment: dict[str, str] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "batch/mini-within-batch": Case(
        {f"{A}.ppo_mini_batch_size": "512"}, f"{A}.ppo_mini_batch_size", suggested="256"
    ),
    "batch/mini-divides-batch": Case(
        {f"{A}.ppo_mini_batch_size": "96"},
        f"{A}.ppo_mini_batch_size",
        {f"{A}.ppo_mini_batch_size": "128"},
        suggested="128",
    ),
    "batch/samples-divide-ranks": Case(
        {"data.train_batch_size": "100", f"{R}.n": "5", f"{A}.ppo_mini_batch_size": "100"},
        "data.train_batch_size",
        {"data.train_batch_size": "100", f"{R}.n": "5", "trainer.n_gpus_per_node": "4"},
        suggested="104",
    ),
    "batch/mini-divides-ranks": Case(
        {f"{A}.ppo_mini_batch_size": "32", f"{R}.n": "5", "trainer.nnodes": "3"},
        f"{A}.ppo_mini_batch_size",
        {f"{A}.ppo_mini_batch_size": "32", f"{R}.n": "5"},
    ),
    "batch/micro-divides-mini": Case(
        {**FIXED, f"{A}.ppo_micro_batch_size_per_gpu": "6"},
        f"{A}.ppo_micro_batch_size_per_gpu",
        FIXED,
        suggested="8",
    ),
    "batch/global-micro-size": Case(
        {f"{A}.ppo_micro_batch_size": "64"},
        f"{A}.ppo_micro_batch_size",
        FIXED,
        suggested=f"{A}.ppo_micro_batch_size_per_gpu=8",
    ),
    "batch/two-micro-sizes": Case(
        {f"{A}.ppo_micro_batch_size": "64", f"{A}.ppo_micro_batch_size_per_gpu": "8"},
        f"{A}.ppo_micro_batch_size",
        {f"{A}.ppo_micro_batch_size": "64"},
    ),
    "batch/no-micro-size": Case(
        {f"{A}.use_dynamic_bsz": "False"}, f"{A}.ppo_micro_batch_size_per_gpu", FIXED
    ),
    "batch/forward-micro": Case(
        {**FIXED, f"{R}.log_prob_micro_batch_size_per_gpu": "4"},
        f"{R}.log_prob_micro_batch_size_per_gpu",
        FIXED,
        suggested="8",
    ),
    "batch/critic-micro": Case(
        {**FIXED, **CRITIC, "critic.ppo_micro_batch_size_per_gpu": "4"},
        "critic.ppo_micro_batch_size_per_gpu",
        {**FIXED, **CRITIC, "critic.ppo_micro_batch_size_per_gpu": "8"},
        suggested="8",
    ),
    "batch/dynamic-off": Case(FIXED, f"{A}.use_dynamic_bsz"),
    "batch/unbalanced-ranks": Case(
        {"trainer.balance_batch": "False", "trainer.use_v1": "False"},
        "trainer.balance_batch",
        {"trainer.balance_batch": "False", "trainer.use_v1": "True"},
    ),
    "batch/separate-async-size": Case(
        {"trainer.v1.trainer_mode": "separate_async", "trainer.v1.separate_async.parameter_sync_step": "8"},
        "data.train_batch_size",
        {"trainer.v1.trainer_mode": "separate_async"},
        suggested="512",
    ),
    "batch/single-sample-groups": Case({f"{R}.n": "1"}, f"{R}.n", {f"{R}.n": "1", **CRITIC}),
    "tokens/training-holds-sample": Case(
        {f"{A}.ppo_max_token_len_per_gpu": "3000"}, f"{A}.ppo_max_token_len_per_gpu", suggested="8192"
    ),
    "tokens/training-twice": Case(
        {f"{A}.ppo_max_token_len_per_gpu": "6000"}, f"{A}.ppo_max_token_len_per_gpu", suggested="8192"
    ),
    "tokens/forward-holds-sample": Case(
        {f"{R}.log_prob_max_token_len_per_gpu": "4000"}, f"{R}.log_prob_max_token_len_per_gpu"
    ),
    "tokens/forward-larger": Case(
        {f"{F}.log_prob_max_token_len_per_gpu": "8192"},
        f"{F}.log_prob_max_token_len_per_gpu",
        suggested="16384",
    ),
    "tokens/critic-twice": Case(
        {**CRITIC, "critic.ppo_max_token_len_per_gpu": "12000"},
        "critic.ppo_max_token_len_per_gpu",
        {**CRITIC, "critic.ppo_max_token_len_per_gpu": "16384"},
        suggested="16384",
    ),
    "tokens/reward-twice": Case(
        {"reward_model.enable": "True", "reward_model.forward_max_token_len_per_gpu": "8192"},
        "reward_model.forward_max_token_len_per_gpu",
        {"reward_model.enable": "True"},
        suggested="16384",
    ),
    "tokens/sample-count-as-limit": Case(
        {"critic.forward_micro_batch_size_per_gpu": "32768"},
        "critic.forward_micro_batch_size_per_gpu",
        {"critic.forward_micro_batch_size_per_gpu": "32"},
    ),
    "tokens/logprob-long-output": Case(
        {**LONG, f"{R}.log_prob_max_token_len_per_gpu": "65536"},
        f"{R}.log_prob_max_token_len_per_gpu",
        {
            **LONG,
            f"{R}.log_prob_max_token_len_per_gpu": "16384",
            f"{F}.log_prob_max_token_len_per_gpu": "16384",
        },
        suggested="32768",
    ),
    "tokens/long-sequence": Case(
        {**LONG, "data.max_prompt_length": "4096"},
        f"{A}.ulysses_sequence_parallel_size",
        {**LONG, "data.max_prompt_length": "4096", f"{A}.fsdp_config.ulysses_sequence_parallel_size": "4"},
        suggested="4",
    ),
    "tokens/model-length": Case(
        {f"{R}.max_model_len": "4000"}, f"{R}.max_model_len", {f"{R}.max_model_len": "4096"}, suggested="4096"
    ),
    "tokens/unchunked-prefill": Case(
        {f"{R}.enable_chunked_prefill": "False", f"{R}.max_num_batched_tokens": "4000"},
        f"{R}.max_num_batched_tokens",
        {f"{R}.enable_chunked_prefill": "False"},
    ),
    "parallel/ulysses-heads": Case(
        {f"{A}.fsdp_config.ulysses_sequence_parallel_size": "8"},
        f"{A}.ulysses_sequence_parallel_size",
        {f"{A}.fsdp_config.ulysses_sequence_parallel_size": "4"},
        suggested="1, 2, 4",
    ),
    "parallel/ulysses-devices": Case(
        {f"{A}.fsdp_config.ulysses_sequence_parallel_size": "4", "trainer.n_gpus_per_node": "6"},
        f"{A}.ulysses_sequence_parallel_size",
        {f"{A}.fsdp_config.ulysses_sequence_parallel_size": "4"},
        suggested="3",
    ),
    "parallel/ulysses-padded": Case(
        {f"{A}.fsdp_config.ulysses_sequence_parallel_size": "4", f"{M}.use_remove_padding": "False"},
        f"{M}.use_remove_padding",
        {f"{A}.fsdp_config.ulysses_sequence_parallel_size": "4"},
    ),
    "parallel/ulysses-old-key": Case(
        {f"{A}.ulysses_sequence_parallel_size": "2"},
        f"{A}.ulysses_sequence_parallel_size",
        {f"{A}.fsdp_config.ulysses_sequence_parallel_size": "2"},
    ),
    "parallel/megatron-devices": Case(
        {**MEGATRON, f"{A}.megatron.tensor_model_parallel_size": "3"},
        f"{A}.megatron.tensor_model_parallel_size",
        {**MEGATRON, f"{A}.megatron.tensor_model_parallel_size": "4"},
    ),
    "parallel/expert-devices": Case(
        {**MOE, f"{A}.megatron.tensor_model_parallel_size": "4"},
        f"{A}.megatron.expert_model_parallel_size",
        {
            **MOE,
            f"{A}.megatron.tensor_model_parallel_size": "4",
            f"{A}.megatron.expert_tensor_parallel_size": "1",
        },
        suggested=f"{A}.megatron.expert_tensor_parallel_size=1",
    ),
    "parallel/context-override": Case(
        {**ASCEND, f"{A}.megatron.context_parallel_size": "2"},
        f"{A}.megatron.override_transformer_config.context_parallel_size",
        {
            **ASCEND,
            f"{A}.megatron.context_parallel_size": "2",
            f"{OVERRIDE}.context_parallel_size": "2",
        },
    ),
    "parallel/expert-tensor": Case(
        {**MOE, f"{A}.megatron.tensor_model_parallel_size": "2"},
        f"{A}.megatron.expert_tensor_parallel_size",
        {
            **MOE,
            f"{A}.megatron.tensor_model_parallel_size": "2",
            f"{A}.megatron.expert_tensor_parallel_size": "1",
        },
        suggested="1",
    ),
    "parallel/expert-interconnect": Case(
        {"trainer.nnodes": "4", f"{R}.expert_parallel_size": "32", f"{R}.data_parallel_size": "32"},
        f"{R}.expert_parallel_size",
        {"trainer.nnodes": "4", f"{R}.expert_parallel_size": "8", f"{R}.data_parallel_size": "8"},
        suggested="8",
    ),
    "parallel/rollout-experts": Case(
        {f"{R}.expert_parallel_size": "8", f"{R}.tensor_model_parallel_size": "4"},
        f"{R}.expert_parallel_size",
        {f"{R}.expert_parallel_size": "8", f"{R}.tensor_model_parallel_size": "8"},
        suggested="4",
    ),
    "parallel/rollout-devices": Case(
        {f"{R}.tensor_model_parallel_size": "3"}, f"{R}.tensor_model_parallel_size"
    ),
    "parallel/rollout-tensor": Case(
        {f"{R}.tensor_model_parallel_size": "4"},
        f"{R}.tensor_model_parallel_size",
        {f"{R}.tensor_model_parallel_size": "4", f"{M}.path": "Qwen/Qwen2.5-32B"},
        suggested="1",
    ),
    "parallel/distributed-optimizer": Case(
        {**MEGATRON, f"{A}.megatron.use_distributed_optimizer": "False"},
        f"{A}.megatron.use_distributed_optimizer",
        MEGATRON,
    ),
    "parallel/pipeline-bubble": Case(
        {**MEGATRON, **FIXED, f"{A}.megatron.pipeline_model_parallel_size": "8", f"{R}.n": "1"},
        f"{A}.megatron.pipeline_model_parallel_size",
        {**MEGATRON, **FIXED, f"{A}.megatron.pipeline_model_parallel_size": "2"},
        suggested="4",
    ),
    "parallel/fsdp2": Case({f"{A}.strategy": "fsdp"}, f"{A}.strategy", suggested="fsdp2"),
    "parallel/forward-prefetch": Case(
        {"trainer.nnodes": "2"},
        f"{A}.fsdp_config.forward_prefetch",
        {"trainer.nnodes": "2", f"{A}.fsdp_config.forward_prefetch": "True"},
    ),
    "parallel/reference-unsplit": Case(
        {
            **LONG,
            "data.max_prompt_length": "4096",
            f"{A}.fsdp_config.ulysses_sequence_parallel_size": "4",
            f"{F}.fsdp_config.ulysses_sequence_parallel_size": "1",
        },
        f"{F}.ulysses_sequence_parallel_size",
        {**LONG, "data.max_prompt_length": "4096", f"{A}.fsdp_config.ulysses_sequence_parallel_size": "4"},
        suggested="4",
    ),
    "memory/share-without-offload": Case(
        {f"{R}.gpu_memory_utilization": "0.8"},
        f"{R}.gpu_memory_utilization",
        {
            f"{R}.gpu_memory_utilization": "0.8",
            f"{A}.fsdp_config.param_offload": "True",
            f"{A}.fsdp_config.optimizer_offload": "True",
        },
    ),
    "memory/share-low": Case({f"{R}.gpu_memory_utilization": "0.3"}, f"{R}.gpu_memory_utilization"),
    "memory/no-checkpointing": Case(
        {f"{M}.enable_gradient_checkpointing": "False"}, f"{M}.enable_gradient_checkpointing"
    ),
    "memory/activation-offload": Case(
        LONG, f"{M}.enable_activation_offload", {**LONG, f"{M}.enable_activation_offload": "True"}
    ),
    "memory/cache-with-checkpointing": Case(
        {f"+{M}.override_config.use_cache": "True"},
        f"{M}.override_config.use_cache",
        {f"+{M}.override_config.use_cache": "False"},
        suggested="False",
    ),
    "memory/engine-keeps-cache": Case(
        {f"{R}.free_cache_engine": "False"},
        f"{R}.free_cache_engine",
        {f"{R}.free_cache_engine": "False", "trainer.v1.trainer_mode": "separate_async"},
    ),
    "memory/entropy-chunking": Case(
        LONG,
        f"{A}.entropy_from_logits_with_chunking",
        {
            **LONG,
            f"{A}.entropy_from_logits_with_chunking": "True",
            f"{F}.entropy_from_logits_with_chunking": "True",
        },
    ),
    "memory/entropy-checkpointing": Case(
        {**LONG, f"{A}.entropy_coeff": "0.01"},
        f"{A}.entropy_checkpointing",
        {**LONG, f"{A}.entropy_coeff": "0.01", f"{A}.entropy_checkpointing": "True"},
    ),
    "memory/chunking-unpacked": Case(
        {f"{A}.entropy_from_logits_with_chunking": "True", f"{M}.use_remove_padding": "False"},
        f"{A}.entropy_from_logits_with_chunking",
        {f"{A}.entropy_from_logits_with_chunking": "True"},
    ),
    "memory/fused-head": Case(LONG, f"{M}.use_fused_kernels", {**LONG, f"{M}.use_fused_kernels": "True"}),
    "memory/graph-sizes-eager": Case(
        {f"{R}.cudagraph_capture_sizes": "[1,2,4,8]", f"{R}.enforce_eager": "True"},
        f"{R}.cudagraph_capture_sizes",
        {f"{R}.cudagraph_capture_sizes": "[1,2,4,8]"},
    ),
    "memory/graph-sizes": Case(
        {f"{R}.gpu_memory_utilization": "0.9"},
        f"{R}.cudagraph_capture_sizes",
        {f"{R}.gpu_memory_utilization": "0.9", f"{R}.cudagraph_capture_sizes": "[1,2,4,8]"},
    ),
    "rollout/batched-tokens": Case(
        {f"{R}.max_num_batched_tokens": "2048"},
        f"{R}.max_num_batched_tokens",
        {f"{R}.max_num_batched_tokens": "2049"},
        suggested="8192",
    ),
    "rollout/eager": Case({f"{R}.enforce_eager": "True"}, f"{R}.enforce_eager", suggested="False"),
    "rollout/log-stats": Case({f"{R}.disable_log_stats": "True"}, f"{R}.disable_log_stats"),
    "rollout/prefix-cache": Case(
        {f"{R}.enable_prefix_caching": "False"},
        f"{R}.enable_prefix_caching",
        {f"{R}.enable_prefix_caching": "False", f"{R}.n": "1"},
    ),
    "rollout/waves": Case(
        {f"{R}.max_num_seqs": "64"}, f"{R}.max_num_seqs", {f"{R}.max_num_seqs": "256"}, suggested="256"
    ),
    "rollout/chunked-prefill": Case({f"{R}.enable_chunked_prefill": "False"}, f"{R}.enable_chunked_prefill"),
    "rollout/attention-backend": Case(
        {},
        "VLLM_ATTENTION_BACKEND",
        bad_environment={"VLLM_ATTENTION_BACKEND": "XFORMERS"},
        good_environment={"VLLM_ATTENTION_BACKEND": "FLASH_ATTN"},
    ),
    "rollout/interleave": Case(
        {"+data.input_interleave": "False", f"+{R}.output_interleave": "True"},
        "data.input_interleave",
        {"+data.input_interleave": "False", f"+{R}.output_interleave": "False"},
    ),
    "padding/unpacked": Case({f"{M}.use_remove_padding": "False"}, f"{M}.use_remove_padding"),
    "padding/widened": Case(
        {**MEGATRON, f"{A}.megatron.use_remove_padding": "False"},
        f"{A}.megatron.pad_bshd_to_minibatch_max",
        MEGATRON,
    ),
    "passes/unused-reference": Case(
        {f"{A}.kl_loss_coef": "0.0"}, f"{A}.use_kl_loss", {f"{A}.kl_loss_coef": "0.01"}
    ),
    "passes/old-logprob": Case(
        {f"{A}.ppo_mini_batch_size": "256"}, "algorithm.rollout_correction.bypass_mode"
    ),
    "algorithm/clip-ratio": Case(
        {f"{A}.clip_ratio": "0.1"},
        f"{A}.clip_ratio",
        {f"{A}.clip_ratio": "0.1", f"{A}.clip_ratio_low": "0.1", f"{A}.clip_ratio_high": "0.1"},
    ),
    "kernels/liger": Case({f"{M}.use_liger": "False"}, f"{M}.use_liger"),
    "ascend/task-queue-graphs": Case(
        ASCEND,
        "TASK_QUEUE_ENABLE",
        ASCEND,
        bad_environment={"TASK_QUEUE_ENABLE": "2"},
        good_environment={"TASK_QUEUE_ENABLE": "1"},
    ),
    "ascend/task-queue-off": Case(
        ASCEND,
        "TASK_QUEUE_ENABLE",
        ASCEND,
        suggested="1",
        bad_environment={"TASK_QUEUE_ENABLE": "0"},
        good_environment={"TASK_QUEUE_ENABLE": "1"},
    ),
    "ascend/jemalloc": Case(ASCEND, "LD_PRELOAD", ASCEND, good_environment=JEMALLOC),
    "ascend/flash-attention": Case(
        {**ASCEND, f"{OVERRIDE}.use_flash_attn": "False"},
        f"{A}.megatron.override_transformer_config.use_flash_attn",
        ASCEND,
    ),
    "ascend/fused-operators": Case(
        {**ASCEND, f"{OVERRIDE}.use_fused_swiglu": "False"},
        f"{A}.megatron.override_transformer_config.use_fused_swiglu",
        ASCEND,
    ),
    "ascend/distributed-optimizer": Case(
        {**ASCEND, f"{OVERRIDE}.use_distributed_optimizer": "False"},
        f"{A}.megatron.override_transformer_config.use_distributed_optimizer",
        ASCEND,
    ),
    "data/workers": Case({"data.dataloader_num_workers": "0"}, "data.dataloader_num_workers", suggested="8"),
    "checkpoint/too-often": Case({"trainer.save_freq": "1"}, "trainer.save_freq"),
    "checkpoint/never": Case({"trainer.save_freq": "-1"}, "trainer.save_freq"),
    "checkpoint/blocking": Case(
        {**MEGATRON, f"{A}.checkpoint.async_save": "False"}, f"{A}.checkpoint.async_save", MEGATRON
    ),
    "eval/too-often": Case({"trainer.test_freq": "1"}, "trainer.test_freq"),
    "logging/erased-by-resume": Case(
        {"trainer.logger": "[console,file]"},
        "trainer.logger",
        {"trainer.logger": "[console,file]", "trainer.resume_mode": "disable"},
    ),
    "launch/set-twice": Case(
        {f"{R}.n": "8", f"++{R}.n": "16"}, f"{R}.n", {f"{R}.n": "8", f"++{R}.n": "8"}, suggested="16"
    ),
    "launch/transfer-queue": Case(
        {"transfer_queue.enable": "False"},
        "transfer_queue.enable",
        {"transfer_queue.enable": "False", "trainer.use_v1": "False"},
    ),
}
