"""How far an engine's log-probs are from the trainer's scoring of the same tokens."""

from collections.abc import Sequence

import torch

from paceline.batching.prefixes import PackItem, build_pack
from paceline.model.inputs import packed_inputs, score
from paceline.model.loading import CausalModel
from paceline.model.logprob_head import HeadSettings
from paceline.rollout import RolloutRequest
from paceline.types import Sample

_QUANTILES = (0.5, 0.9, 0.99, 0.999)


@torch.no_grad()
def logprob_differences(
    model: CausalModel,
    requests: Sequence[RolloutRequest],
    groups: Sequence[Sequence[Sample]],
    temperature: float,
) -> dict[str, float | int | bool]:
    """|trainer's log-prob - sampled log-prob| in nats over all tokens: mean, quantiles, largest, and the share
    of tokens that are the same bits. Each request is scored by itself, every sample as a sequence of its own."""
    head = HeadSettings(temperature, model.logit_softcap, 1024, exact=model.is_exact)
    found = []
    for request, group in zip(requests, groups, strict=True):
        item = PackItem(request.prompt.token_ids, tuple(sample.token_ids for sample in group))
        inputs = packed_inputs(build_pack([item], share_prefixes=False), model.device)
        scored_R = score(model, inputs, head)[0]
        sampled_R = torch.tensor([lp for sample in group for lp in sample.logprobs], dtype=torch.float32)
        found.append((scored_R.cpu() - sampled_R).abs())
    difference_R = torch.cat(found)
    quantiles = difference_R.quantile(torch.tensor(_QUANTILES)).tolist()
    return {
        "num_tokens": len(difference_R),
        "mean": float(difference_R.mean()),
        **{f"p{100 * q:g}": value for q, value in zip(_QUANTILES, quantiles, strict=True)},
        "max": float(difference_R.max()),
        "share_of_equal_bits": float((difference_R == 0.0).float().mean()),
    }
