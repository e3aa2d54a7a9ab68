"""The CPU's fast paths against the plain ones: attention's backward pass, products of few rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.model.attention import additive_bias
from paceline.model.cpu_attention import MAX_SCORES, attend_cpu, matmul_backward_applies
from paceline.model.cpu_linear import linear_few_rows, use_weight_first_products


def _inputs(num_queries, num_keys, dtype, heads=6, kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, heads, num_queries, 16), (2, kv_heads, num_keys, 16), (2, kv_heads, num_keys, 16))
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_and_its_gradient_equal_the_plain_formula(dtype, tolerance, masked):
    query, key, value = _inputs(9, 9 if not masked else 14, dtype)
    visible = torch.rand(9, key.shape[2], generator=torch.Generator().manual_seed(1)) < 0.6
    visible[:, 0] = True
    bias = additive_bias(visible, dtype) if masked else None
    out = attend_cpu(query, key, value, bias, 0.3)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad((out.float() * weights).sum(), (query, key, value))
    exact = [t.detach().double().requires_grad_() for t in (query, key, value)]
    mask = visible if masked else torch.ones(9, 9, dtype=torch.bool).tril()
    expected_out = F.scaled_dot_product_attention(*exact, attn_mask=mask, scale=0.3, enable_gqa=True)
    expected = torch.autograd.grad((expected_out * weights.double()).sum(), exact)
    torch.testing.assert_close(out.double(), expected_out, rtol=tolerance, atol=tolerance)
    for ours, reference in zip(found, expected, strict=True):
        assert (ours.double() - reference).norm() <= tolerance * reference.norm()


def test_large_attention_and_forward_passes_stay_with_the_fused_kernel():
    query, key, _ = _inputs(9, 9, torch.float32)
    assert matmul_backward_applies(query, key)
    with torch.no_grad():
        assert not matmul_backward_applies(query, key)
    side = int((MAX_SCORES / 12) ** 0.5) + 1
    assert not matmul_backward_applies(*_inputs(side, side, torch.float32)[:2])


@pytest.mark.parametrize("rows", [1, 16, 256, 300])
def test_products_of_few_rows_equal_the_plain_ones(rows):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator).bfloat16()
    inputs = torch.randn(1, rows, 32, generator=generator).bfloat16()
    with torch.no_grad():
        found = linear_few_rows(inputs, weight)
        exact = inputs.double() @ weight.double().T
    assert found.shape == (1, rows, 48)
    assert (found.double() - exact).norm() <= 5e-3 * exact.norm()


def test_layers_follow_their_parameter_and_keep_their_gradient():
    layer = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 4)).to(torch.bfloat16)
    assert use_weight_first_products(layer) == 1  # the one with a bias stays as it is
    inputs = torch.ones(2, 8, dtype=torch.bfloat16)
    layer[0](inputs).sum().backward()
    assert layer[0].weight.grad is not None
    with torch.no_grad():
        layer[0].weight.zero_()
        assert torch.count_nonzero(layer[0](inputs)) == 0
