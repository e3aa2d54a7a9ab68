"""Triton kernels and variable-length attention kernels against their references, on the device."""

import copy

import pytest
import torch
from tiny_models import FAMILIES
from transformers import AutoModelForCausalLM

from paceline.batching.prefixes import PackItem, Segment, build_pack
from paceline.config.schema import TrainSection
from paceline.engine.optimizer import MasterAdamW
from paceline.model.attention import AttentionArgs
from paceline.model.families import check_family
from paceline.model.flash_attention import FlashPlan
from paceline.model.flash_kernels import TorchFlash, kernel_for
from paceline.model.fused import fuse_for_device
from paceline.model.fused.head import chunks_of_samples, head_loss
from paceline.model.fused.layers import FUSED_FAMILIES
from paceline.model.inputs import packed_inputs
from paceline.model.loading import CausalModel, wrap_model
from paceline.model.logit_kernels import ReferenceLogitKernels, logit_kernels_for
from paceline.model.logprob_head import HeadSettings, full_logprobs, response_logprobs
from paceline.model.packed_attention import PackedPlan

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(
        (found.detach().float() - expected.detach().float()).norm() / expected.detach().float().norm()
    )


def model_of(family: str, dtype: torch.dtype) -> CausalModel:
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES[family])
    config.hidden_size, config.head_dim = 64, 16  # the kernels take powers of two
    config.initializer_range = 0.05  # with larger weights bfloat16 itself is 10 % off
    module = AutoModelForCausalLM.from_config(config, dtype=dtype).to(DEVICE)
    return wrap_model(module, DEVICE, check_family(config, type(module)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_fused_layers_equal_the_models_own(family, dtype, tolerance):
    plain, fused = model_of(family, dtype), model_of(family, dtype)
    assert fuse_for_device(fused.module, DEVICE).num_layers == 2
    items = [PackItem(tuple(range(3, 9)), ((20, 21, 22), (30, 31))), PackItem((40, 41), ((50, 51, 52, 53),))]
    inputs = packed_inputs(build_pack(items, True), DEVICE)
    results = []
    for model in (plain, fused):
        hidden = model.hidden(inputs.input_ids_BT, inputs.position_ids_BT, inputs.plan)
        generator = torch.Generator(DEVICE).manual_seed(1)
        (hidden * torch.randn(hidden.shape, device=DEVICE, generator=generator).to(dtype)).sum().backward()
        results.append(
            (hidden, {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None})
        )
    assert relative(results[1][0], results[0][0]) < tolerance
    for name, gradient in results[0][1].items():
        assert relative(results[1][1][name], gradient) < tolerance, name


@pytest.mark.parametrize("kernel", [TorchFlash(), kernel_for(DEVICE) if torch.cuda.is_available() else None])
def test_a_tree_of_prefixes_on_the_kernels_equals_the_pieces(kernel):
    segments, start = [], 0
    for _ in range(2):
        parent = len(segments)
        for length in (70, 33, 129):
            segments.append(
                Segment(
                    start, length, -1 if length == 70 else parent, "prompt" if length == 70 else "response"
                )
            )
            start += length
    positions = torch.cat([torch.arange(s.length) + (0 if s.parent < 0 else 70) for s in segments]).to(DEVICE)
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, heads, start, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    ]
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    args = AttentionArgs(0, 0.125, None, None)
    reference = PackedPlan(segments, positions)
    expected = reference.attend(*exact, args)
    grad = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, exact, grad)
    found = FlashPlan(segments, kernel, reference, DEVICE).attend(*inputs, args)
    assert relative(found, expected) < 1e-2
    for ours, theirs in zip(torch.autograd.grad(found, inputs, grad.bfloat16()), expected_grads, strict=True):
        assert relative(ours, theirs) < 1e-2


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logit_kernels_equal_the_reference_head(temperature):
    torch.manual_seed(0)
    hidden = torch.randn(50, 64, device=DEVICE, requires_grad=True)
    weight = torch.randn(5003, 64, device=DEVICE, requires_grad=True)
    targets = torch.randint(0, 5003, (50,), device=DEVICE)
    settings = HeadSettings(temperature, None, 16, with_entropy_grad=True)
    grads = [torch.randn(50, device=DEVICE) for _ in range(2)]
    expected = full_logprobs(hidden, weight, None, targets, settings)
    expected_grads = torch.autograd.grad(expected, (hidden, weight), grads)
    found = response_logprobs(hidden, weight, None, targets, settings)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(torch.autograd.grad(found, (hidden, weight), grads), expected_grads, strict=True):
        assert relative(ours, theirs) < 1e-4


def test_one_pass_head_on_the_device_equals_the_plain_kernels():
    torch.manual_seed(0)
    hidden = torch.randn(40, 64, device=DEVICE).bfloat16().requires_grad_()
    weight = torch.randn(3001, 64, device=DEVICE).bfloat16().requires_grad_()
    targets = torch.randint(0, 3001, (40,), device=DEVICE)
    results = []
    for kernels in (ReferenceLogitKernels(), logit_kernels_for("cuda")):
        loss = head_loss(
            hidden, weight, targets, HeadSettings(1.0, None, 16), chunks_of_samples([10] * 4, 16),
            lambda rows, logprob, entropy: (logprob * torch.arange(rows.start, rows.stop, device=DEVICE)).sum(),
            kernels,
        )  # fmt: skip
        results.append((loss, *torch.autograd.grad(3.0 * loss, (hidden, weight))))
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert relative(ours, theirs) < 1e-3


def test_the_fused_optimiser_steps_as_torch_does_and_skips_what_is_not_finite():
    starts = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    optimizers = []
    for preset in ("fast", "plain"):
        weight = torch.nn.Parameter(starts.view(100, 30).bfloat16().to(DEVICE))
        settings = TrainSection(preset=preset, lr=1e-2, weight_decay=0.1, grad_clip=1.0)
        optimizers.append((weight, MasterAdamW({"w": weight}, settings, 10)))
    generator = torch.Generator(DEVICE).manual_seed(1)
    for step in range(4):
        gradient = torch.randn(100, 30, device=DEVICE, generator=generator).bfloat16()
        if step == 2:
            gradient[3, 4] = float("nan")
        outcomes = []
        for weight, optimizer in optimizers:
            (weight * gradient).sum().backward()
            outcomes.append(optimizer.step())
        assert outcomes[0].skipped == outcomes[1].skipped == (step == 2)
        if step != 2:
            assert outcomes[0].grad_norm == pytest.approx(outcomes[1].grad_norm, rel=1e-3)
        fast, plain = (optimizer.masters()["w"] for _, optimizer in optimizers)
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
        assert torch.equal(optimizers[0][0].detach(), fast.bfloat16())


def test_an_update_without_a_gradient_moves_nothing_but_what_decay_moves():
    weight = torch.nn.Parameter(torch.ones(8, 8, device=DEVICE).bfloat16())
    optimizer = MasterAdamW({"w": weight}, TrainSection(lr=1e-2, weight_decay=0.5), 10)
    outcome = optimizer.step()
    assert outcome.grad_norm == 0.0 and not outcome.skipped
    torch.testing.assert_close(optimizer.masters()["w"], torch.full((8, 8), 1.0 - 1e-2 * 0.5, device=DEVICE))
