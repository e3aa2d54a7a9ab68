"""verl's documented defaults for the settings the rules read, and where an unset one takes its value from.

From verl's generated reference configuration (`ppo_trainer` and `ppo_megatron_trainer`, 0.8 to 0.10). A setting that
is not here has no known default: reading it gives None.
"""

from dataclasses import dataclass
from typing import Any

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"


@dataclass(frozen=True, slots=True)
class SameAs:
    """The value of another setting unless set."""

    key: str


DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.dataloader_num_workers": 8,
    "data.prompt_key": "prompt",
    "data.shuffle": True,
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "data.trust_remote_code": False,
    f"{MODEL}.use_remove_padding": True,
    f"{MODEL}.enable_gradient_checkpointing": True,
    f"{MODEL}.enable_activation_offload": False,
    f"{MODEL}.use_liger": False,
    f"{MODEL}.use_fused_kernels": False,
    f"{MODEL}.lora_rank": 0,
    f"{MODEL}.trust_remote_code": False,
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_micro_batch_size": None,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": None,
    f"{ACTOR}.use_dynamic_bsz": False,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.grad_clip": 1.0,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.entropy_coeff": 0,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.ulysses_sequence_parallel_size": 1,
    f"{ACTOR}.entropy_from_logits_with_chunking": False,
    f"{ACTOR}.entropy_checkpointing": False,
    f"{ACTOR}.checkpoint.async_save": False,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.optim.betas": [0.9, 0.999],
    f"{ACTOR}.optim.lr_scheduler_type": "constant",
    f"{ACTOR}.optim.lr_warmup_steps": -1,
    f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.0,
    f"{ACTOR}.fsdp_config.param_offload": False,
    f"{ACTOR}.fsdp_config.optimizer_offload": False,
    f"{ACTOR}.fsdp_config.forward_prefetch": False,
    f"{ACTOR}.fsdp_config.fsdp_size": -1,
    f"{ACTOR}.megatron.param_offload": False,
    f"{ACTOR}.megatron.optimizer_offload": False,
    f"{ACTOR}.megatron.tensor_model_parallel_size": 1,
    f"{ACTOR}.megatron.pipeline_model_parallel_size": 1,
    f"{ACTOR}.megatron.context_parallel_size": 1,
    f"{ACTOR}.megatron.expert_model_parallel_size": 1,
    f"{ACTOR}.megatron.expert_tensor_parallel_size": None,
    f"{ACTOR}.megatron.use_distributed_optimizer": True,
    f"{ACTOR}.megatron.use_remove_padding": True,
    f"{ACTOR}.megatron.pad_bshd_to_minibatch_max": True,
    f"{REF}.log_prob_micro_batch_size": None,
    f"{REF}.log_prob_micro_batch_size_per_gpu": None,
    f"{REF}.log_prob_use_dynamic_bsz": SameAs(f"{ACTOR}.use_dynamic_bsz"),
    f"{REF}.log_prob_max_token_len_per_gpu": SameAs(f"{ACTOR}.ppo_max_token_len_per_gpu"),
    f"{REF}.ulysses_sequence_parallel_size": SameAs(f"{ACTOR}.ulysses_sequence_parallel_size"),
    f"{REF}.entropy_from_logits_with_chunking": False,
    f"{REF}.megatron.context_parallel_size": SameAs(f"{ACTOR}.megatron.context_parallel_size"),
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.name": None,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.top_p": 1,
    f"{ROLLOUT}.top_k": -1,
    f"{ROLLOUT}.ignore_eos": False,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.enforce_eager": False,
    f"{ROLLOUT}.free_cache_engine": True,
    f"{ROLLOUT}.cudagraph_capture_sizes": None,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.data_parallel_size": 1,
    f"{ROLLOUT}.pipeline_model_parallel_size": 1,
    f"{ROLLOUT}.expert_parallel_size": 1,
    f"{ROLLOUT}.max_num_batched_tokens": 8192,
    f"{ROLLOUT}.max_num_seqs": 1024,
    f"{ROLLOUT}.max_model_len": None,
    f"{ROLLOUT}.enable_chunked_prefill": True,
    f"{ROLLOUT}.enable_prefix_caching": True,
    f"{ROLLOUT}.disable_log_stats": True,
    f"{ROLLOUT}.calculate_log_probs": False,
    f"{ROLLOUT}.log_prob_micro_batch_size": None,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": None,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": SameAs(f"{ACTOR}.use_dynamic_bsz"),
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": SameAs(f"{ACTOR}.ppo_max_token_len_per_gpu"),
    f"{ROLLOUT}.val_kwargs.temperature": 0,
    f"{ROLLOUT}.val_kwargs.n": 1,
    "critic.strategy": "fsdp",
    "critic.enable": None,
    "critic.use_dynamic_bsz": SameAs(f"{ACTOR}.use_dynamic_bsz"),
    "critic.ppo_mini_batch_size": SameAs(f"{ACTOR}.ppo_mini_batch_size"),
    "critic.ppo_micro_batch_size": None,
    "critic.ppo_micro_batch_size_per_gpu": None,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "critic.forward_max_token_len_per_gpu": SameAs("critic.ppo_max_token_len_per_gpu"),
    "critic.forward_micro_batch_size": None,
    "critic.forward_micro_batch_size_per_gpu": SameAs("critic.ppo_micro_batch_size_per_gpu"),
    "critic.ulysses_sequence_parallel_size": 1,
    "critic.model.use_remove_padding": False,
    "critic.model.enable_gradient_checkpointing": True,
    "reward_model.enable": False,
    "reward_model.use_dynamic_bsz": SameAs("critic.use_dynamic_bsz"),
    "reward_model.forward_max_token_len_per_gpu": SameAs("critic.forward_max_token_len_per_gpu"),
    "reward_model.micro_batch_size": None,
    "reward_model.micro_batch_size_per_gpu": None,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.rollout_correction.bypass_mode": False,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.device": "cuda",
    "trainer.balance_batch": True,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.total_epochs": 30,
    "trainer.total_training_steps": None,
    "trainer.critic_warmup": 0,
    "trainer.val_before_train": True,
    "trainer.use_v1": True,
    "trainer.v1.trainer_mode": "sync",
    "trainer.v1.separate_async.parameter_sync_step": 4,
    "transfer_queue.enable": False,
}

