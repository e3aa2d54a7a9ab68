"""A rollout's samples divided over the ranks, and brought together again on all of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.rollout import RolloutRequest
from paceline.types import Group, Sample, Verdict

Scored = tuple[Sample, Verdict]


@dataclass(frozen=True, slots=True)
class Part:
    """Some samples of a group: `request` asks for those from `first_sample` on."""

    first_sample: int
    request: RolloutRequest

    def own(self, sample: Sample) -> Sample:
        """A sample of this part under its number in the whole group."""
        if not self.first_sample:
            return sample
        return replace(sample, sample_index=self.first_sample + sample.sample_index)


def own_parts(requests: Sequence[RolloutRequest], num_ranks: int, rank: int) -> list[Part]:
    """What `rank` samples: a run of all samples in their order, as many as any other rank has, or one more or fewer.

    A group is cut only where two ranks meet in it; each of them then computes its prompt. Together the ranks have
    every sample once, and seeds stay with the samples.
    """
    num_samples = sum(len(request.seeds) for request in requests)
    begin, end = num_samples * rank // num_ranks, num_samples * (rank + 1) // num_ranks
    parts = []
    position = 0
    for request in requests:
        first, last = max(begin - position, 0), min(end - position, len(request.seeds))
        if first < last:
            parts.append(Part(first, replace(request, seeds=request.seeds[first:last])))
        position += len(request.seeds)
    return parts


def into_groups(requests: Sequence[RolloutRequest], scored: Iterable[Scored]) -> list[Group]:
    """One group per request from everybody's samples, in the order of ranks."""
    remaining: Iterator[Scored] = iter(scored)
    groups = []
    for request in requests:
        members = [next(remaining) for _ in request.seeds]
        samples, verdicts = (tuple(column) for column in zip(*members, strict=True))
        groups.append(Group(request.prompt, samples, verdicts))
    return groups
