"""A live step's cells: the ledger's spans partition the step exactly, and what they wait for decides idle time."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.telemetry.causes.live import runs_after, split_live_step
from paceline.telemetry.causes.records import UNACCOUNTED
from paceline.telemetry.causes.torch_trace import Event, TorchTrace
from paceline.telemetry.causes.windows import self_times
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.sections import ClosedSpan
from paceline.types import CAUSES, STAGES

GEMM, ADD = "sm90_xmma_gemm_bf16", "void at::native::vectorized_elementwise_kernel<4>"
MS = 1_000_000


class Clock:
    """Nanoseconds that go on when told to, or by a random amount at every look."""

    def __init__(self, seed: int | None = None) -> None:
        self.now = 1_000
        self._random = None if seed is None else random.Random(seed)

    def __call__(self) -> int:
        if self._random is not None:
            self.now += self._random.choice((0, 0, 1, 7, 1000))
        return self.now


def trace_of(kernels: list[Event], origin_s: float = 0.0) -> TorchTrace:
    moved = [Event(one.name, one.start + origin_s, one.end + origin_s) for one in kernels]
    return TorchTrace(Path("t"), 0, 1, "NVIDIA H200", 0, kernels=moved)


def open_spans(ledger: Ledger, shape: random.Random, depth: int) -> None:
    for _ in range(shape.randint(0, 3)):
        cause = shape.choice((None, *CAUSES))
        with ledger.span(shape.choice(STAGES), cause=cause, absorb=shape.random() < 0.2):
            if depth < 4:
                open_spans(ledger, shape, depth + 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_self_times_are_those_of_the_ledger_to_the_nanosecond(seed: int) -> None:
    ledger = Ledger(clock_ns=Clock(seed))
    spans: list[ClosedSpan] = []
    with ledger.step(1, spans):
        open_spans(ledger, random.Random(seed), 0)
    section = ledger.last_section
    assert section is not None
    stretches = self_times(spans, section.start_ns, section.start_ns + section.wall_ns)
    assert sum(one.end_ns - one.start_ns for one in stretches) == section.wall_ns
    for stage, self_ns in {**section.stage_ns, UNACCOUNTED: section.unaccounted_ns}.items():
        assert sum(one.end_ns - one.start_ns for one in stretches if one.stage == stage) == self_ns


def test_all_spans_are_watched_and_not_only_those_that_are_kept() -> None:
    ledger = Ledger(clock_ns=Clock(1))
    spans: list[ClosedSpan] = []
    with ledger.step(1, spans):
        for _ in range(12_000):
            with ledger.span("rollout", "decode"):
                pass
    assert len(spans) == 12_000


def planted_step() -> tuple[Ledger, list[ClosedSpan]]:
    """10 ms data, 40 rollout of which 10 wait in an exchange, 20 reward, 30 update_actor, 5 in no span."""
    clock = Clock()
    ledger, spans = Ledger(clock_ns=clock), []
    with ledger.step(1, spans):
        with ledger.span("data", cause="data"):
            clock.now += 10 * MS
        with ledger.span("rollout"):
            clock.now += 30 * MS
            with ledger.span("rollout", "exchange", cause="communication"):
                clock.now += 10 * MS
        with ledger.span("reward", cause="queue"):
            clock.now += 20 * MS
        with ledger.span("update_actor"):
            clock.now += 30 * MS
        clock.now += 5 * MS
    return ledger, spans


def test_idle_time_is_what_its_span_waits_for() -> None:
    ledger, spans = planted_step()
    section = ledger.last_section
    assert section is not None
    kernels = [
        Event(GEMM, -0.005, 0.002),  # of the step before: 2 ms of it are in this one
        Event(GEMM, 0.012, 0.020),
        Event(ADD, 0.018, 0.025),
        Event(GEMM, 0.055, 0.058),  # runs while the host waits for rewards
        Event("secret_kernel", 0.075, 0.085),
        Event(GEMM, 0.104, 0.120),  # goes on after the step
    ]
    origin_s = 5_126_618.25
    stretches = self_times(spans, section.start_ns, section.start_ns + section.wall_ns)
    found = split_live_step(trace_of(kernels, origin_s), stretches, 1, "device", origin_s, 0.5)
    cells = {
        stage: {cause: round(s * 1000, 3) for cause, s in own.items() if s > 1e-7}
        for stage, own in found.cells.items()
    }
    assert cells == {
        "data": {"compute": 2, "data": 8},
        "rollout": {"compute": 8, "memory": 5, "communication": 10, "scheduling": 17},
        "reward": {"compute": 3, "queue": 17},
        "update_actor": {"compute": 10, "scheduling": 20},
        "unaccounted": {"compute": 1, "scheduling": 4},
    }
    assert [kernel.name for kernel in found.unknown_kernels()] == ["secret_kernel"]
    assert found.seconds == pytest.approx(section.wall_s, rel=1e-9)


def test_a_rank_that_waits_for_others_in_a_collective_waits_and_exchanges_nothing() -> None:
    clock = Clock()
    ledger, spans = Ledger(clock_ns=clock), []
    with ledger.step(1, spans):
        with ledger.span("idle", "for gradients", cause="queue"):
            clock.now += 20 * MS
        with ledger.span("idle", "exchange metrics", cause="communication"):
            clock.now += 10 * MS
    section = ledger.last_section
    assert section is not None
    stretches = self_times(spans, section.start_ns, section.start_ns + section.wall_ns)
    collectives = [Event("gloo:barrier", 0.001, 0.019), Event("gloo:gather", 0.021, 0.029)]
    trace = replace(trace_of([]), operators=collectives)
    found = split_live_step(trace, stretches, 1, "operators", 0.0)
    assert found.cells["idle"]["queue"] == pytest.approx(0.020)
    assert found.cells["idle"]["communication"] == pytest.approx(0.010)
    assert found.seconds == pytest.approx(section.wall_s)


def test_a_device_that_did_nothing_was_idle() -> None:
    ledger, spans = planted_step()
    section = ledger.last_section
    assert section is not None
    stretches = self_times(spans, section.start_ns, section.start_ns + section.wall_ns)
    found = split_live_step(trace_of([]), stretches, 1, "device", 0.0)
    assert found.cells["update_actor"]["scheduling"] == pytest.approx(0.030)
    assert found.seconds == pytest.approx(section.wall_s)


def test_a_trace_that_ends_before_the_step_is_told_by_the_kernel_after_it() -> None:
    trace = trace_of([Event(GEMM, 0.0, 0.010)])
    assert not runs_after(trace, 0.105)
    trace.kernels.append(Event(ADD, 0.106, 0.107))
    assert runs_after(trace, 0.105)
