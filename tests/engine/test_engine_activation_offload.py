"""Activations on the host give the same bits; parameters stay; what moves is counted."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn

from paceline.config.schema import TrainSection
from paceline.engine.activation_offload import ActivationOffload
from paceline.engine.recompute import apply_recompute, decoder_layers
from paceline.model.fused.layers import fuse_layers
from paceline.model.fused.reference import ReferenceElementwise
from paceline.model.inputs import padded_inputs, score
from paceline.model.loading import CausalModel
from paceline.model.logprob_head import HeadSettings

CPU = torch.device("cpu")
HEAD = HeadSettings(temperature=1.0, softcap=None, chunk=64)
PAIRS = [(range(3, 9), range(10, 22)), (range(20, 25), range(30, 33))]


def gradients(model: CausalModel, offload: ActivationOffload | None) -> tuple[Tensor, dict[str, Tensor]]:
    model.module.zero_grad()
    inputs = padded_inputs(PAIRS, 24, model.device)
    if offload is None:
        logprobs, _ = score(model, inputs, HEAD)
    else:
        with offload.passing():
            logprobs, _ = score(model, inputs, HEAD)
    (logprobs * torch.linspace(-1, 1, len(logprobs), device=model.device)).sum().backward()
    return logprobs.detach(), {name: p.grad.clone() for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
@pytest.mark.parametrize("recompute", ["none", "all", "selective"])
def test_log_probs_and_gradients_are_the_same_bits(family, recompute):
    expected_logprobs, expected = gradients(tiny_model(family), None)
    model = tiny_model(family)
    layers = decoder_layers(model.module, model.shape.num_layers)
    apply_recompute(layers, TrainSection(gradient_checkpointing=recompute))
    offload = ActivationOffload(CPU, min_bytes=1)
    logprobs, found = gradients(model, offload)
    assert offload.moved_bytes > 0
    assert torch.equal(logprobs, expected_logprobs)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("recompute", ["none", "all", "selective"])
def test_fused_layers_on_the_host_give_the_same_bits_too(recompute):
    found = []
    for offload in (None, ActivationOffload(CPU, min_bytes=1)):
        model = tiny_model("qwen3")
        assert fuse_layers(model.module, ReferenceElementwise()).num_layers == 2
        layers = decoder_layers(model.module, model.shape.num_layers)
        apply_recompute(layers, TrainSection(gradient_checkpointing=recompute))
        found.append(gradients(model, offload)[1])
    assert all(torch.equal(found[0][name], gradient) for name, gradient in found[1].items())


def test_only_activations_above_the_size_move_and_never_parameters():
    linear = nn.Linear(8, 4, bias=False)
    inputs = torch.ones(3, 8)
    for min_bytes, moved in ((1, inputs.nbytes), (inputs.nbytes + 1, 0)):
        offload = ActivationOffload(CPU, min_bytes)
        with offload.passing():
            linear(inputs.requires_grad_() * 1.0).sum().backward()
        assert offload.moved_bytes == moved


def test_layer_inputs_are_all_that_moves_when_layers_are_recomputed():
    everything, inputs_only = ActivationOffload(CPU, 1), ActivationOffload(CPU, 1)
    gradients(tiny_model("llama"), everything)
    model = tiny_model("llama")
    apply_recompute(
        decoder_layers(model.module, model.shape.num_layers), TrainSection(gradient_checkpointing="all")
    )
    gradients(model, inputs_only)
    assert inputs_only.moved_bytes < everything.moved_bytes / 2


def test_slices_are_left_where_they_are_because_they_would_come_back_laid_out_differently():
    offload = ActivationOffload(CPU, 1)
    wide = torch.ones(4, 8, requires_grad=True)
    with offload.passing():
        (wide * 1.0)[:, ::2].pow(2).sum().backward()
    assert offload.moved_bytes == 0
    assert torch.equal(wide.grad, torch.tensor([2.0, 0.0]).repeat(4, 4))


@pytest.mark.gpu
def test_on_a_device_the_peak_falls_and_gradients_stay_the_same_bits():
    device = torch.device("cuda")
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(16)]).to(device)
    inputs = torch.randn(16_384, 1024, device=device)
    peaks, found = [], []
    for offload in (None, ActivationOffload(device, 2**20, window_bytes=2**28)):
        layers.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        if offload is None:
            out = layers(inputs)
        else:
            with offload.passing():
                out = layers(inputs)
        out.square().sum().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        found.append([p.grad.clone() for p in layers.parameters()])
    assert peaks[1] < 0.7 * peaks[0]
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))
    assert np.isfinite(peaks).all()
