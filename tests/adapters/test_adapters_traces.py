"""Torch-profiler traces as a run: stages from named ranges, six cells that add up, unknown kernels in sight."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch_traces import GEMM, STRANGE, TraceWriter, training_step

from paceline.adapters.traces.importing import ProfiledRun, import_traces, write_profile
from paceline.cli import main
from paceline.config import ConfigError
from paceline.report import report_figures, write_report
from paceline.telemetry.records import read_ledger
from paceline.types import CAUSES


def milliseconds(run: ProfiledRun, stage: str) -> dict[str, float]:
    """Cells of a stage that are not zero, over all ranks and steps."""
    return {cause: round(s * 1000, 6) for cause, s in run.totals()[stage].items() if s > 1e-9}


def test_every_cell_is_what_the_device_and_the_host_did(tmp_path: Path) -> None:
    run = import_traces(training_step().write(tmp_path / "trace.json"))
    assert milliseconds(run, "data") == {"data": 10}
    assert milliseconds(run, "rollout") == {"compute": 20, "memory": 10, "scheduling": 20}
    # 60-62 nothing, 62-80 product, 80-90 exposed collective, 90-92 nothing, 92-96 unknown, 96-100 nothing
    assert milliseconds(run, "update_actor") == {"compute": 22, "communication": 10, "scheduling": 8}
    assert "unaccounted" not in run.totals()


def test_unknown_kernels_are_listed_with_their_time(tmp_path: Path) -> None:
    run = import_traces(training_step().write(tmp_path / "trace.json"))
    run_dir = write_profile(run, tmp_path / "run")
    lines = [json.loads(line) for line in (run_dir / "causes" / "rank0.jsonl").read_text().splitlines()]
    unknown = [line for line in lines if line["kind"] == "kernel" and not line["is_known"]]
    assert [(line["name"], line["count"]) for line in unknown] == [(STRANGE, 1)]
    assert unknown[0]["total_s"] == pytest.approx(0.004)
    assert any("no pattern knows took 0.004 s" in note for note in run.notes)


def test_time_in_no_range_is_unaccounted_and_has_causes_too(tmp_path: Path) -> None:
    trace = TraceWriter()
    trace.step(3, 0, 50)
    trace.annotation("update_actor", 0, 20)
    trace.kernel(GEMM, 10, 30)
    trace.kernel("Memcpy HtoD (Pinned -> Device)", 30, 35)
    run = import_traces(trace.write(tmp_path / "trace.json"))
    assert milliseconds(run, "update_actor") == {"compute": 10, "scheduling": 10}
    assert milliseconds(run, "unaccounted") == {"compute": 10, "memory": 5, "scheduling": 15}
    (ledger,) = read_ledger(write_profile(run, tmp_path / "run"))
    (step,) = ledger.steps()
    assert (step.step, step.wall_s, step.unaccounted_s) == (3, pytest.approx(0.05), pytest.approx(0.03))


def test_an_idle_device_waits_for_the_queue_where_the_host_does(tmp_path: Path) -> None:
    trace = TraceWriter()
    trace.step(1, 0, 40)
    trace.annotation("update_actor", 0, 40)
    trace.frame("queue.py(154): get", 5, 25)
    trace.kernel(GEMM, 20, 30)
    run = import_traces(trace.write(tmp_path / "trace.json"))
    assert milliseconds(run, "update_actor") == {"compute": 10, "queue": 15, "scheduling": 15}


def test_an_inner_stage_owns_its_time(tmp_path: Path) -> None:
    trace = TraceWriter()
    trace.step(1, 0, 40)
    trace.annotation("update_actor", 0, 40)
    trace.annotation("save_checkpoint", 30, 38)
    (ledger,) = read_ledger(write_profile(import_traces(trace.write(tmp_path / "t.json")), tmp_path / "run"))
    stages = {name: stage.self_s for name, stage in ledger.steps()[0].stages.items()}
    assert stages == {"update_actor": pytest.approx(0.032), "checkpoint": pytest.approx(0.008)}
    (process,) = ledger.processes
    assert [(span.stage, span.depth) for span in process.spans] == [("update_actor", 0), ("checkpoint", 1)]


def test_ranks_come_from_the_trace_or_the_files_name(tmp_path: Path) -> None:
    training_step(rank=3, world_size=4).write(tmp_path / "a.json.gz")
    unnamed = training_step()
    unnamed.rank = None
    unnamed.write(tmp_path / "actor_update_rank1-of-4_pid7.json")
    run = import_traces(tmp_path)
    assert [rank.rank for rank in run.ranks] == [1, 3]
    assert any("Traces of 2 of 4 ranks" in note for note in run.notes)


def test_a_file_without_steps_is_one_step_of_the_stage_its_name_says(tmp_path: Path) -> None:
    trace = TraceWriter(rank=None)
    trace.kernel(GEMM, 0, 10)
    trace.kernel(GEMM, 15, 20)
    run = import_traces(trace.write(tmp_path / "ref_compute_log_prob_step12_rank0_pid1.json"))
    assert milliseconds(run, "ref_logprob") == {"compute": 15, "scheduling": 5}
    assert [step.step for rank in run.ranks for step in rank.steps] == [12]


def test_the_stage_of_time_in_no_range_can_be_stated(tmp_path: Path) -> None:
    trace = TraceWriter()
    trace.kernel(GEMM, 0, 10)
    path = trace.write(tmp_path / "x.json")
    assert list(import_traces(path).totals()) == ["unaccounted"]
    assert list(import_traces(path, stage="values").totals()) == ["values"]


def test_several_files_of_a_rank_are_put_in_order_of_time(tmp_path: Path) -> None:
    training_step(at_ms=500, number=7).write(tmp_path / "b.json")
    training_step(at_ms=100, number=6).write(tmp_path / "c.json")
    (ledger,) = read_ledger(write_profile(import_traces(tmp_path), tmp_path / "run"))
    (process,) = ledger.processes
    assert [(s.step, round(s.start_s, 6)) for s in process.sections] == [(6, 0.0), (7, 0.4)]
    assert process.unix_s == pytest.approx(1_700_000_000 + 5000 + 0.1)


def test_a_trace_of_an_npu_is_read_by_its_processes(tmp_path: Path) -> None:
    # torch-npu's layout, from its documentation; unverified without the hardware
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 5, "args": {"name": "Ascend Hardware"}},
        {"ph": "X", "name": "MatMulV2", "pid": 5, "tid": 1, "ts": "1000.0", "dur": 400.0},
        {"ph": "X", "name": "hcom_allReduce__123", "pid": 5, "tid": 2, "ts": "1400.0", "dur": 100.0},
        {"ph": "X", "name": "RmsNorm", "pid": 5, "tid": 1, "ts": "1500.0", "dur": 50.0},
        {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": "900.0", "dur": 50.0},
    ]
    path = tmp_path / "trace_view.json"
    path.write_text(json.dumps(events))
    run = import_traces(path, stage="update_actor")
    expected = {"compute": 0.4, "memory": 0.05, "communication": 0.1, "scheduling": 0.1}
    assert milliseconds(run, "update_actor") == pytest.approx(expected)


def test_a_real_trace_of_the_cpu_is_read(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader([torch.randn(256) for _ in range(256)], batch_size=128)
    plan = schedule(wait=0, warmup=1, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan) as profiler:
        for _ in range(3):
            for batch in loader:
                with record_function("compute_log_prob"), torch.no_grad():
                    model(batch)
                with record_function("update_actor"):
                    model(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            profiler.step()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    run = import_traces(path)
    (rank,) = run.ranks
    assert [step.step for step in rank.steps] == [1, 2]
    for step in rank.steps:
        assert {"data", "old_logprob", "update_actor"} <= set(step.cells)
        assert step.cells["update_actor"]["compute"] > 0
        assert step.cells["update_actor"]["memory"] > 0
        total = sum(sum(cells.values()) for cells in step.cells.values())
        assert total == pytest.approx(step.end - step.start, rel=1e-3)
    products = [kernel for step in rank.steps for kernel in step.kernels if kernel.name == "aten::addmm"]
    assert products and all(kernel.cell == "compute" for kernel in products)
    assert "aten::addmm" in (write_profile(run, tmp_path / "run") / "causes" / "rank0.jsonl").read_text()


def test_the_report_of_imported_traces_renders(tmp_path: Path) -> None:
    for rank in range(8):
        for step in (1, 2):
            trace = training_step(rank, 8, at_ms=100.0 * step, number=step)
            trace.write(tmp_path / "traces" / f"step{step}_rank{rank}.json.gz")
    run_dir = write_profile(import_traces(tmp_path / "traces"), tmp_path / "run")
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "compute 42.0%" in page
    figures = report_figures(run_dir)
    assert (figures["num_ranks"], figures["num_steps"]) == (8, 2)
    assert figures["stages"]["update_actor"] == pytest.approx(0.04)


def test_the_command_prints_the_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = training_step().write(tmp_path / "trace.json")
    assert main(["import", "trace", str(path), "--out", str(tmp_path / "run")]) == 0
    output = capsys.readouterr().out
    assert all(cause in output for cause in CAUSES)
    assert f"unknown kernel: {STRANGE}: 4.000 ms per step" in output


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "not json"])
def test_what_is_no_trace_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="no torch-profiler trace"):
        import_traces(path)


@pytest.mark.parametrize("arguments", [["no/such"], ["x.json", "--stage", "training"]])
def test_the_command_refuses_with_two(arguments: list[str]) -> None:
    assert main(["import", "trace", *arguments]) == 2
