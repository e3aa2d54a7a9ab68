"""What the ranks run in tests of heads and attention divided over ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.batching.prefixes import PackItem, build_pack
from paceline.model.attention import AttentionArgs, AttentionPlan, PaddedPlan
from paceline.model.logprob_head import HeadSettings, full_logprobs
from paceline.model.packed_attention import PackedPlan
from paceline.model.parallel.groups import Peers
from paceline.model.parallel.ulysses import UlyssesPlan
from paceline.model.parallel.vocab_head import split_response_logprobs


def all_peers() -> Peers:
    return Peers(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def head_inputs(vocabulary: int, num_tokens: int, peak: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_RE = torch.randn(num_tokens, 8, generator=generator)
    weight_VE = torch.randn(vocabulary, 8, generator=generator) * peak
    bias_V = torch.randn(vocabulary, generator=generator)
    targets_R = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    return [hidden_RE.requires_grad_(), weight_VE.requires_grad_(), bias_V.requires_grad_(), targets_R]


def backward(values: tuple[Tensor, Tensor], settings: HeadSettings) -> None:
    loss = (values[0] * torch.arange(1, len(values[0]) + 1)).sum()
    if settings.with_entropy_grad:
        loss = loss + 0.3 * (values[1] * torch.arange(len(values[1]), 0, -1)).sum()
    loss.backward()


def reference_head(vocabulary: int, num_tokens: int, peak: float, settings: HeadSettings) -> dict[str, Any]:
    hidden_RE, weight_VE, bias_V, targets_R = head_inputs(vocabulary, num_tokens, peak)
    values = full_logprobs(hidden_RE, weight_VE, bias_V, targets_R, settings)
    backward(values, settings)
    return {"values": values, "grads": (hidden_RE.grad, weight_VE.grad, bias_V.grad)}


def split_head(vocabulary: int, num_tokens: int, peak: float, settings: HeadSettings) -> dict[str, Any]:
    """The head on this rank's rows of the weight, which are given back as the whole weight's gradient."""
    peers = all_peers()
    hidden_RE, weight_VE, bias_V, targets_R = head_inputs(vocabulary, num_tokens, peak)
    parts = [
        tensor.detach().chunk(peers.size)[peers.index].requires_grad_() for tensor in (weight_VE, bias_V)
    ]
    values = split_response_logprobs(hidden_RE, *parts, targets_R, settings, peers, vocabulary)
    backward(values, settings)
    return {
        "values": tuple(value.detach() for value in values),
        "grads": (hidden_RE.grad, parts[0].grad, parts[1].grad),
        "entropy_has_graph": values[1].requires_grad,
    }


ROW = [
    PackItem((*range(17), 40, 41, 42), ((50, 51), (60, 61, 62, 63))),
    PackItem((*range(17), 43), ((70, 71, 72),)),
]


def attention_inputs(num_heads: int, num_kv_heads: int, num_rows: int, num_tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_rows, heads, num_tokens, 4) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def whole_plan(layout: str) -> tuple[AttentionPlan, int, int]:
    """A plan, its rows and its tokens."""
    if layout == "padded":
        return PaddedPlan(10, torch.device("cpu")), 3, 10
    pack = build_pack(ROW, share_prefixes=layout == "shared")
    return PackedPlan(pack.segments, torch.from_numpy(pack.position_ids)), 1, len(pack.token_ids)


def whole_attention(heads: tuple[int, int], layout: str, args: AttentionArgs) -> list[Tensor]:
    """Output and gradients of queries, keys and values."""
    plan, num_rows, num_tokens = whole_plan(layout)
    inputs = attention_inputs(*heads, num_rows, num_tokens)
    out_BTHD = plan.attend(*inputs, args)
    (out_BTHD * torch.linspace(0.5, 1.5, out_BTHD.numel()).view(out_BTHD.shape)).sum().backward()
    return [out_BTHD.detach(), *(tensor.grad for tensor in inputs)]


def ulysses_attention(heads: tuple[int, int], layout: str, args: AttentionArgs) -> list[Tensor]:
    """This rank's columns of the same; columns beyond the row's tokens are padding."""
    peers = all_peers()
    plan, num_rows, num_tokens = whole_plan(layout)
    missing = -num_tokens % peers.size
    columns = (num_tokens + missing) // peers.size
    mine = slice(peers.index * columns, (peers.index + 1) * columns)
    own = []
    for tensor in attention_inputs(*heads, num_rows, num_tokens):
        # what stands in the padding must not matter
        padded = torch.nn.functional.pad(tensor.detach(), (0, 0, 0, missing), value=7.0)
        own.append(padded[:, :, mine].clone().requires_grad_())
    out_BtHD = UlyssesPlan(plan, num_tokens, peers).attend(*own, args)
    size = (num_rows, num_tokens, *out_BtHD.shape[2:])
    weights = torch.linspace(0.5, 1.5, torch.Size(size).numel()).view(size)
    weights = torch.nn.functional.pad(weights, (0, 0, 0, 0, 0, missing))[:, mine]
    (out_BtHD * weights).sum().backward()
    return [out_BtHD.detach(), *(tensor.grad for tensor in own)]
