"""Causes, devices and reward sources on the page: the records' values, whole steps, and no chart without records."""

import json

import pytest
from report_runs import RunWriter

from paceline.report import write_report
from paceline.report.charts_causes import causes_by_stage, causes_by_step, kernel_table, mean_cells
from paceline.report.charts_device import device_chart, host_chart, points_of
from paceline.report.charts_memory_timeline import memory_timeline
from paceline.report.charts_sources import source_chart
from paceline.report.run_data import load_run
from paceline.report.words import Words
from paceline.telemetry.causes.records import KernelTotal, StepCauses, cause_lines, causes_path
from paceline.telemetry.device.records import (
    DeviceFigures,
    DeviceSample,
    HostFigures,
    device_path,
    sample_line,
    start_line,
)
from paceline.telemetry.records import read_ledger
from paceline.types import CAUSES

WORDS = Words("en")


def write_jsonl(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_causes(run_dir, steps=(10, 20), ranks=(0, 1)):
    """Half of every stage is compute, the rest falls evenly on the other causes."""
    sections = {section.step: section for section in read_ledger(run_dir)[0].steps()}
    for rank in ranks:
        lines = []
        for step in steps:
            cells = {
                name: {cause: stage.self_s * (0.5 if cause == "compute" else 0.1) for cause in CAUSES}
                for name, stage in sections[step].stages.items()
            }
            kernels = (
                KernelTotal("sm90_xmma_gemm_bf16", "compute", "cuBLAS", True, 40, 0.7),
                KernelTotal("mystery_kernel", "compute", "", False, 2, 0.01),
            )
            lines += cause_lines(StepCauses(step, cells, kernels))
        write_jsonl(causes_path(run_dir, rank), lines)


def write_device(run_dir, rank=0, every_s=0.5):
    """Samples from the beginning of the run to its end."""
    process = read_ledger(run_dir)[0].processes[0]
    end = process.sections[-1].end_s
    lines = [start_line(process.unix_s, rank, "nvml", "", every_s)]
    for index in range(int(end / every_s)):
        device = DeviceFigures(
            utilization=0.5 + 0.4 * (index % 2), power_w=500.0, memory_used=(40 + rank) * 2**30
        )
        host = HostFigures(1.0, 0.5, 3.0, 16, 2**31, 2**29, 2**34, 4)
        lines.append(sample_line(DeviceSample(process.unix_s + index * every_s, host, device)))
    write_jsonl(device_path(run_dir, rank), lines)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    overrides = {
        step: {
            "reward/rule/mean": 0.01 * step,
            "reward/judge/mean": 0.5,
            "reward/judge/errors": float(step == 3),
        }
        for step in range(1, 25)
    }
    writer = RunWriter(
        tmp_path_factory.mktemp("causes") / "run",
        num_steps=24,
        device_name="NVIDIA H200",
        metric_overrides=overrides,
    )
    path = writer.write_all()
    write_causes(path)
    write_device(path)
    return path


@pytest.fixture(scope="module")
def run(run_dir):
    return load_run(run_dir)


def test_cells_of_a_stage_add_up_to_it(run):
    steps = [section for section in run.steps if section.step in (10, 20)]
    chart = causes_by_stage(run.causes, WORDS)
    assert [trace.name for trace in chart.figure.data] == [WORDS.cause(cause) for cause in CAUSES]
    stages = list(chart.figure.data[0].y)
    at = stages.index("rollout")
    drawn = sum(trace.x[at] for trace in chart.figure.data)
    assert drawn == pytest.approx(sum(step.stages["rollout"].self_s for step in steps) / 2)


def test_every_profiled_step_is_there_and_its_longest_stages_behind_buttons(run):
    chart = causes_by_step(run.causes, WORDS)
    assert list(chart.figure.data[0].x) == ["10", "20"]
    labels = [variant.label for variant in chart.variants]
    assert labels[0] == "whole step" and "actor update" in labels
    section = next(section for section in run.steps if section.step == 10)
    covered = sum(stage.self_s for stage in section.stages.values())
    assert sum(trace.y[0] for trace in chart.figure.data) == pytest.approx(covered)


def test_one_profiled_step_needs_no_chart_over_steps(run):
    single = [type(rank)(rank.rank, rank.steps[:1]) for rank in run.causes]
    assert causes_by_step(single, WORDS) is None
    assert causes_by_stage(single, WORDS) is not None


def test_a_stage_that_ran_in_one_of_two_steps_is_averaged_over_both():
    half = dict.fromkeys(CAUSES, 1.0)
    cells = mean_cells([StepCauses(1, {"eval": half}), StepCauses(2, {"rollout": half})])
    assert cells["eval"]["compute"] == 0.5


def test_kernels_that_no_pattern_knows_are_listed_and_counted(run):
    table = kernel_table(run.causes, WORDS)
    assert [row.cells[0].text for row in table.rows] == ["sm90_xmma_gemm_bf16", "mystery_kernel"]
    assert table.rows[1].cells[2].tone == "bad"
    assert "No pattern knows 1" in table.caption


def test_device_and_host_figures_that_were_sampled_have_a_chart_each(run):
    device, host = device_chart(run.devices, WORDS), host_chart(run.devices, WORDS)
    assert [variant.label for variant in device.variants] == ["utilisation", "power", "memory used"]
    assert device.variants[1].figure.data[0].y[0] == 500.0
    assert "processor, children" in [variant.label for variant in host.variants]


def test_more_samples_than_points_are_averaged():
    samples = [DeviceSample(float(t), None, DeviceFigures(power_w=float(t % 2))) for t in range(2800)]
    points = points_of(samples, 0.0, lambda sample: sample.device.power_w)
    assert len(points) == 700
    assert all(value == 0.5 for _, value in points)


def test_samples_that_could_not_be_taken_leave_no_point():
    samples = [DeviceSample(0.0, None, None), DeviceSample(1.0, None, DeviceFigures(power_w=7.0))]
    read = lambda sample: None if sample.device is None else sample.device.power_w  # noqa: E731
    assert points_of(samples, 0.0, read) == [(1.0, 7.0)]


def test_memory_stands_over_bands_of_the_stages_that_ran(run):
    chart = memory_timeline(run.main_ledger, run.devices, WORDS)
    assert [trace.name for trace in chart.figure.data] == ["device, used", "device, peak of the stage"]
    assert max(chart.figure.data[0].y) == 40.0
    labels = [part.label for part in chart.legend]
    assert {"rollout", "actor update"} <= set(labels)
    assert len(chart.figure.layout.shapes) >= 4


def test_memory_without_samples_is_the_peak_of_the_stage(run):
    chart = memory_timeline(run.main_ledger, (), WORDS)
    (line,) = chart.figure.data
    assert line.line.shape == "hv"


def test_reward_sources_are_drawn_and_their_failures_listed(run, run_dir):
    chart = source_chart(run, WORDS)
    assert [trace.name for trace in chart.figure.data] == ["rule", "judge"]
    html = write_report(run_dir, "zh").read_text(encoding="utf-8")
    assert "reward/judge/errors" in html


def test_without_records_there_are_no_charts(tmp_path):
    bare = load_run(RunWriter(tmp_path / "bare", num_steps=2).write_all())
    assert causes_by_stage(bare.causes, WORDS) is None
    assert kernel_table(bare.causes, WORDS) is None
    assert device_chart(bare.devices, WORDS) is None and host_chart(bare.devices, WORDS) is None
    assert source_chart(bare, WORDS) is None
