"""verl's metric names, legacy and V1, and what they mean here.

Times are the driver's wall clock. `timing_s/step` includes the weight update and saving, and leaves `testing` out.
"""

STAGES: dict[str, str] = {
    "gen": "rollout",
    "gen_max": "rollout",
    "reward": "reward",
    "old_log_prob": "old_logprob",
    "ref": "ref_logprob",
    "values": "values",
    "adv": "advantage",
    "update_critic": "update_critic",
    "update_actor": "update_actor",
    "update_weights": "sync",
    "save_checkpoint": "checkpoint",
}
"""`timing_s/NAME` to the stage; `switch_*` is `sync` as well."""

AFTER_STEP = {"testing": "eval"}
"""Times that lie after the step, not in it."""

INSIDE_OTHERS = (
    "agent_loop/",
    "generate_sequences",
    "generation_timing/",
    "reshard",
    "rollout_mode",
    "trainer_mode",
)
"""Beginnings of `timing_s/` names whose time is already in `gen`."""

METRICS: dict[str, str] = {
    "critic/score/mean": "reward/mean",
    "critic/rewards/mean": "reward/mean",
    "critic/score/max": "reward/max",
    "critic/rewards/max": "reward/max",
    "actor/pg_loss": "loss/policy",
    "actor/kl_loss": "kl/reference",
    "actor/entropy": "entropy",
    "actor/entropy_loss": "entropy",
    "actor/pg_clipfrac": "clip_fraction",
    "actor/ppo_kl": "kl/old",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "lr",
    "response_length/mean": "response_length/mean",
    "response_length/max": "response_length/max",
    "response_length/min": "response_length/min",
    "response_length/clip_ratio": "truncated_fraction",
    "timing_s/step": "time/step",
    "training/epoch": "epoch",
}
"""verl's name to ours where both mean the same. A later entry for the same name wins over an earlier one."""

MEMORY = {
    "actor/perf/max_memory_allocated_gb": "allocated",
    "perf/max_memory_allocated_gb": "allocated",
    "actor/perf/max_memory_reserved_gb": "reserved",
    "perf/max_memory_reserved_gb": "reserved",
}

MFU = {
    "perf/mfu/actor": "mfu/update_actor",
    "perf/mfu/critic": "mfu/update_critic",
    "perf/mfu/actor_infer": "mfu/old_logprob",
}

ALL_TOKENS_STAGES = ("old_logprob", "ref_logprob", "values", "update_critic", "update_actor")
"""Stages that work on prompts and responses."""

ASYNCHRONOUS_HINTS = ("fully_async/", "timing_s/switch_", "dynamic_resource/")
"""Beginnings of names that only asynchronous trainers log."""

STALENESS = "training/off_policy/"
"""Beginning of names that are above 0 only when samples are older than the weights."""
