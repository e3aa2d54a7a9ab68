"""Torch-free typed configuration: read a recipe, check it, derive every size."""

from paceline.config.arithmetic import (
    BatchArithmetic,
    allowed_new_tokens,
    batch_arithmetic,
    check_context,
    check_lengths,
    describe,
    stated_context,
)
from paceline.config.decisions import Decision, decide_old_logprob
from paceline.config.errors import ConfigError
from paceline.config.loading import (
    Change,
    changed_settings,
    dump_config,
    explain,
    load_config,
    load_sft_config,
)
from paceline.config.schema import Config
from paceline.config.sft import describe_sft, require_command

__all__ = [
    "BatchArithmetic",
    "Change",
    "Config",
    "ConfigError",
    "Decision",
    "allowed_new_tokens",
    "batch_arithmetic",
    "changed_settings",
    "check_context",
    "check_lengths",
    "decide_old_logprob",
    "describe",
    "describe_sft",
    "dump_config",
    "explain",
    "load_config",
    "load_sft_config",
    "require_command",
    "stated_context",
]
