"""The drivers: one function from a config to a trained model and its records."""

from paceline.schedules.sft import run_sft
from paceline.schedules.training import RunResult, run_training

__all__ = ["RunResult", "run_sft", "run_training"]
