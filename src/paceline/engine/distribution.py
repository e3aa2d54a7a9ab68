"""Which samples each data rank computes. Pure, and the same on every rank, because every rank has all samples."""

import math
from collections.abc import Sequence

from paceline.batching.cost import CostModel
from paceline.batching.ranks import balance_costs
from paceline.engine.samples import TokenPair, group_by_prompt, num_tokens

Shares = tuple[tuple[int, ...], ...]


def distribute(
    samples: Sequence[TokenPair], num_ranks: int, cost: CostModel, *, share_prefixes: bool
) -> Shares:
    """Indices of each rank's samples, balanced by what they cost to compute.

    Where prompts are shared, whole groups are kept together if that does not make the costliest rank costlier than
    samples divided one by one: a group on two ranks has its prompt computed twice.
    """
    if num_ranks == 1:
        return (tuple(range(len(samples))),)
    alone = [cost.cost(num_tokens(sample)) for sample in samples]
    singly = balance_costs(alone, num_ranks)
    if not share_prefixes:
        return singly
    groups = group_by_prompt(samples)
    by_group = balance_costs([_shared_cost(samples, group, cost) for group in groups], num_ranks)
    together = tuple(tuple(sorted(i for group in share for i in groups[group])) for share in by_group)
    options = (together, singly)  # the first of equals
    return min(options, key=lambda shares: _heaviest(samples, shares, cost))


def _heaviest(samples: Sequence[TokenPair], shares: Shares, cost: CostModel) -> float:
    """Cost of the costliest share, each prompt once within it."""
    return max(_share_cost(samples, share, cost) for share in shares)


def _share_cost(samples: Sequence[TokenPair], share: Sequence[int], cost: CostModel) -> float:
    groups = group_by_prompt([samples[index] for index in share])
    return math.fsum(_shared_cost(samples, [share[member] for member in group], cost) for group in groups)


def _shared_cost(samples: Sequence[TokenPair], group: Sequence[int], cost: CostModel) -> float:
    """Cost of samples of one prompt that is computed once."""
    prompt = len(samples[group[0]].prompt_ids)
    return cost.cost(prompt) + math.fsum(
        cost.cost(len(samples[index].response_ids), prompt) for index in group
    )
