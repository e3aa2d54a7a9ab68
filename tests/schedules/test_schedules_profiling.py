"""Profiled steps of real runs: cells add up to the ledger's stages, and the step is marked as slower."""

import json
from pathlib import Path

import pytest
from tiny_runs import tiny_sections

from paceline.config import load_config
from paceline.schedules import run_training
from paceline.telemetry.causes.records import UNACCOUNTED, StepCauses, read_causes
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
        assert cells[stage]["queue"] == cells[stage]["data"] == 0
    assert cells["data"]["data"] == pytest.approx(sum(cells["data"].values()), rel=0.01)
    assert cells["reward"]["queue"] > 0.5 * sum(cells["reward"].values())


def test_operators_lie_in_the_stage_that_ran_them(run_dir: Path) -> None:
    """The clock of the trace is the ledger's: reading data runs no operator, the update most of them."""
    (rank,) = read_causes(run_dir)
    compute = {stage: cells["compute"] for stage, cells in rank.steps[1].cells.items()}
    total = sum(compute.values())
    assert compute["data"] == pytest.approx(0, abs=1e-4)
    assert compute["update_actor"] + compute["rollout"] + compute.get("eval", 0.0) > 0.98 * total
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
