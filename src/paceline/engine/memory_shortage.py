"""What an update does when memory runs out: everything it added is dropped, and it starts over with a smaller budget.

A mini-batch's update does not depend on how its samples are cut into micro-batches, so a second attempt gives the
same update. Between attempts nothing is left of the first: no gradient, no metric.

With several ranks a rank that runs out of memory cannot be retried: it has left the collectives in the middle, where
the others wait for it. The run then ends with an error that names the switches; what prevents it beforehand is a
budget from the estimate and a probe (`batch.token_budget: auto`).
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.config.schema import TrainSection
from paceline.engine.samples import TokenPair, num_tokens

_SHRINK = 0.75


class OutOfMemoryForSampleError(RuntimeError):
    """Memory ran out over a micro-batch that cannot be made smaller; the message names settings that need less."""


@dataclass(slots=True)
class TokenBudget:
    """Tokens of a micro-batch in force; falls when memory runs short and never rises by itself."""

    tokens: int

    def shrink(self, largest_slots: int, samples: Sequence[TokenPair], train: TrainSection) -> None:
        """Takes three quarters of the micro-batch that did not fit, yet at least the longest sample.

        Raises:
            OutOfMemoryForSampleError: that micro-batch was no larger than the longest sample.
        """
        longest = max(num_tokens(sample) for sample in samples)
        smaller = max(longest, int(_SHRINK * min(largest_slots, self.tokens)))
        if smaller >= min(largest_slots, self.tokens):
            raise OutOfMemoryForSampleError(
                f"memory ran out over one sample of {longest} tokens, and no budget below batch.token_budget = "
                f"{self.tokens} holds it; settings that need less: {', '.join(lighter_settings(train))}"
            )
        self.tokens = smaller


def lighter_settings(train: TrainSection) -> list[str]:
    """Settings that need less memory than these, cheapest in time first."""
    found = []
    if train.gradient_checkpointing == "none":
        found.append("train.gradient_checkpointing: selective")
    if train.gradient_checkpointing != "all":
        found.append("train.gradient_checkpointing: all")
    if not train.optimizer_offload:
        found.append("train.optimizer_offload: true")
    if not train.activation_offload:
        found.append("train.activation_offload: true")
    return [
        *found,
        "a smaller train.logprob_chunk, rollout.max_new_tokens or model.max_context",
        "more devices",
    ]


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device's or the host's allocator gave up; torch has no type of its own for the host's."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def give_back_memory(device: torch.device) -> None:
    """Frees what only dropped frames and graphs held, and the allocator's cached blocks."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
