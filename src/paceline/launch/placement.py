"""Which rank this process is, from what its launcher left in the environment. Torch-free."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.config.errors import ConfigError

Launcher = Literal["paceline", "torchrun", "slurm"]

REPORTS_VARIABLE = "PACELINE_RANK_REPORTS"
"""Folder that paceline's own launcher reads its ranks' reports from; its presence says who started the rank."""

LAUNCHER_VARIABLE = "PACELINE_LAUNCHER_PID"
"""Process id of paceline's own launcher, the parent of its ranks while it lives."""

_FIRST_PORT, _NUM_PORTS = 20_000, 20_000


@dataclass(frozen=True, slots=True)
class Placement:
    """One rank among all: `rank` of `world_size`, the `local_rank`-th process of its node.

    `master_addr:master_port` is where the ranks meet.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: Launcher


def find_placement(environment: Mapping[str, str]) -> Placement | None:
    """The place a launcher gave this process; None when nobody has started several ranks.

    torchrun (and paceline's own launcher) set RANK, WORLD_SIZE and the rest. Under Slurm a task started by `srun` has
    SLURM_STEP_ID; the batch script itself does not, nor is a step of one task a group of ranks.

    Raises:
        ConfigError: a launcher's variable is missing or no number.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        launcher: Launcher = "paceline" if REPORTS_VARIABLE in environment else "torchrun"
        return Placement(
            rank=_number(environment, "RANK"),
            world_size=_number(environment, "WORLD_SIZE"),
            local_rank=_number(environment, "LOCAL_RANK"),
            local_world_size=_number(environment, "LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]),
            master_addr=environment.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_number(environment, "MASTER_PORT"),
            launcher=launcher,
        )
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        return _slurm_placement(environment)
    return None


def _slurm_placement(environment: Mapping[str, str]) -> Placement | None:
    num_tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    world_size = _number({"SLURM_NTASKS": num_tasks}, "SLURM_NTASKS")
    if world_size == 1:
        return None
    per_node = environment.get(
        "SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", num_tasks)
    )
    job = _number(environment, "SLURM_JOB_ID", "0")
    return Placement(
        rank=_number(environment, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(environment, "SLURM_LOCALID"),
        local_world_size=_tasks_of_node(per_node, _number(environment, "SLURM_NODEID", "0")),
        master_addr=environment.get("MASTER_ADDR") or first_host(_node_list(environment)),
        # every task derives the same port, and two jobs on one node seldom the same
        master_port=_number(environment, "MASTER_PORT", str(_FIRST_PORT + job % _NUM_PORTS)),
        launcher="slurm",
    )


def first_host(node_list: str) -> str:
    """First host of a Slurm node list: `gpu[003-006,9],cpu1` begins with `gpu003`."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", node_list)
    if match is None:
        raise ConfigError("SLURM_JOB_NODELIST", node_list, "names no host; set MASTER_ADDR")
    return match[1] + (match[2] or "")


def _node_list(environment: Mapping[str, str]) -> str:
    return environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))


def _tasks_of_node(tasks_per_node: str, node: int) -> int:
    """Entry `node` of a Slurm count list such as `4(x2),3`."""
    counts: list[int] = []
    for match in re.finditer(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(node, len(counts) - 1)]


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    if text is None or not text.isdecimal():
        rule = "the launcher that started this rank must set it to a number"
        raise ConfigError(name, text, rule, "start the ranks with paceline itself, torchrun or srun")
    return int(text)
