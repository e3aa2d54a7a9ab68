"""The server's figures in the OpenMetrics text format."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from paceline.serve.engine_loop import EngineLoop


@dataclass(slots=True)
class ServeCounters:
    """Answers by HTTP status, and choices in progress."""

    answers: Counter[int] = field(default_factory=Counter)
    in_flight: int = 0

    def count(self, status: int) -> None:
        """Notes an answer."""
        self.answers[status] += 1

    @contextmanager
    def holding(self, num_choices: int) -> Iterator[None]:
        """Choices in progress inside."""
        self.in_flight += num_choices
        try:
            yield
        finally:
            self.in_flight -= num_choices


def metrics_text(loop: EngineLoop, counters: ServeCounters, num_sessions: int, num_forgotten: int) -> str:
    """All figures; counters are totals since the server began."""
    counts = loop.counts
    lines = ["# TYPE paceline_serve_answers counter"]
    lines += [
        f'paceline_serve_answers_total{{status="{status}"}} {number}'
        for status, number in sorted(counters.answers.items())
    ]
    for name, value in (
        ("requests", counts.num_requests),
        ("finished_samples", counts.num_finished_samples),
        ("generated_tokens", counts.num_generated_tokens),
        ("prompt_tokens", counts.num_prompt_tokens),
        ("cancelled_requests", counts.num_cancelled),
        ("engine_errors", counts.num_engine_errors),
        ("forgotten_sessions", num_forgotten),
    ):
        lines += [f"# TYPE paceline_serve_{name} counter", f"paceline_serve_{name}_total {value}"]
    for name, value in (
        ("active_requests", loop.num_active),
        ("choices_in_flight", counters.in_flight),
        ("sessions", num_sessions),
        ("weight_version", loop.weight_version),
    ):
        lines += [f"# TYPE paceline_serve_{name} gauge", f"paceline_serve_{name} {value}"]
    return "\n".join([*lines, "# EOF", ""])
