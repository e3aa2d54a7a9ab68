# One launch per model and learning rate; the last settings fall off because of the comment.
for model in Qwen2.5-0.5B-Instruct Qwen2.5-1.5B-Instruct; do
  for lr in 1e-6 3e-6; do
    bash -c "python3 -m verl.trainer.main_ppo data.train_files=/d/a.parquet data.train_batch_size=64 \
      data.max_prompt_length=256 data.max_response_length=256 algorithm.adv_estimator=grpo \
      actor_rollout_ref.model.path=/models/$model actor_rollout_ref.actor.optim.lr=$lr \
      actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
      actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 actor_rollout_ref.rollout.n=4 \
      trainer.n_gpus_per_node=1"
  done
done

python3 -m verl.trainer.main_ppo \
  data.train_files=/d/a.parquet \
  data.train_batch_size=64 \
  # trainer.total_epochs=2 \
  trainer.n_gpus_per_node=2 \
  trainer.nnodes=1
