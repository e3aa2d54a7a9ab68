"""What a schedule sees of whoever plays its episodes."""

from collections.abc import Sequence
from typing import Protocol

from paceline.agents.counts import AgentCounts
from paceline.rollout.protocol import OnSample, RolloutRequest, SamplingParams
from paceline.types import Sample


class EpisodePlayer(Protocol):
    """Plays whole batches of episodes. `counts` are those of the last `generate`."""

    counts: AgentCounts

    def generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, on_sample: OnSample | None = None
    ) -> list[tuple[Sample, ...]]:
        """One episode per seed, by request and in order of the seeds."""
        ...

    def close(self) -> None:
        """Ends what it started."""
        ...
