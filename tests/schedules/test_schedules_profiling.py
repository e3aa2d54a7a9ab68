"""Profiled steps of real runs: cells add up to the ledger's stages, and the step is marked as slower."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_runs import tiny_sections

from paceline.config import dump_config, load_config
from paceline.schedules import run_training
from paceline.telemetry.causes.records import UNACCOUNTED, StepCauses, read_causes
from paceline.telemetry.causes.step_profiler import StepProfiler
from paceline.telemetry.device.records import read_device_samples
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import read_metrics
from paceline.telemetry.records import SectionRecord, read_ledger


def assert_adds_up(causes: StepCauses, section: SectionRecord) -> None:
    """The cells of every stage are its self-time, and the stages the step, to 0.1 % of the step."""
    tolerance = section.wall_s / 1000
    ledger = {name: stage.self_s for name, stage in section.stages.items()}
    ledger[UNACCOUNTED] = section.unaccounted_s
    assert {stage for stage, seconds in ledger.items() if seconds} == set(causes.cells)
    for stage, cells in causes.cells.items():
        assert min(cells.values()) >= 0
        assert sum(cells.values()) == pytest.approx(ledger[stage], abs=tolerance)
    assert causes.seconds == pytest.approx(section.wall_s, abs=tolerance)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps, of which the second and the fourth are profiled, the traces kept."""
    folder = tmp_path_factory.mktemp("profiled")
    sections = tiny_sections(
        folder,
        run={"num_steps": 4},
        telemetry={"profile_every": 2, "keep_traces": True},
    )
    return run_training(load_config(sections=sections)).run_dir


def test_the_cells_of_a_profiled_step_add_up_to_the_ledgers_stages(run_dir: Path) -> None:
    (rank,) = read_causes(run_dir)
    (ledger,) = read_ledger(run_dir)
    sections = {section.step: section for section in ledger.steps()}
    assert [step.step for step in rank.steps] == [2, 4]
    for step in rank.steps:
        assert step.basis == "operators" and step.is_complete and step.profiler_s > 0
        assert_adds_up(step, sections[step.step])


def test_stages_that_compute_do_and_stages_that_wait_wait(run_dir: Path) -> None:
    (rank,) = read_causes(run_dir)
    cells = rank.steps[0].cells
    for stage in ("rollout", "update_actor"):
        assert cells[stage]["compute"] > 0 and cells[stage]["memory"] > 0
        assert cells[stage]["queue"] + cells[stage]["data"] == pytest.approx(0, abs=1e-9)
    # the two clocks agree to some 0.1 ms, which is long for a stage that only takes four prompts from a list
    for stage, cause in (("data", "data"), ("reward", "queue")):
        assert cells[stage][cause] == pytest.approx(sum(cells[stage].values()), rel=0.2, abs=2e-3)


def test_operators_lie_in_the_stage_that_ran_them(run_dir: Path) -> None:
    """The clock of the trace is the ledger's: reading data runs no operator, the update most of them."""
    (rank,) = read_causes(run_dir)
    compute = {stage: cells["compute"] for stage, cells in rank.steps[1].cells.items()}
    total = sum(compute.values())
    assert compute["data"] == pytest.approx(0, abs=2e-3)
    assert compute["update_actor"] + compute["rollout"] + compute.get("eval", 0.0) > 0.9 * total
    assert any(kernel.name == "aten::mm" and kernel.is_known for kernel in rank.steps[1].kernels)


def test_profiled_steps_are_marked(run_dir: Path) -> None:
    values = {record.step: record.metrics for record in read_metrics(run_dir)}
    assert {step: metrics.get("profiled") for step, metrics in values.items() if step} == {
        1: None,
        2: 1,
        3: None,
        4: 1,
    }
    assert values[2]["profiler/lost"] == 0 and values[2]["profiler/seconds"] > 0


def test_kept_traces_stay_in_the_runs_folder(run_dir: Path) -> None:
    names = {path.name for path in (run_dir / "profiles").iterdir()}
    assert names == {"step2.rank0.json.gz", "step4.rank0.json.gz"}


def test_waits_of_every_step_are_in_the_ledger(run_dir: Path) -> None:
    (ledger,) = read_ledger(run_dir)
    first = ledger.steps()[0]
    assert first.stages["reward"].cause_s == {"queue": pytest.approx(first.stages["reward"].self_s)}
    assert first.stages["data"].cause_s == {"data": pytest.approx(first.stages["data"].self_s)}
    assert not first.stages["update_actor"].cause_s


