"""The training benchmark runs what a run runs, on any machine, and counts what it computed."""

import pytest

from paceline.bench.kernel_classes import class_of
from paceline.bench.shapes import shape_config
from paceline.bench.train import TrainWorkload, bench_train
from paceline.telemetry.flops import ModelShape, train_flops


def test_figures_count_the_tokens_and_flops_of_the_workload() -> None:
    result = bench_train(TrainWorkload("tiny", 700, num_repeats=1))
    row = result["forward_backward"]
    assert result["num_tokens"] == result["num_slots"] == 700
    shape = ModelShape.from_hf_config(shape_config("tiny").to_dict())
    at_most = train_flops(shape, [(700, 0)], 700)  # one sequence has the most attention
    assert 0.5 * at_most < row["tflops"] * row["median_s"] * 1e12 < at_most
    assert row["mfu"] is None  # a CPU has no known peak
    assert result["update_actor"]["median_s"] > 0


def test_shared_prompts_are_computed_once() -> None:
    shared = bench_train(TrainWorkload("tiny", 240, group=(40, 4, 20), num_repeats=1, with_optimizer=False))
    unshared = bench_train(
        TrainWorkload(
            "tiny", 240, group=(40, 4, 20), share_prefixes=False, num_repeats=1, with_optimizer=False
        )
    )
    assert (shared["num_slots"], unshared["num_slots"]) == (240, 480)
    assert shared["num_tokens"] == unshared["num_tokens"] == 480


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "matmul"),
        ("kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90", "attention"),
        ("rms_norm_backward_kernel", "norm"),
        ("logit_gradient_kernel", "head_elementwise"),
        ("something_new", None),
    ],
)
def test_kernels_are_classed_by_name_and_unknown_ones_are_not_hidden(
    kernel: str, expected: str | None
) -> None:
    assert class_of(kernel) == expected
