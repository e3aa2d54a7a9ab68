"""Before anything is trained: does the loaded model give the same log-probs packed as one by one?

The reference is the model's own forward pass with transformers' own attention and its own logits, so the probe also
catches what a family does outside attention (scaled logits, a state along the row, positions it ignores).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.batching.prefixes import PackItem, build_pack
from paceline.model.attention import ATTENTION_NAME
from paceline.model.families import UnsupportedModelError
from paceline.model.inputs import packed_inputs, score
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
    vocabulary = model.module.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocabulary, (length,), generator=generator).tolist())

    header = draw(16)
    items = [PackItem(header + draw(3), (draw(4), draw(7))), PackItem(header + draw(5), (draw(5),))]
    differences = []
    for share in (True, False):
        pack = build_pack(items, share_prefixes=share)
        packed, _ = score(
            model, packed_inputs(pack, model.device), HeadSettings(1.0, model.logit_softcap, 64)
        )
        order = list(zip(pack.item_index.tolist(), pack.response_index.tolist(), strict=True))
        differences.append((packed - _one_by_one(model, items, order)).abs())
    difference = torch.cat(differences)
    result = ProbeResult(float(difference.mean()), float(difference.max()))
    if not result.mean_difference <= _TOLERANCE[model.dtype]:
        raise UnsupportedModelError(
            str(model.module.config.name_or_path),
            f"{model.family.model_type}: packed log-probs differ from one-by-one evaluation by "
            f"{result.mean_difference:.3g} nats on average, so packing would silently change the loss; "
            "this family cannot be trained here",
        )
    return result


def _one_by_one(model: CausalModel, items: list[PackItem], order: list[tuple[int, int]]) -> Tensor:
    """Log-probs from the module's stock forward pass, in the order of the pack's response tokens."""
    module = model.module
    found: list[Tensor] = []
    module.set_attn_implementation("eager")
    try:
        for item_index, response_index in dict.fromkeys(order):
            prompt, response = items[item_index].prompt, items[item_index].responses[response_index]
            ids = torch.tensor([[*prompt, *response]], device=model.device)
            logits = module(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            log_p = logits.log_softmax(-1)
            found.append(log_p.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1))
    finally:
        module.set_attn_implementation(ATTENTION_NAME)
    return torch.cat(found)
