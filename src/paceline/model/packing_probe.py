"""Before anything is trained: does the loaded model give the same log-probs packed as one by one?

The reference is the model's own forward pass with transformers' own attention and its own logits, so the probe also
catches what a family does outside attention (scaled logits, a state along the row, positions it ignores).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.batching.prefixes import PackItem, build_pack
from paceline.config.errors import ConfigError
from paceline.model.families import UnsupportedModelError
from paceline.model.fused.layers import stock_layers
from paceline.model.inputs import ModelInputs, packed_inputs, score
from paceline.model.loading import CausalModel
from paceline.model.logprob_head import HeadSettings

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Mean difference in nats that is still rounding; a leaking neighbour or a wrong position moves it by whole nats."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Mean and largest absolute difference of log-probs, in nats."""

    mean_difference: float
    max_difference: float


@torch.no_grad()
def probe_packing(model: CausalModel) -> ProbeResult:
    """Compares two packed groups with shared prefixes against one-by-one evaluation.

    Raises:
        UnsupportedModelError: they differ by more than rounding.
    """
    settings = HeadSettings(1.0, model.logit_softcap, 64)

    def stock_logprobs(ids_1T: Tensor, num_prompt: int) -> Tensor:
        logits = model.module(input_ids=ids_1T, use_cache=False).logits[0, num_prompt - 1 : -1].float()
        return logits.log_softmax(-1).gather(-1, ids_1T[0, num_prompt:, None]).squeeze(-1)

    difference = _differences(model, lambda inputs: score(model, inputs, settings)[0], stock_logprobs)
    result = ProbeResult(float(difference.mean()), float(difference.max()))
    if not result.mean_difference <= _TOLERANCE[model.dtype]:
        raise UnsupportedModelError(
            str(model.module.config.name_or_path),
            f"{model.family.model_type}: packed log-probs differ from one-by-one evaluation by "
            f"{result.mean_difference:.3g} nats on average, so packing would silently change the loss; "
            "this family cannot be trained here",
        )
    return result


@torch.no_grad()
def probe_value_packing(model: CausalModel, key: str = "critic.path") -> None:
    """The same for a model without log-probs: last hidden states, in units of their own size.

    Not values: those of a new head are all 0, however wrong the states are. `key` is the setting a refusal names.

    Raises:
        ConfigError: they differ by more than rounding.
    """

    def hidden(inputs: ModelInputs) -> Tensor:
        hidden_TE = model.hidden(inputs.input_ids_BT, inputs.position_ids_BT, inputs.plan)
        return hidden_TE[inputs.source_R].float()

    def stock_hidden(ids_1T: Tensor, num_prompt: int) -> Tensor:
        output = model.module.base_model(input_ids=ids_1T, use_cache=False)
        stock_RE: Tensor = output.last_hidden_state[0, num_prompt - 1 : -1].float()
        sizes.append(stock_RE.abs().mean())
        return stock_RE

    sizes: list[Tensor] = []
    difference = float(_differences(model, hidden, stock_hidden).mean() / torch.stack(sizes).mean())
    if not difference <= _TOLERANCE[model.dtype]:
        raise ConfigError(
            key,
            str(model.module.config.name_or_path),
            f"{model.family.model_type}: packed hidden states differ from one-by-one evaluation by {difference:.3g} of "
            "their size on average, so packing would silently change the values; this family cannot be trained here",
        )


def _differences(
    model: CausalModel,
    packed: Callable[[ModelInputs], Tensor],
    stock: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """|packed - stock| at the response tokens of two groups, with shared prefixes and without."""
    vocabulary = model.module.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocabulary, (length,), generator=generator).tolist())

    header = draw(16)
    items = [PackItem(header + draw(3), (draw(4), draw(7))), PackItem(header + draw(5), (draw(5),))]
    differences = []
    for share in (True, False):
        pack = build_pack(items, share_prefixes=share)
        order = list(zip(pack.item_index.tolist(), pack.response_index.tolist(), strict=True))
        found = packed(packed_inputs(pack, model.device))
        differences.append((found - _one_by_one(model, items, order, stock)).abs())
    return torch.cat(differences)


def _one_by_one(
    model: CausalModel,
    items: list[PackItem],
    order: list[tuple[int, int]],
    stock: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """What the stock forward pass (no plan, no fused layer) gives, in the order of the pack's response tokens."""
    module = model.module
    found: list[Tensor] = []
    usual = module.config._attn_implementation
    module.set_attn_implementation("eager")
    try:
        with stock_layers(list(module.base_model.modules())):
            for item_index, response_index in dict.fromkeys(order):
                prompt, response = items[item_index].prompt, items[item_index].responses[response_index]
                found.append(stock(torch.tensor([[*prompt, *response]], device=model.device), len(prompt)))
    finally:
        module.set_attn_implementation(usual)
    return torch.cat(found)
