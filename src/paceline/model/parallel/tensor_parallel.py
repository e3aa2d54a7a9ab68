"""Tensor parallelism: every matrix product divided over ranks, by the plan the model's family states in transformers.

A family's plan says which linear layers are cut by output ("colwise") and which by input ("rowwise"). Between the two
a rank holds a part of the heads, or of the MLP's width. Embedding and output weights are cut by vocabulary, as one
parameter where the model ties them. Everything else is the same on all ranks.
"""

import re

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from paceline.config.errors import ConfigError
from paceline.model.cpu_linear import use_stock_products

_CUT = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_WHOLE = "replicated_with_grad_allreduce"


def check_tensor_parallel(module: PreTrainedModel, size: int) -> None:
    """Whether the model can be divided over `size` ranks.

    Raises:
        ConfigError: its family states no plan, one with layers that are not cut by columns and rows, or one that does
            not divide.
    """
    plan = _stated_plan(module)
    if not plan:
        rule = f"must be 1 for {module.config.model_type}: transformers states no tensor-parallel plan for it"
        raise ConfigError("cluster.tensor_parallel_size", size, rule, "1")
    if other := sorted(set(plan.values()) - {*_CUT, _WHOLE}):
        rule = f"must be 1 for {module.config.model_type}: its plan has layers of kind {', '.join(other)}"
        raise ConfigError("cluster.tensor_parallel_size", size, rule, "1")
    for name, layer in module.base_model.named_modules():
        style = _style_of(name, plan)
        if style not in _CUT:
            continue
        width = layer.out_features if style == "colwise" else layer.in_features
        if width % size:
            rule = f"must divide the {width} features of {name}"
            nearest = max(s for s in range(1, size) if width % s == 0)
            raise ConfigError("cluster.tensor_parallel_size", size, rule, str(nearest))


def apply_tensor_parallel(module: PreTrainedModel, mesh: DeviceMesh) -> frozenset[int]:
    """Cuts the module's parameters over the one axis of `mesh`, in place.

    Returns the ids of parameters that are whole on every rank but see a part of the heads only (norms of queries and
    keys): their gradients must be summed over the axis.
    """
    check_tensor_parallel(module, mesh.size())
    use_stock_products(module)
    base, plan = module.base_model, _stated_plan(module)
    styles: dict[str, ParallelStyle] = {}
    partly_seen: set[int] = set()
    for name, layer in base.named_modules():
        style = _style_of(name, plan)
        if style in _CUT:
            styles |= _layer_styles(name, layer, style)
        elif _is_inside(name, plan) and (own := list(layer.parameters(recurse=False))):
            partly_seen.update(map(id, own))
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    # every rank has read the same weights, so each cuts its own part out and nothing is sent
    parallelize_module(base, mesh, styles, src_data_rank=None)
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()), src_data_rank=None)
    if is_tied:
        head.weight = embedding.weight
    elif head is not None:  # a value model has none, and its scalar head is whole on all ranks
        _cut_rows(head, "weight", mesh)
    if head is not None and head.bias is not None:
        _cut_rows(head, "bias", mesh)
    return frozenset(partly_seen)


def _layer_styles(name: str, layer: nn.Module, style: str) -> dict[str, ParallelStyle]:
    """How one layer of the plan is cut. With an adapter (W x + B A x) the factor on the cut side is cut with W, and
    the other is whole on every rank: B's outputs are W's, A's inputs are W's."""
    if isinstance(layer, nn.Linear):
        return {name: _CUT[style]()}
    factor = "lora_B" if style == "colwise" else "lora_A"
    factors = layer.get_submodule(factor).named_children()
    return {
        f"{name}.base_layer": _CUT[style](),
        **{f"{name}.{factor}.{adapter}": _CUT[style]() for adapter, _ in factors},
    }


def _cut_rows(layer: nn.Module, name: str, mesh: DeviceMesh) -> None:
    parameter = layer.get_parameter(name)
    cut: DTensor = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
    layer.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def _stated_plan(module: PreTrainedModel) -> dict[str, str]:
    """The family's plan for its base model: patterns of module names to styles."""
    # families without a plan have None, and older ones no attribute
    return dict(getattr(module.config, "base_model_tp_plan", None) or {})


def _style_of(name: str, plan: dict[str, str]) -> str | None:
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def _is_inside(name: str, plan: dict[str, str]) -> bool:
    """Whether the module stands beside layers cut by output, so that it works on a part of their result."""
    if _style_of(name, plan) == _WHOLE:
        return True
    parent = name.rpartition(".")[0]
    pattern = re.sub(r"\.\d+(?=\.|$)", ".*", parent)
    return any(other.rpartition(".")[0] == pattern for other in plan) if parent else False
