"""Runs a command in this process, or on ranks started for it."""

import os
from collections.abc import Callable
from pathlib import Path

from paceline.config import Config
from paceline.launch.placement import find_placement
from paceline.launch.ranks import run_on_ranks


def run_or_launch(config: Config, command: str, run_here: Callable[[Config], Path]) -> Path:
    """The run's folder. `run_here` is what each rank runs; `command` is its name on the command line.

    Ranks are started when the config asks for several and no launcher has placed this process among them.

    Raises:
        ConfigError: refused, by this process or by the ranks.
        RankFailedError: a rank failed while running.
    """
    if config.cluster.num_devices > 1 and find_placement(os.environ) is None:
        run_on_ranks(config, (command,))
        return Path(config.run.dir) / config.run.name
    return run_here(config)
