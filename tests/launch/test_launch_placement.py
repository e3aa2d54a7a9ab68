"""Which rank a process is, under torchrun, Slurm and alone."""

import pytest

from paceline.config import Config, ConfigError
from paceline.config.schema import ClusterSection
from paceline.launch.placement import find_placement, first_host
from paceline.launch.process_group import check_placement, own_device_index

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "gpu1",
    "MASTER_PORT": "29400",
}
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "41234567",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_NODELIST": "gpu[003-004]",
}


def test_a_process_nobody_placed_stands_alone():
    assert find_placement({}) is None


def test_torchrun_places_a_rank():
    placement = find_placement(TORCHRUN)
    assert placement is not None and placement.launcher == "torchrun"
    assert (placement.rank, placement.world_size) == (5, 8)
    assert (placement.local_rank, placement.local_world_size) == (1, 4)
    assert (placement.master_addr, placement.master_port) == ("gpu1", 29400)


def test_srun_places_a_rank_and_every_task_derives_the_same_meeting_place():
    placement = find_placement(SRUN)
    assert placement is not None and placement.launcher == "slurm"
    assert (placement.rank, placement.world_size, placement.local_rank) == (5, 7, 1)
    assert placement.local_world_size == 3
    assert placement.master_addr == "gpu003"
    other = find_placement(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert other is not None and other.local_world_size == 4
    assert (other.master_addr, other.master_port) == (placement.master_addr, placement.master_port)
    assert 1024 < placement.master_port < 65536


def test_a_batch_script_and_a_step_of_one_task_are_no_group_of_ranks():
    script = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert find_placement(script) is None
    assert find_placement(SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_a_given_meeting_place_wins_over_the_derived_one():
    placement = find_placement(SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert placement is not None and (placement.master_addr, placement.master_port) == ("head", 1234)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[003-006,9],cpu1", "gpu003"),
        ("a1,a2", "a1"),
        ("solo", "solo"),
        ("n[7,9]", "n7"),
        ("r1n[01-02]", "r1n01"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


def test_a_launchers_broken_variable_is_named():
    with pytest.raises(ConfigError, match="LOCAL_RANK"):
        find_placement({name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"})


@pytest.mark.parametrize(("environment", "num_devices"), [(TORCHRUN, 1), (TORCHRUN, 4), ({}, 2)])
def test_another_number_of_ranks_than_the_config_names_is_refused(environment, num_devices):
    config = Config(cluster=ClusterSection(num_devices=num_devices))
    placement = find_placement(environment)
    with pytest.raises(ConfigError, match=r"cluster\.num_devices") as refused:
        check_placement(config, placement)
    assert refused.value.nearest == ("1" if placement is None else "8")


def test_a_rank_takes_the_device_of_its_place_or_the_only_one_slurm_shows_it(monkeypatch):
    shown = {"count": 4}
    monkeypatch.setattr("torch.cuda.device_count", lambda: shown["count"])
    torchrun, slurm = find_placement(TORCHRUN), find_placement(SRUN)
    assert torchrun is not None and slurm is not None
    assert own_device_index("cuda", torchrun) == 1 and own_device_index("cuda", slurm) == 1
    shown["count"] = 1
    assert own_device_index("cuda", slurm) == 0
    with pytest.raises(ConfigError, match="shows 1 cuda device"):
        own_device_index("cuda", torchrun)
