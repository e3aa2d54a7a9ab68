"""Which stage a named range belongs to: names that verl, TRL, OpenRLHF, slime and NeMo-RL give their work, and ours."""

import re
from functools import lru_cache

_NAMES: tuple[tuple[str, str], ...] = (
    ("update_critic", r"update_?critic|critic_?update|train_?critic"),
    (
        "update_actor",
        r"update_?(?:actor|policy)|(?:actor|policy)_?update|train_?(?:batch|actor)|training_?step",
    ),
    ("ref_logprob", r"ref(?:erence)?_?(?:compute_?)?log_?prob|compute_?ref"),
    ("old_logprob", r"old_?log_?prob|(?:compute|actor|recompute)_?(?:compute_?)?log_?prob|per_token_logps"),
    ("values", r"compute_?values?|^values$|critic_?(?:forward|infer)"),
    ("rollout", r"generate|rollout|^gen$|sample_batch|decode_step"),
    ("tools", r"tool_?calls?|env(?:ironment)?_?step"),
    ("reward", r"reward|compute_?score|rm_?score|verifier"),
    ("advantage", r"advantage|^adv$"),
    ("sync", r"(?:sync|update|send|broadcast|push)_?weights?|weight_?(?:sync|update)|refit"),
    ("checkpoint", r"save_?checkpoint|checkpoint_?save|save_model|async_save"),
    ("eval", r"validat|evaluat|^testing$"),
    ("data", r"dataloader|next_?batch|load_?batch"),
    ("idle", r"^idle$|^wait(?:ing)?$|wait_for|bubble"),
)


@lru_cache(maxsize=65536)
def stage_of(name: str) -> str | None:
    """The stage of a range of this name; None for ranges inside a stage (`mini_batch0`) and for unknown ones."""
    return next((stage for stage, expression in _NAMES if re.search(expression, name, re.IGNORECASE)), None)
