"""The tree of launches and its merge by log-sum-exp, on a kernel written in plain torch; gradients included."""

import pytest
import torch
from torch import Tensor

from paceline.batching.prefixes import Segment
from paceline.config.schema import TrainSection
from paceline.engine.recompute import apply_recompute
from paceline.model.attention import AttentionArgs
from paceline.model.flash_attention import FlashPlan, tree_ranges
from paceline.model.flash_kernels import Ranges
from paceline.model.packed_attention import PackedPlan


class PlainKernel:
    """What a kernel must compute, sequence by sequence; backward by the formulas, from the merged output and lse."""

    name = "plain"

    def forward(
        self,
        query_THD: Tensor,
        key_SKD: Tensor,
        value_SKD: Tensor,
        ranges: Ranges,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(query_THD), query_THD.new_empty(query_THD.shape[1], len(query_THD))
        for q, k in _cuts(ranges):
            scores = _scores(query_THD[q], key_SKD[k], ranges, scale, window)
            lse[:, q] = scores.logsumexp(dim=-1)
            out[q] = torch.einsum("hqs,shd->qhd", scores.softmax(dim=-1), _repeated(value_SKD[k], query_THD))
        return out, lse

    def backward(
        self,
        grad_THD: Tensor,
        query_THD: Tensor,
        key_SKD: Tensor,
        value_SKD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        ranges: Ranges,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = torch.zeros_like(query_THD), torch.zeros_like(key_SKD), torch.zeros_like(value_SKD)
        groups = (key_SKD.shape[1], query_THD.shape[1] // key_SKD.shape[1])
        for q, k in _cuts(ranges):
            scores = _scores(query_THD[q], key_SKD[k], ranges, scale, window)
            p = (scores - lse_HT[:, q, None]).exp()
            grad_p = torch.einsum("qhd,shd->hqs", grad_THD[q], _repeated(value_SKD[k], query_THD))
            delta = (grad_THD[q] * out_THD[q]).sum(dim=-1).T[..., None]
            grad_scores = p * (grad_p - delta) * scale
            grads[0][q] = torch.einsum("hqs,shd->qhd", grad_scores, _repeated(key_SKD[k], query_THD))
            per_head = torch.einsum("hqs,qhd->shd", grad_scores, query_THD[q])
            grads[1][k] = per_head.unflatten(1, groups).sum(dim=2)
            grads[2][k] = torch.einsum("hqs,qhd->shd", p, grad_THD[q]).unflatten(1, groups).sum(dim=2)
        return grads


def _cuts(ranges: Ranges) -> list[tuple[slice, slice]]:
    q, k = ranges.offsets_q.tolist(), ranges.offsets_k.tolist()
    return [(slice(q[n], q[n + 1]), slice(k[n], k[n + 1])) for n in range(len(q) - 1)]


def _repeated(key_SKD: Tensor, query_THD: Tensor) -> Tensor:
    return key_SKD.repeat_interleave(query_THD.shape[1] // key_SKD.shape[1], dim=1)


def _scores(query: Tensor, key: Tensor, ranges: Ranges, scale: float, window: int | None) -> Tensor:
    scores = torch.einsum("qhd,shd->hqs", query, _repeated(key, query)) * scale
    if ranges.causal:
        distance = torch.arange(len(query))[:, None] - torch.arange(len(key))[None, :]
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


class AnyDtypePlan(FlashPlan):
    """Float64 and float32 too: the plain kernel takes them."""

    def _kernel_applies(self, query_BHTD: Tensor, args: AttentionArgs) -> bool:
        return True


def rows(*lengths_and_parents: tuple[int, int]) -> tuple[list[Segment], Tensor]:
    segments: list[Segment] = []
    positions: list[Tensor] = []
    for length, parent in lengths_and_parents:
        start = segments[-1].start + segments[-1].length if segments else 0
        first = 0 if parent < 0 else int(positions[parent][-1]) + 1
        segments.append(Segment(start, length, parent, "sequence" if parent < 0 else "response"))
        positions.append(torch.arange(first, first + length))
    return segments, torch.cat(positions)


TREES = {
    "independent": rows((5, -1), (3, -1), (7, -1)),
    "groups": rows((4, -1), (3, 0), (5, 0), (6, -1), (2, 3), (1, 3)),
    "groups under one header": rows((6, -1), (2, 0), (3, 1), (4, 1), (3, 0), (5, 4)),
    "a shared prompt beside a sequence": rows((3, -1), (4, 0), (8, -1)),
}


@pytest.mark.parametrize("name", TREES)
def test_kernel_launches_of_a_tree_equal_attention_by_pieces(name: str) -> None:
    segments, position_ids = TREES[name]
    torch.manual_seed(1)
    num_tokens = len(position_ids)
    inputs = [
        torch.randn(1, heads, num_tokens, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    ]
    args = AttentionArgs(0, 0.3, None, None)
    reference = PackedPlan(segments, position_ids)
    plan = AnyDtypePlan(segments, PlainKernel(), reference, torch.device("cpu"))
    expected, found = reference.attend(*inputs, args), plan.attend(*inputs, args)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    grad = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-6, atol=1e-6
        )  # the reference's backward sums in float32


def test_a_window_acts_inside_independent_sequences() -> None:
    segments, position_ids = TREES["independent"]
    torch.manual_seed(2)
    inputs = [torch.randn(1, heads, len(position_ids), 8, dtype=torch.float64) for heads in (4, 2, 2)]
    args = AttentionArgs(0, 0.3, 3, None)
    reference = PackedPlan(segments, position_ids)
    plan = AnyDtypePlan(segments, PlainKernel(), reference, torch.device("cpu"))
    torch.testing.assert_close(
        plan.attend(*inputs, args), reference.attend(*inputs, args), rtol=1e-6, atol=1e-6
    )


def test_launches_follow_the_depth_of_the_tree() -> None:
    segments, _ = TREES["groups under one header"]
    tree = tree_ranges(segments, torch.device("cpu"))
    # the second prompt has one response only, which makes both of them one sequence under the header
    assert [part.ranges.offsets_k.tolist() for part in tree.shared] == [[0, 6], [0, 2]]
    assert [part.ranges.offsets_q.tolist() for part in tree.shared] == [[0, 17], [0, 7]]


def test_a_prompt_that_nobody_shares_takes_no_launch_of_its_own() -> None:
    segments, _ = rows((4, -1), (3, 0), (6, -1), (2, 2))
    tree = tree_ranges(segments, torch.device("cpu"))
    assert tree.shared == ()
    assert tree.own.offsets_q.tolist() == [0, 7, 15]


@torch.library.custom_op("paceline_tests::attention", mutates_args=())
def _attention_operator(
    query: Tensor, key: Tensor, value: Tensor, q: Tensor, k: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    ranges = Ranges(q, k, int(q.diff().max()), int(k.diff().max()), causal)
    return PlainKernel().forward(query, key, value, ranges, scale, None)


class OperatorKernel(PlainKernel):
    """The same as an operator of the dispatcher, which is how torch's own kernel appears to selective recomputation."""

    def forward(self, query_THD, key_SKD, value_SKD, ranges, scale, window):
        offsets = ranges.offsets_q, ranges.offsets_k
        return _attention_operator(query_THD, key_SKD, value_SKD, *offsets, ranges.causal, scale)


def test_selective_recomputation_of_a_tree_gives_the_same_gradients():
    places = [(0, 5, -1), (5, 4, 0), (9, 3, 0), (12, 6, -1)]
    segments = [Segment(*place, "response" if place[2] == 0 else "sequence") for place in places]
    plan = FlashPlan(segments, OperatorKernel(), PackedPlan(segments, torch.arange(18)), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(1, heads, 18, 8, generator=generator).bfloat16() for heads in (4, 2, 2)]

    class Attention(torch.nn.Module):
        def forward(self, *qkv: Tensor) -> Tensor:
            return plan.attend(*(part * 1.5 for part in qkv), AttentionArgs(0, 0.3, None, None))

    found = []
    for choice in ("none", "selective"):
        layer = Attention()
        apply_recompute([layer], TrainSection(gradient_checkpointing=choice))
        inputs = [weight.clone().requires_grad_() for weight in weights]
        layer(*inputs).float().square().sum().backward()
        found.append([part.grad for part in inputs])
    assert all(torch.equal(plain, again) for plain, again in zip(*found, strict=True))
