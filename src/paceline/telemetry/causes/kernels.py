"""Classes of kernels, host operators and host waits, by patterns per library. What no pattern knows is None: unknown.

compute: limited by arithmetic (matrix products, attention, convolution). memory: limited by moving data (element-wise,
norms, reductions, copies, optimiser). communication: between devices. The first pattern that matches a name counts, so
more particular ones come first: `all_reduce` before `reduce`, `fused_moe` before `fused`.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from paceline.types import Cause

WaitClass = Literal["data", "queue"]


@dataclass(frozen=True, slots=True)
class Pattern:
    """Names of `library` that match one of `expressions` (anywhere, whatever the case) are of `kind`."""

    kind: Cause
    library: str
    expressions: tuple[str, ...]

    def matches(self, name: str) -> bool:
        """Whether it knows the name."""
        return any(re.search(expression, name, re.IGNORECASE) for expression in self.expressions)


def _known(kind: Cause, library: str, *expressions: str) -> Pattern:
    return Pattern(kind, library, expressions)


_COLLECTIVES = r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"

KERNELS: tuple[Pattern, ...] = (
    _known("communication", "NCCL", r"nccl(?:dev)?kernel", r"\bnccl"),
    _known("communication", "RCCL", r"rccl"),
    _known("communication", "HCCL", r"\bhccl", r"\bhcom_", r"aicpukernel", r"mc2"),
    _known("communication", "NVSHMEM", r"nvshmem"),
    _known("communication", "DeepEP", r"deep_?ep"),
    _known("communication", "vLLM custom all-reduce", r"cross_device_reduce", r"(?:one|two)_shot_all_reduce"),
    _known("communication", "symmetric memory", r"multimem_", r"symm_mem", _COLLECTIVES),
    _known("communication", "CUDA peer copy", r"memcpy ?(?:ptop|peer|p2p)"),
    _known("compute", "FlashAttention", r"flash_?(?:fwd|bwd|attn|attention|infer|mla|fprop|bprop)", r"fmha"),
    _known("compute", "FlashInfer", r"flashinfer", r"(?:batch|single)(?:decode|prefill)with"),
    _known("compute", "vLLM attention", r"paged_?attention", r"unified_attention", r"merge_attn_states"),
    _known(
        "compute", "SGLang attention", r"_fwd_kernel_stage", r"context_attention_fwd", r"extend_attention"
    ),
    _known(
        "compute",
        "PyTorch attention",
        r"attention_kernel",
        r"mem_eff",
        r"flex_attention",
        r"scaled_dot_product",
    ),
    _known(
        "memory",
        "paceline",
        r"^(?:add_)?rms_norm(?:_backward)?_kernel",
        r"^(?:rotate|gate)(?:_backward)?_kernel",
        r"^logit_(?:statistics|gradient)_kernel",
        r"^scale_kernel",
        r"^_adamw_kernel",
    ),
    _known(
        "compute", "grouped GEMM", r"grouped_?gemm", r"groupedmatmul", r"fused_moe", r"moe_gemm", r"moe_mmk"
    ),
    _known("compute", "DeepGEMM", r"deep_?gemm", r"fp8_gemm"),
    _known("compute", "CUTLASS", r"cutlass"),
    _known("compute", "cuBLAS", r"gemm", r"gemv", r"nvjet", r"xmma", r"splitk", r"cublas"),
    _known(
        "compute", "cuDNN", r"cudnn", r"convolve", r"conv[12]d", r"implicit_con", r"winograd", r"[dw]grad"
    ),
    _known(
        "compute",
        "Triton matmul",
        r"triton_(?:mm|bmm|tem)",
        r"matmul_kernel",
        r"_matmul",
        r"linear_cross_entropy",
    ),
    _known(
        "compute", "quantised matmul", r"marlin", r"gptq", r"awq", r"machete", r"kgemm_4bit", r"int[48]_mm"
    ),
    _known("compute", "ROCm", r"cijk_", r"tensile", r"hipblas", r"ck_tile", r"mfma"),
    _known("compute", "Ascend matmul", r"matmul", r"\bcube\b"),
    _known(
        "compute", "state space", r"selective_scan", r"chunk_(?:scan|state)", r"causal_conv1d", r"gated_delta"
    ),
    _known("memory", "CUDA copy", r"^memcpy", r"^memset", r"memcpy(?:htod|dtoh|dtod)", r"copy_?kernel"),
    _known(
        "memory",
        "PyTorch element-wise",
        r"elementwise",
        r"unrolled",
        r"vectorized_",
        r"(?:bi|u)naryop",
        r"functor",
    ),
    _known(
        "memory",
        "PyTorch reduction",
        r"reduce_?kernel",
        r"softmax",
        r"logsumexp",
        r"argmax",
        r"welford",
        r"cumsum",
    ),
    _known("memory", "norms", r"(?:layer|rms|batch|group)_?norm", r"norm_kernel", r"welford"),
    _known(
        "memory",
        "PyTorch indexing",
        r"index",
        r"gather",
        r"scatter",
        r"catarray",
        r"embedding",
        r"slice",
        r"masked",
    ),
    _known("memory", "sorting", r"topk", r"sort", r"radix", r"scan", r"unique", r"nonzero", r"moe_align"),
    _known("memory", "optimiser", r"multi_tensor", r"foreach", r"adam", r"\bsgd", r"lamb_", r"unscale"),
    _known(
        "memory",
        "random numbers",
        r"philox",
        r"distribution",
        r"dropout",
        r"bernoulli",
        r"multinomial",
        r"curand",
    ),
    _known("memory", "Inductor", r"triton_(?:poi|red|per|spl|for|unk)_"),
    _known("memory", "Liger", r"liger", r"_(?:swiglu|geglu|rope|cross_entropy)_", r"fused_add"),
    _known(
        "memory", "vLLM", r"rotary", r"(?:silu|act|gelu)_and_mul", r"reshape_and_cache", r"concat_and_cache"
    ),
    _known("memory", "vLLM sampling", r"copy_blocks", r"swap_blocks", r"apply_penalt", r"sampl"),
    _known("memory", "quantisation", r"quant", r"cast", r"fp8_scale", r"per_token_group"),
    _known("memory", "losses", r"cross_?entropy", r"nll_loss", r"log_prob", r"entropy"),
    _known("memory", "CUB and Thrust", r"\bcub\b", r"cub::", r"thrust", r"transpose", r"permute"),
    _known(
        "memory",
        "Ascend vector",
        r"^(?:ai_?vector|add|sub|mul|div|exp|sigmoid|silu|swi_?glu|neg|r?sqrt|pow|tile)",
    ),
    _known(
        "memory",
        "Ascend layout",
        r"^(?:concat|split|strided|slice|transdata|tensormove|fill|zeroslike|broadcast)",
    ),
    _known("memory", "Ascend reduction", r"^(?:reduce(?:sum|mean|max)|equal|greater|less|logical|select)"),
)
"""Kernels on devices."""

_VIEWS = (
    r"^aten::(?:linear|matmul|t|transpose|view|_unsafe_view|_reshape_alias|reshape|expand|as_strided|detach|alias)$",
    r"^aten::(?:unsqueeze|squeeze|select|slice|narrow|permute|movedim|chunk|split|unbind|flatten|unflatten|numpy_T)\b",
    r"^aten::(?:empty|empty_like|empty_strided|resize_|set_|resolve_|result_type|lift_fresh|to|_to_copy|contiguous)",
    r"^aten::(?:is_|can_|size|stride|_has|item|_local_scalar)",
    r"^_[A-Z]\w+$",  # autograd functions: what is not in an operator inside them is host code
    r"^detach_?$|^autograd::|Backward\d*$|AccumulateGrad|^torch::|Function$",
)

OPERATORS: tuple[Pattern, ...] = (
    _known("communication", "c10d", r"^_?c10d", r"record_param_comms", r"^(?:gloo|nccl|mpi):", _COLLECTIVES),
    _known(
        "compute", "ATen products", r"^aten::(?:mm|addmm|b?addbmm|bmm|baddbmm|addmv|mv|dot|einsum|linalg_)"
    ),
    _known("compute", "ATen products", r"^aten::(?:_int_mm|_scaled_mm|_grouped_mm|_addmm_activation)"),
    _known("compute", "oneDNN", r"mkldnn", r"onednn", r"^mkl::", r"_linear_pointwise"),
    _known("compute", "ATen attention", r"^aten::.*attention"),
    _known("compute", "ATen convolution", r"^aten::.*conv"),
    _known("scheduling", "dispatch and views", *_VIEWS),
    _known("memory", "ATen", r"^aten::"),
    _known("memory", "Inductor", r"^cpp_fused", r"^triton_"),
)
"""Host operators, for runs on a CPU, by the time in which they are the innermost. What is left of ATen after products,
attention and views moves data."""

WAITS: tuple[tuple[WaitClass, tuple[str, ...]], ...] = (
    ("data", (r"dataloader", r"next_batch", r"data_loading", r"collate", r"tokeni[sz]e")),
    (
        "queue",
        (
            r"queue\.py\(\d+\): get",
            r"queue[._ ]?(?:get|wait)",
            r"\bray\.get",
            r"ray::get",
            r"wait_for_",
            r"poll_",
        ),
    ),
)
"""Annotations and Python frames on the host during which an idle device waits for input, or for another stage."""


@lru_cache(maxsize=65536)
def classify_kernel(name: str) -> tuple[Cause | None, str]:
    """Cause and library of a device kernel by its name; (None, "") when no pattern knows it."""
    # CANN names a kernel aclnn{call}_{kernel}_{type}; the type is what other tools name it by
    return _first(KERNELS, name.rpartition("_")[2] if name.startswith("aclnn") else name)


@lru_cache(maxsize=65536)
def classify_operator(name: str) -> tuple[Cause | None, str]:
    """The same for a host operator; `scheduling` for those that only dispatch."""
    return _first(OPERATORS, name)


def _first(table: tuple[Pattern, ...], name: str) -> tuple[Cause | None, str]:
    found = next((pattern for pattern in table if pattern.matches(name)), None)
    return (None, "") if found is None else (found.kind, found.library)


@lru_cache(maxsize=65536)
def classify_wait(name: str) -> WaitClass | None:
    """What an idle device waits for while the host is in an annotation or frame of this name."""
    for kind, expressions in WAITS:
        if any(re.search(expression, name, re.IGNORECASE) for expression in expressions):
            return kind
    return None
