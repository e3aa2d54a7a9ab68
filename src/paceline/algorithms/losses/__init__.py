"""Policy losses by the name `algorithm.loss` gives them: one loss, one file."""

from paceline.algorithms.losses.cispo import cispo_loss
from paceline.algorithms.losses.clip import clip_loss
from paceline.algorithms.losses.gspo import gspo_loss
from paceline.algorithms.losses.inputs import LossInputs, LossTerms, PolicyLoss

LOSSES: dict[str, PolicyLoss] = {"clip": clip_loss, "gspo": gspo_loss, "cispo": cispo_loss}

SEQUENCE_LOSSES = frozenset({"gspo"})
"""Losses that look at a sample as a whole; the others need no token but their own."""

__all__ = ["LOSSES", "SEQUENCE_LOSSES", "LossInputs", "LossTerms", "PolicyLoss"]
