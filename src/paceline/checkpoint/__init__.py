"""Save and resume over state dicts."""

from paceline.checkpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NonFiniteStateError,
)
from paceline.checkpoint.export import export_hf, replaced_folder
from paceline.checkpoint.pieces import Held, Piece
from paceline.checkpoint.store import CheckpointStore, Found
from paceline.checkpoint.stored import Loaded

__all__ = [
    "CheckpointError",
    "CheckpointStore",
    "CorruptCheckpointError",
    "Found",
    "Held",
    "Loaded",
    "NonFiniteStateError",
    "Piece",
    "export_hf",
    "replaced_folder",
]
