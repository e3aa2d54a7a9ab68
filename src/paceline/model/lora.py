"""Low-rank adapters (LoRA, Hu et al. 2021) through PEFT: only they are trained, and the base model is the reference.

PEFT replaces a linear layer W by W x + (alpha / rank) * B (A x) *in place*, so the module stays the Hugging Face module
it was: `base_model`, the output embedding and the attention registry go on working, and trainer, scorer and rollout
engine share the adapters as they share the weights. B starts at zero: an untrained adapter changes nothing.

Shapes: N outputs and K inputs of a linear layer, R rank.
"""

import difflib
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.config.errors import ConfigError
from paceline.config.schema import LoraSection
from paceline.model.attention import AttentionPlan
from paceline.model.loading import CausalModel

ADAPTER_NAME = "default"
"""PEFT's name for the one adapter; it is part of parameter names in a run and left out of an exported adapter."""

_PEFT_PREFIX = "base_model.model."
"""What PEFT's own files put before a parameter's name."""


@dataclass(frozen=True, slots=True)
class AdaptedModel(CausalModel):
    """A model whose adapters are the only trainable parameters."""

    peft_config: Any

    @property
    def layers(self) -> tuple[tuple[str, Any], ...]:
        """PEFT's layers by their name in the module, looked up in it: a sharded model has a second module."""
        kind = _lora_layer_type()
        return tuple((name, layer) for name, layer in self.module.named_modules() if isinstance(layer, kind))

    def without_adapters(self) -> CausalModel:
        """The base model on the same parameters: a reference model that takes no memory of its own.

        With weights sharded over ranks, ask the sharded model: its calls gather them.
        """
        common = {field.name: getattr(self, field.name) for field in fields(CausalModel)}
        return _BaseModel(**common, layers=tuple(layer for _, layer in self.layers))

    def merged_state_dict(self) -> dict[str, Tensor]:
        """The module's weights with the adapters added in, under the names of the model without adapters.

        Sums are formed in float32 and rounded once to the working dtype; a difference below its spacing is lost there,
        and only the adapter file keeps it.
        """
        adapted = dict(self.layers)
        merged: dict[str, Tensor] = {}
        for name, tensor in self.module.state_dict().items():
            owner, _, rest = name.partition(".base_layer.")
            if rest == "weight":
                merged[f"{owner}.weight"] = _merged_weight(adapted[owner])
            elif rest:
                merged[f"{owner}.{rest}"] = tensor
            elif ".lora_" not in name:
                merged[name] = tensor
        return merged

    def adapter_state_dict(self) -> dict[str, Tensor]:
        """The adapters alone under the names PEFT's own files use."""
        return {
            _PEFT_PREFIX + name.replace(f".{ADAPTER_NAME}.", "."): parameter.detach()
            for name, parameter in self.module.named_parameters()
            if ".lora_" in name
        }


@dataclass(frozen=True, slots=True)
class _BaseModel(CausalModel):
    """An adapted model seen without its adapters."""

    layers: tuple[Any, ...]

    def hidden(self, input_ids_BT: Tensor, position_ids_BT: Tensor, plan: AttentionPlan) -> Tensor:
        """See `CausalModel.hidden`. Raises `RuntimeError` when a gradient is asked for."""
        if torch.is_grad_enabled():
            raise RuntimeError("a model without its adapters is a reference: it is scored, never trained")
        with _adapters_off(self.layers):
            return CausalModel.hidden(self, input_ids_BT, position_ids_BT, plan)


