"""Gradient checkpointing: the same bits whatever is recomputed, and less kept."""

import pytest
import torch
from tiny_models import FAMILIES, tiny_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from paceline.config.loading import load_config
from paceline.config.schema import TrainSection
from paceline.engine.recompute import apply_recompute, decoder_layers, recomputed_layers
from paceline.model.inputs import ModelInputs, padded_inputs, score
from paceline.model.loading import CausalModel
from paceline.model.logprob_head import HeadSettings

HEAD = HeadSettings(temperature=1.0, softcap=None, chunk=64)
PAIRS = [(range(3, 9), range(10, 22)), (range(20, 25), range(30, 33))]

CHOICES = {
    "all": {"gradient_checkpointing": "all"},
    "every-2": {"gradient_checkpointing": "every_k", "checkpoint_every": 2},
    "matmuls": {"gradient_checkpointing": "selective"},
    "half-matmuls": {"gradient_checkpointing": "selective", "selective_keep": "half_matmuls"},
    "attention": {"gradient_checkpointing": "selective", "selective_keep": "attention"},
}


def inputs(model: CausalModel) -> ModelInputs:
    return padded_inputs(PAIRS, 24, model.device)


def loss_and_gradients(model: CausalModel) -> tuple[Tensor, dict[str, Tensor]]:
    model.module.zero_grad()
    logprobs, _ = score(model, inputs(model), HEAD)
    loss = (logprobs * torch.linspace(-1, 1, len(logprobs))).sum()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.module.named_parameters()}


def recomputing(settings: dict, family: str = "qwen3") -> CausalModel:
    model = tiny_model(family)
    apply_recompute(decoder_layers(model.module, model.shape.num_layers), TrainSection(**settings))
    return model


def bytes_kept(model: CausalModel) -> int:
    """Bytes of distinct tensors that autograd keeps between forward and backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.module.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        score(model, inputs(model), HEAD)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("choice", CHOICES)
def test_loss_and_gradients_are_the_same_bits_whatever_is_recomputed(family, choice):
    expected_loss, expected = loss_and_gradients(tiny_model(family))
    loss, gradients = loss_and_gradients(recomputing(CHOICES[choice], family))
    assert torch.equal(loss, expected_loss)
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient), name


def test_recomputing_keeps_less_between_forward_and_backward():
    none = bytes_kept(tiny_model("qwen3"))
    every_second = bytes_kept(recomputing(CHOICES["every-2"]))
    everything = bytes_kept(recomputing(CHOICES["all"]))
    assert everything < every_second < none


class CountProducts(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products with weights as they are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator._schema.name.split("::")[1] in ("mm", "addmm")
        return operator(*args, **(kwargs or {}))


def num_products(settings: dict) -> int:
    model = recomputing(settings)
    with CountProducts() as products:
        loss_and_gradients(model)
    return products.count


def test_selective_recomputes_no_product_it_keeps_and_half_recomputes_every_second():
    none = num_products({"gradient_checkpointing": "none"})
    # of q k v o gate up down of each of two layers; down is never needed again, so it is not recomputed either
    assert num_products(CHOICES["matmuls"]) == none
    assert num_products(CHOICES["half-matmuls"]) == none + 2 * 3
    assert num_products(CHOICES["attention"]) == none + 2 * 6
    assert num_products(CHOICES["all"]) == none + 2 * 6


def test_every_k_recomputes_every_kth_layer():
    def layers(every: int) -> list[int]:
        return recomputed_layers(7, TrainSection(gradient_checkpointing="every_k", checkpoint_every=every))

    assert layers(1) == list(range(7))
    assert layers(2) == [1, 3, 5]
    assert layers(8) == []


def test_passes_without_gradients_are_not_checkpointed():
    model = recomputing(CHOICES["all"])
    with torch.no_grad(), CountProducts() as products:
        score(model, inputs(model), HEAD)
    expected = tiny_model("qwen3")
    with torch.no_grad(), CountProducts() as plain:
        score(expected, inputs(expected), HEAD)
    assert products.count == plain.count


@pytest.mark.parametrize("choice", ["all", "matmuls", "half-matmuls"])
def test_compiled_layers_give_the_same_gradients(choice):
    expected_loss, expected = loss_and_gradients(tiny_model("llama"))
    model = tiny_model("llama")
    layers = decoder_layers(model.module, model.shape.num_layers)
    selective = CHOICES[choice]["gradient_checkpointing"] == "selective"
    if not selective:
        compile_forwards(layers)
    apply_recompute(layers, TrainSection(**CHOICES[choice]))
    if selective:
        compile_forwards(layers)
    loss, gradients = loss_and_gradients(model)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-4, atol=1e-4)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-3, msg=name)


def compile_forwards(layers: list[nn.Module]) -> None:
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager")


def test_equal_layers_are_compiled_once_with_their_recomputation_inside():
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    apply_recompute(layers, TrainSection(gradient_checkpointing="selective"))
    counter = CompileCounterWithBackend("aot_eager")
    for layer in layers:
        layer.compile(backend=counter, fullgraph=True)
    hidden = torch.ones(2, 4, requires_grad=True)
    for layer in layers:
        hidden = layer(hidden)
    hidden.sum().backward()
    assert counter.frame_count == 1


def test_experts_that_are_as_many_as_layers_are_not_taken_for_layers():
    layers = nn.ModuleList(
        nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(3))}) for _ in "abc"
    )
    assert decoder_layers(nn.ModuleDict({"layers": layers}), 3) == list(layers)
    with pytest.raises(ValueError, match="0 lists of 4 equal layers"):
        decoder_layers(nn.ModuleDict({"layers": layers}), 4)


def test_a_switch_from_an_older_recipe_is_read_as_all_or_none():
    base = {"model": {"path": "tiny"}, "task": {"path": "prompts.jsonl"}}
    for written, meant in ((True, "all"), (False, "none"), ("selective", "selective")):
        config = load_config(None, sections={**base, "train": {"gradient_checkpointing": written}})
        assert config.train.gradient_checkpointing == meant
