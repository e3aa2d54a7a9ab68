"""The padding benchmark: choices differ in their widths only, and it says what is padding and what is first use."""

import pytest

from paceline.bench.padded import PaddedWorkload, bench_padded
from paceline.cli import main
from paceline.config import ConfigError

WORKLOAD = PaddedWorkload("tiny", num_micro_batches=8, rows=2, shortest=16, longest=40, num_repeats=1)


def test_every_choice_computes_the_same_samples_in_as_many_micro_batches_and_fewer_shapes() -> None:
    result = bench_padded(WORKLOAD)
    choices = result["choices"]
    shapes = [choices[name]["distinct_shapes"] for name in ("mini_batch", "bucket", "micro_batch")]
    slots = [choices[name]["num_slots"] for name in ("mini_batch", "bucket", "micro_batch")]
    assert shapes[0] == 1 < shapes[1] < shapes[2] <= 8
    assert slots[0] == 16 * 40 > slots[1] > slots[2] > result["num_tokens"]
    for choice in choices.values():
        assert choice["num_micro_batches"] == 8
        for name in ("old_logprob", "update_actor"):
            times = choice[name]
            assert times["first_use_s"] == pytest.approx(times["first_s"] - times["repeat_s"])
            assert times["new_shapes"] <= choice["distinct_shapes"]
    # one width is the mini-batch's, and buckets may coincide with lengths
    assert 0 < choices["micro_batch"]["update_actor"]["new_shapes"] < shapes[2]
    assert result["attention"]["repeat_ms"] > 0


def test_one_long_sample_makes_every_row_of_the_mini_batch_width_long() -> None:
    found = bench_padded(WORKLOAD)["one_long_sample"]
    assert 1.5 < found["slots_ratio"] < 2.0
    assert found["mini_batch"]["distinct_shapes"] == 1


def test_lengths_that_are_no_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most --longest = 20"):
        PaddedWorkload("tiny", shortest=30, longest=20)


def test_the_command_prints_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "bench padded --model tiny --micro-batches 4 --shortest 8 --longest 20 --repeats 1"
    assert main(arguments.split()) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("micro_batch:", "bucket:", "mini_batch:", "one long sample"))
    assert main(["bench", "padded", "--model", "none"]) == 2
