"""Prompts to samples: one protocol, and the engines behind it."""

from paceline.rollout.native.engine import NativeEngine
from paceline.rollout.protocol import RolloutEngine, RolloutRequest, RolloutStats, SamplingParams

__all__ = ["NativeEngine", "RolloutEngine", "RolloutRequest", "RolloutStats", "SamplingParams"]
