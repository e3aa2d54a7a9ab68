"""What can be wrong with a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded; the message names the path and the reason."""


class NonFiniteStateError(CheckpointError):
    """The state holds NaN or infinity. It is not saved, so that the last good checkpoint stays."""


class CorruptCheckpointError(CheckpointError):
    """A file is missing, shorter or other than what the completion marker recorded."""
