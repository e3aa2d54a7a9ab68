"""Several sources, one reward: jobs go to every source, and a sample's score is the weighted sum of theirs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

from paceline.rewards.pool import PendingScore, aborted_verdict
from paceline.types import Group, RewardJob, Verdict


class RewardSource(Protocol):
    """What scores jobs, each a future. `RewardPool` is one; it may be used from one thread."""

    def submit(self, job: RewardJob) -> PendingScore:
        """Takes one job and returns at once."""
        ...

    def flush(self) -> None:
        """No more jobs for now: what waits for a fuller batch is scored. Ranks that share a source all call it."""
        ...

    def take_counts(self) -> Mapping[str, int]:
        """What was counted since the last call, by the last part of its metric's name (`reward/<source>/...`)."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...


@dataclass(frozen=True, slots=True)
class Weighting:
    """How a source enters the sum; see `weight` and `optional` in the config's section `reward`."""

    weight: float = 1.0
    optional: bool = False


PendingParts = Mapping[str, PendingScore]
"""What `SourcedRewards.submit` returns: a future by source; hand it to `gather`."""


class SourcedRewards:
    """The sources of a run by name, under the interface of one `RewardPool`."""

    def __init__(self, weightings: Mapping[str, Weighting], sources: Mapping[str, RewardSource]) -> None:
        """`sources` may be filled up until the first job is submitted."""
        self._weightings, self._sources = weightings, dict(sources)

    def add(self, name: str, source: RewardSource) -> None:
        """One more of the sources that `weightings` names."""
        self._sources[name] = source

    def submit(self, job: RewardJob) -> PendingParts:
        """Hands one job to every source and returns at once."""
        missing = self._weightings.keys() - self._sources.keys()
        if missing:
            raise RuntimeError(f"reward sources {sorted(missing)} were never opened")
        return {name: self._sources[name].submit(job) for name in self._weightings}

    def aborted(self) -> Verdict:
        """The verdict of a sample that is not whole and so was submitted to no source."""
        verdict = aborted_verdict()
        return replace(verdict, parts=dict.fromkeys(self._weightings, verdict))

    def flush(self) -> None:
        """Every source scores what it has; those that ask others come first, so that they work meanwhile."""
        for source in self._sources.values():
            source.flush()

    def gather(self, pending: Sequence[PendingParts]) -> list[Verdict]:
        """Verdicts in order, each sample by itself; call `flush` before, and `compare` once groups are complete."""
        parts = [{name: handle.result() for name, handle in one.items()} for one in pending]
        return [combine([one], self._weightings)[0][0] for one in parts]

    def compare(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with verdicts that samples of one prompt can be compared by; see `combine`."""
        combined = [combine(_parts_of(group), self._weightings)[0] for group in groups]
        return [replace(group, verdicts=tuple(found)) for group, found in zip(groups, combined, strict=True)]

    def left_out(self, groups: Sequence[Group]) -> dict[str, int]:
        """Scores of every optional source that `compare` leaves out."""
        total = sum((combine(_parts_of(group), self._weightings)[1] for group in groups), Counter())
        return {name: total[name] for name, weighting in self._weightings.items() if weighting.optional}

    def score(self, jobs: Sequence[RewardJob]) -> list[Verdict]:
        """One verdict per job, in order, each sample by itself."""
        pending = [self.submit(job) for job in jobs]
        self.flush()
        return self.gather(pending)

    def take_counts(self) -> dict[str, int]:
        """What this rank's sources counted since the last call, by metric name."""
        return {
            f"reward/{name}/{key}": count
            for name, source in self._sources.items()
            for key, count in source.take_counts().items()
        }

    def close(self) -> None:
        """Closes every source, whatever one of them raises."""
        with ExitStack() as stack:
            for source in self._sources.values():
                stack.callback(source.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _parts_of(group: Group) -> list[Mapping[str, Verdict]]:
    return [verdict.parts or {} for verdict in group.verdicts]


def combine(
    parts: Sequence[Mapping[str, Verdict]], weightings: Mapping[str, Weighting]
) -> tuple[list[Verdict], Counter[str]]:
    """Verdicts of the samples of one prompt from those of their sources, and how many scores were left out, by source.

    A sample that a source failed to score has no verdict, unless the source is optional. An optional source that fails
    for one sample is left out for all samples of the prompt: a sum with one term fewer is another measure, and the
    sample would be better or worse than its siblings for a reason that is none of its own.
    """
    required = [name for name, weighting in weightings.items() if not weighting.optional]
    scored = [one for one in parts if all(one[name].score is not None for name in required)]
    used = [
        name
        for name, weighting in weightings.items()
        if not weighting.optional or all(one[name].score is not None for one in scored)
    ]
    left_out = Counter(
        name for name in weightings.keys() - set(used) for one in scored if one[name].score is not None
    )
    return [_combined(one, required, used, weightings) for one in parts], left_out


def _combined(
    parts: Mapping[str, Verdict],
    required: Sequence[str],
    used: Sequence[str],
    weightings: Mapping[str, Weighting],
) -> Verdict:
    seconds = sum(verdict.seconds for verdict in parts.values())
    failed = [name for name in required if parts[name].score is None]
    if failed:
        # an error outranks a timeout: it says that something is broken, and not only slow
        worst = min(failed, key=lambda name: parts[name].outcome != "error")
        return Verdict(parts[worst].outcome, None, seconds, f"{worst}: {parts[worst].message}", parts)
    scores = {name: score for name in used if (score := parts[name].score) is not None}
    score = sum(weightings[name].weight * value for name, value in scores.items())
    notes = [f"{name}: {v.message}" for name, v in parts.items() if v.score is None]
    return Verdict("score", float(score), seconds, "; ".join(notes), parts)
