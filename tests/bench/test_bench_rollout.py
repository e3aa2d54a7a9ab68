"""The rollout and whole-step benchmarks run on any machine, and their bound counts what decoding must read."""

import pytest
import torch

from paceline.bench.bandwidth import decode_traffic
from paceline.bench.grpo_step import GrpoStepBench, bench_grpo_step, grpo_step_text
from paceline.bench.rollout import RolloutBench, bench_rollout, rollout_text
from paceline.rollout.native.cache import KVLayout
from paceline.telemetry.flops import ModelShape


@pytest.mark.parametrize("workload", ["group", "tail", "uniform"])
def test_a_shrunk_workload_runs_and_says_how_far_from_the_bound_it_is(workload):
    result = bench_rollout(RolloutBench("tiny", workload, "paged", num_repeats=1, shrink=64))
    rows = result.get("contexts", [result])
    assert all(row["share_of_bound"] > 0 for row in rows)
    assert result["copy_tb_per_s"] > 0 and result["startup_s"] > 0
    assert {"cache_s", "first_rounds_s"} <= result["startup"].keys()
    assert result["startup_s"] == sum(result["startup"].values())
    assert result["engine"]["rollout_cache"] == "paged"
    if workload != "uniform":
        assert result["generated_tokens"] > 0
        assert result["bound"]["kv_prompts_once_s"] < result["bound"]["kv_s"]
    assert result["model"] in rollout_text(result)


def test_exact_mode_shows_log_probs_that_are_the_trainers_bits():
    result = bench_rollout(RolloutBench("tiny", "group", exact=True, num_repeats=1, shrink=64))
    assert result["logprob_difference"]["share_of_equal_bits"] == 1.0
    assert result["logprob_difference"]["max"] == 0.0
    assert result["engine"]["rollout_exact"] is True


def test_traffic_is_the_sum_over_steps_of_what_each_reads():
    shape = ModelShape(2, 16, 4, 2, 4, 32, 50)
    layout = KVLayout(2, 2, 4, torch.bfloat16, torch.device("cpu"))
    samples = [(0, 10, 4), (0, 10, 2), (1, 7, 3)]
    read = sum(prompt + step for _, prompt, new in samples for step in range(1, new))
    once = sum(step for _, _, new in samples for step in range(1, new)) + 3 * 10 + 2 * 7
    found = decode_traffic(shape, layout, samples, num_steps=3)
    assert found.kv_bytes == read * layout.bytes_per_token
    assert found.kv_bytes_prompts_once == once * layout.bytes_per_token
    assert found.weight_bytes == 3 * 2 * (shape.body_parameters + shape.head_parameters)


def test_a_whole_step_of_a_shape_prints_its_ledger(tmp_path):
    result = bench_grpo_step(GrpoStepBench("tiny", num_steps=2, shrink=32), tmp_path)
    assert len(result["step_s"]) == 2
    assert {"rollout", "update_actor"} <= set(result["ledger"])
    assert sum(result["ledger"].values()) == pytest.approx(result["median_s"], rel=0.05)
    assert "rollout" in grpo_step_text(result)
