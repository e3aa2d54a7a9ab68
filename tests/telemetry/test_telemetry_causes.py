"""The six causes of a window add up to it, and kernels are classed by their names."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.telemetry.causes import (
    Activity,
    classify_kernel,
    classify_operator,
    classify_wait,
    disjoint,
    split,
)
from paceline.types import CAUSES

PRIORITY = ("compute", "memory", "communication", "data", "queue")
INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=6)


def array(pairs: list[tuple[int, int]]) -> np.ndarray:
    return np.array([(start, start + length) for start, length in pairs], dtype=float).reshape(-1, 2)


@given(st.dictionaries(st.sampled_from(PRIORITY), INTERVALS), INTERVALS)
def test_cells_equal_those_of_every_instant_asked_by_itself(
    active: dict[str, list[tuple[int, int]]], windows: list[tuple[int, int]]
) -> None:
    activity = Activity(**{cause: array(pairs) for cause, pairs in active.items()})
    counted = dict.fromkeys(CAUSES, 0)
    for instant in range(100):
        if not any(start <= instant < start + length for start, length in windows):
            continue
        owner = next(
            (c for c in PRIORITY if any(s <= instant < s + n for s, n in active.get(c, []))), "scheduling"
        )
        counted[owner] += 1
    assert split(array(windows), activity) == pytest.approx(counted, abs=1e-9)


@given(INTERVALS)
def test_a_union_is_disjoint_and_covers_the_same_instants(pairs: list[tuple[int, int]]) -> None:
    union = disjoint(array(pairs))
    assert all(before < after for before, after in zip(union[:-1, 1], union[1:, 0], strict=True))
    instants = {instant for start, length in pairs for instant in range(start, start + length)}
    assert {i for start, end in union for i in range(int(start), int(end))} == instants


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn", "compute"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "compute"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "compute"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "compute"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>", "compute"),
        ("pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "compute"),
        ("void vllm::paged_attention_v2_kernel<__nv_bfloat16>", "compute"),
        ("fused_moe_kernel", "compute"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "compute"),
        ("MatMulV2", "compute"),
        ("FlashAttentionScore", "compute"),
        ("GroupedMatmul", "compute"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "memory"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "memory"),
        ("void (anonymous namespace)::softmax_warp_forward<float>", "memory"),
        ("void vllm::rms_norm_kernel<c10::BFloat16>", "memory"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", "memory"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "memory"),
        ("Memcpy DtoH (Device -> Pinned)", "memory"),
        ("Memset (Device)", "memory"),
        ("triton_poi_fused_add_mul_0", "memory"),
        ("triton_red_fused__log_softmax_3", "memory"),
        ("RmsNorm", "memory"),
        ("SwiGlu", "memory"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_bf16", "communication"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>", "communication"),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        ("hcom_allReduce__904_1", "communication"),
        ("my_own_kernel", None),
    ],
)
def test_a_kernel_is_classed_by_its_name(name: str, cause: str | None) -> None:
    assert classify_kernel(name)[0] == cause


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("aten::addmm", "compute"),
        ("aten::bmm", "compute"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "compute"),
        ("aten::linear", "scheduling"),
        ("aten::view", "scheduling"),
        ("autograd::engine::evaluate_function: MmBackward0", "scheduling"),
        ("aten::add_", "memory"),
        ("aten::copy_", "memory"),
        ("aten::_foreach_addcdiv_", "memory"),
        ("gloo:all_reduce", "communication"),
        ("c10d::allreduce_", "communication"),
        ("paceline::packed_attention", None),
    ],
)
def test_an_operator_is_classed_by_its_name(name: str, cause: str | None) -> None:
    assert classify_operator(name)[0] == cause


@pytest.mark.parametrize(
    ("name", "wait"),
    [
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data"),
        ("queue.py(154): get", "queue"),
        ("ray.get", "queue"),
        ("update_actor", None),
    ],
)
def test_a_wait_is_classed_by_its_name(name: str, wait: str | None) -> None:
    assert classify_wait(name) == wait
