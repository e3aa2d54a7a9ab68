"""What of the trained model goes into engines with a copy of the weights, and the proof that they use it."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.batching.prefixes import PackItem, build_pack
from paceline.model.inputs import packed_inputs, score
from paceline.model.loading import CausalModel
from paceline.model.logprob_head import HeadSettings
from paceline.model.lora import AdaptedModel
from paceline.rollout.protocol import RolloutEngine
from paceline.sync import WeightSyncError

_PROBE = (11, 7, 5, 3, 13, 17, 23, 19, 29, 31, 37, 41, 2, 43, 47, 53)
_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.2, torch.float16: 0.1}
"""Mean difference in nats of an engine's log-probs on the probe: rounding is far below, other weights far above."""


class CopyEngine(RolloutEngine, Protocol):
    """A rollout engine with a copy of the weights."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `StreamingEngine.load_weights`."""
        ...

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Log-probs of prompts, where the engine can say."""
        ...


def published_weights(model: CausalModel) -> list[tuple[str, Tensor]]:
    """Parameters under the names of the model's own checkpoint, adapters merged in; tied ones once."""
    if not isinstance(model, AdaptedModel):
        return list(model.module.named_parameters())
    own = {
        name.replace(".base_layer.", ".")
        for name, _ in model.module.named_parameters()
        if ".lora_" not in name
    }
    return [(name, tensor) for name, tensor in model.merged_state_dict().items() if name in own]


@torch.no_grad()
def verify_logprobs(engine: CopyEngine, model: CausalModel) -> None:
    """Compares log-probs of a fixed probe, the engine's with the trainer's.

    Raises:
        WeightSyncError: they differ by more than rounding: the engine computes with other weights than it was given.
    """
    vocabulary = model.head_weight_VE.shape[0]
    tokens = tuple(token % vocabulary for token in _PROBE)
    found = engine.score([tokens])
    if found is None:
        return
    pack = build_pack([PackItem(tokens[:1], (tokens[1:],))], share_prefixes=False)
    head = HeadSettings(1.0, model.logit_softcap, len(tokens))
    expected_R, _ = score(model, packed_inputs(pack, model.device), head)
    difference = float((expected_R.cpu() - torch.tensor(found[0])).abs().mean())
    if not difference <= _TOLERANCE[model.dtype]:
        raise WeightSyncError(
            f"after loading, the rollout engine's log-probs of a probe differ from the trainer's by {difference:.3g} "
            "nats on average: it does not compute with the weights it was given"
        )
