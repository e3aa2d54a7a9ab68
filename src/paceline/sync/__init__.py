"""Weights from the trainer to the rollout engine, and the proof that they arrived."""

from paceline.sync.copies import CopySync
from paceline.sync.fingerprint import fingerprint
from paceline.sync.gathered import GatheredSync
from paceline.sync.versions import InProcessSync, WeightSyncError

__all__ = ["CopySync", "GatheredSync", "InProcessSync", "WeightSyncError", "fingerprint"]
