"""torch-npu's trace files as Ascend documents them. Unverified on the hardware."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.adapters.traces.importing import ProfiledRun, import_traces
from paceline.config import ConfigError
from paceline.telemetry.causes import classify_kernel

ORIGIN_US = 1_704_161_511_420_306


def process(pid: object, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}


def work(name: str, pid: object, start_ms: float, end_ms: float, **more: Any) -> dict[str, Any]:
    """An event; times are texts of Unix microseconds with three decimals."""
    start_us = round(start_ms * 1000)
    text = f"{ORIGIN_US + start_us}.250"
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": 1,
        "ts": text,
        "dur": (end_ms - start_ms) * 1000,
        **more,
    }


def events() -> list[dict[str, Any]]:
    """A step of 100 ms: a product, a collective with its parts on two lanes, an element-wise kernel, waits."""
    host = {"cat": "cpu_op", "args": {"Sequence number": -1, "Fwd thread id": 0}}
    return [
        process(100, "Python"),
        process(101, "CANN"),
        process(102, "Ascend Hardware"),
        process("HCCL", "Communication"),
        process(104, "Overlap Analysis"),
        work("ProfilerStep#5", 100, 0, 100, **host),
        work("update_actor", 100, 10, 90, **host),
        work("aten::mm", 100, 11, 12, **host),
        work("aclrtLaunchKernel", 101, 11, 12),
        work("aclnnMatmul_MatMulCommon_MatMulV2", 102, 20, 50, args={"Task Type": "AI_CORE"}),
        work("aclnnAdd_AddAiCore_Add", 102, 60, 70, args={"Task Type": "AI_VECTOR_CORE"}),
        work("EVENT_WAIT", 102, 70, 95, args={"Task Type": "EVENT_WAIT_SQE"}),
        work("hcom_allReduce__123_0_1", "HCCL", 40, 58, args={}),
        work("Memcpy", "HCCL", 41, 45, args={}),
        work("MEMCPY_ASYNC", 102, 50, 57, args={"Task Type": "SDMA_SQE"}),
        work("MEMCPY_ASYNC", 102, 80, 82, args={"Task Type": "SDMA_SQE"}),
        work("Computing", 104, 20, 50),
    ]


def write(folder: Path, text: str | None = None, rank: int = 3) -> Path:
    """The folders torch-npu leaves, the files beside the timeline included."""
    top = folder / f"localhost_123{rank}_20240102101010123_ascend_pt"
    output = top / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True)
    (top / f"profiler_info_{rank}.json").write_text('{"config": {}}')
    (top / "profiler_metadata.json").write_text("{}")
    (output / "communication.json").write_text('{"step5": {}}')
    (output / "trace_view.json").write_text(json.dumps(events()) if text is None else text)
    return folder


def milliseconds(run: ProfiledRun, stage: str) -> dict[str, float]:
    return {cause: round(s * 1000, 3) for cause, s in run.totals()[stage].items() if s > 1e-7}


def test_a_folder_of_a_rank_is_read_and_its_other_files_are_not(tmp_path: Path) -> None:
    run = import_traces(write(tmp_path))
    (rank,) = run.ranks
    assert rank.rank == 3 and [step.step for step in rank.steps] == [5]
    assert rank.unix_s == pytest.approx(ORIGIN_US / 1e6, abs=1e-5)
    assert not any("Not read" in note for note in run.notes)


def test_cells_are_by_lane_and_waits_of_the_device_are_no_work(tmp_path: Path) -> None:
    run = import_traces(write(tmp_path))
    # 10-20 nothing, 20-50 product, 50-58 exposed collective with its copy, 60-70 element-wise, 80-82 copy, rest nothing
    assert milliseconds(run, "update_actor") == {
        "compute": 30,
        "memory": 12,
        "communication": 8,
        "scheduling": 30,
    }
    assert milliseconds(run, "unaccounted") == {"scheduling": 20}


def test_collectives_are_listed_and_nothing_is_unknown(tmp_path: Path) -> None:
    run = import_traces(write(tmp_path))
    kernels = run.ranks[0].steps[0].kernels
    assert {(kernel.name, kernel.cell, kernel.count) for kernel in kernels} == {
        ("aclnnMatmul_MatMulCommon_MatMulV2", "compute", 1),
        ("aclnnAdd_AddAiCore_Add", "memory", 1),
        ("MEMCPY_ASYNC", "memory", 1),
        ("MEMCPY_ASYNC", "communication", 1),
        ("Memcpy", "communication", 1),
        ("hcom_allReduce__123_0_1", "communication", 1),
    }
    assert all(kernel.is_known for kernel in kernels)


def test_a_list_that_a_killed_parser_left_open_is_read(tmp_path: Path) -> None:
    whole = json.dumps(events())
    run = import_traces(write(tmp_path, whole[:-1]))
    assert milliseconds(run, "update_actor")["compute"] == 30
    torn = import_traces(write(tmp_path / "torn", whole[: whole.index('"Computing"') + 20], rank=1))
    assert milliseconds(torn, "update_actor")["memory"] == 12


def test_ranks_come_from_the_info_file_or_the_folders_name(tmp_path: Path) -> None:
    write(tmp_path, rank=0)
    named = tmp_path / "dp0_pp0_tp0_dcp0_ep0_rank6_20260305161834123_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    named.mkdir(parents=True)
    (named / "trace_view.json").write_text(json.dumps(events()))
    assert [rank.rank for rank in import_traces(tmp_path).ranks] == [0, 6]


def test_a_profile_that_is_only_a_database_is_refused_with_what_would_do(tmp_path: Path) -> None:
    output = tmp_path / "x_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True)
    (output / "ascend_pytorch_profiler_0.db").write_bytes(b"")
    with pytest.raises(ConfigError, match="export_type='text'"):
        import_traces(tmp_path)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("aclnnMatmul_MatMulCommon_MatMulV2", "compute"),
        ("aclnnAdd_AddAiCore_Add", "memory"),
        ("aclnnInplaceCopy_TensorMove_TensorMove", "memory"),
        ("aclnnFlashAttentionScore_FlashAttentionScore_FlashAttentionScore", "compute"),
        ("aclnnRmsNorm_RmsNorm_RmsNorm", "memory"),
        ("aclnnStrange_Strange_Strange", None),
    ],
)
def test_a_name_of_cann_is_classed_by_its_type(name: str, cause: str | None) -> None:
    assert classify_kernel(name)[0] == cause
