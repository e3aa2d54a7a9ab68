"""A step's figures over ranks: nothing counts twice, stages still add up, imbalance is told."""

import pytest

from paceline.schedules.together import timing_metrics
from paceline.telemetry.ledger import MemorySample, SectionTotals
from paceline.telemetry.metrics import METRICS, MetricAccumulator, reduce_over_ranks


def section(wall_s: float, stage_s: dict[str, float], tokens: int = 0, flops: float = 0.0, peak: int = 0):
    covered = sum(stage_s.values())
    return SectionTotals(
        step=1,
        wall_ns=round(wall_s * 1e9),
        unaccounted_ns=round((wall_s - covered) * 1e9),
        stage_ns={stage: round(seconds * 1e9) for stage, seconds in stage_s.items()},
        stage_tokens={"update_actor": tokens} if "update_actor" in stage_s else {},
        stage_flops={"update_actor": flops} if "update_actor" in stage_s else {},
        memory=MemorySample(peak_allocated=peak),
    )


def test_ranks_that_share_tokens_are_not_counted_twice_in_throughput():
    # 4 devices, sequence parallel 2: two data ranks of 400 tokens, each rank laying out half of its data rank's
    sections = [section(2.0, {"update_actor": 2.0}, tokens=200, flops=1e12) for _ in range(4)]
    metrics = timing_metrics(sections, num_tokens=800, peak_tflops=10.0)
    assert metrics["throughput/tokens_per_s"] == pytest.approx(400)
    assert metrics["throughput/tokens_per_s_per_device"] == pytest.approx(100)
    assert metrics["tflops/update_actor"] == pytest.approx(0.5)
    assert metrics["mfu/update_actor"] == pytest.approx(4e12 / (2.0 * 4 * 10e12))


def test_stage_times_of_all_ranks_add_up_to_the_mean_step():
    sections = [
        section(4.0, {"rollout": 1.0, "update_actor": 2.0, "idle": 0.5}),
        section(4.0, {"rollout": 2.5, "update_actor": 1.0, "checkpoint": 0.25}),
    ]
    metrics = timing_metrics(sections, 10, None)
    stages = sum(v for n, v in metrics.items() if n.startswith("time/") and n != "time/step")
    assert stages == pytest.approx(metrics["time/step"]) == pytest.approx(4.0)
    assert metrics["time/checkpoint"] == pytest.approx(0.125) and metrics["time/idle"] == pytest.approx(0.25)
    assert not any(name.startswith("mfu/") for name in metrics)


def test_imbalance_is_told_in_tokens_in_flops_and_in_time_not_waited():
    sections = [
        section(10.0, {"update_actor": 9.0}, tokens=300, flops=9e9, peak=5),
        section(10.0, {"update_actor": 3.0, "idle": 6.0}, tokens=100, flops=3e9, peak=7),
    ]
    metrics = timing_metrics(sections, 10, None)
    assert metrics["balance/tokens_max_over_mean"] == pytest.approx(1.5)
    assert metrics["balance/flops_max_over_mean"] == pytest.approx(1.5)
    assert metrics["balance/busy_max_over_mean"] == pytest.approx(10 / 7)
    assert metrics["balance/slowest_rank"] == 0
    assert metrics["memory/peak_allocated"] == 7


def test_one_rank_is_its_own_mean_and_has_no_balance():
    metrics = timing_metrics([section(2.0, {"update_actor": 1.0}, tokens=10, flops=1e12)], 20, None)
    assert metrics["throughput/tokens_per_s"] == metrics["throughput/tokens_per_s_per_device"] == 10
    assert not any(name.startswith("balance/") for name in metrics)


def test_every_declared_reduction_over_ranks_equals_one_rank_that_saw_everything():
    observed = [(1.0, 3.0), (5.0, 1.0), (-2.0, 2.0), (0.5, 0.0)]
    alone, ranks = MetricAccumulator(), [MetricAccumulator() for _ in range(3)]
    for name in METRICS:
        for index, (value, weight) in enumerate(observed):
            alone.add(name, value, weight)
            ranks[index * 3 // len(observed)].add(name, value, weight)  # the first two on rank 0
    assert reduce_over_ranks(ranks) == alone.reduce()