def test_a_run_profiles_nothing_unless_asked(tmp_path: Path) -> None:
    run_dir = run_training(load_config(sections=tiny_sections(tmp_path, run={"num_steps": 1}))).run_dir
    assert read_causes(run_dir) == ()
    assert "profiled" not in json.dumps([record.metrics for record in read_metrics(run_dir)])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that paceline starts itself; its last step is profiled."""
    folder = tmp_path_factory.mktemp("two")
    sections = tiny_sections(
        folder,
        run={"num_steps": 2},
        task={"eval_size": 0},
        cluster={"num_devices": 2, "device": "cpu"},
        checkpoint={"every": 0, "save_final": False},
        telemetry={"profile_every": 2, "sample_every_s": 0.2},
    )
    path = folder / "recipe.yaml"
    path.write_text(dump_config(load_config(sections=sections)))
    paths = [*sys.path, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "paceline", "train", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "r"


def test_every_rank_profiles_the_same_step_and_adds_up(two_ranks: Path) -> None:
    ranks, ledgers = read_causes(two_ranks), read_ledger(two_ranks)
    assert [rank.rank for rank in ranks] == [0, 1]
    for rank, ledger in zip(ranks, ledgers, strict=True):
        (step,) = rank.steps
        assert step.step == 2
        assert_adds_up(step, ledger.steps()[-1])


def test_ranks_that_wait_for_one_another_queue_and_exchanges_communicate(two_ranks: Path) -> None:
    for rank in read_causes(two_ranks):
        cells = rank.steps[0].cells
        assert cells["idle"]["queue"] + cells["idle"]["communication"] > 0.5 * sum(cells["idle"].values())
        assert sum(own["communication"] for own in cells.values()) > 0
    metrics = {record.step: record.metrics for record in read_metrics(two_ranks)}
    assert (metrics[2]["profiled"], metrics[2]["profiler/lost"]) == (1, 0)


def test_every_rank_samples_its_host_and_says_why_no_device(two_ranks: Path) -> None:
    devices = read_device_samples(two_ranks)
    assert [device.rank for device in devices] == [0, 1]
    for device in devices:
        assert device.reason == "the run is on the CPU" and device.num_failed == 0
        assert device.samples and all(sample.host is not None for sample in device.samples)
    metrics = {record.step: record.metrics for record in read_metrics(two_ranks)}
    assert metrics[1]["device/samples_failed"] == 0


def test_a_profiler_that_cannot_start_costs_the_causes_and_not_the_step(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as somebody_elses:
        sections = tiny_sections(tmp_path, run={"num_steps": 2}, telemetry={"profile_every": 1})
        run_dir = run_training(load_config(sections=sections)).run_dir
    assert any(event.key == "aten::mm" for event in somebody_elses.key_averages())
    assert read_causes(run_dir) == ()
    values = [record.metrics for record in read_metrics(run_dir) if record.step]
    assert [(one["profiled"], one["profiler/lost"]) for one in values] == [(0, 1), (0, 1)]


def test_a_step_that_fails_stops_its_profiler(tmp_path: Path) -> None:
    ledger = Ledger()
    profiler = StepProfiler(ledger, tmp_path, 0, torch.device("cpu"), every=1)
    with pytest.raises(ZeroDivisionError), profiler.step(1):
        raise ZeroDivisionError
    assert profiler.last is None and read_causes(tmp_path) == ()
    with profiler.step(2), ledger.span("update_actor"):
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert profiler.last is not None and profiler.last.causes is not None
    assert profiler.last.causes.cells["update_actor"]["compute"] > 0


@pytest.mark.gpu
def test_kernels_of_a_gpu_lie_in_the_stage_that_launched_them(tmp_path: Path) -> None:
    """A product that runs for long inside one span, and nothing in the other; both clocks and the marker agree."""
    device = torch.device("cuda")
    left = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    ledger = Ledger()
    profiler = StepProfiler(ledger, tmp_path, 0, device, every=1)
    for step in (1, 2):
        with profiler.step(step):
            with ledger.span("update_actor"):
                for _ in range(50):
                    left @ left
                torch.cuda.synchronize()
            with ledger.span("reward", cause="queue"):
                time.sleep(0.2)
    assert profiler.last is not None and profiler.last.causes is not None
    causes = profiler.last.causes
    assert causes.is_complete and causes.basis == "device"
    assert causes.cells["update_actor"]["compute"] > 0.8 * sum(causes.cells["update_actor"].values())
    assert causes.cells["reward"]["queue"] > 0.95 * sum(causes.cells["reward"].values())
    assert not causes.unknown_kernels()
