"""Prompts to samples: one protocol, and the engines behind it."""

from paceline.rollout.native.engine import NativeEngine
from paceline.rollout.native.paged import PagedEngine
from paceline.rollout.protocol import (
    RolloutEngine,
    RolloutRequest,
    RolloutStats,
    SampleEvent,
    SamplingParams,
    StreamingEngine,
)

__all__ = [
    "NativeEngine",
    "PagedEngine",
    "RolloutEngine",
    "RolloutRequest",
    "RolloutStats",
    "SampleEvent",
    "SamplingParams",
    "StreamingEngine",
]
