"""The names of all settings, and the one somebody probably meant."""

import difflib
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline.config.schema import Config


def _fields(annotation: Any) -> dict[str, FieldInfo]:
    assert issubclass(annotation, BaseModel)
    return annotation.model_fields


FIELDS: dict[str, dict[str, FieldInfo]] = {
    section: _fields(field.annotation) for section, field in Config.model_fields.items()
}
"""Section name to its settings by key."""

SECTIONS: tuple[str, ...] = tuple(FIELDS)

COMMON_NAMES: dict[str, str] = {
    "learning_rate": "train.lr",
    "max_grad_norm": "train.grad_clip",
    "adam_betas": "train.betas",
    "adam_epsilon": "train.eps",
    "lr_scheduler_type": "train.lr_schedule",
    "batch_size": "batch.num_prompts",
    "train_batch_size": "batch.num_prompts",
    "mini_batch_size": "batch.mini_batch_prompts",
    "micro_batch_size": "batch.token_budget",
    "group_size": "batch.num_samples",
    "num_generations": "batch.num_samples",
    "num_iterations": "batch.num_epochs",
    "ppo_epochs": "batch.num_epochs",
    "max_steps": "run.num_steps",
    "total_steps": "run.num_steps",
    "output_dir": "run.dir",
    "save_steps": "checkpoint.every",
    "eval_steps": "run.eval_every",
    "max_tokens": "rollout.max_new_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_prompt_length": "model.max_context",
    "max_model_len": "model.max_context",
    "model_name_or_path": "model.path",
    "dataset": "task.path",
    "dataset_name": "task.path",
    "reward_fn": "task.reward",
    "kl_coef": "algorithm.kl_coefficient",
    "beta": "algorithm.kl_coefficient",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "entropy_coef": "algorithm.entropy_coefficient",
    "adv_estimator": "algorithm.advantage",
    "lam": "algorithm.gae_lambda",
    "cliprange_value": "algorithm.value_clip",
    "whiten_rewards": "algorithm.whiten_advantages",
    "critic_warmup": "critic.pretrain_steps",
    "loss_agg_mode": "algorithm.aggregation",
    "report_to": "telemetry.sinks",
    "num_train_epochs": "sft.num_epochs",
    "max_seq_length": "sft.max_length",
    "assistant_only_loss": "sft.messages_key",
    "per_device_train_batch_size": "batch.num_prompts",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    "num_gpus": "cluster.num_devices",
    "num_workers": "task.reward_workers",
}
"""Names that people bring from elsewhere, and ours for the same thing."""


def nearest_setting(name: str) -> str | None:
    """The setting or section that `name` (dotted or not) comes closest to, or None when nothing is close."""
    section, _, key = name.rpartition(".")
    if not section and (close := difflib.get_close_matches(name, SECTIONS, n=1, cutoff=0.75)):
        return close[0]
    if section in FIELDS and (close := difflib.get_close_matches(key, FIELDS[section], n=1)):
        return f"{section}.{close[0]}"
    elsewhere = [full for full in _all_names() if full.endswith(f".{key}")]
    if elsewhere:
        return " or ".join(elsewhere)
    if close := difflib.get_close_matches(key, COMMON_NAMES, n=1, cutoff=0.75):
        return COMMON_NAMES[close[0]]
    if section and section not in FIELDS:
        guess = difflib.get_close_matches(section, SECTIONS, n=1)
        return f"{guess[0]}.{key}" if guess else None
    close = difflib.get_close_matches(key, [full.partition(".")[2] for full in _all_names()], n=1)
    return next(full for full in _all_names() if full.endswith(f".{close[0]}")) if close else None


def _all_names() -> list[str]:
    return [f"{section}.{key}" for section, fields in FIELDS.items() for key in fields]
