#!/bin/bash
# DAPO with 2k in and 30k out on 16 nodes of Ascend NPUs, Megatron through MindSpeed.
set -xeuo pipefail
source /usr/local/Ascend/ascend-toolkit/set_env.sh
export TASK_QUEUE_ENABLE=2
export HCCL_CONNECT_TIMEOUT=7200
export HCCL_OP_EXPANSION_MODE="AIV"

max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 30))
train_prompt_bsz=384
n_resp_per_prompt=16
train_prompt_mini_bsz=96
WORK_DIR=${WORK_DIR:?set it}
MODEL_PATH=${WORK_DIR}/Qwen3-235B-A22B
train_tp=4
train_pp=8
train_cp=4
train_ep=16
gen_tp=8
gen_ep=128
offload=True
max_len=$((max_prompt_length + max_response_length))

python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer' \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    algorithm.filter_groups.enable=True \
    algorithm.filter_groups.max_num_gen_batches=10 \
    data.train_files="${WORK_DIR}/dapo.parquet" \
    data.val_files="${WORK_DIR}/aime.parquet" \
    data.train_batch_size=${train_prompt_bsz} \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=${max_response_length} \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.ppo_mini_batch_size=${train_prompt_mini_bsz} \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${max_len} \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=${max_len} \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${train_tp} \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=${train_pp} \
    actor_rollout_ref.actor.megatron.context_parallel_size=${train_cp} \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=${train_ep} \
    actor_rollout_ref.actor.megatron.param_offload=${offload} \
    actor_rollout_ref.actor.megatron.optimizer_offload=${offload} \
    actor_rollout_ref.actor.megatron.grad_offload=${offload} \
    +actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn=True \
    ++actor_rollout_ref.ref.megatron.override_transformer_config.use_flash_attn=True \
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_grouped_gemm=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=${n_resp_per_prompt} \
    actor_rollout_ref.rollout.tensor_model_parallel_size=${gen_tp} \
    actor_rollout_ref.rollout.data_parallel_size=16 \
    actor_rollout_ref.rollout.expert_parallel_size=${gen_ep} \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    actor_rollout_ref.rollout.enforce_eager=False \
    actor_rollout_ref.rollout.max_num_batched_tokens=1024 \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_capture_sizes="[8, 16, 32, 64]" \
    reward_model.reward_manager=dapo \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096 \
    ~trainer.rollout_data_dir \
    trainer.device=npu \
    trainer.n_gpus_per_node=16 \
    trainer.nnodes=16 \
    trainer.save_freq=100 \
    trainer.logger=['console']