ALIASES: dict[str, tuple[str, ...]] = {
    f"{ACTOR}.ulysses_sequence_parallel_size": (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",),
    f"{REF}.ulysses_sequence_parallel_size": (f"{REF}.fsdp_config.ulysses_sequence_parallel_size",),
    "critic.ulysses_sequence_parallel_size": (
        "critic.fsdp.ulysses_sequence_parallel_size",
        "critic.model.fsdp_config.ulysses_sequence_parallel_size",
    ),
    f"{ACTOR}.entropy_from_logits_with_chunking": (
        f"{ACTOR}.fsdp_config.entropy_from_logits_with_chunking",
        f"{ACTOR}.megatron.entropy_from_logits_with_chunking",
    ),
    f"{REF}.entropy_from_logits_with_chunking": (
        f"{REF}.fsdp_config.entropy_from_logits_with_chunking",
        f"{REF}.megatron.entropy_from_logits_with_chunking",
    ),
    f"{ACTOR}.entropy_checkpointing": (f"{ACTOR}.fsdp_config.entropy_checkpointing",),
    "trainer.v1.separate_async.parameter_sync_step": (
        "trainer.v1.parameter_sync_step",
        "async_training.trigger_parameter_sync_step",
    ),
    "reward_model.enable": ("reward.reward_model.enable",),
    "reward_model.forward_max_token_len_per_gpu": ("reward.reward_model.forward_max_token_len_per_gpu",),
}
"""Other places where a release of verl keeps the same setting; the first that the launch sets counts."""

ROOTS = frozenset(
    {"actor_rollout_ref", "data", "algorithm", "trainer", "critic", "reward_model", "custom_reward_function"}
)
"""First parts of verl's keys by which a command is known to be a launch of its trainers. Other frameworks have keys
that begin with `actor.` or `rollout.`, so those do not count."""
