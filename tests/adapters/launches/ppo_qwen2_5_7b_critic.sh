# PPO with a critic on two nodes, fixed micro-batches, deprecated global sizes, a function and a condition.
set -x
model=Qwen/Qwen2.5-7B-Instruct
nodes=2
export VLLM_ATTENTION_BACKEND=XFORMERS
export NCCL_DEBUG=WARN

if [[ $nodes -gt 1 ]]; then
    prefetch=True
else
    prefetch=False
fi

launch() {
    local lr=$1
    shift
    python3 -m verl.trainer.main_ppo \
        algorithm.adv_estimator=gae \
        data.train_files=~/data/gsm8k/train.parquet \
        data.val_files=~/data/gsm8k/test.parquet \
        data.train_batch_size=1000 \
        data.max_prompt_length=512 \
        data.max_response_length=1024 \
        data.dataloader_num_workers=0 \
        actor_rollout_ref.model.path=$model \
        actor_rollout_ref.model.use_remove_padding=False \
        actor_rollout_ref.actor.optim.lr=$lr \
        actor_rollout_ref.actor.ppo_mini_batch_size=256 \
        actor_rollout_ref.actor.ppo_micro_batch_size=64 \
        actor_rollout_ref.actor.fsdp_config.param_offload=False \
        actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
        actor_rollout_ref.actor.fsdp_config.forward_prefetch=$prefetch \
        actor_rollout_ref.rollout.name=vllm \
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
        actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
        actor_rollout_ref.rollout.gpu_memory_utilization=0.85 \
        actor_rollout_ref.rollout.max_num_batched_tokens=2048 \
        critic.optim.lr=1e-5 \
        critic.model.path=$model \
        critic.model.use_remove_padding=False \
        critic.ppo_micro_batch_size_per_gpu=4 \
        critic.forward_micro_batch_size_per_gpu=32768 \
        algorithm.use_kl_in_reward=True \
        algorithm.kl_ctrl.kl_coef=0.001 \
        trainer.balance_batch=False \
        trainer.use_v1=False \
        trainer.n_gpus_per_node=8 \
        trainer.nnodes=$nodes \
        trainer.save_freq=1 \
        trainer.test_freq=1 \
        trainer.logger=['console','wandb'] \
        trainer.total_epochs=15 "$@"
}

launch 1e-6 trainer.experiment_name='ppo run'
