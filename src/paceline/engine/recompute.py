"""Gradient checkpointing: which activations of a decoder layer are kept, and which the backward pass computes again.

A layer's `forward` is replaced on the instance, so parameter names stay as they are, hooks around the layer (FSDP)
stay outside, and a `forward` that was compiled before stays compiled inside. With `selective` the order is the other
way round: the choice is made operator by operator, which only the tracing compiler sees, so the layer is compiled
*after* `apply_recompute`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from paceline.config.schema import SelectiveKeep, TrainSection
from paceline.model.fused.layers import is_fused, keep_policies

Forward = Callable[..., Any]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_MATMULS = frozenset({"mm", "addmm", "linear", "_grouped_mm", "mkldnn_linear", "_scaled_mm"})
_ATTENTION_NAMESPACES = frozenset({"torch_attn", "flash_attn", "flash_attn_3"})
_ATTENTION_WORDS = ("attention", "attend", "attn")


def decoder_layers(module: nn.Module, num_layers: int) -> list[nn.Module]:
    """The decoder layers of a causal model, in order: its outermost list of `num_layers` modules of one class.

    Raises:
        ValueError: there is no such list, or more than one.
    """
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        fits = isinstance(child, nn.ModuleList) and len(child) == num_layers
        if fits and not inside and len({type(layer) for layer in child}) == 1:
            found[name] = child
    if len(found) != 1:
        raise ValueError(
            f"{type(module).__name__} holds {len(found)} lists of {num_layers} equal layers; which of them are the "
            "decoder layers cannot be told"
        )
    return list(next(iter(found.values())).children())


def apply_recompute(layers: Sequence[nn.Module], settings: TrainSection) -> int:
    """Makes the chosen `layers` recompute what `settings` says; returns how many do.

    Calls without gradients (scoring, rollout) are not touched. Random numbers are not replayed: models are in
    evaluation mode and have no dropout.
    """
    if settings.gradient_checkpointing == "selective" and is_fused(layers):
        return _choose_kept(layers, settings.selective_keep)
    chosen = recomputed_layers(len(layers), settings)
    contexts = _context_factory(settings)
    of_class = _recomputing_method(contexts)
    for index in chosen:
        layer = layers[index]
        replaced = "forward" in vars(layer)  # by a compiled one, say
        layer.forward = _recomputing(layer.forward, contexts) if replaced else MethodType(of_class, layer)
    return len(chosen)


def _choose_kept(layers: Sequence[nn.Module], keep: SelectiveKeep) -> int:
    """Fused layers know what they keep: element-wise results are formed again in the backward kernels; the gate-up
    product, the largest activation, is kept by all (matmuls), every second (half_matmuls) or no layer (attention)."""
    every = _KEEP_EVERY[keep]
    for index, policy in enumerate(keep_policies(layers)):
        policy.cheap = False
        policy.gate_up = bool(every) and index % every == 0
    return len(layers)


def recomputed_layers(num_layers: int, settings: TrainSection) -> list[int]:
    """Indices of the layers that recompute anything."""
    if settings.gradient_checkpointing == "none":
        return []
    if settings.gradient_checkpointing == "every_k":
        every = settings.checkpoint_every
        return list(range(every - 1, num_layers, every))
    return list(range(num_layers))


def _recomputing_method(contexts: Callable[[], Contexts] | None) -> Forward:
    """A method for all layers of a class. What differs between layers is `self` alone: a compiler that meets it in a
    second layer then has nothing to compile again."""
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return type(self).forward(self, *args, **kwargs)
        return checkpoint(
            type(self).forward,
            self,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            **options,
            **kwargs,
        )

    return forward


def _recomputing(plain: Forward, contexts: Callable[[], Contexts] | None) -> Forward:
    """The same around a `forward` that one layer alone has."""
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)

    return forward


def _context_factory(settings: TrainSection) -> Callable[[], Contexts] | None:
    if settings.gradient_checkpointing != "selective":
        return None
    # by its name: a compiler would take a number that differs from call to call for a variable
    return partial(_selective_contexts, settings.selective_keep)


_KEEP_EVERY = {"matmuls": 1, "half_matmuls": 2, "attention": 0}


def _selective_contexts(keep: SelectiveKeep) -> Contexts:
    """One pair per call of a layer: products are counted from the layer's first, in forward and in recomputation."""
    keep_every = _KEEP_EVERY[keep]
    num_products = {False: 0, True: 0}

    def policy(
        context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if is_attention(operator):
            return CheckpointPolicy.MUST_SAVE
        if is_matmul(operator):
            num_products[context.is_recompute] += 1
            # of a Llama layer's q k v o gate up down, every second keeps k, o and up: an o kept spares the residual
            # in front of the MLP, and down's result is needed by no gradient of its own layer
            if keep_every and num_products[context.is_recompute] % keep_every == 0:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Contexts = create_selective_checkpoint_contexts(policy)
    return contexts


def is_matmul(operator: Any) -> bool:
    """Whether an operator of the dispatcher is a product with a weight matrix."""
    return isinstance(operator, torch._ops.OpOverload) and operator._schema.name.split("::")[1] in _MATMULS


def is_attention(operator: Any) -> bool:
    """Whether an operator computes attention: PyTorch's own, flex_attention, or a custom one such as
    `paceline::attention`."""
    if isinstance(operator, torch._ops.HigherOrderOperator):
        return "attention" in operator.name()
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    namespace, name = operator._schema.name.split("::")
    return namespace in _ATTENTION_NAMESPACES or any(word in name for word in _ATTENTION_WORDS)
