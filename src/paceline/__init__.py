"""LLM reinforcement-learning post-training that is fast by construction and explains itself.

import paceline
run = paceline.train("recipe.yaml", train={"lr": 1e-5})
run.report()
"""

from paceline.api import Run, sft, train
from paceline.config import Config, ConfigError, load_config

__all__ = ["Config", "ConfigError", "Run", "load_config", "sft", "train"]
