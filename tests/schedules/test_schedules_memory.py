"""A run is held against its device before weights are read."""

import pytest
import torch
from tiny_runs import tiny_sections

from paceline.config import ConfigError, load_config
from paceline.schedules import run_training
from paceline.schedules.memory import check_memory

CPU = torch.device("cpu")


def test_a_run_that_does_not_fit_is_refused_before_it_starts(tmp_path):
    config = load_config(None, sections=tiny_sections(tmp_path, cluster={"device_memory_gb": 0.5}))
    with pytest.raises(ConfigError, match="the run needs"):
        run_training(config)
    assert not list((tmp_path / "runs").rglob("metrics.jsonl"))


def test_a_host_is_checked_against_stated_memory_only(tmp_path):
    sections = tiny_sections(tmp_path)
    assert check_memory(load_config(None, sections=sections), CPU, 8) is None
    stated = load_config(None, sections={**sections, "cluster": {"device_memory_gb": 4}})
    found = check_memory(stated, CPU, 8)
    assert found is not None and 0 < found.total < 4e9
    assert found.part("masters") == 0  # float32 weights are their own masters
