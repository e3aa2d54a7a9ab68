"""Achieved figures against ceilings: shares follow from what was declared, and unknown stays unknown."""

import json
from pathlib import Path

import pytest

from paceline.telemetry.ceilings import (
    Ceilings,
    cache_file,
    data_sheet_ceilings,
    read_ceilings,
    store_ceilings,
)
from paceline.telemetry.flops import ModelShape
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricLog
from paceline.telemetry.records import SectionRecord, StageRecord
from paceline.telemetry.roofline import read_roofline, roofline_of, run_ceilings
from paceline.telemetry.traffic import (
    kv_bytes_per_token,
    optimizer_bytes,
    pass_bytes,
    rollout_bytes,
    weight_bytes,
)

CEILINGS = Ceilings("a device", "2.13", {"bfloat16": 100.0}, copy_gbs=1000.0)
SHAPE = ModelShape(2, 8, 2, 1, 4, 16, 32)


def section(**stages: tuple[float, float, int]) -> SectionRecord:
    """Stages as (seconds, FLOPs, bytes)."""
    records = {
        name: StageRecord(seconds, 1, 0, flops, num_bytes, 0, 0, 0)
        for name, (seconds, flops, num_bytes) in stages.items()
    }
    return SectionRecord(1, 0.0, 10.0, 10.0, 0.0, 1, 0, records)


def test_a_stage_is_held_against_the_ceiling_it_meets_first() -> None:
    # 100 FLOP per byte is where the two ceilings meet
    found = roofline_of(
        [section(update_actor=(2.0, 100e12, 10**11), rollout=(4.0, 4e12, 2 * 10**12), reward=(1.0, 0.0, 0))],
        CEILINGS,
        "bfloat16",
    )
    rollout, update = found.stages
    assert (update.tflops, update.gbs, update.intensity) == (50.0, 50.0, 1000.0)
    assert (update.bound, update.floor_share) == ("compute", 0.5)
    assert (rollout.tflops, rollout.gbs, rollout.intensity) == (1.0, 500.0, 2.0)
    assert (rollout.bound, rollout.compute_share, rollout.floor_share) == ("memory", 0.01, 0.5)


def test_figures_are_means_over_ranks_and_steps() -> None:
    found = roofline_of([section(rollout=(1.0, 1e12, 0)), section(rollout=(3.0, 1e12, 0))], None, "float32")
    assert (found.stages[0].seconds, found.stages[0].tflops) == (2.0, 0.5)
    assert (found.stages[0].gbs, found.stages[0].bound, found.stages[0].floor_share) == (None, None, None)


def test_a_dtype_without_a_ceiling_has_no_share() -> None:
    found = roofline_of([section(rollout=(1.0, 1e12, 10**9))], CEILINGS, "float32")
    assert found.stages[0].compute_share is None and found.stages[0].bound is None
    assert found.stages[0].memory_share == pytest.approx(0.001)


def test_profiled_steps_are_left_out_of_a_runs_roofline(tmp_path: Path) -> None:
    now = 0

    def clock() -> int:
        return now

    ledger = Ledger(tmp_path / "ledger" / "rank0.jsonl", clock_ns=clock)
    for step, seconds in ((1, 1), (2, 9), (3, 1)):
        with ledger.step(step), ledger.span("update_actor", flops=1e12):
            now += seconds * 10**9
    ledger.close()
    log = MetricLog(tmp_path)
    log.record(2, {"profiled": 1.0})
    log.close()
    environment = {"dtype": "bfloat16", "ceilings": CEILINGS.as_dict()}
    (tmp_path / "env.json").write_text(json.dumps(environment))
    assert read_roofline(tmp_path).stages[0].tflops == 1.0
    assert read_roofline(tmp_path, with_profiled=True).stages[0].seconds == pytest.approx(11 / 3)
    assert read_roofline(tmp_path).ceilings == CEILINGS


def test_measured_ceilings_come_before_the_data_sheet() -> None:
    assert run_ceilings({"ceilings": CEILINGS.as_dict(), "device_name": "NVIDIA H200"}) == CEILINGS
    sheet = run_ceilings({"ceilings": None, "device_name": "NVIDIA H200"})
    assert sheet is not None and not sheet.is_measured
    assert (sheet.matmul_tflops["bfloat16"], sheet.copy_gbs) == (989.0, 4800.0)
    assert run_ceilings({"device_name": None}) is None
    assert data_sheet_ceilings("a GPU nobody knows") is None


def test_ceilings_are_kept_by_device_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    assert read_ceilings("a device", "2.13") is None
    other = Ceilings("a device", "2.11", {"bfloat16": 90.0})
    assert store_ceilings(CEILINGS) == store_ceilings(other) == cache_file()
    assert read_ceilings("a device", "2.13") == CEILINGS
    assert read_ceilings("a device", "2.11") == other
    store_ceilings(Ceilings("a device", "2.13", {"bfloat16": 101.0}))
    again = read_ceilings("a device", "2.13")
    assert again is not None and again.matmul_tflops == {"bfloat16": 101.0}
    cache_file().write_text("half a fi")
    assert read_ceilings("a device", "2.13") is None
    store_ceilings(CEILINGS)
    assert read_ceilings("a device", "2.13") == CEILINGS


def test_the_least_traffic_of_a_pass_is_its_weights_and_keys_and_values() -> None:
    # per layer: attention 8 x 4 x 2 x (2 + 1), gated MLP 3 x 8 x 16; the head 32 x 8
    assert weight_bytes(SHAPE, 2) == 2 * (2 * (192 + 384) + 256)
    assert kv_bytes_per_token(SHAPE, 2) == 2 * 2 * 1 * 4 * 2
    segments = [(10, 0), (5, 10)]
    forward = pass_bytes(SHAPE, segments, 2, is_training=False)
    assert forward == weight_bytes(SHAPE, 2) + 25 * kv_bytes_per_token(SHAPE, 2)
    training = pass_bytes(SHAPE, segments, 2, is_training=True)
    assert training - forward == 3 * weight_bytes(SHAPE, 2)
    assert optimizer_bytes(100, 2) == 100 * (8 + 8 + 8 + 2 + 2)


def test_the_least_traffic_of_a_rollout_is_that_of_its_tokens_one_by_one() -> None:
    lengths = [(7, 4), (3, 1)]
    tokens = 0
    for prompt, response in lengths:
        tokens += prompt  # written by the prefill
        for decoded in range(1, response):  # the first token comes from the prefill
            tokens += prompt + decoded - 1  # read: everything before this token's input
            tokens += 1  # the input itself, written and read in one
            tokens += 1
    expected = 4 * weight_bytes(SHAPE, 4) + tokens * kv_bytes_per_token(SHAPE, 4)
    assert rollout_bytes(SHAPE, lengths, 4, 4) == expected
