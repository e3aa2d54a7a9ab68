# V1 with pools of their own, submitted to a cluster.
RAY_ADDRESS=${RAY_ADDRESS:-http://127.0.0.1:8265}
sync_step=4
mini=32

ray job submit --address="${RAY_ADDRESS}" --no-wait \
    --runtime-env-json='{"env_vars": {"VLLM_USE_V1": "1", "NCCL_CUMEM_ENABLE": "0"}}' \
    -- \
    python3 -m verl.trainer.main_ppo \
    --config-name=ppo_trainer \
    algorithm.adv_estimator=rloo \
    algorithm.rollout_correction.rollout_is=token \
    algorithm.rollout_correction.bypass_mode=True \
    data.train_files=/data/train.parquet data.val_files=/data/test.parquet \
    data.train_batch_size=$((sync_step * mini)) \
    data.max_prompt_length=2048 data.max_response_length=40960 \
    actor_rollout_ref.model.path=/models/Qwen2.5-32B \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=$mini \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=22528 \
    actor_rollout_ref.actor.entropy_from_logits_with_chunking=True \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    actor_rollout_ref.rollout.checkpoint_engine.backend=nccl \
    trainer.v1.trainer_mode=separate_async \
    trainer.v1.separate_async.parameter_sync_step=$sync_step \
    trainer.v1.sampler.max_off_policy_threshold=8 \
    trainer.nnodes=4 trainer.n_gpus_per_node=8 \
    +ray_kwargs.ray_init.runtime_env.env_vars.CUDA_DEVICE_MAX_CONNECTIONS=\'1\' \
    trainer.save_freq=50
