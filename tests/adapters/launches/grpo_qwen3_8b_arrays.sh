#!/usr/bin/env bash
# GRPO on one node: parameter arrays, defaults from the environment, a device switch.
set -xeuo pipefail

DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
DATA_DIR=${DATA_DIR:-$HOME/data/math}
GPUS=${GPUS:-8}
N=${N:-8}
MAX_PROMPT=$((1024 * 1))
MAX_RESPONSE=$((1024 * 4))
BUDGET=$(( (MAX_PROMPT + MAX_RESPONSE) * 2 ))

case "${DEVICE}" in
    gpu) ;;
    npu)
        export TASK_QUEUE_ENABLE=2
        GPUS=16
        ;;
    *)
        echo "unknown device ${DEVICE}" >&2
        exit 1
        ;;
esac

DATA=(
    algorithm.adv_estimator=grpo
    data.train_files="['${DATA_DIR}/train.parquet','${DATA_DIR}/extra.parquet']"
    data.val_files="${DATA_DIR}/test.parquet"
    data.train_batch_size=256
    data.max_prompt_length=${MAX_PROMPT}
    data.max_response_length=${MAX_RESPONSE}
    data.filter_overlong_prompts=True
    data.truncation='error'
)
MODEL=(
    actor_rollout_ref.model.path="${MODEL_PATH}"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.model.use_liger=True
)
ACTOR=(
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64   # four updates per rollout
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${BUDGET}
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n="${N}"
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.disable_log_stats=False
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$((BUDGET * 2))
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=$((BUDGET * 2))
)
TRAINER=(
    trainer.logger='["console","file","tensorboard"]'
    trainer.project_name=math
    trainer.experiment_name="$(basename "${MODEL_PATH}")-n${N}"
    trainer.n_gpus_per_node=${GPUS}
    trainer.nnodes=1
    trainer.save_freq=20
    trainer.test_freq=20
    trainer.total_epochs=3
)
EXTRA=()

PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    "${MODEL[@]}" \
    "${ACTOR[@]}" \
    "${ROLLOUT[@]}" \
    "${TRAINER[@]}" \
    "${EXTRA[@]}" \
    "$@" 2>&1 | tee "logs/$(date +%Y%m%d).log"
