"""Save and resume over state dicts, and the signals that ask for a save."""

from paceline.checkpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NonFiniteStateError,
)
from paceline.checkpoint.export import export_hf, replaced_folder
from paceline.checkpoint.signals import StopRequest
from paceline.checkpoint.store import CheckpointStore, Found
from paceline.checkpoint.stored import Loaded

__all__ = [
    "CheckpointError",
    "CheckpointStore",
    "CorruptCheckpointError",
    "Found",
    "Loaded",
    "NonFiniteStateError",
    "StopRequest",
    "export_hf",
    "replaced_folder",
]