def add_adapters(model: CausalModel, settings: LoraSection, path: str, seed: int) -> AdaptedModel:
    """Puts adapters into the linear layers of `model` and freezes everything else.

    A is drawn uniformly within 1 / sqrt(K) from `seed`, layer by layer on the host, so that every rank and device
    starts from the same adapter; B is zero. `path` names the base model in an exported adapter.

    Raises:
        ConfigError: PEFT is not installed, or a target module is not in the model.
    """
    peft = _import_peft(settings)
    targets = _target_modules(model.module, settings.target_modules)
    peft_config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.scaled_alpha,
        lora_dropout=0.0,
        target_modules=list(targets),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
        inference_mode=False,
    )
    peft.inject_adapter_in_model(peft_config, model.module, adapter_name=ADAPTER_NAME)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.module.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if ".lora_A." in name:
            _draw(parameter, generator)
    common = {field.name: getattr(model, field.name) for field in fields(CausalModel)}
    adapted = AdaptedModel(**common, peft_config=peft_config)
    for _, layer in adapted.layers:
        layer.forward = _AdaptedForward(layer)
    return adapted


def save_adapter(model: AdaptedModel, folder: Path) -> None:
    """Writes the adapter alone in PEFT's format (adapter_config.json, adapter_model.safetensors) into `folder`."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in model.adapter_state_dict().items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config.save_pretrained(folder)


@torch.no_grad()
def _merged_weight(layer: Any) -> Tensor:
    weight_NK: Tensor = layer.get_base_layer().weight
    a_RK: Tensor = layer.lora_A[ADAPTER_NAME].weight
    b_NR: Tensor = layer.lora_B[ADAPTER_NAME].weight
    merged_NK = weight_NK.float() + layer.scaling[ADAPTER_NAME] * (b_NR.float() @ a_RK.float())
    return merged_NK.to(weight_NK.dtype)


@torch.no_grad()
def _draw(a_RK: nn.Parameter, generator: torch.Generator) -> None:
    bound = a_RK.shape[1] ** -0.5
    a_RK.copy_(torch.empty(a_RK.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator))


class _AdaptedForward:
    """Forward of one adapted layer: what PEFT's computes for a single adapter without dropout, in one addition and
    without its bookkeeping, which costs a decoding step as much host time as the products themselves.

    Its parts are called as modules, because sharding and tensor parallelism hook into them.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, inputs: Tensor) -> Tensor:
        layer = self._layer
        base: Tensor = layer.base_layer(inputs)
        if layer.disable_adapters:
            return base
        low_rank = layer.lora_B[ADAPTER_NAME](layer.lora_A[ADAPTER_NAME](inputs))
        return torch.add(base, low_rank, alpha=layer.scaling[ADAPTER_NAME])


@contextmanager
def _adapters_off(layers: Sequence[Any]) -> Iterator[None]:
    # PEFT's public switch (`enable_adapters`) also turns requires_grad off and on again. A sharded parameter that is
    # gathered for the first time in between would stay without a gradient for good, so only the flag is set.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _target_modules(module: PreTrainedModel, wanted: Sequence[str]) -> tuple[str, ...]:
    """The last parts of the names of the linear layers to adapt: those asked for, or all of the model's body."""
    body = {
        name.rpartition(".")[2]
        for name, layer in module.base_model.named_modules()
        if isinstance(layer, nn.Linear)
    }
    if not wanted:
        return tuple(sorted(body))
    for name in wanted:
        if name not in body:
            close = difflib.get_close_matches(name, body, n=1, cutoff=0.0)
            raise ConfigError(
                "lora.target_modules",
                name,
                f"the model has no linear layer of this name; it has {', '.join(sorted(body))}",
                close[0] if close else None,
            )
    return tuple(wanted)


def _lora_layer_type() -> type:
    layer_type: type = importlib.import_module("peft.tuners.lora").LoraLayer
    return layer_type


def _import_peft(settings: LoraSection) -> Any:
    """PEFT, imported when a run needs it: it is an optional package and takes a second to load."""
    try:
        peft = importlib.import_module("peft")
        importlib.import_module("peft.tuners.lora")
    except ImportError as error:
        rule = f"needs the package peft, which cannot be imported ({error}): pip install 'paceline[lora]'"
        raise ConfigError("lora.rank", settings.rank, rule, "0") from error
    return peft
